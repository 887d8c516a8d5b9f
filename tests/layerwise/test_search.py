"""`search_formats` measures what it says, changes nothing, comes to one assignment on any ranks, and resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcp_adapters import export_hf, import_hf
from layerwise import AWQ, GPTQ, Algorithm, Assignment, Event, Max, Mse, calibrate, search_formats
from layerwise.resume.progress import read_progress, write_progress
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from tests.layerwise import models
from tests.layerwise.algorithm_table import PAIRED
from tests.layerwise.small_runs import Stop, stopping
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled

NVFP4, MXFP8, ROW = NVFP4BlockScaling(), MXFP8BlockScaling(), Float8CurrentScaling()
RECIPES = [NVFP4, MXFP8, ROW, None]
BUDGET = 7.0


def search(model: nn.Module, data: Any = None, **options: Any) -> Assignment:
    given = {"recipes": RECIPES, "bits_per_weight": BUDGET, "progress": False, **options}
    return search_formats(model, models.batches() if data is None else data, **given)


def record(assignment: Assignment, path: Path) -> str:
    """Everything that it holds, as text."""
    return assignment.save(path).read_text()


# -- what is measured --------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_outputs() -> None:
    """By definition: |x (Q - W)^T|^2 over |x W^T|^2, with x seen by a hook, in fp64."""
    model = models.llama()
    before = models.fingerprints(model.state_dict())
    found = search(model, exclude=["lm_head"])
    assert models.fingerprints(model.state_dict()) == before, "the model is as it was"
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, args, __, name=name: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
            )
    with torch.no_grad():
        for ids in models.batches():
            model(ids)
    for group in found.groups:
        for candidate in group.candidates:
            expected = 0.0
            for name in group.names:
                x, weight = torch.cat(seen[name.removesuffix(".weight")]).double(), model.get_parameter(name).detach()
                rounded = weight if candidate.recipe is None else quantized(group.names, name, model, candidate.recipe)
                error = rounded.double() - weight.double()
                expected += float((x @ error.T).square().sum() / (x @ weight.double().T).square().sum())
            # products of 64 to 96 terms in fp32, each off by 2^-24 of the largest, and errors of 1 % and more
            assert candidate.error == pytest.approx(expected, rel=2e-3, abs=0), group.names


def quantized(names: Sequence[str], name: str, model: nn.Module, recipe: Any) -> torch.Tensor:
    """As Max rounds it: fused weights in NVFP4 share their global scale, so they are quantized as one."""
    fused = torch.cat([model.get_parameter(one).detach() for one in names])
    q: Any = quantize(fused, recipe)
    rows = [model.get_parameter(one).shape[0] for one in names]
    return q.dequantize(torch.float32).split(rows)[names.index(name)]


def test_without_data_the_weights_are_compared() -> None:
    model = models.toy(layers=1)
    with pytest.warns(UserWarning, match="no rank has a batch"):
        found = search(model, [], recipes=[MXFP8, None], bits_per_weight=32)
    group = next(group for group in found.groups if group.names == ("layers.0.attn.o_proj.weight",))
    weight = model.layers[0].attn.o_proj.weight.detach().double()
    q: Any = quantize(weight.float(), MXFP8)
    expected = float((q.dequantize().double() - weight).square().sum() / weight.square().sum())
    assert group.candidates[0].error == pytest.approx(expected, rel=1e-6)


def test_the_rounding_is_that_of_the_algorithm() -> None:
    errors = {}
    for algorithm in (Max(), Mse(), GPTQ(), GPTQ(hessians="one_at_a_time"), *PAIRED.values()):
        found = search(models.llama(), algorithm=algorithm, recipes=[NVFP4, None], layers="model.layers.0")
        errors[str(algorithm)] = sum(group.candidates[0].error for group in found.groups)
    least, same = errors[str(GPTQ())], errors[str(GPTQ(hessians="one_at_a_time"))]
    assert least == same < min(errors[str(Mse())], errors[str(Max())])
    assert errors[str(Mse())] != errors[str(Max())]
    assert all(errors[str(algorithm)] == least for algorithm in PAIRED.values()), (
        "inputs of the unquantized model differ from themselves in nothing"
    )


def test_a_larger_budget_has_no_larger_error() -> None:
    first = search(models.toy(layers=2))
    last = None
    for budget in (4.7, 5, 6, 7, 8.5, 12, 32):
        found = first.at(budget)
        assert found.bits_per_weight is not None
        assert found.bits_per_weight <= budget
        assert found.bound is not None
        assert found.error is not None
        assert last is None or found.bound <= last
        last = found.bound
    assert first.at(32).error == 0
    assert {*first.at(32).recipes.values()} == {None}


# -- on ranks, and resumed ---------------------------------------------------------------------------------------------


def on_ranks(path: str) -> list[str]:
    """The assignment of two models, whose batches are split unevenly."""
    rank = dist.get_rank()
    mine = models.batches()[:1] if rank == 0 else models.batches()[1:]
    where = Path(path) / f"{rank}.json"
    toy = search(models.shard(models.toy(layers=2)), mine)
    experts = search(models.shard(models.expert_lists(layers=1)), mine, recipes=[NVFP4, MXFP8])
    return [record(toy, where), record(experts, where)]


def test_ranks_come_to_what_one_process_comes_to(tmp_path: Path) -> None:
    """To every bit of every error, and so to the same recipes."""
    toy = search(models.toy(layers=2))
    experts = search(models.expert_lists(layers=1), recipes=[NVFP4, MXFP8])
    assert len({*toy.recipes.values()}) > 1, "something was chosen"
    assert sum("experts" in group.names[0] for group in experts.groups) == 1, "all experts of a module together"
    expected = [record(toy, tmp_path / "toy.json"), record(experts, tmp_path / "experts.json")]
    assert run_ranks(2, on_ranks, str(tmp_path)) == [expected] * 2


def other_budgets() -> None:
    search(models.shard(models.toy(layers=1)), bits_per_weight=6.0 + dist.get_rank())


def test_ranks_that_ask_for_different_things() -> None:
    for told in run_ranks_catching(2, other_budgets):
        assert "the ranks disagree on the budget: rank 1 has bits_per_weight=7.0, compare=relative" in told


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    expected = record(search(models.toy()), tmp_path / "expected.json")
    run = tmp_path / "run"
    with pytest.raises(Stop):
        search(models.toy(), checkpoint_dir=run, on_event=stopping("calibrate", 2))
    told: list[Event] = []
    found = search(models.toy(), checkpoint_dir=run, on_event=told.append)
    assert record(found, tmp_path / "found.json") == expected
    assert [event.index for event in told if event.kind == "resumed"] == [0, 1]
    assert [event.index for event in told if event.kind == "metrics"] == [2, 3]
    told.clear()
    other = search(models.toy(), checkpoint_dir=run, bits_per_weight=9.0, compare="absolute", on_event=told.append)
    assert {event.kind for event in told} == {"resumed"}, "another budget measures nothing again"
    assert other == search(models.toy(), bits_per_weight=9.0, compare="absolute") != found.at(9.0)


def test_what_a_search_does_not_go_on_from(tmp_path: Path) -> None:
    search(models.toy(layers=1), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="holds a calibration of another recipe: recipes now without"):
        search(models.toy(layers=1), checkpoint_dir=tmp_path, recipes=[NVFP4, None])
    with pytest.raises(ValueError, match='another recipe: type was "Menu", now "NVFP4BlockScaling"'):
        calibrate(models.toy(layers=1), models.batches(), recipe=NVFP4, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="another algorithm"):
        search(models.toy(layers=1), checkpoint_dir=tmp_path, algorithm=Mse())


# -- with the result ---------------------------------------------------------------------------------------------------


def two_formats(first: Any = NVFP4, second: Any = MXFP8) -> Assignment:
    """By hand: q and k, which take one input, in two formats; a layer is not as the other."""
    return Assignment(
        {
            "layers.0.attn.q_proj.weight": first,
            "layers.0.attn.k_proj.weight": second,
            "layers.0.attn.v_proj.weight": None,
            "layers.0.mlp.down_proj.weight": second,
            "layers.1.attn.q_proj.weight": first,
            "layers.1.attn.k_proj.weight": first,
            "layers.1.attn.v_proj.weight": first,
            "layers.1.mlp.up_proj.weight": second,
        }
    )


def mixed_on_ranks(algorithm: Algorithm, path: str | None = None) -> dict[str, dict[str, str]]:
    model = models.shard(models.toy(layers=2))
    mine = models.batches()[dist.get_rank() :: dist.get_world_size()]
    return models.outcome(model, models.run(model, mine, two_formats(), algorithm, checkpoint_dir=path))


MIXED = {"Max": Max(), "GPTQ": GPTQ(), "AWQ": AWQ(alpha_step=0.5, clip_step=0.5)}


@sampled("algorithm", MIXED.values(), [GPTQ()], ids=MIXED)
def test_a_mixed_model_is_calibrated(algorithm: Algorithm) -> None:
    model = models.toy(layers=2)
    before = models.fingerprints(model.state_dict(), models.own)
    result = models.run(model, models.batches(), two_formats(), algorithm)
    models.assert_model_is_result(model, result, before)
    weights: dict[str, Any] = {
        name: value for name, value in result.state_dict().items() if isinstance(value, QuantizedTensor)
    }
    assert {name: q.recipe for name, q in weights.items()} == {
        name: recipe for name, recipe in two_formats().recipes.items() if recipe is not None
    }
    assert result.recipe == two_formats()
    if isinstance(algorithm, AWQ):
        folded = [name for name in result.state_dict() if "norm" in name]
        assert folded == ["layers.1.attn_norm.weight"], "only where one recipe has all that take the input"
    if isinstance(algorithm, Max):  # the bytes of quantize; in layer 1 q, k and v share a global scale
        dense = dict(models.toy(layers=2).named_parameters())
        for name in [one for one, q in weights.items() if q.recipe == MXFP8 or "layers.0" in one]:
            q: Any = quantize(dense[name].detach(), weights[name].recipe)
            assert models.fingerprints({name: weights[name]}) == models.fingerprints({name: q}), name
        layer_1 = [q.parts()["global_scale"] for name, q in weights.items() if "layers.1.attn" in name]
        assert len({float(scale) for scale in layer_1}) == 1
    found = run_ranks(2, mixed_on_ranks, algorithm)
    for outcome in found:
        models.assert_same(outcome, models.outcome(model, result), "two ranks")


def test_a_mixed_calibration_resumes(tmp_path: Path) -> None:
    for algorithm in (Max(), GPTQ()):
        model = models.toy(layers=2)
        expected = models.outcome(model, models.run(model, models.batches(), two_formats(), algorithm))
        run = tmp_path / type(algorithm).__name__
        with pytest.raises(Stop):
            models.run(
                models.toy(layers=2),
                models.batches(),
                two_formats(),
                algorithm,
                checkpoint_dir=run,
                on_event=stopping("capture", 1),
            )
        with pytest.raises(ValueError, match=r"another recipe: layers\.0\.attn\.q_proj\.weight was"):
            models.run(models.toy(layers=2), models.batches(), two_formats(first=ROW), algorithm, checkpoint_dir=run)
        again = models.toy(layers=2)
        result = models.run(again, models.batches(), two_formats(), algorithm, checkpoint_dir=run)
        assert result.report.resumed == (0,)
        models.assert_same(models.outcome(again, result), expected, "resumed")


def test_from_a_search_to_a_model_that_is_served(tmp_path: Path) -> None:
    """Search, calibrate, export, import: the values are those of the calibrated model, format by format."""
    model = models.llama()
    assignment = search(model, recipes=[NVFP4, MXFP8], bits_per_weight=6.0, exclude=["lm_head"])
    assert {*assignment.recipes.values()} == {NVFP4, MXFP8}
    result = calibrate(model, models.batches(), recipe=assignment, algorithm=GPTQ(), progress=False)
    assert str(assignment) in result.report.table()
    rest = {**model.state_dict(), **result.state_dict()}
    export_hf(rest, tmp_path / "out", config=model.config.to_dict())
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["quantization_config"]["format"] == "mixed-precision"
    served = import_hf(tmp_path / "out")
    for name, recipe in assignment.recipes.items():
        value: Any = served[name]
        assert isinstance(value, QuantizedTensor) == (recipe is not None)
        dense = value.dequantize(torch.float32) if isinstance(value, QuantizedTensor) else value
        assert torch.equal(dense, model.get_parameter(name)), name


def test_experts_in_one_parameter() -> None:
    """Both parameters of a module together, each expert measured by itself, and calibrated in what was chosen."""
    model = models.qwen3_moe()
    found = search(model, recipes=[NVFP4, ROW], bits_per_weight=6.0, layers="model.layers.0", include=["*layers.0.*"])
    (experts,) = (group for group in found.groups if "experts" in group.names[0])
    prefix = "model.layers.0.mlp.experts"
    assert {*experts.names} == {f"{prefix}.gate_up_proj", f"{prefix}.down_proj"}
    assert 0 < experts.candidates[1].error < experts.candidates[0].error
    result = models.run(model, models.batches(), Assignment(dict.fromkeys(experts.names, ROW)), GPTQ(scales=Max()))
    recipes = {name: value.recipe for name, value in result.state_dict().items()}
    assert recipes == dict.fromkeys(experts.names, ROW)


def test_tied_weights_are_left_out() -> None:
    model = models.toy(layers=1)
    model.head.weight = model.embed.weight
    assert "head.weight" not in search(model).recipes
    with pytest.raises(ValueError, match=r"gives 'head\.weight' NVFP4.*, which is tied to another weight"):
        models.run(model, models.batches(), Assignment({"head.weight": NVFP4}), Max())


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing(Algorithm):
    """Writes into the weights that it is asked about."""

    writes_weights: ClassVar[bool] = True

    def decide(self, group: Any, recipe: Any) -> Any:
        for linear in group.linears:
            linear.weight.mul_(2)
        return Max().decide(group, recipe)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipes": ["nvfp4"]}, "recipes has 'nvfp4'; expected recipes"),
        ({"recipes": NVFP4}, "expected a list, such as"),
        ({"recipes": []}, "recipes has no recipe"),
        ({"bits_per_weight": 4.0}, r"bits_per_weight=4\.0 is less than the cheapest recipes take"),
        ({"bits_per_weight": "5"}, "bits_per_weight='5'; expected a number"),
        ({"compare": "plain"}, "compare='plain' is not one of 'relative', 'absolute'"),
        ({"algorithm": "gptq"}, r"algorithm is 'gptq'; expected an instance"),
        ({"include": "head"}, r"include is a list of patterns, got 'head'; write \['head'\]"),
        ({"include": ["nothing"]}, "include pattern 'nothing' matches no module"),
        ({"include": ["head"], "exclude": ["head"]}, "no weight is left to choose a format for"),
        ({"inputs_on": "gpu"}, "inputs_on='gpu' is not one of"),
        ({"save_every": 0}, "save_every=0 is not a positive number of layers"),
        ({"expert_inputs": "some"}, "expert_inputs='some' is not one of"),
        ({"expert_inputs": "all"}, 'expert_inputs="all": the model has no experts'),
        ({"include": ["head"], "exclude": ["nothing"]}, "exclude pattern 'nothing' matches no module"),
        ({"weights": "."}, r"\. holds no safetensors|weights= and device= are for|is for models on the meta device"),
        ({"algorithm": Writing()}, "changed while Measuring calibrated"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    """In the name of the function that was called."""
    model = models.toy(layers=1)
    with pytest.raises(
        (ValueError, TypeError, RuntimeError, UserWarning, OSError), match=f"^search_formats: .*({words})"
    ):
        search(model, **options)


def test_a_model_without_weights_is_refused_by_each_in_its_own_name() -> None:
    with torch.device("meta"):
        model = models.toy(layers=1)
    with pytest.raises(ValueError, match=r"^search_formats: .* is on the meta device"):
        search(model)
    with pytest.raises(ValueError, match=r"^calibrate: .* is on the meta device"):
        calibrate(model, [], recipe=NVFP4, progress=False)


def test_quantized_storage_is_refused() -> None:
    model = models.toy(layers=1)
    model.head.weight = nn.Parameter(quantize(model.head.weight.detach(), MXFP8))
    with pytest.raises(ValueError, match=r"head\.weight is stored quantized under .*: formats are searched for dense"):
        search(model)


def test_who_writes_into_weights_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"changed while Measuring calibrated layers\.0, and it is"):
        search(models.toy(layers=1), algorithm=Writing())


def test_assignments_that_do_not_fit_the_model() -> None:
    for name, words in (
        ("layers.9.attn.q_proj.weight", "but the model has no module with a weight to quantize"),
        ("embed.weight", "but the model has no module"),
    ):
        with pytest.raises(ValueError, match=rf"the assignment gives '{name}' {NVFP4.__class__.__name__}.*{words}"):
            models.run(models.toy(layers=1), models.batches(), Assignment({name: NVFP4}), Max())
    with pytest.raises(ValueError, match='inputs="static" needs a tensor-wide scale, which MXFP8'):
        models.run(models.toy(layers=2), models.batches(), two_formats(), Max(), inputs="static")


@pytest.mark.parametrize(
    "change",
    [
        {"noise": [0.5]},
        {"noise": [0.5, "1", 0.0, 0.0]},
        {"signal": "1"},
        {"tokens": 1.5},
        {"name": "layers.9.weight"},
        {"more": 1},
    ],
    ids=str,
)
def test_notes_that_are_not_those_of_a_search(change: dict[str, Any], tmp_path: Path) -> None:
    """Digests tell that a file is the one that was written, not that a search wrote it."""
    with pytest.raises(Stop):
        search(models.toy(layers=1), checkpoint_dir=tmp_path, on_event=stopping("capture", 1))
    progress, _ = read_progress(tmp_path)
    assert progress is not None
    (window,) = progress.windows
    extra = [[{**record, **change} for record in stage] for stage in window.extra]
    write_progress(tmp_path, dataclasses.replace(progress, windows=(dataclasses.replace(window, extra=extra),)))
    with pytest.raises(ValueError, match=r"layers\.0: its note is .*, expected the errors of its linears"):
        search(models.toy(layers=1), checkpoint_dir=tmp_path)
