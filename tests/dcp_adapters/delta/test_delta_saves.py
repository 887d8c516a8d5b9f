"""QuantizedSavePlanner(delta_to=...) in one process: what is stored, what loads, what refuses to load."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedSavePlanner,
    SafeFileSystemReader,
    checkpoint_bases,
    keep_latest,
    read_manifest,
    remove_checkpoints,
)
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST, BaseLink, Manifest, with_base
from dcp_adapters.stored.checkpoint import CheckpointUnusable, StoredCheckpoint
from dcp_adapters.stored.verifying.verify import verify
from dcp_adapters.torch_private import DELTA, is_marked
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import alone, held, load, save, values
from tests.dcp_adapters.delta.states import nudged, state
from tests.dcp_adapters.delta.test_on_disk import contents
from tests.dcp_adapters.tampering import Checkpoint
from tests.dcp_adapters.test_cli import fails, succeeds
from tests.dcp_adapters.test_foreign_tensors import Coded

READERS: dict[str, Callable[[Path], Any]] = {"stock": lambda path: None, "safe": SafeFileSystemReader}
every_reader = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


def small(seed: int) -> dict[str, Any]:
    """Weights of two recipes, a dense tensor, a counter."""
    return {
        "model": {
            "a.weight": quantize(nudged(seed, (64, 64)).bfloat16(), MXFP8BlockScaling()),
            "b.weight": quantize(nudged(seed, (32, 64)).bfloat16(), NVFP4BlockScaling()),
            "norm": nudged(seed, (64,)),
        },
        "step": seed,
    }


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A full save of step 0, and step 1 as a delta to it."""
    save(small(0), tmp_path / "full")
    save(small(1), tmp_path / "delta", delta_to=tmp_path / "full")
    return tmp_path / "delta"


