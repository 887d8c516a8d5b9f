"""A checkpoint into another format: recipe to recipe, quantized to dense, dense to quantized. Needs no model.

    plan     from the descriptions alone: which tensors change; one error lists all that cannot be done, nothing written
    write    one tensor at a time: read, convert, write, forget; entries of bytes and all other tensors are copied as
             they are; into a hidden directory beside the destination
    finish   `.metadata`, then the directory gets its name: there is the whole checkpoint or none

The values are those of converting full tensors: `quantize(dense)`, `q.dequantize(dtype)`, and from recipe to recipe
what `b.copy_(a)` writes: exactly the values of a where b can hold them (qtensor/numerics/exact.py). What comes out is
compared with what went in, so the outcome says which tensors were rounded, and by how much.

The save planner sees stand-ins of the right shapes and dtypes that take no memory, plans them as it plans any state
dict, and gets the data when the writer asks for an entry.
"""

import io
import logging
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_adapters.convert.conversion_outcome import Converted, Outcome, Target
from dcp_adapters.plain.durable import give_name, hidden_name, refuse_taken, remove_on_error
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.plain.words import few_of, in_natural_order
from dcp_adapters.records.entry import Entry, parts_of
from dcp_adapters.records.manifest import mark_converted
from dcp_adapters.records.masters import Masters, is_remainder
from dcp_adapters.records.source import Stored
from dcp_adapters.save.atomic_writer import AtomicFileSystemWriter
from dcp_adapters.save.planner import QuantizedSavePlanner
from dcp_adapters.save.steps.checksum_table import ChecksumTable
from dcp_adapters.stored.numeric_error import Error, error_between
from qtensor.numerics import exact
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, column_multiple
from qtensor.spec.selection import matches, unmatched
from qtensor.states.kinds import IN_8_BITS
from qtensor.tensor.quantized_tensor import QuantizedTensor, quantize

LOG = logging.getLogger(__name__)


class ConversionRefused(ValueError):  # noqa: N818 - what happened to the conversion
    """It cannot be done as asked; nothing has been written."""


@dataclass(frozen=True)
class ConversionPlan:
    """What will happen to each tensor.

    changes: names of the tensors that are converted; the others are copied. idle: exclude patterns without a match.
    """

    to: Target
    changes: frozenset[str]
    idle: tuple[str, ...] = ()


