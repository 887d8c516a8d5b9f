"""Metadata whose chunks are lost, empty, moved, doubled or in another's place: an error that names the tensor, before
anything is written, or the right values."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import SafeFileSystemReader, export_hf
from dcp_adapters.cli.main import main
from dcp_adapters.load.coverage import coverage_problems, parts_of_target
from dcp_adapters.plain.tiling import tiling_fault
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST
from dcp_adapters.stored.reading.places import check_archives
from dcp_adapters.torch_private import StorageInfo
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, alone, bits, load, placed, save, values
from tests.ranks import run_ranks, run_ranks_catching

READERS = (dcp.FileSystemReader, SafeFileSystemReader)
OWN = (MANIFEST, CHECKSUMS)


def state(seed: int) -> dict[str, Any]:
    weights = {name: quantize(values((64, 64), seed + 1), RECIPES[name]) for name in ("mxfp8", "nvfp4")}
    return weights | {"dense": values((64, 8), seed + 2), "count": torch.tensor(float(seed))}


def save_on_two(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    placed_state = {name: placed(value, mesh, Shard(0)) if value.ndim else value for name, value in state(0).items()}
    save(placed_state, path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coverage") / "good"
    run_ranks(2, save_on_two, path)
    return path


def contents(held: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {part: bits(tensor) for part, tensor in value.parts().items()} if hasattr(value, "parts") else bits(value)
        for name, value in held.items()
    }


# -- mutations: of one chunk of an entry, in place ---------------------------------------------------------------------


def move(metadata: Metadata, name: str, place: int, offset: int, size: int) -> None:
    """The chunk begins `offset` rows later and has `size` rows more; what is stored of it is found under that."""
    chunk = metadata.state_dict_metadata[name].chunks[place]
    info = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
    offsets = torch.Size([chunk.offsets[0] + offset, *chunk.offsets[1:]])
    sizes = torch.Size([chunk.sizes[0] + size, *chunk.sizes[1:]])
    metadata.state_dict_metadata[name].chunks[place] = ChunkStorageMetadata(offsets, sizes)
    metadata.storage_data[MetadataIndex(name, offsets)] = info


def drop(metadata: Metadata, name: str, place: int) -> None:
    chunk = metadata.state_dict_metadata[name].chunks.pop(place)
    del metadata.storage_data[MetadataIndex(name, chunk.offsets)]


def lose_place(metadata: Metadata, name: str, place: int) -> None:
    del metadata.storage_data[MetadataIndex(name, metadata.state_dict_metadata[name].chunks[place].offsets)]


def empty(metadata: Metadata, name: str, place: int) -> None:
    chunks = metadata.state_dict_metadata[name].chunks
    chunks[place] = ChunkStorageMetadata(chunks[place].offsets, torch.Size([0] * len(chunks[place].sizes)))


def double(metadata: Metadata, name: str, place: int) -> None:
    metadata.state_dict_metadata[name].chunks.append(metadata.state_dict_metadata[name].chunks[place])


def borrow_place(metadata: Metadata, name: str, place: int) -> None:
    """What is stored of it is what is stored of the entry's other chunk."""
    indices = [MetadataIndex(name, chunk.offsets) for chunk in metadata.state_dict_metadata[name].chunks]
    metadata.storage_data[indices[place]] = metadata.storage_data[indices[1 - place]]


def shift_place(metadata: Metadata, name: str, place: int) -> None:
    """Its bytes begin before those of another chunk, and reach to their end."""
    info = metadata.storage_data[MetadataIndex(name, metadata.state_dict_metadata[name].chunks[place].offsets)]
    follows = [
        other
        for other in metadata.storage_data.values()
        if other.relative_path == info.relative_path and other.offset == info.offset + info.length
    ]
    info.length += follows[0].length if follows else 0


def with_move(offset: int, size: int) -> Callable[[Metadata, str, int], None]:
    return lambda metadata, name, place: move(metadata, name, place, offset, size)


