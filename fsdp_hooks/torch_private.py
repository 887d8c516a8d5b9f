"""The private torch names that this project cannot do without, and undocumented behaviour it relies on, in one place.

Each has its reason beside it, and `tests/test_torch_private.py` fails when upstream moves one of them. Those of DCP
are in `dcp_adapters/torch_private.py`; no other module of the packages may import a torch name that starts with an
underscore.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
from torch.optim import optimizer as optimizers
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Callback = TypeVar("Callback", bound=Callable[..., Any])

__all__ = [
    "SizeOfBytes",
    "TorchDispatchMode",
    "apply_to_tensors",
    "asking_package",
    "below_autograd",
    "calling_fsdp_param",
    "compute_local_shape_and_global_offset",
    "constant_in_graphs",
    "cpu_by_default",
    "dtensor_around",
    "dtensor_like",
    "foreach_add",
    "foreach_copy",
    "group_size",
    "grouped_mm",
    "has_step_hooks",
    "hook_tables",
    "is_described",
    "is_fake",
    "is_tracing",
    "is_watched",
    "is_zero_tensor",
    "local_of",
    "locals_of",
    "make_wrapper",
    "mark_rows_dynamic",
    "mixed_precision",
    "named_locals_of",
    "note_shard_rows",
    "one_dispatch_state",
    "redistributed_for",
    "reshards_to_fewer",
    "root_mesh",
    "set_padded_size",
    "shard_rows",
    "traced_inputs",
    "tree_map",
    "without_torch_function",
    "written_by",
]

# Planners must know which rows of a part a rank holds before any tensor is touched.
assert callable(dtensor_utils.compute_local_shape_and_global_offset)

# An op's arguments can be nested lists and dicts; torch has no public function to walk them.
assert callable(tree_map)

# FSDP walks arguments and outputs with it when it casts them; public ways walk other containers.
assert callable(apply_to_tensors)

# Tracers that AOTAutograd's own entry points start tell nobody: only their tensors, which have no values, can be known.
assert callable(is_fake)

# Sees every operation before it runs, collectives among them. torch documents it, in a module with an underscore.
assert callable(TorchDispatchMode)

# Copies many small tensors in one call. torch documents its _foreach_ functions, despite the underscore.
foreach_copy = torch._foreach_copy_

# Counts the steps of many parameters in one call, by the function that torch's optimizers count with.
foreach_add = torch._foreach_add_

# What torch.nn.functional.grouped_mm calls, and so what __torch_function__ is asked for, which never sees that name.
grouped_mm = torch._grouped_mm

# torch documents this as the way to turn __torch_function__ off; its public twin wraps plain results in the subclass.
without_torch_function = torch._C.DisableTorchFunctionSubclass


def is_tracing() -> bool:
    """Return whether torch.compile or torch.export works in this thread: traces, describes tensors, runs fake ones.

    torch.compiler.is_compiling() cannot tell: from torch 2.13 on it is True in all threads while one of them compiles;
    before that, it is False in eager code that a tracer calls.
    """
    return (
        torch.compiler.is_dynamo_compiling()  # True in traced code only
        or TracingContext.try_get() is not None
        or torch.compiler.is_exporting()
    )


def is_described() -> bool:
    """Return whether the method that asks this was called by torch as it describes a tensor, to make a fake one of it.

    torch.export.export(strict=False) describes a model's weights before it enters any state that `is_tracing` could
    see, so we look at the name of the calling module.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


# who calls DTensor's redistribution for values: torch's state dicts, and operations that want operands placed otherwise
FOR_VALUES = (
    "torch.distributed._state_dict_utils",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor._dispatch",
)


def redistributed_for() -> str | None:
    """Return what DTensor redistributes a tensor for, in this thread: "copy", "other", or None if it does not.

    A copy of the values is what full_tensor(), torch's full state dicts and operations (std(), say) want. No collective
    says so: we look for who called.
    """
    frame: FrameType | None = sys._getframe(1)
    found: str | None = None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code is DTensor.full_tensor.__code__ or (found and module in FOR_VALUES):
            return "copy"
        found = "other" if module == redistribute_local_tensor.__module__ else found
        frame = frame.f_back
    return found


def asking_package() -> str:
    """Return the package of the code that called a method, from two calls inside of it, as that method asks."""
    name: str = sys._getframe(3).f_globals.get("__name__", "")
    return name.partition(".")[0]


