"""The packages import each other in one direction, importing them does nothing else, and what they export is known.

fsdp_hooks <- qtensor <- dcp_adapters <- layerwise, and so do the folders inside a package (FOLDERS)
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
    "fsdp_hooks": {"triton"},  # by kernels that a GPU alone runs
    "qtensor": {"fsdp_hooks", "triton"},  # likewise
    "dcp_adapters": {"fsdp_hooks", "qtensor", "safetensors", "jinja2", "rich", "tqdm", "xxhash"},  # zstd: by name
    "layerwise": {  # transformers, yaml: by name
        *("fsdp_hooks", "qtensor", "dcp_adapters", "safetensors", "rich", "tqdm", "xxhash", "matplotlib", "numpy"),
    },
}

# modules that nothing else imports -> the library that they are a plug-in of
PLUGINS = {
    f"dcp_adapters/transformers/{name}.py": {"transformers"}
    for name in ("config", "conversion", "quantizer", "trainer")
} | {"dcp_adapters/torch_checkpointing.py": {"torch_checkpointing"}}

# package -> its folders, from the lowest on: each may import those before it; "." is the modules beside __init__, but
# for those that stand here by their names
FOLDERS: dict[str, tuple[str, ...]] = {
    "fsdp_hooks": (
        *("torch_private", "devices", "lazy_bits", "versions", "release", "wrappers", "writable", "ranks", "kernels"),
        ".",
    ),
    "qtensor": (
        *(
            "spec.codecs",
            "spec",
            "probes",
            "numerics.triton_kernels",
            "numerics",
            "tensor",
            "ops",
            "products",
            "products.grouped",
            "formats",
        ),
        *(
            "scales",
            "states",
            "optim.masters",
            "optim.batches",
            "optim.matrices",
            "optim.fused",
            "optim.compressed",
            "optim.fused.compressed",
            "optim",
        ),
        *("model", "merging", "vectors", "."),
    ),
    "dcp_adapters": (
        *("torch_private", "plain", "records", "delta.coding", "stored.reading", "stored.checkpoint"),
        *("stored.part_values", "stored.verifying", "stored", "save.staging"),
        *("save.write_items", "save.steps", "save", "load", "convert"),
        *("hf.files", "hf.layouts", "hf.models", "hf.reading", "hf.checking", "hf.sources", "hf.exporting", "hf"),
        *("adopting.outcome", "adopting.source", "adopting.sources", "adopting"),
        *(
            "gguf",
            "digests",
            "delta.patches",
            "delta",
            "streams",
            "transformers",
            "torch_checkpointing",
            "cli",
            "cli.deltas",
            "cli.report",
            ".",
        ),
    ),
    "layerwise": (
        *("algorithms.algorithm", "algorithms.solvers", "algorithms", "formats", "stages", "weights", "statistics"),
        *("inputs.values", "inputs.recording", "inputs.replaying", "inputs", "folding", "rotating", "report"),
        *("resume", "running.one_stage", "running", ".", "command"),
    ),
}

PUBLIC: dict[str, list[str]] = {
    "fsdp_hooks": ["sync_scales", "unsharded"],
    "qtensor": [
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Float8DelayedScaling",
        "Float8Tensor",
        "Int4GroupScaling",
        "Int4Tensor",
        "Int8RowScaling",
        "Int8Tensor",
        "LowRankUpdate",
        "MXFP4BlockScaling",
        "MXFP4Tensor",
        "MXFP8BlockScaling",
        "MXFP8Tensor",
        "MasterWeightOptimizer",
        "MergeReport",
        "MergedWeight",
        "NF4BlockScaling",
        "NF4Tensor",
        "NVFP4BlockScaling",
        "NVFP4Tensor",
        "QuantizedTensor",
        "Recipe",
        "clear_high_precision_init_val",
        "decode_once",
        "high_precision_init_val",
        "linear_through_merge",
        "merge_",
        "merge_aware",
        "quantize",
        "quantize_",
        "quantized_model_init",
        "share_scales",
        "stochastic_rounding",
        "use_kernels",
    ],
    "dcp_adapters": [
        "AdoptedWeight",
        "AdoptionReport",
        "Anchors",
        "AtomicFileSystemWriter",
        "BaseLink",
        "Delta",
        "Entry",
        "GroupReceiver",
        "GroupSender",
        "HeldVersion",
        "Incoming",
        "LatestVerified",
        "Manifest",
        "PatchedCopy",
        "PlacedShard",
        "QuantizedLoadPlanner",
        "QuantizedSavePlanner",
        "QuantizedStager",
        "Retained",
        "SafeFileSystemReader",
        "SharedMemoryReceiver",
        "SharedMemorySender",
        "Skipped",
        "TensorRecord",
        "WeightStream",
        "WeightStreamError",
        "WrittenDelta",
        "adopt",
        "apply_deltas",
        "checkpoint_bases",
        "delta_from_bytes",
        "delta_to_bytes",
        "digest",
        "expand",
        "export_gguf",
        "export_hf",
        "fused_linears",
        "import_hf",
        "join_group",
        "keep_latest",
        "latest_verified",
        "open_delta",
        "patched_copy",
        "read_manifest",
        "release",
        "removable",
        "remove_checkpoints",
        "remove_replaced",
        "save_delta",
        "tensor_digests",
        "vllm_source",
        "write_delta",
    ],
    "layerwise": [
        "AWQ",
        "Algorithm",
        "Assignment",
        "CalibrationResult",
        "Candidate",
        "Decision",
        "Event",
        "GPTAQ",
        "GPTQ",
        "Group",
        "Inputs",
        "KVCache",
        "Linear",
        "LinearErrors",
        "LinearGroup",
        "LinearReport",
        "LocalHessian",
        "Max",
        "Mse",
        "Qronos",
        "Report",
        "RotationReport",
        "SmoothQuant",
        "Smoothing",
        "calibrate",
        "rotate_",
        "rotate_inputs_",
        "search_formats",
    ],
}

# public names of dcp_adapters -> the package that is their home
HOMES: dict[str, list[str]] = {
    "dcp_adapters.adopting": ["AdoptedWeight", "AdoptionReport", "adopt", "release"],
    "dcp_adapters.delta": [
        "Anchors",
        "Delta",
        "HeldVersion",
        "PatchedCopy",
        "WrittenDelta",
        "apply_deltas",
        "checkpoint_bases",
        "delta_from_bytes",
        "delta_to_bytes",
        "open_delta",
        "patched_copy",
        "removable",
        "remove_checkpoints",
        "save_delta",
        "write_delta",
    ],
    "dcp_adapters.streams": [
        "GroupReceiver",
        "GroupSender",
        "Incoming",
        "SharedMemoryReceiver",
        "SharedMemorySender",
        "TensorRecord",
        "WeightStream",
        "WeightStreamError",
        "join_group",
        "vllm_source",
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
        f"{path}: {name}"
        for file in sorted((root / package).rglob("*.py"))
        for path in [str(file.relative_to(root))]
        for name in imported(file.read_text(encoding="utf-8"))
        if name not in allowed | PLUGINS.get(path, set())
    ]


@every_package
def test_imports_go_one_way(package: str) -> None:
    assert violations(REPO, package) == []


@pytest.mark.parametrize(
    ("package", "line", "found"),
    [
        ("fsdp_hooks", "import qtensor.tensor.quantized_tensor", "qtensor"),
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


def test_jinja2_is_for_the_page_of_a_report_alone() -> None:
    files = (REPO / "dcp_adapters").rglob("*.py")
    users = [file for file in files if "jinja2" in imported(file.read_text(encoding="utf-8"))]
    assert users == [REPO / "dcp_adapters" / "cli" / "report" / "page.py"]


def imported_modules(root: Path, package: str, source: str) -> Iterator[str]:
    """Names below the package of all modules of it that a file imports; "__init__" for what the package exports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            names = [f"{package}.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] == package:
                path = root.joinpath(*name.split("."))
                there = name != package and (path.is_dir() or path.with_suffix(".py").is_file())
                yield name.removeprefix(f"{package}.") if there else "__init__"


def folder_of(root: Path, package: str, module: str) -> str:
    """The folder of a module of a package, "." or its own name for one beside __init__."""
    if module in FOLDERS[package]:
        return module
    folder = module if (root / package).joinpath(*module.split(".")).is_dir() else module.rpartition(".")[0]
    return folder or "."


def upward_imports(root: Path, package: str) -> list[str]:
    """Imports of a folder that is higher, as "file: module"; the package's own __init__ and __main__ may have any."""
    found = []
    for file in sorted((root / package).rglob("*.py")):
        path = file.relative_to(root / package)
        if str(path) in ("__init__.py", "__main__.py"):
            continue
        own = folder_of(root, package, ".".join(path.with_suffix("").parts).removesuffix(".__init__"))
        assert own in FOLDERS[package], f"{package}/{path} is in a folder that has no place in FOLDERS"
        lower = FOLDERS[package][: FOLDERS[package].index(own) + 1]
        found += [
            f"{package}/{path.as_posix()}: {module}"
            for module in imported_modules(root, package, file.read_text(encoding="utf-8"))
            if module == "__init__" or folder_of(root, package, module) not in lower
        ]
    return found


@every_package
def test_folders_import_one_way(package: str) -> None:
    assert upward_imports(REPO, package) == []


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("inputs/new.py", "from layerwise.running.plan import Plan", "running.plan"),
        ("inputs/new.py", "if True:\n    import layerwise.running.plan", "running.plan"),
        ("inputs/new.py", "def f():\n    from layerwise.running import plan", "running"),
        ("running/new.py", "from layerwise import calibrate", "calibrate"),
        ("running/new.py", "from layerwise import Max", "__init__"),
        ("inputs/new.py", "from layerwise.inputs.old import x\nfrom layerwise.stages.stage import Stage", ""),
    ],
)
def test_the_check_sees_an_import_that_goes_up(tmp_path: Path, path: str, line: str, found: str) -> None:
    there = ("calibrate.py", "running/plan.py", "inputs/old.py", "stages/stage.py", path)
    for name in ("__init__.py", *there):
        file = tmp_path / "layerwise" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line if name == path else "import layerwise\n" * (name == "__init__.py"), encoding="utf-8")
    assert upward_imports(tmp_path, "layerwise") == ([f"layerwise/{path}: {found}"] if found else [])


