"""The wheel and the sdist: built from the checkout, holding what they should, working where nothing else is."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from fsdp_hooks.release import VERSION
from tests.packaging.built import ROOT, Built, Environment, build, required, run
from tests.qtensor.vectors.files import SCHEMES
from tests.ranks import agreed

PACKAGES = ("dcp_adapters", "fsdp_hooks", "layerwise", "qtensor")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = PROJECT["name"]
ESCAPED = NAME.replace("-", "_")  # in names of files
DIST_INFO = f"{ESCAPED}-{VERSION}.dist-info"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="environments are made of symbolic links")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("built")
    if agreed(value=str(directory)) != str(directory):
        pytest.skip("builds once: rank 0 runs it")
    return build(directory)


@pytest.fixture(scope="module")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, what it requires, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    missing = "import importlib.util; print([name for name in ('qtensor', 'torch') if importlib.util.find_spec(name)])"
    assert environment.run("-c", missing).strip() == "[]"  # neither the checkout nor the tests' packages are seen
    environment.install(built.wheel)
    seen: set[str] = set()
    for line in PROJECT["dependencies"]:
        environment.link(list(required(Requirement(line).name, seen)))
    return environment


def in_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def in_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def sources() -> dict[str, bytes]:
    """Every file of the four packages."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file())
    kept = (file for file in files if "__pycache__" not in file.parts)
    return {str(file.relative_to(ROOT)): file.read_bytes() for file in kept}


def test_the_wheel_holds_the_four_packages_and_nothing_else(built: Built) -> None:
    files = in_wheel(built.wheel)
    assert {name: data for name, data in files.items() if not name.startswith(DIST_INFO)} == sources()
    about = {name.removeprefix(f"{DIST_INFO}/") for name in files if name.startswith(DIST_INFO)}
    assert about == {"METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE"}
    assert files[f"{DIST_INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert files[f"{DIST_INFO}/top_level.txt"].decode().split() == [*PACKAGES]
    assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in files[f"{DIST_INFO}/WHEEL"].decode()
    assert {f"{package}/py.typed" for package in PACKAGES} <= {*files}
    vectors = {name for name in files if name.startswith("qtensor/vectors/")}
    assert {Path(name).name for name in vectors if name.endswith(".safetensors")} == {
        f"{one}.safetensors" for one in SCHEMES
    }
    assert {"qtensor/vectors/README.md", "qtensor/vectors/__init__.py"} <= vectors


def test_no_package_can_be_forgotten() -> None:
    """A directory with modules and without `__init__.py` would be left out of the wheel."""
    directories = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert [str(path) for path in sorted(directories) if not (path / "__init__.py").exists()] == []


def test_the_metadata(built: Built) -> None:
    about = message_from_bytes(in_wheel(built.wheel)[f"{DIST_INFO}/METADATA"])
    assert (about["Name"], about["Version"]) == ("qtensor-fsdp", VERSION)
    assert about["Requires-Python"] == PROJECT["requires-python"]
    assert about["License-Expression"] == PROJECT["license"]
    assert about["Summary"] == PROJECT["description"]
    assert about.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    extras = PROJECT["optional-dependencies"]
    assert {*about.get_all("Provides-Extra", [])} == {*extras}
    declared = {str(Requirement(line)) for line in PROJECT["dependencies"]}
    for extra, lines in extras.items():
        declared |= {str(Requirement(_of_extra(line, extra))) for line in lines}
    assert {str(Requirement(line)) for line in about.get_all("Requires-Dist", [])} == declared


def _of_extra(line: str, extra: str) -> str:
    requirement, _, marker = line.partition(";")
    return f'{requirement}; {f"{marker} and " if marker else ""}extra == "{extra}"'


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Built) -> None:
    extra = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.cfg"}
    found = {name for name in in_sdist(built.sdist) if not name.startswith(f"{ESCAPED}.egg-info/")}
    assert found == {*sources()} | extra


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(built: Built) -> None:
    assert built.rebuilt.name == built.wheel.name
    assert in_wheel(built.rebuilt) == in_wheel(built.wheel)


