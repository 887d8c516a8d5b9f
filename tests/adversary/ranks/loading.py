"""Loads by simulated ranks, as they are and converted, on other layouts than those that saved.

One rank may die, fail to read its metadata or its n-th chunk, or have another target than the others; a file may be cut
off. All ranks raise, then, with one text, and where it says that nothing has been loaded the targets are as they were.
Otherwise every rank holds its piece of what one process makes of the full tensors, bit for bit.
"""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, SafeFileSystemReader
from dcp_adapters.load import all_conversions
from qtensor import QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.cases import (
    SIZES,
    Layout,
    Weight,
    bits,
    death,
    directory,
    layout,
    refused,
    simulated,
    weights,
    words,
)
from tests.adversary.ranks.groups import Group
from tests.adversary.ranks.world import World
from tests.recipes import TABLE, Facts

TROUBLE = (*["none"] * 6, "death", "metadata", "chunk", "chunk", "cut", "gone", "shape", "recipe", "absent", "extra")
NOTHING = "nothing has been loaded"


def groups_of_loads() -> Any:
    """Conversions reduce over a group of their load; here, one whose late ranks are told at once."""

    def group(weights: Any, name: str, timeout: Any) -> Group:
        del timeout
        key = f"{weights.group_name} {dist.get_process_group_ranks(weights)} {name}"
        return Group(key, dist.get_rank(weights), dist.get_world_size(weights), waits=False)

    return mock.patch.object(all_conversions, "gloo_group", group)


def scenario(random: Random) -> str:
    """One load."""
    size = random.choice(SIZES)
    given = weights(random)
    targets = [_target(random, each) for each in given] if random.random() < 0.6 else given
    placed, trouble = layout(random, size, targets), random.choice(TROUBLE)
    who, seed = random.randrange(size), random.randrange(2**32)
    options = {
        "on_mismatch": "raise" if targets == given else "convert",
        "verify_checksums": random.random() < 0.3,
    }
    delta, single = random.random() < 0.3, random.random() < 0.5
    with directory() as above:
        path, base = above / "step", above / "base" if delta else None
        if base is not None:
            _saved(given, base, 2, single=single)
        _saved(given, path, 0, single=single, delta_to=base)
        if trouble in ("cut", "gone"):
            _damage(random, above, trouble)

        def body(rank: int) -> tuple[str, dict[str, bytes], dict[str, bytes], dict[str, bytes]]:
            mesh = placed.device_mesh()
            own = trouble if rank == who else "none"
            state = {each.name: placed.piece(each, each.full(1), mesh) for each in targets}
            expected = {
                each.name: bits(placed.piece(each, _converted(source, each), mesh))
                for source, each in zip(given, targets, strict=True)
            }
            if (spoiled := _spoil(state, own, targets, Random(seed))) is not None:
                del expected[spoiled]
            before = {name: bits(tensor) for name, tensor in state.items()}
            names = list(state)
            Random(f"{seed}/{rank}").shuffle(names)
            error = _loaded({name: state[name] for name in names}, path, own, options, seed, delta=delta)
            return error, before, {name: bits(tensor) for name, tensor in state.items()}, expected

        fault = death(random, size, 12) if trouble == "death" else None
        with simulated(size, random, body, fault) as outcomes:
            if any(one.died for one in outcomes):
                return "death"
            if (found := next((one.error for one in outcomes if one.error), None)) is not None:
                raise found
            return _verdict([one.value for one in outcomes], trouble, placed, told=_is_safe(seed, delta=delta))


def _verdict(values: list[Any], trouble: str, placed: Layout, *, told: bool) -> str:
    if refused([error for error, *_ in values], f"a load with {trouble}"):
        text = values[0][0]
        if trouble in ("none", "death"):
            raise Found(f"a load failed without a reason: {text}")
        if told and "did not come within" in text:
            raise Found(f"ranks waited for one that failed ({trouble}): {text}")
        if NOTHING in text.lower() and any(before != after for _, before, after, _ in values):
            raise Found(f"a load says that nothing has been loaded, and has written ({trouble}): {text}")
        return "refused"
    for rank, (_, _, after, expected) in enumerate(values):
        for name, own in expected.items():
            if after.get(name, own) != own:
                raise Found(f"{name} on rank {rank}, {placed.placements[name]}: other bytes than one process has")
    return "loaded"


