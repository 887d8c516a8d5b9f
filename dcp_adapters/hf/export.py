"""export_hf: quantized weights into a directory that inference engines load, the stored bytes as they are.

    config    rank 0 reads the model's description, all get it
    plan      every rank opens the source and plans; the plans must be one
    write     file by file, each written whole by one rank: of shards every tensor is gathered in turn, and the rank
              that owns the file keeps it; then those ranks write at the same time. No rank ever holds more than a file
    publish   rank 0 looks whether all files are there, then the directory gets its name

Until then everything lies in a hidden directory beside it, which an error removes. An error on one rank is raised on
all of them.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dcp_adapters.commands.progress import Advance
from dcp_adapters.commands.progress import progress as bar
from dcp_adapters.hf.compressed_tensors import COMPRESSED_TENSORS
from dcp_adapters.hf.config import ModelConfig, model_config, shard_size
from dcp_adapters.hf.layout import INPUT_SCALE, KINDS, kind_of, layout_named
from dcp_adapters.hf.modelopt import MODELOPT
from dcp_adapters.hf.plan import KV_SCALES, ExportPlan, FilePlan, Output, Request, Written, plan_export
from dcp_adapters.hf.sources import INDEX, Joined, Source, source_of
from fsdp_hooks.alike import on_all, on_first, rank_of, ranks_of
from qtensor.formats import format_of, tensor_wide
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor

__all__ = ["RECIPES", "export_hf"]

RECIPES = "qtensor.recipes"  # in the metadata of a file: recipes that its tensors alone do not tell
BUILT_IN = (COMPRESSED_TENSORS, MODELOPT)


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
        out_dir: a directory that does not exist; it appears when it is complete.
        layout: "compressed-tensors" or "modelopt".
        config: the model's directory (its tokenizer and the like are copied), its config.json, a dict or a config
            object; by default that of a transformers model. Without any, config.json holds the quantization alone.
        rest: where tensors are taken from that the first does not have, as the embeddings in a calibration's result: a
            module, a state dict, a checkpoint, or a directory of dense safetensors.
        prefix: what the names of the weights begin with in a nested state dict; it is cut off. By default the keys
            under which everything quantized is.
        fused_scales: "raise", linears that engines fuse (q, k, v; gate, up) must share their NVFP4 global scale;
            "requantize", those with a smaller one are rounded again under the largest.
        max_shard_size: bytes of a file, as a number or as "5GB"; a weight with its scales is never split.
        progress: a bar on rank 0, if it has a terminal.

    Returns:
        The path of the directory.

    Raises:
        FileExistsError: `out_dir` exists.
        FileNotFoundError: the source, the config or the directory above `out_dir` does not.
        ValueError: what the layout can not hold, see the message; shards whose tensor-wide scales are not agreed; ranks
            with different tensors; tensors that the config's directory has and the source does not; NaN in a weight.
        TypeError: a source or config of another kind.
    """
    if fused_scales not in ("raise", "requantize"):
        raise ValueError(f'export_hf: fused_scales={fused_scales!r} is not one of "raise", "requantize"')
    chosen, limit = layout_named(layout), shard_size(max_shard_size)
    described = on_first(None, lambda: _described(out_dir, config, state_dict_or_checkpoint))

    def prepare() -> tuple[Source, ExportPlan, dict[str, str]]:
        first = source_of(state_dict_or_checkpoint, prefix)
        source = Joined([first] if rest is None else [first, source_of(rest, None, like=first.records)])
        scales = dict(_scales(source))
        producer = {"name": "qtensor", "version": metadata.version("qtensor")}
        request = Request(chosen, scales, producer, limit, described.tied, fused_scales == "requantize")
        _check_complete(source, described, state_dict_or_checkpoint, rest)
        plan = plan_export(source.records, request)
        return source, plan, _digests(source, scales)

    prepared: list[Any] = []
    told = on_all(None, lambda: _into(prepared, prepare)[2])
    _check_same(told)
    source, plan, _ = prepared[0]
    final = Path(out_dir)
    begun = Path(on_first(None, lambda: str(_begun(final, described, plan))))
    try:
        with bar("exporting", plan.nbytes, enabled=progress and rank_of(None) == 0) as advance:
            _write_files(source, plan, begun, advance)
        on_first(None, lambda: _publish(begun, final, plan))
    except BaseException:
        if rank_of(None) == 0:
            shutil.rmtree(begun, ignore_errors=True)
        raise
    return final


