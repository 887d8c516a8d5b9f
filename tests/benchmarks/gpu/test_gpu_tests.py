"""The tests marked gpu are shared out by pytest alone, and what a process that dies has not run is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.question import TINY, Row

if TYPE_CHECKING:
    import pytest

PROBE = """
import os
import pytest

pytestmark = pytest.mark.gpu


def test_passes():
    pass


def test_fails():
    assert 1 + 1 == 3, "sums"


def test_is_skipped():
    pytest.skip("not here")


@pytest.fixture
def broken():
    raise OSError("no fixture")


def test_has_no_fixture(broken):
    pass


def test_dies():
    os._exit(9)


def test_is_never_run():
    pass
"""


def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[Row]:
    """Under a configuration of its own: pytest here would skip all of them for want of a GPU."""
    probe = tmp_path / "test_probe.py"
    probe.write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    broken = tmp_path / "test_broken.py"
    broken.write_text("import not_there")
    monkeypatch.setattr(gpu_tests, "files", lambda: [broken, probe])
    return list(gpu_tests.rows(TINY))


def test_each_test_is_counted_and_a_failure_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file that cannot be imported, and in a process that dies: what it has not run is known."""
    whole, *failures = asked(tmp_path, monkeypatch, PROBE)
    assert whole.figures == {"passed": 1, "failed": 3, "skipped": 1, "not run": 2}
    assert {row.what.rpartition("::")[2].rpartition("/")[2]: row.error for row in failures} == {
        "test_broken.py": "ModuleNotFoundError: No module named 'not_there'",
        "test_fails": "AssertionError: sums",
        "test_has_no_fixture": "OSError: no fixture",
        "test_dies": "process 0 of 1 ended with 9",
    }


def test_a_process_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "SECONDS", 1)
    monkeypatch.setattr(gpu_tests, "PYTEST", ("-c", "import time; time.sleep(60)"))
    began = time.monotonic()
    whole, failure = gpu_tests.rows(TINY)
    assert time.monotonic() - began < 30
    assert whole.figures["passed"] == 0
    assert failure == Row("before the first test", error="process 0 of 1 was stopped after 1 s")


def test_pytest_alone_is_enough(tmp_path: Path) -> None:
    """None of its plugins is loaded, as where none is installed; the settings of pyproject.toml hold."""
    file = gpu_tests.ROOT / "tests" / "dcp_adapters" / "test_gpu.py"
    records = tmp_path / "records"
    command = [sys.executable, *gpu_tests.PYTEST, "--collect-only", str(file)]
    own = {gpu_tests.SHARE: "0/1", gpu_tests.FILE: str(records), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        command, cwd=gpu_tests.ROOT, env={**os.environ, **own}, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(gpu_tests._records(records)) > 5


def test_processes_share_out_all_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        def __init__(self, number: int) -> None:
            self.nodeid = str(number)

        def get_closest_marker(self, name: str) -> bool:
            return self.nodeid != "2"

    class Hook:
        def pytest_deselected(self, items: list[Item]) -> None:
            gone.extend(item.nodeid for item in items)

    class Config:
        hook = Hook()

    kept: list[str] = []
    for number in range(3):
        gone: list[str] = []
        monkeypatch.setenv(gpu_tests.SHARE, f"{number}/3")
        monkeypatch.setenv(gpu_tests.FILE, str(tmp_path / str(number)))
        items = [Item(each) for each in range(8)]
        gpu_tests.pytest_collection_modifyitems(Config(), items)
        assert len(gone) + len(items) == 8
        kept += [item.nodeid for item in items]
        assert [line["test"] for line in gpu_tests._records(tmp_path / str(number))] == [item.nodeid for item in items]
    assert sorted(kept) == ["0", "1", "3", "4", "5", "6", "7"]


def test_every_test_marked_gpu_is_in_a_file_that_is_asked(request: pytest.FixtureRequest) -> None:
    """Of those that this run has collected: of all of them where it runs everything."""
    marked = {item.path for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= set(gpu_tests.files())
    assert len(gpu_tests.files()) >= 10
