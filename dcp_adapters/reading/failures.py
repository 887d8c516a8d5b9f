"""How a reader that fails tells the planner, whose other ranks may be waiting for this one."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import LoadPlanner


@contextmanager
def failures_told(planner: LoadPlanner) -> Iterator[None]:
    """A block that reads: a planner with a method `read_failed(error)` hears of an error before it leaves."""
    try:
        yield
    except BaseException as error:  # CheckpointException is none of Exception's
        failed = getattr(planner, "read_failed", None)
        if failed is not None:
            failed(error)
        raise
