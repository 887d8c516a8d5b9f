"""Updates in place that rounding takes back: an average that stands still, an optimizer whose steps do nothing.

A quantized weight lies on the points of its format. An update of less than half a step between two points, written to
nearest, leaves it if it was, and the next one begins at the same place: ten thousand of them move nothing.

    arrived = <update, after - before> / <update, update>       1: all of the update, 0: nothing of it
    noise   = |after - before - update| / |update|              more than 1: it would have been better not to write

Nothing of it arrives if scales stay as they are. If a scale of few bits follows an amax that has hardly moved,
all elements are rounded anew, and the noise may be many times the update.

The update is computed in fp32, since the appearance dtype may round it away on its own. This costs several passes over
the weight, so of the writes by one op only the 1st, 2nd, 4th, 8th ... are looked at (of a list, its first quantized
member), and none once the user was told. The host does not wait for a device: what was found is read at a later write,
when it has arrived.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing
from qtensor.ops.stochastic import widen
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import describe
from qtensor.tensor.contents import decode, initial_value
from qtensor.tensor.quantized_tensor import QuantizedTensor, dequantize_all

UPDATES = ("add", "sub_", "mul_", "div_", "lerp_")  # how names of ops begin that add something to the values

NEARLY_NOTHING = 0.1  # of an update
NOISE = 2

_writes: Counter[tuple[str, Recipe]] = Counter()
_told: set[Recipe] = set()
_due: list["_Due"] = []  # on its way from a device


class Look(NamedTuple):
    """A weight before a write: its values, fp32, and what the write is to add to them."""

    q: QuantizedTensor
    op: str
    before: Tensor
    update: Tensor


class _Due(NamedTuple):
    arrived: Tensor  # bool [], on the host
    ready: torch.Event
    text: str
    recipe: Recipe


def look(func: Any, written: Sequence[Any], operands: Sequence[Any], kwargs: dict[str, Any]) -> Look | None:
    """Look before an in-place op writes to nearest; return None if this write is not looked at.

    Args:
        func: the op.
        written: what it writes; more than one tensor for a _foreach_ op.
        operands: its other arguments.
        kwargs: its keyword arguments.
    """
    name = func.__name__
    number = next((n for n, q in enumerate(written) if isinstance(q, QuantizedTensor)), None)
    if number is None or is_tracing() or not name.removeprefix("_foreach_").startswith(UPDATES):
        return None
    q, listed = written[number], name.startswith("_foreach_")
    count = _writes[name, q.recipe] = _writes[name, q.recipe] + 1
    if count & (count - 1) or not _has_values(q) or q.recipe.stored in _told:
        return None
    own = [_own(operand, number, len(written)) if listed else operand for operand in operands]
    # by the kernel that the write uses, too: another dtype would be compiled for this alone
    before = decode(q).float()
    update = before.clone()
    func([update] if listed else update, *widen(dequantize_all(own)), **widen(dequantize_all(kwargs)))
    return Look(q, name.split(".")[0], before, update.sub_(before))


def tell(looked: Look | None) -> None:
    """Warn after the write, once a recipe, if the update did not arrive."""
    _read_what_arrived()
    if looked is None:
        return
    q, op, before, update = looked
    moved = decode(q).float().sub_(before)
    # compared as sums over the weight: single elements may be rounded either way
    size = update.square().sum()
    lost = ((moved * update).sum() < NEARLY_NOTHING * size) | ((moved - update).square().sum() > NOISE**2 * size)
    lost &= size > 0
    text = (
        f"{op} on {describe(q.shape, q.recipe)}: rounding to nearest lost the update, since nearly all of it is "
        "smaller than half a step; many such updates move the weight nowhere. Train with MasterWeightOptimizer, write "
        "inside qtensor.stochastic_rounding(generator), or average .dequantize(torch.float32) into plain tensors "
        "(this is said once a recipe)"
    )
    if lost.device.type == "cpu":
        _warn(text, q.recipe, lost)
        return
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(lost, non_blocking=True)
    # reading the answer now would make the host wait for the GPU: it is read at a later write
    ready = torch.Event(lost.device)
    ready.record()
    _due.append(_Due(host, ready, text, q.recipe))


def _has_values(q: QuantizedTensor) -> bool:
    """Return whether it has elements, from which updates are computed: not from a preserved initial value."""
    return type(q.payload) is Tensor and not q.is_meta and initial_value(q) is None and q.numel() > 0


def _own(operand: Any, number: int, members: int) -> Any:
    """Return what belongs to one member of an operand of a _foreach_ op, as an operand for that member alone."""
    if isinstance(operand, list | tuple):
        return [operand[number]]
    several = isinstance(operand, Tensor) and operand.ndim == 1 and len(operand) == members
    return operand[number : number + 1] if several else operand


def _read_what_arrived() -> None:
    for due in [due for due in _due if due.ready.query()] if _due else ():
        _due.remove(due)
        _warn(due.text, due.recipe, due.arrived)


def _warn(text: str, recipe: Recipe, lost: Tensor) -> None:
    if bool(lost) and recipe.stored not in _told:
        _told.add(recipe.stored)
        # behind the op table, at whoever called the op
        warnings.warn(text, stacklevel=7)
