"""The default dtype and the default device of whoever calls, or imports, reach no result.

Trainers import and run under `torch.set_default_dtype(torch.bfloat16)`, loads run inside `with torch.device("meta")`.
Everything here is made with an explicit dtype and device, run under other defaults, and has the bytes of a run under
torch's own. tests/test_factories.py reads the source for the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard

from dcp_adapters import SafeFileSystemReader, export_hf, import_hf, read_manifest
from dcp_adapters.cli.main import main
from dcp_adapters.load.conversion import Conversion
from fsdp_hooks import sync_scales
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantize_,
    quantized_model_init,
    stochastic_rounding,
    use_kernels,
)
from tests.dcp_adapters.cases import alone, load, save
from tests.layerwise import algorithm_table
from tests.layerwise.small_runs import Case as Calibration
from tests.layerwise.small_runs import Layer, Model, bytes_of, found, model_of, own, run
from tests.qtensor.recipes_under_test import DELAYED, RECIPES, weight
from tests.ranks import run_ranks_each

REPO = Path(__file__).resolve().parent.parent
EVERY: dict[str, Any] = RECIPES | DELAYED
TENSOR, SQUARE = Float8CurrentScaling(granularity="tensor"), NVFP4BlockScaling(blocks="square")
# Both at once where that finds what each alone would: fp16 rounds and overflows, fp64 makes messages longer.
OTHERS = ("bfloat16", "float16 meta", "float64 meta", "float32 autocast")
Under = Callable[[], AbstractContextManager[None]]
Found = dict[str, Any]


@contextmanager
def defaults(name: str) -> Iterator[None]:
    """Under another default dtype, and on the meta device by default, or in autocast to bf16, which all inputs have."""
    dtype, _, other = name.partition(" ")
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        if other:
            autocast = torch.autocast("cpu", dtype=torch.bfloat16)
            stack.enter_context(autocast if other == "autocast" else torch.device(other))
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(getattr(torch, dtype))
        yield


def digests(values: Mapping[str, Any]) -> dict[str, str]:
    """What two runs are compared by."""
    return {name: bytes_of(value) if isinstance(value, Tensor) else repr(value) for name, value in values.items()}


def assert_same(found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    assert found.keys() == wanted.keys()
    assert not [(name, found[name], value) for name, value in wanted.items() if found[name] != value]


def filled(rows: int, columns: int = 96, seed: int = 0) -> nn.Linear:
    """A dense linear on the CPU."""
    linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(weight(rows, columns, seed=seed))
    return linear


# -- one process -------------------------------------------------------------------------------------------------------
# Each takes the defaults to run under and an empty directory, and returns what has to be the same.


def formats(under: Under, path: Path) -> Found:
    """Quantized tensors: made, decoded, written with and without stochastic rounding, multiplied, cut."""
    x, other, step = weight(), weight(seed=1), weight(seed=2, dtype=torch.float32) / 64
    x[3, 40], x[5] = torch.nan, 0
    inputs, values = weight(4, 96, seed=3), {}
    for name, recipe in EVERY.items():
        generator = torch.Generator("cpu").manual_seed(1)
        with under():
            q = quantize(x, recipe)
            values[f"{name} made"] = q.clone()
            values[f"{name} decoded"] = q.dequantize(torch.float32)
            q.copy_(other)
            q.add_(step)
            values[f"{name} added"] = q.clone()
            with stochastic_rounding(generator):
                q.sub_(step)
            values[f"{name} rounded stochastically"] = q.clone()
            values[f"{name} multiplied"] = nn.functional.linear(inputs, q)
            values[f"{name} cut"] = torch.cat([q[:32].dequantize(), q.new_zeros(q.shape).dequantize()])
    return values


def training(under: Under, path: Path) -> Found:
    """Models made quantized, quantized, and loaded with dense values; gradients and steps."""
    values: Found = {}
    inputs, dense = weight(8, 96, seed=4), {f"{index}.weight": weight(96, 96, seed=index) for index in range(2)}
    for name, storage in (
        ("mxfp8", "quantized"),
        ("nvfp4_square", "quantized"),
        ("float8_delayed", "quantized"),
        ("float8_tensor", "high_precision"),
    ):
        torch.manual_seed(0)
        with under():
            with quantized_model_init(EVERY[name], storage=storage):
                linears = [nn.Linear(96, 96, bias=False, dtype=torch.bfloat16, device="cpu") for _ in range(3)]
            net = nn.Sequential(*linears[:2])
            net.load_state_dict(dense)
            optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                net(inputs).float().square().mean().backward()
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        values |= {f"{name} made": linears[2].weight, f"{name} gradient": linears[0].weight.grad}
        values |= {f"{name} {key}": value for key, value in net.state_dict().items()}
        plain = nn.Sequential(filled(32))
        with under():
            quantize_(plain, EVERY[name])
        values[f"{name} in place"] = plain[0].weight
    return values


def checkpoints(under: Under, path: Path) -> Found:
    """Saved with checksums, read by both readers, converted while loading, and all commands."""
    state: Found = {name: quantize(weight(seed=seed), recipe) for seed, (name, recipe) in enumerate(EVERY.items())}
    state["dense"] = weight(seed=20, dtype=torch.float32)

    def targets(recipe: Any = None) -> Found:
        zeros = torch.zeros(64, 96, dtype=torch.bfloat16)
        return {"dense": zeros.float()} | {name: quantize(zeros, recipe or own) for name, own in EVERY.items()}

    loads = {
        "stock": (targets(), dcp.FileSystemReader(path / "a"), {"verify_checksums": True}),
        "safe": (targets(), SafeFileSystemReader(path / "a"), {"verify_checksums": True}),
        "converted": (targets(SQUARE), None, {"on_mismatch": "convert"}),
    }
    values: Found = {}
    with under():
        save(state, path / "a", checksums=True)
        for kind in (dcp.FileSystemReader, SafeFileSystemReader):
            values[f"manifest by {kind.__name__}"] = read_manifest(kind(path / "a")).to_json()
        for target, reader, options in loads.values():
            load(target, path / "a", reader=reader, **options)
        for command in (
            "verify a --json",
            "inspect a --json",
            "convert a b --to nvfp4 --include mxfp8* float8*",
            "convert a c --to bfloat16",
            "verify b --json",
            "diff a b --json",
            "diff c b --json",
            "report b --against c --json -o page",
        ):
            values[command] = told_by(command, path)
    values |= {f"{how} {name}": value for how, (target, *_) in loads.items() for name, value in target.items()}
    return values | {f"{made} {name}": value for made in "abc" for name, value in stored(path / made).items()}


def told_by(command: str, path: Path) -> tuple[int, str]:
    """Exit status and output of a command; what a report says of time differs."""
    words = [str(path / word) if word in ("a", "b", "c", "page") else word for word in command.split()]
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = main(words)
    return status, "" if command.startswith("report") else printed.getvalue().replace(str(path), "")


def stored(path: Path) -> Found:
    """Every tensor of a checkpoint as torch alone reads it, manifest and checksum table too."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    held: Found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with alone():
        dcp.load(held, checkpoint_id=path)
    return held


