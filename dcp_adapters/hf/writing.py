"""The files of an export: gathered, written, and given their name.

    begun_directory   rank 0              a hidden directory with all but the weights
    write_files       every rank, alike   sharded tensors are gathered one by one, and the rank that owns the file keeps
                                          them; then all such ranks write at the same time
    publish           rank 0              checks that all files are there; the directory gets its name

An error on one rank, between two gathers, is raised on all of them when the file would be written.
"""

import json
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dcp_adapters.hf.config import CONFIG, ModelConfig
from dcp_adapters.hf.directory import INDEX
from dcp_adapters.hf.layout import KINDS, ONE_OVER, RECIPES, kind_of
from dcp_adapters.hf.plan import ExportPlan, FilePlan, Output, Written
from dcp_adapters.recipe_names import dtype_name
from dcp_adapters.source import Source
from dcp_adapters.stored.durable import give_name, gone_on_error, hidden_name, sync
from dcp_adapters.stored.part_values import holds_nan
from dcp_adapters.stored.progress_bar import Advance
from fsdp_hooks.across_ranks import on_all, rank_of, ranks_of
from qtensor.formats import adopt
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor


def begun_directory(final: Path, described: ModelConfig, plan: ExportPlan) -> Path:
    """The hidden directory, with all files but the weights."""
    begun = hidden_name(final)
    begun.mkdir()
    with gone_on_error(begun):
        described.write(begun, plan.json, dtype_name(plan.dtype))
        if len(plan.files) > 1:
            names = {
                written.name: file.name for file in plan.files for output in file.outputs for written in output.written
            }
            index = {"metadata": {"total_size": plan.nbytes}, "weight_map": names}
            (begun / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return begun


def write_files(source: Source, plan: ExportPlan, directory: Path, advance: Advance) -> None:
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
                parts = [
                    _read_where_kept(source, name, failed, keep=owner == rank) for name in (output.source, output.twin)
                ]
                if parts[0] is not None and not failed:
                    try:
                        _check_twin(output, parts[0], parts[1])
                        tensors |= _made(output, parts[0])
                    except Exception as error:  # noqa: BLE001 - raised on all ranks below
                        failed.append(error)
                advance(output.nbytes)
        on_all(None, partial(_save, directory, mine, tensors, failed))


def _read_where_kept(
    source: Source, name: str | None, failed: list[Exception], *, keep: bool
) -> dict[str, Tensor] | None:
    """A tensor of the source where it is kept, None elsewhere; a collective one is read by all, whatever failed."""
    if name is None:
        return None
    if source.is_collective(name) and keep:
        return source.parts(name)
    if source.is_collective(name):
        source.help_read(name)
    if not keep or failed:
        return None
    try:
        return source.parts(name)
    except Exception as error:  # noqa: BLE001 - raised on all ranks when the file would be written
        failed.append(error)
        return None


def _check_twin(output: Output, parts: Mapping[str, Tensor], twin: Mapping[str, Tensor] | None) -> None:
    """Refuse to leave out a tied tensor whose values differ."""
    if twin is not None and not torch.equal(twin[""], parts[""]):
        raise ValueError(
            f"{output.twin} differs from {output.source}, though the config ties them (tie_word_embeddings); export "
            "with a config that has tie_word_embeddings=False"
        )


def _made(output: Output, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What one tensor of the source becomes in a file, each tensor with a storage of its own."""
    if output.recipe is not None:
        if output.scale is not None:
            parts = _renewed(output.recipe, parts, output.scale)
        if holds_nan(output.recipe, parts):
            raise ValueError(
                f"{output.source} holds NaN: what it was quantized from was not finite; an engine would run on it"
            )
    made = {written.name: _one(written, parts) for written in output.written}
    for written in output.written:
        if written.form is ONE_OVER and not bool(made[written.name].isfinite()):
            raise ValueError(
                f"{written.name}: the scale of {output.source} is 0 or next to it, and engines read its reciprocal, "
                "which would be infinite; quantize it again"
            )
    return made


def _one(written: Written, parts: Mapping[str, Tensor]) -> Tensor:
    if written.value is not None:
        tensor = torch.tensor(written.value, dtype=written.dtype, device="cpu")
    else:
        tensor, piece = parts[written.part], written.piece
        if piece is not None and tensor.ndim:
            first, last = piece.rows
            tensor = (tensor if piece.expert is None else tensor[piece.expert])[first:last]
        _check_rows(written, tensor)
    tensor = written.form.write(tensor).contiguous()
    assert (tensor.dtype, tuple(tensor.shape)) == (written.dtype, written.shape), written
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _check_rows(written: Written, tensor: Tensor) -> None:
    """Refuse rows that the file has as one, and that differ."""
    rows, piece = written.form.rows, written.piece
    if rows == 1:
        return
    spread = written.form.write(tensor).repeat_interleave(rows, dim=0)[: len(tensor)]
    differs = (spread != tensor).any(dim=-1)
    if bool(differs.any()):
        block = int(differs.float().argmax()) // rows
        why = (
            "they begin inside of a block of the weight of all experts: quantize each linear of an expert by itself, "
            "or convert the weight to scales of rows"
            if piece is not None and piece.rows[0] % rows
            else "shards that cut the block were written apart: call fsdp_hooks.sync_scales on the model first, or "
            "quantize the weight again"
        )
        last = min((block + 1) * rows, len(tensor)) - 1
        raise ValueError(f"{written.name}: rows {block * rows} to {last} are one block with different scales; {why}")


def _renewed(recipe: Recipe, parts: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The parts of the same values under another global scale."""
    dense = QuantizedTensor.from_parts(dict(parts), recipe, torch.float32).dequantize(torch.float32)
    return adopt(dense, recipe, torch.tensor(scale, dtype=torch.float32, device=dense.device))


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
    path.chmod(stat.S_IMODE((directory / CONFIG).stat().st_mode))  # safetensors makes files for their owner alone
    _settle_header(path)
    sync(path)


def _settle_header(path: Path) -> None:
    """Sort the keys of the metadata, which safetensors writes in random order: equal exports give equal files."""
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


def publish_directory(begun: Path, final: Path, plan: ExportPlan) -> None:
    """Give the directory its name, if everything is in it."""
    for file in plan.files:
        path = begun / file.name
        held = path.stat().st_size if path.is_file() else 0
        if held < sum(output.nbytes for output in file.outputs):
            raise FileNotFoundError(f"{path}: another rank wrote it and rank 0 can not see it: out_dir must be shared")
    for path in begun.iterdir():
        sync(path)
    sync(begun)
    give_name(begun, final)
