"""Options of a load together: every reader, with and without conversion, verification and zip's own CRC32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_adapters import SafeFileSystemReader
from dcp_adapters.cli.main import main
from dcp_adapters.stored.verifying.verify import verify
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, assert_holds, load, save, values
from tests.dcp_adapters.fsspec_storage import FsspecReader


class DropsPlannerData(dcp.FileSystemReader):
    """A storage that does not keep planner data, so that the manifest is read as a tensor."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.planner_data = None
        return metadata


READERS = (dcp.FileSystemReader, SafeFileSystemReader, FsspecReader, DropsPlannerData)
SHAPE = (64, 64)


@pytest.fixture(params=[True, False], ids=["crc", "no crc"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One weight that is loaded as it is, and some that are converted; zip's CRC32 written or not."""
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(request.param)
    try:
        save({"same": quantize(values(SHAPE, 0), RECIPES["mxfp8"]), **sources(), "step": 3}, tmp_path / "saved")
    finally:
        torch.serialization.set_crc32_options(was)
    return tmp_path / "saved"


def sources() -> dict[str, Any]:
    return {"dense": values(SHAPE, 1), "other": quantize(values(SHAPE, 2), RECIPES["nvfp4"])}


def converted(value: Any) -> Any:
    target = quantize(torch.ones(SHAPE, dtype=torch.bfloat16), RECIPES["mxfp8"])
    target.copy_(value)
    return target


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("convert", [False, True])
def test_every_combination_loads(saved: Path, reader: Any, checks: bool, convert: bool) -> None:
    late = reader is DropsPlannerData  # the recipe of "other" is known too late to convert it
    want = {
        name: converted(value) if convert and not (late and name == "other") else value
        for name, value in sources().items()
    }
    want |= {"same": quantize(values(SHAPE, 0), RECIPES["mxfp8"])}
    target = {name: blank(value) for name, value in want.items()} | {"step": 0}
    mismatch = "convert" if convert else "raise"
    load(target, None, reader=reader(str(saved)), on_mismatch=mismatch, verify_checksums=checks)
    assert_holds(target, want | {"step": 3})


def blank(value: Any) -> Any:
    recipe = getattr(value, "recipe", None)
    zeros = torch.zeros(SHAPE, dtype=value.dtype)
    return zeros if recipe is None else quantize(zeros, recipe)


def test_the_command_line_reads_it(saved: Path) -> None:
    assert verify(saved).findings == ()
    assert main(["diff", str(saved), str(saved)]) == 0
    assert main(["convert", str(saved), f"{saved}-nvfp4", "--to", "nvfp4"]) == 0
