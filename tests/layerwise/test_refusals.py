"""What is refused, in which words, and that nothing has been changed: options, and checkpoints of other runs."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise import GPTAQ, GPTQ, Max, Mse, Qronos, SmoothQuant, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.layerwise.small_runs import (
    LAYERS,
    Case,
    Found,
    assert_usable,
    batches,
    found,
    model_of,
    own,
    run,
    state_of,
    stopped,
)
from tests.ranks import run_ranks
from tests.sampling import halves, sampled

BASE = Case(algorithm=GPTQ(), stop=("checkpoint", 1))
DATA = [*batches(), batches()[0]]  # one of them twice


def files(path: Path) -> dict[str, bytes]:
    """Everything in a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# -- other runs --------------------------------------------------------------------------------------------------------


def flipped(name: str, element: int) -> Callable[[nn.Module], None]:
    """Changes the last bit of one element, on the rank that has it."""

    @torch.no_grad()
    def change(model: nn.Module) -> None:
        param: Any = model.get_parameter(name)
        local, first = param, 0
        if dist.is_initialized():
            local = param.to_local()
            sizes = [torch.tensor(0) for _ in range(dist.get_world_size())]
            dist.all_gather(sizes, torch.tensor(local.numel()))
            first = int(sum(sizes[: dist.get_rank()]))
        if first <= element < first + local.numel():
            local.view(-1).view(torch.int16)[element - first] ^= 1

    return change


def one_token() -> list[Tensor]:
    changed = [batch.clone() for batch in DATA]
    changed[2][0, 3] += 1
    return changed


# what is changed -> (options, data, what is done to the model, what the message says)
OTHERS: dict[str, tuple[dict[str, Any], list[Tensor], Any, str]] = {
    "a weight": ({}, DATA, ("layers.1.q_proj.weight", 700), "other weights: layers.1.q_proj.weight differs"),
    "a norm": ({}, DATA, ("layers.2.norm1.weight", 31), "other weights: layers.2.norm1.weight differs"),
    "the embedding": ({}, DATA, ("embed.weight", 0), "other weights: embed.weight differs"),
    "one token": ({}, one_token(), None, "other data: as many batches (6), but not the same ones"),
    "one batch more": ({}, [*DATA, DATA[1]], None, "other data: 6 batches, now 7"),
    "another one twice": ({}, [*DATA[:5], DATA[1]], None, "other data: as many batches (6), but not the same ones"),
    "the recipe": (
        {"recipe": MXFP8BlockScaling()},
        DATA,
        None,
        'another recipe: type was "NVFP4BlockScaling", now "MXFP8',
    ),
    "the algorithm": (
        {"algorithm": Mse(), "layer_inputs": "quantized"},
        DATA,
        None,
        'another algorithm: type was "GPTQ", now "Mse"',
    ),
    "an option of the algorithm": (
        {"algorithm": GPTQ(damping=0.02)},
        DATA,
        None,
        "another algorithm: damping was null, now 0.02",
    ),
    "the algorithm of its scales": (
        {"algorithm": GPTQ(scales=Max())},
        DATA,
        None,
        'another algorithm: scales was {"type": "Mse"}, now {"type": "Max"}',
    ),
    "the algorithm of its factors": (
        {"algorithm": GPTQ(smoothing=SmoothQuant())},
        DATA,
        None,
        'another algorithm: smoothing was null, now {"type": "SmoothQuant", "alpha": 0.5}',
    ),
    "include": (
        {"include": ["layers.*"]},
        DATA,
        None,
        'targets now without "lm_head.weight"',
    ),
    "exclude": (
        {"exclude": ["*.up_proj"]},
        DATA,
        None,
        'other options: targets now without "layers.0.up_proj.weight" and 2 more',
    ),
    "inputs": ({"inputs": "static"}, DATA, None, 'other options: inputs was "dynamic", now "static"'),
    "layer_inputs": (
        {"layer_inputs": "unquantized"},
        DATA,
        None,
        'other options: layer_inputs was "quantized", now "unquantized"',
    ),
    "layers": (
        {"layers": ["layers.1", "layers.2"]},
        DATA,
        None,
        'other options: stages now without "layers.0"',
    ),
}


