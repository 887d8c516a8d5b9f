"""The newest save that is good is taken, whatever else lies in the directory; and nothing that is needed is removed."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_adapters import keep_latest, latest_verified
from dcp_adapters.stored import saves
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, save, values
from tests.ranks import run_ranks, run_ranks_catching

PASSED_OVER = "saves that do not verify were passed over"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "step"
    save({"w": quantize(values((64, 64), 1), RECIPES["mxfp8"])}, path)
    return path


@pytest.fixture
def runs(one: Path, tmp_path: Path) -> Path:
    """Saves step-8 to step-11, each written a second after the one before."""
    for number in range(8, 12):
        put(one, tmp_path / f"step-{number}", number)
    return tmp_path


def put(one: Path, path: Path, second: int) -> None:
    shutil.copytree(one, path)
    os.utime(path / ".metadata", (second, second))


def damage(path: Path) -> None:
    """Change a byte of a tensor."""
    file = next(path.glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 255
    file.write_bytes(raw)


def unfinished(path: Path, second: int) -> None:
    (path / ".metadata").unlink()
    os.utime(path, (second, second))


def looked(directory: Path, **options: Any) -> tuple[str | None, list[str]]:
    """What is taken, and the names of what was passed over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", PASSED_OVER)
        found = latest_verified(directory, **options)
    return None if found.path is None else found.path.name, [one.path.name for one in found.skipped]


def tidied(directory: Path, keep: int, **options: Any) -> saves.Retained:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", PASSED_OVER)
        return keep_latest(directory, keep, **options)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# -- which is taken ----------------------------------------------------------------------------------------------------


def test_the_save_that_was_written_last_is_taken(runs: Path) -> None:
    assert looked(runs) == ("step-11", [])
    os.utime(runs / "step-9" / ".metadata", (99, 99))
    assert looked(runs) == ("step-9", [])
    assert looked(runs, newest="number") == ("step-11", [])


def test_numbers_count_as_people_count(one: Path, tmp_path: Path) -> None:
    for name in ("run2-step-9", "run1-step-1000", "run3-step-200"):
        put(one, tmp_path / name, 5)  # copied: all written at one time
    assert looked(tmp_path) == ("run1-step-1000", [])
    assert looked(tmp_path, newest="number") == ("run1-step-1000", [])


def test_damaged_and_unfinished_saves_are_passed_over_with_reasons(runs: Path) -> None:
    damage(runs / "step-10")
    unfinished(runs / "step-11", 11)
    with pytest.warns(UserWarning, match=PASSED_OVER) as told:
        found = latest_verified(runs)
    assert found.path == runs / "step-9"
    assert str(found.skipped[0]) == "step-11: no .metadata: its saving has not finished"
    assert str(found.skipped[1]).startswith("step-10: error: __0_0.distcp: w.")
    assert "step-11: no .metadata" in str(told[0].message)
    assert "step-10: error" in str(told[0].message)


def test_what_is_older_than_the_choice_is_not_read(runs: Path) -> None:
    damage(runs / "step-8")
    assert looked(runs) == ("step-11", [])


def test_files_and_links_into_the_directory_are_no_saves(runs: Path) -> None:
    (runs / "log.txt").write_text("loss 1.0")
    (runs / "latest").symlink_to(runs / "step-8")
    (runs / "gone").symlink_to(runs / "step-7")
    assert looked(runs) == ("step-11", [])


def test_a_link_to_a_save_elsewhere_is_one(one: Path, tmp_path: Path) -> None:
    (tmp_path / "step-1").symlink_to(one)
    assert looked(tmp_path) == ("step-1", [])


def test_foreign_directories_are_passed_over(runs: Path) -> None:
    (runs / "logs").mkdir()  # newer than all
    (runs / "logs" / "events").write_text("")
    unreadable = runs / "other"
    unreadable.mkdir()
    (unreadable / ".metadata").write_text("not a pickle")
    taken, skipped = looked(runs)
    assert taken == "step-11"
    assert sorted(skipped) == ["logs", "other"]


def test_where_nothing_verifies_there_is_no_path(runs: Path, tmp_path: Path) -> None:
    for path in runs.iterdir():
        damage(path)
    assert looked(runs) == (None, ["step-11", "step-10", "step-9", "step-8"])
    (tmp_path / "empty").mkdir()
    assert looked(tmp_path / "empty") == (None, [])


