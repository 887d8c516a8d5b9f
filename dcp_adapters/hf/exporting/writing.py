"""The files of an export: gathered, written, and given their name.

    begun_directory   rank 0              a hidden directory with all but the weights
    write_files       every rank, alike   sharded tensors are gathered group by group to the rank that owns the file;
                                          then all such ranks write at the same time
    publish           rank 0              checks that all files are there; the directory gets its name

An error on one rank, between two gathers, is raised on all of them when the file would be written.
"""

import json
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dcp_adapters.hf.exporting.config import CONFIG, ModelConfig
from dcp_adapters.hf.exporting.making import GroupOf, Job, in_groups, made_tensors
from dcp_adapters.hf.exporting.outputs import FilePlan
from dcp_adapters.hf.exporting.plan import ExportPlan
from dcp_adapters.hf.files.directory import INDEX
from dcp_adapters.hf.files.file_digests import DIGESTS, NO_DIGEST, digests_of, to_note
from dcp_adapters.hf.files.header import METADATA, read_header, write_header
from dcp_adapters.hf.layouts.layout import KINDS, RECIPES, kind_of
from dcp_adapters.plain.durable import give_name, hidden_name, remove_on_error, sync
from dcp_adapters.plain.progress_bar import Advance
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.records.source import Keep, Source
from fsdp_hooks.ranks.across_ranks import Ranks, global_ranks, on_all, rank_of, ranks_of


def begun_directory(final: Path, described: ModelConfig, plan: ExportPlan) -> Path:
    """Make the hidden directory, with all files but the weights, and return it."""
    # Beside the final one, so that giving it its name is a rename within one file system.
    begun = hidden_name(final)
    begun.mkdir()
    with remove_on_error(begun):
        described.write(begun, plan.json, dtype_name(plan.dtype))
        if len(plan.files) > 1:
            names = {
                written.name: file.name for file in plan.files for output in file.outputs for written in output.written
            }
            index = {"metadata": {"total_size": plan.nbytes}, "weight_map": names}
            (begun / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return begun


def write_files(  # noqa: PLR0913, PLR0917
    source: Source, plan: ExportPlan, directory: Path, group_of: GroupOf, advance: Advance, group: Ranks = None
) -> None:
    """Write as many files at a time as there are ranks in the group, each rank one."""
    ranks, rank, numbers = ranks_of(group), rank_of(group), global_ranks(group)
    cpu = torch.device("cpu")
    # All ranks gather for all files of a round, in the same order; then each writes its own.
    for first in range(0, len(plan.files), ranks):
        files = dict(enumerate(plan.files[first : first + ranks]))
        jobs = [
            Job(outputs, Keep(numbers[owner], cpu))
            for owner, file in files.items()
            for outputs in in_groups(file.outputs, group_of)
        ]
        tensors: dict[str, Tensor] = {}
        failed: list[Exception] = []
        for written, tensor in made_tensors(source, jobs, failed):
            if tensor is not None:
                tensors[written.name] = tensor
            advance(written.nbytes)
        # It raises on all ranks what failed on one, and keeps ranks within one round: memory is one file a rank.
        on_all(group, partial(_save, directory, files.get(rank), tensors, failed))


def _save(directory: Path, file: FilePlan | None, tensors: dict[str, Tensor], failed: list[Exception]) -> None:
    if failed:
        raise failed[0]
    if file is None:
        return
    # Rank 0 made it. On a disk of its own this rank would write a file that nobody collects.
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: another rank created it and this one can not see it: out_dir must be shared"
        )
    recipes = {
        output.source: output.recipe.to_json()
        for output in file.outputs
        if output.recipe is not None and output.recipe != KINDS[str(kind_of(output.recipe))]
    }
    # The header is written before the tensors, so digests are filled into a place of the same length afterwards.
    kept = {"format": "pt", DIGESTS: to_note(dict.fromkeys(sorted(tensors), NO_DIGEST))}
    if recipes:
        kept[RECIPES] = json.dumps(recipes)
    path = directory / file.name
    with ThreadPoolExecutor(1) as beside:
        digests = beside.submit(digests_of, tensors)  # while they are written
        save_file(_unshare(tensors), path, metadata=kept)
        path.chmod(stat.S_IMODE((directory / CONFIG).stat().st_mode))  # safetensors makes files for their owner alone
        _settle_header(path, to_note(digests.result()))
    sync(path)


def _settle_header(path: Path, digests: str) -> None:
    """Put the digests in the place that was left for them, and sort the keys of the metadata.

    safetensors writes these in random order: equal exports give equal files.
    """
    with path.open("r+b") as stream:
        size, header = read_header(stream)
        header[METADATA] = dict(sorted((header[METADATA] | {DIGESTS: digests}).items()))
        write_header(stream, size, header)


def _unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor a memory of its own: tied weights share one, and experts their global scale."""
    seen: set[int] = set()
    alone = {}
    for name, tensor in tensors.items():
        place = tensor.data_ptr()
        alone[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return alone


def publish_directory(begun: Path, final: Path, plan: ExportPlan) -> None:
    """Give the directory its name, if everything is in it."""
    # The last check before the name: a file of another rank may be on storage that rank 0 does not see.
    for file in plan.files:
        path = begun / file.name
        held = path.stat().st_size if path.is_file() else 0
        if held < sum(output.nbytes for output in file.outputs):
            raise FileNotFoundError(f"{path}: another rank wrote it and rank 0 can not see it: out_dir must be shared")
    # Durable before it has its name: after a crash a directory with that name is complete.
    for path in begun.iterdir():
        sync(path)
    sync(begun)
    give_name(begun, final)