def test_dependencies_are_the_few_that_are_justified() -> None:
    """Another one is a decision: it stands in pyproject.toml with its reason, and here."""
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert names == {"torch", "safetensors", "numpy", "tqdm", "xxhash"}
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert all("  # " in line for line in listed[1].splitlines())


# -- installed ---------------------------------------------------------------------------------------------------------

ROUND_TRIP = """
import sys
from importlib import metadata
import torch, torch.distributed.checkpoint as dcp
import dcp_adapters, fsdp_hooks, layerwise, qtensor

packages = sys.argv[2]
for package in (dcp_adapters, fsdp_hooks, layerwise, qtensor):
    assert package.__file__.startswith(packages), package.__file__
print(metadata.version("qtensor-fsdp"))

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner

def quantized(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(32, 4, bias=False)
    qtensor.quantize_(model, qtensor.MXFP8BlockScaling())
    return model

model, other = quantized(0), quantized(1)
dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1], planner=QuantizedSavePlanner(), no_dist=True)
assert not torch.equal(other.weight.payload, model.weight.payload)
dcp.load({"model": other.state_dict()}, checkpoint_id=sys.argv[1], planner=QuantizedLoadPlanner(), no_dist=True)
for name, part in model.weight.parts().items():
    assert torch.equal(part, other.weight.parts()[name]), name
result = layerwise.calibrate(
    torch.nn.Sequential(torch.nn.Linear(32, 32)), [torch.ones(2, 32)], recipe=qtensor.MXFP8BlockScaling(), layers=["0"]
)
print(result.report.table())
from importlib.resources import files
from safetensors.torch import load
vectors = [load(file.read_bytes()) for file in files("qtensor.vectors").iterdir() if file.name.endswith(".safetensors")]
assert all("typical.payload" in tensors for tensors in vectors), len(vectors)
print(len(vectors), "files of vectors")
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"rich", "matplotlib", "transformers", "torchao", "tests", "examples", "benchmarks"}, loaded
"""


@pytest.mark.full
def test_it_works_where_only_its_dependencies_are(environment: Environment, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    told = environment.run("-c", ROUND_TRIP, checkpoint, environment.packages)
    assert told.splitlines()[0] == VERSION
    assert "0.weight" in told
    assert f"{len(SCHEMES)} files of vectors" in told
    table = environment.run("-m", "dcp_adapters", "inspect", checkpoint)
    assert "model.weight" in table
    assert "rich" not in {
        distribution.name for distribution in metadata.distributions(path=[str(environment.packages)])
    }


def test_no_other_version_is_installed_in_this_environment() -> None:
    """None need be: the tests find the packages in the checkout."""
    assert {found.version for found in metadata.distributions() if found.name == NAME} <= {VERSION}


TYPED = """
import torch
from dcp_adapters import read_manifest
from fsdp_hooks import sync_scales
from layerwise import Max
from qtensor import MXFP8BlockScaling

MXFP8BlockScaling(blocks=3)
Max().decide("group")
sync_scales(torch.nn.Linear(1, 1)).upper()
read_manifest(5)
"""
SKIP = (
    "[mypy]\n[mypy-torch.*,safetensors.*,tqdm.*,numpy.*,xxhash.*,rich.*]\nfollow_imports = skip\n"  # only ours are read
)


@pytest.mark.full
def test_a_type_checker_reads_the_installed_types(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(TYPED, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(SKIP, encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", environment.python, "--cache-dir", tmp_path / "cache"]
    told = run(*mypy, "user.py", cwd=tmp_path, status=1)
    assert re.findall(r"^user\.py:(\d+): error: .*\[([\w-]+)\]$", told, re.MULTILINE) == [
        ("8", "arg-type"),
        ("9", "call-arg"),
        ("9", "arg-type"),
        ("10", "attr-defined"),
    ], told