def _target(random: Random, source: Weight) -> Weight:
    """The same tensor under another recipe, or dense."""
    rows, columns = source.shape
    fitting: list[Facts | None] = [None, source.facts]
    for each in TABLE:
        fits = each.ragged or (columns % each.block == 0 and (not each.square or rows % each.block == 0))
        if fits and not each.history:
            fitting.append(each)
    return Weight(source.name, random.choice(fitting), source.shape, source.seed)


def _converted(source: Weight, target: Weight) -> Tensor:
    """What one process makes of the full tensor."""
    full = source.full(0)
    if target.facts is None:
        return full.dequantize(torch.bfloat16) if isinstance(full, QuantizedTensor) else full
    if source.facts is not None and source.facts.recipe == target.facts.recipe:
        return full
    if not isinstance(full, QuantizedTensor):
        return quantize(full, target.facts.recipe)
    made = target.full(1)
    made.copy_(full)
    return made


def _saved(given: list[Weight], path: Path, version: int, *, single: bool, delta_to: Path | None = None) -> None:
    state = {each.name: each.full(version) for each in given}
    writer = dcp.FileSystemWriter(path, single_file_per_rank=single, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, planner=QuantizedSavePlanner(delta_to=delta_to), no_dist=True)


def _damage(random: Random, path: Path, trouble: str) -> None:
    file = random.choice(sorted(path.glob("*/*.distcp")))
    if trouble == "gone":
        file.unlink()
    else:
        os.truncate(file, random.randrange(file.stat().st_size))


def _loaded(state: dict[str, Any], path: Path, trouble: str, options: dict[str, Any], seed: int, *, delta: bool) -> str:
    reader: Any = (_Safe if _is_safe(seed, delta=delta) else _Stock)(path)
    reader.trouble = trouble
    planner = _Planner(**options)
    planner.fails_at = seed // 7 % 6 if trouble == "chunk" else None
    try:
        dcp.load(state, storage_reader=reader, planner=planner)
    except (Exception, CheckpointException) as error:
        return words(error)
    return ""


def _is_safe(seed: int, *, delta: bool) -> bool:
    """Whether it is our reader, which alone knows deltas."""
    return delta or seed % 3 > 0


class _Planner(QuantizedLoadPlanner):
    """Fails at its n-th commit, as it would where a checksum is wrong."""

    fails_at: int | None = None

    def load_bytes(self, read_item: Any, value: Any) -> None:
        with self._telling():
            self._count()
        super().load_bytes(read_item, value)

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        with self._telling():
            self._count()
        super().commit_tensor(read_item, tensor)

    def _count(self) -> None:
        World.here()[0].pause()
        if self.fails_at == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fails_at is not None:
            self.fails_at -= 1


class _Faulty:
    trouble = "none"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.trouble == "metadata" and not kwargs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_metadata(*args, **kwargs)  # type: ignore[misc]


class _Safe(_Faulty, SafeFileSystemReader):
    pass


class _Stock(_Faulty, FileSystemReader):
    pass


def _spoil(state: dict[str, Any], trouble: str, given: list[Weight], random: Random) -> str | None:
    """Give this rank another target than the others have; the name of the weight for which it has another."""
    weight = random.choice(given)
    if trouble == "shape":
        state[weight.name] = torch.zeros(weight.shape[0] + 1, weight.shape[1], dtype=torch.bfloat16)
    elif trouble == "recipe":
        fitting = [each.recipe for each in TABLE if each.block == 1 and not each.history]
        state[weight.name] = quantize(weight.dense(1), random.choice(fitting))
    elif trouble == "absent":
        del state[weight.name]
    elif trouble == "extra":
        state["extra"] = torch.zeros(3)
    return weight.name if trouble in ("shape", "recipe", "absent") else None
