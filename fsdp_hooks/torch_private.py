"""The private torch names this project cannot do without, in one place, and what it relies on without a promise.

Each has its reason beside it, and `tests/test_torch_private.py` fails when upstream moves one of them. Those of DCP
stand in `dcp_adapters/torch_private.py`; nothing else in the packages may import a torch name that starts with an
underscore.
"""

import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map

__all__ = [
    "compute_local_shape_and_global_offset",
    "cpu_by_default",
    "dtensor_around",
    "dtensor_like",
    "foreach_copy",
    "hook_tables",
    "is_described",
    "is_tracing",
    "is_watched",
    "local_of",
    "make_wrapper",
    "note_shard_rows",
    "one_dispatch_state",
    "shard_rows",
    "tree_map",
    "without_torch_function",
]

# Planners must know which rows of a part a rank holds before any tensor is touched.
assert callable(dtensor_utils.compute_local_shape_and_global_offset)

# Arguments of an op nest lists and dicts; torch has no public name for walking them.
assert callable(tree_map)

# Copies many small tensors by one call. torch documents its _foreach_ functions, in spite of their names.
foreach_copy = torch._foreach_copy_

# Documented by torch as the way to leave __torch_function__; its public twin wraps plain results in the subclass again.
without_torch_function = torch._C.DisableTorchFunctionSubclass


def is_tracing() -> bool:
    """Whether torch.compile or torch.export is at work in this thread: tracing, describing tensors, running fake ones.

    torch.compiler.is_compiling() is not what tells: from torch 2.13 on it is True to all threads while one compiles;
    before, it is False to eager code that a tracer calls.
    """
    return (
        torch.compiler.is_dynamo_compiling()  # True in traced code only
        or TracingContext.try_get() is not None
        or torch.compiler.is_exporting()
    )


def is_described() -> bool:
    """Whether torch, about to make a fake tensor, called the method that asks this.

    torch.export.export(strict=False) describes a model's weights before it enters any state that `is_tracing` could
    see. Only the caller tells.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


def is_watched() -> bool:
    """Whether a mode (a flop counter, selective checkpointing) or torch.func sees every operation.

    torch.compile gives up under a TorchDispatchMode or torch.func, and marks the function as one never to be compiled
    again. A TorchFunctionMode it traces into the function, and fails where that logs, say; those that only say on which
    device tensors are made (`torch.device` as a context, torch.set_default_device) do not matter.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


@contextmanager
def one_dispatch_state(device_type: str) -> Iterator[None]:
    """One state for operations on plain tensors, wherever they are called: no autograd, views or autocast.

    Dynamo guards on all of these, and would compile a function anew for calls from within __torch_dispatch__, from
    outside, under autocast, in inference mode. Most of them have no public switch. __torch_function__ is one more of
    them, and on: the compiler of torch 2.11 relies on it, and plain tensors have none.
    """
    autocast = torch.is_autocast_enabled(device_type)
    with (
        torch.no_grad(),
        torch._C._EnableTorchFunction(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
        torch.autocast(device_type, enabled=False) if autocast else nullcontext(),
    ):
        yield


def cpu_by_default() -> AbstractContextManager[Any]:
    """Inside, the CPU is the default device, for code that counts with tensors and names none.

    That is torch's planning of checkpoints, and safetensors. A device context slows down all that is inside, attributes
    of tensors too, so there is none without need.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def compute_local_shape_and_global_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """torch's, whatever the default device."""
    with cpu_by_default():
        return dtensor_utils.compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)


def make_wrapper(
    cls: type[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    strides: Sequence[int] | None = None,
) -> Any:
    """A tensor of class `cls` that has a shape, strides (None: contiguous), dtype and device, but no data of its own.

    There is no public constructor for wrapper subclasses. A storage_offset must never be given: the wrapper has no
    storage.
    """
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), strides=strides, dtype=dtype, device=device)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself: no alias of it, and without a place in autograd's graph.

    `to_local()` of a parameter is another view of it each time, marked as a parameter. To make one of a tensor of parts
    takes longer than anything else that an optimizer step does to a small weight. A plain parameter is returned as the
    leaf it is: compute with it, and write it, in no_grad.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dtensor_around(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A DTensor of global `shape` whose local tensor is `local` itself, on whatever device that lives.

    `DTensor.from_local` moves the local tensor to the mesh's device, which would send a staged CPU copy back to the
    GPU.
    """
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, dtype=local.dtype, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor around `local`, on whatever device that lives, with the mesh, placements, shape and dtype of `like`.

    `dtensor_around` for when a DTensor of that layout is at hand: its spec is shared, which saves describing the global
    tensor anew and keeps an order of shards that placements alone do not tell.
    """
    return DTensor(local, like._spec, requires_grad=False)


_SHARD_ROWS = "_fsdp_shard_rows"


def note_shard_rows(weight: Tensor, rows: int) -> None:
    """Keep into how many rows a rank FSDP2 cuts a weight: those of `weight.new_zeros`, by which it pads its shard.

    fully_shard(reshard_after_forward=<int>) cuts the very same tensor once more, for a smaller mesh. Nothing else of
    the calls that a tensor sees tells that option.
    """
    vars(weight)[_SHARD_ROWS] = rows


def shard_rows(weight: Tensor) -> int | None:
    """What `note_shard_rows` kept; None where FSDP2 has not cut the weight."""
    return vars(weight).get(_SHARD_ROWS)


_HOOK_TABLES = (
    "forward_pre_hooks",
    "forward_pre_hooks_with_kwargs",
    "forward_hooks",
    "forward_hooks_with_kwargs",
    "forward_hooks_always_called",
)


def hook_tables(module: nn.Module) -> dict[str, MutableMapping[int, Any]]:
    """The registries of a module's own forward hooks, live, by name without the underscore.

    Hooks can be registered, and removed by whoever registered them, but not listed. Calibration calls layers with all
    hooks but FSDP's, and takes back those that a model registers while its layers are away. A table
    `.._with_kwargs` has the keys of the hooks that take keyword arguments.
    """
    return {name: vars(module)[f"_{name}"] for name in _HOOK_TABLES}
