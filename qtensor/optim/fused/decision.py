"""Which parameters take the fused step, and why the others do not: pure functions over what is known of them.

The fused way is taken where its bytes are those of the general way (kernel.py says which operations of torch it
repeats). All else goes the general way, for a reason that has a name; "" says that there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any

import torch

from qtensor.numerics.triton_kernels import ByHand

GRADS = (torch.bfloat16, torch.float16, torch.float32)
LONGEST = 2**12  # numbers under one scale that the threads of a program hold, with what is read to step them
EACH = 16  # of a thread
TILE = 2048  # numbers of a program, at least


@dataclass(frozen=True)
class Rule:
    """The step of an optimizer.

    Attributes:
        name: of the kernel's code.
        states: the entries of a master's state that are written, fp32 of its shape.
        counts: whether a state has a "step".
    """

    name: str
    states: tuple[str, ...]
    counts: bool


ADAM = Rule("adam", ("exp_avg", "exp_avg_sq"), counts=True)
MOMENTUM = Rule("momentum", ("momentum_buffer",), counts=False)
PLAIN = Rule("plain", (), counts=False)


class Option(IntFlag):
    """What a recipe says and a kernel reads; the kernel's code of a format reads those that it has."""

    NONE = 0
    E5M2 = 1  # codes; else E4M3
    POWERS_OF_TWO = 2  # scales of Float8; else any number
    ROUNDED_UP = 4  # scales of MXFP8 and MXFP4; else down


