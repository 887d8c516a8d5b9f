"""What `make gpu` runs needs torch, Triton, transformers, pytest, the product's own dependencies, and little more.

A machine that is lent for its GPU has what it has, and no network. Whatever else a module imports, it imports where it
is used, and says so or does without.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.asking import QUESTIONS
from benchmarks.gpu.gpu_tests import ROOT, files

OURS = ("benchmarks", "tests", "fsdp_hooks", "qtensor", "dcp_adapters", "layerwise")
THERE = {"torch", "triton", "transformers", "pytest", "_pytest", "numpy", "safetensors", "tqdm", "xxhash"}
THERE |= {"ml_dtypes", "scipy"}  # independent numerics, which tests compare with; JAX brings both
# Tests that say where they need more, by pytest.importorskip or in the module that imports it.
SPARED = {"hypothesis": {"tests/conftest.py"}}


def imported(path: Path) -> Iterator[str]:
    """What a module imports as it is imported: not in functions, and not for types alone."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")), path)


def _imports(node: ast.AST, path: Path) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).parts[: -child.level]) if child.level else ""
            base = ".".join(part for part in (package, child.module or "") if part)
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, path)


def modules_of(name: str) -> Iterator[Path]:
    """The files of ours that an import runs: the module's and its packages'."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:end])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def closure(start: list[Path]) -> dict[str, set[str]]:
    """Packages of others -> files that import them, from these files on."""
    found: dict[str, set[str]] = {}
    seen, waiting = set(start), list(start)
    while waiting:
        path = waiting.pop()
        for name in imported(path):
            root = name.partition(".")[0]
            if root in OURS:
                new = [file for file in modules_of(name) if file not in seen]
                seen.update(new)
                waiting += new
            elif root not in sys.stdlib_module_names:
                found.setdefault(root, set()).add(str(path.relative_to(ROOT)))
    return found


STARTS = [ROOT / "benchmarks" / "gpu" / f"{name}.py" for name in (*QUESTIONS, "asking", "__main__")]
STARTS += [ROOT / "benchmarks" / "__main__.py", ROOT / "tests" / "conftest.py", ROOT / "tests" / "_rank_worker.py"]


@pytest.mark.parametrize("what", ["benchmarks", "tests"])
def test_nothing_else_is_imported(what: str) -> None:
    found = closure(STARTS if what == "benchmarks" else files())
    more = {name: who - SPARED.get(name, set()) for name, who in found.items() if name not in THERE}
    assert {name: who for name, who in more.items() if who} == {}


def test_an_import_is_found_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import os, first
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import types_only
try:
    import second.inner
except ImportError:
    pass
class Body:
    import third
def later():
    import fourth
"""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "start.py").write_text(text)
    assert set(closure([tmp_path / "start.py"])) == {"first", "second", "third"}