MUTATIONS: dict[str, Callable[[Metadata, str, int], None]] = {
    "dropped": drop,
    "without a place": lose_place,
    "emptied": empty,
    "moved down": with_move(1, 0),
    "moved up": with_move(-1, 0),
    "longer": with_move(0, 1),
    "shorter": with_move(0, -1),
    "begins earlier": with_move(-1, 1),
    "begins later": with_move(1, -1),
    "doubled": double,
    "in another's place": borrow_place,
    "in two places": shift_place,
}
ROWS = {"moved down", "moved up", "longer", "shorter", "begins earlier", "begins later", "in another's place"}


def mutants(written: Path, directory: Path, mutation: str) -> Iterator[tuple[str, Path]]:
    """(entry, a copy of the checkpoint in which one chunk of it is other) for every chunk that can be so."""
    for number, file in enumerate(("__0_0.distcp", "__1_0.distcp")):
        shutil.copyfile(written / file, directory / file)
        assert (directory / file).stat().st_size, number
    original = (written / ".metadata").read_bytes()
    entries = pickle.loads(original).state_dict_metadata
    for name, entry in entries.items():
        if name in OWN or (mutation in ROWS and len(entry.chunks) < 2):
            continue
        for place in range(len(entry.chunks)):
            metadata = pickle.loads(original)
            MUTATIONS[mutation](metadata, name, place)
            (directory / ".metadata").write_bytes(pickle.dumps(metadata))
            if pickle.loads(original) != metadata:
                yield name, directory