@dataclass(frozen=True)
class Output:
    """What a weight stores of its master, and how a program holds it.

    Attributes:
        format: whose parts the kernel writes; "dense": the number itself in `element`; "own": nothing more.
        lanes: of a block as it is held, a power of two.
        length: numbers of a block.
        square: the rows of a block.
        options: of the recipe.
        later: whether its parts wait for an amax that all values share.
        element: of dense values, and of what has none as it is stored.
    """

    format: str
    lanes: int = 16
    length: int = 16
    square: int = 1
    options: Option = Option.NONE
    later: bool = False
    element: torch.dtype = torch.uint8

    @property
    def multiple(self) -> int:
        """0 for blocks that fill their lanes; else what divides their length."""
        if self.length == self.lanes and not self.long:
            return 0
        return 16 if self.length % 16 == 0 else 1

    @property
    def long(self) -> bool:
        """Whether a program goes through one block piece by piece."""
        return not self.later and self.square * self.lanes > LONGEST

    @property
    def tile(self) -> int:
        """The blocks of a program; rows of square ones count."""
        return max(TILE // self.lanes, self.square)

    @property
    def warps(self) -> int:
        """The warps of a program."""
        return max((TILE if self.long else self.tile * self.lanes) // (32 * EACH), 1)

    def across(self, columns: int) -> int:
        """Return how many blocks stand beside each other in rows of so many numbers; 1 where nobody needs to know."""
        return columns // self.length if self.square > 1 else 1

    def programs(self, numbers: int, columns: int) -> int:
        """Return how many programs there are for so many numbers, in rows of `columns`."""
        if self.long or not numbers:
            return -(-(numbers // columns) // self.square) * (columns // self.length) if numbers else 0
        if self.square == 1:
            return -(-(numbers // self.length) // self.tile)
        return -(-numbers // columns // self.square) * -(-self.across(columns) // (self.tile // self.square))

    def finding_amax(self) -> "Output":
        """Return the same for a pass that finds the amax, and writes nothing."""
        return replace(self, format="amax")


def refuse_optimizer(inner: torch.optim.Optimizer, *, hooked: bool, watched: bool) -> str:
    """Return why no parameter takes it: for reasons of the optimizer, or of what surrounds the step.

    Args:
        inner: steps the masters.
        hooked: whether hooks run around its steps.
        watched: whether something traces or watches operations, or rounding is stochastic.
    """
    if type(inner) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        return f"{type(inner).__qualname__} is none of torch's AdamW, Adam and SGD"
    if hooked or "step" in vars(inner):
        return "hooks run around the inner optimizer's step"
    if getattr(inner, "grad_scale", None) is not None or getattr(inner, "found_inf", None) is not None:
        return "a gradient scaler left grad_scale or found_inf with the inner optimizer"
    if watched:
        return "operations are traced, watched or rounded stochastically"
    return ""


def rule_of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Rule | str:
    """Return the rule of a group with such options, or why it takes the general way."""
    # torch's loop over single tensors divides by reciprocals, and so rounds otherwise
    if not (options["fused"] or options["foreach"] or (options["fused"] is None and options["foreach"] is None)):
        return "foreach=False or fused=False asks for torch's loop over single tensors"
    for name in ("amsgrad", "differentiable", "capturable"):
        if options.get(name):
            return f"{name}=True"
    if kind is torch.optim.SGD:
        numbers = {name: options[name] for name in ("lr", "momentum", "dampening", "weight_decay")}
        rule = MOMENTUM if options["momentum"] else PLAIN
    else:
        beta1, beta2 = options["betas"]
        own = {name: options[name] for name in ("lr", "weight_decay", "eps")}
        numbers, rule = {**own, "beta1": beta1, "beta2": beta2}, ADAM
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            return f"{name} is no number but a {type(value).__qualname__}"
    return rule


def numbers_of(rule: Rule, options: Mapping[str, Any], step: float) -> list[float]:
    """Return the numbers that the kernel reads, made as torch's foreach way makes them: in double, rounded once.

    Args:
        rule: of the group.
        options: of the group.
        step: the count of this step, from 1 on; any number if the rule counts none.
    """
    sign, lr, decay = (-1.0 if options["maximize"] else 1.0), options["lr"], options["weight_decay"]
    if rule is not ADAM:
        keep, nesterov = options["momentum"], float(options["nesterov"])
        return [sign, decay, keep, 1 - options["dampening"], nesterov, -lr]
    beta1, beta2 = options["betas"]
    apart = options["decoupled_weight_decay"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    weight = torch.tensor(1 - beta1, dtype=torch.float32, device="cpu")
    return [
        *(sign, 0.0 if apart else decay, 1 - lr * decay if apart and decay else 1.0),
        *(float(weight), float(1 - weight), beta2, 1 - beta2),
        *(correction2**0.5, options["eps"], (lr / correction1) * -1),
    ]


# -- what is written ---------------------------------------------------------------------------------------------------


def dense(element: torch.dtype | None, numbers: int) -> Output:
    """Return the output of a dense weight; None: the weight is its own master."""
    # numbers that fill no block of 16 are moved one by one
    lanes = 16 if numbers % 16 == 0 else 1
    return Output("own" if element is None else "dense", lanes, lanes, element=element or torch.uint8)


def quantized(hand: ByHand | None, shape: Sequence[int], *, wide: bool, by_row: bool) -> Output | str:
    """Return the output of a quantized weight, or why it takes the general way.

    Args:
        hand: its recipe's kernels for GPUs.
        shape: of the weight's shard.
        wide: whether all its values share a scale.
        by_row: whether each row has a scale.
    """
    if hand is None or (make := _OUTPUTS.get(hand.module)) is None:
        return "no kernel writes parts of its format"
    if len(shape) < 2 or 0 in shape:
        return f"a shard of shape {tuple(shape)}"
    output = make(hand.options, shape[-1], wide=wide)
    if output.square > 1 and len(shape) > 2 and shape[-2] % output.square:
        return "square blocks end with each matrix of the stack"
    if not by_row and shape[-1] % output.length:
        return f"rows of {shape[-1]} numbers end in a smaller block"
    return output


def _options(given: Mapping[str, Any]) -> Option:
    found = Option.NONE
    if given.get("element") == torch.float8_e5m2:
        found |= Option.E5M2
    if given.get("power_of_two"):
        found |= Option.POWERS_OF_TWO
    if given.get("scale_rounding") == "up":
        found |= Option.ROUNDED_UP
    return found


def _float8(options: Mapping[str, Any], columns: int, *, wide: bool) -> Output:
    if wide:
        lanes = 16 if columns % 16 == 0 else 1
        return Output("float8", lanes, 1 if lanes == 1 else 16, options=_options(options), later=True)
    return Output("float8", max(1 << (columns - 1).bit_length(), 16), columns, options=_options(options))


def _float8_blocks(options: Mapping[str, Any], columns: int, *, wide: bool) -> Output:
    return Output("float8", 128, 128, 128 if options["square"] else 1, _options(options))


def _mxfp8(options: Mapping[str, Any], columns: int, *, wide: bool) -> Output:
    return Output("mxfp8", 32, 32, 32 if options["square"] else 1, _options(options))


def _mxfp4(options: Mapping[str, Any], columns: int, *, wide: bool) -> Output:
    return Output("mxfp4", 32, 32, options=_options(options))


def _int4(options: Mapping[str, Any], columns: int, *, wide: bool) -> Output:
    return Output("int4", options["group"], options["group"])


def _nvfp4(options: Mapping[str, Any], columns: int, *, wide: bool) -> Output:
    return Output("nvfp4", 16, 16, 16 if options["square"] else 1, later=True)


_OUTPUTS: dict[str, Callable[..., Output]] = {
    "float8": _float8,
    "float8_blocks": _float8_blocks,
    "int4": _int4,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