def exports(under: Under, path: Path) -> Found:
    """Written for engines, with tensors from elsewhere, and read back; one scale of an input is below what fp16 has."""
    (path / "rest").mkdir()
    save_file({"model.norm.weight": weight(1, 96, seed=5)[0]}, path / "rest" / "model.safetensors")
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "o_proj")]
    values: Found = {}
    for layout, recipe in (("compressed-tensors", NVFP4BlockScaling()), ("modelopt", TENSOR)):
        state: Found = {f"{name}.weight": quantize(weight(seed=seed), recipe) for seed, name in enumerate(names)}
        for name, scale in zip(names, (1 / 2688, 3e-9), strict=True):
            state[f"{name}.input_scale"] = torch.tensor(scale, dtype=torch.float32)
        net, attention = nn.Module(), nn.Module()
        net.model = nn.Module()
        net.model.norm = nn.RMSNorm(96, dtype=torch.bfloat16, device="cpu")
        net.model.layers = nn.ModuleList([nn.Module()])
        net.model.layers[0].self_attn = attention
        for name in names:
            attention.add_module(name.rpartition(".")[2], filled(64))
        quantize_(net, DELAYED["float8_delayed"] if recipe is TENSOR else recipe)
        with under():
            export_hf(state, path / layout, layout=layout, rest=path / "rest", progress=False)
            alone_ = import_hf(path / layout, progress=False)
            within = import_hf(path / layout, net, on_mismatch="convert", progress=False)
        values |= {f"{layout} {name}": value for name, value in alone_.items()}
        values |= {f"{layout} in a model {name}": value for name, value in within.items()}
    return values


