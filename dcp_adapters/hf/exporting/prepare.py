"""From what a caller gives to a plan that all ranks share: what comes before files and before streams.

describe   rank 0 reads the model's description, all get it
open       every rank opens the source; values that decide scales of dense weights are brought together
plan       every rank plans; the plans, and what they are made of, must be the same on all ranks
"""

import hashlib
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from dcp_adapters.hf.exporting.config import ModelConfig, described_model
from dcp_adapters.hf.exporting.expected import UNKNOWN, Expected, check_outputs, expected_of
from dcp_adapters.hf.exporting.plan import ExportPlan, Request, plan_export
from dcp_adapters.hf.exporting.quantizing import Quantizing, quantized_on_the_way
from dcp_adapters.hf.files.engine_names import RENAMED, pieces_of
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KV_SCALES, Layout
from dcp_adapters.hf.layouts.registry import layouts_of_models
from dcp_adapters.hf.models.kept_dtypes import kept_names
from dcp_adapters.hf.models.prefixes import outer_prefix
from dcp_adapters.hf.sources.sources import JoinedSources, source_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.rotations import is_marker
from dcp_adapters.records.source import Source
from fsdp_hooks.kernels.digest import digest
from fsdp_hooks.ranks.across_ranks import Ranks, is_first, on_all, ranks_of
from fsdp_hooks.ranks.waiting import waited_for
from fsdp_hooks.release import VERSION
from qtensor.spec.registry import tensor_wide

FUSED_SCALES = ("raise", "requantize")
# Models with Conv1D of transformers, and the names of these modules: no layout has their [K, N] quantized.
CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
CONV1D = ("c_attn", "q_attn", "c_proj", "c_fc")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a caller wants exported.

    caller: its name, for messages. given, rest, dtype, adapters: as of export_hf. group: the ranks that take part.
    max_shard_size: bytes of a file. quantizing: which dense weights are quantized on their way, and how; None: none.
    """

    caller: str
    given: Any
    layout: Layout
    described: ModelConfig
    rest: Any = None
    prefix: str | None = None
    requantize: bool = False
    max_shard_size: int
    check: bool = True
    dtype: torch.dtype | None = None
    quantizing: Quantizing | None = None
    adapters: str = "raise"
    group: Ranks = None

    @cached_property
    def sound(self) -> list[Mapping[str, tuple[int, ...]]]:
        """Return the weights of plans that were found to be as expected; a list that grows."""
        return []

    @cached_property
    def expected(self) -> Expected:
        """Return what is known of the files; found once, by each rank for itself."""
        return expected_of(self.described, described_model(self.given, self.prefix), self.layout)


def requantizes(caller: str, fused_scales: str) -> bool:
    """Return whether `fused_scales=` asks to requantize. Raises ValueError for an unknown value."""
    if fused_scales not in FUSED_SCALES:
        raise ValueError(f'{caller}: fused_scales={fused_scales!r} is not one of "raise", "requantize"')
    return fused_scales == "requantize"


def prepared(asked: Asked) -> tuple[Source, ExportPlan]:
    """Open the source and plan, on all ranks alike; nothing is gathered yet.

    Raises:
        ValueError: as of export_hf, with the same text on all ranks.
    """
    opened: list[Source] = []
    # Two rounds: a tensor-wide scale is part of the plan, and needs the largest magnitude over all ranks.
    amaxes: Sequence[Mapping[str, float]] = []
    if asked.quantizing is not None:
        with waited_for(asked.group, asked.caller):
            amaxes = on_all(asked.group, lambda: _open(asked, opened))
    held: list[tuple[Source, ExportPlan]] = []

    def plan() -> Told:
        source = opened[0] if opened else _joined_sources(asked)
        source.check_spanned(asked.group)
        if asked.quantizing is not None:
            source = quantized_on_the_way(source, asked.quantizing, amaxes)
        request = _request(source, asked)
        check_names(source.entries, asked.described, asked.layout, asked.expected)
        planned = plan_export(source.entries, request)
        if planned.weights not in asked.sound:  # a stream plans the same in each pass
            check_outputs(planned, asked.expected, tied=request.tied, rest=asked.rest is not None)
            asked.sound.append(planned.weights)
        held.append((source, planned))
        return Told(_alike_digests(source, request, asked.group), _digests_of_shared(source, asked.group))

    with waited_for(asked.group, asked.caller):
        told = on_all(asked.group, plan)
    # Before any gather: ranks with different plans would wait for each other in different collectives.
    _check_same(asked.caller, told)
    _check_shared(asked.caller, held[0][0], told, asked.group)
    return held[0]


def _request(source: Source, asked: Asked) -> Request:
    kept: frozenset[str] = frozenset()
    if asked.dtype is not None:
        given = (asked.given, asked.rest)
        own = {name: source.own_name(name) for name in source.entries}
        config = asked.described.values
        kept, told = kept_names(source.entries, own, asked.dtype, sources=given, prefix=asked.prefix, config=config)
        if told is not None and is_first(asked.group):
            # The level counts the calls from here up to the caller of export_hf, through `on_all`.
            warnings.warn(f"{asked.caller}: dtype={asked.dtype}: {told}", stacklevel=6)
    return Request(
        asked.layout,
        dict(_scales(source)),
        {"name": "qtensor", "version": VERSION},
        asked.max_shard_size,
        asked.described.tied,
        asked.requantize,
        asked.dtype,
        kept,
        asked.expected.names,
        asked.expected.asks,
    )


def _open(asked: Asked, opened: list[Source]) -> Mapping[str, float]:
    assert asked.quantizing is not None
    opened.append(_joined_sources(asked))
    return asked.quantizing.amaxes(opened[0])


def _joined_sources(asked: Asked) -> Source:
    expected = asked.expected
    known = asked.described.weights | expected.names.in_files.keys() | expected.names.in_memory.keys()
    first = _one_source(asked, asked.given, asked.prefix, None, known)
    if asked.rest is None:
        return JoinedSources([expected.in_files(first)])
    # The rest may have names behind another prefix; the names of the first source are known to be the model's.
    others = _one_source(asked, asked.rest, None, first.entries, known | set(first.entries))
    return JoinedSources([expected.in_files(first), expected.in_files(others)])


def _one_source(
    asked: Asked, value: Any, prefix: str | None, like: Collection[str] | None, known: Collection[str]
) -> Source:
    """Return what was given as a source with the model's own names; `known`: names in memory and in its files."""
    found = source_of(value, prefix, like, check=asked.check, adapters=asked.adapters)
    if prefix is not None:
        return found
    # A module's names are plain already; those of a state dict may still begin with a wrapper's.
    outer = outer_prefix(found.entries, known, strict=not isinstance(value, nn.Module))
    again = found.prefix + outer
    return source_of(value, again, like, check=asked.check, adapters=asked.adapters) if outer else found