def test_a_save_that_vanishes_while_it_is_looked_at_is_passed_over(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process tidies up, or writes, at the same time."""
    real = saves.verify

    def vanishing(path: Path, **options: Any) -> Any:
        if path.name == "step-11":
            shutil.rmtree(path)
        return real(path, **options)

    monkeypatch.setattr(saves, "verify", vanishing)
    assert looked(runs) == ("step-10", ["step-11"])


def test_deep_faults_count_where_they_are_asked_for(one: Path, tmp_path: Path) -> None:
    put(one, tmp_path / "step-1", 1)
    q = quantize(values((64, 64), 1), RECIPES["mxfp8"])
    q.scale.add_(1)
    q.payload.copy_((q.payload.float() / 2).to(torch.float8_e4m3fn))
    save({"w": q}, tmp_path / "step-2")
    assert looked(tmp_path) == ("step-2", [])
    assert looked(tmp_path, level="deep") == ("step-2", [])
    assert looked(tmp_path, level="own_scales") == ("step-1", ["step-2"])


def test_what_cannot_be_meant_is_refused(one: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a checkpoint itself; give the directory that its saves are in"):
        latest_verified(one)
    with pytest.raises(FileNotFoundError):
        latest_verified(tmp_path / "none")
    with pytest.raises(ValueError, match="newest='size' is not one of"):
        latest_verified(tmp_path, newest="size")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level='full' is not one of"):
        keep_latest(tmp_path, level="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep=0, expected a whole number from 1 on"):
        keep_latest(tmp_path, 0)


# -- which go ----------------------------------------------------------------------------------------------------------


def test_older_saves_go(runs: Path) -> None:
    done = tidied(runs, 2)
    assert [path.name for path in done.verified] == ["step-11", "step-10"]
    assert [path.name for path in done.removed] == ["step-9", "step-8"]
    assert names(runs) == {"step-11", "step-10"}


def test_what_stays_is_on_the_disk_before_anything_goes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of a save may have synced no directory, as torch's own does not."""
    synced: list[tuple[str, set[str]]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.append((path.name, names(path)))

    monkeypatch.setattr(os, "fsync", fsync)
    before = names(runs)
    (kept,) = tidied(runs, 1).verified
    assert synced.index((runs.name, before)) > synced.index((kept.name, names(kept)))


def test_only_saves_that_verify_count(runs: Path) -> None:
    damage(runs / "step-11")
    damage(runs / "step-9")
    unfinished(runs / "step-8", 8)
    done = tidied(runs, 1)
    assert [path.name for path in done.verified] == ["step-10"]
    assert [path.name for path in done.removed] == ["step-9"]
    assert names(runs) == {
        "step-11",
        "step-10",
        "step-8",
    }  # left for people, and for a save under way


def test_the_last_good_save_is_never_removed(runs: Path) -> None:
    for number in (9, 10, 11):
        damage(runs / f"step-{number}")
    assert tidied(runs, 2).removed == ()
    assert tidied(runs, 1).removed == ()
    damage(runs / "step-8")
    assert tidied(runs, 1).removed == ()
    assert names(runs) == {"step-8", "step-9", "step-10", "step-11"}


def test_links_and_needed_saves_stay(one: Path, runs: Path) -> None:
    put(one, runs / "step-7", 7)
    put(one, runs / "step-6", 6)
    (runs / "best").symlink_to("step-9")
    bases = {"step-11": ["step-8"], "step-9": ["step-7"], "step-6": ["step-10"]}
    done = tidied(runs, 1, needs=lambda path: [runs / name for name in bases.get(path.name, [])])
    assert [path.name for path in done.removed] == ["step-10", "step-6"]
    assert [path.name for path in done.spared] == ["step-9", "step-8", "step-7"]
    assert names(runs) == {"best", "step-11", "step-9", "step-8", "step-7"}


def test_needed_saves_are_given_by_name_and_must_be_there(runs: Path) -> None:
    done = tidied(runs, 1, needs=lambda save: ["step-8"] if save.name == "step-11" else [])
    assert [path.name for path in done.spared] == ["step-8"]
    with pytest.raises(ValueError, match="step-11 needs step-7, which is not there; nothing has been removed"):
        tidied(runs, 1, needs=lambda save: ["step-7"])
    assert names(runs) == {"step-11", "step-8"}


def test_nothing_goes_where_nobody_can_tell_what_a_save_needs(runs: Path) -> None:
    (runs / "step-11" / ".metadata").write_bytes(b"of a later version")
    unknown = r"step-11: nobody can tell which saves it needs .* Nothing has been removed"
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(ValueError, match=unknown):
        keep_latest(runs, 1, newest="number")
    assert names(runs) == {"step-11", "step-10", "step-9", "step-8"}


def test_a_removal_that_is_interrupted_leaves_no_save_that_looks_whole(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(path: Path) -> None:
        raise OSError(f"{path}: the disk is gone")

    monkeypatch.setattr(shutil, "rmtree", died)
    with pytest.raises(OSError, match="the disk is gone"):
        tidied(runs, 3)
    assert not (runs / "step-8" / ".metadata").exists()
    assert looked(runs) == ("step-11", ["step-8"])  # the most recent change


# -- several ranks -----------------------------------------------------------------------------------------------------


def chosen(runs: Path, out: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", PASSED_OVER)
        found = latest_verified(runs)
        keep_latest(runs, 1)
    (out / str(dist.get_rank())).write_text(str(found.path))


def test_all_ranks_choose_the_same(one: Path, shared_tmp_path: Path) -> None:
    runs, out = shared_tmp_path / "runs", shared_tmp_path / "out"
    out.mkdir()
    for number in (1, 2, 3):
        put(one, runs / f"step-{number}", number)
    damage(runs / "step-3")
    run_ranks(2, chosen, runs, out)
    assert {path.read_text() for path in out.iterdir()} == {str(runs / "step-2")}
    assert names(runs) == {"step-2", "step-3"}


def test_all_ranks_raise_alike(shared_tmp_path: Path) -> None:
    told = run_ranks_catching(2, latest_verified, shared_tmp_path / "none")
    assert len(set(told)) == 1
    assert told[0].startswith("FileNotFoundError: ")