def save_over(state_dict: Any, path: Path, **options: Any) -> None:
    """A save, into a directory that may hold a checkpoint already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        save(state_dict, path, **options)


def data_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def marked(path: Path) -> dict[str, bytes]:
    """What is stored for each chunk that is no plain one, by the name of its tensor."""
    stored = Checkpoint(path).metadata.storage_data
    return {
        index.fqn: (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        for index, info in stored.items()
        if is_marked(info)
    }


def kind_of(data: bytes) -> str:
    return json.loads(data[: data.index(b"\n")])["kind"]


def refused(path: Path, text: str, reader: Any = None) -> None:
    """A load raises, and the target is as it was."""
    target = small(5)
    before = held(target)
    with pytest.raises(CheckpointException, match=text):
        load(target, path, reader=reader)
    assert held(target) == before


# -- what is stored, and what loads ------------------------------------------------------------------------------------


@every_reader
def test_every_recipe_and_dtype_comes_back_bit_for_bit(reader: Any, tmp_path: Path) -> None:
    old, new = {"m": state(0), "step": 1}, {"m": state(1), "step": 2}
    save(old, tmp_path / "full")
    save(new, tmp_path / "delta", delta_to=tmp_path / "full")
    target = {"m": state(5), "step": 0}
    load(target, tmp_path / "delta", reader=reader(tmp_path / "delta"))
    assert held(target) == held(new)
    assert data_bytes(tmp_path / "delta") < data_bytes(tmp_path / "full") / 10
    stored = marked(tmp_path / "delta")
    assert {kind_of(data) for data in stored.values()} == {"same", "changes", "whole"}
    assert stored["m.same"] == b'{"kind":"same"}\n'
    assert stored.keys() == set(held(new)) - {"step"}


def test_what_is_equal_is_free_and_what_does_not_compress_is_whole(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = {"w": torch.randn(1000, generator=generator), "same": values((100, 100), 0)}
    save(noise, tmp_path / "full")
    noise["w"] = torch.randint(-(2**31), 2**31, (1000,), generator=generator).to(torch.int32).view(torch.float32)
    save(noise, tmp_path / "delta", delta_to=tmp_path / "full")
    stored = marked(tmp_path / "delta")
    assert stored["same"] == b'{"kind":"same"}\n'
    assert kind_of(stored["w"]) == "whole"
    assert len(stored["w"]) == len(b'{"kind":"whole"}\n') + 4000
    target = {"w": torch.zeros(1000), "same": values((100, 100), 1)}
    load(target, tmp_path / "delta")
    assert held(target) == held(noise)


def test_a_file_that_is_gone_is_named_with_what_is_in_it(tmp_path: Path) -> None:
    """Though all that it holds is coded, and no archive is looked into."""
    save({"w": values((100, 100), 0)}, tmp_path / "full")
    save({"w": values((100, 100), 0)}, tmp_path / "delta", delta_to=tmp_path / "full")
    assert marked(tmp_path / "delta").keys() == {"w"}
    path = tmp_path / "delta" / "gone.distcp"
    metadata = dcp.FileSystemReader(path.parent).read_metadata()
    next(info for index, info in metadata.storage_data.items() if index.fqn == "w").relative_path = path.name
    (path.parent / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException) as error:
        load({"w": values((100, 100), 1)}, path.parent, reader=SafeFileSystemReader(path.parent))
    assert (
        f"No such file or directory: '{path}', where w at (0, 0) is stored. This rank has loaded nothing, others may "
        "have; use another checkpoint"
    ) in str(error.value)


def test_tensors_that_the_base_has_not_are_stored_as_in_full(tmp_path: Path) -> None:
    save({"w": values((4, 4), 0), "x": values((4,), 1), "y": values((4,), 2), "z": torch.ones(2)}, tmp_path / "full")
    new = {
        "w": values((4, 5), 0),
        "x": values((4,), 1, torch.float32),
        "y": values((4,), 2),
        "new": quantize(values((32, 64), 3), MXFP8BlockScaling()),
        "z": Coded(torch.ones(2, dtype=torch.int8), torch.tensor(1.0)),  # fp32 to look at
    }
    save(new, tmp_path / "delta", delta_to=tmp_path / "full")
    assert marked(tmp_path / "delta").keys() == {"y"}


def test_the_other_entries_are_those_of_a_full_save(pair: Path) -> None:
    """The checksums are those of the tensors; the manifest adds the base, and has version 2 for it."""
    save(small(1), pair.parent / "again", digest=True)
    save(small(1), pair.parent / "recorded", digest=True, delta_to=pair.parent / "full")
    delta, full = (StoredCheckpoint(pair.parent / name) for name in ("recorded", "again"))
    rows = [sorted(map(bytes, one.read_key(CHECKSUMS).tolist())) for one in (delta, full)]
    assert len(set(rows[0]) ^ set(rows[1])) == 2  # the manifest's own
    link = delta.manifest.base
    assert link is not None
    assert link.path == "../full"
    assert delta.manifest == with_base(full.manifest, link)
    assert len(delta.digests) == 3
    record = delta.manifest.to_json()
    assert (record["format_version"], record["base"]) == (2, {"path": "../full", "digest": link.digest})
    assert Manifest.from_tensor(delta.read_key(MANIFEST)) == read_manifest(pair.parent / "recorded") == delta.manifest
    assert full.manifest.format_version == 1
    assert verify(pair.parent / "recorded").findings == ()


@every_reader
def test_both_directories_can_be_moved_together_and_loaded_through_a_link(reader: Any, pair: Path) -> None:
    moved = pair.parent.rename(pair.parent.with_name(f"{pair.parent.name} elsewhere"))
    (moved / "sub").mkdir()
    (moved / "sub" / "latest").symlink_to(moved / "delta")
    for path in (moved / "delta", moved / "sub" / "latest"):
        target = small(5)
        load(target, path, reader=reader(path), verify_checksums=True)
        assert held(target) == held(small(1))


def test_a_part_of_a_checkpoint_loads_and_a_conversion_reads_through_a_delta(pair: Path) -> None:
    dense = {"model": {"a.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}}
    load(dense, pair, on_mismatch="convert", allow_partial_load=True)
    assert torch.equal(dense["model"]["a.weight"], small(1)["model"]["a.weight"].dequantize(torch.bfloat16))
    counter = {"step": 0}
    shutil.rmtree(pair.parent / "full")
    load(counter, pair)  # needs no base
    assert counter == {"step": 1}


@pytest.mark.parametrize("threads", [1, 3])
def test_writers_of_files_take_deltas(threads: int, tmp_path: Path) -> None:
    old, new = {"m": state(0)}, {"m": state(1)}
    with alone():
        for number, (held_now, options) in enumerate([(old, {}), (new, {"delta_to": tmp_path / "0"})]):
            writer = AtomicFileSystemWriter(tmp_path / str(number), thread_count=threads)
            planner = QuantizedSavePlanner(enable_plan_caching=True, **options)
            dcp.save(held_now, storage_writer=writer, planner=planner)
    target = {"m": state(5)}
    load(target, tmp_path / "1")
    assert held(target) == held(new)
    assert verify(tmp_path / "1").findings == ()


def test_saves_in_a_row_with_cached_plans_and_over_an_older_delta(tmp_path: Path) -> None:
    save(small(0), tmp_path / "0", enable_plan_caching=True)
    save(small(3), tmp_path / "3", enable_plan_caching=True)
    for step, base in ((1, "0"), (2, "0"), (4, "3"), (5, "3")):
        for name in (f"to {base}", "latest"):
            save_over(small(step), tmp_path / name, delta_to=tmp_path / base, enable_plan_caching=True)
            target = small(9)
            load(target, tmp_path / name)
            assert held(target) == held(small(step))
            assert read_manifest(tmp_path / name).base == StoredCheckpoint(tmp_path / name).manifest.base


def test_a_reader_that_does_not_tell_its_directory_is_refused(pair: Path) -> None:
    pytest.importorskip("fsspec")
    from tests.dcp_adapters.fsspec_storage import FsspecReader

    refused(pair, "this reader does not tell in which directory it reads", FsspecReader(str(pair)))


# -- who must not take it for a full one -------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
@every_reader
def test_stock_planners_fail_instead_of_loading_something_else(reader: Any, partial: bool, pair: Path) -> None:
    target = {"model": {"norm": torch.zeros(64)}}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
    own = reader(pair)
    with pytest.raises(CheckpointException, match=r"Unknown extension name='qtensor\.delta'"), alone():
        dcp.load(target, checkpoint_id=None if own else pair, storage_reader=own, planner=planner)
    assert not target["model"]["norm"].any()


def test_stock_conversion_to_one_file_fails(pair: Path) -> None:
    with pytest.raises(BaseException, match=r"Unknown extension name='qtensor\.delta'"), alone():
        dcp_to_torch_save(pair, pair.parent / "one.pt")


def test_a_manifest_of_version_2_needs_a_base() -> None:
    record = with_base(Manifest(), BaseLink("../full", "0" * 32)).to_json()
    assert Manifest.from_json(record).base == BaseLink("../full", "0" * 32)
    assert Manifest.from_json({**record, "format_version": 1}).base is None  # an unknown key, in version 1
    for wrong in (None, "../full", {"path": "/full", "digest": "0" * 32}, {"path": "../full", "digest": "0"}):
        with pytest.raises(ValueError, match=r"has the base .*, expected a relative path and 32 hex digits"):
            Manifest.from_json({**record, "base": wrong})


# -- a base that is not what it was ------------------------------------------------------------------------------------


@every_reader
def test_a_missing_base_is_named_before_anything_is_written(reader: Any, pair: Path) -> None:
    (pair.parent / "full").rename(pair.parent / "away")
    full = pair.parent / "full"
    text = rf"{pair} is a delta to {full}, where there is no checkpoint \(no .metadata\); nothing has been loaded"
    refused(pair, text, reader(pair))


@every_reader
def test_another_save_in_place_of_the_base_is_refused(reader: Any, pair: Path) -> None:
    save_over(small(0), pair.parent / "full")  # the same values, even
    text = rf"{pair} is a delta to the checkpoint that was in {pair.parent / 'full'}, where another one is now"
    refused(pair, text, reader(pair))


def damaged(path: Path, name: str, at: int) -> None:
    """Another byte in what is stored for the first chunk of a tensor."""
    stored = Checkpoint(path).metadata.storage_data
    info = next(info for index, info in stored.items() if index.fqn == name)
    file = path / info.relative_path
    data = bytearray(file.read_bytes())
    place = info.offset + at if at >= 0 else info.offset + info.length + at
    data[place] ^= 1
    file.write_bytes(data)


def first_element(path: Path, name: str) -> int:
    """Where in its chunk the archive of a tensor keeps the elements."""
    stored = Checkpoint(path).metadata.storage_data
    info = next(info for index, info in stored.items() if index.fqn == name)
    data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    tensor = StoredCheckpoint(path).read_key(name)
    return data.index(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))


@every_reader
def test_a_changed_byte_of_the_base_is_found_by_load_and_verify(reader: Any, pair: Path) -> None:
    full = pair.parent / "full"
    name = "model.a.weight.payload"
    damaged(full, name, first_element(full, name) + 100)
    target = small(5)
    text = rf"{pair}, a delta to {full}: {name} at \(0, 0\): delta and base make up a chunk with checksum \w+, and"
    with pytest.raises(CheckpointException, match=text):
        load(target, pair, reader=reader(pair))
    assert held(target)[name] == held(small(5))[name]
    (found,) = verify(pair).findings
    assert (found.severity, found.entry) == ("error", f"{name} at (0, 0)")
    assert "bytes of one of them have changed" in found.message
    with pytest.raises(CheckpointUnusable, match="delta and base make up a chunk with checksum"):
        StoredCheckpoint(pair).read_key(name)


@pytest.mark.parametrize("at", [0, 12, -1])
@every_reader
def test_a_changed_byte_of_the_delta_is_found_by_load_and_verify(reader: Any, at: int, pair: Path) -> None:
    damaged(pair, "model.norm", at)
    target = small(5)
    told = r"model.norm at \(0,\).*Some tensors of the target may be loaded already"
    with pytest.raises(CheckpointException, match=told):
        load(target, pair, reader=reader(pair))
    assert held(target)["model.norm"] == held(small(5))["model.norm"]
    assert [found.entry for found in verify(pair).findings] == ["model.norm at (0,)"]


def test_chunks_that_may_not_be_marked_are_refused(pair: Path) -> None:
    full = Checkpoint(pair.parent / "full")
    with full.editing() as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.norm":
                info.transform_descriptors = [DELTA]
    text = "model.norm is stored as what changed since a base, which the manifest does not name"
    with pytest.raises(CheckpointException, match=text):
        load(small(5), full.path)
    assert any("the manifest names none" in found.message for found in verify(full.path).findings)
    with Checkpoint(pair).editing() as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == CHECKSUMS:
                info.transform_descriptors = [DELTA]
    with pytest.raises(CheckpointUnusable, match=f"{CHECKSUMS} is stored as what changed since a base"):
        StoredCheckpoint(pair)


def test_a_delta_without_checksums_is_refused(pair: Path) -> None:
    with Checkpoint(pair).editing() as metadata:
        del metadata.state_dict_metadata[CHECKSUMS]
    refused(pair, "a delta needs checksums: the checkpoint has no checksums")


# -- saves that are refused --------------------------------------------------------------------------------------------


def test_what_cannot_be_a_base_is_refused_by_name(pair: Path) -> None:
    full, third = pair.parent / "full", pair.parent / "third"
    cases: list[tuple[Path, Any, str]] = [
        (full, full, rf"delta_to={full} is the directory to save into; give a delta one of its own"),
        (third, pair, rf"{third} cannot be a delta to {pair}, which is itself a delta to {full}: give the full save"),
        (third, pair.parent / "none", r"delta_to=.*none: no .metadata, so this is no checkpoint"),
        (third, "s3://bucket/full", "delta_to is s3://bucket/full, expected a local directory"),
    ]
    for path, base, text in cases:
        with pytest.raises(CheckpointException, match=text):
            save(small(1), path, delta_to=base)
    target = small(5)
    load(target, full)
    assert held(target) == held(small(0))
    with pytest.raises(ValueError, match="delta_to needs checksums=True"):
        QuantizedSavePlanner(delta_to=full, checksums=False)


def test_a_writer_of_safetensors_is_refused(pair: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(pair.parent / "hf"), save_distributed=True)
    planner = QuantizedSavePlanner(delta_to=pair.parent / "full")
    with pytest.raises(CheckpointException, match="delta_to needs a writer that keeps bytes"), alone():
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)


def test_a_base_that_cannot_be_read_is_an_error_that_says_so(pair: Path) -> None:
    full = pair.parent / "full"
    (full / ".metadata").unlink()
    (full / ".metadata").mkdir()
    text = rf"{full}: the .metadata of the base of a delta cannot be read \(.*\); make it readable, or use another"
    refused(pair, text)
    with pytest.raises(CheckpointException, match=text):
        save(small(1), pair.parent / "third", delta_to=full)


class Meanwhile(QuantizedSavePlanner):
    """The base is saved over while the delta is written."""

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        metadata = Path(str(self.delta_to)) / ".metadata"
        metadata.write_bytes(metadata.read_bytes() + b"x")
        return plan


def test_a_base_that_changes_during_the_save_keeps_the_delta_from_being_committed(pair: Path) -> None:
    with pytest.raises(BaseException, match=r"where another one is now .*; the delta is not saved"), alone():
        dcp.save(small(1), checkpoint_id=pair.parent / "new", planner=Meanwhile(delta_to=pair.parent / "full"))
    assert not (pair.parent / "new" / ".metadata").exists()


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_commands_work_on_deltas(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = pair.parent / "again"
    save(small(1), again)
    assert "no errors" in succeeds(capsys, "verify", str(pair))
    assert "format version 2" in succeeds(capsys, "inspect", str(pair))
    told = json.loads(succeeds(capsys, "inspect", str(pair), "--json"))
    assert (told["base"], told["stored_bytes"]) == ("../full", data_bytes(pair))
    assert "base" not in json.loads(succeeds(capsys, "inspect", str(again), "--json"))
    succeeds(capsys, "diff", str(pair), str(again))
    succeeds(capsys, "digest", str(pair), str(again))
    for name, source in (("1", pair), ("2", again)):
        out = pair.parent / f"converted {name}"
        succeeds(capsys, "convert", str(source), str(out), "--to", "bfloat16")
        succeeds(capsys, "export", str(source), str(pair.parent / f"exported {name}"), "--config", config(pair.parent))
    succeeds(capsys, "diff", str(pair.parent / "converted 1"), str(pair.parent / "converted 2"))
    first, second = (contents(pair.parent / f"exported {name}") for name in "12")
    assert first == second
    shutil.rmtree(pair.parent / "full")
    assert "where there is no checkpoint" in succeeds(capsys, "verify", str(pair), status=1)
    assert "where there is no checkpoint" in fails(capsys, "digest", str(pair))
    succeeds(capsys, "inspect", str(pair))


def config(directory: Path) -> str:
    path = directory / "config.json"
    path.write_text('{"model_type": "none"}')
    return str(path)


# -- retention ---------------------------------------------------------------------------------------------------------


def test_a_base_stays_as_long_as_a_kept_delta_needs_it(tmp_path: Path) -> None:
    one = {"w": values((8, 8), 0), "step": 1}
    for name, base in (("0", None), ("1", "0"), ("2", "0"), ("3", None), ("4", "3")):
        save(one, tmp_path / name, delta_to=None if base is None else tmp_path / base)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "4")
    assert checkpoint_bases(tmp_path) == {"0": None, "1": "0", "2": "0", "3": None, "4": "3"}
    assert remove_checkpoints(tmp_path, ["2", "latest"]) == [tmp_path / "1"]
    assert remove_checkpoints(tmp_path, [tmp_path / "2", "4"]) == []
    for name in ("2", "4"):
        load({"w": torch.zeros(8, 8, dtype=torch.bfloat16), "step": 0}, tmp_path / name)
    for one_name in ("4", tmp_path / "4"):
        with pytest.raises(ValueError, match=r"is one name; give a list of those to keep\. Nothing"):
            remove_checkpoints(tmp_path, one_name)  # type: ignore[arg-type]
    assert remove_checkpoints(tmp_path, []) == [tmp_path / "2", tmp_path / "0"]  # "latest" names 4, which needs 3
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4", "unfinished", "latest"}


def test_keeping_the_latest_keeps_what_they_are_deltas_to(tmp_path: Path) -> None:
    save(small(0), tmp_path / "step-0")
    save(small(1), tmp_path / "step-1")
    for step in (2, 3):
        save(small(step), tmp_path / f"step-{step}", delta_to=tmp_path / "step-0")
    done = keep_latest(tmp_path, 1, newest="number")
    assert [path.name for path in done.removed] == ["step-2", "step-1"]
    assert [path.name for path in done.spared] == ["step-0"]
    assert not verify(tmp_path / "step-3").errors


def test_nothing_goes_where_what_is_needed_is_not_known(tmp_path: Path) -> None:
    one: dict[str, Tensor] = {"w": torch.ones(2)}
    runs, other = tmp_path / "runs", tmp_path / "other"
    save(one, other / "full")
    save(one, runs / "delta", delta_to=other / "full")
    save(one, runs / "old")
    assert checkpoint_bases(runs) == {"delta": str(other / "full"), "old": None}
    with pytest.raises(ValueError, match=r"full is not in .*runs; nothing has been removed"):
        remove_checkpoints(runs, [other / "full"])
    with pytest.raises(ValueError, match="gone is not there; nothing can be removed safely"):
        remove_checkpoints(runs, ["gone"])
    shutil.rmtree(other)
    with pytest.raises(ValueError, match="full is not there, which delta is a delta to; nothing can be removed safely"):
        remove_checkpoints(runs, ["delta"])
    (runs / "old" / ".metadata").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"old/\.metadata"):
        remove_checkpoints(runs, ["delta"])
    assert (runs / "old").is_dir()
