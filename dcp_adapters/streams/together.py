"""Steps that may fail on one rank, in a pass that all ranks walk through together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dcp_adapters.streams.transport import Sender, WeightStreamError
from fsdp_hooks.ranks.across_ranks import Ranks, on_all


@contextmanager
def abort_on_error(sender: Sender | None) -> Iterator[None]:
    """A block after whose error the sender has told the receiver that no more comes."""
    try:
        yield
    except BaseException as error:
        if sender is not None:
            sender.abort(error)
        raise


def attempt(failed: list[Exception], step: Callable[..., None], *values: Any) -> None:
    """A step of one rank; after an error, the gathers go on for the sake of the other ranks."""
    try:
        step(*values)
    except Exception as error:  # noqa: BLE001 - raised on all ranks when everything is gathered
        failed.append(error)


def step_together(group: Ranks, step: Callable[[], None]) -> None:
    """A step that may fail on one rank; its error is raised on all, and a WeightStreamError stays one."""

    def told() -> str | None:
        try:
            step()
        except WeightStreamError as error:
            return str(error)
        return None

    text = next(filter(None, on_all(group, told)), None)
    if text is not None:
        raise WeightStreamError(text)


def raise_first(failed: list[Exception]) -> None:
    """Raise what was put on the list."""
    if failed:
        raise failed[0]
