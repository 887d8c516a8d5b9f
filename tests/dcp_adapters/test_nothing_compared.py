"""Comparisons that find nothing to compare do not pass: empty checkpoints, directories, diffs, deltas, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from dcp_adapters import HeldVersion, digest
from dcp_adapters.cli.digest import Side
from dcp_adapters.cli.main import main
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.records.manifest import Manifest
from dcp_adapters.stored.numeric_error import error_between
from dcp_adapters.stored.verifying.digest_check import DigestCheck
from dcp_adapters.stored.verifying.verify import verify
from tests.dcp_adapters.cases import save
from tests.dcp_adapters.test_differences import entry, stored

if TYPE_CHECKING:
    from pathlib import Path

NAN, INF = torch.full((3,), torch.nan), torch.full((3,), torch.inf)


def test_empty_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({}, tmp_path / "a")
    save({"step": 3}, tmp_path / "b")
    assert [finding.message for finding in verify(tmp_path / "a").errors] == [
        "it holds no tensors and no other entries: there was nothing to verify"
    ]
    assert verify(tmp_path / "b").ok
    assert main(["verify", str(tmp_path / "a")]) == 1
    capsys.readouterr()
    for command in (["diff"], ["delta"], ["digest"]):
        out = [str(tmp_path / "out")] if command == ["delta"] else []
        assert main([*command, str(tmp_path / "a"), str(tmp_path / "a"), *out]) == 2
        assert "no tensor" in capsys.readouterr().err or command == ["diff"]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    with pytest.raises(ValueError, match=r"^the state dict: it holds no tensors$"):
        digest({})


def test_an_empty_directory(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    (finding,) = verify_directory(tmp_path).errors
    assert finding.message == "its files hold no tensors: there was nothing to verify"


def test_a_version_of_nothing() -> None:
    with pytest.raises(ValueError, match="hold no tensors, so nothing leads from one to the other"):
        HeldVersion({}).since({}, 1)


def test_an_error_over_no_element_is_not_zero() -> None:
    for other in (INF, torch.ones(3), torch.zeros(3)):
        error = error_between(NAN, other)
        assert (error.relative, error.not_finite, error.exact) == (None, 3, False)
    assert error_between(NAN, NAN).exact
    some: Any = torch.tensor([1.0, torch.nan])
    assert error_between(some, torch.ones(2)).relative == 0.0


def test_digests_of_some_tensors_are_counted() -> None:
    metadata, manifest = stored({"w": entry(), "b": (5,), "step": None})
    check = DigestCheck(metadata.state_dict_metadata)
    check.manifest = manifest
    assert check.unrecorded() == []
    check.manifest = Manifest(manifest.tensors, digests={"b": "0" * 32})
    assert check.unrecorded() == ["w"]
    side = Side("ckpt", {"w": "1" * 32, "b": "0" * 32}, {"b": "0" * 32})
    assert side.render()[1] == (
        "ckpt: as recorded when it was saved, but for 1 of 2 tensors, of which nothing is recorded"
    )
