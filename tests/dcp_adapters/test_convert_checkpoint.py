"""convert: the same bytes as converting full tensors and saving them, from any world size, in bounded memory."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters.convert.convert_checkpoint import ConversionRefused, EntryStream, convert_checkpoint, plan_conversion
from dcp_adapters.records.checksums import CHECKSUMS, chunk_key, digest_of
from dcp_adapters.stored.checkpoint import CheckpointUnusable, StoredCheckpoint
from qtensor import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import EVERY, RECIPES, alone, bits, held, load, models, placed, save, values
from tests.dcp_adapters.live_storages import LiveStorages
from tests.ranks import run_ranks
from tests.recipes import STAND_INS
from tests.sampling import sampled

if TYPE_CHECKING:
    from qtensor.tensor.quantized_tensor import QuantizedTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE = (96, 64)


def convert(source: Path, destination: Path, to: Any, *, include: Any = (), exclude: Any = (), **options: Any) -> None:
    stored = StoredCheckpoint(source, check=True)
    convert_checkpoint(stored, destination, plan_conversion(stored.entries, to, include, exclude), **options)


def contents(path: Path) -> dict[str, Any]:
    """Entry -> dtype, shape and bytes of a tensor, or the stored bytes, all read without the code under test."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    entries = metadata.state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with alone():
        dcp.load(dict(tensors), checkpoint_id=path)
    found: dict[str, Any] = {name: (t.dtype, tuple(t.shape), bits(t)) for name, t in tensors.items()}
    if CHECKSUMS in tensors:
        found[CHECKSUMS] = sorted(map(tuple, tensors[CHECKSUMS].tolist()))
    for index, info in metadata.storage_data.items():
        if index.fqn not in tensors:
            data = (path / info.relative_path).read_bytes()
            found[index.fqn] = data[info.offset : info.offset + info.length]
    assert found.keys() == entries.keys()
    return found


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def paths(path: Path) -> Any:
    return dcp.FileSystemReader(path).read_metadata().planner_data


def assert_same(found: Path, expected: Path) -> None:
    assert contents(found) == contents(expected)
    assert paths(found) == paths(expected)


def recoded(q: QuantizedTensor, recipe: Any) -> QuantizedTensor:
    """`b.copy_(a)` into a new b."""
    target = quantize(torch.zeros(q.shape, dtype=q.dtype), recipe)
    target.copy_(q)
    return target


def weights() -> dict[str, QuantizedTensor]:
    found = {
        f"{name}.weight": quantize(values(SHAPE, i, DTYPES[i % 3]), recipe)
        for i, (name, recipe) in enumerate(RECIPES.items())
    }
    return found | {"delayed.weight": quantize(values(SHAPE, 9), Float8DelayedScaling(amax_history_len=4))}


def others() -> dict[str, Any]:
    return {
        "norm": values((64,), 20),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 64),
        "ids": torch.arange(5),
        "nan": torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    }


def state(change: Any = lambda value: value) -> dict[str, Any]:
    """A nested state dict, with a list, scalars and things that are no tensors; `change` is done to each weight."""
    return {
        "model": {name: change(q) for name, q in weights().items()} | others(),
        "list": [change(quantize(values((32, 64), 30), RECIPES["mxfp8"])), values((3,), 31), {"deep": torch.ones(2)}],
        "optimizer": {"lr": 0.1, "state": {"0": {"exp_avg": values(SHAPE, 40, torch.float32)}}},
        "step": 7,
    }


# -- the bytes ---------------------------------------------------------------------------------------------------------


@sampled("name", EVERY, STAND_INS)
def test_every_recipe_becomes_another_as_copy_does(name: str, tmp_path: Path) -> None:
    recipe = EVERY[name]
    save(state(), tmp_path / "a")
    save(state(lambda q: recoded(q, recipe)), tmp_path / "expected")
    convert(tmp_path / "a", tmp_path / "b", recipe)
    assert_same(tmp_path / "b", tmp_path / "expected")


