"""Calibrating sharded models: any number of ranks comes to the bytes of one process, and FSDP2 goes on as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from qtensor import QuantizedTensor, quantize_, quantized_model_init
from tests.layerwise.models import (
    ALGORITHMS,
    RECIPES,
    assert_model_is_result,
    assert_same,
    batches,
    filled,
    fingerprint,
    fingerprints,
    forward,
    llama,
    outcome,
    own,
    reference,
    run,
    shard,
    toy,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves, sampled

Outcome = dict[str, dict[str, str]]
NVFP4, MXFP8, FLOAT8 = RECIPES["nvfp4"], RECIPES["mxfp8"], RECIPES["float8_tensor"]

# What the algorithms that write weights are tried with, and one that does not.
METHODS: dict[str, tuple[Any, Any]] = {
    "SmoothQuant": (ALGORITHMS["SmoothQuant"], MXFP8),
    "AWQ": (ALGORITHMS["AWQ"], FLOAT8),
    "GPTQ": (ALGORITHMS["GPTQ"], NVFP4),
    "Max": (ALGORITHMS["Max"], NVFP4),
}


def share(data: Sequence[Tensor]) -> list[Tensor]:
    """This rank's batches, interleaved."""
    return list(data[dist.get_rank() :: dist.get_world_size()])


def calibrated(model: nn.Module, algorithm: Any, recipe: Any, **options: Any) -> Outcome:
    """Calibrate a sharded model and look at all that must hold of it afterwards."""
    before = fingerprints(model.state_dict(), own)
    modules, placements = dict(model.named_modules()), _placements(model)
    result = run(model, share(batches()), recipe, algorithm, **options)
    assert dict(model.named_modules()) == modules
    assert not any("forward" in vars(module) for module in modules.values()), "a patched forward was left"
    assert _placements(model) == placements, "a parameter is no DTensor any more, or another one"
    assert_model_is_result(model, result, before)
    _assert_usable(model)
    return outcome(model, result)


def _placements(model: nn.Module) -> dict[str, Any]:
    return {name: (type(param), getattr(param, "placements", None)) for name, param in model.named_parameters()}


def _assert_usable(model: nn.Module) -> None:
    """A forward before taking the state dict is a forward after it, and leaves the values alone."""
    ids = batches()[0]
    first, state = forward(model, ids), fingerprints(model.state_dict(), own)
    assert torch.equal(forward(model, ids), first), "the forward changed when the state dict was taken"
    assert fingerprints(model.state_dict(), own) == state, "the state dict changed with a forward"
    assert torch.isfinite(first).all()


# -- every algorithm ---------------------------------------------------------------------------------------------------


def _each_algorithm(case: tuple[str, bool]) -> Outcome:
    name, ran = case
    algorithm, recipe = METHODS[name]
    model = shard(BUILDS[dist.get_world_size()]())
    if ran:
        forward(model, batches()[0])
    return calibrated(model, algorithm, recipe)


def _two_layers() -> nn.Module:
    return toy(layers=2)


BUILDS = {1: _two_layers, 2: _two_layers, 3: toy}  # three layers once: the third repeats the first one's shapes


# In `make test` one that folds and one that rounds column by column; the other files have the others on ranks.
@halves("names", METHODS, ["AWQ", "GPTQ"])
@sampled("world_size", [1, 2, 3], [3])
def test_all_ranks_come_to_what_one_process_comes_to(world_size: int, names: tuple[str, ...]) -> None:
    cases = [(name, index % 2 == world_size % 2) for index, name in enumerate(METHODS) if name in names]
    for rank, outcomes in enumerate(run_ranks_each(world_size, cases, _each_algorithm)):
        for (name, ran), found in zip(cases, outcomes, strict=True):
            algorithm, recipe = METHODS[name]
            expected = reference(BUILDS[world_size], recipe, algorithm)
            assert_same(found, expected, f"{name} on rank {rank} of {world_size}, a forward before: {ran}")


# -- every way to shard ------------------------------------------------------------------------------------------------


def _nested(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer.mlp)
    return shard(model)


