"""The kernel proves itself on a device: small shards, against torch's step and qtensor/states.

What is right, is what the general way does: parts and remainders are expanded on the CPU, torch's optimizer with
foreach=True steps them on the device, and the CPU compresses what has come of it. Numbers are of all magnitudes, with
options that take each branch, and usual ones, for which the kernel has a shorter way.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_hooks.kernels.probes import bits, first_difference, where
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.optim.compressed.entries import salted
from qtensor.optim.fused.compressed.decision import TILE, TURNS, packed
from qtensor.optim.fused.compressed.table import BLOCK, Addresses, Cut
from qtensor.optim.fused.compressed.tasks import Kind
from qtensor.optim.fused.decision import ADAM, numbers_of
from qtensor.optim.fused.probe import CPU, OtherBytesError
from qtensor.optim.fused.table import filled
from qtensor.probes.numbers import Patches, wild
from qtensor.states import moments, remainders
from qtensor.states.draws import Positions, key_of, row_keys

COUNT = 3  # steps before
RECIPE = MXFP8BlockScaling()
OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.4, 0.9)}),  # none that is usual
]

Run = Callable[[Kind, Tensor, Tensor], None]
Kept = dict[str, Tensor]
_proven: set[Kind] = set()


class _Case(NamedTuple):
    master: Tensor
    first: Tensor
    second: Tensor
    grad: Tensor


def prove(kind: Kind, run: Run) -> None:
    """Have the kernel step shards; once in a process, if it is right.

    Args:
        kind: the kernel is compiled for.
        run: launches it: (kind, table, owner).

    Raises:
        OtherBytesError: what it wrote is not what the general way writes.
    """
    if kind in _proven:
        return
    for case in _cases(kind):
        for optimizer in OPTIMIZERS:
            found, wanted = _tried(kind, run, case, optimizer)
            for name, right in wanted.items():
                if difference := first_difference(found[name], right, any_nan=right.is_floating_point()):
                    place, text = difference
                    first = place * case.master.numel() // right.numel()
                    raise OtherBytesError(
                        f"on {where(kind.device)} it computes other bytes than torch's step and the definition of "
                        f"compressed states: of the numbers that it is tried with, {name} {place}, of the master "
                        f"{bits(case.master.reshape(-1)[first : first + 1])}, {text}. Other versions of Triton or of "
                        "the driver may be right. Please report this text"
                    )
    _proven.add(kind)


def _cases(kind: Kind) -> Iterator[_Case]:
    """Yield what is stepped, fp32 [rows, length] on the CPU: a program's tiles, and some that are not filled."""
    rows = TILE // kind.form.width * (TURNS + 1) + 1
    length = BLOCK * kind.form.width + kind.form.multiple * (1 if kind.form.multiple == BLOCK else 3)
    generator = torch.Generator("cpu").manual_seed(3)

    def normal() -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float32, device=CPU)

    def spread(x: Tensor, most: int) -> Tensor:
        return x * torch.exp2(
            -torch.randint(0, most, x.shape, generator=generator, dtype=torch.int64, device=CPU).to(torch.float32)
        )

    yield _Case(normal(), normal() * 1e-3, normal().square() * 1e-6, normal() * 1e-3)
    # rows of other magnitudes, which are tiles of their own where these are wide
    exponents = torch.arange(rows, dtype=torch.int64, device=CPU).unsqueeze(-1)
    wide, small = (torch.exp2((exponents * step % 190 - 95).to(torch.float32)) for step in (37, 23))
    yield _Case(normal() * wide, normal() * small, (normal() * small).square().clamp(max=2.0**100), normal() * small)
    # some elements of each block are far smaller than its largest
    yield _Case(spread(normal(), 12), spread(normal(), 40), spread(normal(), 40).square(), spread(normal(), 40))
    numbers = wild(torch.float32, Patches(1, 1, -(-rows * length // 16), 16)).reshape(-1)[: rows * length]
    numbers = numbers.view(rows, length)
    grad = normal() * numbers.abs().nan_to_num(1.0, 1.0, 1.0).clamp(2.0**-60, 2.0**12)
    grad.view(-1)[5], grad.view(-1)[7], grad.view(-1)[9] = float("nan"), -0.0, float("inf")
    grad[-2:], second = 0.0, spread(normal(), 40).square()
    second[-2:] = 0.0
    # no -0.0 among the moments: torch does not say which zero comes of two
    yield _Case(numbers, (spread(normal(), 40) * grad.nan_to_num(0.0, 0.0, 0.0)).add_(0.0), second, grad)


def _tried(
    kind: Kind, run: Run, case: _Case, optimizer: tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]
) -> tuple[Kept, Kept]:
    """Return what the kernel wrote, and what the general way writes."""
    rows, length = case.master.shape
    cut, key = Cut(rows, length, 5, 64), key_of(0, "probe", COUNT)
    first = torch.full((1,), cut.left, dtype=torch.int32, device=CPU)
    numbered = torch.arange(cut.top, cut.top + rows, dtype=torch.int64, device=CPU)
    at = Positions(row_keys(key, numbered), first) if kind.form.drawn else Positions(first, first)
    kept = _compressed(kind, case.master, case.first, case.second, at)
    param = nn.Parameter(_master(kind, kept).to(kind.device, copy=True))
    room = torch.empty(case.grad.numel() + 8, dtype=kind.grads, device=kind.device)
    grad = room[0 if kind.aligned else 1 :][: case.grad.numel()].view(case.grad.shape).copy_(case.grad)
    param.grad = grad.to(torch.float32)
    make, options = optimizer
    stepping = make([param], foreach=True, **options)
    expanded = [_moment(kind, kept, name).to(kind.device, copy=True) for name in ("first", "second")]
    count = torch.tensor(float(COUNT), dtype=torch.float32, device=CPU)
    stepping.state[param] = {"step": count, "exp_avg": expanded[0], "exp_avg_sq": expanded[1]}
    stepping.step()
    stepped = [each.detach().to(CPU) for each in (param, *expanded)]
    wanted = _compressed(kind, stepped[0], stepped[1], stepped[2], at)
    there = {name: part.to(kind.device, copy=True) for name, part in kept.items()}
    names = ("weight", "scale", "remainder", "first", "first_scale", "second", "second_scale")
    addresses = Addresses(tuple(there[name].data_ptr() if name in there else 0 for name in names), cut)
    numbers = packed(numbers_of(ADAM, stepping.param_groups[0], COUNT + 1.0), key)
    row = array("q", addresses.row(0))
    table = filled(row.tobytes(), [grad.data_ptr()], [numbers], kind.device, row=len(row))
    run(kind, table, torch.zeros(kind.form.programs(rows, length), dtype=torch.int32, device=kind.device))
    return there, wanted


def _compressed(kind: Kind, master: Tensor, first: Tensor, second: Tensor, at: Positions) -> Kept:
    """Return what a master and moments are kept as."""
    if kind.form.weight == "own":
        kept = {"weight": master}
    elif kind.form.weight == "dense":
        kept = dict(zip(("weight", "remainder"), remainders.split_dense(master, at), strict=True))
    else:
        parts, left = remainders.split(remainders.rounded(master, RECIPE, at), RECIPE, None, None, at)
        kept = {"weight": parts["payload"], "scale": parts["scale"], "remainder": left}
    if kind.form.moments == "fp32":
        return {**kept, "first": first, "second": second}
    for name, entry, x in (("first", "exp_avg", first), ("second", "exp_avg_sq", second)):
        parts = moments.encode_moment(x, salted(at, entry), root=name == "second")
        kept |= {name: parts["payload"], f"{name}_scale": parts["scale"]}
    return kept


def _master(kind: Kind, kept: Kept) -> Tensor:
    if kind.form.weight == "own":
        return kept["weight"]
    if kind.form.weight == "dense":
        return remainders.join_dense(kept["weight"], kept["remainder"])
    return remainders.join({"payload": kept["weight"], "scale": kept["scale"]}, kept["remainder"], RECIPE)


def _moment(kind: Kind, kept: Kept, name: str) -> Tensor:
    if kind.form.moments == "fp32":
        return kept[name]
    return moments.decode_moment({"payload": kept[name], "scale": kept[f"{name}_scale"]}, root=name == "second")
