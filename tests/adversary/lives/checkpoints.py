"""Steps in which a life is saved, and goes on as what was loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    QuantizedStager,
    SafeFileSystemReader,
)
from tests.adversary.attack import Found
from tests.adversary.lives import models, numerics
from tests.adversary.lives.life import Life, local
from tests.adversary.lives.models import FACTS, Layer
from tests.adversary.lives.twin import Weight, as_array, raw, weights_of
from tests.adversary.lives.writes import fits


def resume(life: Life, random: Random) -> None:
    """Saved, and loaded into another model of the same kind, with its optimizer or without."""
    with_optimizer = random.random() < 0.6 and complete(life)
    path = saved(life, random, with_optimizer=with_optimizer)
    check_stored(life, path)
    other, weights = fresh(life, random, life.layers)
    for name, weight in weights.items():
        weight.take(life.weights[name])
    optimizer, twin = None, None
    state: dict[str, Any] = {"model": other.state_dict(), "step": -1}
    before = life.net, life.optimizer
    life.net, old, life.weights = other, life.weights, weights
    try:
        for param, weight in zip(other.parameters(), weights.values(), strict=True):
            weight.requires_grad = bool(param.requires_grad)
        if with_optimizer:
            optimizer, _ = life.optimizers([name for group in life.twin.groups for name in group])
            with life.under(device=False):
                state["optim"] = get_optimizer_state_dict(other, optimizer)
    except BaseException:
        (life.net, life.optimizer), life.weights = before, old
        raise
    loaded(life, random, state, path)
    if state["step"] != life.saves:
        raise Found(f"step {state['step']} was loaded, {life.saves} saved")
    if not with_optimizer:
        life.tune(all_of_them=True)
        return
    set_optimizer_state_dict(other, optimizer, state["optim"])
    twin = life.twin.reloaded(weights)
    life.optimizer, life.twin, life.left = optimizer, twin, []


def complete(life: Life) -> bool:
    """Whether each parameter has a state, and all are in one group: what torch can describe by names."""
    states = life.twin.states()
    whole = all(weight.requires_grad for weight in life.weights.values()) and len(life.twin.groups) == 1
    return whole and not life.left and all(name in states and len(states[name]) for name in life.weights)


def saved(life: Life, random: Random, *, with_optimizer: bool) -> Path:
    """A checkpoint of the life as it stands, over an older one or not; the live weights change while it is written."""
    life.saves += 1
    state: dict[str, Any] = {"model": life.net.state_dict(), "step": life.saves}
    if with_optimizer:
        state["optim"] = get_optimizer_state_dict(life.net, life.optimizer)
    path = life.path / ("over" if random.random() < 0.4 else f"save-{life.saves}")
    options: dict[str, Any] = {
        "checksums": random.random() < 0.8,
        "digest": random.random() < 0.3,
        "enable_plan_caching": random.random() < 0.3,
    }
    if random.random() < 0.2:
        options["overwrite"] = "delete_first"
    how = random.choice(("sync", "sync", "async", "stager", "blocking", "twice"))
    where = random.choice(
        (
            lambda: {"checkpoint_id": path},
            lambda: {"storage_writer": dcp.FileSystemWriter(path, thread_count=2)},
            lambda: {"storage_writer": AtomicFileSystemWriter(path)},
        )
    )
    if "overwrite" in options and how != "sync":
        del options["overwrite"]
    planner = QuantizedSavePlanner(**options)
    if how == "sync":
        with life.under():
            dcp.save(state, **where(), planner=planner)
        return path
    with life.under(device=False):  # torch's stagers copy to the default device
        more: dict[str, Any] = {"process_group": life.uploads} if life.uploads is not None else {}
        if how == "stager":
            more["async_stager"] = QuantizedStager()
        elif how == "blocking":
            more |= {"storage_writer": dcp.FileSystemWriter(path)}
        first = None
        if how == "twice" and life.uploads is None:  # two at once; on ranks each would need a group of its own
            first = dcp.async_save(state, checkpoint_id=f"{path}-first", planner=QuantizedSavePlanner())
        future = dcp.async_save(state, **({} if "storage_writer" in more else where()), planner=planner, **more)
        with torch.no_grad():
            for param in life.net.parameters():
                local(param).zero_()
        future.result()
        if first is not None:
            first.result()
            check_stored(life, Path(f"{path}-first"))
        if "async_stager" in more:
            more["async_stager"].close()
    return path


def loaded(life: Life, random: Random, state: dict[str, Any], path: Path, **options: Any) -> None:
    """Load by a reader of either kind."""
    reader = random.choice((dcp.FileSystemReader, SafeFileSystemReader))(path)
    if random.random() < 0.3 and has_checksums(path):
        options["verify_checksums"] = True
    with life.under():
        dcp.load(state, storage_reader=reader, planner=QuantizedLoadPlanner(**options))


def has_checksums(path: Path) -> bool:
    return "qtensor.checksums" in dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def check_stored(life: Life, path: Path) -> None:
    """What torch alone reads are the bytes of the reference."""
    found = plain_entries(path)
    for name, weight in life.weights.items():
        for part, wanted in weight.stored().items():
            key = f"model.{name}.{part}".rstrip(".")
            if key not in found or raw(found[key]) != wanted:
                raise Found(f"{key} is not stored as it is")


def plain_entries(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint as torch alone reads them, by each rank for itself."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    held = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(held, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return held


def fresh(life: Life, random: Random, layers: list[Layer]) -> tuple[Any, dict[str, Weight]]:
    """Another model, with other values, sharded as the life's is."""
    seed = random.getrandbits(40)

    def values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return models.weights(shape, seed + sum(shape), dtype)

    with life.under():
        net = models.build(layers, values)
    return life.shard(net), weights_of(layers)


