"""Weights, layouts and verdicts that the scenarios of simulated ranks share."""

from __future__ import annotations

import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from qtensor import QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.world import Fault, Outcome, World
from tests.recipes import TABLE, Facts

SIZES = (2, 2, 2, 3, 3, 4, 4, 5, 6, 8)
# Errors of a program that did not expect what it got; a refusal has another type, and words of its own.
KINDS = "AssertionError|KeyError|AttributeError|IndexError|TypeError|UnboundLocalError|StopIteration"
HELPLESS = re.compile(rf"(^|: )({KINDS})(?!: metadata is None)\b", re.MULTILINE)  # torch's own, and clear


@dataclass(frozen=True)
class Weight:
    """A tensor of the state: quantized under a recipe, or dense."""

    name: str
    facts: Facts | None
    shape: tuple[int, ...]
    seed: int

    def dense(self, version: int = 0) -> Tensor:
        """bf16: its value at a version; rows of another magnitude each, and some zeros."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + version)
        x = torch.randn(self.shape, generator=generator)
        x *= torch.exp(torch.randn((*self.shape[:-1], 1), generator=generator))
        if self.seed % 3 == 0:
            x[: self.shape[0] // 2] = 0
        return x.to(torch.bfloat16)

    def full(self, version: int = 0) -> Tensor:
        """Its value at a version, whole."""
        return self.dense(version) if self.facts is None else quantize(self.dense(version), self.facts.recipe)


def weights(random: Random, most: int = 4, *, choose: Callable[[Facts], bool] = lambda _: True) -> list[Weight]:
    """Some weights of random recipes and shapes; at least one is quantized."""
    known = [each for each in TABLE if choose(each)]
    found = []
    for number in range(random.randint(1, most)):
        facts = random.choice(known) if not number or random.random() < 0.7 else None
        block = 1 if facts is None or facts.ragged else facts.block
        columns = block * random.randint(1, 3) if block > 1 else 8 * random.randint(1, 9)
        rows = (
            facts.block * random.randint(1, 3) if facts and facts.square and not facts.ragged else random.randint(1, 40)
        )
        name = f"{random.choice('abcxyz')}{number}.weight"
        found.append(Weight(name, facts, (rows, columns), random.randrange(10**6)))
    return found


Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Layout:
    """A mesh, and how weights are placed on it; None: whole on every rank, and no DTensor."""

    mesh: tuple[int, ...]
    placements: Mapping[str, Placements | None]

    def device_mesh(self) -> DeviceMesh:
        """On a rank."""
        return init_device_mesh("cpu", self.mesh, mesh_dim_names=("outer", "inner")[-len(self.mesh) :])

    def piece(self, weight: Weight, full: Tensor, mesh: DeviceMesh) -> Tensor:
        """What this rank holds of a weight, in memory of its own."""
        placements = self.placements[weight.name]
        if placements is None:
            return full.clone()
        placed = distribute_tensor(full, mesh, placements, src_data_rank=None)
        return DTensor.from_local(
            placed.to_local().clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )


def layout(random: Random, size: int, given: Sequence[Weight], *, plain: bool = True) -> Layout:
    """A random one of this many ranks."""
    mesh = (2, size // 2) if size % 2 == 0 and size > 2 and random.random() < 0.6 else (size,)
    return Layout(mesh, {weight.name: _placements(random, mesh, weight, plain=plain) for weight in given})


def _placements(random: Random, mesh: tuple[int, ...], weight: Weight, *, plain: bool) -> Placements | None:
    if plain and random.random() < 0.15:
        return None
    rest = (Replicate(),) * (len(mesh) - 1)
    choices: list[Placements] = [(*rest, Shard(0))] * 3 + [(Shard(0), *rest)]
    ragged = weight.facts is not None and weight.facts.ragged
    block = 1 if weight.facts is None or ragged else weight.facts.block
    if not ragged and weight.shape[1] % (block * mesh[-1]) == 0:
        choices += [(*rest, Shard(1)), (*(Shard(0) for _ in rest), Shard(1))]
    if plain:
        choices.append((Replicate(),) * len(mesh))
    return random.choice(choices)


def death(random: Random, size: int, most: int) -> Fault:
    """Of a random rank, at one of its first collectives."""
    return Fault(random.randrange(size), random.randrange(most), random.random() < 0.5)


@contextmanager
def simulated(
    size: int, random: Random, body: Callable[[int], Any], fault: Fault | None = None
) -> Iterator[list[Outcome]]:
    """How the ranks ended; what a dead one would do while it unwinds happens behind the block."""
    world = World(size, random, fault)
    with warnings.catch_warnings():  # one for all: threads share the filters
        warnings.simplefilter("ignore")
        outcomes = world.run(body)
    try:
        if world.hang:
            raise Found("\n".join([world.hang, *(_where(rank, one.error) for rank, one in enumerate(outcomes))]))
        yield outcomes
    finally:
        world.close()


def _where(rank: int, error: BaseException | None) -> str:
    """The calls, innermost last, in which a rank got its error; without torch's own."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    calls = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames if "torch" not in frame.filename
    ]
    return f"  rank {rank}: {' > '.join(call for call in calls if not call.startswith('world.py'))}"


def refused(errors: Sequence[str], what: str, *, alike: bool = True) -> bool:
    """Whether all ranks raised; none may raise alone, and none without words."""
    told = "\n".join(f"  rank {rank}: {text or 'went on'}" for rank, text in enumerate(errors))
    if any(errors) and not all(errors):
        raise Found(f"{what}: some ranks raised, others went on:\n{told}")
    if alike and len(set(errors)) > 1:
        raise Found(f"{what}: ranks raised different errors:\n{told}")
    found = next((text for text in errors if text.startswith("Found:")), None)
    if found is not None:
        raise Found(f"{what}: {found}")
    helpless = next((text for text in errors if HELPLESS.search(text)), None)
    if helpless is not None:
        raise Found(f"{what}: an error without help:\n{told}")
    return any(errors)


def words(error: BaseException) -> str:
    """Its type and text."""
    return f"{type(error).__name__}: {error}"


def bits(tensor: Tensor) -> bytes:
    """The bytes of a plain tensor, and of the parts of a quantized one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(local, QuantizedTensor):
        return b"".join(bits(part) for _, part in sorted(local.parts().items()))
    if not local.numel():
        return b""
    return local.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def parts(name: str, full: Tensor) -> dict[str, Tensor]:
    """The entries of a checkpoint in which a whole tensor is."""
    if not isinstance(full, QuantizedTensor):
        return {name: full}
    return {f"{name}.{part}": held for part, held in full.parts().items()}


@contextmanager
def directory() -> Iterator[Path]:
    """An empty one, in memory where the system has such."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="ranks-", dir=memory if memory.is_dir() else None))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
