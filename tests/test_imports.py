"""The packages import each other in one direction, importing them does nothing else, and what they export is known.

fsdp_hooks <- qtensor <- dcp_adapters <- layerwise
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# package -> what it may import besides itself, torch and the standard library
ALLOWED: dict[str, set[str]] = {
    "fsdp_hooks": set(),
    "qtensor": {"fsdp_hooks"},
    "dcp_adapters": {"fsdp_hooks", "qtensor", "safetensors", "jinja2", "rich", "tqdm", "xxhash"},
    "layerwise": {"fsdp_hooks", "qtensor", "dcp_adapters", "safetensors", "rich", "tqdm", "xxhash", "matplotlib"},
}

PUBLIC: dict[str, list[str]] = {
    "fsdp_hooks": ["sync_scales", "unsharded"],
    "qtensor": [
        "Float8CurrentScaling",
        "Float8DelayedScaling",
        "Float8Tensor",
        "MXFP8BlockScaling",
        "MXFP8Tensor",
        "MasterWeightOptimizer",
        "NVFP4BlockScaling",
        "NVFP4Tensor",
        "QuantizedTensor",
        "clear_high_precision_init_val",
        "high_precision_init_val",
        "quantize",
        "quantize_",
        "quantized_model_init",
        "stochastic_rounding",
        "use_kernels",
    ],
    "dcp_adapters": [
        "AtomicFileSystemWriter",
        "Manifest",
        "QuantizedLoadPlanner",
        "QuantizedSavePlanner",
        "QuantizedStager",
        "SafeFileSystemReader",
        "expand",
        "export_hf",
        "import_hf",
        "read_manifest",
        "remove_replaced",
    ],
    "layerwise": [
        "AWQ",
        "Algorithm",
        "CalibrationResult",
        "Decision",
        "Event",
        "GPTQ",
        "Group",
        "Inputs",
        "Linear",
        "LocalHessian",
        "Max",
        "Mse",
        "Report",
        "SmoothQuant",
        "Smoothing",
        "calibrate",
    ],
}

every_package = pytest.mark.parametrize("package", ALLOWED)


def imported(source: str) -> Iterator[str]:
    """Top-level names of all modules that a file imports, in functions and under conditions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level if node.level else (node.module or "").partition(".")[0]


def violations(root: Path, package: str) -> list[str]:
    """Imports that a package may not make, as "file: name"."""
    allowed = ALLOWED[package] | {package, "torch"} | sys.stdlib_module_names
    return [
        f"{file.relative_to(root)}: {name}"
        for file in sorted((root / package).rglob("*.py"))
        for name in imported(file.read_text(encoding="utf-8"))
        if name not in allowed
    ]


@every_package
def test_imports_go_one_way(package: str) -> None:
    assert violations(REPO, package) == []


@pytest.mark.parametrize(
    ("package", "line", "found"),
    [
        ("fsdp_hooks", "import qtensor.tensor", "qtensor"),
        ("fsdp_hooks", "def f():\n    from qtensor import quantize", "qtensor"),
        ("qtensor", "if True:\n    import dcp_adapters as d", "dcp_adapters"),
        ("qtensor", "from . import ops", "."),
        ("dcp_adapters", "import transformers", "transformers"),
    ],
)
def test_the_check_sees_an_import_that_goes_the_other_way(tmp_path: Path, package: str, line: str, found: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "new.py").write_text(f"import torch\nimport math\n{line}\n", encoding="utf-8")
    assert violations(tmp_path, package) == [f"{package}/new.py: {found}"]


@every_package
def test_the_public_surface_is_frozen(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == PUBLIC[package]
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} has no docstring"


SIDE_EFFECTS = """
import os, random, signal, sys, threading, warnings
import torch
from torch.nn.modules import module as nn_module

def state():
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
        "safe globals": list(torch.serialization.get_safe_globals()),
        "load mmap": torch.serialization.get_default_mmap_options(),
        "rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "hooks": [len(held) for name, held in vars(nn_module).items() if "_hooks" in name and hasattr(held, "keys")],
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "Tensor": set(vars(torch.Tensor)),
        "Module": set(vars(torch.nn.Module)),
        "threads alive": threading.active_count(),
    }

# what they build on may do as it likes
import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
for package in sys.argv[1:]:
    before = state()
    __import__(package)
    after = state()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, (package, changed)
assert "transformers" not in sys.modules
"""


def test_importing_has_no_side_effect() -> None:
    """One after the other, each on top of those it builds on."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SIDE_EFFECTS, *ALLOWED],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""
