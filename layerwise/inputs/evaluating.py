"""How a model runs while it is looked at: in eval mode, without gradients, as it is written."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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
    # Whoever has compiled something has imported dynamo, which takes seconds.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        model.eval()
        torch.set_autocast_cache_enabled(False)
        # inference tensors could not be added to later
        with eager, torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module in training:
            module.training = True