def traced_inputs() -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that dynamo has taken into the trace of this thread, with the expression it comes from.

    Of all that torch keeps of a trace, this alone has the tensors as they are: whoever computes the key of a graph, for
    one of torch's caches on disk, is within the trace, and asks only the outermost tensor.

    torch._inductor.standalone_compile, which compiles pieces of a graph, begins a trace of its own, where dynamo takes
    no tensors. There the fake tensors made for the trace are yielded, with their numbers.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    taken = list(context.tensor_to_context.items())
    for tensor, symbolic in taken:
        yield symbolic.tensor_source.name, tensor
    if not taken and context.fake_mode is not None:
        for number, fake in list(context.fake_mode.fake_tensor_converter.tensor_memo.items()):
            yield f"{number}", fake


def constant_in_graphs(fn: Callback) -> Callback:
    """Return a decorator: dynamo calls `fn` while it traces, and takes what it returns for a constant.

    It does what torch.compiler.assume_constant_result does, which imports dynamo: seconds, and changes to the process
    that nobody expects of an import.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def is_watched() -> bool:
    """Return whether a mode (a flop counter, selective checkpointing) or torch.func sees every operation.

    Under a TorchDispatchMode or torch.func, torch.compile gives up and marks the function as never to be compiled
    again. It traces a TorchFunctionMode along with the function, and fails if that does logging, for example. Modes
    that only set the default device (`torch.device` as a context, torch.set_default_device) do not matter.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    modes = torch._C._len_torch_function_stack()
    return modes > 0 and any(
        not isinstance(torch._C._get_function_stack_at(mode), DeviceContext) for mode in range(modes)
    )


def is_zero_tensor(tensor: Tensor) -> bool:
    """Return whether it is one of torch's zeros without memory, which forward-mode differentiation makes tangents of.

    torch has no public function that tells. Reading the memory of one reads address 0.
    """
    return tensor._is_zerotensor()


def mark_rows_dynamic(tensor: Tensor) -> None:
    """Have torch.compile(dynamic=None) make the size of dim 0 a variable; it takes other sizes as constants.

    torch documents the function, despite the underscore; with no mark, code for each first number of rows is compiled
    before code for all. It does not raise if the size turns out to be a constant, for a single row say.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


# Inside nothing that is computed has a history or a base, and no write is counted. torch's public no_grad makes views
# that refuse to be written in place, and takes ten times as long.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


@contextmanager
def one_dispatch_state(device_type: str) -> Iterator[None]:
    """Enter one state for operations on plain tensors, wherever called: no autograd, view tracking or autocast.

    Dynamo guards on all of these, and would compile a function again for each: calls from within __torch_dispatch__,
    from outside, under autocast, in inference mode. Most of them have no public switch. __torch_function__ is turned
    on: dynamo guards on it, too, the compiler of torch 2.11 relies on it, and plain tensors do not have one.
    """
    autocast = torch.is_autocast_enabled(device_type)
    with (
        torch.no_grad(),
        torch._C._EnableTorchFunction(),
        below_autograd(),
        torch.autocast(device_type, enabled=False) if autocast else nullcontext(),
    ):
        yield


def cpu_by_default() -> AbstractContextManager[Any]:
    """Make the CPU the default device inside, for code that makes small tensors without naming a device.

    Such code is torch's planning of checkpoints, and safetensors. A device context slows down everything inside, even
    reading attributes of tensors, so it is entered only if another device is the default.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def compute_local_shape_and_global_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the function of this name in torch, made independent of the default device."""
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
    """Return a tensor of class `cls` with a shape, strides (None: contiguous), dtype and device, but no data.

    There is no public constructor for wrapper subclasses. A storage_offset must never be given: the wrapper has no
    storage.
    """
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), strides=strides, dtype=dtype, device=device)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, outside autograd's graph, or the tensor itself; never an alias.

    `to_local()` of a parameter makes a new view each time, marked as a parameter. For a tensor of parts this takes
    longer than anything else that an optimizer step does to a small weight. A plain parameter is returned as the leaf
    it is: compute with it, and write it, in no_grad.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `local_of` each."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def named_locals_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """`local_of` for all tensors among these values, by name."""
    return {name: local_of(value) for name, value in values.items() if isinstance(value, Tensor)}


def dtensor_around(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return a DTensor of global `shape` whose local tensor is `local` itself, whatever its device.

    `DTensor.from_local` moves the local tensor to the mesh's device, which would send a staged CPU copy back to the
    GPU.
    """
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, dtype=local.dtype, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor around `local`, whatever its device, with the mesh, placements, shape and dtype of `like`.

    Like `dtensor_around`, but it shares the spec of `like`. That saves describing the global tensor again, and keeps
    the order of shards, which placements alone do not determine.
    """
    return DTensor(local, like._spec, requires_grad=False)


_SHARD_ROWS = "_fsdp_shard_rows"


def note_shard_rows(weight: Tensor, rows: int) -> None:
    """Note into how many rows a rank FSDP2 cuts a weight: those of `weight.new_zeros`, which it calls to pad a shard.

    fully_shard(reshard_after_forward=<int>) cuts the same tensor once more, for a smaller mesh. No other call on the
    tensor reveals that option.
    """
    vars(weight)[_SHARD_ROWS] = rows


def shard_rows(weight: Tensor) -> int | None:
    """Return what `note_shard_rows` noted; None if FSDP2 has not cut the weight."""
    return vars(weight).get(_SHARD_ROWS)


def calling_fsdp_param() -> Any:
    """Return FSDP2's record (FSDPParam) of the parameter whose `fsdp_pre_all_gather` runs in this thread.

    The hook is not told, and no public way leads from a shard, or from its module, to the record.

    Raises:
        NotImplementedError: FSDP2 does not call from a method of one.
    """
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    kind = getattr(module, "FSDPParam", ())
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            if hasattr(found, "padded_sharded_param_size"):
                return found
            break
        frame = frame.f_back  # type: ignore[assignment]
    raise NotImplementedError(
        f"quantized stacks [E, N, K] with shard_placement_fn returning Shard(1): FSDP2 of torch {torch.__version__} "
        "gathers in a way that this version does not know; shard them on dim 0"
    )


def reshards_to_fewer(param: Any) -> bool:
    """Return whether it was sharded with reshard_after_forward=<int>, by FSDP2's record of a parameter."""
    after = param.post_forward_mesh_info
    return after is not None and after.shard_mesh_size != param.mesh_info.shard_mesh_size


