"""Scales of a key/value cache: the option that asks for them, and the numbers that engines read.

    key in the cache = round(key / k_scale), FP8 E4M3      k_scale = amax / 448, values alike with v_scale

The formula is that of `Float8CurrentScaling(granularity="tensor")`, and a scale is 1 if all of it is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.statistics.key_values import Amaxes
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.spec.registry import encode

GRANULARITIES = ("tensor", "head")
FORMULA = Float8CurrentScaling(granularity="tensor")


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """The format of a key/value cache whose scales are calibrated.

    Attributes:
        dtype: of the cache's elements: torch.float8_e4m3fn.
        granularity: "tensor", an attention has one scale for its keys and one for its values; "head", one of each for
            every head of keys and values.

    Raises:
        ValueError: another dtype or granularity.

    Example:
        ```python
        >>> KVCache(granularity="head")  # calibrate(..., kv_cache=KVCache(granularity="head"))
        KVCache(dtype=torch.float8_e4m3fn, granularity='head')
        ```
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: str = "tensor"

    def __post_init__(self) -> None:
        if self.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"KVCache: dtype={self.dtype} is not torch.float8_e4m3fn, for which alone engines read scales"
            )
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"KVCache: granularity={self.granularity!r} is not one of {', '.join(map(repr, GRANULARITIES))}"
            )

    def to_json(self) -> dict[str, str]:
        """Return plain JSON values."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "granularity": self.granularity}


def kv_scales(kv_cache: KVCache, amaxes: Mapping[str, Amaxes]) -> dict[str, Tensor]:
    """Map `<attention>.k_scale` and `.v_scale` of each attention to the scale, fp32 [] or [heads]."""
    return {
        f"{fqn}.{what}_scale".lstrip("."): (
            torch.stack(list(map(_scale, own[what]))) if kv_cache.granularity == "head" else _scale(max(own[what]))
        )
        for fqn, own in amaxes.items()
        for what in ("k", "v")
    }


def _scale(amax: float) -> Tensor:
    """Return fp32 []."""
    # The format's own formula makes the scale; the row's values take no part, as the amax is given.
    row = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
    return encode(row, FORMULA, torch.tensor(amax, dtype=torch.float32, device="cpu"))["scale"].reshape(())