SPECIAL: dict[str, dict[str, Any]] = {
    "Max": {"recipe": TENSOR, "options": {"inputs": "static"}},
    "Mse": {"recipe": TENSOR},
    "LocalHessian": {"options": {"inputs": "static"}},
    "SmoothQuant": {"recipe": Float8CurrentScaling()},
    "AWQ": {"recipe": TENSOR, "dtype": torch.float32},
}
ALGORITHMS = [Calibration(algorithm=one, **SPECIAL.get(name, {})) for name, one in algorithm_table.ALGORITHMS.items()]


def one_layer(model: Any) -> None:
    """Leave the model its first layer."""
    del model.layers[1:]


def calibrations(under: Under, path: Path) -> Found:
    """Each algorithm, and once more with what it left; a model whose weights are on disk."""
    values: Found = {}
    for case in ALGORITHMS:
        for _ in range(2):  # the second run takes all from the first
            net, data = model_of(case, prepare=one_layer), own()[:2]
            with under():
                result = run(net, case, data, checkpoint_dir=path / case.name)
        assert result.report.to_json()["resumed"]
        values[case.name] = found(result, net)
    save_file({name: value.clone() for name, value in net.state_dict().items()}, path / "model.safetensors")
    with torch.device("meta"):
        empty = Model(layers=1).to(torch.bfloat16)
    with under():
        result = run(empty, Calibration(), data, weights=path / "model.safetensors", inputs_on="disk")
    return values | {f"from disk {name}": value for name, value in result.state_dict().items()}


def under_defaults(procedure: Any, name: str, path: Path) -> dict[str, str]:
    path.mkdir()
    return digests(procedure(functools.partial(defaults, name), path))


@pytest.mark.full
@pytest.mark.parametrize("procedure", [formats, training, checkpoints, exports, calibrations])
def test_results_are_those_under_the_defaults_of_torch(procedure: Any, tmp_path: Path) -> None:
    wanted = under_defaults(procedure, "float32", tmp_path / "float32")
    for name in OTHERS if procedure is not calibrations else OTHERS[1:3]:
        assert_same(under_defaults(procedure, name, tmp_path / name), wanted)


@pytest.mark.full
def test_compiled_kernels_give_the_same_bytes() -> None:
    x, recipe = weight(), MXFP8BlockScaling()
    wanted = quantize(x, recipe)
    with defaults("float64 meta"), use_kernels("compiled"):
        assert bytes_of(quantize(x, recipe)) == bytes_of(wanted)