def refusals(path: Path, names: Iterable[str] = tuple(OTHERS)) -> list[str]:
    """What each other run is told; none of them changes anything."""
    stopped(model_of(BASE), BASE, path, data=own(DATA))
    told = []
    for options, data, change, _ in (OTHERS[name] for name in names):
        model = model_of(BASE)
        if change is not None:
            flipped(*change)(model)
        if dist.is_initialized():
            dist.barrier()
        before, held = state_of(model), files(path)
        try:
            run(model, BASE, data=own(data), checkpoint_dir=path, **options)
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("nothing")
        assert (state_of(model), files(path)) == (before, held)
    assert_usable(model)
    model = model_of(BASE)
    assert run(model, BASE, data=own(DATA), checkpoint_dir=path).report.resumed == (0, 1)
    return told


def check_told(told: list[str], path: Path, names: Iterable[str] = tuple(OTHERS)) -> None:
    for name, message in zip(names, told, strict=True):
        words = OTHERS[name][-1]
        assert f"checkpoint_dir={str(path)!r} holds a calibration of " in message, name
        assert words in message, (name, message)
        assert "Nothing has been changed. To continue it, start from" in message, name
        assert "give an empty checkpoint_dir" in message, name
        if name not in ("layers", "include"):  # which come with others
            assert ";" not in message.partition(" holds ")[2].partition(". Nothing")[0], (name, message)


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    check_told(refusals(tmp_path), tmp_path)


# One of each kind: what one rank alone can see, what all see, data that ranks have each a share of.
ON_RANKS = ["a weight", "a norm", "one token", "one batch more", "the algorithm", "exclude"]


@halves("names", OTHERS, ON_RANKS)
def test_another_run_is_refused_alike_on_all_ranks(names: tuple[str, ...], shared_tmp_path: Path) -> None:
    first, second = run_ranks(2, refusals, shared_tmp_path, names)
    assert first == second
    check_told(first, shared_tmp_path, names)


def distributed_otherwise(path: Path) -> list[Found]:
    """Of a run stopped with interleaved batches: all of them on one rank, backwards; and all on the other."""
    rank = dist.get_rank()
    come_to = []
    for number, data in enumerate(([[*reversed(DATA)], []], [[], DATA])):
        stopped(model_of(BASE), BASE, path / str(number), data=own(DATA))
        model = model_of(BASE)
        come_to.append(found(run(model, BASE, data=data[rank], checkpoint_dir=path / str(number)), model))
    return come_to


def test_the_order_and_the_distribution_of_the_data_do_not_matter(shared_tmp_path: Path) -> None:
    model = model_of(BASE)
    whole = found(run(model, BASE, data=DATA), model)
    for here in functools.reduce(operator.iadd, run_ranks(2, distributed_otherwise, shared_tmp_path), []):
        assert here.resumed == (0, 1)
        assert here.same() == whole.same()


# -- damage ------------------------------------------------------------------------------------------------------------

DAMAGED = Case(algorithm=GPTQ(), stop=("metrics", LAYERS))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def remove(file: Path) -> None:
    file.unlink()


@pytest.fixture(scope="module")
def whole() -> Found:
    """What the run comes to that is damaged here."""
    model = model_of(DAMAGED)
    return found(run(model, DAMAGED), model)


def window_file(path: Path, number: int, pattern: str = "*.distcp") -> Path:
    """A file of one window."""
    return next((path / f"layers-{number:05}-{number:05}").glob(pattern))


DAMAGES: list[tuple[Callable[[Path], None], str, str]] = [
    (flip, "*.distcp", "does not hold the bytes that were written"),
    (truncate, "*.distcp", "has [0-9]+ bytes, expected [0-9]+"),
    (remove, "*.distcp", "is missing"),
    (flip, ".metadata", "does not hold the bytes that were written"),
    (remove, ".metadata", "is missing"),
]


@sampled(("damage", "pattern", "words"), DAMAGES, [DAMAGES[1], DAMAGES[3], DAMAGES[4]])
def test_a_damaged_window_is_named_and_calibrated_again(
    tmp_path: Path, whole: Found, damage: Callable[[Path], None], pattern: str, words: str
) -> None:
    stopped(model_of(DAMAGED), DAMAGED, tmp_path)
    file = window_file(tmp_path, 1, pattern)
    damage(file)
    model = model_of(DAMAGED)
    name = re.escape(f"{file.parent.name}/{file.name}")
    expected = rf"{name} {words}\. The calibration restarts from layer 1 \(layers\.1\)"
    with pytest.warns(UserWarning, match=expected):
        result = run(model, DAMAGED, checkpoint_dir=tmp_path)
    here = found(result, model)
    assert here.resumed == (0,)
    assert here.same() == whole.same()


