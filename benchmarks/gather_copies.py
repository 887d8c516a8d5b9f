"""Who writes how many bytes while FSDP2 gathers, and what the collectives move: counted at every torch operation.

An operation writes what it allocates and fills, and the arguments that its schema marks as written; views and
allocations write nothing. One all-gather needs two writes of each byte, both FSDP2's: from the shards into one buffer
for the collective, and from its result into the gathered parameters. Anything else written during `unshard()` is a copy
that the all-gather hooks make or, for dense shards, their quantization.
"""

import collections
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPY_IN, COPY_OUT = "fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy"  # FSDP2's own
ALL_GATHER, REDUCE_SCATTER = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
COLLECTIVES = frozenset({"c10d", "_c10d_functional"})


class Written(TorchDispatchMode):
    """Counts inside its block, on plain tensors, including the inner tensors of subclasses.

    Attributes:
        written: bytes, by the operation that wrote them.
        sent: bytes that this rank gave to collectives, by the collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: collections.Counter[str] = collections.Counter()
        self.sent: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls not in (Tensor, nn.Parameter) for cls in types):
            return NotImplemented  # a subclass handles it first; its operations on plain tensors come here again
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if func.namespace in COLLECTIVES:
            self.sent[name] += _given(name, args)
        elif name == COPY_IN:  # its schema marks nothing as written; the first result is what it fills
            self.written[name] += out[0].nbytes
        elif func.overloadpacket.__name__ not in ALLOCATES and (count := _bytes_written(func, args, kwargs, out)):
            self.written[name] += count
        return out

    def by_hooks(self) -> dict[str, int]:
        """Bytes by operation, without FSDP2's own copies."""
        return {name: count for name, count in sorted(self.written.items()) if name not in (COPY_IN, COPY_OUT)}


def gather_writes(module: FSDPModule) -> Written:
    """What is written in one `unshard()` of one FSDP group, which is sharded before and after."""
    with Written() as counter:
        module.unshard()
    module.reshard()
    return counter


def pad_shards(root: nn.Module, past: nn.Module) -> None:
    """Let FSDP2 prepare all groups as a first forward does, uneven shards padded, without gathering other groups.

    `past` is a module of the root's own group, the only one that this forward goes through.
    """
    weight = next(past.parameters())
    root.forward = past.forward  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            root(torch.zeros(1, weight.shape[-1], dtype=weight.dtype))
    finally:
        del root.forward
    root.reshard()  # type: ignore[operator] # an FSDPModule


def _given(name: str, args: Any) -> int:
    """Bytes of a collective's input on this rank."""
    if name in (ALL_GATHER, REDUCE_SCATTER):
        return int(args[1].nbytes)  # output, input
    return sum(leaf.nbytes for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor))


def _bytes_written(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    count = 0
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no public name for a schema
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            count += sum(leaf.nbytes for leaf in _tensors(value))
    given = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
    return count + sum(leaf.nbytes for leaf in _tensors(out) if leaf.untyped_storage().data_ptr() not in given)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type != "meta"]


def per_byte(counter: Written) -> dict[str, float]:
    """Writes of each byte given to the all-gather: FSDP2's copy-in, its copy-out (per gathered byte), the hooks'."""
    given, ranks = counter.sent[ALL_GATHER], torch.distributed.get_world_size()
    return {
        "copy_in": round(counter.written[COPY_IN] / given, 4),
        "copy_out": round(counter.written[COPY_OUT] / (ranks * given), 4),
        "hooks": round(sum(counter.by_hooks().values()) / given, 4),
    }
