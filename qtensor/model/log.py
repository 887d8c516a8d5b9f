"""What `quantize_` and `quantized_model_init` log: what became quantized, what stayed dense and why, and the bytes.

The logger is `qtensor.model.log`. Callers ask `LOG.isEnabledFor` first, so nothing is counted while it is off.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)


def log_quantized(what: str, recipe: Recipe, weights: Sequence[Tensor], dense: Iterable[tuple[str, str]]) -> None:
    """Log at INFO how many weights were quantized and what they take up, at DEBUG each linear that stays dense.

    Args:
        what: the operation.
        recipe: of the weights.
        weights: before or after quantizing; under storage="high_precision" they count as they are gathered.
        dense: name of each linear that stays dense, and why.
    """
    dense = list(dense)
    before = sum(weight.numel() * weight.dtype.itemsize for weight in weights)
    after = sum(
        math.prod(spec.shape(weight.shape)) * spec.dtype.itemsize for weight in weights for spec in specs_of(recipe)
    )
    reasons = ", ".join(f"{count} {why}" for why, count in Counter(why for _, why in dense).items())
    LOG.info(
        "%s: %d weights as %s, %d bytes before and %d after; linears that stay dense: %s",
        *(what, len(weights), recipe, before, after, reasons or "none"),
    )
    for name, why in dense:
        LOG.debug("%s: %s stays dense: %s", what, name, why)


def log_built(recipe: Recipe, linears: Iterable[nn.Module]) -> None:
    """Do `log_quantized` for linears built under `quantized_model_init`; nobody has named them yet."""
    weights: dict[int, Any] = {}  # by id: linears may share one
    dense = []
    for linear in linears:
        held: Any = linear._parameters.get("weight")
        if isinstance(held, QuantizedTensor | HighPrecisionWeight):
            weights[id(held)] = held
        else:
            dense.append((f"a {type(linear).__name__}", "tied, or a router"))
    log_quantized("quantized_model_init", recipe, list(weights.values()), dense)
