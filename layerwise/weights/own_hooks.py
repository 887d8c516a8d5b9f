"""Hooks that are not FSDP's: they belong to the user of a model, and may expect that it computes something for real.

If a module is only called for the sake of FSDP's hooks or to be recorded, it has no output. Hooks of the user run
all the same, since some come in pairs (one that begins something, one that ends it), but may fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from fsdp_hooks.torch_private import hook_tables

FSDP = "torch.distributed.fsdp."
KINDS = ("forward_pre_hooks", "forward_hooks")


def is_fsdp(hook: Any) -> bool:
    """Return whether FSDP has registered a hook."""
    return str(getattr(hook, "__module__", "")).startswith(FSDP)


@contextmanager
def own_hooks_may_fail(module: nn.Module, *kinds: str) -> Iterator[None]:
    """Inside, it does not matter what hooks of some of KINDS raise or return, unless they are FSDP's."""
    tables = hook_tables(module)
    own = {kind: {key: hook for key, hook in tables[kind].items() if not is_fsdp(hook)} for kind in kinds}
    try:
        for kind in kinds:
            tables[kind].update({key: _try(hook) for key, hook in own[kind].items()})
        yield
    finally:
        for kind in kinds:
            # A hook that removed itself inside must not come back.
            tables[kind].update({key: hook for key, hook in own[kind].items() if key in tables[kind]})


def _try(hook: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        with suppress(Exception):
            hook(*args)

    return run
