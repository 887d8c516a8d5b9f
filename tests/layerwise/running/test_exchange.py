"""What one rank has rounded arrives on all ranks, byte for byte; what does not fit a weight is refused by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise.running.one_stage.exchange import Exchange, entries_of
from layerwise.stages.targets import find_targets
from qtensor import Float8CurrentScaling, NVFP4BlockScaling, quantize
from qtensor.spec.registry import format_of, shared_amax
from tests.layerwise.small_runs import bytes_of
from tests.ranks import run_ranks_each
from tests.recipes import TABLE

K = 256
RECIPES = {each.name: each.recipe for each in TABLE if not each.history}


class Experts(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 128, K, generator=torch.Generator().manual_seed(1)).bfloat16())


def model() -> nn.Module:
    net = nn.Module()
    net.first, net.experts, net.second = nn.Linear(K, 128), Experts(), nn.Linear(K, 384, bias=False)
    torch.manual_seed(0)
    for linear in (net.first, net.second):
        nn.init.normal_(linear.weight)
    return net.to(torch.bfloat16)


def entries(name: str, weight: Tensor, recipe: Any, shared: Tensor) -> dict[str, Tensor]:
    amax = shared_amax(weight.float(), recipe)
    amax = shared if amax is not None and amax.ndim == 0 else amax  # of all experts
    quantizer = format_of(recipe).quantizer(weight.float(), recipe, amax)
    return entries_of(name, weight, None, quantizer, recipe)


def exchanged(name: str) -> list[str]:
    """The parts and quantizers of all targets, half of whose linears each rank has rounded."""
    recipe, group = RECIPES[name], dist.group.WORLD if dist.is_initialized() else None
    targets = find_targets(model(), recipe)
    exchange = Exchange(targets, recipe, group)
    linears = [
        (linear, weight.detach(), target.param.detach().abs().amax().float())
        for target in targets
        for linear, weight in target.matrices()
    ]
    ranks = 1 if group is None else group.size()
    for owner in range(ranks):
        names = [linear for linear, *_ in linears[owner::ranks]]
        mine = group is None or group.rank() == owner
        own = {
            linear: entries(linear, weight, recipe, amax)
            for linear, weight, amax in linears
            if mine and linear in names
        }
        exchange.take(names, own, owner)
        assert not own
    weights, quantizers = exchange.assemble()
    return [bytes_of(part) for found in weights.values() for part in found.parts().values()] + [
        bytes_of(value) for found in quantizers.values() for value in found.values()
    ]


def test_every_rank_has_the_bytes_of_quantize() -> None:
    """In one process, and on two ranks that share the linears, for every format."""
    expected = {}
    for name, recipe in RECIPES.items():
        own = exchanged(name)
        quantized = [quantize(target.param.detach(), recipe) for target in find_targets(model(), recipe)]
        parts = [bytes_of(part) for weight in quantized for part in weight.parts().values()]
        assert own[: len(parts)] == parts, name
        assert len(own) > len(parts), "and quantizers"
        expected[name] = own
    for rank in run_ranks_each(2, RECIPES, exchanged):
        for name, found in zip(RECIPES, rank, strict=True):
            assert found == expected[name], name


def test_what_does_not_fit_a_weight_is_refused_by_name() -> None:
    weight, recipe = torch.ones(4, 32), NVFP4BlockScaling()
    good = format_of(recipe).quantizer(weight, recipe, torch.ones(()))
    for bad, found in (
        ({"scale": good["scale"]}, "a quantizer of scale float8_e4m3fn [4, 2]; expected scale float8_e4m3fn [4, 2], "),
        ({**good, "scale": good["scale"].float()}, "a quantizer of scale float32 [4, 2], global_scale float32 []; "),
        ({**good, "scale": good["scale"][:3]}, "a quantizer of scale float8_e4m3fn [3, 2], global_scale float32 []; "),
        ({}, "a quantizer of nothing; expected scale float8_e4m3fn [4, 2], global_scale float32 [], as Format.quant"),
    ):
        with pytest.raises(ValueError, match=r"^q\.weight: its decision has a quantizer of ") as caught:
            entries_of("q.weight", weight, None, bad, recipe)
        assert found in str(caught.value)
    with pytest.raises(
        ValueError, match=r"^q\.weight: its decision has a weight \(32, 4\); expected \(4, 32\), that of"
    ):
        entries_of("q.weight", weight, weight.T, good, recipe)


def test_experts_that_differ_in_what_they_share_are_refused() -> None:
    recipe = Float8CurrentScaling(granularity="tensor")
    targets = find_targets(model(), recipe, include=["experts"])
    exchange = Exchange(targets, recipe, None)
    for number, (name, weight) in enumerate(targets[0].matrices()):
        quantizer = {"amax": torch.tensor(1.0 + (number == 2))}
        exchange.take([name], {name: entries_of(name, weight.detach(), None, quantizer, recipe)}, 0)
    text = r"experts.up: its experts came to different values of amax, of which one tensor \(3, 128, 256\) has only one"
    with pytest.raises(ValueError, match=text):
        exchange.assemble()
