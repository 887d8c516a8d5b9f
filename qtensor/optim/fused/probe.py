"""A kernel of the fused step proves itself on a device: one small shard of its kind, against torch's step.

What is right, is what the general way does: torch's optimizer with foreach=True steps a copy of the master on the same
device, and the format's definition makes the parts of it on the CPU. Numbers are of all magnitudes, with options that
take each branch; and, under lr=0, which leaves masters as they are, halfway between codes (qtensor/probes).
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.kernels.probes import bits, first_difference, where
from qtensor.optim.fused.decision import ADAM, MOMENTUM, Output, Rule, numbers_of
from qtensor.optim.fused.table import Addresses, filled, packed
from qtensor.optim.fused.tasks import Kind
from qtensor.probes.numbers import Patches, round_, ties, wild
from qtensor.spec import registry as formats
from qtensor.spec.blocks import finite_amax
from qtensor.spec.recipes import Recipe

CPU = torch.device("cpu")
COUNT = 3  # steps before
BELOW = (43008.0, 57344.0)  # what all values share, see qtensor/probes

Optimizer = tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]
Run = Callable[[Kind | Output, Tensor, Tensor, Tensor], None]
_proven: set[tuple[Kind | Output, torch.device]] = set()


class OtherBytesError(RuntimeError):
    """A kernel makes other bytes than the general way."""


def prove(what: Kind | Output, device: torch.device, recipe: Recipe | None, run: Run) -> None:
    """Have a kernel step a shard; once in a process, if it is right.

    Args:
        what: the kernel is compiled for.
        device: of the shards.
        recipe: of the weight whose parts it writes.
        run: launches it: (what, table, owner, amaxes).

    Raises:
        OtherBytesError: what it wrote is not what the general way writes.
    """
    if (what, device) in _proven:
        return
    output = what.output if isinstance(what, Kind) else what
    for x, optimizer in _cases(what, output, recipe):
        found, wanted = _tried(what, device, recipe, run, (x, optimizer))
        for name, right in wanted.items():
            loose = right.dtype.itemsize > 1 and name in ("master", "first", "second", "dense")
            if difference := first_difference(found[name], right, any_nan=loose):
                place, text = difference
                flat = x.reshape(-1)
                first = place * flat.numel() // right.numel()
                raise OtherBytesError(
                    f"on {where(device)} it computes other bytes than torch's step and the format's definition: of the "
                    f"numbers that it is tried with, {name} {place}, of the master {bits(flat[first : first + 1])}, "
                    f"{text}. Other versions of Triton or of the driver may be right. Please report this text"
                )
    _proven.add((what, device))


def _patches(output: Output, recipe: Recipe | None) -> Patches:
    """Return the shape of a shard: a tile of the kernel, and one that it does not fill."""
    # what has no blocks, and what finds an amax, is in pieces of 16 or of 1
    if output.format in ("own", "dense", "amax") or recipe is None:
        return Patches(1, 1, 133, 16) if output.lanes == 16 else Patches(1, 1, 125, 17)
    if output.square > 1:
        return Patches(2, output.square, 3, output.length)
    block = formats.block_multiple(recipe)
    if block == 1 and not output.later:
        return Patches(2 if output.long else max(3, output.tile + 1), 1, 1, output.length)
    columns = block if block > 1 else 16 if output.length == 16 else 17
    return Patches(-(-(output.tile * output.length // columns + 5) // 3), 1, 3, columns)


def _cases(what: Kind | Output, output: Output, recipe: Recipe | None) -> Iterator[tuple[Tensor, Optimizer | None]]:
    """Yield masters, on the CPU, and what steps them; None: nothing does."""
    patches = _patches(output, recipe)
    optimizers = _optimizers(what.rule) if isinstance(what, Kind) else [None]
    for optimizer in optimizers:
        yield wild(torch.float32, patches), optimizer
    if recipe is not None and output.format not in ("own", "dense", "amax"):
        standing = None
        if optimizers[-1] is not None:
            kind, options = optimizers[-1]
            standing = kind, {**options, "lr": 0.0, "weight_decay": 0.0}
        for most in BELOW:
            x = round_(torch.float32, patches, most)
            yield ties(x, patches, recipe, formats.shared_amax(x, recipe)), standing


def _optimizers(rule: Rule) -> list[Optimizer]:
    if rule is ADAM:
        return [
            (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
            (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.4, 0.9), "maximize": True}),
        ]
    if rule is MOMENTUM:
        own: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        return [
            (torch.optim.SGD, {**own, "dampening": 0.3, "weight_decay": 0.1}),
            (torch.optim.SGD, {**own, "nesterov": True, "maximize": True}),
        ]
    return [(torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}), (torch.optim.SGD, {"lr": 0.1, "maximize": True})]


def _tried(
    what: Kind | Output, device: torch.device, recipe: Recipe | None, run: Run, case: tuple[Tensor, Optimizer | None]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a kernel wrote, and what the general way writes."""
    x, optimizer = case
    output = what.output if isinstance(what, Kind) else what
    master = x.to(device, copy=True)
    written, numbers = {"master": master}, [0.0]
    wanted = {"master": x.to(device, copy=True)}
    grad: Tensor | None = None
    if isinstance(what, Kind) and optimizer is not None:
        grad = _gradient(x, what, device)
        states = dict(zip(("first", "second"), (_moment(x, number).to(device) for number in range(2)), strict=True))
        states = dict(list(states.items())[: len(what.rule.states)])
        wanted |= {name: state.clone() for name, state in states.items()}
        written |= states
        numbers = _stepped(what.rule, optimizer, wanted, grad)
    parts, amax = _parts(output, recipe, wanted["master"])
    wanted |= parts
    written |= {
        name: torch.full_like(part.view(torch.uint8), 0x55, device=device).view(part.dtype)
        if part.ndim
        else torch.full((), 5.0, dtype=part.dtype, device=device)
        for name, part in parts.items()
    }
    amaxes = torch.zeros(1, dtype=torch.int32, device=device)
    if output.later:
        amaxes = amax.to(device).reshape(1).view(torch.int32)
    row = array("q", _addresses(output, written).row(0, 0)).tobytes()
    table = filled(row, [0 if grad is None else grad.data_ptr()], [packed(numbers)], device)
    owner = torch.zeros(output.programs(x.numel(), x.shape[-1]), dtype=torch.int32, device=device)
    run(what, table, owner, amaxes)
    if output.format == "amax":
        written["amax"], wanted["amax"] = amaxes.view(torch.float32), amax.reshape(1)
    return written, wanted


