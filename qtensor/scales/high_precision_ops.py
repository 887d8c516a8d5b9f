"""What operations mean to a weight with storage="high_precision": by their names alone, see high_precision.py."""

from typing import Any

import torch

from fsdp_hooks.torch_private import is_tracing, redistributed_for
from qtensor.spec.registry import describe

aten = torch.ops.aten

# Ops whose results FSDP2, DTensor and nn.Module treat as the weight itself, or a part of it. Any other op gives the
# plain result that it has for the dense tensor.
KEEPS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.clone.default,
        aten._to_copy.default,
        aten._pin_memory.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_zeros.default,
    }
)
ALIASES = frozenset({aten.detach.default, aten.alias.default})
# The ops of `KEEPS` whose result keeps the padded row count, and the agreement.
SAME_ROWS = frozenset({*ALIASES, aten._to_copy.default, aten._pin_memory.default, aten.clone.default})
# DTensor gathers shards by these; it pads short ones first.
GATHERS = frozenset({aten.constant_pad_nd.default, torch.ops._c10d_functional.all_gather_into_tensor.default})  # noqa: SLF001 - DTensor's namespace
# DTensor begins a product with the weight by these. They give the quantized weight, as F.linear uses it.
TRANSPOSES = frozenset({aten.t.default, aten.transpose.int})
RESHAPES_IN_PLACE = frozenset(
    {aten.t_.default, aten.transpose_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.unsqueeze_.default}
    | {aten.resize_.default, aten.as_strided_.default, aten.set_.source_Tensor}
)


def sends_parts(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op is a gather of a shard for a product, which must see quantized values.

    In a graph it is. In eager code `full_tensor()`, state dicts and DTensor's own operations gather copies of the
    values. What another gather is for nobody can tell, and dense values in a product would be those of a weight that is
    not quantized.

    Raises:
        NotImplementedError: for another gather.
    """
    if func not in GATHERS:
        return False
    wanted = redistributed_for()
    # others pad, too, and what they do with it is no business of ours
    if func is aten.constant_pad_nd.default and wanted is None:
        return False
    if is_tracing():
        return True
    if wanted == "copy":
        return False
    shard = args[0]
    raise NotImplementedError(
        f"gathering a shard of {describe(shard.shape, shard.recipe)} with storage='high_precision' by "
        "DTensor.redistribute would send dense values, and a product with them would not be quantized. For a product: "
        "compile the module that gathers (torch.compile(fullgraph=True)), or use fully_shard or storage='quantized'. "
        "For a copy of the values: call .full_tensor()"
    )