def test_the_data_file_is_that_of_a_save(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    save(state(lambda q: recoded(q, RECIPES["nvfp4"])), tmp_path / "expected")
    convert(tmp_path / "a", tmp_path / "b", RECIPES["nvfp4"])
    assert names_in(tmp_path / "b") == [".metadata", "__0_0.distcp"]
    assert (tmp_path / "b/__0_0.distcp").read_bytes() == (tmp_path / "expected/__0_0.distcp").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_becomes_dense_as_dequantize_does(dtype: torch.dtype, tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    save(state(lambda q: q.dequantize(dtype)), tmp_path / "expected")
    convert(tmp_path / "a", tmp_path / "b", dtype)
    assert_same(tmp_path / "b", tmp_path / "expected")


# What a kind becomes is a matter of test_convert.py; here of the command around it.
@sampled("name", RECIPES, STAND_INS)
def test_dense_becomes_quantized_as_quantize_does(name: str, tmp_path: Path) -> None:
    dense = {f"{i}.weight": values(SHAPE, i, dtype) for i, dtype in enumerate(DTYPES)}
    kept = {"0.bias": values((64,), 8), "head.weight": values((7, 5), 9), "step": 3}
    with alone():
        dcp.save({"model": {**dense, **kept}}, checkpoint_id=tmp_path / "a")
    quantized = {key: quantize(x, RECIPES[name]) for key, x in dense.items()}
    save({"model": {**quantized, **kept}}, tmp_path / "expected")
    convert(tmp_path / "a", tmp_path / "b", RECIPES[name], include=["model.*.weight"], exclude=["*.head.*"])
    assert_same(tmp_path / "b", tmp_path / "expected")


def test_what_is_not_selected_stays(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    expected = state()
    expected["model"]["nvfp4.weight"] = recoded(expected["model"]["nvfp4.weight"], RECIPES["mxfp8"])
    save(expected, tmp_path / "expected")
    convert(tmp_path / "a", tmp_path / "b", RECIPES["mxfp8"], include=["*nvfp4*"], exclude=["*square*"])
    assert_same(tmp_path / "b", tmp_path / "expected")


def save_sharded(path: Path, names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", (3,))
    weight = {
        name: placed(quantize(values((97, 64), i), RECIPES[name]), mesh, Shard(0)) for i, name in enumerate(names)
    }
    save({"model": {**weight, "dense": placed(values((50, 8), 5), mesh, Shard(1))}, "step": 3}, path)


def save_models(path: Path) -> None:
    save({"model": models(names=("mxfp8",)), "step": 3}, path)


def test_pieces_of_many_ranks_are_converted_as_the_whole(tmp_path: Path) -> None:
    names = ("float8_row", "float8_tensor", "mxfp8", "nvfp4")
    run_ranks(3, save_sharded, tmp_path / "a", names)
    full = {name: quantize(values((97, 64), i), RECIPES[name]) for i, name in enumerate(names)}
    converted = {name: recoded(q, NVFP4BlockScaling()) for name, q in full.items()}
    save({"model": {**converted, "dense": values((50, 8), 5)}, "step": 3}, tmp_path / "expected")
    convert(tmp_path / "a", tmp_path / "b", NVFP4BlockScaling())
    found, expected = contents(tmp_path / "b"), contents(tmp_path / "expected")
    assert found == expected
    assert paths(tmp_path / "b") == paths(tmp_path / "expected")


def test_entries_may_be_asked_for_in_any_order(tmp_path: Path) -> None:
    first, second = (quantize(values(SHAPE, seed), RECIPES["mxfp8"]) for seed in (0, 1))
    save({"first": first, "second": second}, tmp_path / "a")
    source = StoredCheckpoint(tmp_path / "a")
    plan = plan_conversion(source.entries, RECIPES["nvfp4"])
    parts = {f"{name}.{part}": name for name in source.entries for part in ("payload", "scale", "global_scale")}
    stream = EntryStream(source, plan, parts, lambda _: None)
    wanted = {name: recoded(q, RECIPES["nvfp4"]).parts() for name, q in (("first", first), ("second", second))}
    for entry in ("first.scale", "second.payload", "first.payload", "first.global_scale", "second.scale"):
        name, part = entry.split(".")
        assert bits(stream.take(entry)) == bits(wanted[name][part]), entry


# -- what surrounds the tensors ----------------------------------------------------------------------------------------


def test_the_result_loads_into_the_same_nested_state(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", MXFP8BlockScaling())
    expected = state(lambda q: recoded(q, MXFP8BlockScaling()))
    target = state(lambda q: quantize(torch.zeros(q.shape, dtype=q.dtype), MXFP8BlockScaling()))
    target["step"] = target["optimizer"]["lr"] = 0
    load(target, tmp_path / "b")
    assert held(target) == held(expected)


def test_stock_tools_rebuild_the_nested_state(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", torch.bfloat16)
    with alone():
        dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    found = {name: found[name] for name in ("model", "list", "optimizer", "step")}
    assert held(found) == held(state(lambda q: q.dequantize(torch.bfloat16)))


def test_a_checkpoint_saved_flat_stays_flat(tmp_path: Path) -> None:
    flat = {"w": quantize(values(SHAPE, 0), RECIPES["mxfp8"]), "b": values((3,), 1)}
    save(flat, tmp_path / "a", flatten_state_dict=False)
    save({"w": recoded(flat["w"], RECIPES["nvfp4"]), "b": flat["b"]}, tmp_path / "expected", flatten_state_dict=False)
    convert(tmp_path / "a", tmp_path / "b", RECIPES["nvfp4"])
    assert_same(tmp_path / "b", tmp_path / "expected")


def test_a_manifest_only_in_the_entries_is_found(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    save(state(lambda q: recoded(q, RECIPES["nvfp4"])), tmp_path / "expected")
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    metadata.planner_data = None
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(metadata))
    convert(tmp_path / "a", tmp_path / "b", RECIPES["nvfp4"])
    assert contents(tmp_path / "b") == contents(tmp_path / "expected")


class Unloadable:
    """What must not be unpickled."""

    def __reduce__(self) -> Any:
        return (int, ("no number: this was unpickled",))


def test_bytes_are_copied_without_unpickling_them(tmp_path: Path) -> None:
    save({"w": quantize(values(SHAPE, 0), RECIPES["mxfp8"]), "object": Unloadable(), "step": 3}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", RECIPES["nvfp4"])
    before, after = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert (after["object"], after["step"]) == (before["object"], before["step"])
    assert b"no number" in after["object"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, content: dict[str, Any], to: Any, **options: Any) -> str:
    save(content, tmp_path / "a")
    with pytest.raises(ConversionRefused) as caught:
        convert(tmp_path / "a", tmp_path / "b", to, **options)
    assert names_in(tmp_path) == ["a"]
    return str(caught.value)


def test_all_that_can_not_be_quantized_is_listed_before_writing(tmp_path: Path) -> None:
    content = {
        "fits": values((32, 64), 0),
        "narrow": values((32, 40), 1),
        "bias": values((64,), 2),
        "ids": torch.ones(32, 32, dtype=torch.int64),
        "q": quantize(values((8, 24), 3), Float8CurrentScaling()),
        "step": 3,
    }
    message = refused(tmp_path, content, MXFP8BlockScaling(), include=["*"])
    assert message.splitlines() == [
        f"4 of 5 selected tensors can not be quantized as {MXFP8BlockScaling()}; leave them out with --exclude:",
        "  narrow: shape (32, 40), expected K to be a multiple of 32",
        "  bias: shape (64,), expected 2 dims or more",
        "  ids: int64, expected bfloat16, float16 or float32",
        "  q: shape (8, 24), expected K to be a multiple of 32",
    ]


def test_square_blocks_want_rows_that_fit(tmp_path: Path) -> None:
    message = refused(tmp_path, {"w": values((40, 32), 0)}, NVFP4BlockScaling(blocks="square"), include=["w"])
    assert message.endswith("  w: shape (40, 32), expected both N and K to be multiples of 16")


def test_a_dense_checkpoint_wants_an_include(tmp_path: Path) -> None:
    message = refused(tmp_path, {"w": values((32, 32), 0)}, MXFP8BlockScaling())
    assert message == (
        "the source holds no quantized tensors; say which dense ones to quantize: --include '*_proj.weight'"
    )


def test_an_include_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    content = {"w": values((32, 32), 0), "q": quantize(values((32, 32), 0), MXFP8BlockScaling())}
    assert refused(tmp_path, content, NVFP4BlockScaling(), include=["w", "x.*", "y"]) == (
        "--include x.* y matches no tensor; see the names with inspect"
    )
    (tmp_path / "2").mkdir()
    assert refused(tmp_path / "2", content, torch.bfloat16, include=["w"]) == (
        "--include w matches no quantized tensor; see the names with inspect"
    )


def test_a_destination_that_exists_is_left_alone(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes").touch()
    with pytest.raises(FileExistsError, match="exists already; choose another name, nothing is overwritten"):
        convert(tmp_path / "a", tmp_path / "b", torch.bfloat16)
    assert names_in(tmp_path / "b") == ["notes"]
    (tmp_path / "b" / "notes").unlink()
    convert(tmp_path / "a", tmp_path / "b", torch.bfloat16)  # an empty one is fine
    assert ".metadata" in names_in(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory; create it first"):
        convert(tmp_path / "a", tmp_path / "nowhere/b", torch.bfloat16)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_the_destination_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(), tmp_path / "a")
    synced: list[str] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        fsync(descriptor)

    seen = []

    def watch(_: int) -> None:
        partial = next(path for path in tmp_path.iterdir() if path.name.startswith(".b."))
        seen.append((sorted(path.name for path in tmp_path.iterdir() if path != partial), names_in(partial)))

    monkeypatch.setattr(os, "fsync", recording)
    convert(tmp_path / "a", tmp_path / "b", torch.bfloat16, advance=watch)
    assert len(seen) == len(StoredCheckpoint(tmp_path / "a").entries) + 2  # the bytes of lr and step
    assert all(names == ["a"] and files == ["__0_0.distcp"] for names, files in seen)
    assert names_in(tmp_path) == ["a", "b"]
    partial = synced[0].split("/")[0]
    synced = [re.sub(r"\.metadata\.\w{8}\.tmp", ".metadata.tmp", name) for name in synced]
    assert synced == [f"{partial}/__0_0.distcp", f"{partial}/.metadata.tmp", partial, ".", partial, "."]


def test_a_file_that_is_missing_leaves_nothing_behind(tmp_path: Path, shared_tmp_path: Path) -> None:
    run_ranks(2, save_models, shared_tmp_path / "saved" / "a")
    tmp_path = tmp_path / "own"
    shutil.copytree(shared_tmp_path / "saved" / "a", tmp_path / "a")
    (tmp_path / "a/__1_0.distcp").unlink()
    stored, started = StoredCheckpoint(tmp_path / "a"), []
    plan = plan_conversion(stored.entries, torch.bfloat16)
    with pytest.raises(CheckpointUnusable, match=r"can not be read: FileNotFoundError: .*__1_0\.distcp"):
        convert_checkpoint(stored, tmp_path / "b", plan, advance=started.append)
    assert started  # some had been written
    assert names_in(tmp_path) == ["a"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    done = []

    def interrupt(_: int) -> None:
        done.append(None)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "a", tmp_path / "b", torch.bfloat16, advance=interrupt)
    assert names_in(tmp_path) == ["a"]


def with_checksums(content: dict[str, Tensor], path: Path) -> None:
    """Dense tensors with the table of their checksums, saved by stock DCP."""
    rows = [
        chunk_key(dcp.metadata.MetadataIndex(name, [0] * tensor.ndim)) + digest_of(tensor)
        for name, tensor in content.items()
    ]
    table = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
    with alone():
        dcp.save({**content, CHECKSUMS: table}, checkpoint_id=path)


def test_damaged_data_gets_no_fresh_checksum(tmp_path: Path) -> None:
    content = {"w": torch.full((32, 64), 1.5), "v": torch.full((32, 64), 2.5)}
    with_checksums(content, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "good", MXFP8BlockScaling(), include=["w"])
    file = tmp_path / "a/__0_0.distcp"
    data, value = file.read_bytes(), torch.tensor([2.5] * 8).numpy().tobytes()
    assert value in data
    file.write_bytes(data.replace(value, b"\x01" + value[1:], 1))
    with pytest.raises(
        CheckpointUnusable, match=r"v at \(0, 0\) is damaged: its bytes do not have the checksum stored"
    ):
        convert(tmp_path / "a", tmp_path / "b", MXFP8BlockScaling(), include=["w"])
    assert names_in(tmp_path) == ["a", "good"]


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(tmp_path: Path, count: int, to: Any) -> int:
    source, shape = tmp_path / f"{count}", (32, 256)
    content: dict[str, Any] = {f"{i}": quantize(values(shape, i), MXFP8BlockScaling()) for i in range(count)}
    save(content | {f"dense {i}": values(shape, i, torch.float32) for i in range(count)}, source)
    stored = StoredCheckpoint(source)
    with LiveStorages() as live:
        convert_checkpoint(stored, tmp_path / f"{count} {to}", plan_conversion(stored.entries, to))
    return live.peak


@pytest.mark.parametrize("to", [NVFP4BlockScaling(), torch.float32])
def test_memory_does_not_grow_with_the_number_of_tensors(to: Any, tmp_path: Path) -> None:
    few, many = peak(tmp_path, 2, to), peak(tmp_path, 12, to)
    one = 32 * 256 * 4  # a tensor in fp32
    assert many < few + one, (few, many)  # the manifest and the like
    assert few < 12 * one  # temporaries of quantizing one tensor


def test_bytes_are_not_kept(tmp_path: Path) -> None:
    one = 1 << 20
    save(
        {"q": quantize(values(SHAPE, 0), MXFP8BlockScaling())} | {f"{i}": bytes(one) for i in range(8)}, tmp_path / "a"
    )
    tracemalloc.start()
    convert(tmp_path / "a", tmp_path / "b", NVFP4BlockScaling())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one < most < 5 * one
