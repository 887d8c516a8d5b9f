"""Checkpoints of every torch from 2.11 on are read by the installed one, whichever of the two is the newer.

The archives come from tests/torch_versions/write.py. Stock torch cannot do this before 2.15: it does not read the
records of 2.15.
"""

from __future__ import annotations

import pickle
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import SafeFileSystemReader, read_manifest
from dcp_adapters.__main__ import main as command_line
from dcp_adapters.stored.reading.plain_pickle import read_plain
from tests.dcp_adapters.cases import alone, assert_holds, held, load
from tests.layerwise.small_runs import LAYERS, found, run
from tests.ranks import run_ranks
from tests.torch_versions.release import RELEASE, release_of
from tests.torch_versions.states import COLUMNS, RECIPES, ROWS, dense, state
from tests.torch_versions.write import CASE, model, on

ARCHIVES = {path.name.removesuffix(".tar.xz"): path for path in Path(__file__).parent.glob("*.tar.xz")}
PROVEN = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
OURS = ("sync", "async", "hsdp")


def test_there_is_an_archive_of_each_proven_version() -> None:
    assert sorted(ARCHIVES) == PROVEN


@pytest.fixture(scope="module", params=PROVEN)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of one version."""
    base = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVES[request.param]) as archive:
        archive.extractall(base, filter="data")
    return base / request.param


@pytest.mark.parametrize("name", OURS)
def test_quantized_checkpoints_load_bit_for_bit(written: Path, name: str) -> None:
    target = state(50)
    load(target, written / name, reader=SafeFileSystemReader(written / name), verify_checksums=True)
    assert_holds(target, state())
    manifest = read_manifest(written / name)
    assert {key: entry.recipe for key, entry in manifest.tensors.items()} == {
        f"weights.{key}": recipe for key, recipe in RECIPES.items()
    }


def test_stock_checkpoints_load_bit_for_bit(written: Path) -> None:
    target = dense(50)
    load(target, written / "stock", reader=SafeFileSystemReader(written / "stock"))
    assert held(target) == held(dense(1))


def load_on_three(paths: list[Path]) -> None:
    place = on(init_device_mesh("cpu", (3,)), Shard(0))
    for path in paths:
        target = state(50, place)
        load(target, path, reader=SafeFileSystemReader(path))
        assert_holds(target, state())


def test_quantized_checkpoints_load_on_other_ranks(written: Path) -> None:
    run_ranks(3, load_on_three, [written / name for name in OURS])


def test_stock_torch_reads_what_its_version_can(written: Path) -> None:
    """What users of the stock reader meet: records of 2.15 are read from 2.15 on."""
    readable = release_of(written.name) < (2, 15) or RELEASE >= (2, 15)
    target = state(50)
    if readable:
        load(target, written / "sync")
        assert_holds(target, state())
    else:
        with pytest.raises(dcp.CheckpointException, match=r"too many values to unpack|metadata is None"), alone():
            dcp.load(target, checkpoint_id=written / "sync")
        assert_holds(target, state(50))


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("name", [*OURS, "converted"])
def test_commands_read_them(written: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([command, str(written / name)]) == 0
    assert "mxfp8" not in capsys.readouterr().err


def test_the_conversion_is_that_of_the_installed_version(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["convert", str(written / "sync"), str(tmp_path / "here"), "--to", "nvfp4"]) == 0
    assert command_line(["diff", str(written / "converted"), str(tmp_path / "here")]) == 0, capsys.readouterr().out
    manifest = read_manifest(tmp_path / "here")
    assert manifest.tensors["weights.mxfp8"].recipe == RECIPES["nvfp4"]
    assert manifest.tensors["weights.mxfp8"].shape == (ROWS, COLUMNS)


def test_a_calibration_goes_on_behind_its_window(written: Path) -> None:
    whole, resumed = model(), model()
    with warnings.catch_warnings(), alone():
        warnings.filterwarnings("ignore", ".*torch", UserWarning)  # that another version began
        expected = found(run(whole, CASE), whole)
        here = found(run(resumed, CASE, checkpoint_dir=written / "window"), resumed)
    assert here.resumed == (0,)
    assert len(here.records) > LAYERS
    assert here.same() == expected.same()


# -- records of a torch to come ----------------------------------------------------------------------------------------


def pickled(kind: type, state: Any) -> bytes:
    """A record of DCP with this state, as a torch that has such fields would pickle it."""
    name = b"c" + f"{kind.__module__}\n{kind.__qualname__}\n".encode()
    return b"\x80\x04" + name + b")\x81" + pickle.dumps(state, protocol=4).removeprefix(b"\x80\x04")[:-1] + b"b."


def properties(*more: Any) -> bytes:
    known = TensorProperties(dtype=torch.bfloat16).__getstate__()
    return pickled(TensorProperties, (*known[:5], *more))


@pytest.mark.parametrize("more", [(), (None,), ((3, 1),), ((3, 1), "new", [1, 2], {"a": 0.5})])
def test_properties_with_fewer_and_with_more_fields_are_read(more: tuple[Any, ...]) -> None:
    read = read_plain(properties(*more), "a file")
    strides = {"strides": more[0] if more else None} if RELEASE >= (2, 15) else {}
    expected = TensorProperties(dtype=torch.bfloat16, **strides)
    assert read == expected
    assert vars(read) == vars(expected)


def test_plain_fields_that_torch_does_not_know_are_left_out() -> None:
    state = {"offsets": torch.Size([1]), "sizes": torch.Size([2]), "codec": "zstd", "level": 3, "parts": (1, 2)}
    read = read_plain(pickled(ChunkStorageMetadata, state), "a file")
    assert read == ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))
    assert vars(read).keys() == {"offsets", "sizes"}


def test_metadata_of_before_a_field_has_its_default() -> None:
    read = read_plain(pickled(Metadata, {"state_dict_metadata": {}}), "a file")
    assert read.planner_data is None
    assert read.storage_meta is None


@pytest.mark.parametrize(
    "value",
    [[[1]], {"a": {"b": 1}}, list(range(65)), torch.Size, TensorProperties(dtype=torch.bfloat16)],
    ids=["nested list", "nested dict", "long list", "a function", "a record"],
)
def test_unknown_fields_of_other_values_are_refused(value: Any) -> None:
    state = {"offsets": torch.Size([1]), "sizes": torch.Size([2]), "codec": value}
    with pytest.raises(ValueError, match="ChunkStorageMetadata with a field 'codec', which this torch does not know"):
        read_plain(pickled(ChunkStorageMetadata, state), "a file")
    if RELEASE < (2, 15):
        with pytest.raises(ValueError, match="TensorProperties with a field 'the 6th', which this torch does not know"):
            read_plain(properties(value), "a file")


def test_many_unknown_fields_are_refused() -> None:
    state = {"offsets": torch.Size([1]), "sizes": torch.Size([2]), **{f"field {n}": n for n in range(17)}}
    with pytest.raises(ValueError, match="ChunkStorageMetadata with more than 16 fields that this torch does not know"):
        read_plain(pickled(ChunkStorageMetadata, state), "a file")


def test_properties_without_a_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="TensorProperties whose fields are no dict"):
        read_plain(pickled(TensorProperties, (torch.bfloat16,)), "a file")
