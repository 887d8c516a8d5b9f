"""Checkpoint format version 1 on disk: entries, manifest, planner data, stock readers, and golden bytes of the layout.

Golden bytes: `layout_v1.json` holds the manifest's text and, for every entry of the checkpoint of `golden_state`, its
dtype, global shape and the sha256 of its bytes. A change to it is a new format version. To write it anew: python -m
tests.dcp_adapters.test_format
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import Manifest, QuantizedSavePlanner, read_manifest
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import RECIPES, alone, bits, held, models, payload_bytes, placed, reference, save, values
from tests.ranks import run_ranks

GOLDEN = Path(__file__).with_name("layout_v1.json")
SHAPE = (96, 64)
F8, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
ENTRIES = {
    "float8_row": {"payload": (F8, (96, 64)), "scale": (F32, (96, 1))},
    "float8_tensor": {"payload": (F8, (96, 64)), "scale": (F32, ())},
    "mxfp8": {"payload": (F8, (96, 64)), "scale": (U8, (96, 2))},
    "nvfp4": {"payload": (U8, (96, 32)), "scale": (F8, (96, 4)), "global_scale": (F32, ())},
    "nvfp4_square": {"payload": (U8, (96, 32)), "scale": (F8, (96, 4)), "global_scale": (F32, ())},
    "mxfp8_square": {"payload": (F8, (96, 64)), "scale": (U8, (96, 2))},
    "mxfp4": {"payload": (U8, (96, 32)), "scale": (U8, (96, 2))},
    "int4_32": {"payload": (U8, (96, 32)), "scale": (torch.bfloat16, (96, 2))},
    "int8_row": {"payload": (torch.int8, (96, 64)), "scale": (F32, (96, 1))},
    "nf4_32": {"payload": (U8, (96, 32)), "scale": (F32, (96, 2))},
    "float8_block_square": {"payload": (F8, (96, 64)), "scale": (F32, (96, 1))},
}


def ramp(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values made of integers alone, so that no random number generator is part of the golden bytes."""
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 37 % 255 - 127).to(torch.float32).reshape(shape)
    return (x * 2.0 ** (torch.arange(shape[0]) % 5).reshape(-1, *[1] * (len(shape) - 1))).to(dtype)


def golden_state() -> dict[str, Any]:
    """Written out, not made from a table that tests share: a version that is frozen does not change with that."""
    weights = {
        "float8_row": quantize(ramp(SHAPE), Float8CurrentScaling(granularity="row")),
        "float8_tensor": quantize(ramp(SHAPE), Float8CurrentScaling(granularity="tensor")),
        "mxfp8": quantize(ramp(SHAPE), MXFP8BlockScaling(element="e4m3", blocks="row", scale_rounding="up")),
        "nvfp4": quantize(ramp(SHAPE), NVFP4BlockScaling(blocks="row")),
        "nvfp4_square": quantize(ramp(SHAPE), NVFP4BlockScaling(blocks="square")),
        "mxfp8_square": quantize(ramp(SHAPE), MXFP8BlockScaling(blocks="square")),
    }
    others = {
        "e5m2": quantize(ramp((3, 32), torch.float32), MXFP8BlockScaling(element="e5m2", scale_rounding="floor")),
        "vector": quantize(ramp((64,), torch.float16), Float8CurrentScaling(power_of_two=True)),
        "experts": quantize(ramp((2, 16, 32)), NVFP4BlockScaling()),
    }
    return {
        "model": {f"{name}.weight": weight for name, weight in (weights | others).items()} | {"bias": ramp((5,))},
        "step": 3,
    }


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor entry, by stock DCP."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with alone():
        dcp.load(tensors, checkpoint_id=path)
    return tensors


