"""What figures depend on besides the code; recorded with every result."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

LIBRARIES = ("torch", "triton", "torchao", "bitsandbytes", "nvidia-modelopt", "transformers", "safetensors", "numpy")


def machine_and_versions() -> dict[str, dict[str, object]]:
    """The processor as the kernel names it, who else works on it, and the versions of Python and the libraries."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    machine: dict[str, object] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),  # processes that ran or waited in the minute before
        "platform": platform.platform(),
    }
    if torch.cuda.is_available():
        machine["cuda"] = torch.cuda.get_device_name()
        driver = Path("/proc/driver/nvidia/version")
        machine["driver"] = driver.read_text().splitlines()[0] if driver.exists() else "unknown"
    versions: dict[str, object] = {"python": platform.python_version()}
    return {"machine": machine, "versions": versions | {name: found for name in LIBRARIES if (found := _version(name))}}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
