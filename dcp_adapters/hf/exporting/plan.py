"""What an export writes into which file, decided from names, formats, shapes and scales: no tensor is touched.

    weight  ->  its linears (one; more for experts)  ->  the layout's tensors of each  ->  one file

All tensors of a weight lie in one file; files are filled in the order of the model, up to a size. Everything that
cannot be exported is found here, before anything is written; scales that engines share are settled here, too.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dcp_adapters.hf.exporting.engine_scales import (
    check_fused,
    input_scales,
    kv_attentions,
    kv_granularity,
    renewed_scales,
    scale_entries,
)
from dcp_adapters.hf.exporting.outputs import FilePlan, Output, Written, files_within
from dcp_adapters.hf.files.engine_names import Piece, pieces_of, turned_experts
from dcp_adapters.hf.layouts.experts import check_experts, dense_pieces, dense_weight, engine_pieces
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KINDS, KV_SCALES, SHAPE, Layout, Linears, Scheme, kind_of
from dcp_adapters.hf.layouts.rotations import check_rotations
from dcp_adapters.hf.models.file_names import FileNames, memory_modules
from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.rotations import is_marker, rotations_in
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of

CODES = ("weight", "weight_packed", "qweight", "_blocks", "_scales")  # matrices of integers under these names are codes
EMBEDDINGS = tuple(f".{module}.weight" for module in ("embed_tokens", "wte", "word_embeddings", "tok_embeddings"))


@dataclass(frozen=True)
class ExportPlan:
    """All of an export.

    json: file name -> content, config.json's `quantization_config` under that name. requantized: names of the weights
    whose bytes change. dtype: that of dequantized weights. weights: name -> shape of all tensors of the model that the
    files have, a quantized one by the name and shape that it would have as a dense one.
    """

    files: tuple[FilePlan, ...]
    json: Mapping[str, Any]
    requantized: tuple[str, ...]
    dtype: torch.dtype
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(output.nbytes for file in self.files for output in file.outputs)


@dataclass(frozen=True)
class Request:
    """What was asked for.

    scales: tensor-wide scales of quantized weights and values of scale entries, by name. tied: whether the config ties
    the output projection to the embedding. requantize: quantize fused weights again if their global scales differ.
    dtype: of tensors of floats that are not quantized, and of dequantized weights; None: what the source says. kept:
    tensors whose dtype stays all the same. names: of the tensors in memory, if these differ. asks: of what an engine
    builds to read the files, as far as known.
    """

    layout: Layout
    scales: Mapping[str, float]
    producer: Mapping[str, str]
    max_shard_size: int
    tied: bool = False
    requantize: bool = False
    dtype: torch.dtype | None = None
    kept: frozenset[str] = frozenset()
    names: FileNames = field(default_factory=FileNames)
    asks: Collection[str] = frozenset()


def plan_export(records: Mapping[str, Entry], request: Request) -> ExportPlan:
    """Decide the plan of an export.

    Args:
        records: of all tensors of the source, in the order in which they are written.
        request: the layout, and the values of scales.

    Raises:
        ValueError: nothing is quantized; a weight or a scheme that the layout does not have; linears that engines
            fuse and whose formats or global scales differ; a scale that engines cannot use; rotated inputs, as
            `rotations_in` and `check_rotations` do. All of a kind are named.
    """
    rotated = rotations_in(records)
    records = {name: record for name, record in records.items() if not is_marker(name)}
    quantized = {name: record for name, record in records.items() if record.recipe is not None}
    if not quantized:
        raise ValueError(
            "nothing in the source is quantized: calibrate the model, convert the checkpoint (python -m dcp_adapters "
            "convert), or build it under quantized_model_init"
        )
    _check_values(records)
    # Engines tie the output projection to the embedding, so the files hold the embedding alone.
    twins = _find_tied(records) if request.tied else {}
    turned = turned_experts({name: record.shape for name, record in records.items()})
    _check_linears(quantized, turned)
    check_experts(records, turned, request.layout)
    pieces = {name: engine_pieces(name, record, request.layout) for name, record in quantized.items()}
    owners = {piece.module: name for name, those in pieces.items() for piece in those}
    entries = scale_entries(pieces)
    orphans = [name for name in records if f".{name}".endswith(f".{INPUT_SCALE}") and name not in entries]
    if orphans:
        raise ValueError(f"{few_of(orphans)}: the weight beside it is not quantized; leave it out")
    # Files may call q_proj otherwise, so fused linears are looked for by their names in memory, too.
    also = memory_modules(request.names, owners)
    inputs = input_scales(pieces, entries, request.scales, also)
    schemes = {
        module: Scheme.of(_kind(name, quantized[name].recipe), calibrated=module in inputs)
        for module, name in owners.items()
    }
    for module, scheme in schemes.items():
        # It raises if the layout lacks the scheme; the entry itself is used further down.
        request.layout.entry(scheme, module)
    ignored = _find_ignored(records, schemes, turned, tied=request.tied)
    also |= memory_modules(request.names, ignored)
    _check_once(schemes, ignored)
    # Of dense linears, too: a rotated linear fused with one that is not has no input that is right for both.
    check_rotations(rotated, request.layout, [*schemes, *ignored])
    renewed: dict[str, float] = {}
    # Engines that run several linears as one need one format for them, and in NVFP4 one global scale.
    if request.layout.fuses:
        check_fused(schemes, ignored, also)
        renewed = renewed_scales(owners, schemes, request.scales, also, requantize=request.requantize)
    attentions = kv_attentions(records)
    kv_cache = kv_granularity(attentions, records, request.layout)
    outputs: list[Output] = []
    weights: dict[str, tuple[int, ...]] = {}
    for name, record in records.items():
        # Scales of inputs are written with their linears, those of the KV cache below.
        if name in twins.values() or name in entries or name.rpartition(".")[2] in KV_SCALES:
            continue
        if name in quantized:
            written = [
                tensor for piece in pieces[name] for tensor in _written_linear(piece, record, schemes, inputs, request)
            ]
            outputs.append(Output(name, record.recipe, tuple(written), renewed.get(name)))
            weights |= dict(dense_weight(piece, record) for piece in pieces[name])
        else:
            if request.dtype is not None and record.dtype.is_floating_point and name not in request.kept:
                record = replace(record, dtype=request.dtype)  # noqa: PLW2901 - the values are cast when they are made
            made = list(_written_dense(name, record, request, turned))
            outputs.append(Output(name, None, tuple(made), twin=twins.get(name)))
            weights |= {written.name: written.shape for written in made}
    outputs += _kv_outputs(attentions, records, request, heads=kv_cache == "head")
    recipes = frozenset(record.recipe for record in quantized.values() if record.recipe is not None)
    linears = Linears(schemes, ignored, kv_cache, request.producer, recipes, rotated, also)
    # For config.json, if that names no dtype.
    dtype = request.dtype or next(iter(quantized.values())).dtype
    files = files_within(outputs, request.max_shard_size)
    return ExportPlan(files, request.layout.json(linears), tuple(renewed), dtype, weights)


# -- linears -----------------------------------------------------------------------------------------------------------


def _check_values(records: Mapping[str, Entry]) -> None:
    """Refuse dense tensors that are codes of another library's layout, which the export would not describe."""
    codes = [
        f"{name} ({str(record.dtype).removeprefix('torch.')})"
        for name, record in records.items()
        if record.recipe is None and _holds_codes(name, record)
    ]
    if codes:
        raise ValueError(
            f"{few_of(codes)}: codes of a quantization that is not ours, whose scales the export would not "
            "describe; dequantize them first, or read the directory they come from with import_hf"
        )


