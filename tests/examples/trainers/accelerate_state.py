"""accelerate in a rank of the tests: its singletons and environment variables last for one block, as for one script."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState


@contextmanager
def launched() -> Iterator[None]:
    """The environment that torchrun would make for these ranks, and none of what accelerate leaves behind."""
    before = dict(os.environ)
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    _forget()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
