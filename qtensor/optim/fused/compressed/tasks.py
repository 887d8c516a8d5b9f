"""What the step of a weight with compressed states reads and writes, or why it takes the general way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import local_of
from qtensor.optim.compressed.masters import words_of
from qtensor.optim.compressed.places import pieces_of_shard
from qtensor.optim.fused import FUSED_ON
from qtensor.optim.fused.compressed.decision import Form, cut_of, form_of, refuse_state, weight_form
from qtensor.optim.fused.compressed.table import Addresses
from qtensor.optim.fused.facts import PLAIN, STEP
from qtensor.optim.fused.table import ALIGNED
from qtensor.optim.fused.tasks import gradient_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.lens import OWN
from qtensor.spec.registry import format_of
from qtensor.states.kinds import ROOT
from qtensor.states.moments import RECIPE
from qtensor.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor.optim.compressed.storage import Storage

MOMENTS = {"float8": ("exp_avg", "exp_avg_sq" + ROOT), "fp32": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Kind:
    """What a launch is made for: tasks of one kind share it."""

    device: torch.device
    form: Form
    grads: torch.dtype
    aligned: bool


@dataclass(frozen=True)
class Task:
    """The step of one shard.

    Attributes:
        param: the parameter.
        kind: of its launch.
        addresses: what the kernel reads and writes.
        programs: how many it takes.
        grad: where its gradient begins.
        taken: how many steps it has taken.
        behind: whether it writes parts, and so waits until ranks have agreed.
    """

    param: Tensor
    kind: Kind
    addresses: Addresses
    programs: int
    grad: int
    taken: Tensor
    behind: bool


def task_of(  # noqa: PLR0911 - a reason each
    param: Tensor, remainder: Tensor | None, state: Mapping[str, Any], storage: "Storage"
) -> Task | str:
    """Return what this step reads and writes, or why it takes the general way.

    Args:
        param: has a gradient.
        remainder: of its master; None: the master is kept in fp32.
        state: what the inner optimizer keeps of the master.
        storage: what states are kept in.
    """
    shard, how = local_of(param), storage.moment_of(param)
    if shard.device.type not in FUSED_ON:
        return f"it is on {shard.device.type}"
    if how not in MOMENTS:
        return f"its moments are kept in {how}"
    weight = _weight_of(shard, remainder)
    if isinstance(weight, str):
        return weight
    name, stored = weight
    if why := refuse_state(state, MOMENTS[how]):
        return why
    moments = _moments_of(state, how, shard)
    if isinstance(moments, str):
        return moments
    grad = gradient_of(param, param, shard)
    if isinstance(grad, str):
        return grad
    cut = cut_of(param.shape, pieces_of_shard(param))
    if isinstance(cut, str):
        return cut
    left = None if remainder is None else words_of(remainder)
    held = [*stored, left, *moments]
    for each in held:
        if each is not None and (not each.is_contiguous() or each.data_ptr() % ALIGNED):
            return f"what it is kept in is not contiguous, or begins between {ALIGNED} bytes"
    addresses = Addresses(tuple(0 if each is None else each.data_ptr() for each in held), cut)
    form = form_of(name, how, cut, drawn=storage.rounding == "stochastic")
    kind = Kind(shard.device, form, grad.dtype, grad.data_ptr() % ALIGNED == 0)
    programs = form.programs(cut.rows, cut.length)
    return Task(param, kind, addresses, programs, grad.data_ptr(), state[STEP], isinstance(shard, QuantizedTensor))


def _weight_of(  # noqa: PLR0911 - a reason each
    shard: Tensor, remainder: Tensor | None
) -> tuple[str, tuple[Tensor, Tensor | None]] | str:
    """Return what a weight is, and (payload or dense values, scales); or why it takes the general way."""
    if isinstance(shard, QuantizedTensor):
        if remainder is None:
            return "its master is kept in fp32"
        if why := weight_form(format_of(shard.recipe).by_hand(shard.recipe)):
            return why
        if shard._lens != OWN or shard._sharding.shards is not None:
            return "it is a view"
        if shard._preserved.value is not None:
            return "it keeps its initial value"
        if shard._partners is not None:
            return "it shares scales"
        return "mxfp8", (shard.payload, shard.scale)
    dense: Any = shard.dense if type(shard) is HighPrecisionWeight else shard
    if type(dense) not in PLAIN or dense.layout is not torch.strided:
        return f"it is a {type(shard).__qualname__}"
    if remainder is None:
        return ("own", (dense, None)) if dense.dtype == torch.float32 else "its master is kept in fp32"
    return ("dense", (dense, None)) if dense.dtype == torch.bfloat16 else f"it is {dense.dtype}"


def _moments_of(state: Mapping[str, Any], how: str, shard: Tensor) -> tuple[Tensor, ...] | str:
    """Return (first, its scales, second, its scales), None for scales that there are not; or what is wrong."""
    step = state[STEP]
    if type(step) is not Tensor or step.dtype != torch.float32 or step.ndim:
        return "its state has no step that counts in fp32"
    found: list[Any] = []
    for name in MOMENTS[how]:
        own = local_of(state[name]) if isinstance(state[name], Tensor) else state[name]
        if not isinstance(own, Tensor) or own.shape != shard.shape or own.device != shard.device:
            return "its state has another shape or device than it has"
        if how == "fp32":
            if type(own) not in PLAIN or own.dtype != torch.float32:
                return f"its state is a {type(own).__qualname__} of {own.dtype}"
            found += own, None
        else:
            if not isinstance(own, QuantizedTensor) or own.recipe != RECIPE or own._lens != OWN:
                return "its moments are kept in another form"
            found += own.payload, own.scale
    return tuple(found)
