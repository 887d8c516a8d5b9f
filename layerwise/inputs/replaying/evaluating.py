"""How a model runs while it is looked at: in eval mode, without gradients, as it is written."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs without dropout and gradients; afterwards the modules that were training are again.

    What was compiled runs as it is written, since compiled code neither shows what reaches its linears nor leaves room
    for stand-ins. Weights change while it runs, so autocast keeps no copies of them.
    """
    training = [module for module in model.modules() if module.training]
    cached = torch.is_autocast_cache_enabled()
    try:
        # inference tensors could not be added to later
        with _as_written(), torch.inference_mode(mode=False), torch.no_grad():
            model.eval()
            torch.set_autocast_cache_enabled(False)
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module in training:
            module.training = True


def _as_written() -> AbstractContextManager[object]:
    """Nothing compiled runs inside. A stance holds from where it is made, so make it where it is entered."""
    # Whoever has compiled something has imported dynamo, which takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
