"""Masters as remainders of formats that somebody else defines: of any grain, in any blocks, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_hooks.kernels.compiled import use_kernels
from qtensor import MasterWeightOptimizer, quantize
from qtensor.optim.compressed.masters import expand_master
from qtensor.spec.format import Grain
from qtensor.spec.registry import encode, format_of
from tests.qtensor.foreign import SCALES, ForeignFormat, foreign_format
from tests.qtensor.recipes_under_test import same_parts, weight
from tests.qtensor.states_under_test import kept, nearest, positions, same

FITTING = Grain(20, 5)  # of elements -127 to 127, equally far apart; of no format of the library
UNFIT = [Grain(0, 0), Grain(23, 0), Grain(-1, 0), Grain(18, 126), Grain(18, -126)]


@contextmanager
def grained(monkeypatch: pytest.MonkeyPatch, grain: Grain | None) -> Iterator[Any]:
    with foreign_format() as recipe, monkeypatch.context() as patch:
        patch.setattr(ForeignFormat, "grain", lambda *_: grain)
        yield recipe


def optimizer_of(model: nn.Module) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(
        torch.optim.AdamW, model.named_parameters(), lr=1e-3, masters="remainder", moments="fp32"
    )


@pytest.mark.parametrize("scales", SCALES)
def test_a_grain_that_no_format_here_has_keeps_masters(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with grained(monkeypatch, FITTING) as foreign:
        recipe = foreign(scales=scales)
        columns = 200 if scales == "tail" else 256
        for rows in (3, 1500):  # in pieces
            x = weight(rows, columns, torch.float32)
            for at in (positions(rows), nearest()):
                parts, remainder, master = kept(x, recipe, at)
                assert same(parts, encode(master, recipe, None))
                assert remainder.any()
                # a distance is 2^-14 units at most, and an amax 64 units or more
                step = x.abs().amax() * 2.0**-19
                assert (master - x).abs().max() <= 2 * step


def test_a_grain_that_no_format_here_has_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    with grained(monkeypatch, FITTING) as foreign:
        model, twin = (nn.ParameterDict({"w": nn.Parameter(quantize(weight(6, 256), foreign()))}) for _ in range(2))
        optimizer = optimizer_of(model)
        exact = MasterWeightOptimizer(torch.optim.AdamW, twin.named_parameters(), lr=1e-3)
        for step in range(3):
            for net, its in ((model, optimizer), (twin, exact)):
                net["w"].grad = torch.randn(6, 256, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
                its.step()
        master = expand_master(model["w"], optimizer.state[model["w"]]["master_remainder"])
        assert same_parts(quantize(master, foreign()), model["w"].detach())
        exactly = exact.state[twin["w"]]["master_weight"]
        assert (master - exactly).abs().max() <= exactly.abs().max() * 2.0**-17


@pytest.mark.slow
@pytest.mark.full
def test_compiled_kernels_take_any_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    with grained(monkeypatch, FITTING) as foreign:
        x = weight(64, 256, torch.float32)
        found = []
        for mode in ("compiled", "eager"):
            with use_kernels(mode):
                found.append(kept(x, foreign(), positions(64)))
        assert same(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("grain", UNFIT, ids=str)
def test_a_grain_that_nothing_can_be_counted_by_is_refused_by_name(
    grain: Grain, monkeypatch: pytest.MonkeyPatch
) -> None:
    with grained(monkeypatch, grain) as foreign:
        model = nn.ParameterDict({"w": nn.Parameter(quantize(weight(6, 256), foreign()))})
        with pytest.raises(ValueError, match=r"w cannot have its master as a remainder: .*Foreign128.* has Grain\("):
            optimizer_of(model)


def test_a_format_without_a_grain_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with grained(monkeypatch, None) as foreign:
        model = nn.ParameterDict({"w": nn.Parameter(quantize(weight(6, 256), foreign()))})
        with pytest.raises(ValueError, match=r"Foreign128.* does not say how fine they would be .*Format\.grain"):
            optimizer_of(model)
        assert format_of(foreign()).grain(foreign()) is None
