"""Ranks that hold different tensors, as pipeline stages and experts do: a strict load asks what they have together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_adapters import QuantizedLoadPlanner
from qtensor import MXFP8BlockScaling, quantize_
from tests import ranks
from tests.dcp_adapters.cases import alone, bits, held, load, model, placed, save, values
from tests.ranks import run_ranks, run_ranks_catching

CUT = 2  # layers of the first stage
STAGES = (("model.embed_tokens", "model.layers.0.", "model.layers.1."), ("model.layers.", "model.norm", "lm_head"))
ABSENT = "only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)"
MISFIT = "the checkpoint does not fit the target; nothing has been loaded"


def llama(seed: int) -> dict[str, Tensor]:
    """The tensors of transformers' Llama, its linears quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "num_hidden_layers": 2 * CUT}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    torch.manual_seed(seed)
    net = LlamaForCausalLM(config)
    quantize_(net, MXFP8BlockScaling(), exclude=("lm_head",))
    return net.state_dict()


def stage(whole: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What one of two pipeline stages has of a model, with optimizer states under the names of torch's flat ones."""
    first = {name for name in whole if name.startswith(STAGES[0])}
    own = {name: value for name, value in whole.items() if (name in first) == (rank == 0)}
    moments = {f"state.{name}.exp_avg": torch.full(value.shape, 0.5 + rank) for name, value in own.items()}
    return {"model": own, "optim": moments}


def save_stages(path: Path) -> None:
    save(stage(llama(0), dist.get_rank()), path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two stages wrote."""
    base: Path = ranks.agreed(tmp_path_factory.mktemp("stages"))
    run_ranks(2, save_stages, base / "stages")
    return base / "stages"


def load_stage(path: Path) -> None:
    own = stage(llama(1), dist.get_rank())
    own["optim"] = {name: torch.zeros_like(value) for name, value in own["optim"].items()}
    load(own, path)
    assert held(own) == held(stage(llama(0), dist.get_rank()))


def test_stages_load_what_stages_saved(saved: Path) -> None:
    run_ranks(2, load_stage, saved)


def load_whole(path: Path) -> None:
    """As the whole model on one rank, while the other has an empty state dict, or empty containers."""
    for empty in ({}, {"model": {}}):
        whole = {"model": llama(1)} if dist.get_rank() == 0 else dict(empty)
        load(whole, path)
        assert held(whole) == (held({"model": llama(0)}) if dist.get_rank() == 0 else {})


def test_a_rank_may_have_nothing(saved: Path) -> None:
    run_ranks(2, load_whole, saved)


def load_less(path: Path, lost: str) -> None:
    own = stage(llama(1), dist.get_rank())
    own["model"] = {name: value for name, value in own["model"].items() if name != lost}
    before = held(own)
    try:
        load(own, path)
    finally:
        assert held(own) == before


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_what_no_stage_has_is_refused_alike(lost: str, saved: Path) -> None:
    errors = run_ranks_catching(2, load_less, saved, lost)
    assert errors[0] == errors[1]
    told = [line.strip() for line in errors[0].splitlines() if ABSENT in line]
    assert told == [f"model.{lost}: {ABSENT}"]
    assert MISFIT in errors[0]


def load_misfit(path: Path) -> None:
    own = stage(llama(1), dist.get_rank())
    if dist.get_rank() == 1:
        own["model"]["model.norm.weight"] = torch.zeros(3)
    before = held(own)
    try:
        load(own, path)
    finally:
        assert held(own) == before


def test_a_stage_that_does_not_fit_says_what_it_lacks_with_a_doubt(saved: Path) -> None:
    for error in run_ranks_catching(2, load_misfit, saved):
        assert MISFIT in error
        assert "model.model.norm.weight: the checkpoint holds shape (64,), the target has (3,)" in error
        assert "model.model.embed_tokens.weight: only the checkpoint has it, or another rank" in error
        assert ABSENT not in error


def load_alone(path: Path) -> None:
    own = stage(llama(1), dist.get_rank())
    dcp.load(own, checkpoint_id=path, planner=QuantizedLoadPlanner(), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_that_load_without_each_other_judge_alone(saved: Path) -> None:
    errors = run_ranks_catching(2, functools.partial(quietly, load_alone), saved)
    assert f"model.lm_head.weight: {ABSENT}" in errors[0]
    assert f"model.model.embed_tokens.weight: {ABSENT}" in errors[1]


def quietly(body: Callable[[Path], None], path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        body(path)


# -- experts, conversions, shards without elements ---------------------------------------------------------------------


def experts(seed: int, *, dense: bool = False) -> dict[str, Any]:
    """A shared weight cut over all ranks, of fewer rows than there are ranks; experts of each rank; one of no rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model("nvfp4", seed).state_dict()
    whole = {f"experts.{number}.w": net[f"layers.{number}.weight"] for number in range(3)}
    if dense:
        whole = {name: value.dequantize() for name, value in whole.items()}
    own = {name: value for n, (name, value) in enumerate(whole.items()) if n % dist.get_world_size() == dist.get_rank()}
    shared: DTensor = placed(values((1, 64), seed), mesh, Shard(0))
    return {"moe": own | {"shared": shared} | ({"nothing": torch.zeros(0, 4)} if dist.get_rank() == 1 else {})}


def load_experts(path: Path) -> None:
    save(experts(0), path)
    load(own := experts(1), path)
    assert held(own) == held(experts(0))
    load(dense := experts(1, dense=True), path, on_mismatch="convert")
    expected = experts(0, dense=True)
    for name, value in expected["moe"].items():
        if name.startswith("experts"):
            assert bits(dense["moe"][name]) == bits(value), name


def test_each_rank_has_experts_of_its_own(tmp_path: Path) -> None:
    run_ranks(2, load_experts, ranks.agreed(tmp_path) / "experts")


# -- loads that may leave out what only one side has -------------------------------------------------------------------


def load_nothing(path: Path, own: int) -> None:
    """Names with a prefix that the checkpoint has not; rank `own` has one that it has."""
    whole = {f"_orig_mod.{name}": value for name, value in stage(llama(1), dist.get_rank())["model"].items()}
    if dist.get_rank() == own:
        whole["model.norm.weight"] = torch.zeros(64)
    load({"model": whole}, path, allow_partial_load=True)


def test_a_partial_load_that_would_load_nothing_is_refused(saved: Path) -> None:
    errors = run_ranks_catching(2, load_nothing, saved, -1)
    assert errors[0] == errors[1]
    assert "the checkpoint has none of the 39 tensors of the target (model._orig_mod.lm_head.weight, " in errors[0]
    assert "nothing has been loaded. Look whether names have a prefix" in errors[0]
    run_ranks(2, load_nothing, saved, 1)


def test_a_partial_load_of_other_things_than_tensors_finds_nothing_too(tmp_path: Path) -> None:
    save({"w": values((4, 4), 0), "step": 3}, tmp_path)
    with alone(), pytest.raises(dcp.CheckpointException, match="has none of the 1 tensors of the target"):
        dcp.load(
            {"v": torch.zeros(4, 4), "step": 0},
            checkpoint_id=tmp_path,
            planner=QuantizedLoadPlanner(allow_partial_load=True),
        )
    load(only := {"step": 0}, tmp_path, allow_partial_load=True)
    assert only == {"step": 3}
