"""How a model runs while it is looked at: in eval mode, without gradients, as it is written."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def set_eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context manager in which the model runs without dropout, gradients and compiled code.

    Afterwards the modules that were training are so again.
    """
    training = [module for module in model.modules() if module.training]
    cached = torch.is_autocast_cache_enabled()
    try:
        # Compiled code neither shows what reaches its linears nor leaves room for stand-ins. Under a user's inference
        # mode, sums would be inference tensors, to which nothing could be added later.
        with _force_eager(), torch.inference_mode(mode=False), torch.no_grad():
            model.eval()
            # Weights change in the meantime, and the cache would keep their old values in the lower precision.
            torch.set_autocast_cache_enabled(False)
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        # Each by itself: `model.train()` would also set those that the user had in eval mode.
        for module in training:
            module.training = True


def _force_eager() -> AbstractContextManager[object]:
    """Have nothing compiled run inside. A stance holds from where it is made, so make it where it is entered."""
    # To import dynamo takes seconds, and a model that was compiled has imported it.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