def layout(path: Path) -> dict[str, Any]:
    tensors = read_all(path)
    text = bytes(tensors["qtensor.manifest"].tolist()).decode()
    entries = {
        name: [str(tensor.dtype), list(tensor.shape), hashlib.sha256(bits(tensor)).hexdigest()]
        for name, tensor in sorted(tensors.items())
        if not name.startswith("qtensor.")
    }
    return {"manifest": text, "entries": entries}


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_a_weight_is_stored_as_its_parts_and_nothing_else(name: str, tmp_path: Path) -> None:
    w = quantize(values(SHAPE, 0), RECIPES[name])
    save({"model": {"w": w, "b": torch.ones(3)}}, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    found = {
        key: (entry.properties.dtype, tuple(entry.size))
        for key, entry in metadata.state_dict_metadata.items()
        if key not in ("qtensor.manifest", "qtensor.checksums", "model.b")
    }
    assert found == {f"model.w.{part}": spec for part, spec in ENTRIES[name].items()}
    stored = read_all(tmp_path)
    for part, tensor in w.parts().items():
        assert bits(stored[f"model.w.{part}"]) == bits(tensor)


def test_every_recipe_that_tests_share_has_its_entries_here() -> None:
    assert RECIPES.keys() <= ENTRIES.keys()


def test_the_manifest_is_one_uint8_vector_of_sorted_json(tmp_path: Path) -> None:
    save(golden_state(), tmp_path)
    manifest = read_all(tmp_path)["qtensor.manifest"]
    assert (manifest.dtype, manifest.ndim) == (torch.uint8, 1)
    text = bytes(manifest.tolist()).decode()
    record = json.loads(text)
    assert text == json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert list(record) == ["format_version", "recipes", "tensors"]
    assert record["format_version"] == 1
    entry = record["tensors"]["model.mxfp8.weight"]
    assert record["recipes"][entry.pop("recipe")] == {
        "type": "MXFP8BlockScaling", "element": "e4m3", "blocks": "row", "scale_rounding": "up",
    }  # fmt: skip
    assert entry == {
        "shape": [96, 64],
        "dtype": "bfloat16",
        "parts": {
            "payload": {"dtype": "float8_e4m3fn", "shape": [96, 64]},
            "scale": {"dtype": "uint8", "shape": [96, 2]},
        },
    }


def test_planner_data_holds_the_manifest_and_the_path_of_every_entry(tmp_path: Path) -> None:
    save({**golden_state(), "list": [quantize(ramp((3, 32)), RECIPES["mxfp8"]), ramp((2,))]}, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    data = dict(metadata.planner_data)
    assert data.pop("qtensor.manifest.json") == json.loads(layout(tmp_path)["manifest"])
    assert data.pop("qtensor.manifest") == ("qtensor.manifest",)
    assert data.pop("qtensor.checksums") == ("qtensor.checksums",)
    assert data.keys() == metadata.state_dict_metadata.keys() - {"qtensor.manifest", "qtensor.checksums"}
    assert data["model.nvfp4.weight.global_scale"] == ("model", "nvfp4.weight.global_scale")
    assert data["list.0.payload"] == ("list", 0, "payload")
    assert data["list.1"] == ("list", 1)
    assert data["step"] == ("step",)


def test_the_layout_is_frozen(tmp_path: Path) -> None:
    save(golden_state(), tmp_path)
    golden = json.loads(GOLDEN.read_text())
    found = layout(tmp_path)
    assert found["manifest"] == golden["manifest"]
    assert found["entries"] == golden["entries"]


def save_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = golden_state()
    state["model"] = {
        name: placed(value, mesh, Shard(0)) for name, value in state["model"].items() if name != "vector.weight"
    }
    save(state, path)


def test_every_world_size_writes_the_same_manifest_and_values(shared_tmp_path: Path) -> None:
    layouts = []
    for world in (1, 2, 3, 4):
        run_ranks(world, save_sharded, shared_tmp_path / str(world))
        layouts.append(layout(shared_tmp_path / str(world)))
    assert layouts == [layouts[0]] * 4
    golden = json.loads(GOLDEN.read_text())["entries"]
    assert layouts[0]["entries"] == {name: entry for name, entry in golden.items() if "vector" not in name}


def save_replicated_scalars(path: Path) -> list[int]:
    planner = QuantizedSavePlanner()
    listed = []

    def counting(plan: Any) -> Any:
        listed.append(sum(item.index.fqn.endswith(".global_scale") for item in plan.items))
        return plan

    original = planner.create_local_plan
    planner.create_local_plan = lambda: counting(original())  # type: ignore[method-assign]
    dcp.save(models(0, names={"nvfp4": None}), checkpoint_id=path, planner=planner)
    return listed


def test_a_replicated_scalar_is_listed_by_one_rank(shared_tmp_path: Path) -> None:
    assert run_ranks(3, save_replicated_scalars, shared_tmp_path) == [[3], [0], [0]]


# -- reading the manifest ----------------------------------------------------------------------------------------------


class DropsPlannerData(dcp.FileSystemReader):
    """A storage that does not keep planner data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.planner_data = None
        return metadata


def test_read_manifest_takes_paths_and_readers_and_needs_no_planner_data(tmp_path: Path) -> None:
    save(golden_state(), tmp_path)
    expected = read_manifest(tmp_path)
    assert expected.format_version == 1
    entry = expected.tensors["model.nvfp4_square.weight"]
    assert (entry.recipe, entry.shape, entry.dtype) == (NVFP4BlockScaling(blocks="square"), SHAPE, torch.bfloat16)
    assert expected.tensors["model.e5m2.weight"].dtype == torch.float32
    assert expected.tensors.keys() == {f"model.{name}" for name in golden_state()["model"] if name != "bias"}
    for checkpoint in (str(tmp_path), dcp.FileSystemReader(tmp_path), DropsPlannerData(tmp_path)):
        assert read_manifest(checkpoint) == expected


def test_read_manifest_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"nothing: no \.metadata, so this is no checkpoint or one whose saving never finished"
    ):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"nothing: no \.metadata"):
        read_manifest(dcp.FileSystemReader(tmp_path / "nothing"))
    with alone():
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "stock")
    with pytest.raises(
        ValueError, match=r"stock: no entry qtensor\.manifest: it was not saved with QuantizedSavePlanner"
    ):
        read_manifest(tmp_path / "stock")


def record() -> dict[str, Any]:
    return json.loads(json.loads(GOLDEN.read_text())["manifest"])  # type: ignore[no-any-return]


def test_unknown_keys_are_ignored() -> None:
    extended = record()
    extended["written_by"] = "a later library"
    extended["recipes"][0]["later"] = 1
    for entry in extended["tensors"].values():
        entry["checksum"] = "abc"
        for part in entry["parts"].values():
            part["order"] = "C"
    assert Manifest.from_json(extended) == Manifest.from_json(record())


@pytest.mark.parametrize("version", [3, 0, "1", None])
def test_an_unknown_format_version_is_refused_by_name(version: Any) -> None:
    text = f"format_version {version!r}; this library reads versions 1 and 2. Use a library version that knows it"
    with pytest.raises(ValueError, match=text):
        Manifest.from_json({**record(), "format_version": version})


def broken(change: Any) -> Any:
    manifest = record()
    change(manifest, manifest["tensors"]["model.mxfp8.weight"])
    return manifest


MALFORMED: dict[str, tuple[Any, str]] = {
    "a list": (list, "malformed: it holds a list, expected an object"),
    "no recipes": (lambda: broken(lambda m, w: m.pop("recipes")), "malformed: KeyError: 'recipes'"),
    "no tensors": (lambda: broken(lambda m, w: m.pop("tensors")), "malformed: KeyError: 'tensors'"),
    "no shape": (lambda: broken(lambda m, w: w.pop("shape")), "malformed: KeyError: 'shape'"),
    "no such recipe": (lambda: broken(lambda m, w: w.update(recipe=99)), "malformed: IndexError"),
    "unknown recipe type": (
        lambda: broken(lambda m, w: m["recipes"][0].update(type="Posit8")),
        "unknown recipe type 'Posit8'; this version knows",
    ),
    "bad recipe value": (lambda: broken(lambda m, w: m["recipes"][0].update(element="e9m9")), "e9m9"),
    "unknown dtype": (lambda: broken(lambda m, w: w.update(dtype="bfloat17")), "TypeError: 'bfloat17' is no dtype"),
    "not a dtype": (lambda: broken(lambda m, w: w.update(dtype="nn")), "malformed: TypeError: 'nn' is no dtype"),
    "shape of text": (lambda: broken(lambda m, w: w.update(shape=None)), "malformed: TypeError"),
    "missing part": (
        lambda: broken(lambda m, w: w["parts"].pop("scale")),
        "lists parts .* for model.mxfp8.weight, expected",
    ),
    "other part shape": (
        lambda: broken(lambda m, w: w["parts"]["scale"].update(shape=[96, 3])),
        "lists parts .* for model.mxfp8.weight, expected",
    ),
    "tensors as a list": (lambda: broken(lambda m, w: m.update(tensors=[])), "malformed: AttributeError"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_manifest_is_a_value_error_that_says_so(fault: str) -> None:
    build, text = MALFORMED[fault]
    with pytest.raises(ValueError, match=text):
        Manifest.from_json(build())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"not json"])
def test_bytes_that_are_no_json_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="manifest is not JSON"):
        Manifest.from_tensor(torch.tensor(list(data), dtype=torch.uint8))


def test_json_and_tensor_round_trip_whatever_the_order() -> None:
    manifest = Manifest.from_json(record())
    assert Manifest.from_tensor(manifest.to_tensor()) == manifest
    shuffled = Manifest(dict(reversed(manifest.tensors.items())))
    assert bits(shuffled.to_tensor()) == bits(manifest.to_tensor())


def test_names_beyond_ascii_survive(tmp_path: Path) -> None:
    save({"größe.重み": quantize(ramp((3, 32)), RECIPES["mxfp8"])}, tmp_path)
    assert list(read_manifest(tmp_path).tensors) == ["größe.重み"]


# -- without this library ----------------------------------------------------------------------------------------------

STOCK_READER = """
    import sys, warnings, json, hashlib

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("qtensor", "fsdp_hooks", "dcp_adapters", "layerwise", "tests"):
                raise ImportError("blocked: " + name)

    sys.meta_path.insert(0, Blocked())
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def digest(x):
        return hashlib.sha256(bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())).hexdigest()

    path, out = sys.argv[1:]
    metadata = dcp.FileSystemReader(path).read_metadata()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state = {**tensors, "step": None}
    dcp.load(state, checkpoint_id=path)
    dcp_to_torch_save(path, out)
    whole = torch.load(out, weights_only=True)
    assert json.loads(bytes(whole["qtensor.manifest"].tolist())) == metadata.planner_data["qtensor.manifest.json"]
    for name, tensor in tensors.items():
        if name.startswith("model."):
            assert digest(whole["model"][name.removeprefix("model.")]) == digest(tensor), name
    assert whole["step"] == state["step"] == 3
    loaded = [name for name in sys.modules if name.split(".")[0] in ("qtensor", "fsdp_hooks", "dcp_adapters")]
    assert not loaded, loaded
    print(json.dumps({
        "manifest": bytes(tensors["qtensor.manifest"].tolist()).decode(),
        "entries": {n: [str(t.dtype), list(t.shape), digest(t)] for n, t in sorted(tensors.items()) if not
        n.startswith("qtensor.")},
    }))
"""


@pytest.mark.slow
def test_a_python_with_torch_alone_reads_every_part_and_the_manifest(shared_tmp_path: Path) -> None:
    save(golden_state(), shared_tmp_path / "saved")
    command = [sys.executable, "-I", "-c", textwrap.dedent(STOCK_READER)]
    done = subprocess.run(
        [*command, str(shared_tmp_path / "saved"), str(shared_tmp_path / "out.pt")],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_text())


def test_dcp_to_torch_save_works_on_sharded_listed_and_unflattened_checkpoints(shared_tmp_path: Path) -> None:
    run_ranks(3, save_sharded, shared_tmp_path / "sharded")
    state = {"list": [quantize(ramp((3, 32)), RECIPES["mxfp8"]), ramp((2,)), {"v": ramp((2,))}]}
    save(state, shared_tmp_path / "listed")
    save({"w": quantize(ramp((3, 32)), RECIPES["mxfp8"])}, shared_tmp_path / "unflattened", flatten_state_dict=False)
    found = {}
    for name in ("sharded", "listed", "unflattened"):
        dcp_to_torch_save(shared_tmp_path / name, shared_tmp_path / f"{name}.pt")
        found[name] = torch.load(shared_tmp_path / f"{name}.pt", weights_only=True)
    w = golden_state()["model"]["mxfp8.weight"]
    assert bits(found["sharded"]["model"]["mxfp8.weight.payload"]) == bits(w.payload)
    item = state["list"][0]
    assert list(found["listed"]["list"][0]) == ["payload", "scale"]
    assert bits(found["listed"]["list"][0]["scale"]) == bits(item.scale)
    assert torch.equal(found["listed"]["list"][1], state["list"][1])
    assert bits(found["unflattened"]["w.payload"]) == bits(item.payload)


def test_nothing_of_ours_is_pickled(shared_tmp_path: Path) -> None:
    run_ranks(2, save_sharded, shared_tmp_path / "saved")
    pickled = (shared_tmp_path / "saved" / ".metadata").read_bytes()
    modules = {arg.split()[0] for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}
    words = [arg for op, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)]
    assert modules | {word for word in words if word.startswith("torch.distributed")}, "the scan saw no module at all"
    for word in [*modules, *words]:
        assert word.split(".")[0] not in ("fsdp_hooks", "dcp_adapters", "layerwise", "tests"), word
        assert not word.startswith("qtensor.") or word.startswith(("qtensor.manifest", "qtensor.checksums")), word
    for file in (shared_tmp_path / "saved").glob("*.distcp"):
        data = file.read_bytes()
        assert b"dcp_adapters" not in data
        assert b"fsdp_hooks" not in data
        assert b"QuantizedTensor" not in data


# -- bytes on disk -----------------------------------------------------------------------------------------------------


def stored_bytes(path: Path) -> tuple[int, int]:
    """Bytes of the chunks of the weights, and of all files."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    weights = sum(info.length for index, info in metadata.storage_data.items() if index.fqn.startswith("w"))
    return weights, sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        (MXFP8BlockScaling(), 0.53),
        (MXFP8BlockScaling(blocks="square"), 0.53),
        (NVFP4BlockScaling(), 0.30),
        (NVFP4BlockScaling(blocks="square"), 0.30),
        (Float8CurrentScaling(), 0.53),
    ],
)
def test_weights_take_the_bytes_of_their_format(recipe: Any, bound: float, tmp_path: Path) -> None:
    dense = {f"w{i}": torch.randn(768, 768).to(torch.bfloat16) for i in range(2)}
    quantized = {name: quantize(weight, recipe) for name, weight in dense.items()}
    with alone():
        dcp.save(dense, checkpoint_id=tmp_path / "dense")
    save(quantized, tmp_path / "quantized")
    dense_weights, dense_files = stored_bytes(tmp_path / "dense")
    weights, files = stored_bytes(tmp_path / "quantized")
    assert weights >= sum(payload_bytes(weight) for weight in quantized.values())
    assert weights <= bound * dense_weights
    assert files <= bound * dense_files


def test_saving_leaves_the_state_dict_as_it_is(tmp_path: Path) -> None:
    state = {"models": reference(0), "list": [1, 2], "step": 4}
    before = held(state)
    names = list(state["models"]["mxfp8"])
    save(state, tmp_path)
    assert held(state) == before
    assert list(state) == ["models", "list", "step"]
    assert list(state["models"]["mxfp8"]) == names


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save(golden_state(), folder)
        GOLDEN.write_text(json.dumps(layout(Path(folder)), indent=1, sort_keys=True) + "\n")
