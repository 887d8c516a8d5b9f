"""Tests that hold on a CPU and on a GPU alike: `@every_device` gives each a `device`, and the GPU's needs one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@contextmanager
def told_of_waits(mode: str) -> Iterator[None]:
    """Inside, an operation that makes the CPU wait for the GPU is a warning ("warn") or an error ("error").

    The first time, torch itself warns that this is a prototype; every warning is an error in tests.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