def plan_conversion(
    tensors: Mapping[str, Entry], to: Target, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> ConversionPlan:
    """Decide which tensors are converted.

    Args:
        tensors: those of the source.
        to: a recipe, or the dtype of dense results.
        include: globs over tensor names; empty: all quantized tensors but moments of optimizers.
        exclude: globs over tensor names that stay as they are.

    Raises:
        ConversionRefused: an include glob matches nothing; there is nothing to convert; selected tensors cannot be
            quantized under the recipe (all of them are listed); masters that are remainders may be of selected ones.
    """
    eligible = {name: tensor for name, tensor in tensors.items() if tensor.recipe is not None or isinstance(to, Recipe)}
    idle = unmatched(include, eligible)
    if idle:
        what = "tensor" if isinstance(to, Recipe) else "quantized tensor"
        raise ConversionRefused(f"--include {' '.join(idle)} matches no {what}; see the names with inspect")
    selected = [
        tensor
        for name, tensor in eligible.items()
        if (matches(name, include) if include else _is_weight(tensor)) and not matches(name, exclude)
    ]
    if not selected:
        raise ConversionRefused(
            "nothing to convert: no quantized tensor is selected"
            if include or exclude or not isinstance(to, Recipe)
            else "the source holds no quantized tensors; say which dense ones to quantize: --include '*_proj.weight'"
        )
    if isinstance(to, Recipe):
        obstacles = [f"  {tensor.name}: {why}" for tensor in selected if (why := _obstacle(tensor, to))]
        if obstacles:
            raise ConversionRefused(
                f"{len(obstacles)} of {len(selected)} selected tensors can not be quantized as {to}; leave them out "
                "with --exclude:\n" + "\n".join(obstacles)
            )
    named = frozenset(tensor.name for tensor in selected if not _is_in_format(tensor, to))
    _refuse_parted(tensors, named)
    return ConversionPlan(to, named, tuple(unmatched(exclude, tensors)))


def convert_checkpoint(
    source: Stored,
    destination: str | os.PathLike[str],
    plan: ConversionPlan,
    *,
    advance: Advance = ignore_progress,
) -> Outcome:
    """Write the converted checkpoint, and tell what became of the values.

    Args:
        source: where from; open it with check=True to refuse damaged data instead of giving it fresh checksums.
        destination: a directory that does not exist or is empty; the directory above it exists.
        plan: from `plan_conversion`.
        advance: told the bytes of the source that are done.

    Raises:
        FileExistsError, FileNotFoundError: the destination is not empty, or the directory above it does not exist.
        CheckpointUnusable: data of the source is missing or damaged. The destination does not exist then.
    """
    final = Path(destination)
    refuse_taken(final)
    partial = hidden_name(final)
    with log_work(LOG, "convert_checkpoint from %s to %s", source.path, final), remove_on_error(partial):
        errors = _write(source, partial, plan, advance)
        give_name(partial, final)
    tensors = [Converted(name, source.entries[name].kind, errors[name]) for name in in_natural_order(errors)]
    copied = len(source.entries) - len(tensors) + len(source.blobs)
    return Outcome(str(source.path), str(final), plan.to, tensors, copied)


def convert_tensor(value: Tensor, to: Target) -> Tensor:
    """A tensor in the target format; the appearance dtype of a quantized one is kept."""
    if isinstance(to, torch.dtype):
        assert isinstance(value, QuantizedTensor)
        return value.dequantize(to)
    if not isinstance(value, QuantizedTensor):
        return quantize(value, to)
    if value.recipe.stored == to.stored:
        return value
    parts = exact.convert_parts(value.dequantize(torch.float32), to, value.parts(), value.recipe)
    return QuantizedTensor.from_parts(parts, to, value.dtype)


def _is_weight(tensor: Entry) -> bool:
    return tensor.recipe is not None and tensor.name.rpartition(".")[2] not in IN_8_BITS


def _refuse_parted(tensors: Mapping[str, Entry], changes: Collection[str]) -> None:
    """Refuse to change bytes from which remainders say how far masters are: a training would take them for others."""
    if not changes or not any(map(is_remainder, tensors)):
        return
    masters = Masters.among(tensors)
    # of one whose weight is not known, it may be any of them
    parted = {master for master in masters.left if is_remainder(master)}
    parted |= {master for name in changes for master in masters.beside.get(name, []) if is_remainder(master)}
    if parted:
        raise ConversionRefused(
            f"{few_of(sorted(parted), 3)}: masters are kept as what the bytes of their weights do not say, and these "
            "bytes would change; convert a checkpoint of the model alone, or one whose masters are in fp32"
        )


def _is_in_format(tensor: Entry, to: Target) -> bool:
    """Whether a tensor is in the target format already."""
    return isinstance(to, Recipe) and tensor.recipe is not None and tensor.recipe.stored == to.stored


def _obstacle(tensor: Entry, recipe: Recipe) -> str | None:
    """Why a tensor cannot be quantized, None where it can."""
    multiple, shape = column_multiple(recipe), tensor.shape
    if tensor.recipe is None and is_remainder(tensor.name):
        return "its bits are those of an integer, which says of a master what the bytes of its weight do not"
    if tensor.dtype not in APPEARANCE_DTYPES:
        return f"{tensor.kind}, expected bfloat16, float16 or float32"
    if tensor.recipe is None and len(shape) < 2:
        return f"shape {shape}, expected 2 dims or more"
    if not shape or shape[-1] % multiple:
        return f"shape {shape}, expected K to be a multiple of {multiple}"
    if getattr(recipe, "blocks", "row") == "square" and (len(shape) < 2 or shape[-2] % multiple):
        return f"shape {shape}, expected both N and K to be multiples of {multiple}"
    return None


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(source: Stored, directory: Path, plan: ConversionPlan, advance: Advance) -> dict[str, Error]:
    """The errors of the tensors that were converted, by name."""
    state: dict[str, Any] = {name: _stand_in(_written_entry(entry, plan)) for name, entry in source.entries.items()}
    state |= {name: _Bytes() for name in source.blobs}
    state = {name: state[name] for name in source.names}
    entries = {
        key: tensor.name for tensor in source.entries.values() for key in _written_entry(tensor, plan).part_keys()
    }  # written key -> name of its tensor
    stream = EntryStream(source, plan, entries, advance)
    # one thread and no copying ahead: the writer asks for an entry, writes it, and asks for the next
    writer = AtomicFileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)
    planner = _StreamingPlanner(stream, _paths(source, plan))
    try:
        with warnings.catch_warnings():  # DCP warns that it works in a single process, which is the intent
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return stream.errors


class _Bytes:
    """Stands for an entry of bytes in the state dict that is planned."""


