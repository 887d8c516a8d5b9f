"""docs/install.md says what is so: its tables are those of pyproject.toml, its code runs, its links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from fsdp_hooks.release import VERSION
from tests.packaging.built import ROOT

if TYPE_CHECKING:
    import pytest

PAGE = ROOT / "docs" / "install.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def table(first: str) -> list[list[str]]:
    """The rows of the table whose first column has this name."""
    found = re.search(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    assert found is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def test_the_table_of_extras_is_that_of_pyproject() -> None:
    rows = {extra.strip("`"): (who, brings.split(", ")) for extra, who, brings in table("extra")}
    assert {extra: brings for extra, (_, brings) in rows.items()} == PROJECT["optional-dependencies"]
    assert all(who.startswith("who ") for who, _ in rows.values())


def test_the_table_of_dependencies_is_that_of_pyproject() -> None:
    rows = table("required")
    assert sorted(requirement for requirement, _ in rows) == sorted(PROJECT["dependencies"])
    assert all(reason for _, reason in rows)


def test_the_versions_it_starts_with() -> None:
    (torch,) = (line for line in PROJECT["dependencies"] if Requirement(line).name == "torch")
    python = PROJECT["requires-python"].removeprefix(">=")
    assert TEXT.splitlines()[2].startswith(f"Python >= {python}, torch >= {torch.removeprefix('torch>=')}. ")


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip() == VERSION


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT) if not link.startswith("https://")]
    assert links
    for link in links:
        assert (PAGE.parent / link).exists(), link