def _holds_codes(name: str, record: Entry) -> bool:
    dtype = record.dtype
    if dtype.is_floating_point:
        return dtype.itemsize == 1
    return len(record.shape) > 1 and dtype.itemsize <= 4 and dtype != torch.bool and name.endswith(CODES)


def _check_linears(quantized: Collection[str], turned: Collection[str]) -> None:
    """Refuse quantized weights that are no linears for an engine."""
    instead = "convert it to a dense one (python -m dcp_adapters convert --to bfloat16 --include ...)"
    embeddings = [name for name in quantized if is_embedding(name)]
    if embeddings:
        raise ValueError(f"{few_of(embeddings)}: engines read no quantized embedding; {instead}")
    experts = [name for name in quantized if name in turned]
    if experts:
        raise ValueError(
            f"{few_of(experts)}: quantized along what engines have as rows: they know gate_up_proj [E, 2 N, K] "
            f"and down_proj [E, K, N] of experts, and these are transposed; {instead}"
        )


def _check_once(schemes: Mapping[str, Scheme], ignored: Collection[str]) -> None:
    """Refuse a linear that would be in the files both quantized and dense."""
    twice = [module for module in ignored if module in schemes]
    if twice:
        raise ValueError(
            f"{few_of(twice)}: the source has the linear twice, quantized and dense, under names that are one "
            "for engines; leave one of them out"
        )


