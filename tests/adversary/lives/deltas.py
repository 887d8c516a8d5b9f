"""Steps in which a life is saved as what changed since an older save, and in which saves are asked to be sound."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedSavePlanner,
    checkpoint_bases,
    digest,
    remove_checkpoints,
)
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.verifying.verify import verify
from tests.adversary.attack import Found
from tests.adversary.lives import numerics
from tests.adversary.lives.checkpoints import complete, fresh, loaded, plain_entries
from tests.adversary.lives.life import different, local, stored
from tests.adversary.lives.outgoing import change
from tests.adversary.lives.twin import as_array, raw, same_values

if TYPE_CHECKING:
    from tests.adversary.lives.life import Life
    from tests.adversary.lives.twin import Weight

LOST = r"where there is no checkpoint"
CHAIN = "which is itself a delta to"


def since_base(life: Life, random: Random) -> None:
    """A delta to a full save of this life, which may be of another time and of other layers."""
    life.saves += 1
    run = life.path / f"run-{life.saves}"
    if life.bases and random.random() < 0.5:
        base = random.choice(life.bases)
        run = base.parent
    else:
        base = run / "full"
        _save(life, random, base)
        life.bases.append(base)
    change(life, random)
    path = run / f"delta-{life.saves}"
    digested = random.random() < 0.5
    _save(life, random, path, delta_to=base, digest=digested)
    _check_delta(life, random, path)
    if random.random() < 0.3:
        _must_fail(lambda: _save(life, random, run / "chain", delta_to=path), CHAIN, "a delta to a delta")
    end = random.choice(("stays", "stays", "moved", "removed", "replaced", "tidied"))
    if end == "stays":
        return
    _at_first(life, lambda: _ended(end, run, base, path))
    life.bases = [each for each in life.bases if each.parent != run]
    if end == "moved":
        _check_delta(life, random, run.with_name(f"{run.name}-moved") / path.name)
    elif end == "tidied":
        _check_delta(life, random, path)
    elif _needs_base(path):
        _check_lost(life, random, path, LOST if end == "removed" else "where another one is now")


def _save(life: Life, random: Random, path: Path, *, delta_to: Path | None = None, **options: Any) -> None:
    """Of the model, in any way; the live weights change while an asynchronous one is written."""
    state = {"model": life.net.state_dict(), "step": life.saves}
    planner = QuantizedSavePlanner(delta_to=delta_to, enable_plan_caching=random.random() < 0.2, **options)
    where: Any = random.choice(({"checkpoint_id": path}, {"storage_writer": AtomicFileSystemWriter(path)}))
    if random.random() < 0.6:
        with life.under():
            dcp.save(state, **where, planner=planner)
        return
    more = {"process_group": life.uploads} if life.uploads is not None else {}
    held = {name: local(param).clone() for name, param in life.named().items()}
    with life.under(device=False):
        future = dcp.async_save(state, **where, planner=planner, **more)
        with torch.no_grad():
            for param in life.named().values():
                local(param).zero_()
        try:
            future.result()
        finally:
            with torch.no_grad():
                for name, param in life.named().items():
                    local(param).copy_(held[name])


def _check_delta(life: Life, random: Random, path: Path) -> None:
    """It loads, has the digest of the model, verifies, and torch alone takes it for nothing that it could read."""
    other, _ = fresh(life, random, life.layers)
    state = {"model": other.state_dict(), "step": -1}
    loaded(life, random, state, path)
    if state["step"] != life.saves:
        raise Found(f"step {state['step']} was loaded, {life.saves} saved")
    for name, param in other.named_parameters():
        wanted = life.piece(param, life.weights[name])
        if (found := stored(local(param))) != wanted:
            raise Found(f"{name} of a delta: {different(found, wanted)}")
    with life.under():
        if (own := digest(life.net)) != digest(other) or own != digest(path, prefix="model."):
            raise Found("a model and its checkpoint as a delta have different digests")
    if life.first:
        opened = StoredCheckpoint(path, check=True)
        for name, weight in life.weights.items():
            parts = opened.parts(f"model.{name}")
            for part, content in weight.stored().items():
                if raw(parts[part or next(iter(parts))]) != content:
                    raise Found(f"{name}.{part} of a delta is not stored as it is")
        errors = [error for error in verify(path).errors if "NaN" not in error.message]  # which some weights are
        if errors:
            raise Found(f"a delta does not verify: {errors[0]}")
        if _needs_base(path):
            _must_fail(lambda: plain_entries(path), "Unknown extension name", "a delta read by torch alone")


def _needs_base(path: Path) -> bool:
    """Whether anything is coded; else all of it is stored as in full."""
    storage = dcp.FileSystemReader(path).read_metadata().storage_data
    return any(info.transform_descriptors for info in storage.values())


def _check_lost(life: Life, random: Random, path: Path, text: str) -> None:
    """Without its base it is an error, and the target is as it was."""
    other, _ = fresh(life, random, life.layers)
    before = {name: stored(local(param)) for name, param in other.named_parameters()}
    state = {"model": other.state_dict(), "step": -1}
    _must_fail(lambda: loaded(life, random, state, path), text, "a delta without its base")
    if before != {name: stored(local(param)) for name, param in other.named_parameters()}:
        raise Found("a delta without its base was refused, and something was loaded")
    if life.first and not verify(path).errors:
        raise Found("a delta without its base verifies")


def _ended(end: str, run: Path, base: Path, path: Path) -> None:
    if end == "moved":
        run.rename(run.with_name(f"{run.name}-moved"))
    elif end == "removed":
        shutil.rmtree(base)
    elif end == "replaced":
        dcp.save({"b": torch.ones(2, device="cpu")}, checkpoint_id=base, planner=QuantizedSavePlanner(), no_dist=True)
    else:
        remove_checkpoints(run, [path.name])
        if checkpoint_bases(run) != {base.name: None, path.name: base.name}:
            raise Found(f"{checkpoint_bases(run)} is left where {path.name} was to be kept")


def _at_first(life: Life, act: Any) -> None:
    """By one process, while the others wait for it."""
    if life.first:
        act()
    life.everywhere(None)


def _must_fail(act: Any, text: str, what: str) -> None:
    try:
        act()
    except (ValueError, OSError, CheckpointException) as error:
        if text not in str(error):
            raise Found(f"{what}: expected an error with {text!r}, got {error}") from error
        return
    raise Found(f"{what}: expected an error with {text!r}, and it went through")


# -- is all of it of one step? -----------------------------------------------------------------------------------------


def audited(life: Life, random: Random) -> Any:
    """A save with `verify` goes through where each master leads to its weight, and is refused where one does not."""
    if random.random() < 0.4:
        change(life, random)  # behind the optimizer
    life.saves += 1
    level = random.choice(("deep", "own_scales"))
    state: dict[str, Any] = {"model": life.net.state_dict()}
    verdicts = [_own_scales(weight) for weight in life.weights.values()] if level == "own_scales" else [True]
    if life.plan.masters and complete(life):
        state["optim"] = get_optimizer_state_dict(life.net, life.optimizer)
        states = life.twin.states()
        for name, held in states.items():
            if "master_weight" in held:
                verdicts.append(_fits(life.weights[name], held["master_weight"]))
    path = life.path / f"audited-{life.saves}"
    try:
        with life.under():
            dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner(verify=level))
    except CheckpointException as error:
        if "is not sound, nothing has been written" not in str(error):
            raise
        if all(verdicts):
            raise Found(f"a sound state was refused by verify={level!r}: {error}") from error
        if (path / ".metadata").exists():
            raise Found("a save that was refused has left a checkpoint") from error
        return "refused"
    if False in verdicts and life.uploads is None:  # a rank does not judge blocks that it shares with others
        raise Found(f"a state whose masters lead to other bytes went through verify={level!r}")
    return None


def _fits(weight: Weight, master: torch.Tensor) -> bool | None:
    """Whether a master leads to its weight's bytes, or is what they decode to; None: that is not asked here."""
    if not bool(master.isfinite().all()):
        return None
    if same_values(master, weight.decoded()):
        return True
    if not weight.quantized:
        assert weight.value is not None
        return same_values(master.to(weight.dtype), weight.value)
    assert weight.facts is not None
    assert weight.parts is not None
    if weight.facts.history:
        return None
    encoded = numerics.encode(as_array(master), weight.facts)
    return all(encoded[part].tobytes() == held.tobytes() for part, held in weight.parts.items())


def _own_scales(weight: Weight) -> bool | None:
    """True where quantizing surely made these scales: what they decode to has the same ones."""
    if not weight.quantized:
        return True
    assert weight.facts is not None
    assert weight.parts is not None
    if weight.facts.history:
        return None
    encoded = numerics.encode(as_array(weight.decoded()), weight.facts)
    same = all(encoded[part].tobytes() == held.tobytes() for part, held in weight.parts.items())
    return True if same else None


STEPS = {"since_base": since_base, "audited": audited}
