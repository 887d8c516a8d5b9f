"""QuantizedLoadPlanner: payloads and scales from a DCP checkpoint straight into the live shards, or converted.

On any world size, mesh or shard dim, in the steps of every load planner:

    set_up_planner       every rank   compare target and checkpoint; all differences in one error, before anything is
                                      touched; then expand: the parts alias the live shards, so that stock resharding
                                      writes the weights in place; conversions are set apart
    create_local_plan    every rank   stock read items, and those of the conversions; what they read must make up what
                                      they write (coverage.py)
    finish_plan          every rank   before these, one byte from the end of every file: a missing, truncated or damaged
                                      file stops the load before the first byte is written
    load / commit        every rank   stock; a conversion is written when its last item arrives (all_conversions.py)

Chunks of a delta are rebuilt below all of this (rebuilding.py); its base is found, or refused, with the first probe.
Where the storage drops planner data the manifest is read first, as a tensor, and compared when it arrives.
"""

import dataclasses
import datetime as dt
import io
import itertools
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_adapters.load.all_conversions import unequal
from dcp_adapters.load.compare import OWN, recipe_differences
from dcp_adapters.load.fitting import Fitted, fit
from dcp_adapters.load.one_memory import OneMemory
from dcp_adapters.load.together import refuse_lacking, refuse_nothing
from dcp_adapters.load.unpickling import unpickled
from dcp_adapters.plain.placed_shard import PlacedShard
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.checksums import CHECKSUMS, Verification
from dcp_adapters.records.manifest import MANIFEST, Manifest
from dcp_adapters.stored.reading.metadata_checks import stored_chunk
from dcp_adapters.stored.reading.order import (
    chunks_by_file,
    group_after_group,
    is_probe,
    original_index,
    probe_items,
)
from dcp_adapters.stored.reading.places import check_archives, check_ordinary
from dcp_adapters.stored.reading.rebuilding import Rebuilding
from dcp_adapters.torch_private import Unreadable, any_marked, flatten_state_dict, set_element
from fsdp_hooks.versions import count_writes
from qtensor.tensor.contents import forget_initial_values
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)
LOADS = itertools.count()  # names loads that each rank plans for itself; all ranks count alike


