"""What a parameter's step reads and writes, or why it takes the general way: facts of tensors, for decision.py.

What is returned is kept for the steps in which these facts are the same: whatever is read here, facts.py reads too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.scale_sync import cuts_of
from fsdp_hooks.torch_private import is_zero_tensor, local_of
from qtensor.numerics import kernels
from qtensor.optim.fused import FUSED_ON
from qtensor.optim.fused.decision import GRADS, Output, Rule, dense, quantized
from qtensor.optim.fused.facts import PLAIN, STEP
from qtensor.optim.fused.table import ALIGNED, Addresses
from qtensor.scales.agreement import common_along
from qtensor.scales.cut_blocks import cut_blocks_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.lens import OWN
from qtensor.spec.registry import format_of, keeps_history, tensor_wide
from qtensor.tensor.quantized_tensor import QuantizedTensor

DENSE = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kind:
    """What a launch is made for: tasks of one kind share it.

    Attributes:
        device: of the shards.
        rule: steps them.
        output: what they store of their masters.
        grads: the gradients' dtype.
        aligned: whether gradients begin where whole words do.
    """

    device: torch.device
    rule: Rule
    output: Output
    grads: torch.dtype
    aligned: bool


@dataclass(frozen=True)
class Later:
    """How parts are written under an amax that is agreed on: in a launch for each `output`."""

    output: Output
    addresses: Addresses
    programs: int


@dataclass(frozen=True)
class Task:
    """The step of one shard, on the fused way.

    Attributes:
        param: the parameter.
        kind: of its launch.
        addresses: what the kernel reads and writes.
        programs: how many it takes.
        later: the pass that writes its parts; None: the step does, or it has none.
        has_parts: whether the shard has parts.
    """

    param: Tensor
    kind: Kind
    addresses: Addresses
    programs: int
    later: Later | None
    has_parts: bool

    @property
    def behind(self) -> bool:
        """Whether the step itself writes parts, and so waits until ranks have agreed."""
        return self.has_parts and self.later is None


def output_of(param: Tensor, master: Tensor) -> Output | str:  # noqa: PLR0911 - a reason each
    """Return what a weight stores of its master, or why none of its steps takes the fused way."""
    shard, own = local_of(param), local_of(master)
    if own.device.type not in FUSED_ON:
        return f"it is on {own.device.type}"
    if type(own) not in PLAIN or own.dtype != torch.float32 or own.layout is not torch.strided:
        return f"its master is a {type(own).__qualname__} of {own.dtype}"
    if master is param:
        return dense(None, own.numel())
    if type(shard) in PLAIN or type(shard) is HighPrecisionWeight:
        if shard.dtype not in DENSE or shard.layout is not torch.strided:
            return f"it is a {type(shard).__qualname__} of {shard.dtype}"
        return dense(shard.dtype, own.numel())
    if not isinstance(shard, QuantizedTensor):
        return f"it is a {type(shard).__qualname__}"
    recipe, wide = shard.recipe, tensor_wide(shard.recipe) is not None
    if keeps_history(recipe):
        return "its scales follow a history"
    if shard._lens != OWN or shard._sharding.shards is not None or shard.shape != own.shape:
        return "it is a view"
    if cut_blocks_of(param, recipe) is not None:
        return "a shard boundary cuts its square blocks"
    if not wide and any(common_along(recipe, None, dim, shard.ndim) for dim, _ in cuts_of([param])[0]):
        return "other ranks hold pieces of its rows"
    by_row = kernels.shares_amax(recipe) and not wide
    return quantized(format_of(recipe).by_hand(recipe), shard.shape, wide=wide, by_row=by_row)


def task_of(  # noqa: PLR0911 - a reason each
    pair: tuple[Tensor, Tensor], state: Mapping[str, Any], rule: Rule, output: Output
) -> Task | str:
    """Return what this step reads and writes, or why it takes the general way.

    Args:
        pair: a parameter with a gradient, and its master; that is the parameter itself, if it is in fp32.
        state: what the inner optimizer keeps of the master.
        rule: of its group.
        output: `output_of` it.
    """
    param, master = pair
    shard, own = local_of(param), local_of(master)
    grad = gradient_of(param, master, own)
    if isinstance(grad, str):
        return grad
    if isinstance(shard, QuantizedTensor) and shard._preserved.value is not None:
        return "it keeps its initial value"
    moments = [state.get(name) for name in rule.states]
    step = state.get(STEP) if rule.counts else None
    if len(state) != len(moments) + rule.counts or any(not isinstance(each, Tensor) for each in moments):
        return f"its state is {', '.join(map(str, state))}"
    if rule.counts and (type(step) is not Tensor or step.dtype != torch.float32 or step.ndim):
        return "its state has no step that counts in fp32"
    written = [own, *(local_of(each) for each in moments if each is not None)]
    if any(each.dtype != torch.float32 or each.shape != own.shape or each.device != own.device for each in written):
        return "its state has another dtype, shape or device than its master"
    first, second = [*(each.data_ptr() for each in written[1:]), 0, 0][:2]
    outputs = (None, None, None) if master is param else _outputs_of(shard)
    if why := _unaligned([*written, *outputs[:2]]):
        return why
    out, scale, wide = (each.data_ptr() if each is not None else 0 for each in outputs)
    # a pass that finds the amax needs no blocks
    here = dense(None, own.numel()).finding_amax() if output.later else output
    columns = own.shape[-1] if own.ndim else 1
    words = (own.data_ptr(), first, second, out, scale, wide)

    def passed(by: Output) -> tuple[Addresses, int]:
        geometry = own.numel() // by.length, by.across(columns), by.length
        return Addresses(*words, *geometry), by.programs(own.numel(), columns)

    later = Later(output, *passed(output)) if output.later else None
    kind = Kind(own.device, rule, here, grad.dtype, grad.data_ptr() % ALIGNED == 0)
    return Task(param, kind, *passed(here), later, isinstance(shard, QuantizedTensor))


def gradient_of(param: Tensor, master: Tensor, own: Tensor) -> Tensor | str:
    """Return the local gradient, or why it cannot be read as it is: placed as `master`, laid out as its shard `own`."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(master, DTensor):
        if (grad.device_mesh, grad.placements) != (master.device_mesh, master.placements):
            return "its gradient is sharded otherwise"
        grad = local_of(grad)
    if type(grad) not in PLAIN or grad.layout is not torch.strided or grad.dtype not in GRADS:
        return f"its gradient is a {type(grad).__qualname__} of {grad.dtype}"
    if grad.shape != own.shape or grad.device != own.device or not grad.is_contiguous() or grad.is_neg():
        return "its gradient is laid out otherwise"
    if is_zero_tensor(grad):
        return "its gradient has no memory"
    return grad


def _outputs_of(shard: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (payload or dense values, scales of rows or blocks, scale of all values)."""
    if not isinstance(shard, QuantizedTensor):
        return (shard.dense if isinstance(shard, HighPrecisionWeight) else shard), None, None
    wide = tensor_wide(shard.recipe)
    return (
        shard.payload,
        None if wide == "scale" else shard.scale,
        None if wide is None else getattr(shard, wide),
    )


def _unaligned(tensors: Sequence[Tensor | None]) -> str:
    """Return why what is read and written whole cannot be moved in words; a gradient may begin anywhere."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            return "its master, state or parts are not contiguous"
        if tensor is not None and tensor.data_ptr() % ALIGNED:
            return f"its master, state or parts begin between {ALIGNED} bytes"
    return ""
