"""Key/value caches that a model is called with: before every call they are set back to what they held at first.

A layer is called several times on the same batch; if each call appended to the cache, no two calls would be alike. So
an empty cache is not passed on at all (None instead: attention without a past is the same), and one that holds a past
is set back to it. Whatever has `get_seq_length` and `update`, as in transformers, is a cache.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerwise.inputs.values.stores import version


def is_cache(value: Any) -> bool:
    """Tell whether a value is a key/value cache."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("get_seq_length", "update")
    )


def is_empty(cache: Any) -> bool:
    """Tell whether nothing is in a cache."""
    try:
        return int(cache.get_seq_length()) == 0
    except ValueError:  # it has no layer with a length
        return False


class CacheState:
    """What a cache holds at this moment."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        # By reference, without copies of tensors: a cache that appends makes new tensors, and leaves these as they are.
        layers = getattr(cache, "layers", None)
        self._layers = [(layer, _copy(vars(layer))) for layer in layers] if isinstance(layers, list) else None
        self._length = None if self._layers is not None else cache.get_seq_length()
        # A write shows in the tensor's version; torch counts none for inference tensors, so for those in the values.
        self._were = [(one, one.clone() if one.is_inference() else version(one)) for one in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Return the past it holds, layer by layer, as far as the cache shows its layers."""
        states = [state for _, state in self._layers or ()]
        return [value for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)]

    def restore(self) -> None:
        """Set the cache back to this state.

        Raises:
            NotImplementedError: the past itself was overwritten, as caches of a fixed size do it.
        """
        if any(version(one) != was if isinstance(was, int) else not torch.equal(one, was) for one, was in self._were):
            raise NotImplementedError(
                f"a {type(self.cache).__name__} with a past is written in place by the layers, so the same batch "
                "cannot be run twice on it; pass a cache that grows by appending (DynamicCache)"
            )
        if self._layers is None:
            if self.cache.get_seq_length() != self._length:
                self.cache.crop(self._length)
            return
        del self.cache.layers[len(self._layers) :]
        for layer, state in self._layers:
            # All attributes, not only keys and values: a cache's layer also counts, and notes whether it was set up.
            layer.__dict__.clear()
            layer.__dict__.update(_copy(state))


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in state.items()}
