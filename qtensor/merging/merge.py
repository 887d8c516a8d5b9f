"""Merge updates (trained adapters, say) into weights where they are: quantized, sharded, one weight at a time.

    W' = requantize(dequantize(W) + update)          in fp32, under the weight's own recipe

    every weight    values and update of this rank's piece  ->  claims on scales that shards share, finite or not
                    ->  one all-reduce for all weights
    every weight    the same sum again  ->  bytes under the agreed scales  ->  what was lost, in sums
                    ->  one all-reduce of the sums

The sum is computed twice, so that a dense copy exists of one weight at a time. Since a piece of an update holds the
bits of the whole one, and scales that shards share are agreed on as in an optimizer step, the bytes are those of one
process on any number of ranks. A weight whose update is zero everywhere keeps its bytes.

Weights that share one scale with an updated one (`share_scales`) take part without an update: the largest magnitude
among all of them decides, and those whose scale is another one then are requantized from the values that they hold.
Where one without an update leads, its rounded values decide, and may ask for another last bit of the scale.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_hooks.ranks.scale_partners import check_complete, pool
from fsdp_hooks.scale_sync import (
    MEETING,
    cuts_of,
    is_gathered,
    label_of,
    max_over_groups,
    meeting_of,
    parameters_at_rest,
    partners_of,
    sum_over_groups,
    tell_groups,
)
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.wrappers import PlainNames
from qtensor.merging.low_rank import LowRankUpdate
from qtensor.merging.merge_report import COLUMNS, MergeReport, line
from qtensor.merging.weight_merge import Moves, Update, WeightMerge, index_of
from qtensor.merging.written_memory import why_unwritable
from qtensor.spec.registry import APPEARANCE_DTYPES

WHAT = "merge_"


def merge_(
    model_or_named_params: nn.Module | Iterable[tuple[str, Tensor]], updates: Mapping[str, Update]
) -> MergeReport:
    """Add updates to weights in place, requantized under their own recipes; a collective if weights are sharded.

    Call it on all ranks, with the same updates. Weights may be quantized or dense, plain or sharded (FSDP2, HSDP, TP,
    FSDP2 x TP); every rank adds its own piece, in fp32. Dense weights are rounded to their dtype, and those of
    storage="high_precision" agree on the scales of their gathers. The bytes are those of one process. Weights that
    share one scale (`share_scales`) get one for all of them, those without an update, too. A preserved initial value
    becomes the merged value, and an amax history begins anew. Optimizers that hold masters of these
    weights notice the write, as they do any other.

    Args:
        model_or_named_params: a module, or pairs of a name and a parameter.
        updates: name of a parameter [.., N, K], with or without steps into wrappers -> its update: factors of low rank,
            or a callable. A callable gets the place of this rank's piece in the whole weight, one slice a dim, and
            returns that piece of the update, in any floating dtype. It is called twice, and must return the same values
            both times.

    Returns:
        What rounding took from each update; the same on all ranks.

    Raises:
        ValueError: an update for a weight that does not exist or has another shape, or that gives values that are not
            finite; a weight that is gathered, on the meta device, or no floating one; one that shares its scale with
            another that is not there. On all ranks; nothing has been written.
        RuntimeError: on all ranks of a group, if they have different updates, or one of them failed; nothing has
            been written, unless a callable failed at its second call, which the error says.

    Warns:
        UserWarning: less than a tenth of an update survived, or the weight is farther from weight + update than before,
            since rounding under new scales cost more than the update was. Not of updates that were trained through the
            merge (`LowRankUpdate.through_merge`): their training has seen what is written.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling()):
        ...     model = nn.Sequential(nn.Linear(64, 32))
        >>> report = merge_(model, {"0.weight": LowRankUpdate(a=torch.ones(4, 64), b=torch.ones(32, 4))})
        >>> report.weights[0].survived > 0.9  # how much of the update is left after rounding
        True
        ```
    """
    named = _named(model_or_named_params)
    weights, problems = _find_weights(named, _by_own_names(model_or_named_params, named, updates))
    problems += _add_partners(named, weights)
    exchange = _MergeExchange(named, weights)
    # the problem may be this rank's alone, while the others are on their way into the all-reduce
    if problems:
        exchange.tell()
        raise ValueError(f"merge_: {'; '.join(problems)}. No weight was written")
    with torch.no_grad():
        moves, agreed = exchange.agree()
        try:
            sums = [weight.write_merged(one, how) for weight, one, how in zip(weights, agreed, moves, strict=True)]
        # some weights are written by now, so that the other ranks have to hear of it
        except Exception:
            exchange.sum_up(None)
            raise
        report = MergeReport(tuple(exchange.lines(sums)))
    _warn(report)
    return report


class _MergeExchange:
    """What ranks exchange about some weights, in the order of their labels.

    All groups that cut any parameter take part, so that no rank waits for one with other updates, or without any.
    """

    def __init__(self, named: Mapping[str, Tensor], weights: Sequence[WeightMerge]) -> None:
        self.weights = weights
        # parameters on the meta device belong to no shard, and have no group that could reduce
        there = {name: param for name, param in named.items() if not param.is_meta}
        self.meeting = meeting_of([label_of(*pair) for pair in there.items()], cuts_of(list(there.values())))
        self.device = next((local_of(param).device for param in there.values()), torch.device("cpu"))
        self.sharing = [number for number, weight in enumerate(weights) if weight.claims]
        texts = [weight.label for weight in weights]
        self.labels = [(text,) for text in texts]
        self.claims = [(f"{texts[number]}, scales",) for number in self.sharing]
        self.groups = [weight.groups for weight in weights]
        self.over = [weights[number].sharing for number in self.sharing]

    def tell(self) -> None:
        """Take the place of `agree` on a rank that failed: the others raise instead of waiting for it."""
        tell_groups([MEETING], [self.meeting], self.device)

    def agree(self) -> tuple[list[Moves], list[Tensor | None]]:
        """Return of each weight what moves, and what its shards, and its partners, agreed on for scales they share.

        Raises:
            ValueError: on all ranks, if values are not finite.
        """
        try:
            seen = [weight.look_at() for weight in self.weights]
        except Exception:
            self.tell()
            raise
        values = [facts for facts, _ in seen] + [claim for _, claim in seen if claim is not None]
        # where all meet: one replica alone may see a NaN
        flags = [facts[1:].to(self.device) for facts, _ in seen]
        values.append(torch.cat([torch.zeros(1, dtype=torch.float32, device=self.device), *flags]).amax().view(1))
        labels, groups = [*self.labels, *self.claims, MEETING], [*self.groups, *self.over, self.meeting]
        largest, _ = max_over_groups(WHAT, labels, values, groups)
        facts = torch.stack(largest[: len(seen)]).tolist() if seen else []
        if broken := [weight.name for weight, (_, bad) in zip(self.weights, facts, strict=True) if bad]:
            raise ValueError(
                f"merge_: {', '.join(broken)}: the update, or the weight with it, is not finite; look for NaN, inf or "
                "an overflow in the adapter. No weight was written"
            )
        # a replica that this rank does not hold has a NaN
        if bool(largest[-1]):
            raise ValueError(
                "merge_: on another rank an update, or the weight with it, is not finite, see the error there. No "
                "weight was written"
            )
        names = [weight.partners and weight.partners.names for weight in self.weights]
        together = [names[number] for number in self.sharing]
        agreed: list[Tensor | None] = [None] * len(seen)
        # weights with partners have a tensor-wide scale, whose amax comes first
        pooled = pool(together, [1] * len(together), largest[len(seen) : -1])
        for number, one in zip(self.sharing, pooled, strict=True):
            agreed[number] = one
        own = [bool(moves) for moves, _ in facts]
        moving = {group for group, yes in zip(names, own, strict=True) if yes and group}
        moves = [Moves.of(yes, group in moving) for yes, group in zip(own, names, strict=True)]
        return moves, agreed

    def lines(self, sums: Sequence[Tensor]) -> Iterator[Any]:
        """Yield the entries of the report, from what this rank's pieces add up to."""
        for weight, one in zip(self.weights, self.sum_up(sums), strict=True):
            if weight.update is not None:
                seen = getattr(weight.update, "through_merge", False)
                yield line(weight.name, weight.param.numel(), one, through_merge=seen)

    def sum_up(self, sums: Sequence[Tensor] | None) -> list[list[float]]:
        """Add up sums over all pieces; return None on a rank that failed while it wrote, so that no other rank waits.

        Raises:
            RuntimeError: on those others.
        """
        if sums is None:
            devices = [weight.local.device for weight in self.weights]
            flagged = [torch.ones(COLUMNS + 1, dtype=torch.float64, device=device) for device in devices]
        else:
            flagged = [F.pad(one, (0, 1)) for one in sums]
        total = [one.tolist() for one in sum_over_groups(self.labels, flagged, self.groups)]
        if sums is not None and any(one[-1] for one in total):
            raise RuntimeError(
                "merge_: another rank failed while weights were written, see its error: some weights hold the merged "
                "values and some do not; load them again"
            )
        return [one[:-1] for one in total]


def _named(model_or_named_params: nn.Module | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    if not isinstance(model_or_named_params, nn.Module):
        return dict(model_or_named_params)
    # first: it puts the shards back, which are other parameters
    parameters_at_rest(model_or_named_params)
    return dict(model_or_named_params.named_parameters(remove_duplicate=False))


def _by_own_names(
    model_or_named_params: Any, named: Mapping[str, Tensor], updates: Mapping[str, Update]
) -> dict[str, Update]:
    """Return the updates by the names of `named_parameters()`, if some are by those of the plain model."""
    if not isinstance(model_or_named_params, nn.Module) or all(name in named for name in updates):
        return dict(updates)
    plain = PlainNames(model_or_named_params).plain
    own = {plain(name): name for name in named}
    return {name if name in named else own.get(name, name): update for name, update in updates.items()}


def _find_weights(named: Mapping[str, Tensor], updates: Mapping[str, Update]) -> tuple[list[WeightMerge], list[str]]:
    """Return the weights to be updated, and why some updates have none, in words."""
    weights, problems = [], []
    updated: dict[Tensor, str] = {}
    for name, update in updates.items():
        param = named.get(name)
        if param is None:
            problems.append(f"{name}: no parameter has this name; take those of named_parameters()")
        elif (why := _unfit(param, update)) is not None:
            problems.append(f"{name}: {why}")
        # a second update would begin from the result of the first, rounded twice
        elif param in updated:
            problems.append(f"{name} is the same parameter as {updated[param]}; give one update for both")
        else:
            updated[param] = name
            weights.append(WeightMerge(name, param, local_of(param), update, index_of(param)))
    return weights, problems


def _add_partners(named: Mapping[str, Tensor], weights: list[WeightMerge]) -> list[str]:
    """Add those that share one scale with weights, without an update; return why that cannot be, in words."""
    groups = {weight.partners.names for weight in weights if weight.partners is not None}
    if not groups:
        return []
    problems, known = [], {weight.param for weight in weights}
    for name, param in named.items():
        own = partners_of(param)
        if own is None or own.names not in groups or param in known:
            continue
        known.add(param)
        weights.append(WeightMerge(name, param, local_of(param), None, index_of(param)))
        if (why := _unfit(param, None)) is not None:
            problems.append(f"{name}, which shares one scale with updated weights: {why}")
    try:
        check_complete(WHAT, [weight.partners for weight in weights])
    except ValueError as error:
        problems.append(str(error).removeprefix(f"{WHAT}: "))
    return problems


def _unfit(param: Tensor, update: Update | None) -> str | None:
    """Return why a parameter cannot take an update, in words."""
    if is_gathered(param):
        return "it is gathered for a forward, not a shard; call reshard() on its FSDP module, and take it anew"
    if param.is_meta:
        return "it is on the meta device; call to_empty() and load it first"
    if param.dtype not in APPEARANCE_DTYPES:
        return f"it holds {param.dtype}; expected bf16, fp16, fp32 or a quantized weight"
    if (why := why_unwritable(param)) is not None:
        return why
    if isinstance(update, LowRankUpdate) and update.shape != tuple(param.shape):
        return f"the update has shape {update.shape}, the weight {tuple(param.shape)}"
    return None


def _warn(report: MergeReport) -> None:
    """Warn of weights for which the merge did nothing, or harm."""
    if lost := [weight.name for weight in report.weights if weight.lost]:
        warnings.warn(
            f"merge_: rounding took the update back from {', '.join(lost)}: nearly all of it is smaller than half a "
            "step of the format. Keep the adapter beside the weight, or merge into the dense weight and quantize that",
            stacklevel=3,
        )
    if worse := [weight.name for weight in report.weights if weight.worse]:
        warnings.warn(
            f"merge_: {', '.join(worse)} are farther from weight + update than before the merge: rounding under new "
            "scales cost more than the update is worth. Keep the adapter beside the weight, or merge into the dense "
            "weight and quantize that",
            stacklevel=3,
        )
