"""The state of a calibration on disk: resumed on other ranks, after any kill, without what is damaged; or refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from layerwise.resume import window_files
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint
from layerwise.resume.progress import BACKUP, PROGRESS, read_progress
from tests.dcp_adapters.cases import RECIPES, assert_holds, placed, values
from tests.ranks import run_ranks, run_ranks_catching

REPO = Path(__file__).resolve().parents[3]
RUN = Fingerprint(weights={"w": 1, "v": 2}, data=3, batches=4, recipe={"type": "R"}, algorithm={"type": "Max"})
FINISHED = {"w": 11, "v": 12}
EXTRA = {"reports": [{"error": 0.1, "note": None}], "changed": ["norm.weight"]}
NAMES = ("model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3")


def full(seed: int) -> dict[str, Any]:
    """Of a window: quantized weights, a dense one that was changed, a scale that all ranks hold."""
    from qtensor import quantize

    weights = {name: quantize(values((33, 64), seed + i), RECIPES[name]) for i, name in enumerate(("nvfp4", "mxfp8"))}
    return weights | {"norm.weight": values((3,), seed), "q.input_scale": values((), seed, torch.float32)}


def sharded(seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    state = full(seed)
    placements = {"nvfp4": Shard(0), "mxfp8": Shard(0), "norm.weight": Replicate()}
    return {name: placed(x, mesh, placements[name]) if name in placements else x for name, x in state.items()}


def save_windows(path: Path, group: Any = None) -> None:
    checkpoint = CalibrationCheckpoint(path, group)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if group is None else DeviceMesh.from_group(group, "cpu")
    assert checkpoint.open(RUN) is None
    checkpoint.save_window(0, 1, sharded(10, mesh), EXTRA, names=NAMES[:2])
    checkpoint.save_window(2, 2, sharded(20, mesh), {"rank": mesh.get_local_rank()}, names=NAMES[2:3])


def load_windows(path: Path, group: Any = None) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if group is None else DeviceMesh.from_group(group, "cpu")
    checkpoint = CalibrationCheckpoint(path, group)
    resumed = checkpoint.open(RUN)
    assert resumed is not None
    assert (resumed.next_layer, resumed.finished) == (3, False)
    assert [window.names for window in resumed.windows] == [NAMES[:2], NAMES[2:3]]
    for window, seed in zip(resumed.windows, (10, 20), strict=True):
        target = sharded(99, mesh)
        checkpoint.load_window(window, target)
        assert_holds(target, full(seed))
    checkpoint.save_window(3, 3, sharded(30, mesh))
    target = sharded(99, mesh)
    checkpoint.load_window(dataclasses.replace(resumed.windows[0], directory="layers-00003-00003"), target)
    assert_holds(target, full(30))
    return [window.extra for window in resumed.windows]


def test_what_two_ranks_save_any_number_resumes(shared_tmp_path: Path) -> None:
    for world_size in (1, 2, 3):
        path = shared_tmp_path / str(world_size)
        run_ranks(2, save_windows, path)
        assert run_ranks(world_size, load_windows, path) == [[EXTRA, {"rank": 0}]] * world_size


def in_subgroup(path: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank():
        save_windows(path, group)
        load_windows(path, group)


def test_no_group_but_the_given_one_is_used(shared_tmp_path: Path) -> None:
    run_ranks(3, in_subgroup, shared_tmp_path)


# -- in a single process -----------------------------------------------------------------------------------------------


def dense(number: int) -> dict[str, Any]:
    return {"w": values((8, 32), number), "v": values((5,), number)}


def save_dense(path: Path, windows: int = 3) -> CalibrationCheckpoint:
    checkpoint = CalibrationCheckpoint(path)
    assert checkpoint.open(RUN) is None
    for number in range(windows):
        checkpoint.save_window(number, number, dense(number), {"layer": number}, names=[NAMES[number]])
    return checkpoint


def assert_loads(path: Path, windows: int) -> None:
    """A run finds so many windows, whole, and nothing else is left."""
    checkpoint = CalibrationCheckpoint(path)
    resumed = checkpoint.open(RUN)
    assert resumed is not None
    assert [window.extra for window in resumed.windows] == [{"layer": number} for number in range(windows)]
    for number, window in enumerate(resumed.windows):
        target = dense(99)
        checkpoint.load_window(window, target)
        assert_holds(target, dense(number))
    assert files(path) == {PROGRESS, BACKUP, *(window.directory for window in resumed.windows)}


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_run_without_a_process_group_and_a_finished_one(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    checkpoint = save_dense(path)
    assert_loads(path, 3)
    checkpoint = CalibrationCheckpoint(path)
    checkpoint.open(RUN)
    with pytest.raises(ValueError, match=r"layers 4..4 can not be saved: .* the next layer is 3; save windows in the"):
        checkpoint.save_window(4, 4, dense(4))
    with pytest.raises(ValueError, match=r"extra of layers-00003-00003 can not be written as JSON: .*object"):
        checkpoint.save_window(3, 3, dense(3), object())
    checkpoint.mark_finished(FINISHED)
    for weights in (RUN.weights, FINISHED):
        resumed = CalibrationCheckpoint(path).open(dataclasses.replace(RUN, weights=weights))
        assert resumed is not None
        assert (resumed.finished, resumed.next_layer) == (True, 3)
    again = CalibrationCheckpoint(path)
    again.open(RUN)
    with pytest.raises(ValueError, match="the calibration is finished"):
        again.save_window(3, 3, dense(3))


def test_a_window_may_hold_nothing(tmp_path: Path) -> None:
    """Layers without anything to quantize, and what they say about it."""
    checkpoint = CalibrationCheckpoint(tmp_path)
    checkpoint.open(RUN)
    checkpoint.save_window(0, 7, {}, {1: (2, 3)})
    resumed = checkpoint.open(RUN)
    assert resumed is not None
    assert resumed.next_layer == 8
    checkpoint.load_window(resumed.windows[0], {})
    assert resumed.windows[0].extra == {"1": [2, 3]}


def test_open_comes_first() -> None:
    with pytest.raises(RuntimeError, match=r"call open\(fingerprint\) first, on all ranks"):
        CalibrationCheckpoint("somewhere").save_window(0, 0, {})
    with pytest.raises(ValueError, match="checkpoint_dir='s3://bucket/run' is a URL; give a directory"):
        CalibrationCheckpoint("s3://bucket/run")


@pytest.mark.full
def test_a_kill_at_any_step_leaves_a_boundary(tmp_path: Path) -> None:
    """Killed before the rename of progress.json: the windows before; after it: the new one too. Nothing else stays."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.layerwise.resume.killed_saves", str(tmp_path)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(not state["left_over"] for state in found)
    progress = [(state["windows"], state["finished"]) for state in found]
    assert progress == sorted(progress)
    assert set(progress) == {(1, False), (2, False), (2, True)}
    assert min(progress.count(state) for state in set(progress)) > 3
    assert len(progress) > 30


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("flip", r"layers-00001-00001/__0_0\.distcp does not hold the bytes that were written"),
        ("truncate", r"layers-00001-00001/__0_0\.distcp has \d+ bytes, expected \d+"),
        ("metadata", r"layers-00001-00001/\.metadata does not hold the bytes that were written"),
        ("missing", r"layers-00001-00001/__0_0\.distcp is missing"),
        ("gone", r"layers-00001-00001/\.metadata is missing"),
    ],
)
def test_a_damaged_window_and_those_behind_it_are_dropped(tmp_path: Path, harm: str, words: str) -> None:
    checkpoint = save_dense(tmp_path)
    checkpoint.mark_finished(FINISHED)
    window = tmp_path / "layers-00001-00001"
    data = window / "__0_0.distcp"
    if harm in {"flip", "metadata"}:
        flip(data if harm == "flip" else window / ".metadata")
    elif harm == "truncate":
        os.truncate(data, data.stat().st_size - 1)
    elif harm == "missing":
        data.unlink()
    else:
        for file in window.iterdir():
            file.unlink()
        window.rmdir()
    before = contents(tmp_path)
    applied = re.escape(
        ", so layers from 1 on must be calibrated again, but the model holds the finished weights. Nothing has been "
        "changed; start from the original weights"
    )
    with pytest.raises(ValueError, match=words + applied):
        CalibrationCheckpoint(tmp_path).open(dataclasses.replace(RUN, weights=FINISHED))
    assert contents(tmp_path) == before
    resumed = None
    told = rf"{words}\. The calibration restarts from layer 1 \(model\.layers\.1\); what was saved from there on is"
    again = CalibrationCheckpoint(tmp_path)
    with pytest.warns(UserWarning, match=told):
        resumed = again.open(RUN)
    assert resumed is not None
    assert (resumed.next_layer, resumed.finished) == (1, False)
    assert_loads(tmp_path, 1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells files by their descriptors through /proc")
def test_all_that_a_record_names_is_durable_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append(str(path.relative_to(tmp_path)))

    def replaced(path: Path, target: Path) -> Path:
        steps.append(f"-> {target.name}")
        return replace(path, target)

    checkpoint = save_dense(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    checkpoint.save_window(1, 1, dense(1))
    window = "layers-00001-00001"
    data, listing = f"{window}/__0_0.distcp", f"{window}/.metadata.tmp"
    temporary = [re.sub(r"(json|metadata)\.\w{8}\.tmp", r"\1.tmp", step) for step in steps]
    assert temporary == [
        *[data, listing, window, ".", "-> .metadata", window, "."],
        *[f"{PROGRESS}.tmp", f"-> {PROGRESS}", "."],
        *[f"{BACKUP}.tmp", f"-> {BACKUP}", "."],
    ]


def test_a_run_takes_over_while_the_earlier_one_writes_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dense(tmp_path, 1)
    begun = tmp_path / "layers-00001-00001"
    begun.mkdir()
    rmdir = os.rmdir

    def written_meanwhile(path: Any, **options: Any) -> None:
        (begun / "__0_0.distcp").touch()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", written_meanwhile)
    checkpoint = CalibrationCheckpoint(tmp_path)
    assert checkpoint.open(RUN) is not None
    assert begun.exists()
    checkpoint.save_window(1, 1, dense(1), {"layer": 1})  # into another directory
    monkeypatch.undo()
    assert_loads(tmp_path, 2)
    assert not begun.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells files by their descriptors through /proc")
def test_the_name_of_a_new_directory_is_durable_before_anything_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.append((str(path.relative_to(tmp_path)), sorted(one.name for one in path.iterdir())))

    monkeypatch.setattr(os, "fsync", fsync)
    CalibrationCheckpoint(tmp_path / "a" / "run").open(RUN)
    assert synced[:2] == [(".", ["a"]), ("a", ["run"])]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_window_that_can_not_be_read_now_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save_dense(tmp_path)
    before = contents(tmp_path)
    data = tmp_path / "layers-00001-00001" / "__0_0.distcp"

    def summary(file: Path) -> str:
        if file == data:
            raise OSError(number, os.strerror(number), str(file))
        return sound(file)

    sound = window_files._summarize
    with monkeypatch.context() as patch:
        patch.setattr(window_files, "_summarize", summary)
        told = f"{data} can not be read ({os.strerror(number)}), so it is not known to be damaged. Nothing has been"
        with pytest.raises(type(OSError(number, "")), match=re.escape(told)):
            CalibrationCheckpoint(tmp_path).open(RUN)
    assert contents(tmp_path) == before
    assert CalibrationCheckpoint(tmp_path).open(RUN) is not None
    assert_loads(tmp_path, 3)


def test_a_window_whose_place_holds_something_else_is_damaged(tmp_path: Path) -> None:
    save_dense(tmp_path)
    shutil.rmtree(tmp_path / "layers-00001-00001")
    (tmp_path / "layers-00001-00001").write_bytes(b"no directory")
    resumed, again = None, CalibrationCheckpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"layers-00001-00001/\S+ is missing\. The calibration restarts from layer 1"):
        resumed = again.open(RUN)
    assert resumed is not None
    assert resumed.next_layer == 1


def flip(file: Path, place: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    file.write_bytes(data)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_damage_that_appears_after_the_look_is_found_on_loading(tmp_path: Path) -> None:
    save_dense(tmp_path, 1)
    checkpoint = CalibrationCheckpoint(tmp_path)
    resumed = checkpoint.open(RUN)
    assert resumed is not None
    data = tmp_path / "layers-00000-00000" / "__0_0.distcp"
    flip(data, data.read_bytes().index(bytes(dense(0)["w"].view(torch.uint8).view(-1)[:16].tolist())))
    with pytest.raises(RuntimeError, match=r"loading layers 0..0 from .*layers-00000-00000 failed: rank 0: .* start"):
        checkpoint.load_window(resumed.windows[0], dense(99))
    with pytest.raises(RuntimeError, match=r"loading layers 0..0 .* failed: rank 0: .*the checkpoint does not fit"):
        checkpoint.load_window(resumed.windows[0], {"w": torch.zeros(2), "u": torch.zeros(1)})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("truncate", "is damaged (not the JSON that was written)"),
        ("flip", "is damaged (its digest is another one)"),
        ("version", "is damaged (format version 'one')"),
        ("missing", "is missing"),
    ],
)
def test_a_damaged_record_has_a_copy(tmp_path: Path, harm: str, words: str) -> None:
    def hurt(file: Path) -> None:
        if harm == "truncate":
            os.truncate(file, file.stat().st_size // 2)
        elif harm == "flip":
            flip(file, file.read_bytes().index(b'"layer": 1') + 9)
        elif harm == "version":
            edit(file, version="one")
        else:
            file.unlink()

    save_dense(tmp_path)
    hurt(tmp_path / PROGRESS)
    told = f"{PROGRESS} {words}. Its copy is used: the calibration continues from layer 3"
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert CalibrationCheckpoint(tmp_path).open(RUN) is not None
    assert_loads(tmp_path, 3)
    for name in (PROGRESS, BACKUP):
        hurt(tmp_path / name)
    if harm == "missing":  # nothing says that there was a calibration
        assert CalibrationCheckpoint(tmp_path).open(RUN) is None
    else:
        told = f"{PROGRESS} {words}; {BACKUP} {words}. The calibration restarts from layer 0; what was saved from there"
        with pytest.warns(UserWarning, match=re.escape(told)):
            assert CalibrationCheckpoint(tmp_path).open(RUN) is None
    assert files(tmp_path) == {PROGRESS, BACKUP}


def test_a_record_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    save_dense(tmp_path, 1)
    edit(tmp_path / PROGRESS, version=2)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"progress\.json has format version 2, this library reads up to 1: .* update"):
        CalibrationCheckpoint(tmp_path).open(RUN)
    assert contents(tmp_path) == before


