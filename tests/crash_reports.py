"""What a worker that was killed by a signal leaves behind: the stacks of its threads, in C as far as they can be had.

    allow_core      in the worker, when it starts: a crash may leave a core file, of a bounded size
    crash_report    in the pool, when the worker is dead: signal, test, and gdb's stacks of the core, which is removed

A heap that was damaged shows itself by chance, long after the damage: what is known of it has to be in the log of the
run in which it happened. Nothing is done, and no file is written, unless a worker dies. Python's own stacks come from
faulthandler (tests/_rank_worker.py).
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

LARGEST_CORE = 4 << 30  # bytes; a worker has touched some 0.5 GB
LINES, WIDTH = 160, 200  # of the C stacks, in the report
GDB_TIMEOUT = 120.0  # seconds; reading the symbols of torch takes some ten
WITH_CORE = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
PATTERN = Path("/proc/sys/kernel/core_pattern")


def allow_core() -> None:
    """Let this process, and no child of it, leave a core file; of private memory alone, where all stacks are."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (_at_most(LARGEST_CORE, hard), hard))
    os.register_at_fork(after_in_child=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, hard)))
    filtered = Path("/proc/self/coredump_filter")
    if filtered.exists():
        filtered.write_text("0x11", encoding="ascii")  # private memory, and headers by which gdb finds the libraries


def directory_of(pid: int | None) -> Path:
    """Where a process runs, and where its core would be: the server that forks workers may have begun elsewhere."""
    link = Path(f"/proc/{pid}/cwd")
    return link.readlink() if link.exists() else Path.cwd()


def crash_report(code: int, pid: int, started: float, directory: Path) -> str:
    """What can be said of a worker that ended with this code, and had started at this time in this directory."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
    head = f"{signal.Signals(-code).name} in process {pid}, in {test}"
    if signal.Signals(-code) not in WITH_CORE:
        return head
    core, why = find_core(PATTERN.read_text().strip() if PATTERN.exists() else "", pid, started, directory)
    if core is None:
        return f"{head}; no stacks of C code: {why}"
    try:
        return f"{head}; the stacks of C code:\n{c_stacks(core)}"
    finally:
        core.unlink(missing_ok=True)


def find_core(pattern: str, pid: int, started: float, directory: Path) -> tuple[Path | None, str]:
    """The core file of a process, or why there is none."""
    if pattern.startswith("|") or not pattern:
        return None, f"cores do not become files here (/proc/sys/kernel/core_pattern: {pattern!r})"
    name = pattern.replace("%p", str(pid)).replace("%%", "%")
    parts = iter(name.split("%"))
    glob = next(parts) + "".join("*" + part[1:] for part in parts)  # what else the kernel writes into the name
    place = directory / glob  # absolute patterns stay what they are
    found = [one for end in ("", f".{pid}") for one in place.parent.glob(place.name + end)]
    recent = [one for one in found if one.is_file() and one.stat().st_mtime >= started]
    if not recent:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        return None, f"there is no core file {place} (the hard limit of its size: {hard})"
    return max(recent, key=lambda one: one.stat().st_mtime), ""


def c_stacks(core: Path) -> str:
    """gdb's stacks of all threads; the one that crashed comes first."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return f"gdb is not here to read {core.name} ({core.stat().st_size} bytes)"
    command = [gdb, "-batch", "-nx", "-ex", "bt 40", "-ex", "thread apply all bt 12", sys.executable, str(core)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=GDB_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"gdb read {core.name} for over {GDB_TIMEOUT:g} s"
    lines = [line[:WIDTH] for line in done.stdout.splitlines() if line.startswith(("#", "Thread", "Program"))]
    if not lines:
        return f"gdb found no stacks in {core.name}: {done.stderr.strip()[-WIDTH:]}"
    left_out = [f"... and {len(lines) - LINES} lines more"] if len(lines) > LINES else []
    return "\n".join(lines[:LINES] + left_out)


def _at_most(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)
