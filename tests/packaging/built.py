"""A wheel and an sdist of this checkout, and an environment that has the wheel and nothing it does not ask for.

The checkout is copied first, so that a build leaves nothing in it and no stale file of an earlier one (build/,
*.egg-info) reaches the archives. Nothing comes from a network: setuptools builds as it is installed here, and what the
wheel requires is linked from this environment into the new one, distribution by distribution.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "results")
BUILD_SDIST = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
WHEEL = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was built.

    wheel = from the checkout
    rebuilt = from the sdist
    """

    wheel: Path
    sdist: Path
    rebuilt: Path


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """What a program prints; another exit status than this is the test's failure."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def build(directory: Path) -> Built:
    tree = directory / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    built = {name: directory / name for name in ("wheel", "sdist", "rebuilt")}
    for target in built.values():
        target.mkdir()
    run(sys.executable, "-c", BUILD_SDIST, built["sdist"], cwd=tree)
    (sdist,) = built["sdist"].iterdir()
    run(sys.executable, *WHEEL, built["wheel"], tree, cwd=directory)
    run(sys.executable, *WHEEL, built["rebuilt"], sdist, cwd=directory)
    (wheel,), (rebuilt,) = built["wheel"].iterdir(), built["rebuilt"].iterdir()
    return Built(wheel=wheel, sdist=sdist, rebuilt=rebuilt)


def required(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A distribution of this environment and all that it requires without extras."""
    if name.lower() in seen:
        return
    seen.add(name.lower())
    distribution = metadata.distribution(name)
    yield distribution
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from required(requirement.name, seen)


class Environment:
    """A virtual environment of its own: the Python of this one, and not a single package."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        self.elsewhere = directory / "elsewhere"  # a directory to run in that is not the checkout
        self.elsewhere.mkdir()
        self.packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())

    def run(self, *arguments: str | Path) -> str:
        return run(self.python, *arguments, cwd=self.elsewhere)

    def install(self, archive: Path) -> None:
        """With the pip of the tests, which works on the other Python."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index", "--quiet"]
        run(*pip, archive, cwd=self.elsewhere)

    def link(self, distributions: list[metadata.Distribution]) -> None:
        """Make distributions of the tests' environment importable here, with their metadata."""
        for distribution in distributions:
            for top in {
                file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
            }:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(distribution.locate_file(top))))
