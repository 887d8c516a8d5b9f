"""Steps of sharded models."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_hooks import unsharded
from qtensor import quantize
from tests.adversary.lives import checkpoints, deltas, models, outgoing, training, twin, writes
from tests.adversary.lives.cutting import direction, styles

if TYPE_CHECKING:
    from tests.adversary.lives.twin import Weight


def train(life: Any, random: Random) -> Any:
    """Every data-parallel rank has a batch of its own; three have one, since a third is no number."""
    if not any(weight.requires_grad for weight in life.weights.values()):
        return "frozen"
    for _ in range(random.choice((1, 1, 2))):
        seed, (ranks, rank) = random.getrandbits(40), life.data_ranks
        batches = [life.batch(seed if ranks == 3 else seed + 1000 * each) for each in range(ranks)]
        xs, signs = batches[rank]
        with life.under():
            outputs = life.net(xs)
            sum((y * sign).sum() for y, sign in zip(outputs, signs, strict=True)).backward()
        before = {name: weight.grad for name, weight in life.weights.items()}
        for weight in life.weights.values():
            weight.grad = None
        wanted = twin.gradients(life.layers, life.weights, batches)[rank]
        for name, weight in life.weights.items():
            if weight.grad is not None:
                mean = weight.grad / ranks
                weight.grad = mean if before[name] is None else before[name] + mean
            else:
                weight.grad = before[name]
        compare_exact(life, outputs, wanted, xs)
    return None


def evaluate(life: Any, random: Random) -> None:
    """A forward without gradients."""
    xs, signs = life.batch(random.getrandbits(40))
    with life.under(), torch.no_grad():
        outputs = life.net(xs)
    compare_exact(life, outputs, twin.outputs(life.layers, life.weights, (xs, signs)), xs)


def compare_exact(life: Any, outputs: Any, wanted: Any, xs: Any) -> None:
    """All but those that are sums of rounded products.

    Where rows are cut, each rank's product is one of fewer rows, whose terms torch may add up in another order.
    """
    ranks = life.style.tensor_parallel
    for number, (layer, y, other) in enumerate(zip(life.layers, outputs, wanted, strict=True)):
        cut = direction(layer, ranks)
        if cut == "rows":
            pieces = life.weights[f"layers.{number}.{layer.weight}"].used().chunk(ranks)
            other = torch.cat([F.linear(xs[number], piece) for piece in pieces], dim=-1)  # noqa: PLW2901
        if cut != "columns":
            training.compare_outputs([y], [other], first=number)


def step(life: Any, random: Random) -> None:
    with life.under(device=False):
        life.optimizer.step()
        life.twin.step()
    life.agree()
    life.compare()
    life.compare_states()
    if random.random() < 0.8:
        training.zero(life, random)


def write(life: Any, random: Random) -> None:
    """One weight from a full tensor."""
    name = random.choice(list(life.weights))
    param, weight = life.named()[name], life.weights[name]
    x = models.weights(weight.shape, random.getrandbits(40), random.choice(writes.SOURCES))
    with torch.no_grad(), life.under():
        value: Any = quantize(x, weight.facts.recipe) if weight.quantized else x.to(weight.dtype)
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        random.choice((param, param.detach(), param.data)).copy_(value)
    weight.write(x if weight.quantized else x.to(weight.dtype))
    life.agree()


def halve(life: Any, random: Random) -> Any:
    """Arithmetic on shards, of weights whose blocks no shard shares."""
    names = [name for name, weight in life.weights.items() if alone(weight)]
    if not names:
        return "none"
    name = random.choice(names)
    weight = life.weights[name]
    value = weight.start()
    with torch.no_grad(), life.under():
        for each in (life.named()[name], value):
            each.mul_(0.5)
    weight.write(value)
    life.agree()
    return None


def alone(weight: Weight) -> bool:
    """Whether the bytes of a row depend on that row alone."""
    facts = weight.facts
    return not weight.quantized or (
        facts is not None and facts.tensor_wide is None and not facts.square and facts.block > 1
    )


def load_state_dict(life: Any, random: Random) -> None:
    """A full state dict on every rank, or shards of it."""
    full = random.random() < 0.5 and not replicated_by_all(life)
    partly = random.random() < 0.4
    state: dict[str, Any] = {}
    done = []
    params = life.named()
    for name, weight in life.weights.items():
        if partly and random.random() < 0.5:
            continue
        entry, finish = writes.entry_for(weight, random, assign=False, same=len(weight.shape) == 3)
        param = params[name]
        if isinstance(param, DTensor) and not full:
            entry = distribute_tensor(entry, param.device_mesh, param.placements, src_data_rank=None)
        state[name] = entry
        for number, layer in enumerate(life.layers):
            if layer.kind == "tied" and name == f"layers.{number}.linear.weight":
                state[f"layers.{number}.second.weight"] = entry
        done.append(finish)
    with life.under(device=False):
        if full or random.random() < 0.5:
            options = dcp_state.StateDictOptions(strict=not partly, full_state_dict=full)
            dcp_state.set_model_state_dict(life.net, state, options=options)
        else:
            life.net.load_state_dict(state, strict=not partly)
    for finish in done:
        finish()
    life.agree()


def gathered(life: Any, random: Random) -> None:
    """A write into gathered weights, nested, left by an exception or not."""
    names = [name for name in life.weights if random.random() < 0.5]
    x = {}
    for name in names:
        x[name] = models.weights(life.weights[name].shape, random.getrandbits(40), random.choice(writes.SOURCES))
    fails, nested = random.random() < 0.3, random.random() < 0.5
    sharded = {name for name, param in life.named().items() if isinstance(param, DTensor)}
    with life.under(), contextlib.suppress(KeyboardInterrupt), torch.no_grad(), unsharded(life.net, writeback=True):
        inner = unsharded(random.choice(list(life.net.layers)), writeback=True) if nested else contextlib.nullcontext()
        with inner:
            params = life.named()
            for name in names:
                param, value = params[name], x[name]
                if isinstance(param, DTensor):  # of tensor parallelism
                    weight = life.weights[name]
                    as_it_is = weight.facts is None or (weight.gathered and not fsdp(life))
                    value = value if as_it_is else quantize(value, weight.facts.recipe)
                    value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
                param.copy_(value)
            if fails:
                raise KeyboardInterrupt
    for name in names:
        weight = life.weights[name]
        if fails and name in sharded and fsdp(life):
            continue
        if weight.gathered and fsdp(life):
            shadow = replace(weight, gathered=False, parts=None)
            shadow.write(x[name])
            weight.write(shadow.dense())
        else:
            weight.write(x[name])
    life.agree()


def replicated_by_all(life: Any) -> bool:
    """Whether full values would be broadcast to all ranks, which quantized ones refuse."""
    return bool(life.style.kind == "hsdp" and life.style.mesh[0] == dist.get_world_size())


def fsdp(life: Any) -> bool:
    return "fsdp" in life.style.kind or life.style.kind == "hsdp"


def recut(life: Any, random: Random) -> None:
    """Saved, and loaded into a model that is cut in another way."""
    life.style = random.choice(styles(dist.get_world_size()))
    checkpoints.resume(life, random)


STEPS = {
    "train": train,
    "evaluate": evaluate,
    "step": step,
    "zero": training.zero,
    "add_group": training.add_group,
    "tune": training.tune,
    "write": write,
    "halve": halve,
    "load_state_dict": load_state_dict,
    "gathered": gathered,
    "resume": checkpoints.resume,
    "recut": recut,
    "convert": checkpoints.convert,
    "export": outgoing.export,
    "stream": outgoing.stream,
    "delta": outgoing.delta,
    "digests": outgoing.digests,
    "since_base": deltas.since_base,
    "audited": deltas.audited,
}
OFTEN = {
    "train": 8,
    "evaluate": 1,
    "step": 8,
    "zero": 1,
    "add_group": 1,
    "tune": 1,
    "write": 4,
    "halve": 1,
    "load_state_dict": 3,
    "gathered": 3,
    "resume": 2,
    "recut": 2,
    "convert": 2,
    "export": 1,
    "stream": 1,
    "delta": 1,
    "digests": 1,
    "since_base": 2,
    "audited": 1,
}