def _only_layers(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return model


def _some_layers(model: Any) -> Any:
    fully_shard(model.layers[1])
    return fully_shard(model)


def _several_kept(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer.attn, reshard_after_forward=False)
    return shard(model, reshard_after_forward=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "the mlp of each layer by itself": _nested,
    "only the root": fully_shard,
    "only the layers": _only_layers,
    "the root and one layer": _some_layers,
    "groups that keep their weights": _several_kept,
    "CPU offload": lambda model: shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "replicas": lambda model: model,
}


# Each with an algorithm that folds into norms or with one that rounds column by column; the ways in which several
# groups are gathered, with both.
WAYS_AND_METHODS = [
    ("the mlp of each layer by itself", "AWQ"),
    ("the mlp of each layer by itself", "GPTQ"),
    ("only the root", "AWQ"),
    ("only the layers", "AWQ"),
    ("the root and one layer", "GPTQ"),
    ("groups that keep their weights", "AWQ"),
    ("groups that keep their weights", "GPTQ"),
    ("CPU offload", "GPTQ"),
    ("replicas", "AWQ"),
]


def _each_way(case: tuple[str, str]) -> Outcome:
    way, method = case
    algorithm, recipe = METHODS[method]
    model = WAYS[way](toy(layers=2))
    if way == "groups that keep their weights":
        forward(model, batches()[0])
    found = calibrated(model, algorithm, recipe)
    if way == "only the layers":
        assert not isinstance(model, FSDPModule)
        assert type(model.head.weight) is nn.Parameter
    return found


# Ways in which groups of other sizes than a layer are gathered, at other times, or from elsewhere.
FIRST_WAYS = [
    ("the mlp of each layer by itself", "GPTQ"),
    ("only the root", "AWQ"),
    ("groups that keep their weights", "AWQ"),
    ("CPU offload", "GPTQ"),
]


@halves("cases", WAYS_AND_METHODS, FIRST_WAYS)
def test_however_the_model_is_sharded(cases: tuple[tuple[str, str], ...]) -> None:
    assert {way for way, _ in WAYS_AND_METHODS} == {*WAYS}
    for outcomes in run_ranks_each(2, cases, _each_way):
        for (way, method), found in zip(cases, outcomes, strict=True):
            algorithm, recipe = METHODS[method]
            assert_same(found, reference(_two_layers, recipe, algorithm), f"{method}, {way}")


def _hybrid(method: str) -> Outcome:
    algorithm, recipe = METHODS[method]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return calibrated(shard(_two_layers(), mesh=mesh), algorithm, recipe)


@sampled("method", ["SmoothQuant", "GPTQ"], ["GPTQ"])
def test_hybrid_sharding_with_other_batches_on_every_rank(method: str) -> None:
    algorithm, recipe = METHODS[method]
    for found in run_ranks(4, _hybrid, method):
        assert_same(found, reference(_two_layers, recipe, algorithm), method)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a layer without targets": ("SmoothQuant", {"include": ("layers.1.*",)}),
    "only the head": ("GPTQ", {"include": ("head",)}),
    "a layer by name": ("GPTQ", {"layers": "layers.1"}),
    "no layers": ("AWQ", {"layers": ()}),
    "inputs on disk": ("GPTQ", {"inputs_on": "disk"}),
}


def _each_option(case: str) -> Outcome:
    method, options = OPTIONS[case]
    algorithm, recipe = METHODS[method]
    return calibrated(shard(_two_layers()), algorithm, recipe, **options)


@halves("cases", OPTIONS, ["a layer without targets", "only the head", "inputs on disk"])
def test_options_mean_the_same_on_ranks(cases: tuple[str, ...]) -> None:
    for outcomes in run_ranks_each(2, cases, _each_option):
        for case, found in zip(cases, outcomes, strict=True):
            method, options = OPTIONS[case]
            algorithm, recipe = METHODS[method]
            assert_same(found, reference(_two_layers, recipe, algorithm, **options), case)


# -- dtypes ------------------------------------------------------------------------------------------------------------


def _bf16_toy() -> nn.Module:
    return toy(layers=2, dtype=torch.bfloat16)