@pytest.mark.parametrize(
    "damage", [flip, truncate, lambda file: file.write_text("{}"), lambda file: file.write_bytes(b"")]
)
def test_a_damaged_record_has_a_copy(tmp_path: Path, whole: Found, damage: Callable[[Path], None]) -> None:
    stopped(model_of(DAMAGED), DAMAGED, tmp_path)
    damage(tmp_path / "progress.json")
    model = model_of(DAMAGED)
    expected = r"progress\.json is damaged \(.*\)\. Its copy is used: the calibration continues from layer 3"
    with pytest.warns(UserWarning, match=expected):
        result = run(model, DAMAGED, checkpoint_dir=tmp_path)
    here = found(result, model)
    assert here.resumed == (0, 1, 2)
    assert here.same() == whole.same()


def test_without_any_record_everything_is_calibrated_again(tmp_path: Path, whole: Found) -> None:
    stopped(model_of(DAMAGED), DAMAGED, tmp_path)
    for file in tmp_path.glob("*.json"):
        flip(file)
    model = model_of(DAMAGED)
    with pytest.warns(UserWarning, match=r"progress\.json is damaged .*The calibration restarts from layer 0"):
        result = run(model, DAMAGED, checkpoint_dir=tmp_path)
    assert found(result, model) == whole


def resumed_from_damage(path: Path) -> tuple[Found, list[str]]:
    import warnings

    model = model_of(DAMAGED)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = run(model, DAMAGED, checkpoint_dir=path)
    return found(result, model), [str(one.message) for one in told if "checkpoint_dir" in str(one.message)]


def test_all_ranks_restart_from_the_same_layer(tmp_path: Path, shared_tmp_path: Path, whole: Found) -> None:
    run_ranks(1, stop_in, shared_tmp_path)
    run_ranks(1, damage_second, shared_tmp_path)
    for here, told in run_ranks(2, resumed_from_damage, shared_tmp_path):
        assert here.same() == whole.same()
        assert here.resumed == (0,)
        assert len(told) == 1
        assert "restarts from layer 1 (layers.1)" in told[0]


def stop_in(path: Path) -> None:
    stopped(model_of(DAMAGED), DAMAGED, path)


def damage_second(path: Path) -> None:
    truncate(window_file(path, 1))


def test_finished_weights_can_not_be_calibrated_again(tmp_path: Path) -> None:
    model = model_of(DAMAGED)
    run(model, DAMAGED, checkpoint_dir=tmp_path)
    flip(window_file(tmp_path, 2))
    before, held = state_of(model), files(tmp_path)
    with pytest.raises(ValueError, match=r"the model holds the finished weights.*start from the original weights"):
        run(model, DAMAGED, checkpoint_dir=tmp_path)
    assert (state_of(model), files(tmp_path)) == (before, held)


@pytest.fixture
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("_threads")
def test_another_thread_count_is_told(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    stopped(model_of(), Case(), tmp_path)
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match="calibrated with 1 threads, now there are 2: statistics may differ"):
        result = run(model_of(), checkpoint_dir=tmp_path)
    assert result.report.resumed == (0,)


