"""Attentions: the modules of a model that write keys and values into a cache, found in the module tree.

An attention is a module whose forward takes a cache (`past_key_values`) and which is named so, by its class or in the
model. Layers and models take a cache, too, and hand it on, so the innermost modules count.
"""

import inspect
from collections.abc import Mapping
from itertools import accumulate

from torch import nn

from fsdp_hooks.wrappers import plain_modules
from layerwise.stages.caller import caller

CACHES = ("past_key_values", "past_key_value", "layer_past")  # what the argument is called
WORDS = ("attention", "attn")
LATENT = ("kv_b_proj", "kv_a_proj_with_mqa")  # linears of multi-head latent attention


def cache_argument(module: nn.Module) -> tuple[int, str] | None:
    """Return the position and the name of the argument of a forward that takes a cache; None if none does."""
    names = list(inspect.signature(module.forward).parameters)
    return next(((place, name) for place, name in enumerate(names) if name in CACHES), None)


def find_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Map fqns to attentions, in the order of the module tree.

    Raises:
        ValueError: there is none, or the cache of one holds something else in an engine than in the model.
    """
    found = {fqn: module for fqn, module in plain_modules(model) if _is_attention(fqn, module)}
    around = {outer for fqn in found for outer in ("", *accumulate(fqn.split("."), "{}.{}".format)) if outer != fqn}
    inner = {fqn: module for fqn, module in found.items() if fqn not in around}
    if not inner:
        raise ValueError(
            f"{caller()}: kv_cache: the model has no attention that takes past_key_values, so nothing shows what its "
            "cache would hold; expected modules like those of transformers, which call past_key_values.update(keys, "
            "values, ...). Leave kv_cache out for this model"
        )
    _check_caches(inner)
    return inner


def _is_attention(fqn: str, module: nn.Module) -> bool:
    names = (type(module).__name__.lower(), fqn.rpartition(".")[2].lower())
    return any(word in name for word in WORDS for name in names) and cache_argument(module) is not None


def _check_caches(attentions: Mapping[str, nn.Module]) -> None:
    """Refuse what is known to have another cache, now rather than when its layer's turn comes."""
    for fqn, module in attentions.items():
        if any(name in LATENT for name, _ in module.named_children()):
            raise ValueError(
                f"{caller()}: kv_cache: {fqn} is latent attention, for which engines cache the latent vectors under "
                "one scale, and not keys and values; leave kv_cache out for this model"
            )
        if getattr(module, "is_kv_shared_layer", False):
            raise ValueError(
                f"{caller()}: kv_cache: {fqn} takes the keys and values of another layer and has none of its own, but "
                "engines give each attention scales of its own; leave kv_cache out for this model"
            )
