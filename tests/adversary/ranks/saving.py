"""Saves by simulated ranks into one directory, one after the other; at every end one whole checkpoint is visible.

A save may meet a rank that dies, cannot write, fails in its planner, or has something else than the others. Then all
ranks raise, and what the directory held before loads, bit for bit, with stock torch; the save after it succeeds.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard

from dcp_adapters import AtomicFileSystemWriter, QuantizedSavePlanner
from dcp_adapters.save.steps import plan_cache
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.cases import (
    SIZES,
    Layout,
    Weight,
    bits,
    death,
    directory,
    layout,
    parts,
    refused,
    simulated,
    weights,
    words,
)
from tests.adversary.ranks.world import World

BEFORE_WRITING = ("recipe", "scale", "missing", "taken", "meta")
WHILE_WRITING = ("before", "after", "finish", "resolve")
TROUBLE = (*["none"] * 4, *["death"] * 4, *WHILE_WRITING, *BEFORE_WRITING)


class OfEachRank(MutableMapping[str, Any]):
    """What is kept in a process, kept for each rank of a world."""

    def _own(self) -> OrderedDict[str, Any]:
        world, rank = World.here()
        kept: OrderedDict[str, Any] = world.kept.setdefault((id(self), rank), OrderedDict())
        return kept

    def __getitem__(self, key: str) -> Any:
        return self._own()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def popitem(self, last: bool = True) -> tuple[str, Any]:
        return self._own().popitem(last)

    def move_to_end(self, key: str) -> None:
        self._own().move_to_end(key)


def caches_of_each_rank() -> Any:
    """The plan caches of processes, apart for ranks."""
    return mock.patch.multiple(plan_cache, _locals=OfEachRank(), _globals=OfEachRank())


def scenario(random: Random) -> str:
    """A few saves; trouble in one of them."""
    size = random.choice(SIZES)
    given = weights(random)
    part = size in {4, 6, 8} and random.random() < 0.3  # one replica saves for all
    placed = layout(random, size, given)
    if part:
        placed = Layout((2, size // 2), {each.name: (Replicate(), Shard(0)) for each in given})
    count, trouble = random.randint(1, 3), random.choice(TROUBLE)
    at, who = random.randrange(count), random.randrange(size)
    options = {
        "checksums": random.random() < 0.7,
        "digest": random.random() < 0.3,
        "overwrite": random.choice(["keep", "keep", "delete_first"]),
        "enable_plan_caching": random.random() < 0.5,
    }
    seed = random.randrange(2**32)
    with directory() as path:
        visible: list[int | None] = [None] * count

        def body(rank: int) -> list[str]:
            mesh, errors = placed.device_mesh(), []
            group = mesh.get_group("inner") if part else None
            if part and rank >= size // 2:
                return []
            for number in range(count):
                own = trouble if (number, rank) == (at, who) else "none"
                state = {each.name: placed.piece(each, each.full(number), mesh) for each in given}
                _spoil(state, own, given, Random(seed))
                names = list(state)
                Random(f"{seed}/{rank}/{number}").shuffle(names)
                state = {name: state[name] for name in names}
                errors.append(_saved(state, path, own, options | {"group": group}, seed))
                if rank == 0:
                    visible[number] = seen(path, given, range(number + 1))
            return errors

        fault = death(random, size, 5 * count) if trouble == "death" else None
        with simulated(size, random, body, fault) as outcomes:
            if any(one.died for one in outcomes):
                newest = seen(path, given, range(count))
                if newest is None and options["overwrite"] == "keep" and any(number is not None for number in visible):
                    raise Found(f"a checkpoint was visible, and none is after a death: {visible}")
                return "death"
            if (error := next((one.error for one in outcomes if one.error), None)) is not None:
                raise error
            return _verdict([one.value for one in outcomes], visible, trouble, at, options)


def _verdict(errors: list[list[str]], visible: list[int | None], trouble: str, at: int, options: dict[str, Any]) -> str:
    raised = False
    for number, before in enumerate([None, *visible[:-1]]):
        told = [each[number] for each in errors if each]
        failed = refused(told, f"save {number} with {trouble}")
        if failed and number != at:
            raise Found(f"save {number} failed, though the trouble ({trouble}) was in save {at}: {told[0]}")
        if failed and trouble in ("none", "death"):
            raise Found(f"save {number} failed without a reason: {told[0]}")
        if not failed and visible[number] != number:
            raise Found(f"save {number} with {trouble} succeeded; visible: {visible[number]}")
        kept = (before, None) if options["overwrite"] == "delete_first" else (before,)
        if failed and visible[number] not in kept:
            raise Found(f"save {number} with {trouble} failed; visible: {visible[number]}, before: {before}")
        raised |= failed
    return "refused" if raised else "saved"


def _saved(state: dict[str, Any], path: Path, trouble: str, options: dict[str, Any], seed: int) -> str:
    writer = Writer(path, trouble) if seed % 2 else AtomicWriter(path, trouble)
    planner = Planner(trouble, **{key: value for key, value in options.items() if key != "group"})
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=options["group"])
    except (Exception, CheckpointException) as error:
        return words(error)
    return ""


class Faulty:
    """A writer that fails where it is told to."""

    def __init__(self, path: Path, trouble: str) -> None:
        super().__init__(path, single_file_per_rank=len(trouble) % 2 == 0, sync_files=False)  # type: ignore[call-arg]
        self.trouble = trouble

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.trouble == "before":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        World.here()[0].pause()
        written = super().write_data(plan, planner)  # type: ignore[misc]
        if self.trouble == "after":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        if self.trouble == "finish":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().finish(metadata, results)  # type: ignore[misc]


class Writer(Faulty, FileSystemWriter):
    pass


class AtomicWriter(Faulty, AtomicFileSystemWriter):
    pass


class Planner(QuantizedSavePlanner):
    def __init__(self, trouble: str, **options: Any) -> None:
        super().__init__(**options)
        self.trouble = trouble

    def resolve_data(self, write_item: Any) -> Any:
        if self.trouble == "resolve":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().resolve_data(write_item)


def _spoil(state: dict[str, Any], trouble: str, given: list[Weight], random: Random) -> None:
    """Give this rank something else than the others have."""
    quantized = [each for each in given if each.facts is not None]
    weight = random.choice(quantized)
    name, value = weight.name, state[weight.name]
    if trouble == "missing":
        del state[random.choice(given).name]
    elif trouble == "taken":
        state[f"{name}.scale"] = torch.zeros(3)
    elif trouble == "meta":
        state["extra"] = torch.empty(3, device="meta")
    elif trouble == "recipe":
        other = MXFP8BlockScaling() if weight.shape[1] % 32 == 0 else Float8CurrentScaling()
        if other == weight.facts.recipe:  # type: ignore[union-attr]
            other = Float8CurrentScaling(element="e5m2")
        state[name] = quantize(weight.dense(), other)
    elif trouble == "scale" and weight.facts.tensor_wide is not None:  # type: ignore[union-attr]
        local: Any = value.to_local() if hasattr(value, "to_local") else value
        assert isinstance(local, QuantizedTensor)
        held = local.parts().get("global_scale", local.parts()["scale"])
        held.view(-1).view(torch.uint8).add_(1)


def seen(path: Path, given: list[Weight], versions: range) -> int | None:
    """Which version the directory holds, read by stock torch; None where it holds none."""
    if not (path / ".metadata").exists():
        return None
    reader = FileSystemReader(path)
    held: dict[str, Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if not name.startswith("qtensor.") and hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(held, storage_reader=FileSystemReader(path), no_dist=True)
    own = {name: bits(tensor) for name, tensor in held.items()}
    for version in versions:
        if own == {name: bits(part) for each in given for name, part in parts(each.name, each.full(version)).items()}:
            return version
    raise Found(f"the directory holds none of the versions that were saved: {sorted(own)}")