def _in_bf16(method: str) -> Outcome:
    algorithm, recipe = METHODS[method]
    return calibrated(shard(_bf16_toy()), algorithm, recipe)


def _in_mixed_precision(method: str) -> Outcome:
    algorithm, recipe = METHODS[method]
    model = shard(_two_layers(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = calibrated(model, algorithm, recipe)
    assert all(param.dtype is torch.float32 for param in model.parameters())
    return found


@sampled("world_size", [1, 2], [2])
def test_models_in_bf16_and_gathered_in_bf16(world_size: int) -> None:
    """Under mixed precision a layer computes what it computes in bf16, so what is decided in it is the same."""
    methods = ["SmoothQuant", "GPTQ"]
    plain, mixed = (run_ranks_each(world_size, methods, fn)[0] for fn in (_in_bf16, _in_mixed_precision))
    for method, found, gathered in zip(methods, plain, mixed, strict=True):
        algorithm, recipe = METHODS[method]
        expected = reference(_bf16_toy, recipe, algorithm)
        assert_same(found, expected, method)
        quantized = {name: value for name, value in expected["result"].items() if ":" in name}
        assert {name: gathered["result"][name] for name in quantized} == quantized, f"{method}, mixed precision"


# -- storage -----------------------------------------------------------------------------------------------------------


def _quantized_toy(recipe: Any = NVFP4) -> nn.Module:
    model = _two_layers()
    quantize_(model, recipe)
    return model


def _built_quantized() -> nn.Module:
    with quantized_model_init(NVFP4):
        return _two_layers()


def _in_quantized_storage(case: tuple[str, bool]) -> Outcome:
    method, built = case
    model = shard(_built_quantized() if built else _quantized_toy())
    found = calibrated(model, ALGORITHMS[method], NVFP4)
    stored = {name for name, param in model.named_parameters() if isinstance(param.to_local(), QuantizedTensor)}
    assert len(stored) == 2 * 8 + 1, "quantized storage stays quantized"
    assert {name: one for name, one in found["model"].items() if ":" in name} == {
        name: one for name, one in found["result"].items() if ":" in name
    }, "the bytes of the model are those of the result"
    return found


@halves("cases", [("Max", False), ("GPTQ", False), ("AWQ", True)], [("GPTQ", False), ("AWQ", True)])
def test_quantized_storage_holds_the_bytes_of_the_result(cases: tuple[tuple[str, bool], ...]) -> None:
    for outcomes in run_ranks_each(3, cases, _in_quantized_storage):
        for (method, built), found in zip(cases, outcomes, strict=True):
            expected = reference(_built_quantized if built else _quantized_toy, NVFP4, ALGORITHMS[method])
            assert_same(found, expected, f"{method}, built quantized: {built}")


def test_max_gives_quantized_storage_the_scales_of_its_own_values() -> None:
    """Nothing is known of the values before; what the stored bytes say is calibrated like any dense weight."""

    def dense() -> nn.Module:
        model, stored = _two_layers(), _quantized_toy()
        for name, param in stored.named_parameters():
            value: Any = param.detach()
            model.get_parameter(name).data.copy_(value.dequantize() if isinstance(value, QuantizedTensor) else value)
        return model

    expected = outcome(*_run(dense()))["result"]
    assert outcome(*_run(_quantized_toy()))["result"] == expected


def _run(model: nn.Module) -> Any:
    return model, run(model, batches(), NVFP4, ALGORITHMS["GPTQ"])


# -- more than once ----------------------------------------------------------------------------------------------------


def _twice(model: nn.Module, data: Sequence[Tensor]) -> Outcome:
    run(model, data, FLOAT8, ALGORITHMS["AWQ"])
    return outcome(model, run(model, data, MXFP8, ALGORITHMS["GPTQ"]))


def _twice_sharded() -> Outcome:
    model = shard(_two_layers())
    found = _twice(model, share(batches()))
    _assert_usable(model)
    return found


def test_twice_in_a_row() -> None:
    expected = _twice(_two_layers(), batches())
    for found in run_ranks(2, _twice_sharded):
        assert_same(found, expected, "AWQ, then GPTQ")


def _stays_trainable() -> Tensor:
    model = shard(_two_layers())
    model.train()
    model.layers[0].attn.eval()
    run(model, share(batches()), MXFP8, ALGORITHMS["SmoothQuant"])
    assert model.training
    assert model.layers[0].mlp.training
    assert not model.layers[0].attn.training
    logits = model(batches()[0])
    logits.square().mean().backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert all(isinstance(grad, DTensor) for grad in grads.values()), grads
    return grads["layers.0.attn.q_proj.weight"].full_tensor()


def test_the_model_trains_afterwards() -> None:
    model = _two_layers()
    run(model, batches(), MXFP8, ALGORITHMS["SmoothQuant"])
    model(batches()[0]).square().mean().backward()
    expected = model.layers[0].attn.q_proj.weight.grad
    for found in run_ranks(2, _stays_trainable):
        torch.testing.assert_close(found, expected)


# -- stopped and gone on with ------------------------------------------------------------------------------------------

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
RESUMED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "only the root": (fully_shard, "GPTQ"),
    "the root and one layer": (_some_layers, "Max"),
    "mixed precision": (lambda model: shard(model, mp_policy=MIXED), "Max"),
    "only the root, in mixed precision": (lambda model: fully_shard(model, mp_policy=MIXED), "SmoothQuant"),
}


def _stop_in_the_second_layer(event: Any) -> None:
    if event.kind == "layer_start" and event.index == 1:
        raise KeyboardInterrupt


def _resumed(case: str, directory: Path) -> tuple[Outcome, Outcome | None]:
    build, method = RESUMED[case]
    algorithm, recipe = METHODS[method]
    options: dict[str, Any] = {"checkpoint_dir": directory / case}
    with pytest.raises(KeyboardInterrupt):
        run(build(_two_layers()), share(batches()), recipe, algorithm, on_event=_stop_in_the_second_layer, **options)
    model = build(_two_layers())
    result = run(model, share(batches()), recipe, algorithm, **options)
    assert list(result.report.resumed) == [0]
    mixed = "mixed precision" in case  # what else comes to what one process comes to
    return outcome(model, result), calibrated(build(_two_layers()), algorithm, recipe) if mixed else None


@halves("cases", RESUMED, ["the root and one layer", "only the root, in mixed precision"])
def test_a_resumed_run_comes_to_the_same_however_the_model_is_sharded(
    cases: tuple[str, ...], shared_tmp_path: Path
) -> None:
    for pairs in run_ranks_each(2, cases, _resumed, shared_tmp_path):
        for case, (found, uninterrupted) in zip(cases, pairs, strict=True):
            algorithm, recipe = METHODS[RESUMED[case][1]]
            assert_same(found, uninterrupted or reference(_two_layers, recipe, algorithm), case)


# -- a model of transformers -------------------------------------------------------------------------------------------


def _llama(method: str) -> Outcome:
    algorithm, recipe = METHODS[method]
    return calibrated(shard(llama()), algorithm, recipe)


def test_llama_of_transformers() -> None:
    pytest.importorskip("transformers")
    methods = ["AWQ", "GPTQ"]  # one that folds, and one that does not
    for outcomes in run_ranks_each(2, methods, _llama):
        for method, found in zip(methods, outcomes, strict=True):
            algorithm, recipe = METHODS[method]
            expected = reference(llama, recipe, algorithm)
            assert_same(found, expected, method)
            assert found["model"]["model.embed_tokens.weight"] == fingerprint(llama().model.embed_tokens.weight)


def _empty() -> None:
    """Nothing but rows that most ranks have none of."""
    model = filled(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), torch.float32)
    for child in model:
        fully_shard(child)
    fully_shard(model)
    before = fingerprints(model.state_dict(), own)
    result = run(model, [torch.ones(3, 64)], NVFP4, ALGORITHMS["GPTQ"])
    assert_model_is_result(model, result, before)


def test_layers_of_which_most_ranks_hold_nothing() -> None:
    run_ranks(4, _empty)
