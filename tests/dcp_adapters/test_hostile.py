"""Files made to do harm: nothing runs, nothing grows, nothing is read elsewhere, and no weight is touched.

Whatever is in a checkpoint, SafeFileSystemReader and read_manifest return something sound or raise one of four errors.
"""

from __future__ import annotations

import copy
import copyreg
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_adapters import Manifest, QuantizedLoadPlanner, SafeFileSystemReader, read_manifest
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON
from dcp_adapters.stored.reading.metadata_checks import holding_faults, record_faults
from dcp_adapters.stored.reading.places import file_faults
from dcp_adapters.stored.verifying.verify import verify
from dcp_adapters.torch_private import StorageInfo
from qtensor import quantize
from tests.dcp_adapters import tampering
from tests.dcp_adapters.cases import alone, bits, values
from tests.dcp_adapters.tampering import FILES, Checkpoint

REFUSALS = (ValueError, EOFError, FileNotFoundError, OSError)
FUZZ = settings(
    max_examples=50,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tampering.write(tmp_path_factory.mktemp("sound") / "checkpoint")


@pytest.fixture
def checkpoint(sound: Checkpoint, tmp_path: Path) -> Checkpoint:
    return tampering.copied(sound, tmp_path / "checkpoint")


def read(checkpoint: Checkpoint, data: bytes) -> Metadata | None:
    """What becomes of these bytes as `.metadata`: sound metadata, or None where they are refused."""
    (checkpoint.path / ".metadata").write_bytes(data)
    try:
        metadata = SafeFileSystemReader(checkpoint.path).read_metadata()
    except REFUSALS:
        metadata = None
    try:
        manifest = read_manifest(checkpoint.path)
    except REFUSALS:
        manifest = None
    if metadata is None:
        assert manifest is None
        return None
    assert manifest is None or type(manifest) is Manifest
    assert record_faults(metadata, extent=len(data)) == []
    assert holding_faults(metadata) == []
    assert file_faults(checkpoint.path, metadata.storage_data) == []
    return metadata


# -- programs ----------------------------------------------------------------------------------------------------------


class Setter:
    """Its state is code that pickle would run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state["path"]).touch()


class Maker:
    """Unpickling it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (Path(self.path),)


class Caller:
    """The same by a call of os."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.path,)


class New:
    """Its class is called with arguments."""

    def __new__(cls, path: str) -> New:
        Path(path).touch()
        return super().__new__(cls)


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


HERE = __name__.encode()
SG = b"\x93"
METADATA = text("torch.distributed.checkpoint.metadata")
INSIDE = "planner_data"

PROGRAMS: dict[str, Callable[[str], bytes]] = {
    "GLOBAL and REDUCE": lambda p: b"cos\nmkdir\n(" + text(p) + b"tR.",
    "STACK_GLOBAL and REDUCE": lambda p: text("os") + text("mkdir") + SG + text(p) + b"\x85R.",
    "INST": lambda p: b"(" + text(p) + b"ios\nmkdir\n.",
    "OBJ": lambda p: b"(cos\nmkdir\n" + text(p) + b"o.",
    "NEWOBJ": lambda p: b"c" + HERE + b"\nNew\n" + text(p) + b"\x85\x81.",
    "NEWOBJ_EX": lambda p: b"c" + HERE + b"\nNew\n" + text(p) + b"\x85}\x92.",
    "BUILD": lambda p: pickle.dumps(Setter(p)),
    "REDUCE of a method": lambda p: pickle.dumps(Maker(p)),
    "REDUCE of os": lambda p: pickle.dumps(Caller(p), protocol=0),
    "a module's attribute": lambda p: text("torch") + text("os.mkdir") + SG + text(p) + b"\x85R.",
    "builtins": lambda p: b"cbuiltins\neval\n" + text(f"__import__('os').mkdir({p!r})") + b"\x85R.",
    "getattr": lambda p: b"cbuiltins\ngetattr\nctorch\nSize\n" + text("__class__") + b"\x86R.",
    "a partial": lambda p: b"cfunctools\npartial\ncos\nmkdir\n" + text(p) + b"\x86R)R.",
    "torch.load": lambda p: b"ctorch\nload\n" + text(p) + b"\x85R.",
    "a class of ours": lambda p: b"cdcp_adapters.safe.reader\nSafeFileSystemReader\n" + text(p) + b"\x85R.",
    "a call of a record": lambda p: METADATA + text("MetadataIndex") + SG + text(p) + b"\x85R.",
    "a record with arguments": lambda p: METADATA + text("MetadataIndex") + SG + text(p) + b"\x85\x81.",
    "a dtype that is called": lambda p: b"ctorch\nfloat32\n" + text(p) + b"\x85R.",
    "persistent id": lambda p: b"P" + p.encode() + b"\n.",
    "binary persistent id": lambda p: text(p) + b"Q.",
    "extension code": lambda p: b"\x82\xf0" + text(p) + b"\x85R.",
    "extension code 2": lambda p: b"\x83\xf0\x00" + text(p) + b"\x85R.",
    "extension code 4": lambda p: b"\x84\xf0\x00\x00\x00" + text(p) + b"\x85R.",
    "buffers": lambda p: b"\x80\x05\x97\x98.",
}


@contextmanager
def extension_code(path: str) -> Iterator[None]:
    """A process that registered os.mkdir under code 240, and used it already (so that no look-up is needed)."""
    copyreg.add_extension("posix", "mkdir", 240)
    try:
        assert pickle.loads(b"\x82\xf0.").__name__ == "mkdir"
        yield
    finally:
        copyreg.remove_extension("posix", "mkdir", 240)
        copyreg._extension_cache.pop(240, None)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in metadata"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_executed(checkpoint: Checkpoint, tmp_path: Path, name: str, wrapped: bool) -> None:
    sentinel = tmp_path / "sentinel"
    program = PROGRAMS[name](str(sentinel))
    if wrapped:  # as the value of a field, behind everything else
        good = pickle.dumps(checkpoint.metadata, protocol=2)
        program = good[:-1] + b"}" + text(INSIDE) + program[:-1].removeprefix(b"\x80\x04") + b"sb."
    with extension_code(str(sentinel)):
        assert read(checkpoint, program) is None
        assert not verify(checkpoint.path).ok
    assert not sentinel.exists()


def test_the_programs_are_programs(tmp_path: Path) -> None:
    """A general unpickler runs them: most of them leave the sentinel."""
    ran = []
    for number, (name, build) in enumerate(PROGRAMS.items()):
        sentinel = tmp_path / str(number)
        with extension_code(str(sentinel)):
            try:
                pickle.loads(build(str(sentinel)))
            except Exception:
                pass
        if sentinel.exists():
            ran.append(name)
    assert len(ran) >= 12, ran


def test_classes_of_the_process_stay_as_they_are(checkpoint: Checkpoint) -> None:
    """BUILD with slot state is setattr, on a class as on an object."""
    before = {kind: dict(vars(kind)) for kind in (MetadataIndex, StorageMeta, StorageInfo, TensorProperties)}
    for kind in before:
        state = b"N}" + text("__eq__") + text("x") + b"s\x86b."
        named = text(kind.__module__) + text(kind.__qualname__) + SG
        assert read(checkpoint, named + state) is None
        assert read(checkpoint, named + b")\x81" + state) is None
    code = METADATA + text("_MEM_FORMAT_ENCODING") + SG + b"K\x00\x85R}" + text("_value_") + b"K\x05sb."
    assert read(checkpoint, code) is None
    assert {kind: dict(vars(kind)) for kind in before} == before


# -- bombs -------------------------------------------------------------------------------------------------------------

SIZE = text("torch") + text("Size") + SG


def tuples(levels: int) -> bytes:
    """A tuple of two of a tuple of two ...: hashing it takes 2^levels steps."""
    return b")" + b"\x94h\x00\x86" + b"".join(b"\x94j" + struct.pack("<I", n) + b"\x86" for n in range(1, levels))


BOMBS: dict[str, bytes] = {
    "a memo of 4 billion": b"Nr\xff\xff\xff\xff.",
    "a byte array of 2^60": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b".",
    "bytes of 2^60": b"\x80\x05\x8e" + struct.pack("<Q", 2**60) + b".",
    "text of 2^60": b"\x80\x05\x8d" + struct.pack("<Q", 2**60) + b".",
    "text of 4 GB": b"X\xff\xff\xff\xff.",
    "an integer of 2 GB": b"\x8b\xff\xff\xff\x7f.",
    "a frame of 2^60": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "a size of many dims, many times": SIZE + b"\x94(" + b"K\x01" * 10**4 + b"t\x94" + b"h\x00h\x01\x85R" * 2000 + b".",
    "a state of many fields, many times": b"}\x94("
    + b"".join(text(str(n)) + b"N" for n in range(10**4))
    + b"u"
    + (METADATA + text("StorageMeta") + SG + b")\x81h\x00b") * 1000
    + b".",
    "a hash without end": b"}" + tuples(200) + b"Ns.",
    "a path of many parts, many times": text("pathlib")
    + text("PosixPath")
    + SG
    + b"\x94("
    + text("a") * 1000
    + b"t\x94"
    + b"h\x00h\x01R" * 1000
    + b".",
    "a deep list": b"]" * 10**4 + b"a" * (10**4 - 1) + b".",
    "a list in itself": b"]\x94h\x00a.",
    "marks": b"(" * 10**4 + b".",
    "a size beyond 2^63": SIZE + b"\x8a\x09" + struct.pack("<Q", 2**63) + b"\x00\x85\x85R.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_do_not_go_off(checkpoint: Checkpoint, name: str) -> None:
    tracemalloc.start()
    try:
        assert read(checkpoint, BOMBS[name]) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


def test_claims_of_giant_tensors_make_no_room(checkpoint: Checkpoint) -> None:
    size = torch.Size([2**60])
    with checkpoint.editing() as metadata:
        del metadata.planner_data[MANIFEST_JSON]
        for name in (MANIFEST, "bias"):
            index = MetadataIndex(name, (0,))
            chunk = ChunkStorageMetadata(torch.Size([0]), size)
            metadata.state_dict_metadata[name].size, metadata.state_dict_metadata[name].chunks = size, [chunk]
            metadata.storage_data[index].length = 2**61
    with pytest.raises(ValueError, match=r"this chunk ends at \d+: it is cut off"):
        read_manifest(checkpoint.path)
    with pytest.raises(ValueError, match=r"claims to be .* more than there is room for"):
        read_manifest(dcp.FileSystemReader(checkpoint.path))  # its claim is as large as what it says it stores
    assert not verify(checkpoint.path).ok


# -- fuzzing -----------------------------------------------------------------------------------------------------------


@FUZZ
@given(data=st.data())
def test_damaged_metadata_is_sound_or_refused(checkpoint: Checkpoint, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(originals(checkpoint)))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "drop", "repeat"]))
        if kind == "flip":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            damaged[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del damaged[at + 1 :]
        elif kind == "drop":
            del damaged[at : at + data.draw(st.integers(1, 8))]
        else:
            damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 40))]
        if not damaged:
            return
    read(checkpoint, bytes(damaged))


ORIGINALS: dict[Path, list[bytes]] = {}


def originals(checkpoint: Checkpoint) -> list[bytes]:
    if checkpoint.path not in ORIGINALS:
        metadata = checkpoint.metadata
        ORIGINALS[checkpoint.path] = [pickle.dumps(metadata, protocol=protocol) for protocol in (2, 4)]
    return ORIGINALS[checkpoint.path]


OPERATIONS = [
    b"N", b"\x88", b"K\x05", b"J\xff\xff\xff\xff", b"]", b"}", b")", b"(", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e",
    b"s", b"u", b"R", b"b", b"\x81", b"\x94", b"h\x00", b"h\x01", b"h\x02", b"Q", b"0", b"2", text("fqn"),
    text("a"), SIZE,
    *(text(kind.__module__) + text(kind.__qualname__) + SG for kind in (
        Metadata, TensorStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex, StorageInfo,
        StorageMeta,
    )),
    text("torch.serialization") + text("_get_layout") + SG, text("pathlib") + text("PosixPath") + SG,
    text("torch") + text("float32") + SG, text("posix") + text("getpid") + SG,
]  # fmt: skip


@FUZZ
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=30))
def test_any_operations_in_any_order_are_refused(checkpoint: Checkpoint, operations: list[bytes]) -> None:
    assert read(checkpoint, b"\x80\x04" + b"".join(operations) + b".") is None


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["../x", "/x", "..", FILES[0], "a\0b", "bias", "payload", 2**60, -1, 1, 0]),
    st.lists(st.integers(-1, 9), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.lists(st.integers(-5, 2**62), max_size=3).map(torch.Size),
    st.builds(BytesStorageMetadata),
    st.just(ChunkStorageMetadata(torch.Size([0]), torch.Size([2**60]))),
    st.just(TensorProperties(dtype=torch.float16)),
    st.just(MetadataIndex("bias", (0,))),
    st.just(StorageInfo(FILES[0], 0, 100)),
)


def places(value: Any, above: frozenset[int] = frozenset()) -> Iterator[tuple[Any, Any]]:
    """(container or record, key or field) of everything below a value; what holds itself is not entered again."""
    if id(value) in above:
        return
    if isinstance(value, dict):
        yield from ((value, key) for key in value)
        below: Any = list(value.values())
    elif isinstance(value, list):
        yield from ((value, index) for index in range(len(value)))
        below = value
    elif hasattr(value, "__dict__") and not isinstance(value, type | Path):
        yield from ((value, field) for field in vars(value))
        below = list(vars(value).values())
    else:
        return
    for item in below:
        yield from places(item, above | {id(value)})


def test_the_places_of_what_holds_itself_come_to_an_end() -> None:
    within: dict[str, Any] = {"a": 1}
    within["b"] = [within]
    assert [key for _, key in places({"c": within})] == ["c", "a", "b", 0]


def put(place: tuple[Any, Any], value: Any) -> None:
    holder, key = place
    if isinstance(holder, dict | list):
        holder[key] = value
    else:
        vars(holder)[key] = value


@FUZZ
@given(data=st.data())
def test_mutated_records_are_sound_or_refused(sound: Checkpoint, checkpoint: Checkpoint, data: st.DataObject) -> None:
    metadata = sound.metadata
    found = [place for place in places(metadata) if not isinstance(place[0], MetadataIndex)]
    for _ in range(data.draw(st.integers(1, 3))):
        put(found[data.draw(st.integers(0, len(found) - 1))], data.draw(PLAIN))
    try:
        mutated = pickle.dumps(metadata)
    except (RuntimeError, TypeError, AttributeError):  # TensorProperties with nonsense pickle themselves by code
        return
    read(checkpoint, mutated)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=4) | st.just(2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@FUZZ
@given(data=st.data())
def test_mutated_manifests_are_valid_or_value_errors(data: st.DataObject) -> None:
    record = copy.deepcopy(tampering.manifest().to_json())
    found = list(places(record))
    for _ in range(data.draw(st.integers(1, 2))):
        put(found[data.draw(st.integers(0, len(found) - 1))], data.draw(JSON))
    for build in (
        lambda: Manifest.from_json(record),
        lambda: Manifest.from_tensor(as_tensor(json.dumps(record).encode())),
    ):
        try:
            manifest = build()
        except ValueError:
            continue
        assert Manifest.from_json(manifest.to_json()) == manifest
        for entry in manifest.tensors.values():
            assert all(type(extent) is int and extent >= 0 for extent in entry.shape)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@FUZZ
@given(record=JSON | st.fixed_dictionaries({"format_version": st.just(1), "recipes": JSON, "tensors": JSON}))
def test_any_json_is_a_manifest_or_a_value_error(record: Any) -> None:
    try:
        assert type(Manifest.from_json(record)) is Manifest
    except ValueError:
        pass


@FUZZ
@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_manifest_or_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"qtensor\.manifest"):
        Manifest.from_tensor(as_tensor(data))


WRONG = {
    "true is not version 1": (
        {"format_version": True, "recipes": [], "tensors": {}},
        "format_version True; this library",
    ),
    "deep JSON": ("[" * 10**5, "is not JSON: maximum recursion depth"),
    "a negative recipe": ({"recipe": -1}, "'row' has the recipe -1, expected a name and the number of a recipe"),
    "a recipe that is true": ({"recipe": True}, "'row' has the recipe True"),
    "a module of torch": ({"dtype": "_inductor"}, "'_inductor' is no dtype that a quantized tensor can have"),
    "a dtype without dequantize": ({"dtype": "int8"}, "'int8' is no dtype"),
    "a shape of text": ({"shape": "88"}, "a shape is '88', expected a list of counts"),
    "a negative shape": ({"shape": [-8, 32]}, "a shape is a list, expected a list of counts"),
    "no dims": ({"shape": []}, "a 0-dim tensor can not be quantized"),
    "columns": ({"recipe": 1, "shape": [8, 33]}, "K=33, which is not a multiple of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_manifests_of_wrong_types_are_refused_by_name(name: str) -> None:
    change, expected = WRONG[name]
    if isinstance(change, str):
        data = change
    elif "tensors" in change:
        data = json.dumps(change)
    else:
        record = tampering.manifest().to_json()
        record["tensors"]["row"] |= change
        data = json.dumps(record)
    with pytest.raises(ValueError, match=expected):
        Manifest.from_tensor(as_tensor(data.encode()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_manifest_tensor_of_another_dtype_is_a_value_error(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"qtensor\.manifest is not JSON"):
        Manifest.from_tensor(torch.tensor([300, -1]).to(dtype))


# -- loading -----------------------------------------------------------------------------------------------------------


def target() -> dict[str, Any]:
    held: dict[str, Any] = {
        name: quantize(values(tampering.SHAPE, 50), recipe) for name, recipe in tampering.RECIPES.items()
    }
    return held | {"bias": torch.full((8,), 9.0, dtype=torch.bfloat16), "count": torch.tensor(9.0)}


def contents(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {part: bits(tensor) for part, tensor in value.parts().items()} if hasattr(value, "parts") else bits(value)
        for name, value in state.items()
    }


def evil_metadata(c: Checkpoint, sentinel: Path) -> None:
    good = pickle.dumps(c.metadata, protocol=2)
    (c.path / ".metadata").write_bytes(good[:-1] + b"cos\nmkdir\n" + text(str(sentinel)) + b"\x85R0.")


def evil_chunk(c: Checkpoint, sentinel: Path) -> None:
    with c.editing() as metadata:
        c.add("tensor.payload", Maker(str(sentinel)), (5, 0), metadata)  # type: ignore[arg-type]


def chunk_elsewhere(c: Checkpoint, sentinel: Path) -> None:
    (c.path.parent / "elsewhere").write_bytes((c.path / FILES[1]).read_bytes())
    with c.editing() as metadata:
        for info in metadata.storage_data.values():
            if info.relative_path == FILES[1]:
                info.relative_path = "../elsewhere"


def chunk_of_another_dtype(c: Checkpoint, sentinel: Path) -> None:
    c.replace("tensor.payload", c.tensor("tensor.payload", (5, 0)).float(), (5, 0))


HARM: dict[str, Callable[[Checkpoint, Path], None]] = {
    harm.__name__: harm for harm in (evil_metadata, evil_chunk, chunk_elsewhere, chunk_of_another_dtype)
}


def test_a_sound_checkpoint_is_loaded_into_the_target(checkpoint: Checkpoint) -> None:
    state = target()
    with alone():
        dcp.load(state, storage_reader=SafeFileSystemReader(checkpoint.path), planner=QuantizedLoadPlanner())
    expected = tampering.tensors()
    assert {f"{name}.{part}": data for name, held in contents(state).items() if isinstance(held, dict)
            for part, data in held.items()} == {
        name: bits(tensor) for name, tensor in expected.items() if "." in name
    }  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_a_hostile_checkpoint_leaves_every_byte_of_the_target(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    sentinel = tmp_path / "sentinel"
    HARM[name](checkpoint, sentinel)
    state = target()
    before = contents(state)
    with alone(), pytest.raises((CheckpointException, ValueError), match=r"checkpoint"):
        dcp.load(state, storage_reader=SafeFileSystemReader(checkpoint.path), planner=QuantizedLoadPlanner())
    assert contents(state) == before
    assert not sentinel.exists()
    assert not verify(checkpoint.path).ok
    assert not sentinel.exists()
