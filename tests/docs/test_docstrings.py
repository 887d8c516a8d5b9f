"""Docstrings name the parameters that are there, each by itself: `make docs` refuses others, and needs MkDocs to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("qtensor", "fsdp_hooks", "dcp_adapters", "layerwise")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented(docstring: str) -> list[str]:
    """Names before the colons of the section Args."""
    _, _, section = docstring.partition("\nArgs:\n")
    section = re.split(r"\n\S", section, maxsplit=1)[0]
    return re.findall(r"^ {4}(\S[^:]*):", section, re.MULTILINE)


def parameters(function: Function) -> set[str]:
    args = function.args
    every = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return {arg.arg for arg in every if arg is not None}


def unknown(source: str) -> Iterator[str]:
    """Of a class, whose fields may be inherited, only what can be no name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function | ast.ClassDef):
            names = documented(ast.get_docstring(node) or "")
            wrong = [name for name in names if not name.lstrip("*").isidentifier()]
            if isinstance(node, Function):
                wrong = [name for name in names if name.lstrip("*") not in parameters(node)]
            yield from (f"{node.name}: {name}" for name in wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_parameter_of_a_docstring_is_one(package: str) -> None:
    files = sorted((REPO / package).rglob("*.py"))
    found = {str(file.relative_to(REPO)): [*unknown(file.read_text())] for file in files}
    assert not {file: names for file, names in found.items() if names}


def test_others_are_found() -> None:
    function = (
        'def f(a, *rest, b=1):\n    """F.\n\n    Args:\n        a, b: two.\n        *rest: more.\n        c: none.\n\n'
    )
    function += '    Raises:\n        ValueError: d.\n    """\n'
    assert [*unknown(function)] == ["f: a, b", "f: c"]
    assert [*unknown('class C:\n    """C.\n\n    Args:\n        a, b: two.\n        c: one.\n    """\n')] == ["C: a, b"]
