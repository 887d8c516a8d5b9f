"""WeightStream: quantized weights, as an export would write them, in buckets for an engine that is running.

    construct    the source is opened, planned, and compared between ranks; nothing is gathered
    iterate      the same again, since training has gone on; then, a group at a time:
                     begin to gather the next group -> wait for this one -> hand out its tensors, bucket by bucket

A group is what FSDP gathers at once: one collective brings the shards of all its tensors together, on rank 0 alone
(to="first": the others receive nothing) or on all ranks. Shards are only read: nothing is unsharded, and whoever leaves
a stream half-way leaves the model as it was. Memory is the group that is handed out, the one that is gathered
meanwhile, and a bucket, whatever the size of the model. A stream that keeps its last version (kept_tensors.py) has that
copy on the host, too, and makes deltas from it.
"""

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.hf.exporting.config import model_config
from dcp_adapters.hf.exporting.groups import groups_of
from dcp_adapters.hf.exporting.making import Job, in_groups, made_tensors, own_groups
from dcp_adapters.hf.exporting.outputs import Output
from dcp_adapters.hf.exporting.plan import ExportPlan
from dcp_adapters.hf.exporting.prepare import Asked, prepared, requantizes
from dcp_adapters.hf.exporting.quantizing import Quantizing
from dcp_adapters.hf.layouts.registry import layout_named
from dcp_adapters.hf.models.adapters import check_adapters
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.progress_bar import progress_bar
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.records.source import Keep, Source
from dcp_adapters.streams.announcement import Announcement
from dcp_adapters.streams.buckets import TensorRecord, bucket_sizes, buckets_of, difference
from dcp_adapters.streams.kept_tensors import KeptTensors, Pass, refuse_other_version
from dcp_adapters.streams.together import abort_on_error, attempt, raise_first, step_together
from dcp_adapters.streams.transport import Sender, send_delta
from fsdp_hooks.ranks.across_ranks import Ranks, chosen_ranks, global_ranks, is_first, on_all, on_first
from fsdp_hooks.ranks.waiting import waited_for
from qtensor.spec.recipes import Recipe
from qtensor.spec.selection import check_lists

LOG = logging.getLogger(__name__)
RECEIVE = ("first", "all")