def error_of(target: dict[str, Any], path: Path, reader: Any, *, verified: bool) -> str | None:
    try:
        load(target, path, reader=reader(path), verify_checksums=verified)
    except BaseException as error:
        return str(error)
    return None


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_load_has_the_right_values_or_names_the_tensor_before_it_writes(
    mutation: str, written: Path, tmp_path: Path
) -> None:
    right, tried = contents(state(0)), 0
    for name, path in mutants(written, tmp_path, mutation):
        for reader in READERS:
            for verified in (False, True):
                target = state(9)
                before = contents(target)
                error = error_of(target, path, reader, verified=verified)
                assert error is None or name in error, (mutation, name, reader, error)
                assert contents(target) == (right if error is None else before), (mutation, name, reader, verified)
                tried += 1
    assert tried >= 24


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_convert_has_the_right_values_or_names_the_tensor_and_leaves_nothing(
    mutation: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = tmp_path / "in", tmp_path / "out"
    directory.mkdir()
    for name, path in mutants(written, directory, mutation):
        with alone():
            status = main(["convert", str(path), str(out), "--to", "bfloat16", "--no-checksums", "--no-progress"])
        told = capsys.readouterr().err
        if status:
            assert name in told
            assert not out.exists()
            continue
        target = {key: torch.zeros(64, 64, dtype=torch.bfloat16) for key in ("mxfp8", "nvfp4")}
        load(target, out, allow_partial_load=True)
        assert all(torch.equal(target[key], state(0)[key].dequantize()) for key in target), (mutation, name)
        shutil.rmtree(out)


def swap(path: Path, name: str) -> None:
    """The two chunks of an entry, of one shape, change places in the storage: only checksums can tell."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    one, other = [MetadataIndex(name, chunk.offsets) for chunk in metadata.state_dict_metadata[name].chunks]
    stored = metadata.storage_data
    stored[one], stored[other] = stored[other], stored[one]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["mxfp8.payload", "nvfp4.scale", "dense"])
def test_chunks_that_changed_places_are_found_by_their_checksums(
    name: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(written, path)
    swap(path, name)
    for reader in READERS:
        with pytest.raises(BaseException, match=rf"{name}: its chunk at .* Some tensors of the target are loaded"):
            load(state(9), path, reader=reader(path), verify_checksums=True)
    refused_unless_told(["convert", str(path), str(out), "--to", "float32"], f"{name} at (0, 0)", out, capsys)


def refused_unless_told(command: list[str], chunk: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command finds bytes without their checksum, and with --no-checksums does not look."""
    with alone():
        assert main([*command, "--no-progress"]) == 2
    assert f"{chunk} is damaged: its bytes do not have the checksum stored" in capsys.readouterr().err
    assert not out.exists()
    with alone():
        assert main([*command, "--no-progress", "--no-checksums"]) == 0
    assert out.exists()


def test_export_finds_tensors_that_changed_places_by_their_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    names = [f"{name}.weight" for name in ("a", "b", "linear")]
    held = {name: values((32, 64), seed) for seed, name in enumerate(names)}
    save(held | {"linear.weight": quantize(held["linear.weight"], RECIPES["mxfp8"])}, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    one, other = [MetadataIndex(name, (0, 0)) for name in names[:2]]
    stored = metadata.storage_data
    stored[one], stored[other] = stored[other], stored[one]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused_unless_told(["export", str(path), str(out)], "a.weight at (0, 0)", out, capsys)
    with pytest.raises(ValueError, match="its bytes do not have the checksum stored"):
        export_hf(path, tmp_path / "other", progress=False)
    export_hf(path, tmp_path / "other", progress=False, verify_checksums=False)


def test_a_chunk_of_another_shape_in_its_place_is_named(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    stored = metadata.storage_data
    one, other = MetadataIndex("mxfp8.payload", (0, 0)), MetadataIndex("dense", (0, 0))
    stored[one], stored[other] = stored[other], stored[one]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for reader in READERS:
        target = state(9)
        before = contents(target)
        with pytest.raises(BaseException, match=r"(mxfp8\.payload|dense) at \(0, 0\): the file holds torch"):
            load(target, tmp_path, reader=reader(tmp_path))
        assert contents(target) == before


def load_converted(path: Path, recipe: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    target = {
        "mxfp8": placed(quantize(torch.zeros(64, 64), recipe), mesh, Shard(0)),
        "dense": placed(torch.zeros(64, 8), mesh, Shard(0)),
    }
    load(target, path, on_mismatch="convert", allow_partial_load=True)


def test_all_ranks_learn_of_a_chunk_that_one_of_them_reads(written: Path, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "in"
    if not path.exists():
        shutil.copytree(written, path, dirs_exist_ok=True)
    for name in ("mxfp8.scale", "dense"):
        metadata = pickle.loads((written / ".metadata").read_bytes())
        empty(metadata, name, 1)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        for error in run_ranks_catching(2, load_converted, path, RECIPES["nvfp4"]):
            assert "the checkpoint's .metadata is damaged; nothing has been loaded" in error
            assert f"{name}: its chunks do not make up the tensor" in error
            assert "no chunk holds any of what is read" in error


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [None, *READERS])
def test_a_fifo_in_the_place_of_a_file_is_refused(reader: Any, written: Path, tmp_path: Path) -> None:
    """To open it would wait forever."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    (tmp_path / "__1_0.distcp").unlink()
    os.mkfifo(tmp_path / "__1_0.distcp")
    target = state(9)
    before = contents(target)
    with pytest.raises(BaseException, match=r"__1_0\.distcp: (it is )?no ordinary file"):
        load(target, tmp_path, reader=reader and reader(tmp_path))
    assert contents(target) == before


def archive_of(path: Path, name: str) -> tuple[Path, StorageInfo, bytes]:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(name, (0, 0))]
    file = path / info.relative_path
    return file, info, file.read_bytes()


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_archive_names_chunk_and_file_before_anything_is_written(
    reader: Any, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    file, info, data = archive_of(tmp_path, "dense")
    pickled = data.index(b"data.pkl", info.offset) + 64
    for at in (info.offset, pickled, info.offset + info.length - 30):
        file.write_bytes(data[:at] + b"\xff" * 16 + data[at + 16 :])
        target = state(9)
        before = contents(target)
        with pytest.raises(BaseException, match=rf"{file}: dense at \(0, 0\): ") as refused:
            load(target, tmp_path, reader=reader(tmp_path))
        assert "use another checkpoint" in str(refused.value)
        assert contents(target) == before
    file.write_bytes(data)
    load(target := state(9), tmp_path, reader=reader(tmp_path))
    assert contents(target) == contents(state(0))


@pytest.mark.parametrize("damage", [b"\xff" * 8, b"", b"(."])
def test_a_damaged_byte_entry_is_named(damage: bytes, tmp_path: Path) -> None:
    save({"step": [1, 2], "b": torch.ones(3)}, tmp_path, flatten_state_dict=False)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("step")]
    file = tmp_path / info.relative_path
    data = bytearray(file.read_bytes())
    at = data.index(b"\x80\x02]", info.offset) + 2
    data[at : at + 8] = damage.ljust(8, b".")
    file.write_bytes(data)
    with pytest.raises(BaseException, match=r"(?s)step: this entry of the checkpoint is damaged, .*: load another"):
        load({"step": None, "b": torch.zeros(3)}, tmp_path, flatten_state_dict=False)


def test_a_reader_that_is_kept_does_not_keep_the_target(written: Path) -> None:
    reader = dcp.FileSystemReader(written)
    load(target := state(9), written, reader=reader)
    weight = weakref.ref(target["mxfp8"])
    del target
    gc.collect()
    assert reader.storage_data
    assert weight() is None


# -- time --------------------------------------------------------------------------------------------------------------


def test_what_one_of_many_ranks_reads_is_checked_in_a_moment() -> None:
    """A hundred thousand chunks, of which the rank reads few: comparing them in pairs would take hours."""
    count = 100_000
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(count)]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([count, 4]), chunks)
    stored = {MetadataIndex("w", c.offsets): StorageInfo("__0_0", 16 * i, 16) for i, c in enumerate(chunks)}
    metadata = Metadata({"w": entry}, storage_data=stored)
    mine = ChunkStorageMetadata(torch.Size([7, 0]), torch.Size([1, 4]))
    items = create_read_items_for_chunk_list("w", entry, [mine])
    began = time.process_time()
    assert coverage_problems(items, {"w": (1, 4)}, metadata) == []
    assert tiling_fault(entry.size, [(chunk.offsets, chunk.sizes) for chunk in chunks]) is None
    assert time.process_time() - began < 20  # half a second


def test_archives_of_many_chunks_are_looked_at_in_a_moment(tmp_path: Path) -> None:
    """Two thousand of a hundred thousand chunks: looking for each among all would take most of a minute."""
    count, file = 100_000, tmp_path / "__0_0.distcp"
    torch.save(torch.zeros(1, 4), file)
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(count)]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([count, 4]), chunks)
    info = StorageInfo(file.name, 0, file.stat().st_size)  # of all: whether they share bytes is asked elsewhere
    held = {MetadataIndex("w", chunks[at].offsets, at): info for at in range(count - 2000, count)}
    began = time.process_time()
    check_archives(file, held, Metadata({"w": entry}))
    assert time.process_time() - began < 4  # less than a second


def test_tensors_in_pieces_of_their_own_are_checked_piece_by_piece() -> None:
    class Pieces(torch.Tensor):
        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 4])) for row in (0, 6)]

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            raise NotImplementedError

    target = torch.zeros(8, 4).as_subclass(Pieces)
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in (0, 1, 6)]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([8, 4]), chunks)
    stored = {MetadataIndex("w", c.offsets): StorageInfo("__0_0", 16 * i, 16) for i, c in enumerate(chunks)}
    metadata = Metadata({"w": entry}, storage_data=stored)
    parts = parts_of_target({"w": target}, metadata)
    assert sorted(parts.values()) == [(2, 4), (2, 4)]
    items = create_read_items_for_chunk_list("w", entry, target.__create_chunk_list__())
    (problem,) = coverage_problems(items, parts, metadata)
    kept_otherwise = Metadata({"w": entry}, storage_data={"w": "a blob of a reader that is not ours"})
    assert coverage_problems(items, parts, kept_otherwise) == [problem]
    assert problem.startswith("w: its chunks do not make up the tensor (8, 4): no chunk holds the elements")
    assert problem.endswith(" from (1, 0) on, counted from (6, 0), where this rank's piece begins")


def test_a_chunk_beside_one_that_is_the_whole_is_told() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 4]))]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4, 4]), chunks)
    metadata = Metadata({"w": entry}, storage_data={MetadataIndex("w", chunks[0].offsets): StorageInfo("f", 0, 64)})
    (item,) = create_read_items_for_chunk_list("w", entry, chunks)
    assert coverage_problems([item], {"w": (4, 4)}, metadata) == []
    (problem, *_) = coverage_problems([item, item], {"w": (4, 4)}, metadata)
    assert problem.startswith("w: its chunks do not make up the tensor (4, 4): ")