@every_package
def test_the_public_surface_is_frozen(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == PUBLIC[package]
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("home", HOMES)
def test_deltas_and_streams_have_homes(home: str) -> None:
    module, package = importlib.import_module(home), importlib.import_module("dcp_adapters")
    assert sorted(module.__all__) == HOMES[home]
    for name in HOMES[home]:
        assert getattr(module, name) is getattr(package, name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match=f"module '{home}' has no attribute 'nothing'"):
        _ = module.nothing


LOADED_BY = """
import sys
import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
before = set(sys.modules)
import dcp_adapters
print(*sorted(set(sys.modules) - before))
"""
# folders of dcp_adapters that saves and loads need, and how many modules with them and those of the lower packages
NEEDED = ("torch_private", "plain", "records", "stored", "save", "load", "delta.coding")
MODULES = 226


def test_importing_dcp_adapters_loads_what_saves_and_loads_need() -> None:
    """No command line, no Hugging Face directories, no GGUF, no streams; and nothing else's but xxhash."""
    done = subprocess.run([sys.executable, "-c", LOADED_BY], cwd=REPO, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    ours = [name for name in loaded if name.partition(".")[0] in ALLOWED]
    assert "dcp_adapters.load.planner" in ours
    for name in ours:
        below = name.partition(".")[2]
        known = not below or below == "delta" or f"{below}.".startswith(tuple(f"{folder}." for folder in NEEDED))
        assert known or name.startswith(("qtensor", "fsdp_hooks")), name
    assert len(ours) <= MODULES
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {*ALLOWED, "torch"}
    assert others == {"xxhash"}


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
