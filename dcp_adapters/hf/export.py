"""export_hf: quantized weights into a directory that inference engines load, the stored bytes as they are.

    config    rank 0 reads the model's description, all get it
    plan      every rank opens the source and plans; the plans must be one
    write     each file is written whole by one rank: sharded tensors are gathered one by one, and the rank that owns
              the file keeps them; then all such ranks write at the same time. No rank ever holds more than a file
    publish   rank 0 checks that all files are there, then the directory gets its name

Until then everything lies in a hidden directory beside it, which an error removes. An error on one rank is raised on
all of them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from dcp_adapters.hf.compressed_tensors import COMPRESSED_TENSORS
from dcp_adapters.hf.config import ModelConfig, model_config, shard_size
from dcp_adapters.hf.fp8 import FP8
from dcp_adapters.hf.gpt_oss import GPT_OSS
from dcp_adapters.hf.layout import INPUT_SCALE, Layout, layout_named
from dcp_adapters.hf.modelopt import MODELOPT
from dcp_adapters.hf.names import RENAMED, pieces_of
from dcp_adapters.hf.plan import ExportPlan, Request, plan_export
from dcp_adapters.hf.shared_scales import KV_SCALES
from dcp_adapters.hf.sources import JoinedSources, source_of
from dcp_adapters.hf.writing import begun_directory, publish_directory, write_files
from dcp_adapters.source import Source
from dcp_adapters.stored.durable import gone_on_error, refuse_taken
from dcp_adapters.stored.progress_bar import progress_bar
from fsdp_hooks.across_ranks import on_all, on_first, rank_of, ranks_of
from fsdp_hooks.digest import digest
from qtensor.formats import tensor_wide

BUILT_IN = (COMPRESSED_TENSORS, FP8, GPT_OSS, MODELOPT)
OF_WHOLE_EXPERTS = {model: layout.name for layout in BUILT_IN for model in layout.models}


def export_hf(  # noqa: PLR0913 - options of one operation
    state_dict_or_checkpoint: Any,
    out_dir: str | os.PathLike[str],
    *,
    layout: str = "compressed-tensors",
    config: Any = None,
    rest: Any = None,
    prefix: str | None = None,
    fused_scales: str = "raise",
    max_shard_size: int | str = "5GB",
    verify_checksums: bool = True,
    progress: bool = True,
) -> Path:
    """Write quantized weights as safetensors with the JSON that inference engines read.

    All ranks call it alike; `out_dir` must be on storage that they share. The payload and the block scales are the very
    bytes of the source. Scales `<module>.input_scale` and `<attention>.k_scale`, `.v_scale` (fp32 []) beside the
    weights are exported with them; a linear without an input_scale has dynamic inputs (NVFP4: unquantized ones).

    Args:
        state_dict_or_checkpoint: a module or state dict (plain, FSDP2, TP, HSDP; nested or flat), what
            `layerwise.calibrate` returns, or the path of a DCP checkpoint, for which neither a model nor ranks are
            needed.
        out_dir: a directory that does not exist, or is empty; it appears when it is complete.
        layout: "compressed-tensors", "modelopt", "fp8" (Float8 in blocks of 128 x 128 alone, as DeepSeek's files), or
            "mxfp4", in which gpt-oss has its experts.
        config: the model's directory (its tokenizer and the like are copied), its config.json, a dict or a config
            object; by default that of a transformers model. Without any, config.json holds the quantization alone.
        rest: where to take tensors that the first does not have, such as the embeddings beside a calibration's result:
            a module, a state dict, a checkpoint, or a directory of dense safetensors.
        prefix: what the names of the weights begin with in a nested state dict; it is cut off. By default the keys
            under which everything quantized is.
        fused_scales: "raise", linears that engines fuse (q, k, v; gate, up) must share their NVFP4 global scale;
            "requantize", those with a smaller one are rounded again under the largest.
        max_shard_size: bytes of a file, as a number or as "5GB"; a weight with its scales is never split.
        verify_checksums: compare what is read of checkpoints with their checksums, where they have some.
        progress: a bar on rank 0, if it has a terminal.

    Returns:
        The path of the directory.

    Raises:
        FileExistsError: `out_dir` exists.
        FileNotFoundError: the source, the config or the directory above `out_dir` does not exist.
        ValueError: what the layout cannot hold, see the message; shards whose tensor-wide scales are not agreed; ranks
            with different tensors, values or arguments; tensors that the config's directory has and the source does
            not; NaN in a weight.
        TypeError: a source or config of another kind.
    """
    if fused_scales not in ("raise", "requantize"):
        raise ValueError(f'export_hf: fused_scales={fused_scales!r} is not one of "raise", "requantize"')
    chosen, limit = layout_named(layout), shard_size(max_shard_size)
    described = on_first(None, lambda: _description(out_dir, config, state_dict_or_checkpoint))

    def prepare() -> tuple[Source, Request, ExportPlan]:
        source = _joined_sources(state_dict_or_checkpoint, rest, prefix, check=verify_checksums)
        producer = {"name": "qtensor", "version": metadata.version("qtensor")}
        scales = dict(_scales(source))
        request = Request(chosen, scales, producer, limit, described.tied, fused_scales == "requantize")
        _check_names(source, described, chosen)
        _check_complete(source, described, state_dict_or_checkpoint, rest)
        return source, request, plan_export(source.entries, request)

    source, plan = _agreed_plan(prepare)
    return _publish_files(Path(out_dir), source, described, plan, show=progress)


def _publish_files(final: Path, source: Source, described: ModelConfig, plan: ExportPlan, *, show: bool) -> Path:
    """The files in a hidden directory, which then gets its name."""
    begun = Path(on_first(None, lambda: str(begun_directory(final, described, plan))))
    first = rank_of(None) == 0
    with gone_on_error(begun) if first else nullcontext():
        with progress_bar("exporting", plan.nbytes, enabled=show and first) as advance:
            write_files(source, plan, begun, advance)
        on_first(None, lambda: publish_directory(begun, final, plan))
    return final


# -- before anything is written ----------------------------------------------------------------------------------------


def _description(out_dir: str | os.PathLike[str], config: Any, source: Any) -> ModelConfig:
    """The model's own; refused first is an `out_dir` that is taken."""
    refuse_taken(Path(out_dir))
    return model_config(config, source)


def _joined_sources(given: Any, rest: Any, prefix: str | None, *, check: bool) -> Source:
    first = source_of(given, prefix, check=check)
    others = [] if rest is None else [source_of(rest, None, like=first.entries, check=check)]
    return JoinedSources([first, *others])


def _agreed_plan(prepare: Callable[[], tuple[Source, Request, ExportPlan]]) -> tuple[Source, ExportPlan]:
    """What this rank has prepared. Raises ValueError where ranks have prepared different things."""
    prepared: list[tuple[Source, ExportPlan]] = []

    def step() -> tuple[str, ...]:
        source, request, plan = prepare()
        prepared.append((source, plan))
        return _alike_digests(source, request)

    _check_same(on_all(None, step))
    return prepared[0]


def _scales(source: Source) -> Iterator[tuple[str, float]]:
    """The values that a plan depends on: tensor-wide scales of weights, and entries that are scales."""
    for name, record in source.entries.items():
        own = name.rpartition(".")[2]
        if record.recipe is not None:
            wide = tensor_wide(record.recipe)
            if wide is not None:
                yield name, source.scalar(name, wide)
        elif own == INPUT_SCALE or own in KV_SCALES:
            if record.shape not in ((), (1,)):
                raise ValueError(f"{name} has the shape {record.shape}, expected one value")
            yield name, source.scalar(name, "")


def _check_names(source: Source, described: ModelConfig, layout: Layout) -> None:
    """Refuse a layout of other models, and experts whose names in this model's files are not those it would write."""
    types = described.model_types
    if layout.models and types and not types & layout.models:
        raise ValueError(
            f"layout={layout.name!r} is that of {', '.join(sorted(layout.models))}, and the config is that of "
            f'{", ".join(sorted(types))}; use layout="compressed-tensors"'
        )
    renamed, whole = types & RENAMED, types & OF_WHOLE_EXPERTS.keys() - layout.models
    experts = [
        name
        for name, record in source.entries.items()
        if len(record.shape) == 3 and pieces_of(name, record.shape) is not None
    ]
    quantized = [name for name in experts if source.entries[name].recipe is not None]
    if whole and quantized:
        model = whole.pop()
        raise ValueError(
            f'{quantized[0]}: engines know the experts of {model} in layout="{OF_WHOLE_EXPERTS[model]}" alone; use that'
        )
    if renamed and experts:
        raise ValueError(
            f"{experts[0]}: engines know the experts of {renamed.pop()} by other names than those of the model in "
            "memory, and would run without these weights; export a state dict with a linear for each expert, [N, K], "
            "under the names that the model's own files have"
        )


def _check_complete(source: Source, described: ModelConfig, given: Any, rest: Any) -> None:
    """Refuse a source that lacks tensors of the model in the config's directory."""
    if isinstance(given, nn.Module) or not described.weights:
        return
    have = set(source.entries)
    left = ("inv_freq", "lm_head.weight") if described.tied else ("inv_freq",)
    experts = tuple(
        {f"{name.rpartition('.')[0]}." for name, record in source.entries.items() if len(record.shape) == 3}
    )
    lacking = sorted(
        name for name in described.weights - have if not name.startswith(experts) and not name.endswith(left)
    )
    if lacking:
        names = ", ".join([*lacking[:4], *["..."] * (len(lacking) > len(lacking[:4]))])
        who = "the source lacks" if rest is None else "the source and rest= lack"
        raise ValueError(
            f"{who} {len(lacking)} tensors of the model ({names}); say by rest=... (--rest) where they are taken from, "
            "for example the model's directory"
        )


# What ranks must have alike, in the order in which it is compared, and what to do where they do not.
ALIKE = {
    "the names, shapes and formats of their tensors": "export whole models, or save a checkpoint and export that",
    "what is to become of them": "give all ranks the same arguments, and shard a tensor on all or none",
    "the values of tensor-wide scales": "call fsdp_hooks.sync_scales on the model first",
    "the values of tensors that are not sharded": "broadcast them from one rank first",
}


def _alike_digests(source: Source, request: Request) -> tuple[str, ...]:
    """What all ranks must have alike, in few bytes each, in the order of ALIKE."""
    told: tuple[Any, ...] = (
        [f"{name} {record}" for name, record in source.entries.items()],
        [
            (request.layout.name, request.max_shard_size, request.requantize),
            [source.is_collective(name) for name in source.entries],
        ],
        {name: value.hex() for name, value in request.scales.items()},
        _replicas(source) if ranks_of(None) > 1 else [],
    )
    return tuple(hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in told)


def _replicas(source: Source) -> list[int]:
    """A number for the bytes of each tensor that every rank has whole, since one of them writes its own."""
    found = [source.replicas(name) for name in source.entries]
    return [int(digest(parts)) if parts else 0 for parts in found]


def _check_same(told: Sequence[tuple[str, ...]]) -> None:
    for place, (what, way_out) in enumerate(ALIKE.items()):
        other = next((rank for rank, each in enumerate(told) if each[place] != told[0][place]), None)
        if other is not None:
            raise ValueError(f"export_hf: ranks 0 and {other} differ in {what}; {way_out}")
