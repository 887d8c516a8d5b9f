"""`verify` finds every fault that is planted, names the file and the tensor, and finds nothing else."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

from dcp_adapters import QuantizedSavePlanner
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON, Manifest
from dcp_adapters.stored.reading.metadata_checks import chunk_in_words
from dcp_adapters.stored.verifying.verify import VerifyReport, verify
from dcp_adapters.torch_private import StorageInfo
from tests.dcp_adapters import tampering
from tests.dcp_adapters.cases import RECIPES, alone, bits, models
from tests.dcp_adapters.tampering import CUT, FILES, Checkpoint
from tests.ranks import run_ranks

FIRST, SECOND = FILES


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tampering.write(tmp_path_factory.mktemp("sound") / "checkpoint")


@pytest.fixture
def checkpoint(sound: Checkpoint, tmp_path: Path) -> Checkpoint:
    return tampering.copied(sound, tmp_path / "checkpoint")


def found(report: VerifyReport, severity: str = "error") -> list[tuple[str, str, str]]:
    return [(f.file, f.entry, f.message) for f in report.findings if f.severity == severity]


# -- sound checkpoints -------------------------------------------------------------------------------------------------


def test_a_sound_checkpoint_has_no_findings_and_everything_is_counted(sound: Checkpoint) -> None:
    stored = sound.metadata
    steps: list[tuple[int, int]] = []
    report = verify(sound.path, progress=lambda done, total: steps.append((done, total)))
    assert report.findings == ()
    assert report.ok
    assert report.checkpoint == str(sound.path)
    assert report.tensors == len(stored.state_dict_metadata) - 1  # the byte entry is none
    assert report.chunks == len(stored.storage_data)
    assert report.checksums == report.chunks - 1  # the table has none itself
    assert report.bytes == sum(file.stat().st_size for file in sound.path.glob("*.distcp"))
    assert steps[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert len(steps) == report.chunks


def save_models(path: Path) -> None:
    state = {"models": models(names={"mxfp8": RECIPES["mxfp8"], "float8_tensor": RECIPES["float8_tensor"]}), "step": 7}
    with alone():
        dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner())


def test_what_ranks_saved_is_sound(shared_tmp_path: Path) -> None:
    run_ranks(4, save_models, shared_tmp_path)  # uneven and empty shards among them
    report = verify(shared_tmp_path)
    assert report.findings == ()
    assert report.chunks > report.tensors
    assert report.checksums == report.chunks - 4  # a part of the table from each rank


def test_each_chunk_is_read_once_and_one_at_a_time(sound: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    load = torch.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        loaded.append(1)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", counted)
    report = verify(sound.path)
    assert report.ok
    assert len(loaded) == report.chunks - 1  # the byte entry is not unpickled


def test_dense_checkpoints_of_stock_planners_are_verified_too(tmp_path: Path) -> None:
    with alone():
        dcp.save({"w": torch.ones(4, 4), "scale": torch.tensor(-1.0), "step": 3}, checkpoint_id=tmp_path)
    report = verify(tmp_path)
    assert report.ok
    assert report.chunks == 3
    assert [(entry, message.partition(":")[0]) for _, entry, message in found(report, "warning")] == [
        (CHECKSUMS, "there is none"),
        (MANIFEST, "there is none"),
    ]


# -- faults ------------------------------------------------------------------------------------------------------------

Expected = list[tuple[str, str, str]]
FAULTS: dict[str, tuple[Callable[[Checkpoint], None], Expected]] = {}


def fault(*expected: tuple[str, str, str]) -> Callable[[Callable[[Checkpoint], None]], Callable[[Checkpoint], None]]:
    """(file, entry, pattern of the message) of all errors that the fault must lead to."""

    def register(plant: Callable[[Checkpoint], None]) -> Callable[[Checkpoint], None]:
        FAULTS[plant.__name__] = (plant, list(expected))
        return plant

    return register


@fault((FIRST, "row.payload at (0, 0)", "its checksum is .* says .*: its bytes have changed"))
def bit_of_a_payload(c: Checkpoint) -> None:
    c.flip("row.payload", (0, 0), 3, 0)


@fault((SECOND, "row.scale at (5, 0)", "its bytes have changed"))
def bit_of_a_scale(c: Checkpoint) -> None:
    c.flip("row.scale", (CUT, 0), 0, 0)


@fault((FIRST, "step", "its bytes have changed"))
def bit_of_a_byte_entry(c: Checkpoint) -> None:
    info = c.metadata.storage_data[MetadataIndex("step")]
    data = bytearray((c.path / FIRST).read_bytes())
    data[info.offset + info.length // 2] ^= 1
    (c.path / FIRST).write_bytes(bytes(data))


@fault((SECOND, "nvfp4.scale at (5, 0)", r"the file has \d+ bytes, and this chunk ends at \d+: it is cut off"))
def truncated_file(c: Checkpoint) -> None:
    file = c.path / SECOND
    os.truncate(file, file.stat().st_size - 1)


@fault((SECOND, "bias, delayed.payload, mxfp8.payload and 6 more", "the file is missing"))
def missing_file(c: Checkpoint) -> None:
    (c.path / SECOND).unlink()


@fault(
    (
        SECOND,
        "bias, delayed.payload, mxfp8.payload and 6 more",
        "it is a link to .*elsewhere, outside of the checkpoint",
    )
)
def link_to_the_outside(c: Checkpoint) -> None:
    (c.path / SECOND).rename(c.path.parent / "elsewhere")
    (c.path / SECOND).symlink_to(c.path.parent / "elsewhere")


@fault((SECOND, "bias, delayed.payload, mxfp8.payload and 6 more", "it is no ordinary file"))
def pipe_in_place_of_a_file(c: Checkpoint) -> None:
    (c.path / SECOND).unlink()
    os.mkfifo(c.path / SECOND)


@fault((FIRST, "mxfp8.payload at (0, 0)", "it can not be read: its archive: no archive of a tensor"))
def archive_without_its_end(c: Checkpoint) -> None:
    info = c.metadata.storage_data[MetadataIndex("mxfp8.payload", (0, 0))]
    data = bytearray((c.path / FIRST).read_bytes())
    data[info.offset + info.length - 22 : info.offset + info.length] = bytes(22)
    (c.path / FIRST).write_bytes(bytes(data))


@fault(
    (SECOND, "row.payload at (0, 0)", r"the file holds torch.float8_e4m3fn \(3, 32\), .metadata says .* \(5, 32\)"),
    (FIRST, "row.payload at (5, 0)", r"the file holds torch.float8_e4m3fn \(5, 32\), .metadata says .* \(3, 32\)"),
)
def swapped_chunks(c: Checkpoint) -> None:
    with c.editing() as metadata:
        swap(metadata.storage_data, MetadataIndex("row.payload", (0, 0)), MetadataIndex("row.payload", (CUT, 0)))


@fault(
    (FIRST, "row.payload at (0, 0)", "its bytes have changed"),
    (FIRST, "mxfp8.payload at (0, 0)", "its bytes have changed"),
)
def swapped_chunks_of_one_shape(c: Checkpoint) -> None:
    with c.editing() as metadata:
        swap(metadata.storage_data, MetadataIndex("row.payload", (0, 0)), MetadataIndex("mxfp8.payload", (0, 0)))


def swap(storage: dict[Any, Any], one: MetadataIndex, other: MetadataIndex) -> None:
    storage[one], storage[other] = storage[other], storage[one]


@fault((".metadata", "row.payload at (5, 0)", "no file holds it: storage_data has no such chunk"))
def missing_storage_entry(c: Checkpoint) -> None:
    with c.editing() as metadata:
        del metadata.storage_data[MetadataIndex("row.payload", (CUT, 0))]


@fault(
    (".metadata", "row.payload", r"no chunk holds the elements from \(5, 0\) on \(shape \(8, 32\)\)"),
    (SECOND, "row.payload at (5, 0)", "bytes are stored for a chunk that no tensor has"),
    ("", CHECKSUMS, "1 rows belong to no chunk of the checkpoint: [0-9a-f]{16}$"),
)
def missing_chunk(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.state_dict_metadata["row.payload"].chunks.pop()


@fault(
    (".metadata", "bias", r"2 chunks hold the elements from \(4,\) on \(shape \(8,\)\)"),
    (".metadata", "bias at (4,)", "no file holds it"),
    (SECOND, "bias at (5,)", "bytes are stored for a chunk that no tensor has"),
    ("", CHECKSUMS, "1 rows belong to no chunk"),
)
def overlapping_chunks(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.state_dict_metadata["bias"].chunks[1] = ChunkStorageMetadata(torch.Size([4]), torch.Size([4]))


@fault((".metadata", "tensor.scale", r"2 chunks of a tensor without dims, expected one \(shape \(\)\)"))
def tensor_wide_scale_in_two_chunks(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.state_dict_metadata["tensor.scale"].chunks *= 2


@fault((FIRST, "count at ()", r"it shares bytes from \d+ on with bias at \(0,\)"))
def chunks_that_share_bytes(c: Checkpoint) -> None:
    with c.editing() as metadata:
        index, other = MetadataIndex("bias", (0,)), MetadataIndex("count", ())
        start, end = metadata.storage_data[index].offset, metadata.storage_data[other].offset + 1
        metadata.storage_data[index] = StorageInfo(FIRST, start, end - start)


@fault(
    (FIRST, "bias at (0,)", r"the file holds torch.bfloat16 \(5,\), .metadata says torch.float16 \(5,\)"),
    (SECOND, "bias at (5,)", r"the file holds torch.bfloat16 \(3,\), .metadata says torch.float16 \(3,\)"),
)
def other_dtype_in_the_metadata(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.state_dict_metadata["bias"].properties.dtype = torch.float16


@fault((FIRST, "bias at (0,)", "the file holds torch.float16"))
def other_dtype_in_the_file(c: Checkpoint) -> None:
    c.replace("bias", c.tensor("bias", (0,)).half(), (0,))


@fault((FIRST, "bias at (0,)", "a tensor of 5 elements of torch.bfloat16 in a storage of 2 bytes"))
def repeated_element_in_the_file(c: Checkpoint) -> None:
    c.replace("bias", torch.zeros(1, dtype=torch.bfloat16).expand(5), (0,), honest=False)


@fault((FIRST, "count at ()", "it holds the global torch._utils._rebuild_parameter"))
def something_else_than_a_tensor(c: Checkpoint) -> None:
    c.replace("count", torch.nn.Parameter(torch.tensor(3.0)))


# -- values


def planted(c: Checkpoint, name: str, offset: tuple[int, ...], code: float, dtype: torch.dtype | None = None) -> None:
    """Write a value, or a code of another dtype's bytes, over the first element."""
    part = c.tensor(name, offset)
    (part if dtype is None else part.view(dtype)).reshape(-1)[0] = code
    c.replace(name, part, offset)


