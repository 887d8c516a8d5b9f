"""What figures depend on beside the code: recorded with every result."""

import os
import platform
from pathlib import Path

import torch


def machine_and_versions() -> dict[str, dict[str, object]]:
    """The processor as the kernel names it, and the versions of Python and torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