class WeightStream:
    """Quantized weights in buckets, bit for bit what `export_hf` writes; as often as wanted, while training goes on.

    All ranks make it and iterate over it alike. Each pass is a version: what the weights are when it begins. Write to
    them (an optimizer's step, a load) between passes alone: groups are gathered as they come, and what is gathered
    behind a write has the new values.

    Args:
        model_or_state_dict: a module or state dict (plain, FSDP2, TP, HSDP; nested or flat). A module is read anew in
            each pass; the tensors of a state dict stay those it has, even where FSDP gives the model others (uneven
            shards before the first forward, `to`). Weights with storage="high_precision" are streamed as the quantized
            ones that forwards use.
        layout: "compressed-tensors", "modelopt", "fp8" or "mxfp4", as of `export_hf`.
        config: the model's directory, its config.json, a dict or a config object; by default that of a transformers
            model.
        rest: where to take tensors that the first does not have.
        prefix: what the names of the weights begin with in a nested state dict; it is cut off.
        fused_scales: "raise" or "requantize", as of `export_hf`.
        recipe: how to quantize dense linears on the way, each once its group is gathered, to the bytes that `quantize`
            gives for the whole weight (with fused_scales="requantize", under the largest scale of those that are
            fused). Weights that are quantized already stay as they are.
        include: with `recipe` alone, globs over the modules to quantize, as of `quantize_`; all are streamed.
        exclude: globs over those of them to leave as they are, likewise.
        bucket_bytes: of a bucket; a larger tensor is alone in its bucket.
        group_of: name of a tensor -> what stands for its group. By default the FSDP module it belongs to, or else the
            layer that its name tells.
        to: who receives the buckets: "first", rank 0, and the others help, receive nothing, and get empty buckets;
            "all", every rank.
        keep_last: keep the tensors of the last complete pass, for `since`. On ranks that receive, this takes `nbytes`
            of host memory, and at most as much again while a pass is under way.
        progress: a bar on rank 0, if it has a terminal.
        adapters: of peft, that are not merged: "raise" or "base", as of `export_hf`.
        group: the ranks that take part, which must hold all shards; None: all. Its first rank is the one called rank 0.
        no_dist: this process alone takes part, with whole weights.

    Attributes:
        version: of the last complete pass; 0 before the first.
        sizes: how many tensors are in each bucket.
        json: file name -> content of the files of JSON that an engine reads beside the weights: config.json with its
            quantization_config, hf_quant_config.json, as far as the layout and the model have them.

    Raises:
        ValueError: what `export_hf` refuses, with the same text on all ranks; an unknown option.
        TypeError: a source or config of another kind.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> stream = WeightStream(model, recipe=MXFP8BlockScaling(), config={"model_type": "mine"})
        >>> [name for bucket in stream for name in bucket]
        ['0.weight', '0.weight_scale', '0.bias']
        >>> stream.version
        1
        ```
    """

    def __init__(  # noqa: PLR0913 - options of one operation
        self,
        model_or_state_dict: nn.Module | Mapping[str, Any],
        *,
        layout: str = "compressed-tensors",
        config: Any = None,
        rest: Any = None,
        prefix: str | None = None,
        fused_scales: str = "raise",
        recipe: Recipe | None = None,
        include: Iterable[str] = ("*",),
        exclude: Iterable[str] = (),
        bucket_bytes: int = 256 * 2**20,
        group_of: Callable[[str], Hashable] | None = None,
        to: str = "first",
        keep_last: bool = False,
        progress: bool = False,
        adapters: str = "raise",
        group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        self._ranks = chosen_ranks("WeightStream", group, no_dist=no_dist)
        check_adapters("WeightStream", adapters)
        requantize = requantizes("WeightStream", fused_scales)
        if to not in RECEIVE:
            raise ValueError(f'WeightStream: to={to!r} is not one of "first", "all"')
        if bucket_bytes < 1:
            raise ValueError(f"WeightStream: bucket_bytes={bucket_bytes!r}, expected a positive number of bytes")
        check_lists("WeightStream", include=include, exclude=exclude)
        include, exclude = tuple(include), tuple(exclude)
        if recipe is None and (include, exclude) != (("*",), ()):
            raise ValueError(
                "WeightStream: include= and exclude= say which dense linears recipe= quantizes, and there is none; "
                "give a recipe, or leave them out: every tensor is streamed"
            )
        with waited_for(self._ranks, "WeightStream"):
            described = on_first(self._ranks, lambda: model_config(config, model_or_state_dict, prefix))
        self._asked = Asked(
            caller="WeightStream",
            given=model_or_state_dict,
            layout=layout_named(layout),
            described=described,
            rest=rest,
            prefix=prefix,
            requantize=requantize,
            max_shard_size=2**62,
            quantizing=None if recipe is None else Quantizing.of(model_or_state_dict, recipe, include, exclude, prefix),
            adapters=adapters,
            group=self._ranks,
        )
        self._group_of = groups_of(model_or_state_dict, prefix) if group_of is None else group_of
        self._keep = Keep(global_ranks(self._ranks)[0] if to == "first" else None, None, own=True)
        self._progress = progress
        self.version = 0
        source, plan = prepared(self._asked)
        groups = self._groups(source, plan)
        self._records = _records(groups)
        self.sizes = bucket_sizes(self._records, bucket_bytes)
        _check_alike(groups, (self.sizes, to, keep_last), self._ranks)
        self._kept = KeptTensors(self._records) if keep_last else None
        self.json: dict[str, Any] = described.json(plan.json, dtype_name(plan.dtype))

    def metadata(self) -> tuple[TensorRecord, ...]:
        """Name, dtype, shape and nbytes of every tensor, in the order in which they come; the same on all ranks."""
        return self._records

    @property
    def receives(self) -> bool:
        """Whether this rank gets the tensors; else it helps the rank that does."""
        return self._keep.is_here

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.nbytes for record in self._records)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The next version, in buckets: name -> tensor. A collective; all ranks get equally many buckets.

        Tensors are in memory of their own, where the shards are gathered (the CPU for gloo, a GPU for NCCL). Leave the
        loop on all ranks or on none.

        Raises:
            ValueError: as at construction, since scales are compared in every pass; the tensors are not those of
                `metadata()` any more; NaN in a weight. On all ranks; buckets before it may have been handed out.
        """
        taken = self._pass()
        yield from self._buckets(self._prepare(), [], taken)
        self._complete(taken)

    def send(self, sender: Sender | None) -> None:
        """Send the next version. A collective: all ranks call it, rank 0 with the sender, the others with None.

        With to="all", every rank that has a sender sends all of it.

        Raises:
            ValueError: as of iteration; the receiver is told.
            WeightStreamError: the receiver died, failed, or is late. On all ranks, and the model is as it was.
        """
        prepared = self._prepare()
        failed: list[Exception] = []
        taken = self._pass()
        announcement = Announcement(self.version + 1, self._records, self.sizes, self.json)
        told = log_work(LOG, "WeightStream: sending version %d", self.version + 1, nbytes=self.nbytes)
        with told, abort_on_error(sender):
            if sender is not None:
                attempt(failed, sender.begin, announcement)
            for bucket in self._buckets(prepared, failed, taken):
                if sender is not None and bucket and not failed:
                    attempt(failed, sender.bucket, bucket)
            step_together(self._ranks, lambda: None if sender is None else sender.end())
        self._complete(taken)

    def since(self, version: int) -> Delta | None:
        """The next version, as what changed since the last complete one. A collective; it needs keep_last=True.

        It is the delta that one process makes from the tensors of two exports, byte for byte, and leads from `version`
        to `version` + 1, which is the stream's version from then on. `apply_deltas` brings tensors that a receiver
        holds, by the names of `metadata()`, to it.

        Args:
            version: that the receiver has; the stream must have kept it.

        Returns:
            The delta on ranks that receive (rank 0, or all of them with to="all"); None elsewhere.

        Raises:
            ValueError: the stream keeps another version, or none, or ranks ask for different ones: on all ranks,
                before anything is gathered. What iteration raises; the version that was kept stays.
            ImportError: there is no zstd; install the extra `delta`.
        """
        refuse_other_version(self._kept, version, self._ranks, useless=False)
        taken, delta = self._delta()
        self._complete(taken)
        return delta

    def send_since(self, sender: Sender | None, version: int) -> None:
        """Send the next version as the delta of `since`, which the receiver takes with `Incoming.delta`.

        A collective, as `send`. The version counts when the receiver has accepted it; else the kept one stays.

        Raises:
            ValueError, ImportError: as of `since`, before the receiver is told anything; a sender on a rank that
                receives nothing.
            WeightStreamError: as of `send`.
        """
        useless = sender is not None and not self.receives
        refuse_other_version(self._kept, version, self._ranks, useless=useless)
        taken, delta = self._delta()
        told = log_work(LOG, "WeightStream: sending version %d as a delta", self.version + 1)
        with told, abort_on_error(sender):
            step_together(self._ranks, lambda: None if sender is None or delta is None else send_delta(sender, delta))
        self._complete(taken)

    def _prepare(self) -> tuple[Source, list[tuple[Output, ...]]]:
        source, plan = prepared(self._asked)
        return source, self._groups(source, plan, self._refuse_new)

    def _groups(
        self, source: Source, plan: ExportPlan, check: Callable[[list[tuple[Output, ...]]], None] = lambda groups: None
    ) -> list[tuple[Output, ...]]:
        """The outputs in the groups that are gathered together; what fails on one rank is raised on all."""
        groups: list[tuple[Output, ...]] = []

        def look() -> None:
            outputs = (output for file in plan.files for output in file.outputs)
            groups.extend(in_groups(outputs, own_groups(source, self._group_of)))
            check(groups)

        step_together(self._ranks, look)
        return groups

    def _refuse_new(self, groups: list[tuple[Output, ...]]) -> None:
        found = _records(groups)
        if found != self._records:
            what = difference(self._records, found)
            raise ValueError(f"WeightStream: since the stream was made, {what}; make another stream")

    def _pass(self) -> Pass | None:
        return None if self._kept is None else Pass(self._kept)

    def _complete(self, taken: Pass | None) -> None:
        if taken is not None:
            taken.complete()
        self.version += 1

    def _delta(self) -> tuple[Pass, Delta | None]:
        """A pass, and on ranks that receive what it changes."""
        taken, made = self._pass(), []
        assert taken is not None
        for bucket in self._buckets(self._prepare(), [], taken):
            del bucket
        step_together(self._ranks, lambda: made.append(taken.delta()) if self.receives else None)
        return taken, made[0] if made else None

    def _buckets(
        self, prepared: tuple[Source, list[tuple[Output, ...]]], failed: list[Exception], taken: Pass | None
    ) -> Iterator[dict[str, Tensor]]:
        """The buckets; after an error the rest of them are empty, and it is raised on all ranks at the end."""
        source, groups = prepared
        jobs = [Job(group, self._keep) for group in groups]
        show = self._progress and is_first(self._ranks)
        with (
            closing(made_tensors(source, jobs, failed)) as tensors,
            progress_bar("streaming", self.nbytes, enabled=show) as advance,
        ):
            for records in buckets_of(self._records, self.sizes):
                bucket: dict[str, Tensor] = {}
                for _ in records:
                    written, tensor = next(tensors)
                    if tensor is not None:
                        bucket[written.name] = tensor
                    if tensor is not None and taken is not None and not failed:
                        attempt(failed, taken.take, written.name, tensor)
                    advance(written.nbytes)
                tensor = None  # the bucket alone holds it
                yield {} if failed else bucket
                del bucket
        step_together(self._ranks, lambda: raise_first(failed))


def _records(groups: list[tuple[Output, ...]]) -> tuple[TensorRecord, ...]:
    return tuple(
        TensorRecord(written.name, written.dtype, written.shape)
        for group in groups
        for output in group
        for written in output.written
    )


def _check_alike(groups: list[tuple[Output, ...]], options: tuple[object, ...], ranks: Ranks) -> None:
    """Refuse ranks that would not gather alike."""
    own = repr(([[output.source for output in group] for group in groups], options))
    told = on_all(ranks, lambda: hashlib.sha256(own.encode()).hexdigest())
    other = next((rank for rank, each in enumerate(told) if each != told[0]), None)
    if other is not None:
        raise ValueError(
            f"WeightStream: ranks 0 and {other} differ in group_of=, bucket_bytes=, to= or keep_last=; give all ranks "
            "the same arguments"
        )
