"""Shows that a plan fits the model, by signs: they are orthogonal matrices whose products are exact.

Multiply channels of what is rotated by +1 and -1 in everything that makes them, and in everything that reads them: if
the plan is complete, every product and every sum in the model is what it was, up to signs, and its outputs are EQUAL,
value by value (0 equals -0). If something else reads or writes the channels, mixes them, or subtracts their mean, bits
change. The same is done to the gains of norms and the columns of the linears behind them. Each norm is looked at alone,
too: with gain 1 it has to commute with the rotation itself.

Signs leave open what commutes with them, but not with a rotation: an odd function of single channels (tanh), a factor
for each channel (a gate), a norm without a gain that is not RMS (the largest magnitude), heads that are shorter than
head_dim says. The outputs after the rotation show these, within rounding. What the batch does not reach stays open.

Inputs that are rotated at run time are shown in the same way, with signs in place of the hooks that will rotate them.

    find_norm_kind    how a norm alone takes its weight; refuses one that does not commute with rotations
    prove             all of the above on the model; the weights are put back
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp_hooks.wrappers import module_named
from layerwise.folding.folds import deviation, tolerance
from layerwise.rotating.choice import Axis
from layerwise.rotating.hadamard import Rotation, signs_of
from layerwise.rotating.plan import Change, Norm, RotationPlan
from layerwise.rotating.tracing import Runs


def find_norm_kind(name: str, norm: nn.Module, rotation: Rotation) -> Literal["norm", "offset"]:
    """Find whether a norm's gain is its weight, or 1 + weight; it runs alone, on random rows in fp32.

    Raises:
        NotImplementedError: it is neither, or does not commute with the rotation when its gain is 1.
    """
    weight = norm._parameters["weight"]
    assert weight is not None
    width = weight.numel()
    drawn = torch.Generator(device="cpu").manual_seed(width)
    # Rows with a mean of 1, so that a norm that subtracts the mean is far off; gains that are powers of two, since
    # multiplying by these is exact, and the outputs can be compared for equality.
    rows = (torch.randn(8, width, generator=drawn, dtype=torch.float32, device="cpu") + 1).to(weight.device)
    powers = torch.exp2(torch.randint(-1, 3, (width,), generator=drawn, dtype=torch.int64, device="cpu").float())
    powers = powers.to(weight.device)

    def run(values: Tensor, given: Tensor) -> Tensor:
        # The weight is exchanged for this call alone, and never written.
        output = functional_call(norm, {"weight": given}, (values,))
        assert isinstance(output, Tensor)
        return output

    at_zero, at_one = run(rows, torch.zeros_like(powers)), run(rows, torch.ones_like(powers))
    kind: Literal["norm", "offset"]
    if torch.equal(run(rows, powers), at_one * powers):
        kind, unit, plain = "norm", torch.ones_like(powers), at_one
    elif torch.equal(run(rows, powers - 1), at_zero * powers):
        kind, unit, plain = "offset", torch.zeros_like(powers), at_zero
    else:
        raise NotImplementedError(
            f"rotate_: {name} (a {type(norm).__name__}) multiplies its channels neither by its weight nor by 1 + weight"
        )
    turned = run(rotation.rotate_columns(rows).float(), unit)
    found = deviation(rotation.rotate_columns(plain), turned)
    if not found <= tolerance(torch.float32, 1, width):
        raise NotImplementedError(
            f"rotate_: {name} (a {type(norm).__name__}) does not commute with rotations: its output is off by "
            f'{found:.3g} (relative RMS), as behind a norm that subtracts the mean; take where=("values",)'
        )
    return kind


def prove(plan: RotationPlan, norms: Sequence[Norm], runs: Runs) -> None:
    """Run the model under changed signs. The weights are put back bit for bit, also if it raises.

    Args:
        plan: the changes.
        norms: the norms whose gains are moved.
        runs: the model on its batch.

    Raises:
        NotImplementedError: the outputs change, or do not repeat.
        ValueError: the batch does not show it.
    """
    # Equality proves something only of a model that repeats itself.
    plain = runs.outputs()
    if not _is_same(plain, runs.outputs()):
        raise NotImplementedError(
            "rotate_: the model's outputs on the same batch differ from run to run, so nothing can be shown of it; "
            "pass a batch without a cache, and deterministic kernels"
        )
    _prove_gains(plan.changes, norms, runs, plain)
    # Each axis has signs of its own, so that one taken for another shows.
    signs = {axis: signs_of(number, axis.period) for number, axis in enumerate(plan.axes())}
    flips = list(_list_flips(plan.changes, signs))
    # All attentions together have one `what`, so the model does not run once for each of them.
    for what in dict.fromkeys(axis.what for axis in signs if not axis.online):
        _prove_channels(what, [one for one in flips if one.axis.what == what], runs, plain)
    online = [one for one in flips if one.axis.online]
    if online:
        _prove_inputs(online, signs, runs, plain)


@dataclass(frozen=True, eq=False)
class Flip:
    """Signs along a dim of a weight, in the shape to multiply it with."""

    tensor: Tensor
    signs: Tensor
    axis: Axis
    reads: bool


def _list_flips(changes: Sequence[Change], signs: Mapping[Axis, Tensor]) -> Iterator[Flip]:
    for one in changes:
        if one.columns is not None:
            yield Flip(one.tensor, _spread(signs[one.columns], one.tensor, -1), one.columns, one.reads)
        if one.rows is not None:
            yield Flip(one.tensor, _spread(signs[one.rows], one.tensor, 0), one.rows, reads=False)


def _prove_channels(what: str, flips: Sequence[Flip], runs: Runs, plain: Sequence[Tensor]) -> None:
    with _flip_signs((one.tensor, one.signs) for one in flips):
        if not _is_same(plain, runs.outputs()):
            raise NotImplementedError(
                f"rotate_: other signs in all that makes and reads {what}, as planned, changed the model's outputs: "
                "something else takes part in it, or mixes its channels (LayerNorm subtracts means); name what reads "
                "and writes the residual stream in reads= and writes=, or leave this out by where="
            )
    # The other way round: signs in what makes the channels alone must show, or the batch has shown nothing.
    with _flip_signs((one.tensor, one.signs) for one in flips if not one.reads):
        if _is_same(plain, runs.outputs()):
            raise ValueError(
                f"rotate_: other signs of {what} do not show in the model's outputs on this batch; give another"
            )


def _prove_inputs(flips: Sequence[Flip], signs: Mapping[Axis, Tensor], runs: Runs, plain: Sequence[Tensor]) -> None:
    """Change signs in the columns of linears, and in their inputs, by hooks in place of those that will rotate them."""
    with _flip_signs((one.tensor, one.signs) for one in flips):
        alone = runs.outputs()
        with ExitStack() as hooks:
            for one in flips:
                linear = module_named(runs.model, one.axis.maker)
                hook = _make_sign_hook(signs[one.axis])
                hooks.callback(linear.register_forward_pre_hook(hook, with_kwargs=True).remove)
            both = runs.outputs()
    names = ", ".join([one.axis.maker for one in flips][:3])
    if not _is_same(plain, both):
        raise NotImplementedError(
            f"rotate_: other signs in the inputs of {names} and in the columns of their weights changed the model's "
            "outputs: something uses a weight in another way than by calling the module; leave it out of online="
        )
    if _is_same(plain, alone):
        raise ValueError(
            f"rotate_: other signs in the weights of {names} do not show in the model's outputs on this batch; give "
            "another"
        )


def _make_sign_hook(signs: Tensor) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (args[0] * signs.to(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": kwargs["input"] * signs.to(kwargs["input"])}

    return hook


def _prove_gains(changes: Sequence[Change], norms: Sequence[Norm], runs: Runs, plain: Sequence[Tensor]) -> None:
    """Change signs in the gains, and in the columns behind them."""
    if not norms:
        return
    signs = {norm.name: signs_of(number, norm.weight.numel()) for number, norm in enumerate(norms)}
    offset = {id(norm.weight): norm for norm in norms if norm.kind == "offset"}
    behind = [(one.tensor, _spread(signs[one.norm], one.tensor, -1)) for one in changes if one.norm is not None]
    gains = [(norm.weight, _spread(signs[norm.name], norm.weight, 0)) for norm in norms]
    # To change the sign of a gain 1 + w makes w to -2 - w, which may be rounded. At w = 0 it is exact.
    with _keep_bytes([norm.weight for norm in offset.values()]):
        for norm in offset.values():
            norm.weight.zero_()
        before = runs.outputs() if offset else plain
        with _flip_signs([*behind, *[flip for flip in gains if id(flip[0]) not in offset]]):
            for weight, own in gains:
                if id(weight) in offset:
                    weight.copy_(own - 1)
            if not _is_same(before, runs.outputs()):
                names = ", ".join(norm.name for norm in norms[:3])
                raise NotImplementedError(
                    f"rotate_: other signs in the gains of norms ({names}, ...) and in the columns of the linears "
                    "behind them changed the model's outputs: something else takes the output of a norm; name it in "
                    "reads="
                )


def _spread(signs: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """Repeat signs along a dim of a tensor, in the shape to multiply it with."""
    repeated = signs.repeat(tensor.shape[dim] // signs.numel()).to(tensor)
    return repeated.unsqueeze(-1) if dim == 0 and tensor.ndim > 1 else repeated


@contextmanager
def _flip_signs(flips: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Return a context manager in which weights are multiplied by signs."""
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor, signs in flips:
            tensor.mul_(signs)
            done.append((tensor, signs))
        yield
    # The same signs again put back every bit.
    finally:
        for tensor, signs in reversed(done):
            tensor.mul_(signs)


@contextmanager
def _keep_bytes(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Return a context manager after which tensors hold the bytes that they held before."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    # Copied back in place: the model and the plan hold these very tensors.
    finally:
        for tensor, value in saved:
            tensor.copy_(value)


def _is_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Tell whether all values are equal; NaN equals itself, and 0 equals -0, since a zero's sign may change."""
    return len(left) == len(right) and all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in zip(left, right, strict=True)
    )


def make_rotations(plan: RotationPlan, block: int, seed: int | None) -> Mapping[Axis, Rotation]:
    """Make the matrix of every axis; inputs are rotated at run time without signs, as engines do it."""
    return {
        axis: Rotation(axis.online or block, signs_of(None if axis.online else seed, axis.period))
        for axis in plan.axes()
    }
