"""Every tensor that the packages make names its dtype and its device.

A factory without them takes the defaults of whoever runs the code: trainers build models under
`torch.set_default_dtype(torch.bfloat16)` and on `torch.device("meta")`, and what is stored or sent must not follow.
tests/test_defaults.py runs the public API under other defaults; this one reads the source.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise")
BOTH = frozenset({"dtype", "device"})

# factory of torch -> what a call of it must name
NAMES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye full
    hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor
    sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor
    tensor tril_indices triu_indices zeros
"""
FACTORIES = dict.fromkeys(NAMES.split(), BOTH)
FACTORIES |= {"frombuffer": frozenset({"dtype"}), "from_file": frozenset({"dtype"})}  # always on the CPU
# Answer with a default, or make a tensor of the default dtype; none takes both arguments.
DEFAULTS = {"get_default_dtype", "get_default_device", "set_default_dtype", "set_default_device", "Tensor", "normal"}
# (file, line of source) -> why it may
ALLOWED = {
    (
        "fsdp_hooks/torch_private.py",
        'return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")',
    ): "it takes the default away",
    ("layerwise/inputs/values/ambient.py", "torch.get_default_dtype(),"): "it notes what the model has set",
    (
        "layerwise/inputs/values/ambient.py",
        "if torch.get_default_dtype() != wanted.dtype:",
    ): "it sets what the model had set",
    (
        "layerwise/inputs/values/ambient.py",
        "torch.set_default_dtype(wanted.dtype)",
    ): "the same, around a call of a layer",
    ("qtensor/ops/table.py", "make = torch.zeros if zero else torch.empty"): "the three calls of it below name both",
}


def offenders(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is missing) for each place where a default may come in."""
    tree = ast.parse(source)
    torch_names, own = _names_of_torch(tree)
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in torch_names:
            name = node.attr
        elif isinstance(node, ast.Name) and node.id in own:
            name = own[node.id]
        else:
            continue
        call = calls.get(node)
        if name in FACTORIES:
            # what is handed on as a function cannot be seen to name them; **options cannot either
            missing = FACTORIES[name] - {keyword.arg for keyword in call.keywords if call} if call else FACTORIES[name]
            if missing:
                yield node.lineno, f"{name} without {' and '.join(sorted(missing))}"
        elif call and name in DEFAULTS:
            yield node.lineno, name
        elif call and name == "finfo" and not call.args:
            yield node.lineno, "finfo of the default dtype"
        elif call and name == "where" and len(call.args) > 2 and all(map(_is_float, call.args[1:])):
            yield node.lineno, "where of two numbers"


def _names_of_torch(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """The names under which a file has torch itself, and name -> what of torch it is."""
    torch_names, own = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names |= {alias.asname or alias.name for alias in node.names if alias.name == "torch"}
            torch_names |= {"torch" for alias in node.names if alias.name.startswith("torch.") and not alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            own |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name != "Tensor"}
    return torch_names, own


def _is_float(node: ast.expr) -> bool:
    """A Python number, of which torch makes a tensor of the default dtype."""
    if isinstance(node, ast.UnaryOp):
        return _is_float(node.operand)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def found_in(root: Path) -> list[str]:
    """All offenders of the packages but those allowed, as "file:line: what"."""
    return [f"{file}:{line}: {what}" for file, line, text, what in _everything(root) if (file, text) not in ALLOWED]


@functools.cache
def _everything(root: Path) -> list[tuple[str, int, str, str]]:
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            for line, what in offenders(source):
                found.append((file.relative_to(root).as_posix(), line, source.splitlines()[line - 1].strip(), what))
    return found


def test_every_factory_names_dtype_and_device() -> None:
    assert found_in(REPO) == []


def test_what_is_allowed_is_still_there() -> None:
    assert {(file, text) for file, _, text, _ in _everything(REPO)} == ALLOWED.keys()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch.zeros(3)", "zeros without device and dtype"),
        ("torch.zeros(3, dtype=torch.float32)", "zeros without device"),
        ("torch.arange(3, device=x.device)", "arange without dtype"),
        ("torch.tensor(1 / 448, device='cpu').item()", "tensor without dtype"),
        ("torch.as_tensor(x)", "as_tensor without device and dtype"),
        ("torch.empty(3, **options)", "empty without device and dtype"),
        ("make = torch.ones", "ones without device and dtype"),
        ("def f():\n    return [torch.rand(1, device='cpu') for _ in x]", "rand without dtype"),
        ("from torch import full as filled\nfilled((), 1.0)", "full without device and dtype"),
        ("import torch as t\nt.eye(3)", "eye without device and dtype"),
        ("import torch.nn as nn\ntorch.scalar_tensor(1.0)", "scalar_tensor without device and dtype"),
        ("torch.where(x > 0, 1.0, -math.inf)", "where of two numbers"),
        ("torch.finfo().eps", "finfo of the default dtype"),
        ("torch.get_default_dtype()", "get_default_dtype"),
        ("torch.Tensor([1.0])", "Tensor"),
    ],
)
def test_the_check_sees_a_default(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "qtensor").mkdir()
    (tmp_path / "qtensor" / "new.py").write_text(f"import torch\n{line}\n", encoding="utf-8")
    (found,) = found_in(tmp_path)
    assert re.fullmatch(rf"qtensor/new\.py:\d: {re.escape(what)}", found)


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros(3, dtype=x.dtype, device=x.device)",
        "torch.where(x > 0, x, 0.0)",
        "torch.zeros_like(x), x.new_empty(3)",
        "torch.frombuffer(data, dtype=torch.uint8)",
        "def f(x: torch.Tensor) -> torch.Tensor: ...",
        "torch.finfo(torch.float32).max",
        "zeros(3), other.empty(3), torch.ops.aten.empty",
    ],
)
def test_the_check_passes_what_has_no_default(line: str) -> None:
    assert list(offenders(f"import torch\n{line}\n")) == []


def test_the_list_has_every_factory_of_this_torch() -> None:
    """By their signatures: a newer torch may have more of them."""
    found = set()
    for name in dir(torch):
        signature = getattr(getattr(torch, name), "__doc__", None)
        if isinstance(signature, str) and re.search(r"device\s*=", signature.strip().partition("\n\n")[0]):
            found.add(name)
    like = {name for name in found if name.endswith("_like")}  # take both from their argument
    assert len(found) > 25  # signatures are where they are looked for
    assert found - like - {"Event", "Generator"} <= FACTORIES.keys()  # a generator is on the CPU unless told
