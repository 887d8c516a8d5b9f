"""Models as strangers write them: calibrated as the whole model would be, bit for bit, or refused by name at once."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from layerwise import GPTQ, Max, calibrate
from layerwise.inputs.replaying import hooks
from qtensor import NVFP4BlockScaling
from tests.layerwise.models import fingerprints
from tests.layerwise.strangers import DIM, REFUSED, SUPPORTED, Layer, Stranger, batches
from tests.ranks import run_ranks_each
from tests.sampling import sampled

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ALGORITHMS: dict[str, Any] = {"Max": Max(), "GPTQ": GPTQ()}


def calibrated(model: nn.Module, algorithm: str, data: list[Tensor] | None = None, **options: Any) -> dict[str, str]:
    """The bytes of a result, inputs' scales included; every stage on outputs of the unquantized ones."""
    given = {"inputs": "static", "layer_inputs": "unquantized", "progress": False, **options}
    share = batches() if data is None else data
    result = calibrate(model, share, recipe=NVFP4BlockScaling(), algorithm=ALGORITHMS[algorithm], **given)
    return fingerprints(result.state_dict())


APART = [*itertools.product(SUPPORTED, ALGORITHMS)]


# How a layer is run apart does not depend on who looks at its inputs: each stranger with one algorithm, in turn.
@sampled(("name", "algorithm"), APART, [case for number, case in enumerate(APART) if number % 4 in (0, 3)])
def test_layers_apart_give_what_the_whole_model_gives(name: str, algorithm: str) -> None:
    expected = calibrated(SUPPORTED[name](), algorithm, layers=())
    found = calibrated(SUPPORTED[name](), algorithm)
    assert [one for one in expected if found[one] != expected[one]] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_run_apart_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    build, message = REFUSED[name]
    model = build()
    before, modules = fingerprints(model.state_dict()), dict(model.named_modules())
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        calibrated(model, "GPTQ", checkpoint_dir=tmp_path / "run", layer_inputs="quantized")
    assert fingerprints(model.state_dict()) == before
    assert dict(model.named_modules()) == modules
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"progress.json", "progress.backup.json"}
    assert not any(module._forward_pre_hooks for module in model.modules())


RANKS = ["WritesIntoItsArgument", "FillsADict", "Autocast", "OwnCall", "HooksEverywhere", "CompiledInPlace"]
RANKS_REFUSED = ["ReadsABuffer", "AddsResiduals", "ChangesWhatLayersWrote", "Yields"]


def _on_ranks(name: str) -> dict[str, str] | str:
    """The outcome for a sharded model, of which the last rank has all batches but one, and the first one has none."""
    model = {**SUPPORTED, **{key: build for key, (build, _) in REFUSED.items()}}[name]()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = [] if rank == 0 and ranks > 1 else batches()
    try:
        return calibrated(model, "GPTQ", data)
    except (NotImplementedError, RuntimeError) as error:  # the latter where another rank found it
        return str(error)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_models_of_strangers(world_size: int) -> None:
    found = run_ranks_each(world_size, [*RANKS, *RANKS_REFUSED], _on_ranks)
    expected = {name: calibrated(SUPPORTED[name](), "GPTQ", layers=()) for name in RANKS}
    for rank, outcomes in enumerate(found):
        for name, outcome in zip([*RANKS, *RANKS_REFUSED], outcomes, strict=True):
            if name in expected:
                assert outcome == expected[name], f"{name} on rank {rank}"
            else:
                assert isinstance(outcome, str), f"{name} on rank {rank} ran"
                assert REFUSED[name][1] in outcome, f"{name} on rank {rank}"


def test_calibrating_under_autocast_sees_every_change_of_a_weight() -> None:
    """Autocast keeps casts of weights until it ends, and would go on with those from before they were quantized."""

    def one(**cache: bool) -> dict[str, str]:
        model = Stranger()
        with torch.autocast("cpu", torch.bfloat16, **cache):
            found = calibrated(model, "GPTQ", layer_inputs="quantized")
            assert torch.is_autocast_cache_enabled() is cache.get("cache_enabled", True)
        return found

    assert one() == one(cache_enabled=False)


