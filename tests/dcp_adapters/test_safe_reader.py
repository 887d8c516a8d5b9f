"""SafeFileSystemReader reads what stock reads, and refuses by name what contradicts itself."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, SafeFileSystemReader, read_manifest
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON
from dcp_adapters.torch_private import StorageInfo
from tests.dcp_adapters import tampering
from tests.dcp_adapters.cases import RECIPES, alone, bits, held, leaves, load, model, reference
from tests.dcp_adapters.tampering import FILES, Checkpoint

FIRST, SECOND = FILES


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tampering.write(tmp_path_factory.mktemp("sound") / "checkpoint")


@pytest.fixture
def checkpoint(sound: Checkpoint, tmp_path: Path) -> Checkpoint:
    return tampering.copied(sound, tmp_path / "checkpoint")


def trained() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "lists": [1, [torch.ones(2), {"a": 2.5}]]}


def every_dtype() -> dict[str, Any]:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    written = {}
    for dtype in sorted(dtypes, key=str):
        if str(dtype).startswith(("torch.bits", "torch.q")):
            continue  # DCP cannot save them
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "B?Complex(Half|32) support is experimental")
            try:
                tensor = torch.zeros(2, 3, dtype=dtype)
                torch.save(tensor, io.BytesIO())
            except (RuntimeError, TypeError, KeyError, NotImplementedError):
                continue  # a dtype without tensors of its own
        written[str(dtype)] = tensor
    assert len(written) > 15
    return written


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "trained": trained,
    "every dtype": every_dtype,
    "quantized": lambda: {"models": {name: model(name).state_dict() for name in ("mxfp8", "nvfp4", "float8_tensor")}},
    "odd tensors": lambda: {
        "last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1),
        "cut": torch.arange(10.0)[::2],
        "objects": {1, 2},
        "größe": torch.ones(1),
    },
}


def save(state: dict[str, Any], path: Path) -> None:
    with alone(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner())


@pytest.mark.parametrize("name", STATES)
def test_metadata_is_what_stock_unpickles(tmp_path: Path, name: str) -> None:
    save(STATES[name](), tmp_path)
    stock, safe = dcp.FileSystemReader(tmp_path), SafeFileSystemReader(tmp_path)
    expected, found = stock.read_metadata(), safe.read_metadata()
    assert found.storage_meta.load_id == safe.load_id
    found.storage_meta.load_id = stock.load_id
    assert found == expected
    assert type(found) is Metadata
    assert pickle.dumps(found.storage_data) == pickle.dumps(
        expected.storage_data
    )  # the index hints too, which == skips
    found.storage_meta.checkpoint_id = expected.storage_meta.checkpoint_id
    assert isinstance(found.storage_meta.checkpoint_id, PurePosixPath)
    assert pickle.loads(pickle.dumps(found)) == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol_of_pickle_is_read(checkpoint: Checkpoint, protocol: int) -> None:
    expected = checkpoint.metadata
    (checkpoint.path / ".metadata").write_bytes(pickle.dumps(expected, protocol=protocol))
    found = SafeFileSystemReader(checkpoint.path).read_metadata()
    expected.storage_meta.load_id = found.storage_meta.load_id
    assert found == expected


@pytest.mark.parametrize("name", STATES)
def test_tensors_are_loaded_as_stock_loads_them(tmp_path: Path, name: str) -> None:
    if name == "quantized":
        state, other = reference(names={"nvfp4": RECIPES["nvfp4"]}), reference(1, names={"nvfp4": RECIPES["nvfp4"]})
        save(state, tmp_path)
        load(other, tmp_path, reader=SafeFileSystemReader(tmp_path))
        assert held(other) == held(state)
        return
    state = {key: value for key, value in leaves(STATES[name]()) if isinstance(value, torch.Tensor)}
    assert state
    save(state, tmp_path)
    loaded = {key: torch.empty_like(value) for key, value in state.items()}
    for value in loaded.values():
        value.untyped_storage().fill_(1)
    with alone():
        dcp.load(loaded, storage_reader=SafeFileSystemReader(tmp_path))
    assert {key: bits(value) for key, value in loaded.items()} == {key: bits(value) for key, value in state.items()}


def test_metadata_that_a_rank_saved_for_itself(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        for record in metadata.state_dict_metadata.values():
            if len(getattr(record, "chunks", ())) > 1:
                del record.chunks[1:]
    (checkpoint.path / ".metadata").rename(checkpoint.path / "__3.metadata")
    reader = SafeFileSystemReader(checkpoint.path)
    assert (
        reader.read_metadata(rank=3).storage_data
        == pickle.loads((checkpoint.path / "__3.metadata").read_bytes()).storage_data
    )
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        reader.read_metadata()


def test_an_absent_file_is_found_when_it_is_read(checkpoint: Checkpoint) -> None:
    (checkpoint.path / SECOND).unlink()
    reader = SafeFileSystemReader(checkpoint.path)
    reader.read_metadata()
    bias = torch.full((8,), 9.0, dtype=torch.bfloat16)
    with alone(), pytest.raises(CheckpointException, match="FileNotFoundError"):
        dcp.load({"bias": bias}, storage_reader=reader)
    assert bias.tolist() == [9.0] * 8


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_the_refusal_of_a_global_says_what_was_found_and_what_to_do(checkpoint: Checkpoint) -> None:
    file = checkpoint.path / ".metadata"
    file.write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    text = (
        f"{file}: refused at byte 14: it holds the global posix.system. Nothing of it has been executed. DCP writes "
        "nothing of that kind: use another checkpoint, and do not read this one with a reader that unpickles freely"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        SafeFileSystemReader(checkpoint.path).read_metadata()
    with pytest.raises(ValueError, match=re.escape(text)):
        read_manifest(checkpoint.path)


def first_info(m: Metadata) -> Any:
    return m.storage_data[MetadataIndex("bias", (0,))]


def bias(m: Metadata) -> Any:
    return m.state_dict_metadata["bias"]


def chunk(m: Metadata, offset: int, size: int) -> None:
    bias(m).chunks[1] = ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))


def shared(levels: int) -> Any:
    """A list that repeats its only item twice, again and again: few objects, and 2^levels values."""
    value: Any = []
    for _ in range(levels):
        value = [value, value]
    return value


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


OUTSIDE = r"bias at \(0,\): it is stored in {}, expected a file inside of the checkpoint"
PLACE = r"{file}: bias at \(0,\): offset {} and length {}, expected counts below 2\*\*63"
EDITS: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "a name that is no string": (
        lambda m: m.state_dict_metadata.__setitem__(MetadataIndex("x"), bias(m)),
        "an entry is named a MetadataIndex, expected a string",
    ),
    "a record of another kind": (
        lambda m: m.state_dict_metadata.update(bias=[1]),
        "bias: a list, expected a complete TensorStorageMetadata",
    ),
    "no properties": (lambda m: setattr(bias(m), "properties", None), "bias: its properties are no dtype, layout"),
    "dtype": (lambda m: setattr(bias(m).properties, "dtype", "float32"), "bias: its properties are no dtype"),
    "size": (lambda m: setattr(bias(m), "size", (8,)), "bias: its size is a tuple, expected counts below"),
    "negative size": (
        lambda m: setattr(bias(m), "size", torch.Size([-8])),
        r"bias: its size is \(-8,\), expected counts",
    ),
    "chunks": (lambda m: setattr(bias(m), "chunks", (1,)), "and a list of chunks"),
    "a chunk": (lambda m: bias(m).chunks.append(3), "bias: a chunk is 3, expected offsets and sizes"),
    "a chunk beyond": (
        lambda m: chunk(m, 6, 3),
        r"bias: a chunk of \(3,\) at \(6,\) is not inside of the tensor's \(8,\)",
    ),
    "a negative offset": (lambda m: chunk(m, -1, 3), "bias: a chunk is a ChunkStorageMetadata, expected offsets and"),
    "a chunk of more dims": (
        lambda m: bias(m).chunks.append(ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 1]))),
        "is not inside of the tensor's",
    ),
    "a gap": (lambda m: bias(m).chunks.pop(), r"bias: no chunk holds the elements from \(5,\) on \(shape \(8,\)\)"),
    "a giant": (
        lambda m: setattr(bias(m), "size", torch.Size([2**60])),
        r"bias: no chunk holds the elements from \(8,\) on",
    ),
    "a giant chunk": (
        lambda m: (setattr(bias(m), "size", torch.Size([2**60])), chunk(m, 5, 2**60 - 5)),
        r"no file holds it|a chunk that needs at least",
    ),
    "a missing place": (
        lambda m: m.storage_data.pop(MetadataIndex("bias", (0,))),
        r"bias at \(0,\): no file holds it: storage_data has no such chunk",
    ),
    "a key": (
        lambda m: m.storage_data.update(x=first_info(m)),
        "storage_data has the key 'x', expected a MetadataIndex",
    ),
    "a place": (
        lambda m: m.storage_data.update({MetadataIndex("bias", (0,)): "here"}),
        r"bias at \(0,\): it is stored in 'here', expected a file, an offset and a length",
    ),
    "an absolute path": (
        lambda m: setattr(first_info(m), "relative_path", "/etc/passwd"),
        OUTSIDE.format("'/etc/passwd'"),
    ),
    "a path upwards": (
        lambda m: setattr(first_info(m), "relative_path", "a/../../b"),
        OUTSIDE.format(r"'a/\.\./\.\./b'"),
    ),
    "a Windows path": (lambda m: setattr(first_info(m), "relative_path", "a\\..\\b"), OUTSIDE.format(".*")),
    "a drive": (lambda m: setattr(first_info(m), "relative_path", "C:b"), OUTSIDE.format("'C:b'")),
    "a share": (lambda m: setattr(first_info(m), "relative_path", "\\\\host\\b"), OUTSIDE.format(".*")),
    "a NUL": (lambda m: setattr(first_info(m), "relative_path", "a\0b"), OUTSIDE.format(".*")),
    "no path": (lambda m: setattr(first_info(m), "relative_path", ""), OUTSIDE.format("''")),
    "the directory itself": (lambda m: setattr(first_info(m), "relative_path", "."), OUTSIDE.format(r"'\.'")),
    "a path object": (
        lambda m: setattr(first_info(m), "relative_path", PurePosixPath("x")),
        "it is stored in a _StorageInfo, expected a file",
    ),
    "an endless path": (
        lambda m: setattr(first_info(m), "relative_path", "x" * 5000),
        "it can not be looked at: .*File name too long",
    ),
    "a negative place": (lambda m: setattr(first_info(m), "offset", -1), PLACE.format("-1", r"\d+", file=FIRST)),
    "a place that is no number": (
        lambda m: setattr(first_info(m), "length", 1.5),
        PLACE.format("0", "1.5", file=FIRST),
    ),
    "a place beyond 2^63": (lambda m: setattr(first_info(m), "offset", 2**63), PLACE.format(2**63, r"\d+", file=FIRST)),
    "a place beyond the file": (
        lambda m: setattr(first_info(m), "offset", 2**62),
        rf"{FIRST}: bias at \(0,\): the file has \d+ bytes, and this chunk ends at \d+: it is cut off",
    ),
    "too few bytes": (
        lambda m: setattr(first_info(m), "length", 9),
        rf"{FIRST}: bias at \(0,\): .metadata gives 9 bytes to a chunk that needs at least 10",
    ),
    "a transform": (
        lambda m: setattr(first_info(m), "transform_descriptors", ["stream.zstd/1"]),
        "it is transformed by 'stream.zstd/1', which is read only with an _extension_registry that knows it",
    ),
    "planner data of records": (
        lambda m: setattr(m, "planner_data", {"x": first_info(m)}),
        "its planner_data holds a _StorageInfo, expected plain values",
    ),
    "planner data without end": (
        lambda m: setattr(m, "planner_data", {"x": shared(40)}),
        "its planner_data holds values nested in more than 64 levels, or repeating each other without end",
    ),
    "a chunk of no entry": (
        lambda m: m.state_dict_metadata.pop("bias"),
        r"bias at \(0,\): bytes are stored for a chunk that no tensor has",
    ),
    "a path that is none": (
        lambda m: m.planner_data.update(bias=0.5),
        "bias: its path in planner_data is 0.5, expected a sequence of keys",
    ),
    "deep planner data": (lambda m: setattr(m, "planner_data", {"x": nested(100)}), "nested in more than 64 levels"),
    "storage_meta": (
        lambda m: setattr(m, "storage_meta", "x"),
        "its storage_meta is a str, expected DCP's StorageMeta",
    ),
    "modules": (
        lambda m: m.storage_meta.modules.append(1),
        "its storage_meta holds values that are neither strings nor paths",
    ),
    "version": (lambda m: setattr(m, "version", 1), "its version is 1, expected a string"),
    "no storage_data": (
        lambda m: setattr(m, "storage_data", None),
        "its state_dict_metadata or storage_data is no dict",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_metadata_that_makes_no_sense_is_refused_by_name(checkpoint: Checkpoint, name: str) -> None:
    edit, text = EDITS[name]
    with checkpoint.editing() as metadata:
        edit(metadata)
    with pytest.raises(ValueError, match=text) as refused:
        SafeFileSystemReader(checkpoint.path).read_metadata()
    beginning = (
        f"{checkpoint.path / '.metadata'}: the checkpoint is damaged or not what it claims to be. Nothing has been "
    )
    assert str(refused.value).startswith(beginning)


def test_something_else_than_metadata_is_refused(checkpoint: Checkpoint) -> None:
    (checkpoint.path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="it holds a dict, expected DCP's Metadata"):
        SafeFileSystemReader(checkpoint.path).read_metadata()


def test_many_faults_are_told_in_few_lines(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        for number in range(30):
            metadata.state_dict_metadata[f"wrong.{number}"] = number
    with pytest.raises(ValueError, match=r"wrong\.0: a int") as refused:
        SafeFileSystemReader(checkpoint.path).read_metadata()
    assert str(refused.value).endswith("  and 10 more")
    assert str(refused.value).count("\n") == 21


def test_links_that_lead_outside_are_refused(checkpoint: Checkpoint) -> None:
    outside = checkpoint.path.parent / "outside"
    (checkpoint.path / SECOND).rename(outside)
    (checkpoint.path / SECOND).symlink_to(outside)
    with pytest.raises(ValueError, match=f"{SECOND}: it is a link to {outside}, outside of the checkpoint"):
        SafeFileSystemReader(checkpoint.path).read_metadata()


def test_links_within_the_checkpoint_and_to_it_are_followed(checkpoint: Checkpoint) -> None:
    (checkpoint.path / SECOND).rename(checkpoint.path / "data")
    (checkpoint.path / SECOND).symlink_to("data")
    link = checkpoint.path.parent / "link"
    link.symlink_to(checkpoint.path)
    assert SafeFileSystemReader(link).read_metadata().state_dict_metadata.keys()


@pytest.mark.parametrize("name", [".metadata", FIRST])
def test_pipes_are_refused_without_waiting_for_a_writer(checkpoint: Checkpoint, name: str) -> None:
    (checkpoint.path / name).unlink()
    os.mkfifo(checkpoint.path / name)
    with pytest.raises(ValueError, match="no ordinary file"):
        SafeFileSystemReader(checkpoint.path).read_metadata()


# -- reading -----------------------------------------------------------------------------------------------------------


class Told(dcp.DefaultLoadPlanner):
    """A planner that wants to know of failures."""

    def read_failed(self, error: BaseException) -> None:
        self.error = error


def compressed(data: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    return held.getvalue()


def archive(value: Any) -> bytes:
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


def without(data: bytes, record: str) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(held, "w") as new:
        for info in old.infolist():
            if not info.filename.endswith(record):
                new.writestr(info.filename, old.read(info))
    return held.getvalue()


def turned_around(data: bytes) -> bytes:
    """As a machine with the other byte order writes it: torch.load turns the bytes of elements around."""
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(held, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else old.read(info))
    return held.getvalue()


PIECE = torch.arange(3.0).bfloat16()
ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (lambda: compressed(archive(PIECE)), "records are compressed; DCP stores tensors as they are"),
    "no archive": (lambda: b"x" * 1000, "no archive of a tensor: File is not a zip file; use another checkpoint"),
    "another byte order": (
        lambda: turned_around(archive(PIECE)),
        "no archive of a tensor: its bytes are in the order b'big', expected b'little'; use another checkpoint",
    ),
    "no record": (lambda: without(archive(PIECE), "data/0"), "a tensor of 6 bytes in a record of 0; use another"),
    "no description": (lambda: without(archive(PIECE), "data.pkl"), "no archive of a tensor: KeyError: 'data.pkl'"),
    "another dtype": (
        lambda: archive(PIECE.half()),
        r"bias at \(5,\): the file holds torch.float16 \(3,\), .metadata says torch.bfloat16 \(3,\); use another",
    ),
    "another shape": (
        lambda: archive(PIECE[:2].clone()),
        r"the file holds torch.bfloat16 \(2,\), .metadata says .* \(3,\)",
    ),
    "a repeated element": (
        lambda: archive(torch.zeros(1).bfloat16().expand(3)),
        "it holds a tensor of 3 elements of torch.bfloat16 in a storage of 2 bytes",
    ),
    "a list": (lambda: archive([1, 2]), "it holds a list, expected a tensor"),
    "a sparse tensor": (
        lambda: archive(torch.zeros(3).to_sparse()),
        "it holds the global torch._utils._rebuild_sparse",
    ),
    "a function": (lambda: archive(os.getcwd), "it holds the global posix.getcwd. Nothing of it has been executed"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_chunk_that_is_no_plain_tensor_stops_the_load_before_it_writes(checkpoint: Checkpoint, name: str) -> None:
    build, text = ARCHIVES[name]
    with checkpoint.editing() as metadata:
        checkpoint.add_bytes(MetadataIndex("bias", (5,)), build(), metadata)
    target = torch.full((8,), 9.0, dtype=torch.bfloat16)
    planner = Told()
    with alone(), pytest.raises(CheckpointException, match=text) as failed:
        dcp.load({"bias": target}, storage_reader=SafeFileSystemReader(checkpoint.path), planner=planner)
    assert target.tolist() == [9.0] * 8
    assert planner.error is failed.value.failures[0][0]
    assert re.search(text, str(planner.error))


def test_failures_that_are_no_exceptions_are_told_too(checkpoint: Checkpoint) -> None:
    class Failing(Told):
        def commit_tensor(self, *args: Any) -> None:
            raise CheckpointException("elsewhere", {})

    planner = Failing()
    with alone(), pytest.raises(CheckpointException, match="elsewhere"):
        dcp.load({"count": torch.zeros(())}, storage_reader=SafeFileSystemReader(checkpoint.path), planner=planner)
    assert type(planner.error) is CheckpointException


def test_a_planner_without_read_failed_needs_none(checkpoint: Checkpoint) -> None:
    (checkpoint.path / FIRST).unlink()
    with alone(), pytest.raises(CheckpointException, match="FileNotFoundError"):
        dcp.load({"count": torch.zeros(())}, storage_reader=SafeFileSystemReader(checkpoint.path))


def test_transformed_chunks_are_read_with_a_registry(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        index = MetadataIndex("bias", (0,))
        metadata.storage_data[index] = dataclasses.replace(first_info(metadata), transform_descriptors=["x"])

    class Registry:
        def from_descriptor_list(self, descriptors: Any) -> list[Any]:
            assert tuple(descriptors) in ((), ("x",))
            return []

    target = torch.zeros(8, dtype=torch.bfloat16)
    with alone():
        dcp.load({"bias": target}, storage_reader=SafeFileSystemReader(checkpoint.path, Registry()))
    assert target.tolist() == tampering.tensors()["bias"].tolist()


# -- the manifest ------------------------------------------------------------------------------------------------------


def manifest_entry(change: Callable[[Metadata], Any]) -> Callable[[Metadata], None]:
    """An edit of metadata whose planner data has no manifest, so that the entry is read."""

    def edit(metadata: Metadata) -> None:
        del metadata.planner_data[MANIFEST_JSON]
        change(metadata)

    return edit


def giant(metadata: Metadata) -> None:
    metadata.state_dict_metadata[MANIFEST].size = torch.Size([2**60])


def test_the_manifest_entry_is_read_where_there_is_no_planner_data(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        manifest_entry(lambda m: None)(metadata)
    assert read_manifest(checkpoint.path) == tampering.manifest()


def test_a_manifest_entry_of_another_kind_is_refused_before_room_is_made(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        manifest_entry(giant)(metadata)
    with pytest.raises(ValueError, match=f"{MANIFEST}: no chunk holds the elements from"):
        read_manifest(checkpoint.path)
    text = (
        rf"the entry {MANIFEST} claims to be torch.uint8 \({2**60},\) and \d+ bytes of it are stored, expected one dim"
    )
    with pytest.raises(ValueError, match=text):
        read_manifest(dcp.FileSystemReader(checkpoint.path))


def test_a_manifest_entry_that_can_not_be_read_is_a_value_error(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        manifest_entry(lambda m: None)(metadata)
        index = MetadataIndex(MANIFEST, (0,))
        info = metadata.storage_data[index]
        metadata.storage_data[index] = StorageInfo(FIRST, info.offset + 1, info.length - 1)
    text = f"{checkpoint.path}: the entry {MANIFEST} can not be read: ValueError: .*: no archive of a tensor"
    with pytest.raises(ValueError, match=text):
        read_manifest(checkpoint.path)


def test_the_tampered_checkpoint_is_what_stock_torch_reads(sound: Checkpoint, tmp_path: Path) -> None:
    """The tests of this folder stand on tampering.py: stock loads what it wrote."""
    shutil.copytree(sound.path, tmp_path / "copy")
    expected = tampering.tensors()
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with alone():
        dcp.load(target, checkpoint_id=tmp_path / "copy")
    assert {name: bits(value) for name, value in target.items()} == {
        name: bits(value) for name, value in expected.items()
    }


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, QuantizedLoadPlanner])
def test_a_load_says_why_metadata_could_not_be_read(planner: Any, tmp_path: Path) -> None:
    """torch 2.11 itself says nothing but "metadata is None"."""
    with pytest.raises(dcp.CheckpointException, match=rf"No such file or directory: '{tmp_path}/.metadata'"), alone():
        dcp.load({"w": torch.ones(2)}, storage_reader=SafeFileSystemReader(tmp_path), planner=planner())


def test_metadata_of_a_rank_alone_may_be_missing_without_those_of_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"__3\.metadata"):
        SafeFileSystemReader(tmp_path).read_metadata(rank=3)