VALUES = {  # part, offset, what to plant -> message
    "nan_scale": ("row.scale", (CUT, 0), float("nan"), None, "1 of 3 values are NaN or infinite"),
    "infinite_scale": ("tensor.scale", (), float("inf"), None, "1 of 1 values are NaN or infinite"),
    "negative_scale": ("row.scale", (0, 0), -0.5, None, "its least value is -0.5, expected more than 0"),
    "zero_scale": ("delayed.scale", (), 0.0, None, "its least value is 0.0, expected more than 0"),
    "zero_global_scale": ("nvfp4.global_scale", (), 0.0, None, "expected more than 0"),
    "nan_global_scale": ("nvfp4.global_scale", (), float("nan"), None, "1 of 1 values are NaN"),
    "nan_e8m0_scale": ("mxfp8.scale", (0, 0), 255, None, "1 of 5 scales are NaN .* so the weight is NaN there"),
    "nan_e4m3_scale": ("nvfp4.scale", (0, 0), 0x7F, torch.uint8, "1 of 10 scales are NaN"),
    "negative_e4m3_scale": ("nvfp4.scale", (CUT, 0), -1.0, None, "1 of 6 scales are negative"),
    "nan_payload": ("row.payload", (0, 0), 0x7F, torch.uint8, "1 of 160 elements are NaN or infinite"),
    "infinite_payload": ("tensor.payload", (CUT, 0), 0x7C, torch.uint8, "1 of 96 elements are NaN or infinite"),
    "nan_mxfp8_payload": ("mxfp8.payload", (CUT, 0), 0xFF, torch.uint8, "1 of 96 elements are NaN"),
    "nan_history": ("delayed.amax_history", (0,), float("nan"), None, "1 of 4 values are NaN"),
    "negative_history": ("delayed.amax_history", (0,), -1.0, None, "its least value is -1.0, expected at least 0"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_make_no_weight_are_found(checkpoint: Checkpoint, name: str) -> None:
    part, offset, code, dtype, text = VALUES[name]
    planted(checkpoint, part, offset, code, dtype)
    ((_, entry, message),) = found(verify(checkpoint.path))
    assert entry == f"{part} at {offset}"
    assert re.search(text, message), message


LEGAL = {
    "zero block": ("nvfp4.scale", (0, 0), 0, None),
    "smallest block": ("mxfp8.scale", (0, 0), 0, None),
    "zero history": ("delayed.amax_history", (0,), 0.0, None),
    "subnormal scale": ("row.scale", (0, 0), 2.9387361e-39, None),
    "any nibbles": ("nvfp4.payload", (0, 0), 0xFF, None),
    "negative zero": ("row.payload", (0, 0), 0x80, torch.uint8),
}


@pytest.mark.parametrize("name", LEGAL)
def test_values_that_quantizing_writes_are_no_fault(checkpoint: Checkpoint, name: str) -> None:
    planted(checkpoint, *LEGAL[name])
    assert verify(checkpoint.path).findings == ()


# -- manifest and checksums


@fault((".metadata", MANIFEST, "the entry and the planner data in .metadata differ about row$"))
def manifest_copies_that_differ(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.planner_data[MANIFEST_JSON]["tensors"]["row"]["dtype"] = "float32"


def lie(c: Checkpoint, change: Callable[[dict[str, Any]], Any]) -> None:
    """Both copies of the manifest say something else than what is stored."""
    tensors = dict(tampering.manifest().tensors)
    change(tensors)
    data = Manifest(tensors).to_tensor()
    with c.editing() as metadata:
        metadata.planner_data[MANIFEST_JSON] = Manifest(tensors).to_json()
        chunk = ChunkStorageMetadata(torch.Size([0]), data.shape)
        metadata.state_dict_metadata[MANIFEST] = tampering.entry(data, [chunk])
    c.replace(MANIFEST, data, (0,))


@fault(
    (".metadata", "row.payload", "a part of row that the manifest does not list"),
)
def part_without_a_manifest_entry(c: Checkpoint) -> None:
    lie(c, lambda tensors: tensors.pop("row"))


@fault(
    (".metadata", "gone.payload", "the manifest lists it, and no such entry is stored"),
    (".metadata", "gone.scale", "the manifest lists it, and no such entry is stored"),
)
def manifest_entry_without_parts(c: Checkpoint) -> None:
    lie(c, lambda tensors: tensors.update(gone=tensors["row"]))


@fault(
    (".metadata", "row.scale", r"torch.float32 \(8, 1\) is stored, the manifest's MXFP8.* needs torch.uint8 \(8, 1\)"),
)
def manifest_with_another_recipe(c: Checkpoint) -> None:
    lie(c, lambda tensors: tensors.update(row=tensors["mxfp8"]))


@fault((".metadata", "mxfp8.global_scale", "a part of mxfp8 that the manifest does not list"), ("", CHECKSUMS, "rows"))
def part_that_the_recipe_does_not_have(c: Checkpoint) -> None:
    rename(c, "count", "mxfp8.global_scale")


@fault((".metadata", "mxfp8", "it is held as a whole, beside the parts"), ("", CHECKSUMS, "rows belong to no chunk"))
def whole_tensor_beside_its_parts(c: Checkpoint) -> None:
    rename(c, "count", "mxfp8")


def rename(c: Checkpoint, old: str, new: str) -> None:
    with c.editing() as metadata:
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        metadata.storage_data[MetadataIndex(new, ())] = metadata.storage_data.pop(MetadataIndex(old, ()))


FAULTS["part_that_the_recipe_does_not_have"][1].append((FIRST, "mxfp8.global_scale at ()", "has no row for it"))
FAULTS["whole_tensor_beside_its_parts"][1].append((FIRST, "mxfp8 at ()", "has no row for it"))


@fault((".metadata", MANIFEST, "the checkpoint's qtensor.manifest has format_version 3"))
def manifest_of_the_future(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.planner_data[MANIFEST_JSON]["format_version"] = 3


@fault(("", MANIFEST, "the checkpoint's qtensor.manifest is not JSON"))
def manifest_entry_of_zeros(c: Checkpoint) -> None:
    c.replace(MANIFEST, torch.zeros_like(c.tensor(MANIFEST, (0,))), (0,))


def rows(c: Checkpoint, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    table = change(c.tensor(CHECKSUMS, (0, 0)))
    with c.editing() as metadata:
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), table.shape)
        metadata.state_dict_metadata[CHECKSUMS] = tampering.entry(table, [chunk])
    c.replace(CHECKSUMS, table, (0, 0))


@fault(("", CHECKSUMS, "1 rows repeat the chunk of an earlier row"))
def repeated_row_of_checksums(c: Checkpoint) -> None:
    rows(c, lambda table: torch.cat([table, table[:1]]))


@fault((FIRST, "bias at (0,)", "qtensor.checksums has no row for it"))
def missing_row_of_checksums(c: Checkpoint) -> None:
    rows(c, lambda table: table[1:].clone())


@fault(("", CHECKSUMS, "1 rows belong to no chunk of the checkpoint: 00000000000000ff"))
def row_of_no_chunk(c: Checkpoint) -> None:
    stray = torch.tensor([[0] * 7 + [255] + [0] * 8], dtype=torch.uint8)
    rows(c, lambda table: torch.cat([table, stray]))


@fault((".metadata", CHECKSUMS, r"it is torch.uint8 \(\d+, 8\), expected torch.uint8 with 16 columns"))
def table_of_another_width(c: Checkpoint) -> None:
    rows(c, lambda table: table[:, :8].clone())


# -- metadata


@fault((".metadata", "", "it is not there: saving never finished, or this is no checkpoint; use the one before it"))
def no_metadata(c: Checkpoint) -> None:
    (c.path / ".metadata").unlink()


@fault((".metadata", "", "damaged or cut off: IndexError at byte 100 of 100;"))
def truncated_metadata(c: Checkpoint) -> None:
    os.truncate(c.path / ".metadata", 100)


@fault((".metadata", "bias", r"a chunk of \(3,\) at \(6,\) is not inside of the tensor's \(8,\)"))
def chunk_outside_of_the_tensor(c: Checkpoint) -> None:
    with c.editing() as metadata:
        metadata.state_dict_metadata["bias"].chunks[1].offsets = torch.Size([6])


@fault(
    (".metadata", "step at (0,)", "no file holds it"), (FIRST, "step", "bytes are stored for a chunk that no tensor")
)
def byte_entry_that_claims_to_be_a_tensor(c: Checkpoint) -> None:
    with c.editing() as metadata:
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
        metadata.state_dict_metadata["step"] = tampering.entry(torch.zeros(4), [chunk])


FAULTS["byte_entry_that_claims_to_be_a_tensor"][1].append(("", CHECKSUMS, "1 rows belong to no chunk"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(checkpoint: Checkpoint, name: str) -> None:
    plant, expected = FAULTS[name]
    plant(checkpoint)
    report = verify(checkpoint.path)
    assert not report.ok
    errors = found(report)
    assert sorted((file, entry) for file, entry, _ in errors) == sorted((file, entry) for file, entry, _ in expected)
    for file, entry, text in expected:
        assert any(f == file and e == entry and re.search(text, m) for f, e, m in errors), (text, errors)


def test_all_faults_of_a_checkpoint_are_told_at_once(checkpoint: Checkpoint) -> None:
    bit_of_a_payload(checkpoint)
    planted(checkpoint, "nvfp4.scale", (0, 0), 0x7F, torch.uint8)
    truncated_file(checkpoint)
    missing_storage_entry(checkpoint)
    assert {entry for _, entry, _ in found(verify(checkpoint.path))} == {
        "row.payload at (0, 0)", "nvfp4.scale at (0, 0)", "nvfp4.scale at (5, 0)", "row.payload at (5, 0)",
    }  # fmt: skip


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_damage_anywhere_in_a_file_is_told_or_harmless(
    sound: Checkpoint, checkpoint: Checkpoint, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from(FILES))
    other = FILES[1 - FILES.index(file)]
    shutil.copyfile(sound.path / other, checkpoint.path / other)
    damaged = bytearray((sound.path / file).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(damaged) - 1))
        end = min(len(damaged), start + data.draw(st.sampled_from([1, 1, 4, 30, 700])))
        damaged[start:end] = data.draw(st.binary(min_size=end - start, max_size=end - start))
    (checkpoint.path / file).write_bytes(bytes(damaged))
    told = {entry for _, entry, _ in found(verify(checkpoint.path))}
    if any(entry.startswith(CHECKSUMS) for entry in told):
        return  # without its table, changed elements cannot be told
    before = (sound.path / file).read_bytes()
    for index, info in sound.metadata.storage_data.items():
        place = slice(info.offset, info.offset + info.length)
        if info.relative_path != file or index.fqn == CHECKSUMS or before[place] == damaged[place]:
            continue
        if elements(index, bytes(damaged[place])) != elements(index, before[place]):
            assert chunk_in_words(index) in told


def elements(index: MetadataIndex, data: bytes) -> bytes | None:
    """What stock torch reads of a chunk; None where it cannot."""
    if index.offset is None:
        return data
    try:
        return bits(torch.load(io.BytesIO(data), weights_only=True))
    except Exception:
        return None


def test_missing_checksums_and_left_over_files_are_warnings(checkpoint: Checkpoint) -> None:
    with checkpoint.editing() as metadata:
        del metadata.state_dict_metadata[CHECKSUMS], metadata.storage_data[MetadataIndex(CHECKSUMS, (0, 0))]
    (checkpoint.path / "__2_0.distcp").write_bytes(b"left over")
    report = verify(checkpoint.path)
    assert report.ok
    assert report.checksums == 0
    assert found(report, "warning") == [
        ("__2_0.distcp", "", ".metadata does not refer to it: left over from an earlier save"),
        (
            "",
            CHECKSUMS,
            "there is none: changed bytes can not be found (save with QuantizedSavePlanner(checksums=True))",
        ),
    ]
    assert str(report.findings[0]).startswith("warning: __2_0.distcp: .metadata does not refer to it")


def test_a_directory_that_does_not_exist_is_a_finding(tmp_path: Path) -> None:
    ((file, entry, message),) = found(verify(tmp_path / "nothing"))
    assert (file, entry) == (".metadata", "")
    assert message.startswith("it is not there: saving never finished")


def test_byte_entries_are_not_unpickled(checkpoint: Checkpoint) -> None:
    sentinel = checkpoint.path / "sentinel"
    with checkpoint.editing() as metadata:
        metadata.state_dict_metadata["evil"] = BytesStorageMetadata()
        checkpoint.add_bytes(MetadataIndex("evil"), f"cos\nmkdir\n(V{sentinel}\ntR.".encode(), metadata)
    assert [entry for _, entry, _ in found(verify(checkpoint.path))] == ["evil"]  # it has no checksum
    assert not sentinel.exists()