# -- mixed precision ---------------------------------------------------------------------------------------------------


class Casts(Stranger):
    """Takes any dtype anywhere; a mask in fp32 goes to all layers."""

    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            x = self.norm((hidden * mask).to(self.norm.weight.dtype))
            inner = torch.tanh(self.up(x.to(self.up.weight.dtype)))
            return hidden + self.down(inner.to(self.down.weight.dtype))

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        mask = torch.arange(DIM, device=ids.device, dtype=torch.float32) / 7 + ids[..., None] / 3
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden.to(self.norm.weight.dtype)


BF16, FP32 = torch.bfloat16, torch.float32
POLICIES: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "other outputs": (FP32, {"param_dtype": BF16, "output_dtype": FP32}, "layers and root"),
    "only outputs": (FP32, {"output_dtype": BF16}, "layers and root"),
    "inputs as they are": (FP32, {"param_dtype": BF16, "cast_forward_inputs": False}, "layers and root"),
    "the stored dtype": (BF16, {"param_dtype": BF16}, "layers and root"),
    "a wider dtype": (BF16, {"param_dtype": FP32, "output_dtype": BF16}, "layers and root"),
    "the root alone": (FP32, {"param_dtype": BF16}, "root"),
    "the layers alone": (FP32, {"param_dtype": BF16, "output_dtype": FP32}, "layers"),
    "one group of layers": (FP32, {"param_dtype": BF16, "output_dtype": BF16}, "group"),
}


def _in_mixed_precision(case: tuple[str, str, bool]) -> dict[str, str]:
    name, algorithm, at_once = case
    dtype, policy, where = POLICIES[name]
    model: Any = Casts().to(dtype)
    options = {"mp_policy": MixedPrecisionPolicy(**policy)}
    if where == "group":
        fully_shard([*model.layers], **options)
    elif where != "root":
        for layer in model.layers:
            fully_shard(layer, **options)
    if where != "layers":
        fully_shard(model, **options)
    return calibrated(
        model, algorithm, batches()[dist.get_rank() :: dist.get_world_size()], **({"layers": ()} if at_once else {})
    )


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_layer_casts_what_its_policy_says(world_size: int) -> None:
    """With `layers=()` FSDP's own hooks cast."""
    cases = [
        (name, algorithm, at_once)
        for number, name in enumerate(POLICIES)
        for algorithm in ([*ALGORITHMS] if world_size == 1 else [[*ALGORITHMS][number % 2]])
        for at_once in (False, True)
        if hooks.EACH_OF_A_GROUP_CASTS or POLICIES[name][2] != "group"
    ]
    for outcomes in run_ranks_each(world_size, cases, _in_mixed_precision):
        found = dict(zip(cases, outcomes, strict=True))
        for name, algorithm, at_once in cases:
            if at_once:
                assert found[name, algorithm, False] == found[name, algorithm, True], f"{name}, {algorithm}"


def _in_one_group(casts: bool) -> str:
    model = Casts()
    fully_shard([*model.layers], mp_policy=MixedPrecisionPolicy(param_dtype=BF16 if casts else None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "EACH_OF_A_GROUP_CASTS", False)
        try:
            calibrated(model, "Max", batches())
        except NotImplementedError as error:
            return str(error)
    return ""


def test_a_group_of_which_only_the_ends_cast_is_refused_by_name() -> None:
    """As torch did before 2.13."""
    ((refused, ran),) = run_ranks_each(1, [True, False], _in_one_group)
    assert refused.startswith("calibrate: layer layers.0 shares its fully_shard call with other modules, under Mixed")
    assert refused.endswith("Call fully_shard for each layer, take torch 2.13 or newer, or layers=()")
    assert ran == ""
