"""How calibration computes: products in full fp32, and on one thread if bytes depend on the order of additions."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside, products of fp32 matrices are computed in fp32: no TF32, no bf16, no autocast."""
    # Users turn on TF32 for CUDA, and bf16 for oneDNN on the CPU. Either would leave a Hessian few correct bits.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        # Autocast would cast the operands themselves, whatever the backends are told.
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, CPU kernels run on one thread: every rank on every machine has one, so all add in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