def _scales(source: Source) -> Iterator[tuple[str, float]]:
    """Yield the values that a plan depends on: tensor-wide scales of weights, and entries that are scales."""
    for name, record in source.entries.items():
        own = name.rpartition(".")[2]
        if record.recipe is not None:
            wide = tensor_wide(record.recipe)
            if wide is not None:
                yield name, source.scalar(name, wide)
        elif own == INPUT_SCALE or own in KV_SCALES:
            if own in KV_SCALES and len(record.shape) == 1:
                continue  # of heads: written as they are
            if record.shape not in ((), (1,)):
                raise ValueError(f"{name} has the shape {record.shape}, expected one value")
            yield name, source.scalar(name, "")


def check_names(
    entries: Mapping[str, Entry], described: ModelConfig, layout: Layout, expected: Expected = UNKNOWN
) -> None:
    """Refuse a layout of other models, and experts that the layout would write under names not of this model's files.

    Quantized weights of Conv1D are refused, too: engines transpose what they read of them.
    """
    types = described.model_types
    turned = [name for name, one in entries.items() if one.recipe is not None and _is_conv1d(name)]
    if types & CONV1D_MODELS and turned:
        raise ValueError(
            f"{turned[0]}: quantized [N, K], and files of {', '.join(sorted(types & CONV1D_MODELS))} have weights of "
            "Conv1D as [K, N], which engines do not know quantized; save a checkpoint instead, or convert them to "
            "dense ones and transpose these"
        )
    if layout.models and types and not types & layout.models:
        raise ValueError(
            f"layout={layout.name!r} is that of {', '.join(sorted(layout.models))}, and the config is that of "
            f'{", ".join(sorted(types))}; use layout="compressed-tensors"'
        )
    made_for = layouts_of_models()
    renamed, others = types & RENAMED, types & made_for.keys() - layout.models
    experts = [
        name for name, record in entries.items() if len(record.shape) == 3 and pieces_of(name, record.shape) is not None
    ]
    quantized = [name for name in experts if entries[name].recipe is not None]
    if others and quantized:
        model = others.pop()
        raise ValueError(
            f'{quantized[0]}: engines know the experts of {model} in layout="{made_for[model].name}" alone; use that'
        )
    unknown = [name for name in experts if not expected.is_joined(name)]
    if renamed and unknown:
        raise ValueError(
            f"{unknown[0]}: engines know the experts of {renamed.pop()} by other names than those of the model in "
            "memory, and would run without these weights; export a state dict with a linear for each expert, [N, K], "
            "under the names that the model's own files have"
        )


