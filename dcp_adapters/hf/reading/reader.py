"""HuggingFaceReader: a Hugging Face directory, quantized or dense, as a DCP checkpoint.

    read_metadata   every rank   only the headers of all files and a few scales; whatever cannot be loaded is refused
                                 here, before anything is written
    read_data       every rank   of each tensor the slices that the plan asks for, in the order of the plan

So stock resharding, QuantizedLoadPlanner's comparison, conversion and agreement of scales work on it as on any other
checkpoint. There is no DCP writer for such directories: `export_hf` writes them.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from dcp_adapters.hf.files.directory import FileTensor, read_directory
from dcp_adapters.hf.files.engine_names import pieces_of
from dcp_adapters.hf.layouts.rotations import said_tensor
from dcp_adapters.hf.models.architectures import Architecture
from dcp_adapters.hf.models.wanted_names import wanted_names
from dcp_adapters.hf.reading.as_checkpoint import Presented, presented, renamed
from dcp_adapters.hf.reading.passed_over import PassedOver
from dcp_adapters.hf.reading.placed import Placed, Slice
from dcp_adapters.hf.reading.schemes import contents_of, weight_of
from dcp_adapters.plain.progress_bar import progress_bar
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import MANIFEST_JSON
from dcp_adapters.stored.reading.reader import tell_failures
from fsdp_hooks.torch_private import cpu_by_default
from qtensor.tensor.quantized_tensor import QuantizedTensor

AT_ONCE = 2**24  # elements of a matrix that are compared at once


class OpenFiles:
    """The files of a directory, each opened when it is first needed; a context manager that closes them.

    Inside, the CPU is the default device: safetensors makes its tensors on that, whatever `device` it was opened with.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.stack, self.opened = root, ExitStack(), dict[str, Any]()

    def piece(self, tensor: FileTensor) -> Any:
        """Return safetensors' slice of a tensor; nothing is read before it is indexed."""
        if tensor.is_said:
            return said_tensor(tensor)
        file = self.opened.get(tensor.file)
        if file is None:
            file = self.opened[tensor.file] = self.stack.enter_context(safe_open(self.root / tensor.file, "pt"))
        return file.get_slice(tensor.name)

    def __enter__(self) -> "OpenFiles":
        self.stack.enter_context(cpu_by_default())
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.clear()
        self.stack.close()