def _stepped(rule: Rule, optimizer: Optimizer, wanted: Mapping[str, Tensor], grad: Tensor) -> list[float]:
    """Step what is wanted as torch does it; return the numbers that a kernel is told for this step."""
    kind, options = optimizer
    param = nn.Parameter(wanted["master"])
    param.grad = grad.to(torch.float32)
    stepping = kind([param], foreach=True, **options)
    moments = [wanted[name] for name in ("first", "second") if name in wanted]
    state: dict[str, Any] = dict(zip(rule.states, moments, strict=True))
    if rule.counts:
        state["step"] = torch.tensor(float(COUNT), dtype=torch.float32, device=CPU)
    stepping.state[param] = state
    stepping.step()
    return numbers_of(rule, stepping.param_groups[0], COUNT + 1.0)


def _parts(output: Output, recipe: Recipe | None, stepped: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return what a weight stores of a stepped master, and the largest finite magnitude of that."""
    values = stepped.detach().to(CPU)
    amax = finite_amax(values)
    if output.format == "dense":
        return {"dense": values.to(output.element)}, amax
    if output.format in ("own", "amax"):
        return {}, amax
    assert recipe is not None
    return formats.encode(values, recipe, formats.shared_amax(values, recipe)), amax


def _addresses(output: Output, written: Mapping[str, Tensor]) -> Addresses:
    """Return a row of the table, as `task_of` makes it."""

    def at(name: str) -> int:
        return written[name].data_ptr() if name in written else 0

    wide = "global_scale" if "global_scale" in written else "scale" if output.later else ""
    shape = written["master"].shape
    return Addresses(
        master=at("master"),
        first=at("first"),
        second=at("second"),
        out=at("payload") or at("dense"),
        scale=0 if wide == "scale" else at("scale"),
        wide=at(wide),
        blocks=shape.numel() // output.length,
        columns=output.across(shape[-1]),
        length=output.length,
    )


def _gradient(x: Tensor, kind: Kind, device: torch.device) -> Tensor:
    """Return gradients about as large as the values, aligned as the kind says."""
    generator = torch.Generator("cpu").manual_seed(3)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float32, device=CPU)
    grad = grad * x.abs().nan_to_num(1.0, 1.0, 1.0).clamp(2.0**-60, 2.0**12)
    room = torch.empty(x.numel() + 8, dtype=kind.grads, device=device)
    skipped = 0 if kind.aligned else 1
    made = room[skipped : skipped + x.numel()].view(x.shape)
    made.copy_(grad)
    # some are not finite, and some are none
    made.view(-1)[5], made.view(-1)[7], made.view(-1)[9] = float("nan"), -0.0, float("inf")
    return made


def _moment(x: Tensor, number: int) -> Tensor:
    """Return a state, of either sign (0) or of squares (1)."""
    generator = torch.Generator("cpu").manual_seed(4 + number)
    made = torch.randn(x.shape, generator=generator, dtype=torch.float32, device=CPU)
    made = made * torch.exp2(
        -torch.randint(0, 40, x.shape, generator=generator, dtype=torch.int64, device=CPU).to(torch.float32)
    )
    return made.square() if number else made
