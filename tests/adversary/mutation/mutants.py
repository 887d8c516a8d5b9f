"""Mutants of a module: one expression or statement of its source replaced by another."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
DTYPES = {
    "float32": "float64",
    "float64": "float32",
    "bfloat16": "float16",
    "float16": "bfloat16",
    "uint8": "int8",
    "int64": "int32",
    "int32": "int64",
    "float8_e4m3fn": "float8_e5m2",
    "float8_e5m2": "float8_e4m3fn",
}


@dataclass(frozen=True)
class Mutant:
    """One change. begin, end: the characters of the source that it replaces."""

    module: str  # "qtensor/spec/blocks.py"
    line: int
    operator: str
    before: str
    after: str
    begin: int
    end: int

    @property
    def key(self) -> str:
        """The same for the same change of the same source, whatever stands around it."""
        told = f"{self.module}\n{self.operator}\n{self.before}\n{self.after}\n{self.line}"
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()

    def applied(self, source: str) -> str:
        """The source with the change."""
        return source[: self.begin] + self.after + source[self.end :]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"key": self.key, **asdict(self)}


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All changes of a module that still compile, in the order of its lines."""
    tree, starts = ast.parse(source), _line_starts(source)
    found = []
    for node, operator, after in _changes(tree):
        begin = _at(source, starts, node.lineno, node.col_offset)
        end = _at(source, starts, node.end_lineno or node.lineno, node.end_col_offset or 0)
        mutant = Mutant(module, node.lineno, operator, source[begin:end], after, begin, end)
        if mutant.before != after and _compiles(mutant.applied(source)):
            found.append(mutant)
    return sorted(found, key=lambda each: (each.begin, each.operator, each.after))


def drawn(root: Path, modules: list[str], seed: int, count: int) -> list[Mutant]:
    """`count` mutants of the modules, each kind of change as likely as any other."""
    by_operator: dict[str, list[Mutant]] = {}
    for module in modules:
        for mutant in mutants_of(module, (root / module).read_text(encoding="utf-8")):
            by_operator.setdefault(mutant.operator, []).append(mutant)
    rng, chosen = Random(seed), []
    while by_operator and len(chosen) < count:
        operator = rng.choice(sorted(by_operator))
        left = by_operator[operator]
        chosen.append(left.pop(rng.randrange(len(left))))
        if not left:
            del by_operator[operator]
    return chosen


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str, str]]:
    """(node, kind of change, what takes its place)."""
    for node in _reached(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            other = COMPARISONS[type(node.ops[0])]()
            yield node, "comparison", _text(ast.Compare(node.left, [other], node.comparators))
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield node, "arithmetic", _text(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
        elif isinstance(node, ast.BoolOp):
            other_word = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, "and, or", _text(ast.BoolOp(other_word, node.values))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "off by one", str(node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, "true, false", str(not node.value)
        elif isinstance(node, ast.Attribute) and _is_dtype(node):
            yield node, "dtype", f"torch.{DTYPES[node.attr]}"
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, "negated condition", _text(ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield test, "negated condition", _text(ast.UnaryOp(ast.Not(), test))
        elif isinstance(node, ast.Raise | ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield node, "removed statement", "pass"


def _of_call(node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
    plain = not any(isinstance(argument, ast.Starred) for argument in node.args)
    if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Constant):
        whose = node.func.value
        if not (isinstance(whose, ast.Name) and whose.id in {"torch", "dist", "self", "math", "itertools"}):
            yield node, "dropped call", _text(whose)
    elif len(node.args) == 1 and plain and not node.keywords:
        yield node, "dropped call", _text(node.args[0])
    if len(node.args) >= 2 and plain:
        yield (
            node,
            "swapped argument",
            _text(ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)),
        )


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, decorators, assertions, texts of errors, or type checking."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        yield node
        if isinstance(node, ast.Raise):
            continue
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list", "type_comment"}:
                continue
            waiting += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]


def _is_dtype(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DTYPES


def _text(node: ast.AST) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _at(source: str, starts: list[int], line: int, column: int) -> int:
    """The character at a place that ast gives in bytes of UTF-8."""
    text = source[starts[line - 1] : starts[line]]
    return starts[line - 1] + len(text.encode()[:column].decode())


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True
