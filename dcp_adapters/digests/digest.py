"""digest: one short value for all weights of a model, a checkpoint, a directory, an engine, or a stream."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dcp_adapters.digests.received import ReceivedSource
from dcp_adapters.digests.shares import Shares
from dcp_adapters.digests.stored import source_digests, stored_source
from dcp_adapters.digests.summing import sum_over_ranks, tell_failure
from dcp_adapters.hf.models.architectures import architecture_of
from dcp_adapters.hf.models.prefixes import under
from dcp_adapters.hf.sources.live_source import flat_state, live_tensors
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import entry_of
from dcp_adapters.records.weight_sums import PartSum, tensor_digest, whole_digest
from fsdp_hooks.ranks.across_ranks import Ranks, chosen_ranks
from fsdp_hooks.ranks.waiting import waited_for
from fsdp_hooks.torch_private import without_torch_function
from fsdp_hooks.wrappers import plain_name, plain_state_dict


def digest(  # noqa: PLR0913 - options of one operation
    weights: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    like: nn.Module | Mapping[str, Any] | None = None,
    prefix: str | None = None,
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> str:
    """Return one value for all weights: equal if all tensors have equal names, bytes, dtypes and shapes.

    It does not depend on the number of ranks, on how the weights are sharded, on the device, on the order of names, or
    on where the weights are: a model, its checkpoint and the directory that an engine loads have the same digest. A
    change of one word of 4 bytes is always found, other accidental changes but for a chance of about 2^-32 (2^-27 in
    the worst case known, see fsdp_hooks/kernels/byte_sums.py). It is no cryptographic hash.

    Payloads and scales of quantized tensors count, and the dense tensors beside them; the other fields of a recipe and
    the histories of delayed scales do not. Tied tensors count under each of their names. A model with
    storage="high_precision" has the digest of its dense shards.

    Of a live model, a collective: one all-reduce for the whole model (two for more than about 4,000 tensors), and no
    tensor is gathered. What several ranks hold (replicas, scales that shards share) counts once, as the first of them
    has it; whether the rest have the same is not asked. Of a path, each rank reads for itself.

    Args:
        weights: a module or a state dict, plain or sharded; the path of a checkpoint or of a directory of safetensors;
            with `config`, tensors that an engine or a stream received.
        config: the content of the config.json that an export writes beside these tensors; {} if none is quantized.
            `weights` is then a mapping from the names in the export's files to plain tensors on any device.
        like: a model or its state dict that a directory, or received tensors, are compared with. Weights of all experts
            that it has are put together from the experts' linears. A name that only a model (not its state dict) has
            gets the digest of the tensor that it is tied to there.
        prefix: take only names that begin with it, and cut it off; None: find the subtree of a nested state dict or of
            a checkpoint that holds the quantized weights.
        group: the ranks that hold a live model; None: all.
        no_dist: this process alone has the weights, whole, and no other rank takes part.

    Returns:
        32 hex digits.

    Raises:
        ValueError: an entry is no tensor, or its bytes are not known; the weights are in several subtrees; shards that
            are not boxes; the group's ranks do not hold the whole model. CheckpointUnusable for a checkpoint that
            cannot be read; for a directory and received tensors as `import_hf`.
        RuntimeError: on all ranks: they hold other tensors, or one of them failed.
        TypeError: `weights` is anything else, or an argument does not go with it.

    Example:
        ```python
        >>> model = nn.Linear(64, 64)
        >>> quantize_(model, MXFP8BlockScaling())
        >>> dcp.save(model.state_dict(), checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> digest(model) == digest("step-1000")
        True
        ```
    """
    found = _digests("digest", weights, config=config, like=like, prefix=prefix, group=group, no_dist=no_dist)
    return whole_digest(found)


def tensor_digests(  # noqa: PLR0913 - those of digest
    weights: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    like: nn.Module | Mapping[str, Any] | None = None,
    prefix: str | None = None,
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> dict[str, str]:
    """Return the digest of each tensor: name -> 32 hex digits, in the order of the model; arguments as `digest`.

    Where two models' digests differ, the first entry that differs says which tensor does. A tensor's digest does not
    depend on its name.

    Example:
        ```python
        >>> before = {"a": torch.zeros(4), "b": torch.ones(4)}
        >>> old, new = tensor_digests(before), tensor_digests({**before, "b": torch.zeros(4)})
        >>> [name for name in old if old[name] != new[name]]
        ['b']
        ```
    """
    return _digests("tensor_digests", weights, config=config, like=like, prefix=prefix, group=group, no_dist=no_dist)


def _digests(  # noqa: PLR0913 - those of digest
    caller: str,
    weights: nn.Module | Mapping[str, Any] | str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None,
    like: nn.Module | Mapping[str, Any] | None,
    prefix: str | None,
    group: dist.ProcessGroup | None,
    no_dist: bool,
) -> dict[str, str]:
    """What `tensor_digests` returns; errors name the caller."""
    if isinstance(weights, str | os.PathLike):
        if config is not None:
            raise TypeError(f"{caller}: config= goes with tensors in memory; a directory has a config.json of its own")
        return _add_tied(source_digests(stored_source(weights, prefix, _wanted(like), architecture_of(like))), like)
    if config is not None:
        if not isinstance(weights, Mapping) or prefix is not None:
            raise TypeError(f"{caller}: with config=, expected a mapping from names to plain tensors, and no prefix")
        return _add_tied(source_digests(ReceivedSource(weights, config, _wanted(like), architecture_of(like))), like)
    if like is not None:
        raise TypeError(f"{caller}: like= goes with a directory or with config=; a live model has its own names")
    ranks = chosen_ranks(caller, group, no_dist=no_dist)
    with waited_for(ranks, caller):
        return _live_digests(caller, weights, prefix, ranks)


def _live_digests(caller: str, weights: Any, prefix: str | None, group: Ranks) -> dict[str, str]:
    try:
        state_dict = _state_dict(caller, weights)
        with without_torch_function():  # attributes of a subclass go through it, thousands of times
            flat, prefix = flat_state(state_dict, prefix)
            tensors = live_tensors(under(prefix, flat, "the state dict"), what="a digest")
            shares = Shares(group).of(tensors)
    # The other ranks are on their way into the all-reduce, and would wait there.
    except Exception:
        tell_failure(group)
        raise
    parts: dict[str, list[PartSum]] = {}
    for share, total in zip(shares, sum_over_ranks(caller, shares, group), strict=True):
        parts.setdefault(share.name, []).append(PartSum(share.part, share.dtype, share.shape, total))
    return {name: tensor_digest(parts[name]) for name in tensors}


def _state_dict(caller: str, weights: Any) -> Mapping[str, Any]:
    if isinstance(weights, nn.Module):
        return plain_state_dict(weights)
    # The result of a calibration, which is no module.
    if not isinstance(weights, Mapping) and hasattr(weights, "state_dict"):
        weights = weights.state_dict()
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"{caller}: expected a module, a state dict or a path, got {type(weights).__name__}; tensors that an "
            "engine or a stream received go with config="
        )
    return weights


def _like_tensors(like: nn.Module | Mapping[str, Any] | None) -> dict[str, Tensor]:
    if like is None:
        return {}
    state = plain_state_dict(like, keep_vars=True) if isinstance(like, nn.Module) else like
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _wanted(like: nn.Module | Mapping[str, Any] | None) -> dict[str, Entry]:
    """Return the entries of a model's tensors, by the names of the plain model."""
    return {name: entry_of(name, value) for name, value in _like_tensors(like).items()}


def _add_tied(digests: dict[str, str], like: nn.Module | Mapping[str, Any] | None) -> dict[str, str]:
    """Return the digests, with those of names that `like` ties to a name that is there; directories leave these out."""
    # Tied tensors are one object in a model; in a state dict only if that was taken with `keep_vars=True`.
    names: dict[int, list[str]] = {}
    for name, value in _like_tensors(like).items():
        names.setdefault(id(value), []).append(name)
    for same in names.values():
        there = next((name for name in same if name in digests), None)
        if there is not None:
            digests |= {name: digests[there] for name in same if name not in digests}
    return digests