class HuggingFaceReader(StorageReader):
    """Reads a directory of safetensors through `dcp.load` and `read_manifest`.

    Args:
        path: the directory.
        wanted: what the target has, by state-dict name; a weight of all experts is put together from the experts'
            linears only if it is named here.
        show: a progress bar over the bytes that are read, on a terminal.
        only_wanted: modules that hold nothing of `wanted` are left out, and files may have other names than the usual
            ones, see `read_directory`.
        passed_over: tensors of the files that are left out.
        architecture: of the target, if it is a model of transformers. Tensors are presented under the target's names in
            memory, which may differ from those in the files (wanted_names.py).
        may_lack: globs over names of the target that the files need not have.

    Attributes:
        ignored: names of those that `passed_over` was asked to leave out.
        unexpected: names of those that the model does without.

    Raises:
        FileNotFoundError: there are no safetensors, or some are missing.
        ValueError: files that are damaged or contradict each other; quantized in a way that the library does not read.
    """

    def __init__(  # noqa: PLR0913 - options
        self,
        path: str | os.PathLike[str],
        *,
        wanted: Mapping[str, Entry] | None = None,
        show: bool = False,
        only_wanted: bool = False,
        passed_over: PassedOver | None = None,
        architecture: Architecture | None = None,
        may_lack: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.architecture, self.may_lack = architecture, may_lack
        self.path, self.wanted, self.show, self.only_wanted = Path(path), dict(wanted or {}), show, only_wanted
        self.passed_over = passed_over or PassedOver()
        self.ignored, self.unexpected = list[str](), list[str]()
        self.made: Presented | None = None
        self.metadata: Metadata | None = None

    @property
    def root(self) -> Path:
        """The directory of the files; `path` may be one of them."""
        return self.path.parent if self.only_wanted and self.path.is_file() else self.path

    @property
    def checkpoint_id(self) -> str:
        """Return the directory, for messages."""
        return str(self.path)

    def presented(self) -> Presented:
        """Return what the directory holds, as entries of a checkpoint; read once."""
        if self.made is None:
            directory = read_directory(self.path, any_name=self.only_wanted)
            self.ignored = self.passed_over.asked(directory.tensors)
            # Names are translated weight by weight, and files hold a quantized one in parts.
            weights = {*map(weight_of, directory.tensors.keys() - set(self.ignored))}
            names = wanted_names(weights, self.wanted, self.architecture, directory.config, self.may_lack)
            wanted = {names.file_name(name): want for name, want in self.wanted.items()}
            kept = self._without_passed_over(directory.tensors, wanted)
            if self.only_wanted:
                kept = _of_wanted(kept, wanted)
            if len(kept) < len(directory.tensors):
                left_out = frozenset(name.rpartition(".")[0] for name in directory.tensors.keys() - kept)
                # Transforms of modules that are left out are not taken for those of modules that do not exist.
                directory = dataclasses.replace(directory, tensors=kept, left_out=left_out)
            # A matrix of small integers is taken for codes unless the target has integers of this name.
            counts = {name for name, want in wanted.items() if not want.dtype.is_floating_point}
            with OpenFiles(self.root) as files:
                contents = contents_of(directory, counts)
                made = presented(directory, contents, wanted, lambda tensor: files.piece(tensor)[...])
            # Layouts and experts are found by names of the files, so the target's names come last.
            self.made = renamed(made, names.memory_name) if names.in_files else made
        return self.made

    def _without_passed_over(
        self, tensors: Mapping[str, FileTensor], wanted: Mapping[str, Entry]
    ) -> Mapping[str, FileTensor]:
        self.unexpected = self.passed_over.by_model(tensors, wanted)
        left_out = {*self.ignored, *self.unexpected}
        return {name: tensor for name, tensor in tensors.items() if name not in left_out} if left_out else tensors

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, quantized or dense; None if none has this name."""
        entry = self.presented().entries.get(name)
        return None if entry is None else entry.shape

    def read(self, name: str) -> dict[str, Tensor]:
        """Read the whole parts of a tensor, on the CPU."""
        with OpenFiles(self.root) as files:
            return self.read_from(files, name)

    def read_from(self, files: OpenFiles, name: str) -> dict[str, Tensor]:
        """Read as `read` does, from files that stay open between tensors and make them on the default device."""
        made = self.presented()
        entry = made.entries[name]
        return {part: _whole_entry(made.placed[entry.key(part)], files) for part in entry.parts()}

    def values(self, name: str) -> Tensor:
        """Read a whole tensor on the CPU; a quantized one is dequantized, to the wanted dtype or the directory's."""
        value = self.presented().entries[name].tensor(self.read(name))
        return value.dequantize() if isinstance(value, QuantizedTensor) else value

    def alike(self, name: str, other: str) -> bool:
        """Return whether two tensors of the directory, dense or quantized, have equal bytes."""
        made = self.presented()
        one, two = made.entries[name], made.entries[other]
        if (one.recipe, one.parts()) != (two.recipe, two.parts()):
            return False
        keys = [(one.key(part), two.key(part)) for part in one.parts()]
        with OpenFiles(self.root) as files:
            return all(_have_equal_bytes(made.placed[own], made.placed[its], files) for own, its in keys)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another directory if DCP names one, before a load."""
        if checkpoint_id is not None and Path(checkpoint_id) != self.path:
            self.path, self.made, self.metadata = Path(checkpoint_id), None, None

    def read_metadata(self) -> Metadata:
        """Return the entries, and the manifest in the planner data."""
        if self.metadata is not None:
            return self.metadata
        made = self.presented()
        records: dict[str, Any] = {}
        storage: dict[MetadataIndex, Slice] = {}
        for name, entry in made.placed.items():
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in entry.chunks]
            records[name] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
            storage |= {MetadataIndex(name, torch.Size(one.offsets)): one.held for one in entry.chunks}
        # DCP's planners look for a flat state dict's paths here, and ours for the manifest.
        planner_data = {name: (name,) for name in records} | {MANIFEST_JSON: made.manifest.to_json()}
        meta = StorageMeta(checkpoint_id=str(self.path))
        self.metadata = Metadata(records, planner_data=planner_data, storage_data=storage, storage_meta=meta)
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: FBT001 - DCP's signature
        """Keep where the chunks come from."""
        self.storage: dict[MetadataIndex, Slice] = metadata.storage_data
        records: Mapping[str, Any] = metadata.state_dict_metadata
        self.itemsize = {name: record.properties.dtype.itemsize for name, record in records.items()}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; a planner with a method `read_failed(error)` is told of an error first."""
        with tell_failures(planner):
            total = sum(item.lengths.numel() * self.itemsize[item.storage_index.fqn] for item in plan.items)
            with (
                OpenFiles(self.root) as files,
                progress_bar(f"import {self.path.name}", total, enabled=self.show) as bar,
            ):
                for item in plan.items:
                    source = self.storage[item.storage_index]
                    held = source.take(files.piece(source.tensor), item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    _copy_into(target, held, source.tensor)
                    planner.commit_tensor(item, target)
                    bar(held.nbytes)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a directory."""
        return Path(checkpoint_id).is_dir()


def _of_wanted(tensors: Mapping[str, FileTensor], wanted: Mapping[str, Entry]) -> dict[str, FileTensor]:
    """Return all tensors of each module that has something wanted."""
    modules = {name.rpartition(".")[0] for name in wanted}
    modules |= {piece.module for name, want in wanted.items() for piece in pieces_of(name, want.shape) or ()}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in modules}


def _whole_entry(entry: Placed, files: OpenFiles) -> Tensor:
    """Return all chunks of an entry, in memory of their own."""
    out = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    for chunk in entry.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        out[box or ...] = entry.piece(chunk, files.piece).data
    return out


def _have_equal_bytes(one: Placed, two: Placed, files: OpenFiles) -> bool:
    """Compare the bytes of two entries of one dtype and shape, in pieces of AT_ONCE elements."""
    if len(one.chunks) != 1 or len(two.chunks) != 1:
        return False  # of experts, each a tensor of its own
    pair = [(chunk.held, files.piece(chunk.held.tensor)) for chunk in (*one.chunks, *two.chunks)]
    rows = max(1, AT_ONCE * one.shape[0] // max(1, math.prod(one.shape))) if one.shape else 1
    for at in range(0, one.shape[0] if one.shape else 1, rows):
        offsets = (at, *[0] * (len(one.shape) - 1)) if one.shape else ()
        sizes = (min(rows, one.shape[0] - at), *one.shape[1:]) if one.shape else ()
        own, its = (held.take(piece, offsets, sizes) for held, piece in pair)
        if not torch.equal(_bytes(own), _bytes(its)):
            return False
    return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _copy_into(target: Tensor, held: Tensor, tensor: FileTensor) -> None:
    if target.shape != held.shape:
        raise AssertionError(f"{tensor.name}: {tuple(held.shape)} into {tuple(target.shape)}")
    target.copy_(held)
