"""Which function was called, for messages: `calibrate` and `search_formats` go through the same stages.

A message names the function that its reader has called. What raises it may be far below, and knows only that somebody
is going through stages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CALLER = ContextVar("caller", default="calibrate")


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Inside, the function that was called has this name."""
    token = _CALLER.set(name)
    try:
        yield
    finally:
        _CALLER.reset(token)


def caller() -> str:
    """Return the function that was called; `calibrate` if none has said so, as in checks of a config."""
    return _CALLER.get()
