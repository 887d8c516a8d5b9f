"""From the text of a config to the config: what is taken, and each refusal by the path of its key."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

import layerwise
from layerwise import AWQ, GPTAQ, GPTQ, Algorithm, LocalHessian, Max, Mse, Qronos, SmoothQuant
from layerwise.__main__ import ALGORITHMS
from layerwise.command.config import CalibrationKeys, Config, DataKeys, ModelKeys, OutputKeys, plain
from layerwise.command.keys import keys_of
from layerwise.command.parsing import config_of, parse
from layerwise.command.yaml_text import ConfigError
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.spec.recipes import Recipe
from tests.layerwise.algorithm_table import TABLE


def values(**changed: Any) -> dict[str, Any]:
    """A config that is right, with some sections exchanged."""
    right = {
        "model": {"path": "m"},
        "recipe": "nvfp4",
        "algorithm": "Max",
        "data": {"path": "ids.npy"},
        "output": {"path": "o"},
    }
    return {name: value for name, value in {**right, **changed}.items() if value != "gone"}


def config(**changed: Any) -> Config:
    return config_of(values(**changed), ALGORITHMS)


def refusal(**changed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**changed)
    return str(caught.value)


# -- what is taken -----------------------------------------------------------------------------------------------------


def test_a_short_config_has_the_defaults() -> None:
    text = "model: {path: m}\nrecipe: nvfp4\nalgorithm: Max\noutput: {path: o}\n"
    assert parse(text, ALGORITHMS) == Config(
        model=ModelKeys(path=Path("m")),
        recipe=NVFP4BlockScaling(),
        algorithm=Max(),
        data=None,
        calibration=CalibrationKeys(),
        output=OutputKeys(path=Path("o")),
    )


def test_every_key_reaches_its_field() -> None:
    found = config(
        model={"path": "~/m", "dtype": "float32", "device": "cpu", "weights_on": "cpu"},
        recipe={"name": "mxfp8", "blocks": "square"},
        algorithm={
            "name": "GPTQ",
            "damping": 1,
            "act_order": False,
            "scales": "LocalHessian",
            "smoothing": {"name": "SmoothQuant", "alpha": 1},
        },
        data={"path": "a.jsonl", "field": "body", "tokenizer": "t", "samples": 3, "sequence_length": 4, "seed": 0},
        calibration={"layers": ["a", "b"], "exclude": ["lm_head"], "inputs": "static", "checkpoint_dir": "c"},
        output={"checkpoint": "d", "report": ["r.json", "r.png"], "max_shard_size": 1000},
    )
    assert found.model == ModelKeys(path=Path.home() / "m", dtype="float32", device="cpu", weights_on="cpu")
    assert found.recipe == MXFP8BlockScaling(blocks="square")
    assert found.algorithm == GPTQ(
        damping=1.0, act_order=False, scales=LocalHessian(), smoothing=SmoothQuant(alpha=1.0)
    )
    assert type(found.algorithm.damping) is float
    assert found.data == DataKeys(
        path=Path("a.jsonl"), field="body", tokenizer=Path("t"), samples=3, sequence_length=4, seed=0
    )
    assert found.calibration == CalibrationKeys(
        layers=("a", "b"), exclude=("lm_head",), inputs="static", checkpoint_dir=Path("c")
    )
    assert found.output == OutputKeys(checkpoint=Path("d"), report=(Path("r.json"), Path("r.png")), max_shard_size=1000)
    assert list(found.outputs()) == ["output.checkpoint", "output.report[0]", "output.report[1]"]


def test_an_option_that_only_one_of_two_alike_algorithms_has() -> None:
    for kind in (GPTAQ, Qronos):
        assert config(algorithm={"name": kind.__name__, "alpha": 1}).algorithm == kind(alpha=1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha: unknown option"):
        config(algorithm={"name": "GPTQ", "alpha": 1})


@pytest.mark.parametrize(("given", "taken"), [(None, None), ([], ()), ("model.layers", "model.layers")])
def test_layers_may_be_none_no_layers_or_one_name(given: Any, taken: Any) -> None:
    assert config(calibration={"layers": given}).calibration.layers == taken


@pytest.mark.parametrize("name", ["float8-tensor", "Float8CurrentScaling"])
def test_recipes_by_short_name_and_by_type(name: str) -> None:
    found = config(recipe={"name": name, "granularity": "tensor", "power_of_two": True}).recipe
    assert found == Float8CurrentScaling(granularity="tensor", power_of_two=True)


def test_every_public_algorithm_and_its_options_are_known() -> None:
    exported = {name: getattr(layerwise, name) for name in layerwise.__all__}
    public = {name for name, kind in exported.items() if isinstance(kind, type) and issubclass(kind, Algorithm)}
    assert {*ALGORITHMS} == {*TABLE} == public - {"Algorithm"}
    for name, kind in ALGORITHMS.items():
        given = {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
        given = {key: type(value).__name__ if isinstance(value, Algorithm) else value for key, value in given.items()}
        assert config(algorithm={"name": name, **given}).algorithm == kind()


def test_every_option_of_calibrate_can_be_said() -> None:
    said = {field.name for field in dataclasses.fields(CalibrationKeys)} | {"recipe", "algorithm", "data", "model"}
    elsewhere = {"progress", "device", "weights"}  # --no-progress, model.device, model.weights_on
    of_programs = {"on_event", "process_group"}
    assert {*inspect.signature(layerwise.calibrate).parameters} == said | elsewhere | of_programs


@dataclass(frozen=True, kw_only=True)
class Fancy(Algorithm):
    """Options of other types than those of the algorithms that there are."""

    writes_weights: ClassVar[bool] = False
    needed: int
    mode: Literal["a", "b"] = "a"
    most: float | None = None
    steps: Sequence[float] = (0.5,)
    inner: Recipe | None = None


def test_options_of_new_types() -> None:
    known = {"Fancy": Fancy}
    given = {"name": "Fancy", "needed": 2, "mode": "b", "most": None, "steps": [1, 0.25]}
    found = config_of(values(algorithm=given), known).algorithm
    assert found == Fancy(needed=2, mode="b", most=None, steps=(1.0, 0.25))
    with pytest.raises(ConfigError) as caught:
        config_of(values(algorithm={"name": "Fancy", "mode": "c", "most": "x", "steps": 3, "inner": "nvfp4"}), known)
    assert str(caught.value).splitlines() == [
        "algorithm.mode: expected one of a, b, got 'c'",
        "algorithm.most: expected a number or null, got 'x'",
        "algorithm.steps: expected a list of numbers, got 3",
        "algorithm.inner: expected what no config can hold or null, got 'nvfp4'",
        "algorithm.needed: missing; expected an integer",
    ]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "gone"}, "model: missing"),
        ({"model": None}, "model.path: missing; expected a path"),
        ({"model": "m"}, "model: expected a mapping, got 'm'"),
        ({"model": {"path": True}}, "model.path: expected a path, got True"),
        ({"model": {"path": ""}}, "model.path: expected a path, got ''"),
        (
            {"model": {"path": "m", "dtype": "fp8"}},
            "model.dtype: expected one of auto, bfloat16, float16, float32, got",
        ),
        (
            {"model": {"path": "m", "device": "gpu"}},
            "model.device: expected auto, or a device such as cpu or cuda:1, got",
        ),
        ({"data": {"path": "a.npy", "samples": "many"}}, "data.samples: expected a positive integer, got 'many'"),
        ({"data": {"path": "a.npy", "samples": 0}}, "data.samples: expected a positive integer, got 0"),
        ({"data": {"path": "a.npy", "samples": True}}, "data.samples: expected a positive integer, got True"),
        ({"data": {"path": "a.npy", "samples": 1.0}}, "data.samples: expected a positive integer, got 1.0"),
        ({"data": {"path": "a.npy", "seed": -1}}, "data.seed: expected an integer of at least 0, got -1"),
        ({"data": {"path": "a.npy", "seed": None}}, "data.seed: expected an integer of at least 0, got nothing"),
        (
            {"data": {"path": "a.bin"}},
            "data.format: the suffix of 'a.bin' tells none; expected one of text, jsonl, npy,",
        ),
        (
            {"data": {"path": "a.txt", "field": "x"}},
            "data.field: a file of the format text has no fields; leave it out",
        ),
        (
            {"data": {"path": "a.npy", "tokenizer": "t"}},
            "data.tokenizer: a file of the format npy holds token ids already",
        ),
        ({"data": "gone", "algorithm": "GPTQ"}, "data: missing; GPTQ fits weights to data"),
        ({"data": None, "calibration": {"inputs": "static"}}, "data: missing; inputs: static takes scales from data"),
        ({"calibration": {"exclude": "lm_head"}}, "calibration.exclude: expected a list of texts, got 'lm_head'"),
        ({"calibration": {"exclude": ["a", 1]}}, "calibration.exclude: expected a list of texts, got a list"),
        ({"calibration": {"inputs": "no"}}, "calibration.inputs: expected one of dynamic, static, got 'no'"),
        (
            {"calibration": {"layer_inputs": 1}},
            "calibration.layer_inputs: expected one of unquantized, quantized or null, got",
        ),
        ({"recipe": 4}, "recipe: expected a name, or a mapping with a name and options, got 4"),
        ({"recipe": {"blocks": "row"}}, "recipe.name: missing; expected one of "),
        ({"recipe": "nvfp5"}, "recipe.name: unknown recipe 'nvfp5'; did you mean 'nvfp4'? known names are "),
        (
            {"recipe": {"name": "nvfp4", "blocks": "cube"}},
            "recipe: NVFP4BlockScaling: blocks='cube' is not one of 'row',",
        ),
        (
            {"recipe": {"name": "nvfp4", "block": "row"}},
            "recipe.block: unknown option; did you mean 'blocks'? options of NVFP4",
        ),
        (
            {"recipe": {"name": "nvfp4", "activations": "dynamic"}},
            "recipe.activations: unknown option; options of NVFP4Block",
        ),
        (
            {"algorithm": "gptq"},
            "algorithm.name: unknown algorithm 'gptq'; did you mean 'GPTQ'? known names are AWQ, GPTAQ, GPTQ,",
        ),
        (
            {"algorithm": {"name": "AWQ", "alpha": 1}},
            "algorithm.alpha: unknown option; did you mean 'alpha_step'? options",
        ),
        ({"algorithm": {"name": "GPTQ", "act_order": "no"}}, "algorithm.act_order: expected true or false, got 'no'"),
        ({"algorithm": {"name": "GPTQ", "damping": -1}}, "algorithm: GPTQ(damping=-1.0): expected a positive number"),
        (
            {"algorithm": {"name": "GPTQ", "scales": "mse"}},
            "algorithm.scales.name: unknown algorithm 'mse'; did you mean 'Mse'? known names are AWQ, GPTAQ, GPTQ,",
        ),
        (
            {"algorithm": {"name": "GPTQ", "smoothing": {"name": "SmoothQuant", "alpha": "a"}}},
            "algorithm.smoothing.alpha: expected a number, got 'a'",
        ),
        ({"algorithm": {"name": "GPTQ", "scales": None}}, "algorithm.scales: expected an algorithm, got nothing"),
        ({"algorithm": {"name": "GPTQ", "scales": 1}}, "algorithm.scales: expected a name, or a mapping with a name"),
        ({"algorithm": {"name": "GPTQ", "scales": "AWQ"}}, "algorithm: GPTQ(scales=AWQ("),
        (
            {"algorithm": {"name": "Max", "damping": 1}},
            "algorithm.damping: unknown option; there are no options of Max",
        ),
        ({"output": "gone"}, "output: missing"),
        ({"output": {}}, "output: expected a path, a checkpoint, or both; without one the result would be lost"),
        (
            {"output": {"path": "o", "layout": "awq"}},
            "output.layout: expected one of compressed-tensors, fp8, gguf, modelopt",
        ),
        ({"output": {"path": "o", "layout": "gguf"}}, "output.like: it goes with layout gguf"),
        ({"output": {"path": "o", "like": "f"}}, "output.like: it goes with layout gguf"),
        (
            {"output": {"path": "o", "report": ["r.doc"]}},
            "output.report[0]: expected a name that ends in one of .json, .txt,",
        ),
        (
            {"output": {"path": "o", "report": ["r.png"]}, "data": None},
            "output.report[0]: r.png would be empty: a picture shows errors of layers on data, and needs both",
        ),
        (
            {"output": {"path": "o", "report": ["r.svg"]}, "calibration": {"layers": []}},
            "output.report[0]: r.svg would be empty: a picture shows errors of layers on data, and needs both",
        ),
        (
            {"output": {"path": "o"}, "calibration": {"checkpoint_dir": "o/state"}},
            "output.path: o would hold the checkpoint_dir, so it could not be free; name another one",
        ),
        ({"output": {"path": "m/o"}}, "output.path: it would lie among the model's files, which stay as they are;"),
        ({"calibration": {"checkpoint_dir": "m"}}, "calibration.checkpoint_dir: it is the model's directory, which"),
        (
            {"calibration": {"checkpoint_dir": "x/../m"}},
            "calibration.checkpoint_dir: it is the model's directory, which",
        ),
        (
            {"output": {"path": "x/../m/o"}},
            "output.path: it would lie among the model's files, which stay as they are;",
        ),
        ({"output": {"path": "o", "checkpoint": "o"}}, "output: o is named twice"),
        ({"output": {"path": "o", "checkpoint": "x/../o"}}, "output: x/../o is named twice"),
        (
            {"output": {"path": "o", "max_shard_size": "5 apples"}},
            "output.max_shard_size: expected bytes, or a text like",
        ),
        (
            {"model": {"path": "m", "weights_on": "disk"}, "output": {"checkpoint": "d"}},
            "output.checkpoint: it holds the whole",
        ),
        (
            {"exclude": ["lm_head"]},
            "exclude: unknown key; did you mean 'calibration.exclude'? known keys are model, recipe,",
        ),
        (
            {"calibrate": {}},
            "calibrate: unknown key; did you mean 'calibration'? known keys are model, recipe, algorithm,",
        ),
        ({"model": {"path": "m", "zzz": 1}}, "model.zzz: unknown key; known keys are path, dtype, device, weights_on"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    told = refusal(**changed)
    assert told.startswith(message)
    assert len(told.splitlines()) == 1


def test_links_lead_to_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "m")
    told = refusal(model={"path": str(tmp_path / "m")}, output={"path": str(link / "o")})
    assert told.startswith("output.path: it would lie among the model's files")
    told = refusal(model={"path": str(link)}, calibration={"checkpoint_dir": str(tmp_path / "m")})
    assert told.startswith("calibration.checkpoint_dir: it is the model's directory")


PATHS = {
    "model.path": lambda path: {"model": {"path": path}},
    "data.path": lambda path: {"data": {"path": path}},
    "data.tokenizer": lambda path: {"data": {"path": "a.txt", "tokenizer": path}},
    "calibration.checkpoint_dir": lambda path: {"calibration": {"checkpoint_dir": path}},
    "output.path": lambda path: {"output": {"path": path}},
    "output.like": lambda path: {"output": {"path": "o", "layout": "gguf", "like": path}},
    "output.checkpoint": lambda path: {"output": {"checkpoint": path}},
    "output.report": lambda path: {"output": {"path": "o", "report": ["a.json", path]}},
    "recipe.assignment": lambda path: {"recipe": {"search": ["nvfp4"], "bits_per_weight": 5, "assignment": path}},
}


@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_no_file_can_have_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in ("a\0b", "~/\0", "a\ud800b", "~nobody-of-this-name/b", str(tmp_path / "circle")):
        told = refusal(**PATHS[key](path))
        assert told.startswith(f"{key}: expected a path, got {path!r}: ")
        assert len(told.splitlines()) == 1


def test_every_path_of_a_config_is_looked_at() -> None:
    sections = {"model": ModelKeys, "data": DataKeys, "calibration": CalibrationKeys, "output": OutputKeys}
    found = [
        f"{section}.{name}"
        for section, kind in sections.items()
        for name, key in keys_of(kind).items()
        if "path" in key.words
    ]
    assert [*found, "recipe.assignment"] == [*PATHS]


def test_bytes_that_are_no_text_may_be_a_path() -> None:
    assert config(output={"path": "a\udcff"}).output.path == Path(os.fsdecode(b"a\xff"))


def test_all_that_is_wrong_is_told_at_once() -> None:
    told = refusal(model={"path": 1, "dtyp": "auto"}, recipe="x", algorithm=1, data={"samples": "many"}, output="gone")
    assert [line.partition(": ")[0] for line in told.splitlines()] == [
        *("output", "model.path", "model.dtyp", "data.samples", "data.path", "recipe.name", "algorithm"),
    ]


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("[1]", "a list"), ("no", "'no'")])
def test_a_config_is_a_mapping(text: str, found: str) -> None:
    keys = "model, recipe, algorithm, data, calibration, output"
    with pytest.raises(ConfigError) as caught:
        parse(text, ALGORITHMS)
    assert str(caught.value) == f"expected a mapping with the keys {keys}, got {found}"


def test_a_message_is_short_whatever_the_config_holds() -> None:
    told = refusal(data={"path": "a.npy", "samples": "x" * 10_000})
    assert len(told) < 300


def test_the_plain_config_is_every_key_and_json() -> None:
    held = plain(config(algorithm={"name": "AWQ", "variant": "clip"}, calibration={"checkpoint_dir": "c"}))
    assert held["model"]["path"] == str(Path("m").absolute())
    assert held["algorithm"] == AWQ(variant="clip").to_json()
    assert held["calibration"]["include"] == ["*"]
    assert {*held} == {"model", "recipe", "algorithm", "data", "calibration", "output"}
    assert Mse().to_json() != held["algorithm"]