class SizeOfBytes:
    """The size of a shard that is cut along `dim`, listed as [1, .., bytes], of dim + 1 entries; see row_pieces.py.

    FSDP2 lays out what it gathered of Shard(dim > 0) by the list of the padded shard's size, which it keeps in its
    record of the parameter. It compares shards with it, too, whenever some are loaded or moved.
    """

    def __init__(self, size: torch.Size, dim: int, nbytes: int) -> None:
        self._size, self._dim, self._bytes = size, dim, nbytes

    def __iter__(self) -> Iterator[int]:
        return iter((*[1] * self._dim, self._bytes))

    def __eq__(self, other: object) -> bool:
        return other == self._size

    def __hash__(self) -> int:
        return hash(self._size)

    def numel(self) -> int:
        """Return how many elements the shard has."""
        return self._size.numel()


def set_padded_size(param: Any, size: "torch.Size | SizeOfBytes") -> None:
    """Set what FSDP2 takes for the size of a padded shard, in its record of a parameter."""
    param.padded_sharded_param_size = size


_HOOK_TABLES = (
    "forward_pre_hooks",
    "forward_pre_hooks_with_kwargs",
    "forward_hooks",
    "forward_hooks_with_kwargs",
    "forward_hooks_always_called",
)


def hook_tables(module: nn.Module) -> dict[str, MutableMapping[int, Any]]:
    """Return the registries themselves (no copies) of a module's forward hooks, by name without the underscore.

    torch lets callers register hooks and remove their own, but not list them. Calibration calls layers with all hooks
    but FSDP's, and removes those that a model registers while its layers are away. A table `.._with_kwargs` has the
    keys of the hooks that take keyword arguments.
    """
    return {name: vars(module)[f"_{name}"] for name in _HOOK_TABLES}


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run around an optimizer's steps: its own, or those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks)


def mixed_precision(module: Any) -> Any:
    """Return the MixedPrecisionPolicy of an FSDP module.

    Calibration calls a layer many times on weights that it holds, so without FSDP's hooks, and casts in their place.
    FSDP has no public way to read the policy.
    """
    return module._get_fsdp_state()._mp_policy


def managed(module: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield owner and attribute of each parameter that the `fully_shard` call of this FSDP module shards.

    Parameters that it was told to ignore look the same: DTensors below an FSDP module. FSDP has no public way to tell.
    """
    state = module._get_fsdp_state()
    # before torch 2.13 a call made one group at most
    groups = getattr(state, "_fsdp_param_groups", None) or [group for group in [state._fsdp_param_group] if group]
    for group in groups:
        for param in group.fsdp_params:
            info = param._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def group_size(module: Any) -> int:
    """Return how many modules were given to the `fully_shard` call of this FSDP module.

    Before torch 2.13 the group's first module casts inputs, its last one casts outputs, and the others cast nothing.
    FSDP has no public way to tell which modules share a call.
    """
    return len(module._get_fsdp_state()._modules)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, or itself; torch has no public way up from a slice."""
    return mesh._get_root_mesh()


def written_by(func: Any) -> list[bool]:
    """Return for each positional argument of an op whether the op may write into it.

    Only the op's schema tells, and torch has no public way to it. The schemas of collectives do not say it.
    """
    return [argument.is_write or func.namespace == "c10d" for argument in func._schema.arguments]
