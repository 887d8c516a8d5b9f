"""Log lines around long work: when it begins, and when it ends, with bytes and seconds.

Nothing is measured, and no text is made, where the logger does not let INFO through.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_work(log: logging.Logger, what: str, *args: object, nbytes: int | None = None) -> Iterator[None]:
    """A block of work; `what` % `args` names it, `nbytes` is how much it reads or writes, if that is known."""
    if not log.isEnabledFor(logging.INFO):
        yield
        return
    size = "" if nbytes is None else f" ({nbytes} bytes)"
    log.info(f"{what}: begins%s", *args, size)
    began = time.perf_counter()
    try:
        yield
    except BaseException as error:
        log.info(f"{what}: failed after %.2f s: %s", *args, time.perf_counter() - began, type(error).__name__)
        raise
    log.info(f"{what}: ended after %.2f s%s", *args, time.perf_counter() - began, size)
