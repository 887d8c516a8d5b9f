"""What is in memory at once: a layer, what is outside of layers, a batch; counted from storages, at every operation."""

from __future__ import annotations

import gc
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from layerwise import AWQ, Event, Max, calibrate
from qtensor import MXFP8BlockScaling, QuantizedTensor
from tests.dcp_adapters.live_storages import LiveStorages
from tests.fsdp_hooks.cases import held
from tests.layerwise.algorithm_table import MAIN, on_scales_of_max
from tests.ranks import run_ranks
from tests.sampling import sampled

DIM, ROWS, VOCABULARY = 64, 128, 64
RECIPE = MXFP8BlockScaling()
LAYER = 4 * (2 * DIM * ROWS + ROWS + 3 * DIM)  # bytes of a block in fp32
STORED = 2 * DIM * ROWS * 33 // 32  # of its two weights in MXFP8, scales and all
OUTSIDE = 4 * (2 * VOCABULARY * DIM + VOCABULARY)
ALGORITHMS = {name: on_scales_of_max(algorithm) for name, algorithm in MAIN.items()} | {"AWQ": AWQ(variant="lite")}


class Block(nn.Module):
    """A norm and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, ROWS), nn.Linear(ROWS, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def batches(count: int, tokens: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, VOCABULARY, (1, tokens), generator=generator) for _ in range(count)]


def _offloaded(layers: int, directory: Path) -> tuple[nn.Module, Path]:
    path = directory / str(layers)
    path.mkdir(exist_ok=True)
    for name, tensor in Net(layers).state_dict().items():  # a file each: what is read is a map of its whole file
        save_file({name: tensor}, path / f"{name}.safetensors")
    with torch.device("meta"):
        return Net(layers), path


def collect(event: Event) -> None:
    """At every event, so that what is alive is what somebody holds."""
    gc.collect()


@pytest.fixture(autouse=True)
def _young() -> None:
    """The garbage collector sees, and `held` counts, only what a test itself makes."""
    gc.collect()
    gc.freeze()


def _peak(layers: int, data: list[Tensor], directory: Path, **options: Any) -> int:
    """Bytes of the most storages that were alive at once, none of which was before."""
    model, path = _offloaded(layers, directory)
    with LiveStorages() as live:
        calibrate(
            model,
            data,
            recipe=RECIPE,
            weights=path,
            exclude=["head"],
            on_event=collect,
            progress=False,
            **options,
        )
    return live.peak


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_layer_more_costs_its_result_and_nothing_dense(algorithm: str, tmp_path: Path) -> None:
    few, many = (
        _peak(layers, batches(2), tmp_path, algorithm=ALGORITHMS[algorithm], inputs_on="disk") for layers in (3, 5)
    )
    changed = 4 * 2 * DIM if ALGORITHMS[algorithm].smooths else 0  # a norm that factors went into
    assert 0 < (many - few) / 2 <= STORED + changed + 64


@sampled(("inputs_on", "expected"), [("device", 2), ("cpu", 2), ("disk", 0)], [("cpu", 2), ("disk", 0)])
def test_a_batch_more_costs_its_inputs_where_they_wait(inputs_on: str, expected: int, tmp_path: Path) -> None:
    """Inputs and outputs of the layer that is running, of every batch, and nothing of the layers before."""
    # From 32 batches on there are no more rows that errors are measured on.
    few, many = (_peak(3, batches(n, 256), tmp_path, algorithm=Max(), inputs_on=inputs_on) for n in (32, 48))
    hidden = 4 * 256 * DIM
    assert expected * hidden <= (many - few) / 16 <= (expected + 0.5) * hidden


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_between_events_one_layer_is_there(algorithm: str, tmp_path: Path) -> None:
    model, path = _offloaded(5, tmp_path)
    data = batches(2)
    before = held()
    seen: dict[tuple[str, int], int] = {}

    def note(event: Event) -> None:
        seen[event.kind, event.index] = held() - before

    calibrate(
        model,
        data,
        recipe=RECIPE,
        algorithm=ALGORITHMS[algorithm],
        weights=path,
        exclude=["head"],
        inputs_on="disk",
        on_event=note,
        progress=False,
    )
    for (kind, index), found in seen.items():
        layer, results = (0 if kind == "checkpoint" else LAYER), index * (STORED + 4 * 2 * DIM)
        # Beside them: statistics, sample rows with their products, and the decided weight of this layer.
        hessians, rows = 8 * (DIM * DIM + ROWS * ROWS), 4 * 32 * 3 * (DIM + ROWS)
        assert found <= layer + results + OUTSIDE + STORED + hessians + rows, (kind, index)
        assert kind == "checkpoint" or found >= layer


def _sharded_peak(algorithm: str) -> dict[tuple[str, int], int]:
    model = Net(6)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    data = batches(2)
    gc.freeze()  # of which a worker has a lot
    before = held()
    seen: dict[tuple[str, int], int] = {}

    def note(event: Event) -> None:
        if event.kind in ("layer_start", "metrics"):
            seen[event.kind, event.index] = held() - before

    result = calibrate(
        model,
        data[dist.get_rank() :],
        recipe=RECIPE,
        algorithm=ALGORITHMS[algorithm],
        inputs_on="disk",
        on_event=note,
        progress=False,
    )
    del result
    return seen


@pytest.mark.parametrize("algorithm", ["Max", "GPTQ"])
def test_between_events_one_layer_is_gathered(algorithm: str) -> None:
    for seen in run_ranks(2, _sharded_peak, algorithm):
        for (kind, index), found in seen.items():
            results = min(index, 6) * (STORED // 2 + 64)
            gathered = LAYER if index < 6 else 0
            # Gathered, and FSDP's flat buffer of it; then its weights in MXFP8, statistics and sample rows.
            slack = STORED + 8 * (DIM * DIM + ROWS * ROWS) + LAYER // 4 if kind == "metrics" else 0
            assert found <= 2.2 * (gathered + OUTSIDE) + results + slack, (kind, index)


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# What is read back does not depend on who asks for it: each algorithm with one place.
WAITING = [*itertools.product(ALGORITHMS, ["cpu", "disk"])]


@sampled(("algorithm", "inputs_on"), WAITING, [case for number, case in enumerate(WAITING) if number % 4 in (1, 2)])
def test_where_inputs_wait_makes_no_difference(inputs_on: str, algorithm: str, files: Path) -> None:
    found = []

    def note(event: Event) -> None:
        found.append(len([path for path in files.rglob("*") if path.is_file()]))

    options: dict[str, Any] = {"recipe": RECIPE, "algorithm": ALGORITHMS[algorithm], "progress": False}
    state = calibrate(Net(3), batches(3), inputs_on=inputs_on, on_event=note, **options).state_dict()
    for name, value in calibrate(Net(3), batches(3), **options).state_dict().items():
        assert torch.equal(dense(state[name]), dense(value)), name
    assert (max(found) > 0) == (inputs_on == "disk")
    assert list(files.iterdir()) == [], "nothing is left"


def dense(value: Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


class Interrupted(Exception):
    """Ends a run."""


@pytest.mark.parametrize("kind", ["capture", "write", "metrics", "checkpoint"])
def test_after_an_exception_no_file_is_left(kind: str, files: Path) -> None:
    met = []

    def stop(event: Event) -> None:
        if event.kind == kind and event.index == 1:
            met.append(len(list(files.rglob("*"))))
            raise Interrupted

    run_in = files / "run"
    with pytest.raises(Interrupted):
        calibrate(
            Net(3),
            batches(2),
            recipe=RECIPE,
            inputs_on="disk",
            checkpoint_dir=run_in,
            on_event=stop,
            progress=False,
        )
    assert met[0] > 0
    assert [path.name for path in files.iterdir()] == ["run"]


def test_an_exception_in_the_data_leaves_no_file(files: Path) -> None:
    def data() -> Any:
        yield batches(1)[0]
        assert list(files.iterdir())
        raise Interrupted

    with pytest.raises(Interrupted):
        calibrate(Net(2), data(), recipe=RECIPE, inputs_on="disk", progress=False)
    assert list(files.iterdir()) == []
