"""Which test files are asked about a change of a module, by what they name; the cheapest first."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

PRIVATE = "tests/test_torch_private.py"
PLACES = {  # package -> where its tests are
    "fsdp_hooks": ("tests/fsdp_hooks", "tests/qtensor", PRIVATE),
    "qtensor": ("tests/qtensor", "tests/fsdp_hooks", PRIVATE),
    "dcp_adapters": ("tests/dcp_adapters", PRIVATE),
}
ALWAYS = {  # asked last, whatever they name: what all of a package's code is behind
    "fsdp_hooks": ("tests/fsdp_hooks/test_matrix.py", "tests/fsdp_hooks/test_scales.py"),
    "qtensor": ("tests/qtensor/test_contract.py", "tests/qtensor/test_golden.py", "tests/fsdp_hooks/test_matrix.py"),
    "dcp_adapters": ("tests/dcp_adapters/test_format.py", "tests/dcp_adapters/test_reshard.py"),
}
RARE = 3  # test files: a name that no more of them say tells much
MOST = 10  # files; the last ones of a long list seldom notice what the first did not


def modules(root: Path) -> list[str]:
    """What is changed: qtensor, fsdp_hooks, and the planners of dcp_adapters with what stands beside them."""
    folders = ("qtensor", "fsdp_hooks", "dcp_adapters/save", "dcp_adapters/load")
    found = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]


def files_for(root: Path, module: str) -> list[str]:
    """Test files, those of its name first, then those that name most of it for what they cost."""
    package = module.split("/", 1)[0]
    dotted = module.removesuffix(".py").replace("/", ".")
    paths = [path for place in PLACES[package] for path in _files(root / place)]
    said = {path: _words(path) & _defined(root / module) for path in paths}
    often = Counter(name for names in said.values() for name in names)
    own: list[tuple[float, str]] = []
    others: list[tuple[float, str]] = []
    for path, names in said.items():
        text, name = _text(path), str(path.relative_to(root))
        # in a fixed order, or the last bit of the sum would decide between files; `items` says nothing
        hits = sum(RARE / max(often[one], RARE) for one in sorted(names)) + 5 * (dotted in text)
        if _is_of(path.stem.removeprefix("test_"), dotted):
            own.append((_cost(text), name))
        elif hits:
            others.append((_cost(text) - 3 * hits, name))
    first = [name for _, name in sorted(own)]
    return list(
        dict.fromkeys([*first, *(name for _, name in sorted(others)[: max(MOST - len(first), 0)]), *ALWAYS[package]])
    )


def _files(place: Path) -> list[Path]:
    return sorted(place.glob("test_*.py")) if place.is_dir() else [place]


def _is_of(stem: str, dotted: str) -> bool:
    """Whether a test file is named after the module, as test_merging_shards.py is after merging."""
    words = {word[:6] for word in dotted.rpartition(".")[2].replace("all_", "").split("_")}
    return stem in dotted or any(stem.startswith(word) for word in words if len(word) > 3)


def _cost(text: str) -> int:
    """About how long a file takes: processes and compilers count for more than lines."""
    return 8 * ("run_ranks" in text) + 8 * ("use_kernels" in text or "torch.compile" in text) + len(text) // 8000


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", _text(path)))


@cache
def _defined(path: Path) -> frozenset[str]:
    """The names of a module's functions, classes, methods and constants that a test could say."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    names |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return frozenset(name for name in names if not name.startswith("_") and len(name) > 3)
