"""Every text that the packages can say, as templates in which HOLE is what is filled in; found in the source."""

from __future__ import annotations

import ast
import re
from functools import cache

from layerwise.stages.caller import caller
from tests.docs.pages import REPO

HOLE = "\0"
PACKAGES = ("dcp_adapters", "fsdp_hooks", "layerwise", "qtensor")


def template(node: ast.expr) -> str:
    """The text of a string in the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue) and ast.unparse(node.value) == "caller()":
        return caller()  # as the pages quote it
    return HOLE


@cache
def templates() -> tuple[str, ...]:
    """All texts with at least two words."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            docstrings = {id(node.body[0].value) for node in ast.walk(tree) if _documented(node)}
            for node in ast.walk(tree):
                if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in docstrings:
                    found.add(template(node))
    return tuple(sorted(text for text in found if " " in text))


def _documented(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def pattern(quoted: str) -> re.Pattern[str]:
    """What a quoted message matches: its words in their order, anything for each `…`."""
    return re.compile(".*?".join(map(re.escape, quoted.split("…"))), re.S)