class QuantizedLoadPlanner(DefaultLoadPlanner):
    """Loads checkpoints into quantized and dense targets, bit for bit if the recipes agree.

    Use it with `dcp.load` on state dicts of plain or sharded models, nested or flat; the tensors in them are written in
    place. Byte entries are unpickled by torch.load(weights_only=True).

    Args:
        on_mismatch: "raise", a target whose recipe is not the checkpoint's is an error. "convert", it is converted:
            dense to quantized, quantized to dense, one recipe to another; each rank writes its piece of the converted
            full tensor, bit for bit. Scales that shards share are agreed on by one all-reduce for each group of ranks
            that shares some.
        verify_checksums: compare every chunk that is read whole, and not cast, with the checkpoint's checksums. A chunk
            that a rank reads in part is not checked; `python -m dcp_adapters verify` checks all.
        conversion_timeout: how long a rank waits for the others' amaxes. A rank that fails to read tells the others at
            once if the planner or a reader of this package sees the error; otherwise they give up after this time.
        **kwargs: those of DefaultLoadPlanner. allow_partial_load=True permits tensors that only the target or only the
            checkpoint has.

    Raises:
        ValueError: an unknown on_mismatch. While loading, on all ranks and before anything is written: one error that
            lists every missing, extra, misshapen or differently quantized tensor. A tensor of the checkpoint is extra
            if a rank's target has its container (the dict that held it) and no rank's has the tensor; so loading only
            {"model": ...} of a checkpoint with an optimizer in it is fine, and so are stages of a pipeline. A partial
            load that would load no tensor. A byte entry that needs more than weights_only=True allows.
        EOFError, FileNotFoundError: a file of the checkpoint is truncated or missing, or the base of a delta is; a
            base that is another checkpoint by now is a ValueError. Nothing has been written.
        RuntimeError: a chunk's bytes are not those that were saved; another rank failed while scales were agreed on.

    Example:
        ```python
        >>> saved = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(saved, checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> found = {"weight": quantize(torch.zeros(64, 64), MXFP8BlockScaling())}
        >>> dcp.load(found, checkpoint_id="step-1000", planner=QuantizedLoadPlanner())
        >>> torch.equal(found["weight"].dequantize(), saved["weight"].dequantize())
        True
        ```
    """

    def __init__(
        self,
        *,
        on_mismatch: str = "raise",
        verify_checksums: bool = False,
        conversion_timeout: dt.timedelta = dt.timedelta(minutes=9),  # below NCCL's 10 minutes and gloo's 30
        **kwargs: Any,
    ) -> None:
        if on_mismatch not in {"raise", "convert"}:
            raise ValueError(f'QuantizedLoadPlanner: on_mismatch={on_mismatch!r} is not one of "raise", "convert"')
        super().__init__(**kwargs)
        self.on_mismatch, self.verify_checksums = on_mismatch, verify_checksums
        self.conversion_timeout = conversion_timeout

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        """Ask whether what is stored is right for the target, and decide what is read."""
        assert metadata is not None
        # a reader cannot raise what it could not read (torch_private.Unreadable); raised here, DCP hands it to all
        # ranks
        Unreadable.refuse(metadata)
        flat, paths = state_dict, dict[str, Any]({name: (name,) for name in state_dict})
        if self.flatten_state_dict:
            flat, paths = flatten_state_dict(state_dict)
        began = time.perf_counter() if LOG.isEnabledFor(logging.INFO) else None
        self.fitted = fitted = fit(
            flat,
            paths,
            metadata,
            partial=self.allow_partial_load,
            convert=self.on_mismatch == "convert",
            verify_checksums=self.verify_checksums,
            timeout=self.conversion_timeout,
        )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # stock puts None in the place of what it does not know
        for name, value in flat.items():
            if isinstance(value, PlacedShard):
                set_element(state_dict, paths[name], value)
        # in place of what stock flattened: it reads into the local parts, and so into the live shards
        self.state_dict, self.conversions = fitted.state_dict, fitted.conversions
        read = fitted.state_dict.keys() & metadata.state_dict_metadata.keys() - fitted.vectors.keys() - OWN
        self.one_memory = OneMemory({name: fitted.state_dict[name] for name in read}, self.conversions.targets)
        if shared := self.one_memory.read & fitted.pieces.keys():
            raise ValueError(
                f"{min(shared)}: it has several pieces, and shares memory with another target; whether both get the "
                "same values could not be told. Leave one of them out"
            )
        self.rebuilding = Rebuilding(None if fitted.manifest is None else fitted.manifest.base, metadata)
        self.verification = Verification() if fitted.has_checksums else None
        if began is not None:
            _log_fitted(fitted, time.perf_counter() - began)

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads, and what the coordinator compares."""
        return LoadPlan(self.fitted.items, planner_data=(self.conversions.listed(), self.fitted.share))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: return stock's plans, and a name for this load that all its ranks know.

        Raises:
            ValueError: ranks would convert a weight to different recipes, or no rank has a tensor that one of them
                lacks; DCP raises it on all of them.
        """
        listed, shares = zip(*(plan.planner_data for plan in global_plan), strict=True)
        assert self.metadata is not None
        refuse_lacking(shares, [plan.items for plan in global_plan], self.metadata, self.fitted.manifest)
        refuse_nothing(shares)
        problems = unequal(listed)
        if problems:
            raise ValueError(
                "the ranks' targets do not fit each other, nothing has been loaded; give all ranks the same weights, "
                "recipes and placements:" + in_lines(problems)
            )
        plans = super().create_global_plan(global_plan)
        # conversions meet in the store under this name; an older load has left its keys there
        name = uuid.uuid4().hex if len(plans) > 1 else None
        return [dataclasses.replace(plan, planner_data=name) for plan in plans]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Order what is read: probes, the checkpoint's own entries, what is loaded as it is, what is converted."""
        assert self.metadata is not None
        own = [item for item in new_plan.items if item.dest_index.fqn in OWN]
        converted = self.conversions.grouped(new_plan.items)
        apart = {id(item) for group in [own, *converted] for item in group}
        rest = [item for item in new_plan.items if id(item) not in apart] if apart else new_plan.items
        self.to_look_at = chunks_by_file(self.metadata, new_plan)
        probes = probe_items(self.metadata, new_plan, _call_weakly(self._look_at_file))
        self.checks = len(probes) + self.fitted.awaits_manifest  # what must pass before anything is written
        if self.verification is not None:
            self.verification.expect(sum(item.dest_index.fqn == CHECKSUMS for item in own))
        # a reader would take a coded chunk for an archive, so its bytes are read instead
        if any_marked([info for chunks in self.to_look_at.values() for _, info in chunks]):
            rest, own, *converted = map(self.rebuilding.replace_items, [rest, own, *converted])
        ordered = group_after_group([own, *converted], self.metadata)  # one call: aliases are numbered within it
        items = [*probes, *ordered[: len(own)], *rest, *ordered[len(own) :]]
        # there may be no check at all: then the load writes from here on
        self._count_passed(0)
        writing = dict.fromkeys(self.one_memory.written, self.one_memory.writing)
        self.conversions.begin(new_plan.planner_data or f"alone.{next(LOADS)}", writing)
        return dataclasses.replace(new_plan, items=items)

    def read_failed(self, error: BaseException) -> None:
        """Tell the ranks that would wait for this one; the readers of this package call it when they fail."""
        self.conversions.failed()

    def archives_checked(self) -> None:
        """Let probes look at no chunks; SafeFileSystemReader calls it when it has looked at all of them itself."""
        self.to_look_at = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Check a probe, or load a bytes entry; nothing in it is executed."""
        with self._tell_errors():
            if is_probe(read_item):
                self._check_probe(read_item, value)
                self._count_passed(1)
                return
            if Rebuilding.is_for(read_item):
                self._rebuild(read_item, value)
                return
            name = read_item.dest_index.fqn
            if self.verification is not None and self.verify_checksums:
                self.verification.see(name, read_item.storage_index, value)
            loaded = unpickled(name, value)
            if self.flatten_state_dict:
                set_element(self.original_state_dict, self.mappings[name], loaded)
            else:
                self.original_state_dict[name] = loaded

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return where to read to: a conversion's buffer, a part, or what stock finds."""
        if index.fqn in self.conversions.by_entry:
            return self.conversions.buffer(index.fqn)
        if index.fqn in self.fitted.pieces:
            return self.fitted.pieces[index.fqn][tuple(index.offset or ())]
        if index.fqn in self.fitted.parts:
            part: Tensor = self.state_dict[index.fqn]
            return part
        return super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Verify what was read; convert; spread a tensor-wide scale over a vector."""
        with self._tell_errors():
            super().commit_tensor(read_item, tensor)
            name = read_item.dest_index.fqn
            if self.verification is not None:
                self._verify(read_item, tensor)
            if self.fitted.awaits_manifest and name == MANIFEST:
                problems = recipe_differences(self.fitted.target, Manifest.from_tensor(self.state_dict[MANIFEST]))
                if problems:
                    raise ValueError(
                        "the checkpoint does not fit the target:\n" + "\n".join(f"  {problem}" for problem in problems)
                    )
                self._count_passed(1)
            elif name in self.fitted.vectors:
                # `tensor` is read into one element of the vector, which the copy would overwrite while it reads
                self.fitted.vectors[name].copy_(tensor.clone())
            if name in self.one_memory.read:
                self.one_memory.arrived(read_item, tensor)
            if name in self.conversions.by_entry:
                self.conversions.arrived(name)

    def _rebuild(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Rebuild a chunk of a delta, compare it with its checksum, and give its items their pieces."""
        assert self.verification is not None
        checksum = self.verification.saved_checksum(self.rebuilding.chunk_of(read_item))
        for item, piece in self.rebuilding.pieces(read_item, value, checksum):
            # as stock's reader does: a parameter that requires gradients refuses to be written in place
            target = self.resolve_tensor(item).detach()
            target.copy_(piece)
            self.commit_tensor(item, target)

    @contextmanager
    def _tell_errors(self) -> Iterator[None]:
        """Tell an error on this rank to those that wait for it."""
        try:
            yield
        except BaseException:
            self.conversions.failed()
            raise

    def _verify(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Digest a chunk that was read whole; it is compared now, or when the table has arrived."""
        assert self.metadata is not None
        assert self.verification is not None
        name, index = read_item.dest_index.fqn, original_index(read_item.storage_index)
        if name == CHECKSUMS:
            self.verification.arrived(self.state_dict[CHECKSUMS])
        if name == CHECKSUMS or not self.verify_checksums:
            return
        entry = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        # checksums are of whole chunks in the stored dtype
        if tensor.shape == stored_chunk(entry, index).sizes and tensor.dtype == entry.properties.dtype:
            self.verification.see(name, index, tensor.detach().cpu())

    def _look_at_file(self, path: Path, last: Any) -> None:
        """Check a file that a reader is about to open, and its chunks; leave one that is cut off to the probe."""
        assert self.metadata is not None
        with self._tell_errors():
            self.rebuilding.open(path.parents[len(PurePath(last.relative_path).parts) - 1])
            size = check_ordinary(path)
            if size is not None and size >= last.offset + last.length:
                check_archives(path, dict(self.to_look_at.get(last.relative_path, ())), self.metadata)

    def _check_probe(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self.rebuilding.is_needed:
            raise ValueError(
                "the checkpoint is a delta, and this reader does not tell in which directory it reads, from which the "
                "base is found; load with FileSystemReader or SafeFileSystemReader. Nothing has been loaded"
            )
        if len(value.read(1)) != 1:
            assert self.metadata is not None
            info = self.metadata.storage_data[read_item.storage_index]
            raise EOFError(
                f"{info.relative_path} of the checkpoint is truncated: it should hold at least {info.offset + 1} "
                "bytes. Nothing has been loaded; use another checkpoint"
            )

    def _count_passed(self, checks: int) -> None:
        """Count checks that passed. After the last one the load writes: preserved initial values are stale then."""
        self.checks -= checks
        if not self.checks:
            forget_initial_values(self.fitted.quantized.values())
            # the readers write into their parts, which torch does not count as writes of the wrappers
            count_writes(self.fitted.wrapped)


def _log_fitted(fitted: Fitted, seconds: float) -> None:
    stored = [item for item in fitted.items if item.dest_index.fqn not in OWN]
    LOG.info(
        "load: this rank reads %d pieces for %d tensors, of which %d are converted; compared and planned in %.2f s",
        *(len(stored), len(fitted.target.entries), len(fitted.conversions.all), seconds),
    )
    for one in fitted.conversions.all:
        own = one.target.recipe if isinstance(one.target, QuantizedTensor) else one.target.dtype
        LOG.debug("load: %s is converted from %s to %s", one.name, one.source.recipe or one.source.dtype, own)


def _call_weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a weak call of a method: readers keep the storage data, whose probes must not keep a planner alive."""
    kept = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        live = kept()
        if live is not None:
            live(*args, **kwargs)

    return call