def convert(life: Life, random: Random) -> None:
    """Loaded into a model of other recipes and dtypes, as which the life goes on."""
    path = saved(life, random, with_optimizer=False)
    check_stored(life, path)
    layers = [_other(layer, random) for layer in life.layers]
    other, weights = fresh(life, random, layers)
    loaded(life, random, {"model": other.state_dict(), "step": 0}, path, on_mismatch="convert")
    life.net, old, life.weights, life.layers = other, life.weights, weights, layers
    whole = {name: life.whole(param) for name, param in life.named().items()}
    for name, weight in weights.items():
        _converted(name, old[name], weight, whole[name])
    life.agree()
    life.tune(all_of_them=True)


def _other(layer: Layer, random: Random) -> Layer:
    dtype = random.choice(models.DTYPES)
    layer = replace(layer, preserved=False)
    if random.random() < 0.3:
        return replace(layer, dtype=dtype)
    recipe = random.choice([each for each in FACTS.values() if fits(each, layer.shape)])
    layer = replace(layer, recipe=recipe.name, dtype=dtype)
    if layer.kind in ("linear", "dense"):
        kind = random.choice(("linear", "linear", "dense"))
        storage = random.choice(recipe.storages) if kind == "linear" else "quantized"
        return replace(layer, kind=kind, storage=storage, made="init")
    storage = layer.storage if layer.storage in recipe.storages else "quantized"
    return replace(layer, storage=storage)


def _converted(name: str, old: Weight, new: Weight, found: Any) -> None:
    """What a converting load must have made of `old`; of two recipes `new` takes over what was found, once judged."""
    if not new.quantized:
        new.value = old.decoded().to(new.dtype, copy=True) if old.quantized else old.value.to(new.dtype, copy=True)
    elif not old.quantized:
        new.parts = numerics.encode(as_array(old.value), new.facts)
    elif old.facts is new.facts:
        new.parts = {part: value.copy() for part, value in old.parts.items()}
    else:
        values = old.decoded()
        encoded = numerics.encode(as_array(values), new.facts)
        new.parts = {part: _as_stored(tensor, encoded[part]) for part, tensor in found.parts().items()}
        again = torch.from_numpy(numerics.decode(encoded, new.facts))
        own = new.decoded()
        exact = (own == values) | ((own != own) & (values != values))  # noqa: PLR0124
        plainly = (own == again) | ((own != own) & (again != again))  # noqa: PLR0124
        if not bool((exact | plainly).all()):
            raise Found(f"{name}: {old.facts.name} to {new.facts.name} is neither exact nor encoded")


def _as_stored(tensor: Tensor, like: Any) -> Any:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return np.frombuffer(flat.tobytes(), like.dtype).reshape(like.shape).copy()


STEPS = {"resume": resume, "convert": convert}