def test_decisions_of_a_calibration_are_taken_without_the_autocast_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that computes in autocast by itself is calibrated inside of one, too."""
    for kind in (Layer, Model):
        monkeypatch.setattr(kind, "forward", torch.autocast("cpu", dtype=torch.bfloat16)(kind.forward))
    for case in ALGORITHMS:
        told = []
        for enabled in (False, True):
            net, data = model_of(dataclasses.replace(case, dtype=torch.float32), prepare=one_layer), own()[:2]
            before = torch.get_float32_matmul_precision()
            try:
                torch.set_float32_matmul_precision("medium" if enabled else "highest")
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    result = run(net, case, data)
            finally:
                torch.set_float32_matmul_precision(before)
            told.append(digests(result.state_dict()) | {"report": json.dumps(result.report.to_json()["records"])})
        assert_same(told[1], told[0])


# -- two ranks ---------------------------------------------------------------------------------------------------------


def on_ranks(name: str, path: Path) -> dict[str, str]:
    """Sharded training with masters that move on some ranks only, agreement, dense loads, and a converting load."""
    under = functools.partial(defaults, name)
    values: Found = {}
    net = nn.Sequential(filled(33, seed=1), filled(64, 33, seed=2), filled(96, 64, seed=3))
    for linear, recipe in zip(net, (TENSOR, Float8CurrentScaling(), SQUARE), strict=True):
        quantize_(linear, recipe)
        fully_shard(linear)
    inputs = weight(8, 96, seed=4 + dist.get_rank())
    with under():
        optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            net(inputs).float().square().mean().backward()
            if step == 1 and dist.get_rank():
                net[0].weight.grad = None  # its flag differs on the ranks
            optimizer.step()
        values |= {f"trained {key}": whole(value) for key, value in net.state_dict().items()}
        with torch.no_grad():
            for param in net.parameters():
                param.to_local().copy_(param.to_local().dequantize() * (1 + dist.get_rank()))
        sync_scales(net)
        values |= {f"agreed {key}": whole(value) for key, value in net.state_dict().items()}
        save(net.state_dict(), path / name, checksums=True)
    other = nn.Sequential(filled(33), filled(64, 33), filled(96, 64))
    quantize_(other, TENSOR)
    for linear in other:
        fully_shard(linear)
    state = other.state_dict()
    with under():
        load(state, path / name, on_mismatch="convert", conversion_timeout=dt.timedelta(seconds=20))
        values |= {f"converted {key}": whole(value) for key, value in state.items()}
        fails = patch.object(Conversion, "claim", side_effect=MemoryError("no room"))
        with fails if dist.get_rank() else contextlib.nullcontext(), pytest.raises(dcp.api.CheckpointException) as told:
            load(state, path / name, on_mismatch="convert", conversion_timeout=dt.timedelta(seconds=20))
        assert "no room" in str(told.value)
        assert "another rank failed to read its part" in str(told.value)
    return digests(values)


def whole(value: Any) -> Tensor:
    return value.full_tensor().detach()  # type: ignore[no-any-return]


def test_ranks_come_to_what_they_come_to_under_the_defaults_of_torch(shared_tmp_path: Path) -> None:
    for wanted, *others in run_ranks_each(2, ["float32", *OTHERS], on_ranks, shared_tmp_path):
        for other in others:
            assert_same(other, wanted)


# -- importing ---------------------------------------------------------------------------------------------------------

IMPORTED = """
import json, sys
import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor

torch.set_default_dtype(getattr(torch, sys.argv[1]))
torch.set_default_device("meta")
import dcp_adapters, fsdp_hooks, layerwise, qtensor
torch.set_default_dtype(torch.float32)
torch.set_default_device(None)

from tests.qtensor.recipes_under_test import DELAYED, RECIPES, weight
from tests.layerwise.small_runs import bytes_of

print(json.dumps({name: bytes_of(qtensor.quantize(weight(), recipe)) for name, recipe in (RECIPES | DELAYED).items()}))
"""


@pytest.mark.full
def test_imports_under_other_defaults_give_the_same_bytes() -> None:
    wanted = {name: bytes_of(quantize(weight(), recipe)) for name, recipe in EVERY.items()}
    running = [
        subprocess.Popen([sys.executable, "-c", IMPORTED, name], cwd=REPO, stdout=subprocess.PIPE, text=True)
        for name in ("bfloat16", "float64")  # of two with fewer bits one is enough
    ]
    for process in running:
        told, _ = process.communicate()
        assert process.returncode == 0
        assert_same(json.loads(told), wanted)
