"""What operations mean to a weight with storage="high_precision": by their names alone, see high_precision.py."""

import torch

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
# DTensor begins a product with the weight by these. They give the quantized weight, as F.linear uses it.
TRANSPOSES = frozenset({aten.t.default, aten.transpose.int})
RESHAPES_IN_PLACE = frozenset(
    {aten.t_.default, aten.transpose_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.unsqueeze_.default}
    | {aten.resize_.default, aten.as_strided_.default, aten.set_.source_Tensor}
)
