"""What can be proved of the code for GPUs without one: `make gpu-offline`.

Tensors without memory, on a device that is not there, go a quantized weight's way through a gather: whoever reads a
value, which would make the CPU wait for the GPU, or mixes devices, is found (test_fake_path.py). A model of such
tensors is trained under FSDP2, whose streams only write a log: what they ask of memory is proved to be ordered, and
every place where the CPU waits is known (test_streams.py, ordering.py).

Kernels are compiled as they are for a GPU (emitted.py), those written by hand are launched as they are (written.py).
What Triton code costs is counted in the machine code that ptxas makes of it (assembled.py, measured.py), and has
budgets (budgets.py, test_budgets.py). What it computes, Triton's interpreter shows (interpreted.py,
test_interpreted.py). Kernels that are broken by hand are refused (proving.py, test_proving.py). How often inductor
compiles is counted in test_compilations.py.

What calls take of the host is counted on a GPU that does nothing (idle.py, host_time.py, test_host_time.py): tensors of
torch's own without memory, Triton's own launches up to the driver.

torch is made to believe in a GPU (pretended.py) for the whole process, so these tests have an environment and a process
of their own. None of it tells whether a kernel runs: tests marked gpu do.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

ENVIRONMENT = ".venv-gpu-offline"


def unavailable() -> str:
    """Why nothing can be proved in this process; "" where it can."""
    if Path(sys.prefix).name != ENVIRONMENT:
        return f"torch must believe in a GPU here, in a process of its own: `make gpu-offline` runs it in {ENVIRONMENT}"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton for this platform"
    return "" if shutil.which("g++") else "a device guard for the GPU that is not there is C++ code, and needs g++"