def _is_conv1d(name: str) -> bool:
    module, _, own = name.rpartition(".")
    return own == "weight" and module.rpartition(".")[2] in CONV1D


@dataclass(frozen=True)
class Told:
    """What a rank tells the others before anything is gathered.

    alike: a digest of each of ALIKE. shared: who holds the same scales (`Source.shared`) -> a digest of all of these.
    """

    alike: tuple[str, ...]
    shared: Mapping[str, str]


# What ranks must have alike, in the order in which it is compared, and what to do if they do not.
ALIKE = {
    "the names, shapes, formats or order of their tensors": "export whole models, or save a checkpoint and export that",
    "what is to become of them": "give all ranks the same arguments, and shard a tensor on all or none",
    "the values of tensor-wide scales": "call fsdp_hooks.sync_scales on the model first",
    "the values of tensors that are not sharded": "broadcast them from one rank first",
}


def _alike_digests(source: Source, request: Request, group: Ranks) -> tuple[str, ...]:
    """Return digests of what all ranks must have alike, in the order of ALIKE."""
    told: tuple[Any, ...] = (
        [f"{name} {record}" for name, record in source.entries.items()],
        [
            (request.layout.name, request.max_shard_size, request.requantize, str(request.dtype), sorted(request.kept)),
            [source.way(name) for name in source.entries],
        ],
        {name: value.hex() for name, value in request.scales.items()},
        # It reads all bytes of these tensors, and a single rank has nobody to compare them with.
        _replicas(source) if ranks_of(group) > 1 else [],
    )
    return tuple(map(_hash, told))


def _replicas(source: Source) -> list[int]:
    """Return a number for the bytes of each tensor that every rank has whole, since one of them writes its own."""
    found = [source.replicas(name) for name in source.entries if not is_marker(name)]  # whose values say nothing
    return [int(digest(parts)) if parts else 0 for parts in found]


def _scales_by_holders(source: Source, group: Ranks) -> dict[str, dict[str, int]]:
    """Map who holds the same scales to a number for their bytes, for each weight whose scales they are."""
    found: dict[str, dict[str, int]] = {}
    for name in source.entries if ranks_of(group) > 1 else ():
        shared = source.shared(name)
        if shared is not None:
            found.setdefault(shared[0], {})[name] = int(digest([shared[1].detach().contiguous()]))
    return found


def _digests_of_shared(source: Source, group: Ranks) -> dict[str, str]:
    """Return `Told.shared`: a few bytes, however many weights there are."""
    return {_hash(holders): _hash(numbers) for holders, numbers in _scales_by_holders(source, group).items()}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _check_shared(caller: str, source: Source, told: Sequence[Told], group: Ranks) -> None:
    """Refuse pieces of the same rows that were quantized under different scales."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, each in enumerate(told):
        for holders, value in each.shared.items():
            first, expected = seen.setdefault(holders, (rank, value))
            if value != expected:
                # Only now, for the message: a number for each weight is much to send, a digest of all of them is not.
                name = _first_apart(on_all(group, lambda: _scales_by_holders(source, group)), first, rank)
                raise ValueError(
                    f"{caller}: {name}: rank {first} and rank {rank} hold different scales for the same rows, whose "
                    "columns they share; call fsdp_hooks.sync_scales on the model first"
                )


def _first_apart(scales: Sequence[Mapping[str, Mapping[str, int]]], first: int, other: int) -> str:
    """Return the first weight whose scales differ between two ranks."""
    return next(
        name
        for holders, numbers in scales[first].items()
        for name, number in numbers.items()
        if scales[other].get(holders, {}).get(name, number) != number
    )


def _check_same(caller: str, told: Sequence[Told]) -> None:
    for place, (what, way_out) in enumerate(ALIKE.items()):
        other = next((rank for rank, each in enumerate(told) if each.alike[place] != told[0].alike[place]), None)
        if other is not None:
            raise ValueError(f"{caller}: ranks 0 and {other} differ in {what}; {way_out}")