class EntryStream:
    """The entries to be written, made when they are asked for.

    The writer keeps every tensor of a file until the file is complete. So when the next entry is asked for, the bytes
    of the one before are given back: its storage is emptied, only the shell of the tensor remains.
    """

    def __init__(self, source: Stored, plan: ConversionPlan, entries: Mapping[str, str], advance: Advance) -> None:
        self.source, self.plan, self.entries, self.advance = source, plan, entries, advance
        self.pending: dict[str, Tensor] = {}  # entries of the tensor at work that were not asked for yet
        self.handed: Tensor | None = None
        self.errors: dict[str, Error] = {}  # of the tensors that were converted

    def __contains__(self, entry: str) -> bool:
        return entry in self.entries or entry in self.source.blobs

    def take(self, entry: str) -> Tensor | io.BytesIO:
        """The data of an entry, valid until the next call."""
        if self.handed is not None:
            self.handed.untyped_storage().resize_(0)
            self.handed = None
        if entry not in self.entries:
            self.advance(self.source.blob_size(entry))
            return io.BytesIO(self.source.read_blob(entry))
        if entry not in self.pending:
            self.pending = {}
            self.pending = self._make(self.entries[entry])
        self.handed = self.pending.pop(entry)
        return self.handed

    def _make(self, name: str) -> dict[str, Tensor]:
        stored, value = self.source.entries[name], self.source.read(name)
        if name in self.plan.changes:
            before, value = value, convert_tensor(value, self.plan.to)
            self.errors[name] = error_between(before, value)
        self.advance(stored.nbytes)
        return {stored.key(part): _own_storage(data) for part, data in parts_of(value).items()}


class _StreamingPlanner(QuantizedSavePlanner):
    """Plans the stand-ins; hands the writer what the stream makes in their place."""

    def __init__(self, stream: EntryStream, paths: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__(flatten_state_dict=bool(paths))
        self.stream, self.paths = stream, paths

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self.flatten_state_dict:  # the stand-ins came flat; their places are those of the source
            self.mappings = {entry: self.paths.get(entry, (entry,)) for entry in self.mappings}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        source, plan = self.stream.source, self.stream.plan
        # their masters are copied, and are not what the new bytes were made from
        written = {name: _written_entry(entry, plan) for name, entry in source.entries.items()}
        mastered = Masters.among(written, source.converted | {*plan.changes}).beside
        converted_now = source.converted | {*plan.changes} & mastered.keys()
        if converted_now:
            mark_converted(metadata, converted_now)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.stream.take(index.fqn) if index.fqn in self.stream else super().lookup_object(index)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        for step in self.steps:
            if isinstance(step, ChecksumTable):
                step.pickled.clear()  # kept because pickling twice may give other bytes; reading twice does not
        return data

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's name
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, io.BytesIO):
            return object  # stored bytes already, where stock pickles
        return super().transform_object(write_item, object)


def _written_entry(entry: Entry, plan: ConversionPlan) -> Entry:
    """A tensor as it will be written."""
    if entry.name not in plan.changes:
        return entry
    return replace(entry, recipe=plan.to) if isinstance(plan.to, Recipe) else replace(entry, recipe=None, dtype=plan.to)


def _stand_in(entry: Entry) -> Tensor:
    """A tensor that takes almost no memory: parts that extend along it are one element, expanded."""
    parts = {
        spec.name: torch.zeros(() if spec.per_row else shape, dtype=dtype, device="cpu").expand(shape)
        for spec, (dtype, shape) in zip(entry.specs(), entry.parts().values(), strict=True)
    }
    return entry.tensor(parts)


def _paths(source: Stored, plan: ConversionPlan) -> dict[str, tuple[Any, ...]]:
    """Written entry -> its place in the nested state dict; a part stands where its weight did."""
    stored = source.paths
    paths = {name: stored[name] for name in source.blobs if name in stored}
    for name, entry in source.entries.items():
        first = entry.part_keys()[0]
        if first not in stored:
            continue
        place = _weight_path(stored[first], first[len(name) :])
        for key in _written_entry(entry, plan).part_keys():
            paths[key] = _part_path(place, key[len(name) :])
    return paths


def _weight_path(path: tuple[Any, ...], suffix: str) -> tuple[Any, ...]:
    """The path of a weight, from the `path` of its part with this `suffix` (".payload"); the path itself for ""."""
    if not suffix:
        return path
    *above, last = path
    return tuple(above) if f".{last}" == suffix else (*above, str(last).removesuffix(suffix))


def _part_path(path: tuple[Any, ...], suffix: str) -> tuple[Any, ...]:
    """The inverse of `_weight_path`: in a list a part is one step below its weight, else beside it."""
    if not suffix:
        return path
    return (*path, suffix[1:]) if isinstance(path[-1], int) else (*path[:-1], f"{path[-1]}{suffix}")


def _own_storage(data: Tensor) -> Tensor:
    """A contiguous tensor that has its storage for itself."""
    data = data.detach().contiguous()
    return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()
