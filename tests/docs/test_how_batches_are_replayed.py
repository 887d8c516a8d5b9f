"""The map of layerwise/inputs: every module of the folder is in it, with classes that it has."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import DOCS, REPO, Page

FOLDER = REPO / "layerwise" / "inputs"


def test_the_map_names_every_module_and_classes_that_are_there() -> None:
    text = Page(DOCS / "how_batches_are_replayed.md").text
    table = text[text.index("## Who knows what") : text.index("## How often the model runs")]
    mapped: dict[str, list[str]] = {}
    for module, classes in re.findall(r"^\| (?:`(\w+)\.py`)? ?\| ([^|]*)\|", table, re.M):
        if module or classes.startswith("`"):
            mapped.setdefault(module or list(mapped)[-1], []).extend(re.findall(r"`(\w+)`", classes))
    files = {path.stem: path for path in FOLDER.rglob("*.py") if path.stem != "__init__"}
    assert sorted(mapped) == sorted(files)
    for module, classes in mapped.items():
        tree = ast.parse(files[module].read_text(encoding="utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert set(classes) <= there, module