def test_a_record_that_names_other_directories_is_damaged(tmp_path: Path) -> None:
    """What no record names is removed, and what one names is read: names are those of windows."""
    from layerwise.resume import progress as module

    save_dense(tmp_path, 1)
    held, _ = read_progress(tmp_path)
    assert held is not None
    for changes in ({"directory": "../elsewhere"}, {"files": {"../../secret": "1 0"}}):
        window = dataclasses.replace(held.windows[0], **changes)
        module.write_progress(tmp_path, dataclasses.replace(held, windows=(window,)))
        found, damages = read_progress(tmp_path)
        assert found is None
        assert damages[0].startswith(f"{PROGRESS} is damaged (ValueError: a window in ")


WRONG: dict[str, tuple[Any, str]] = {  # what is put where in a record, and what is said of it
    "a size": (lambda r: r["windows"][0]["files"].update({".metadata": "many"}), "whose files have no size and digest"),
    "a digest": (lambda r: r["windows"][0]["files"].update({".metadata": ["1 0"]}), "TypeError: "),
    "a layer": (lambda r: r["windows"][0].update(first=-1), "ValueError: a window of layers -1..0"),
    "no layer": (lambda r: r["windows"][0].update(last=True), "ValueError: a window of layers 0..True"),
    "too many layers": (lambda r: r["windows"][-1].update(last=10**200), "ValueError: a window of layers 1.."),
    "a file": (lambda r: r["windows"][0]["files"].update({"\ud800": f"1 {0:016}"}), "whose files have no names"),
    "a gap": (lambda r: r["windows"][1].update(first=2, last=2), "windows of layers that do not follow each other"),
    "no beginning": (lambda r: r["windows"].pop(0), "windows of layers that do not follow each other from 0 on"),
    "names": (lambda r: r["windows"][0].update(names="v"), "ValueError: a window in 'layers-00000-00000' whose layers"),
    "a run": (lambda r: r.update(run=" "), "ValueError: the run ' '"),
    "an algorithm": (
        lambda r: r["fingerprint"].update(algorithm=True),
        "TypeError: algorithm is a bool, expected a dict",
    ),
    "versions": (lambda r: r["fingerprint"].update(versions=[{}]), "TypeError: versions is a list, expected a dict"),
    "batches": (lambda r: r["fingerprint"].update(batches=None), "TypeError: batches is a NoneType, expected a int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_record_of_another_shape_is_damaged_though_its_digest_fits(tmp_path: Path, case: str) -> None:
    from layerwise.resume.progress import _record_digest

    change, words = WRONG[case]
    save_dense(tmp_path, 2)
    record = json.loads((tmp_path / PROGRESS).read_text())["progress"]
    change(record)
    text = json.dumps({"version": 1, "digest": _record_digest(1, record), "progress": record})
    for name in (PROGRESS, BACKUP):
        (tmp_path / name).write_text(text)
    with pytest.warns(UserWarning, match=re.escape(words)):
        assert CalibrationCheckpoint(tmp_path).open(RUN) is None


def test_other_threads_are_told(tmp_path: Path) -> None:
    save_dense(tmp_path, 1)
    now = dataclasses.replace(RUN, threads=RUN.threads + 1, versions={"torch": "9.9"})
    words = rf"checkpoint_dir=.*calibrated with {RUN.threads} threads, now there are .*; .*; .*now it is 9\.9$"
    with pytest.warns(UserWarning, match=words):
        assert CalibrationCheckpoint(tmp_path).open(now) is not None


def test_the_later_of_two_runs_has_the_directory(tmp_path: Path) -> None:
    first, second = CalibrationCheckpoint(tmp_path), CalibrationCheckpoint(tmp_path)
    first.open(RUN)
    first.save_window(0, 0, dense(0), {"layer": 0})
    resumed = second.open(RUN)
    assert resumed is not None
    before = contents(tmp_path)
    for step in (lambda: first.save_window(1, 1, dense(99)), lambda: first.mark_finished(FINISHED)):
        with pytest.raises(RuntimeError, match=r"has been taken over by another run, \w{8} \(.*\); this run stops"):
            step()
    assert contents(tmp_path) == before
    second.save_window(1, 1, dense(1), {"layer": 1})
    assert_loads(tmp_path, 2)


def test_a_run_that_is_taken_over_while_it_writes_commits_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    from layerwise.resume import checkpoints

    first, second = CalibrationCheckpoint(tmp_path), CalibrationCheckpoint(tmp_path)
    first.open(RUN)
    write = checkpoints.write_window

    def overtaken(*args: Any) -> Any:
        files = write(*args)
        monkeypatch.setattr(checkpoints, "write_window", write)
        second.open(RUN)
        second.save_window(0, 0, dense(0), {"layer": 0})
        return files

    monkeypatch.setattr(checkpoints, "write_window", overtaken)
    with pytest.raises(RuntimeError, match="has been taken over by another run, "):
        first.save_window(0, 0, dense(99), {"layer": 99})
    assert_loads(tmp_path, 1)


def test_a_name_that_is_taken_is_not_written_into(tmp_path: Path) -> None:
    checkpoint = save_dense(tmp_path, 1)
    (tmp_path / "layers-00001-00001").mkdir()
    window = checkpoint.save_window(1, 1, dense(1), {"layer": 1})
    assert re.fullmatch(r"layers-00001-00001-[0-9a-f]{8}", window.directory)
    assert not files(tmp_path / "layers-00001-00001")
    assert_loads(tmp_path, 2)


# -- errors on several ranks -------------------------------------------------------------------------------------------


def open_other(path: Path) -> None:
    CalibrationCheckpoint(path).open(dataclasses.replace(RUN, weights={"w": 5, "v": 6}, batches=7))


def test_another_run_is_refused_on_all_ranks_and_nothing_is_changed(shared_tmp_path: Path) -> None:
    run_ranks(2, save_windows, shared_tmp_path)
    before = contents(shared_tmp_path)
    told = (
        f"ValueError: checkpoint_dir={str(shared_tmp_path)!r} holds a calibration of other weights: w and 1 more "
        "differ; other data: 4 batches, now 7. Nothing has been changed. To continue it, start from the weights, data "
        "and options that it was started with; to calibrate anew, give an empty checkpoint_dir"
    )
    assert run_ranks_catching(2, open_other, shared_tmp_path) == [told] * 2
    assert contents(shared_tmp_path) == before


def failing_fsync(where: Path, rank: int, number: int, step: Any) -> None:
    """`step()` while the disk is full for one rank."""
    fsync = os.fsync

    def full_disk(descriptor: int) -> None:
        if dist.get_rank() == rank and str(where) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    os.fsync = full_disk
    try:
        step()
    finally:
        os.fsync = fsync


def save_on_a_full_disk(path: Path, where: str, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    checkpoint = CalibrationCheckpoint(path)
    checkpoint.open(RUN)
    failing_fsync(
        path / where, rank, errno.ENOSPC, lambda: checkpoint.save_window(3, 3, sharded(30, mesh), names=NAMES[3:])
    )


def open_on_a_full_disk(path: Path) -> None:
    checkpoint = CalibrationCheckpoint(path)
    failing_fsync(path, 1, errno.EACCES, lambda: checkpoint.open(RUN))


def open_elsewhere(path: Path) -> None:
    own = path / str(dist.get_rank())
    own.mkdir()
    CalibrationCheckpoint(own).open(RUN)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells files by their descriptors through /proc")
def test_an_error_on_one_rank_reaches_all_and_the_state_stays(shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "run"
    run_ranks(2, save_windows, path)
    space = "[Errno 28] No space left on device"
    told = (
        f"RuntimeError: saving layers 3..3 in {path}/layers-00003-00003 failed: rank 1: OSError: {space}. What was "
        "saved before is untouched: make room or mend what is named, and start again, from layer 3"
    )
    assert run_ranks_catching(2, save_on_a_full_disk, path, "layers-", 1) == [told] * 2
    told = (
        f"OSError: checkpoint_dir={str(path)!r} can not be written: {space}. What was saved before is untouched: make "
        "room or mend what is named, and start again"
    )
    assert run_ranks_catching(2, save_on_a_full_disk, path, PROGRESS, 0) == [told] * 2
    denied = f"checkpoint_dir={str(path)!r} can not be used: rank 1: [Errno 13] Permission denied"
    assert run_ranks_catching(2, open_on_a_full_disk, path) == [f"PermissionError: {denied}"] * 2
    assert files(path) >= {PROGRESS, BACKUP, "layers-00000-00001", "layers-00002-00002"}
    run_ranks(1, load_windows, path)
    assert files(path) == {PROGRESS, BACKUP, "layers-00000-00001", "layers-00002-00002", "layers-00003-00003"}


def test_a_directory_that_ranks_do_not_share_or_that_is_none_is_refused(shared_tmp_path: Path) -> None:
    errors = run_ranks_catching(2, open_elsewhere, shared_tmp_path)
    for rank, error in enumerate(errors):
        assert error == (
            f"FileNotFoundError: checkpoint_dir={str(shared_tmp_path / str(rank))!r} can not be used: rank 1: the "
            "directory is another one here than on rank 0, or another run has begun in it; give one of a file system "
            "that all ranks share, to one run at a time"
        )
    assert not files(shared_tmp_path / "0")
    file = shared_tmp_path / "file"
    file.write_text("")
    told = f"FileExistsError: checkpoint_dir={str(file)!r} can not be used: [Errno 17] File exists: {str(file)!r}"
    assert run_ranks_catching(2, open_other, file) == [told] * 2


def open_damaged(path: Path) -> tuple[int, str]:
    with pytest.warns(UserWarning, match="checkpoint_dir=") as told:
        resumed = CalibrationCheckpoint(path).open(RUN)
    return (resumed.next_layer if resumed else -1), str(told[0].message)


def test_damage_that_one_rank_finds_is_told_to_all(shared_tmp_path: Path) -> None:
    run_ranks(2, save_windows, shared_tmp_path)
    run_ranks(1, flip, shared_tmp_path / "layers-00002-00002" / "__1_0.distcp")
    (first, told), *others = run_ranks(3, open_damaged, shared_tmp_path)
    assert others == [(first, told)] * 2
    assert first == 2
    assert "layers-00002-00002/__1_0.distcp does not hold" in told
    assert "restarts from layer 2 (model.layers.2)" in told