# -- options -----------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"algorithm": Max}, TypeError, r"algorithm is <class .*Max'>; expected an instance, such as Max\(\) or GPTQ\(\)"),
    (
        {"algorithm": "svdquant"},
        TypeError,
        r"algorithm is 'svdquant'.*whole model at once \(svdquant\) are not layerwise",
    ),
    ({"algorithm": "gptq"}, TypeError, r"algorithm is 'gptq'; expected an instance"),
    ({"algorithm": None}, TypeError, "algorithm is None; expected an instance"),
    ({"recipe": "nvfp4"}, TypeError, r"expected a recipe, such as .*, got 'nvfp4'"),
    ({"recipe": NVFP4BlockScaling}, TypeError, r"expected a recipe, such as NVFP4BlockScaling\(\), got <class"),
    ({"save_every": 0}, ValueError, "save_every=0 is not a positive number of layers"),
    ({"save_every": -1}, ValueError, "save_every=-1 is not a positive number of layers"),
    ({"save_every": 1.5}, ValueError, "save_every=1.5 is not a positive number of layers"),
    ({"save_every": True}, ValueError, "save_every=True is not a positive number of layers"),
    ({"inputs": "Static"}, ValueError, "inputs='Static' is not one of 'dynamic', 'static'"),
    ({"inputs": "static", "recipe": MXFP8BlockScaling()}, ValueError, 'inputs="static" needs a tensor-wide scale'),
    ({"inputs_on": "gpu"}, ValueError, "inputs_on='gpu' is not one of 'device', 'cpu', 'disk'"),
    ({"layer_inputs": "both"}, ValueError, "layer_inputs='both' is not one of None, 'unquantized', 'quantized'"),
    (
        {"algorithm": GPTAQ(), "layer_inputs": "unquantized"},
        ValueError,
        r"GPTAQ compares the inputs of the quantized model .* they are the same; leave it out, or use GPTQ\(\) instead",
    ),
    ({"algorithm": Qronos(), "layer_inputs": "unquantized"}, ValueError, r"use GPTQ\(\) instead of Qronos\(\)"),
    ({"include": ["layers.9.*"]}, ValueError, "include pattern 'layers.9.\\*' matches no module with a weight"),
    ({"include": "layers.*"}, TypeError, r"include is a list of patterns, got 'layers.\*'; write \['layers.\*'\]"),
    ({"exclude": "lm_head"}, TypeError, r"exclude is a list of patterns, got 'lm_head'; write \['lm_head'\]"),
    ({"layers": "blocks.*"}, ValueError, r"layers: 'blocks.\*' matches no module of the model"),
    ({"layers": [3]}, TypeError, "layers must be names, patterns or modules of the model, got a int: 3"),
    (
        {"data": torch.zeros(2, 3, dtype=torch.int64)},
        TypeError,
        "data must be an iterable of batches.*got a Tensor; put",
    ),
    ({"data": {"ids": batches()[0]}}, TypeError, "data must be an iterable of batches.*got a dict; put one batch into"),
    ({"data": [3]}, TypeError, "batch 0 of data is a int; expected a tensor"),
    ({"checkpoint_dir": "s3://bucket/run"}, ValueError, "checkpoint_dir='s3://bucket/run' is a URL; give a directory"),
    (
        {"weights": "model.safetensors", "model": "sharded"},
        ValueError,
        "weights= and device= are for models without FSDP",
    ),
]


@pytest.mark.parametrize(("options", "kind", "words"), OPTIONS[:-1])
def test_options_that_are_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    model = model_of()
    before = state_of(model)
    given = {"data": own(), "recipe": Float8CurrentScaling(), **options}
    with pytest.raises(kind, match=words):
        calibrate(model, given.pop("data"), **given)
    assert state_of(model) == before
    assert_usable(model)


def refused_on_ranks() -> list[str]:
    told = []
    model = model_of()
    before = state_of(model)
    for options, kind, words in OPTIONS:
        given = {"data": own(), "recipe": Float8CurrentScaling(), **options}
        given.pop("model", None)
        with pytest.raises(kind, match=words) as caught:
            calibrate(model, given.pop("data"), **given)
        told.append(str(caught.value))
    assert state_of(model) == before
    assert_usable(model)
    return told


def test_options_are_refused_alike_on_all_ranks() -> None:
    first, second = run_ranks(2, refused_on_ranks)
    assert first == second


def test_an_exclude_pattern_that_matches_nothing_warns() -> None:
    with pytest.warns(UserWarning, match="exclude pattern 'head' matches no module with a weight to quantize"):
        result = run(model_of(), exclude=["head"])
    assert "lm_head.weight" in result.state_dict()


# -- models ------------------------------------------------------------------------------------------------------------


class Loops(nn.Module):
    """Runs its list of layers more than once, with nothing in between; the second pass would go unseen."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.lm_head = nn.Linear(64, 33)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.lm_head(x)


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_that_are_run_again_are_refused_where_nothing_behind_them_is_calibrated(layers: int) -> None:
    model = Loops(layers)
    with pytest.raises(NotImplementedError, match=re.escape("layer layers.0 is called again in one forward of the")):
        calibrate(model, [torch.randn(4, 64)], recipe=MXFP8BlockScaling(), exclude=["lm_head"], progress=False)
