"""The docstring of a folder's __init__ is its map: it names all that is there, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise")
INSIDE = {"__pycache__", "templates"}  # folders that hold no module
MOST = 12  # modules and folders on one floor; four more in the packages themselves

folders = sorted(path.parent for package in PACKAGES for path in (REPO / package).rglob("__init__.py"))
every_folder = pytest.mark.parametrize("folder", folders, ids=[str(path.relative_to(REPO)) for path in folders])


def held(folder: Path) -> set[str]:
    """Names of the modules and folders in a folder, without what every package has."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    return modules | {path.name for path in folder.iterdir() if path.is_dir() and path.name not in INSIDE}


def missing(folder: Path) -> set[str]:
    """What the map of a folder does not name."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return held(folder) - set(re.findall(r"\w+", text))


@every_folder
def test_a_map_names_all_that_is_there(folder: Path) -> None:
    assert missing(folder) == set()


@every_folder
def test_a_map_names_no_file_that_is_not_there(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = re.findall(r"(?<![\w/.])([\w/]+\.py)\b", text)
    below = {path.name for path in folder.rglob("*.py")}
    places = (folder, *folder.parents)
    assert [name for name in named if name not in below and not any((place / name).exists() for place in places)] == []


@every_folder
def test_a_floor_is_not_crowded(folder: Path) -> None:
    assert len(held(folder)) <= (MOST + 4 if folder.parent == REPO else MOST)


def test_a_module_that_the_map_leaves_out_is_found(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""Two of three.\n\none.py  the first\nrest/   others\n"""\n')
    (tmp_path / "rest").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").touch()
    assert missing(tmp_path) == {"two"}
