"""Digests, deltas, streams, exports, imports of live shards: those that one process makes of the full tensors.

A rank may die, lack a tensor, have one more, one under another recipe, one without bytes, one with a flipped bit; in an
export its disk may be full, in an update it may have other deltas. All ranks raise, then, or none does; whatever a
failed update was to write is as it was, and of a failed export nothing is visible.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from dcp_adapters import (
    Delta,
    HeldVersion,
    WeightStream,
    apply_deltas,
    delta_from_bytes,
    delta_to_bytes,
    export_hf,
    import_hf,
    tensor_digests,
)
from dcp_adapters.hf.exporting import writing
from qtensor import Float8CurrentScaling, QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.cases import (
    SIZES,
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
from tests.adversary.ranks.world import World

TROUBLE = ("none", "none", "none", "death", "missing", "more", "recipe", "meta", "bit", "disk", "deltas", "order")
State = dict[str, Tensor]


def full_disks() -> Any:
    """Exports fail on the rank whose disk is full."""

    def save_file(*args: Any, **kwargs: Any) -> None:
        here = getattr(World._here, "world", None)
        if here is not None and World.here()[1] in here.kept.get("full disks", ()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        safetensors.torch.save_file(*args, **kwargs)

    return mock.patch.object(writing, "save_file", save_file)


def scenario(random: Random) -> str:
    """One operation on live shards."""
    size = random.choice(SIZES)
    given = weights(random, 5)
    placed = layout(random, size, given)
    again = layout(random, size, given)
    kind, trouble = random.choice(sorted(KINDS)), random.choice(TROUBLE)
    who, seed = random.randrange(size), random.randrange(2**32)
    with directory() as path:
        operation = KINDS[kind]
        whole = [{each.name: each.full(version) for each in given} for version in (0, 1, 0, 1)]
        expected = _ended(lambda: operation(whole, path / "alone", "none", seed))

        def body(rank: int) -> tuple[str, Any]:
            World.here()[0].kept.setdefault("full disks", set()).update({who} if trouble == "disk" else ())
            mesh, own = placed.device_mesh(), trouble if rank == who else "none"
            other = again.device_mesh()
            states = [
                {each.name: where.piece(each, each.full(version), on) for each in given}
                for where, on in ((placed, mesh), (again, other))
                for version in (0, 1)
            ]
            for state in states:
                _spoil(state, own, given, Random(seed))
                if kind in ("delta", "digest") or own == "order":
                    _shuffle(state, f"{seed}/{rank}")
            return _ended(lambda: operation(states, path / "ranks", own, seed))

        fault = death(random, size, 24) if trouble == "death" else None
        with simulated(size, random, body, fault) as outcomes:
            if any(one.died for one in outcomes):
                return f"{kind} death"
            if (raised := next((one.error for one in outcomes if one.error), None)) is not None:
                raise raised
            return _verdict(kind, trouble, expected, [one.value for one in outcomes], path / "ranks")


def _verdict(kind: str, trouble: str, expected: tuple[str, Any], values: list[tuple[str, Any]], path: Path) -> str:
    failed = refused([error for error, _ in values], f"{kind} with {trouble}", alike=False)
    if failed and kind == "export" and path.exists():
        raise Found(f"an export with {trouble} failed and is visible: {values[0][0]}")
    if trouble not in ("none", "death"):
        return f"{kind} refused" if failed else f"{kind} went on with {trouble}"
    if failed != bool(expected[0]):
        raise Found(f"{kind}: one process: {expected[0] or 'fine'}; ranks: {[error for error, _ in values]}")
    if failed:
        return f"{kind} refused as alone"
    found = [value for _, value in values if value is not None]
    if not found or any(value != expected[1] for value in found):
        raise Found(f"{kind}: {len(values)} ranks made something else than one process")
    return kind


def _digests(states: list[State], path: Path, trouble: str, seed: int) -> Any:
    del path, trouble, seed
    return sorted(tensor_digests(states[0]).items())


def _delta(states: list[State], path: Path, trouble: str, seed: int) -> Any:
    """What changed; and a target that is placed otherwise is brought to it, and on to the next version."""
    del path, seed
    first, second, target, then = states
    base = HeldVersion(first, 1)
    delta = base.since(second, 2)
    base.hold(second, 2)
    deltas = [_on_all(each) for each in (delta, base.since(first, 3))]
    apply_deltas(target, deltas[:1])
    if any(bits(tensor) != bits(other) for tensor, other in zip(_sorted(target), _sorted(then), strict=True)):
        raise Found("an update has written other bytes than those of the version")
    held = _held(target)
    try:
        apply_deltas(target, deltas[:1] if trouble == "deltas" else deltas)
    except Exception as error:
        if _held(target) != held:
            raise Found("a failed update has written") from error
        raise
    return None if delta is None else delta_to_bytes(delta)


def _on_all(delta: Delta | None) -> Delta:
    """A delta that rank 0 has, on all ranks."""
    held = [None if delta is None else delta_to_bytes(delta)]
    if dist.is_initialized():
        dist.broadcast_object_list(held, src=0)
    assert held[0] is not None
    return delta_from_bytes(held[0])


def _sorted(state: State) -> list[Tensor]:
    return [state[name] for name in sorted(state)]


def _export(states: list[State], path: Path, trouble: str, seed: int) -> Any:
    del trouble
    layouts = ("compressed-tensors", "modelopt")
    export_hf(states[0], path, layout=layouts[seed % 2], max_shard_size=(1000, 10**6)[seed // 2 % 2], progress=False)
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if "index" not in file.name}


def _stream(states: list[State], path: Path, trouble: str, seed: int) -> Any:
    del path, trouble
    stream = WeightStream(
        states[0], to=("first", "all")[seed % 2], bucket_bytes=(100, 5000)[seed // 2 % 2], keep_last=seed // 4 % 2 == 0
    )
    held = {name: bits(tensor) for bucket in stream for name, tensor in bucket.items()}
    return held if stream.receives else None


def _import(states: list[State], path: Path, trouble: str, seed: int) -> Any:
    """What one process has exported, read into a model of other values."""
    source = path.parent / "alone"
    if path == source:
        export_hf(states[0], path, progress=False)
    model = nn.Module()
    for name, value in states[1].items():
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(value, requires_grad=False))
        model.add_module(name.removesuffix(".weight"), module)
    import_hf(source, model, on_mismatch=("raise", "convert")[seed % 2], progress=False)
    for name, param in model.named_parameters():
        if trouble == "none" and bits(param.detach()) != bits(states[0][name]):
            raise Found(f"{name}: an import has other bytes than what was exported")
    return "imported"


KINDS: dict[str, Callable[[list[State], Path, str, int], Any]] = {
    "delta": _delta,
    "digest": _digests,
    "export": _export,
    "import": _import,
    "stream": _stream,
}


def _ended(operation: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "", operation()
    except (Exception, CheckpointException) as error:
        return words(error), None


def _held(state: State) -> dict[str, bytes]:
    return {name: b"" if tensor.is_meta else bits(tensor) for name, tensor in state.items()}


def _shuffle(state: State, seed: str) -> None:
    """Another order of names on each rank."""
    names = sorted(state)
    Random(seed).shuffle(names)
    for name in names:
        state[name] = state.pop(name)


def _spoil(state: State, trouble: str, given: list[Weight], random: Random) -> None:
    """Give this rank something else than the others have."""
    weight = random.choice(given)
    name, value = weight.name, state[weight.name]
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if trouble == "missing":
        del state[name]
    elif trouble == "more":
        state["zz.weight"] = torch.zeros(3, 4)
    elif trouble == "meta":
        state[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    elif trouble == "recipe":
        other = quantize(torch.ones(local.shape), Float8CurrentScaling(element="e5m2"))
        state[name] = other if local is value else _like(other, value)
    elif trouble == "bit":
        held = local.payload if isinstance(local, QuantizedTensor) else local
        if held.numel():
            held.view(-1).view(torch.uint8)[0] ^= 1


def _like(local: Tensor, value: Any) -> Tensor:
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
