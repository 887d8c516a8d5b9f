"""Merges, loads of dense entries and agreements on scales by simulated ranks; the bytes are those of one process.

A rank may die, have other updates than the others, one that fails or is not finite, or a weight on the meta device or
dense where the others' is quantized.
All ranks that wait for each other raise, then, and nothing was written.
"""

from __future__ import annotations

import warnings
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales
from qtensor import LowRankUpdate, QuantizedTensor, merge_, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.cases import SIZES, Weight, bits, death, layout, refused, simulated, weights, words

if TYPE_CHECKING:
    from collections.abc import Callable

TROUBLE = (*["none"] * 5, "death", "lacking", "other", "fails", "fails late", "nan", "unknown")


def scenario(random: Random) -> str:
    """One merge, or one agreement."""
    size = random.choice(SIZES)
    if random.random() < 0.3:
        return _synced(random, size)
    given = weights(random, 5)
    placed = layout(random, size, given)
    who, seed = random.randrange(size), random.randrange(2**32)
    trouble = random.choice(TROUBLE)
    updated = [each for each in given if random.random() < 0.8]
    expected = {each.name: nn.Parameter(each.full()) for each in given}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge_(expected.items(), _updates(updated, "none", seed))

    def body(rank: int) -> tuple[str, str]:
        mesh, own = placed.device_mesh(), trouble if rank == who else "none"
        params = {each.name: nn.Parameter(placed.piece(each, each.full(), mesh)) for each in given}
        names = list(params)
        Random(f"{seed}/{rank}").shuffle(names)
        before = {name: bits(param.detach()) for name, param in params.items()}
        try:
            merge_([(name, params[name]) for name in names], _updates(updated, own, seed))
        except Exception as error:
            late = "some weights hold the merged" in str(error) or own == "fails late"
            wrote = [name for name in names if bits(params[name].detach()) != before[name]]
            return words(error), f"raised, and wrote {wrote}" if wrote and not late else ""
        for each in given:
            if bits(params[each.name].detach()) != bits(placed.piece(each, expected[each.name].detach(), mesh)):
                where = f"rank {rank} of {placed.mesh}, {placed.placements[each.name]}"
                return "", f"{each.name} ({each.facts and each.facts.name}, {each.shape}) on {where}: other bytes"
        return "", ""

    fault = death(random, size, 6) if trouble == "death" else None
    with simulated(size, random, body, fault) as outcomes:
        if any(one.died for one in outcomes):
            return "merge death"
        if (raised := next((one.error for one in outcomes if one.error), None)) is not None:
            raise raised
        values = [one.value for one in outcomes]
    errors, wrong = [error for error, _ in values], next((text for _, text in values if text), "")
    if wrong and (trouble == "none" or "wrote" in wrong):
        raise Found(f"merge_ with {trouble}: {wrong}; {errors}")
    if any(errors) and trouble == "none":
        raise Found(f"merge_ failed without a reason: {errors}")
    failed = refused([error for error in errors if error], f"merge_ with {trouble}", alike=False)
    return "merged" if not failed else "merge refused" if all(errors) else "merge refused by some"


def _updates(updated: list[Weight], trouble: str, seed: int) -> dict[str, Any]:
    """Some low-rank, some called, one of them in trouble."""
    found: dict[str, Any] = {}
    for number, each in enumerate(updated):
        generator = torch.Generator().manual_seed(each.seed + 7)
        a, b = (torch.randn(n, generator=generator) for n in ((2, each.shape[1]), (each.shape[0], 2)))
        if (seed + number) % 2:
            found[each.name] = LowRankUpdate(a=a, b=b, scaling=0.5)
        else:
            found[each.name] = _Called((b @ a) / 2, trouble if number == 0 else "none")
    if trouble == "lacking" and found:
        del found[min(found)]
    elif trouble == "other" and found:
        found[min(found)] = _Called(torch.zeros(next(e.shape for e in updated if e.name == min(found))), "none")
    elif trouble == "unknown":
        found["nobody.weight"] = _Called(torch.zeros(1, 1), "none")
    return found


class _Called:
    """An update that is called, and may fail, at once or at its second call, or give NaN."""

    def __init__(self, whole: Tensor, trouble: str) -> None:
        self.whole, self.trouble, self.calls = whole, trouble, 0

    def __call__(self, index: tuple[slice, ...]) -> Tensor:
        self.calls += 1
        if self.trouble == "fails" or (self.trouble == "fails late" and self.calls == 2):
            raise OSError("the adapter is gone")
        return self.whole[index] * float("nan") if self.trouble == "nan" else self.whole[index]


def _synced(random: Random, size: int) -> str:
    """Shards quantized each for itself come to one scale; who held that keeps its bytes."""
    given = weights(random, 5, choose=lambda facts: not facts.square)
    placed = layout(random, size, given)
    trouble, who = random.choice(("none", "none", "meta", "dense")), random.randrange(size)

    def body(rank: int) -> tuple[str, dict[str, float | None]]:
        mesh = placed.device_mesh()
        params: dict[str, Tensor] = {}
        for each in given:
            piece = placed.piece(each, each.dense() * (1 + rank % 3), mesh)
            own = trouble if rank == who and each.facts is not None else "none"
            params[each.name] = piece if each.facts is None or own == "dense" else _map(piece, _quantizer(each))
            if own == "meta":
                params[each.name] = _map(params[each.name], lambda local: local.to("meta"))
        before = {name: _wide(param) for name, param in params.items()}
        held = {name: b"" if param.is_meta else bits(param) for name, param in params.items()}
        try:
            sync_scales(list(params.items()))
        except Exception as error:
            return words(error), {}
        scales = {name: _wide(param) for name, param in params.items()}
        for name, scale in scales.items():
            if scale is not None and scale == before[name] and bits(params[name]) != held[name]:
                raise Found(f"{name}: kept its scale, and not its bytes")
        return "", scales

    with simulated(size, random, body) as outcomes:
        if (raised := next((one.error for one in outcomes if one.error), None)) is not None:
            raise raised
        values = [one.value for one in outcomes]
    for each in given:
        placements = placed.placements[each.name] or ()
        held = {scales[each.name] for error, scales in values if not error}
        if len(held) > 1 and any(place.is_shard() for place in placements) and len(placed.mesh) == 1:
            raise Found(f"{each.name}: scales are not agreed: {held}")
    errors = [error for error, _ in values]
    if any(errors) and trouble == "none":
        raise Found(f"sync_scales failed without a reason: {errors}")
    return "synced" if not any(errors) else "sync refused" if all(errors) else "sync refused by some"


def _quantizer(each: Weight) -> Callable[[Tensor], Tensor]:
    assert each.facts is not None
    recipe = each.facts.recipe
    return lambda local: quantize(local, recipe)


def _map(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The local tensor changed."""
    if not isinstance(value, DTensor):
        return change(value)
    mesh, placements = value.device_mesh, value.placements
    local = change(value.to_local())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def _wide(param: Tensor) -> float | None:
    """The tensor-wide scale of a shard."""
    local: Any = param.to_local() if isinstance(param, DTensor) else param
    if not isinstance(local, QuantizedTensor) or local.is_meta:
        return None
    held = local.parts().get("global_scale", local.parts()["scale"])
    return float(held) if held.ndim == 0 else None
