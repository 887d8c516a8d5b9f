"""Models of storage="high_precision": calibrated on their dense values, to the bytes of the plain dense model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from dcp_adapters import export_hf
from fsdp_hooks import unsharded
from fsdp_hooks.torch_private import local_of
from qtensor import QuantizedTensor, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.layerwise.models import (
    ALGORITHMS,
    RECIPES,
    assert_same,
    batches,
    fingerprints,
    forward,
    outcome,
    reference,
    run,
    shard,
    toy,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves, sampled

if TYPE_CHECKING:
    from layerwise import Event

NVFP4, MXFP8 = RECIPES["nvfp4"], RECIPES["mxfp8"]
METHODS: dict[str, tuple[str, Any]] = {"scales": ("Mse", NVFP4), "folds": ("AWQ", MXFP8), "values": ("GPTQ", NVFP4)}


def model_of(recipe: Any, **options: Any) -> Any:
    """The toy with its values in high-precision storage."""
    with quantized_model_init(recipe, storage="high_precision"):
        model = toy(**options)
    model.load_state_dict(toy(**options).state_dict())
    assert sum(isinstance(param, HighPrecisionWeight) for param in model.parameters()) == 25
    return model


def share() -> list[Tensor]:
    return batches()[dist.get_rank() :: dist.get_world_size()]


def calibrated(name: str) -> dict[str, dict[str, str]]:
    algorithm, recipe = METHODS[name]
    model = shard(model_of(recipe))
    forward(model, batches()[0])  # after which FSDP's buffers are those of quantized gathers
    result = run(model, share(), recipe, ALGORITHMS[algorithm])
    assert all(isinstance(local_of(layer.attn.q_proj.weight), HighPrecisionWeight) for layer in model.layers)
    assert torch.isfinite(forward(model, batches()[0])).all()
    return outcome(model, result)


def test_one_process_comes_to_the_bytes_of_the_dense_model() -> None:
    for algorithm, recipe in METHODS.values():
        model = model_of(recipe)
        result = run(model, batches(), recipe, ALGORITHMS[algorithm])
        assert_same(outcome(model, result), reference(toy, recipe, ALGORITHMS[algorithm]), algorithm)


@halves("names", METHODS, ["folds", "values"])
@sampled("world_size", [1, 3], [3])
def test_ranks_come_to_the_bytes_of_the_dense_model(world_size: int, names: tuple[str, ...]) -> None:
    for outcomes in run_ranks_each(world_size, names, calibrated):
        for (algorithm, recipe), found in zip((METHODS[name] for name in names), outcomes, strict=True):
            assert_same(found, reference(toy, recipe, ALGORITHMS[algorithm]), algorithm)


def shards_with(policy: str) -> tuple[dict[str, str], dict[str, str]]:
    """The result of high-precision storage, and of plain dense shards, under a policy of FSDP."""
    options: dict[str, Any] = {
        "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }[policy]
    return tuple(  # type: ignore[return-value]
        fingerprints(run(shard(model, **options), share(), NVFP4, ALGORITHMS["GPTQ"]).state_dict())
        for model in (model_of(NVFP4, layers=3), toy(layers=3))
    )


def test_policies_of_fsdp_see_the_values_that_dense_shards_have() -> None:
    for outcomes in run_ranks_each(2, ("mixed precision", "offload"), shards_with):
        for high, dense in outcomes:
            assert high == dense


class Stop(Exception):
    pass


def stop_at(kind: str, index: int) -> Any:
    def on_event(event: Event) -> None:
        if (event.kind, event.index) == (kind, index):
            raise Stop

    return on_event


def resumed(case: tuple[str, Path]) -> tuple[dict[str, dict[str, str]], tuple[int, ...]]:
    name, path = case
    algorithm, recipe = METHODS[name]
    options: dict[str, Any] = {"checkpoint_dir": path / name}
    with pytest.raises(Stop):
        run(shard(model_of(recipe)), share(), recipe, ALGORITHMS[algorithm], on_event=stop_at("write", 2), **options)
    model = shard(model_of(recipe))
    result = run(model, share(), recipe, ALGORITHMS[algorithm], **options)
    return outcome(model, result), tuple(result.report.resumed)


@pytest.mark.full
def test_a_resumed_run_goes_on(shared_tmp_path: Path) -> None:
    for outcomes in run_ranks_each(2, [(name, shared_tmp_path) for name in METHODS], resumed):
        for (algorithm, recipe), (found, before) in zip(METHODS.values(), outcomes, strict=True):
            assert before == (0, 1)
            assert_same(found, reference(toy, recipe, ALGORITHMS[algorithm]), algorithm)


# -- what is left in the model -----------------------------------------------------------------------------------------


def gathered() -> dict[str, Any]:
    """The values of the result, and those that gathers send afterwards; the scales that shards have."""
    model = shard(model_of(MXFP8))
    result = run(model, share(), MXFP8, ALGORITHMS["Max"])
    weights = {name: entry.full_tensor() for name, entry in result.state_dict().items()}
    expected = fingerprints({name: entry.dequantize() for name, entry in weights.items()})
    held: dict[str, Tensor] = {}
    for module in (*model.layers, model):
        with unsharded(module):
            held |= {
                name: param.dequantize()
                for name, param in model.named_parameters()
                if isinstance(param, QuantizedTensor) and name not in held
            }
    wide = shard(model_of(NVFP4))
    run(wide, share(), NVFP4, ALGORITHMS["Max"])
    shards = {name: local_of(param) for name, param in wide.named_parameters()}
    scales = {
        name: float(one.shared_scale())
        for name, one in shards.items()
        if isinstance(one, HighPrecisionWeight) and one.numel() and "shared_gate" not in name
    }
    return {"expected": expected, "found": fingerprints(held), "scales": scales}


def test_gathers_send_the_result_and_shards_agree_on_their_scales() -> None:
    """MXFP8: a block gets the scale that it had or half of it, and its values are elements under both."""
    ranks = run_ranks(2, gathered)
    for one in ranks:
        assert one["found"] == one["expected"]
        assert one["scales"] == ranks[0]["scales"]


def test_an_error_leaves_the_values_as_they_were() -> None:
    model = model_of(NVFP4)
    before = fingerprints(model.state_dict())
    with pytest.raises(Stop):
        run(model, batches(), NVFP4, ALGORITHMS["GPTQ"], on_event=stop_at("write", 0))
    assert fingerprints(model.state_dict()) == before
    assert isinstance(model.head.weight, HighPrecisionWeight)


def test_what_is_excluded_computes_as_in_the_model() -> None:
    """With its quantized weight: the inputs of what comes behind it are those that the model will have."""
    model, dense = model_of(MXFP8), toy()
    with torch.no_grad():
        for layer in dense.layers:
            for linear in (layer.attn.q_proj, layer.mlp.down_proj):
                with quantized_model_init(MXFP8):
                    stored = nn.Linear(*linear.weight.T.shape)
                stored.weight.copy_(linear.weight)
                linear.weight.copy_(stored.weight.dequantize())
    left = {"exclude": ["*.q_proj", "*.down_proj"]}
    found, expected = (run(one, batches(), MXFP8, ALGORITHMS["GPTQ"], **left) for one in (model, dense))
    assert fingerprints(found.state_dict()) == fingerprints(expected.state_dict())
    kept = model.layers[0].attn.q_proj.weight
    assert torch.equal(kept.dense, toy().layers[0].attn.q_proj.weight)


def test_another_recipe_is_refused_by_name() -> None:
    model = model_of(MXFP8)
    before = fingerprints(model.state_dict())
    message = r"layers\.0\.attn\.q_proj\.weight was built under .*MXFP8.*high_precision.*expected NVFP4.*that recipe"
    with pytest.raises(ValueError, match=message):
        run(model, batches(1), NVFP4, ALGORITHMS["Max"])
    assert fingerprints(model.state_dict()) == before


def exported(path: Path) -> None:
    for name, model in (("high", model_of(NVFP4, dtype=torch.bfloat16)), ("dense", toy(dtype=torch.bfloat16))):
        whole = shard(copy.deepcopy(model))
        result = run(whole, share(), NVFP4, ALGORITHMS["GPTQ"], inputs="static")
        export_hf({**whole.state_dict(), **result.state_dict()}, path / name, layout="modelopt", progress=False)


def test_an_export_is_that_of_the_dense_model(shared_tmp_path: Path) -> None:
    run_ranks(2, exported, shared_tmp_path)
    high, dense = (
        {file.name: file.read_bytes() for file in (shared_tmp_path / name).iterdir()} for name in ("high", "dense")
    )
    assert high.keys() == dense.keys() >= {"model.safetensors", "hf_quant_config.json"}
    assert high == dense