# -- before anything is written ----------------------------------------------------------------------------------------


def _described(out_dir: str | os.PathLike[str], config: Any, source: Any) -> ModelConfig:
    final = Path(out_dir)
    if final.exists() or final.is_symlink():
        raise FileExistsError(f"{final} exists already; choose another name, nothing is overwritten")
    if not final.absolute().parent.is_dir():
        raise FileNotFoundError(f"{final.absolute().parent}: no such directory; create it first")
    return model_config(config, source)


def _into(prepared: list[Any], step: Any) -> Any:
    """What a step returns, kept on this rank as well."""
    prepared.append(step())
    return prepared[0]


def _scales(source: Source) -> Iterator[tuple[str, float]]:
    """The values that a plan depends on: tensor-wide scales of weights, and entries that are scales."""
    for name, record in source.records.items():
        own = name.rpartition(".")[2]
        if record.recipe is not None:
            wide = tensor_wide(record.recipe)
            if wide is not None:
                yield name, source.scalar(name, wide)
        elif own == INPUT_SCALE or own in KV_SCALES:
            if record.shape not in ((), (1,)):
                raise ValueError(f"{name} has the shape {record.shape}, expected one value")
            yield name, source.scalar(name, "")


def _check_complete(source: Source, described: ModelConfig, given: Any, rest: Any) -> None:
    """Refuse what lacks tensors of the model that the config's directory holds."""
    if isinstance(given, nn.Module) or not described.weights:
        return
    have = set(source.records)
    left = ("inv_freq", "lm_head.weight") if described.tied else ("inv_freq",)
    experts = tuple(
        {f"{name.rpartition('.')[0]}." for name, record in source.records.items() if len(record.shape) == 3}
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


def _digests(source: Source, scales: Mapping[str, float]) -> dict[str, str]:
    """What all ranks must have alike, in few bytes."""
    names = "\n".join(f"{name} {record}" for name, record in source.records.items())
    values = json.dumps({name: value.hex() for name, value in scales.items()})
    return {
        "the names, shapes and formats of their tensors": hashlib.sha256(names.encode()).hexdigest(),
        "the values of tensor-wide scales": hashlib.sha256(values.encode()).hexdigest(),
    }


def _check_same(told: list[dict[str, str]]) -> None:
    ways_out = (
        "export whole models, or save a checkpoint and export that",
        "call fsdp_hooks.sync_scales on the model first",
    )
    for what, way_out in zip(told[0], ways_out, strict=True):
        other = next((rank for rank, each in enumerate(told) if each[what] != told[0][what]), None)
        if other is not None:
            raise ValueError(f"export_hf: ranks 0 and {other} differ in {what}; {way_out}")


# -- writing -----------------------------------------------------------------------------------------------------------


def _begun(final: Path, described: ModelConfig, plan: ExportPlan) -> Path:
    """The hidden directory, with all files but the weights."""
    begun = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")
    begun.mkdir()
    try:
        described.write(begun, plan.json, str(plan.dtype).removeprefix("torch."))
        if len(plan.files) > 1:
            names = {
                written.name: file.name for file in plan.files for output in file.outputs for written in output.written
            }
            index = {"metadata": {"total_size": plan.nbytes}, "weight_map": names}
            (begun / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    return begun


def _write_files(source: Source, plan: ExportPlan, directory: Path, advance: Advance) -> None:
    """As many files at a time as there are ranks, each rank one."""
    ranks, rank = ranks_of(None), rank_of(None)
    for first in range(0, len(plan.files), ranks):
        tensors: dict[str, Tensor] = {}
        failed: list[Exception] = []
        mine: FilePlan | None = None
        for owner, file in enumerate(plan.files[first : first + ranks]):
            if owner == rank:
                mine = file
            for output in file.outputs:
                parts = [_read(source, name, failed, keep=owner == rank) for name in (output.source, output.twin)]
                if parts[0] is not None and not failed:
                    try:
                        _check_twin(output, parts[0], parts[1])
                        tensors |= _made(output, parts[0])
                    except ValueError as error:
                        failed.append(error)
                advance(output.nbytes)
        on_all(None, partial(_save, directory, mine, tensors, failed))


def _read(source: Source, name: str | None, failed: list[Exception], *, keep: bool) -> dict[str, Tensor] | None:
    """A tensor of the source where it is kept, None elsewhere; a collective one is read by all, whatever failed."""
    if name is None:
        return None
    if source.is_collective(name) and keep:
        return source.read(name)
    if source.is_collective(name):
        source.help_read(name)
    if not keep or failed:
        return None
    try:
        return source.read(name)
    except (OSError, ValueError) as error:  # raised on all ranks when the file would be written
        failed.append(error)
        return None


def _check_twin(output: Output, parts: Mapping[str, Tensor], twin: Mapping[str, Tensor] | None) -> None:
    """Refuse to leave out a tied tensor that is another one."""
    if twin is not None and not torch.equal(twin[""], parts[""]):
        raise ValueError(
            f"{output.twin} differs from {output.source}, though the config ties them (tie_word_embeddings); export "
            "with a config that has tie_word_embeddings=False"
        )


def _made(output: Output, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that become of one of the source, each with a storage of its own."""
    if output.recipe is not None:
        if output.scale is not None:
            parts = _renewed(output.recipe, parts, output.scale)
        _check_numbers(output.source, output.recipe, parts)
    return {written.name: _one(written, parts) for written in output.written}


def _one(written: Written, parts: Mapping[str, Tensor]) -> Tensor:
    if written.part == INPUT_SCALE:
        tensor = torch.tensor(written.value, dtype=torch.float32)
    else:
        tensor, piece = parts[written.part], written.piece
        if piece is not None and tensor.ndim:
            first, last = piece.rows
            tensor = (tensor if piece.expert is None else tensor[piece.expert])[first:last]
    tensor = written.form.write(tensor).contiguous()
    assert (tensor.dtype, tuple(tensor.shape)) == (written.dtype, written.shape), written
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _renewed(recipe: Recipe, parts: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The parts of the same values under another global scale."""
    dense = QuantizedTensor.from_parts(dict(parts), recipe, torch.float32).dequantize(torch.float32)
    return format_of(recipe).adopt(dense, recipe, torch.tensor(scale, dtype=torch.float32))


def _check_numbers(name: str, recipe: Recipe, parts: Mapping[str, Tensor]) -> None:
    """Refuse a weight in which something is not a number."""
    kind = kind_of(recipe)
    marked = parts["scale"] if kind in ("nvfp4", "mxfp8") else parts["payload"]
    codes = marked.view(torch.uint8)
    broken = (codes == 255).any() if kind == "mxfp8" else ((codes & 0x7F) == 0x7F).any()  # E8M0, and E4M3
    if bool(broken) or not all(bool(part.isfinite().all()) for part in parts.values() if part.dtype == torch.float32):
        raise ValueError(f"{name} holds NaN: what it was quantized from was not finite; an engine would run on it")


def _save(directory: Path, file: FilePlan | None, tensors: dict[str, Tensor], failed: list[Exception]) -> None:
    if failed:
        raise failed[0]
    if file is None:
        return
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: another rank created it and this one can not see it: out_dir must be shared"
        )
    recipes = {
        output.source: output.recipe.to_json()
        for output in file.outputs
        if output.recipe is not None and output.recipe != KINDS[str(kind_of(output.recipe))]
    }
    kept = {"format": "pt", **({RECIPES: json.dumps(recipes)} if recipes else {})}
    path = directory / file.name
    save_file(_apart(tensors), path, metadata=kept)
    _settle_header(path)
    _sync(path)


def _settle_header(path: Path) -> None:
    """Put the keys of the metadata, which safetensors writes in random order, into one: equal exports, equal files."""
    with path.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, path
        stream.seek(8)
        stream.write(text.ljust(size))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each in a memory of its own, as safetensors wants it: tied weights, and a global scale that experts share."""
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        place = tensor.data_ptr()
        alone[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return alone


def _publish(begun: Path, final: Path, plan: ExportPlan) -> None:
    """Give the directory its name, if everything is in it."""
    for file in plan.files:
        path = begun / file.name
        held = path.stat().st_size if path.is_file() else 0
        if held < sum(output.nbytes for output in file.outputs):
            raise FileNotFoundError(f"{path}: another rank wrote it and rank 0 can not see it: out_dir must be shared")
    for path in begun.iterdir():
        _sync(path)
    _sync(begun)
    begun.rename(final)
    _sync(final.absolute().parent)


def _sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
