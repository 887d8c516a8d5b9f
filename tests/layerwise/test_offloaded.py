"""Models on the meta device whose weights are in files; data of every kind, or none."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from layerwise import AWQ, GPTQ, Event, Max, SmoothQuant, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from tests.layerwise.families import assert_same, batches_for, family
from tests.ranks import run_ranks
from tests.sampling import sampled

DIM = 32


class Block(nn.Module):
    """A norm, two linears and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.register_buffer("gain", torch.full((DIM,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain


class Net(nn.Module):
    """A model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.last, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.last(hidden))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 48, (2, length), generator=generator) for length in (5, 3)]


def on_meta() -> Net:
    with torch.device("meta"):
        net = Net()
    net.head.weight = net.embed.weight
    return net


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of a model holds: tied weights once."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    state.pop("head.weight", None)
    return state


def write(state: dict[str, Tensor], path: Path, kind: str) -> Path:
    """In one file, in a directory of one or two files, or of two with an index."""
    path.mkdir()
    if kind in ("file", "directory"):
        save_file(state, path / "model.safetensors")
        return path / "model.safetensors" if kind == "file" else path
    names = sorted(state)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: state[name] for name in own}, path / file)
    if kind == "index":
        index = {"metadata": {}, "weight_map": {name: file for file, own in halves.items() for name in own}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def run(model: nn.Module, data: Any = None, **options: Any) -> Any:
    options = {"recipe": NVFP4BlockScaling(), "progress": False, **options}
    return calibrate(model, batches() if data is None else data, **options)


def assert_on_meta(model: nn.Module) -> None:
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kind", ["file", "directory", "two files", "index"])
@pytest.mark.parametrize("algorithm", [Max(), SmoothQuant(), GPTQ()], ids=["max", "smoothquant", "gptq"])
def test_weights_from_files_give_the_bytes_of_the_resident_model(kind: str, algorithm: Any, tmp_path: Path) -> None:
    path = write(tensors_of(Net()), tmp_path / "weights", kind)
    model = on_meta()
    params = dict(model.named_parameters())
    static = {} if isinstance(algorithm, SmoothQuant) else {"inputs": "static"}
    state = run(model, algorithm=algorithm, weights=path, **static).state_dict()
    assert_same(state, run(Net(), algorithm=algorithm, **static).state_dict(), kind)
    assert_on_meta(model)
    assert {name: id(param) for name, param in model.named_parameters()} == {n: id(p) for n, p in params.items()}
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert isinstance(state["last.weight"], QuantizedTensor)
    assert "head.weight" not in state, "tied to the embedding"


def test_a_model_of_transformers_from_files(tmp_path: Path) -> None:
    model = family("llama")
    path = write(tensors_of(model) | {"lm_head.weight": model.lm_head.weight.detach().clone()}, tmp_path / "w", "index")
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    empty.model.rotary_emb = model.model.rotary_emb  # its buffers are in no file
    data = batches_for("llama")
    found = run(empty, data, weights=path, algorithm=AWQ(), inputs_on="disk").state_dict()
    assert_same(found, run(model, data, algorithm=AWQ()).state_dict())


class Interrupted(Exception):
    """Ends a run."""


@pytest.mark.parametrize("algorithm", [Max(), AWQ(), GPTQ()], ids=["max", "awq", "gptq"])
def test_an_interrupted_run_goes_on_and_the_model_stays_where_it_is(algorithm: Any, tmp_path: Path) -> None:
    path = write(tensors_of(Net()), tmp_path / "weights", "index")

    def stop(event: Event) -> None:
        if (event.kind, event.index) == ("write", 2):
            raise Interrupted

    model = on_meta()
    options: dict[str, Any] = {"weights": path, "algorithm": algorithm, "checkpoint_dir": tmp_path / "run"}
    with pytest.raises(Interrupted):
        run(model, on_event=stop, **options)
    assert_on_meta(model)
    result = run(model, **options)
    assert list(result.report.resumed) == [0, 1]
    expected = run(Net(), algorithm=algorithm).state_dict()
    assert_same(result.state_dict(), expected, "resumed")
    again = run(on_meta(), **options)
    assert list(again.report.resumed) == [0, 1, 2, 3]
    assert_same(again.state_dict(), expected, "finished before")
    assert_on_meta(model)


def _without(name: str) -> dict[str, Tensor]:
    state = tensors_of(Net())
    del state[name]
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            _without("layers.1.up.weight"),
            r"layers\.1\.up\.weight of the model is on the meta device and not in .*s;",
        ),
        (_without("layers.2.gain"), r"layers\.2\.gain of the model is on the meta device .*non-persistent buffers"),
        (_without("embed.weight"), r"embed\.weight, head\.weight of the model are on the meta device"),
        (
            tensors_of(Net()) | {"last.weight": torch.zeros(DIM, 16)},
            r"last\.weight has shape \(32, 16\) in .*weights, expected \(32, 32\)",
        ),
    ],
    ids=["weight", "buffer", "tied", "shape"],
)
def test_files_that_do_not_fit_are_refused_by_name(state: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    path = write(state, tmp_path / "weights", "directory")
    model = on_meta()
    with pytest.raises(ValueError, match=message):
        run(model, weights=path)
    assert_on_meta(model)


def test_buffers_that_no_file_can_hold_are_refused_by_name(tmp_path: Path) -> None:
    model = on_meta()
    model.layers[0].register_buffer("mask", torch.empty(3, device="meta"), persistent=False)
    message = r"layers\.0\.mask of the model is on the meta device and not in .*build what the files do not hold"
    with pytest.raises(ValueError, match=message):
        run(model, weights=write(tensors_of(Net()), tmp_path / "weights", "file"))


def test_where_there_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(tmp_path))} holds no safetensors"):
        run(on_meta(), weights=tmp_path)
    with pytest.raises(ValueError, match=r"embed\.weight is on the meta device; say where its values are: weights="):
        run(on_meta())


def test_the_device_that_the_model_is_on_anyway_changes_nothing() -> None:
    model = Net()
    params = {name: id(param) for name, param in model.named_parameters()}
    state = run(model, device="cpu", algorithm=GPTQ()).state_dict()
    assert_same(state, run(Net(), algorithm=GPTQ()).state_dict())
    assert {name: id(param) for name, param in model.named_parameters()} == params


# -- data --------------------------------------------------------------------------------------------------------------


def _one_shot() -> Iterator[Tensor]:
    yield from batches()


def _loop(model: nn.Module) -> None:
    for batch in batches():
        assert model(batch) is None


def _refilled() -> Iterator[Tensor]:
    """Pieces of one buffer that every batch is written into."""
    buffer = torch.zeros(2, 8, dtype=torch.int64)
    for batch in batches():
        yield buffer[:, : batch.shape[1]].copy_(batch)
    buffer.zero_()


def _refilled_loop(model: nn.Module) -> None:
    for batch in _refilled():
        model(batch)


DATA: dict[str, Any] = {
    "one buffer": _refilled,
    "a loop with one buffer": lambda: _refilled_loop,
    "tuples": [(batch,) for batch in batches()],
    "lists": [[batch] for batch in batches()],
    "keywords": [{"ids": batch} for batch in batches()],
    "generator": _one_shot,
    "loop": lambda: _loop,
}


# Data is recorded before weights are asked for: each kind with weights from one place, in turn.
GIVEN = [*itertools.product(DATA, ["resident", "files"])]


@sampled(("kind", "where"), GIVEN, [case for number, case in enumerate(GIVEN) if number % 4 in (0, 3)])
def test_all_kinds_of_data_give_the_same_bytes(kind: str, where: str, tmp_path: Path) -> None:
    data = DATA[kind]() if callable(DATA[kind]) else DATA[kind]
    files = {"weights": write(tensors_of(Net()), tmp_path / "w", "file")} if where == "files" else {}
    state = run(Net() if where == "resident" else on_meta(), data, algorithm=GPTQ(), **files).state_dict()
    assert_same(state, run(Net(), algorithm=GPTQ()).state_dict(), kind)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), MXFP8BlockScaling()], ids=["float8", "mxfp8"])
@pytest.mark.parametrize("data", [None, [], lambda model: None], ids=["none", "empty", "loop"])
def test_without_data_the_weights_alone_are_quantized(data: Any, recipe: Any) -> None:
    original, model = Net(), Net()
    result = calibrate(model, data, recipe=recipe, progress=False)
    state = result.state_dict()
    weights = {f"layers.{index}.{name}.weight" for index in range(3) for name in ("up", "down")} | {"last.weight"}
    assert set(state) == weights == set(result.starved)
    expected = {name: quantize(original.get_parameter(name).detach(), recipe) for name in weights}
    assert_same(state, expected)
    assert all(torch.equal(model.get_parameter(name), expected[name].dequantize()) for name in weights)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            torch.zeros(2, 3),
            "data must be an iterable of batches or .* got a Tensor; put one batch into a list",
        ),
        ({"ids": batches()[0]}, "got a dict; put one batch into a list"),
        ([3], "batch 0 of data is a int; expected a tensor, a tuple or list of positional arguments, or a mapping"),
    ],
    ids=["tensor", "dict", "number"],
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(Net(), data)


def test_files_are_the_original_weights_however_often_they_were_calibrated(tmp_path: Path) -> None:
    path = write(tensors_of(Net()), tmp_path / "weights", "file")
    whole = run(on_meta(), weights=path, checkpoint_dir=tmp_path / "run").state_dict()
    data = next((tmp_path / "run" / "layers-00001-00001").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="restarts from layer 1"):
        again = run(on_meta(), weights=path, checkpoint_dir=tmp_path / "run")
    assert again.report.resumed == (0,)
    assert_same(again.state_dict(), whole)


def _failure(paths: list[Path], when: str) -> str:
    """What a rank says whose files are its own."""
    path = paths[dist.get_rank()]

    def remove(event: Event) -> None:
        if event.kind == "layer_start" and path.suffix:
            path.unlink(missing_ok=True)

    try:
        run(on_meta(), weights=path, on_event=remove if when == "later" else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("when", ["before", "later"])
def test_files_that_are_missing_on_one_rank_fail_on_all(when: str, shared_tmp_path: Path) -> None:
    path = write(tensors_of(Net()), shared_tmp_path / "there", "file")
    other = shared_tmp_path / "missing"
    other.mkdir()
    if when == "later":
        other = write(tensors_of(Net()), shared_tmp_path / "going", "file")
        path = path.parent
    first, second = run_ranks(2, _failure, [path, other], when)
    assert second.startswith("FileNotFoundError: ")
    assert first == f"RuntimeError: rank 1: {second}"
