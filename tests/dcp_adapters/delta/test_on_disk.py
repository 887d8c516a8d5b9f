"""Deltas between checkpoints and between Hugging Face directories: made, applied, refused, interrupted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dcp_adapters.cli.diff import diff
from dcp_adapters.cli.main import main
from dcp_adapters.delta import files as commands
from dcp_adapters.delta.files import patched_copy, write_delta
from dcp_adapters.delta.patches.patch_format import open_delta
from dcp_adapters.hf.exporting.export import export_hf
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.stored.checkpoint import CheckpointUnusable, StoredCheckpoint
from dcp_adapters.stored.verifying.verify import verify
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import save
from tests.dcp_adapters.delta.states import every_dtype, nudged
from tests.dcp_adapters.test_cli import fails, succeeds


def weights(seed: int) -> dict[str, Any]:
    return {
        "model.a.weight": quantize(nudged(seed, (64, 64)).bfloat16(), MXFP8BlockScaling()),
        "model.b.weight": quantize(nudged(seed, (32, 64)).bfloat16(), NVFP4BlockScaling()),
        "model.norm.weight": nudged(seed, (64,)).bfloat16(),
    }


def checkpoint(path: Path, seed: int) -> Path:
    """A nested state dict with weights, moments, an empty tensor and a counter that is pickled."""
    save({"model": weights(seed), "optimizer": {"m": nudged(seed), **every_dtype(seed)}, "step": seed + 1}, path)
    return path


def directory(path: Path, seed: int, **options: Any) -> Path:
    """An export, in two files, with a file that no one here knows."""
    out = export_hf(weights(seed), path, config={"model_type": "none"}, max_shard_size=6000, progress=False, **options)
    (out / "tokenizer.json").write_text("{}")
    return out


def kinds(kind: str) -> Any:
    return {"checkpoint": checkpoint, "directory": directory}[kind]


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture(params=["checkpoint", "directory"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return [kinds(request.param)(tmp_path / f"v{seed}", seed) for seed in range(3)]


def test_the_result_is_the_new_state(states: list[Path], tmp_path: Path) -> None:
    for number in (0, 1):
        write_delta(states[number], states[number + 1], tmp_path / f"d{number}")
    out = tmp_path / "out"
    done = patched_copy(states[0], [tmp_path / "d0", tmp_path / "d1"], out)
    assert (done.applied, done.deltas, done.written) == (2, 2, True)
    if (out / ".metadata").exists():
        assert diff(StoredCheckpoint(out), StoredCheckpoint(states[2])).differences == []
        assert StoredCheckpoint(out).paths == StoredCheckpoint(states[2]).paths
        assert verify(out).ok
    else:
        assert contents(out) == contents(states[2])  # the digests in the files' metadata, too
        assert verify_directory(out).findings == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d0", "d1", "out", "v0", "v1", "v2"]


def test_applying_again_changes_nothing(states: list[Path], tmp_path: Path) -> None:
    write_delta(states[0], states[1], tmp_path / "d")
    patched_copy(states[0], [tmp_path / "d"], tmp_path / "out")
    before = contents(tmp_path / "out")
    done = patched_copy(states[0], [tmp_path / "d"], tmp_path / "out")
    assert (done.written, done.applied) == (False, 0)
    assert contents(tmp_path / "out") == before
    past = patched_copy(states[1], [tmp_path / "d"], tmp_path / "past")  # the base is the result already
    assert (past.written, past.applied) == (True, 0)


def test_other_bases_are_refused_and_nothing_is_written(states: list[Path], tmp_path: Path) -> None:
    write_delta(states[0], states[1], tmp_path / "d")
    with pytest.raises(ValueError, match=r"v2 has digest [0-9a-f]{32}, and .*d applies to [0-9a-f]{32} alone"):
        patched_copy(states[2], [tmp_path / "d"], tmp_path / "out")
    with pytest.raises(FileExistsError, match="v2 exists already; choose another name, nothing is overwritten"):
        patched_copy(states[0], [tmp_path / "d"], states[2])
    with pytest.raises(FileExistsError, match="d exists already; choose another name, nothing is overwritten"):
        write_delta(states[0], states[1], tmp_path / "d")
    assert not (tmp_path / "out").exists()


def test_a_damaged_delta_leaves_nothing_behind(states: list[Path], tmp_path: Path) -> None:
    write_delta(states[0], states[1], tmp_path / "d")
    data = bytearray((tmp_path / "d").read_bytes())
    data[-3] ^= 1  # the table's, or a frame's
    (tmp_path / "d").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"d is damaged: .* checksum"):
        patched_copy(states[0], [tmp_path / "d"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "v0", "v1", "v2"]


def test_a_write_that_fails_leaves_base_and_target_as_they_were(
    states: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_delta(states[0], states[1], tmp_path / "d")
    before = contents(states[0])

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(commands, "give_name", fail)
    monkeypatch.setattr("dcp_adapters.convert.convert_checkpoint.give_name", fail)
    with pytest.raises(OSError, match="disk full"):
        patched_copy(states[0], [tmp_path / "d"], tmp_path / "out")
    assert contents(states[0]) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "v0", "v1", "v2"]


def test_a_damaged_checkpoint_is_no_side_of_a_delta(tmp_path: Path) -> None:
    old, new = (checkpoint(tmp_path / f"v{seed}", seed) for seed in range(2))
    (file,) = new.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(weights(1)["model.a.weight"].payload.view(torch.uint8).numpy().tobytes()[:256])
    data[at] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointUnusable, match=r"model\.a\.weight\.payload"):
        write_delta(old, new, tmp_path / "d")


def test_a_checkpoint_and_a_directory_have_no_delta(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "a", 0), directory(tmp_path / "b", 0)
    with pytest.raises(ValueError, match=r"a is a checkpoint, .*b a Hugging Face directory; a delta is between two of"):
        write_delta(one, other, tmp_path / "d")


def test_directories_that_are_quantized_in_other_words_have_no_delta(tmp_path: Path) -> None:
    one, other = directory(tmp_path / "a", 0), directory(tmp_path / "b", 1)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["model.a"]
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"say other things of their quantization .config.json or"):
        write_delta(one, other, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_dense_directories_of_stock_files(tmp_path: Path) -> None:
    for seed in range(2):
        (tmp_path / f"v{seed}").mkdir()
        tensors = {"w": nudged(seed, (8, 8)), "odd": torch.arange(3, dtype=torch.int8) + seed}
        save_file(tensors, tmp_path / f"v{seed}" / "model.safetensors", metadata={"format": "pt"})
    write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d")
    patched_copy(tmp_path / "v0", [tmp_path / "d"], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "v1")


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v0, v1 = (str(directory(tmp_path / f"v{seed}", seed)) for seed in range(2))
    d, out = str(tmp_path / "d"), str(tmp_path / "out")
    made = json.loads(succeeds(capsys, "delta", v0, v1, d, "--json"))
    found = open_delta(d)
    assert made == {
        "format": "dcp_adapters.delta/1", "old": v0, "new": v1, "out": d, "base": found.base, "result": found.result,
        "tensors": len(found.layout.entries), "weights": made["weights"], "changed": found.changed,
        "bytes": Path(d).stat().st_size, "full_bytes": found.layout.nbytes,
    }  # fmt: skip
    assert succeeds(capsys, "apply", v0, d, out) == f"{out}: 1 deltas applied; it holds {found.result}\n"
    again = f"{out}: it holds {found.result} already, nothing was written\n"
    assert succeeds(capsys, "apply", v0, d, out) == again
    past = f"{out}2: 0 deltas applied, 1 left out, which {v1} is past already; it holds {found.result}\n"
    assert succeeds(capsys, "apply", v1, d, out + "2") == past
    done = json.loads(succeeds(capsys, "apply", v0, d, out + "3", "--json"))
    assert done == {
        "format": "dcp_adapters.apply/1", "base": v0, "out": out + "3", "deltas": 1, "applied": 1,
        "result": found.result, "written": True,
    }  # fmt: skip
    assert "in full, " in succeeds(capsys, "delta", v1, v0, d + "2")


def test_the_commands_fail_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v0 = str(directory(tmp_path / "v0", 0))
    nowhere = str(tmp_path / "nowhere")
    assert fails(capsys, "delta", v0, nowhere, str(tmp_path / "d")) == f"{nowhere}: no such directory"
    assert fails(capsys, "apply", v0, nowhere, str(tmp_path / "out")) == f"{nowhere}: no such file"
    config = str(tmp_path / "v0" / "config.json")
    assert f"{config} is damaged or no delta: " in fails(capsys, "apply", v0, config, str(tmp_path / "out"))


@pytest.mark.parametrize("command", ["delta", "apply"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert f"examples:\n  python -m dcp_adapters {command} " in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_without_zstd_a_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    v0, v1 = (str(directory(tmp_path / f"v{seed}", seed)) for seed in range(2))
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    assert 'install "qtensor-fsdp[delta]", or backports.zstd' in fails(capsys, "delta", v0, v1, str(tmp_path / "d"))