def _kind(name: str, recipe: Recipe | None) -> str:
    assert recipe is not None
    kind = kind_of(recipe)
    if kind is None:
        known = any(type(other) is type(recipe) for other in KINDS.values()) or isinstance(recipe, Float8DelayedScaling)
        only = 'element="e4m3"' if getattr(recipe, "element", "e4m3") != "e4m3" else 'blocks="square"'
        why = f"engines read {only} only" if known else f"no layout has {type(recipe).__name__} yet"
        raise ValueError(f"{name} is quantized under {recipe}: {why}; convert it first")
    return kind


def _written_linear(
    piece: Piece, record: Entry, schemes: Mapping[str, Scheme], inputs: Mapping[str, float], request: Request
) -> Iterable[Written]:
    """Yield the tensors of one linear."""
    assert record.recipe is not None
    whole = piece.expert is None
    shape = record.shape if whole else (piece.rows[1] - piece.rows[0], record.shape[-1])
    specs = {spec.name: spec for spec in specs_of(record.recipe)}
    for stored in request.layout.entry(schemes[piece.module], piece.module).stored:
        name = stored.of(piece.module)
        if stored.part == SHAPE:
            yield Written(name, torch.int64, (len(shape),), SHAPE, value=shape)
        elif stored.part == INPUT_SCALE:
            value = inputs[piece.module]
            yield Written(name, torch.float32, stored.form.shape(()), INPUT_SCALE, stored.form, value=value)
        else:
            spec = specs[stored.part]
            form = stored.form.shape(spec.shape(shape))
            dtype = stored.form.dtype or spec.dtype
            yield Written(name, dtype, form, stored.part, stored.form, None if whole else piece)


def _written_dense(name: str, record: Entry, request: Request, turned: Collection[str]) -> Iterable[Written]:
    """Yield a dense tensor as it is, or a weight of all experts as the linears that engines know."""
    pieces = dense_pieces(name, record, turned=name in turned, whole=request.names.whole, asks=request.asks)
    if pieces is None:
        yield Written(name, record.dtype, record.shape, "")
        return
    for piece in pieces:
        shape = (piece.rows[1] - piece.rows[0], record.shape[1 if piece.turned else -1])
        yield Written(f"{piece.module}.weight", record.dtype, shape, "", piece=piece)


def _find_ignored(
    records: Mapping[str, Entry], schemes: Mapping[str, Scheme], turned: Collection[str], *, tied: bool
) -> list[str]:
    """Return modules with a dense weight of a linear's shape; embeddings do no harm, engines ask for linears only.

    The output projection is among them if the source has only an embedding, since models may tie it by default.
    """
    dense = {name: record for name, record in records.items() if record.recipe is None}
    found = [piece.module for name, record in dense.items() for piece in pieces_of(name, record.shape) or ()]
    found += dict.fromkeys(name.rpartition(".")[0] for name in dense if name in turned)
    tied = tied or any(map(is_embedding, dense))
    if tied and not any(module.rpartition(".")[2] == "lm_head" for module in (*found, *schemes)):
        found.append("lm_head")
    return found


def is_embedding(name: str) -> bool:
    """Return whether a tensor's name is that of an embedding."""
    return f".{name}".endswith(EMBEDDINGS)


def _find_tied(records: Mapping[str, Entry]) -> dict[str, str]:
    """Map the embedding to the output projection that the config ties to it, if the source has both."""
    head = next((name for name in records if f".{name}".endswith(".lm_head.weight")), None)
    if head is None:
        return {}
    if records[head].recipe is not None:
        raise ValueError(
            f"{head} is quantized, but the config ties it to the embedding (tie_word_embeddings), so engines would not "
            "read it; export with a config that has tie_word_embeddings=False"
        )
    alike = [name for name, record in records.items() if record.format == records[head].format]
    return {name: head for name in alike if is_embedding(name)}


def _kv_outputs(
    attentions: Mapping[str, Mapping[str, str]], records: Mapping[str, Entry], request: Request, *, heads: bool
) -> Iterable[Output]:
    """Yield the scales of the KV cache: an attention's with their known values, those of heads as tensors to copy."""
    layout = request.layout
    for attention, entries in attentions.items():
        for own, entry in entries.items():
            name = f"{attention}.{layout.kv_scales[own]}"
            if heads:
                assert layout.kv_heads is not None
                shape = layout.kv_heads.shape(records[entry].shape)
                yield Output(entry, None, (Written(name, torch.float32, shape, "", layout.kv_heads),))
                continue
            value, form = request.scales[entry], layout.kv_form
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{entry} is {value}, which engines divide by; calibrate it again, or leave it out")
            yield Output(entry, None, (Written(name, torch.float32, form.shape(()), INPUT_SCALE, form, value=value),))
