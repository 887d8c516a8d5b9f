"""Ranks share the decisions of a stage: each group has one owner, and all ranks come to the bytes of one process."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch import nn

from layerwise import AWQ, GPTQ, Decision, LocalHessian, Max, Mse, SmoothQuant
from tests.fsdp_hooks.cases import Collectives
from tests.layerwise.models import RECIPES, assert_same, batches, expert_lists, outcome, reference, run, shard, toy
from tests.ranks import run_ranks_catching, run_ranks_each
from tests.sampling import sampled

NVFP4, MXFP8 = RECIPES["nvfp4"], RECIPES["mxfp8"]
COUNT = 4
ASKED: list[tuple[str, ...]] = []  # the groups that were decided about or smoothed in this process


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedGPTQ(GPTQ):
    """Notes the groups it is asked about; a user's own algorithm."""

    def smooth(self, group: Any, recipe: Any) -> Any:
        ASKED.append(("smooth", *(linear.name for linear in group.linears)))
        return super().smooth(group, recipe)

    def decide(self, group: Any, recipe: Any) -> Sequence[Decision]:
        ASKED.append(tuple(linear.name for linear in group.linears))
        return super().decide(group, recipe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothMse(SmoothQuant):
    """Another one: its own factors, and the scales of another algorithm."""

    def smooth(self, group: Any, recipe: Any) -> Any:
        ASKED.append(("smooth", *(linear.name for linear in group.linears)))
        return super().smooth(group, recipe)

    def decide(self, group: Any, recipe: Any) -> Sequence[Decision]:
        ASKED.append(tuple(linear.name for linear in group.linears))
        return Mse().decide(group, recipe)


CASES: dict[str, tuple[Any, Any]] = {
    "GPTQ": (WatchedGPTQ(), NVFP4),
    "GPTQ, one Hessian at a time, on scales that need the local one, with all options": (
        WatchedGPTQ(hessians="one_at_a_time", scales=LocalHessian(), smoothing=SmoothQuant(), descent=1),
        NVFP4,
    ),
    "GPTQ behind AWQ": (WatchedGPTQ(smoothing=AWQ(alpha_step=0.5), descent=1), MXFP8),
    "SmoothMse": (SmoothMse(), MXFP8),
}


def two_layers() -> nn.Module:
    return toy(layers=2, bias=False)


def _shared(case: str) -> tuple[dict[str, dict[str, str]], list[tuple[str, ...]], dict[str, int]]:
    algorithm, recipe = CASES[case]
    model = shard(two_layers())
    ASKED.clear()
    with Collectives() as collectives:
        result = run(model, batches(COUNT)[dist.get_rank() :: dist.get_world_size()], recipe, algorithm)
    return outcome(model, result), [*ASKED], dict(collectives.counts)


@functools.cache
def _alone(case: str) -> tuple[dict[str, dict[str, str]], Counter[tuple[str, ...]]]:
    """What one process comes to, and what it is asked."""
    algorithm, recipe = CASES[case]
    model = two_layers()
    ASKED.clear()
    return outcome(model, run(model, batches(COUNT), recipe, algorithm)), Counter(ASKED)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_group_is_asked_about_on_one_rank(ranks: int) -> None:
    """And what ranks do beside that is the same: the same collectives, and the result of one process."""
    per_rank = run_ranks_each(ranks, CASES, _shared)
    for case, found in zip(CASES, zip(*per_rank, strict=True), strict=True):
        expected, alone = _alone(case)
        assert set(alone.values()) == {1}
        outcomes, asked, collectives = zip(*found, strict=True)
        assert Counter(name for own in asked for name in own) == alone
        assert all(asked), "every rank has some"
        assert all(counts == collectives[0] for counts in collectives)
        assert collectives[0]["reduce_"] == len(alone), "statistics go to one rank, once for each time"
        for own in outcomes:
            assert_same(own, expected, f"{case} on {ranks} ranks")


METHODS = {"AWQ": AWQ(alpha_step=0.5, clip_step=0.25), "GPTQ": GPTQ()}


@sampled("algorithm", METHODS.values(), [GPTQ()], ids=METHODS)
def test_experts_in_a_list(algorithm: Any) -> None:
    expected = reference(expert_lists, MXFP8, algorithm, COUNT)
    for (found,) in run_ranks_each(2, [algorithm], _experts):
        assert_same(found, expected, type(algorithm).__name__)


def _experts(algorithm: Any) -> dict[str, dict[str, str]]:
    model = shard(expert_lists())
    return outcome(model, run(model, batches(COUNT)[dist.get_rank() :: 2], MXFP8, algorithm))


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misshapen(Max):
    """Returns scales of another weight for one linear."""

    writes_weights: ClassVar[bool] = True

    def decide(self, group: Any, recipe: Any) -> Sequence[Decision]:
        decisions = super().decide(group, recipe)
        if any("down_proj" in linear.name for linear in group.linears):
            return [Decision({"scale": one.quantizer["scale"][:, :1]}) for one in decisions]
        return decisions


def _misshapen() -> None:
    run(shard(two_layers()), batches(1), MXFP8, Misshapen())


def test_a_decision_that_does_not_fit_raises_on_all_ranks_by_name() -> None:
    told = run_ranks_catching(2, _misshapen)
    words = "ValueError: layers.0.mlp.down_proj.weight: its decision has a quantizer of scale uint8 [64, 1]; expected "
    assert sum(error.startswith(words) for error in told) == 1, "its owner"
    (other,) = (error for error in told if not error.startswith(words))
    assert other.startswith(("RuntimeError: rank 0: " + words, "RuntimeError: rank 1: " + words))
    assert "(while calibrating layers.0.mlp.down_proj.weight)" in other
