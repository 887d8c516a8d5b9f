"""The largest keys and values that attentions write into their caches, head by head, while a stage runs.

Keys enter a cache as attention reads them: normed, rotated, and before heads are repeated for groups of queries. What a
`k_proj` returns is none of this, so a cache is watched. In every call an attention gets a stand-in for its cache, with
or without one behind it:

    past_key_values.update(keys, values, layer)    keys, values [batch, heads, tokens, dim]

A cache that is there gets the call, and what it returns counts, too: the past that it held before.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcp_adapters.plain.words import few_of
from layerwise.stages.attentions import cache_argument
from layerwise.stages.caller import caller

Amaxes = Mapping[str, Sequence[float]]  # "k" and "v" -> the largest magnitude of each head


class KeyValues:
    """Watches the caches of attentions.

    Args:
        attentions: fqn -> module.
    """

    def __init__(self, attentions: Mapping[str, nn.Module]) -> None:
        self._attentions = attentions
        self._amaxes: dict[str, dict[str, Tensor]] = {}  # fqn -> "k", "v" -> fp32 [heads]
        self._slots: dict[str, Any] = {}  # fqn -> the number of the cache's layer that it writes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the caches of a stage that runs are watched."""
        with ExitStack() as hooks:
            for fqn, module in self._attentions.items():
                handle = module.register_forward_pre_hook(self._hook(fqn, module), with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def agree(self, group: dist.ProcessGroup | None) -> dict[str, Amaxes]:
        """Map fqns to amaxes over all batches of all ranks. Call it on all ranks alike (None: a single process).

        Raises:
            NotImplementedError: an attention wrote nothing on any rank, or not the same heads on all.
            RuntimeError: keys or values are not finite.
        """
        if not self._attentions:
            return {}
        # Objects, since ranks may not have seen the same attentions, nor any batch.
        own = {fqn: {what: amax.tolist() for what, amax in of.items()} for fqn, of in self._amaxes.items()}
        everyone: list[Any] = [own]
        if group is not None:
            everyone = [None] * group.size()
            dist.all_gather_object(everyone, own, group=group)
        found = {fqn: [theirs[fqn] for theirs in everyone if fqn in theirs] for fqn in self._attentions}
        self._check(found)
        return {
            fqn: {
                what: [max(heads) for heads in zip(*(one[what] for one in ranks), strict=True)] for what in ("k", "v")
            }
            for fqn, ranks in found.items()
        }

    def _hook(self, fqn: str, module: nn.Module) -> Callable[..., Any]:
        argument = cache_argument(module)
        assert argument is not None
        place, name = argument

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            cache = args[place] if place < len(args) else kwargs.get(name)
            if hasattr(cache, "cross_attention_cache"):
                raise NotImplementedError(
                    f"{caller()}: kv_cache: {fqn} gets a {type(cache).__name__}, one cache for itself and one for what "
                    "the encoder returned; leave kv_cache out for this model"
                )
            stand_in = _StandIn(self, fqn, cache)
            if place < len(args):
                return (*args[:place], stand_in, *args[place + 1 :]), kwargs
            return args, {**kwargs, name: stand_in}

        return hook

    def note(self, fqn: str, keys: Tensor, values: Tensor) -> None:
        """Take what an attention writes, or has written."""
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise NotImplementedError(
                f"{caller()}: kv_cache: {fqn} caches keys {list(keys.shape)} and values {list(values.shape)}, expected "
                "[batch, heads, tokens, dim] of the same heads and tokens; leave kv_cache out for this model"
            )
        if not keys.numel() or not values.numel():
            return
        held = self._amaxes.setdefault(fqn, {})
        # they outlive the batch: no inference tensors
        with torch.inference_mode(mode=False), torch.no_grad():
            for what, x in (("k", keys), ("v", values)):
                amax = x.detach().abs().amax(dim=(0, 2, 3)).float()  # [heads]
                held[what] = torch.maximum(held[what], amax) if what in held else amax

    def note_slot(self, fqn: str, slot: Any) -> None:
        """Take the number of the layer of a cache into which an attention writes; it must have one of its own."""
        before = self._slots.setdefault(fqn, slot)
        if before != slot:
            raise NotImplementedError(
                f"{caller()}: kv_cache: {fqn} caches its keys and values as layer {before} and as layer {slot}, and "
                "engines may have scales of their own for each; leave kv_cache out for this model"
            )

    def _check(self, found: Mapping[str, Sequence[Amaxes]]) -> None:
        """Raise, on all ranks alike, if what was seen gives no scales."""
        silent = [fqn for fqn, ranks in found.items() if not ranks]
        if silent:
            raise NotImplementedError(
                f"{caller()}: kv_cache: {few_of(silent)}: no keys and values came to a cache in any batch of any rank: "
                "they are those of another layer, or are cached in another way than by past_key_values.update(keys, "
                "values, ...). Engines would run with scales that fit nothing; leave kv_cache out for this model"
            )
        for fqn, ranks in found.items():
            if len({len(one[what]) for one in ranks for what in one}) > 1:
                raise NotImplementedError(
                    f"{caller()}: kv_cache: {fqn} has other numbers of heads on other ranks; leave kv_cache out"
                )
            for what, word in (("k", "keys"), ("v", "values")):
                if not all(math.isfinite(amax) for one in ranks for amax in one[what]):
                    raise RuntimeError(
                        f"{fqn}: its {word} hold values that are not finite. Look for an overflow in the layers before "
                        "it (load the model in bfloat16 or float32), or for broken weights"
                    )


class _StandIn:
    """Stands for the cache of one attention in one call; `cache` is None if there is none."""

    def __init__(self, watch: KeyValues, fqn: str, cache: Any) -> None:
        self._watch, self._fqn, self._cache = watch, fqn, cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note keys and values, and hand them on."""
        slot = args[0] if args else kwargs.get("layer_idx")
        self._watch.note_slot(self._fqn, slot)
        self._watch.note(self._fqn, key_states, value_states)
        if self._cache is None:
            return key_states, value_states
        held = self._cache.update(key_states, value_states, *args, **kwargs)
        self._watch.note(self._fqn, *held[:2])
        return held

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        """Return how many tokens the cache holds."""
        return 0 if self._cache is None else self._cache.get_seq_length(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if self._cache is not None:
            return getattr(self._cache, name)
        raise NotImplementedError(
            f"{caller()}: kv_cache: {self._fqn} asks its cache for {name!r}; expected that it calls "
            "past_key_values.update(keys, values, ...) and nothing else. Leave kv_cache out for this model"
        )
