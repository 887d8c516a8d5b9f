"""Lives of sharded models: every rank lives them, and compares its shards with pieces of the one reference.

A life has eras, each on another number of ranks and cut in another way; it goes from one to the next as a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales, unsharded
from qtensor import quantize
from tests.adversary.attack import Found
from tests.adversary.lives import checkpoints, models, outgoing, training, twin, writes
from tests.adversary.lives.life import Failure, Life, Plan, Step, local, quiet
from tests.adversary.lives.models import FACTS, Layer
from tests.adversary.lives.twin import Weight, held_equal, raw, same_values, weights_of


@dataclass(frozen=True)
class Style:
    """How a model is cut. mesh: data parallel, or (replicate, shard), or (data, tensor parallel)."""

    kind: str  # fsdp, hsdp, tp, fsdp tp
    mesh: tuple[int, ...]
    reshard: bool = True
    offload: bool = False

    @property
    def tensor_parallel(self) -> int:
        return self.mesh[-1] if "tp" in self.kind else 1


@dataclass(frozen=True)
class Era:
    """A stretch of a life on one set of ranks."""

    style: Style
    plan: Plan

    @property
    def ranks(self) -> int:
        size = 1
        for each in self.style.mesh:
            size *= each
        return size


def direction(layer: Layer, ranks: int) -> str:
    """How tensor parallelism cuts a layer: "rows", "columns", or "" for not at all."""
    if ranks == 1 or layer.kind not in ("linear", "dense") or layer.bias:
        return ""
    unit = 1 if layer.kind == "dense" else max(FACTS[layer.recipe].block, 1)
    across = layer.columns % (ranks * unit) == 0
    down = layer.rows % ranks == 0
    choices = [name for name, fits in (("rows", down), ("columns", across)) if fits]
    return choices[(layer.rows // ranks + layer.columns) % len(choices)] if choices else ""


@dataclass
class RankLife(Life):
    """A life on ranks."""

    style: Style | None = None
    meshes: Any = None

    @property
    def first(self) -> bool:  # type: ignore[override]
        return dist.get_rank() == 0

    def everywhere(self, value: Any) -> Any:
        held = [value]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def agree(self) -> None:
        sync_scales(self.net)

    def shard(self, net: Any) -> Any:
        style, mesh = self.style, self.mesh()
        assert style is not None
        over = mesh if "tp" not in style.kind else mesh["data"] if style.kind == "fsdp tp" else None
        if style.tensor_parallel > 1:
            for block in net.layers:
                cut = direction(block.layer, style.tensor_parallel)
                if cut:
                    plan = (
                        ColwiseParallel(output_layouts=Replicate())
                        if cut == "rows"
                        else RowwiseParallel(input_layouts=Replicate())
                    )
                    parallelize_module(block, mesh["model"], {"linear": plan}, src_data_rank=None)
        if over is not None:
            options: dict[str, Any] = {"mesh": over, "reshard_after_forward": style.reshard}
            if style.offload:
                options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
            for number, block in enumerate(net.layers):
                if number % 3 < 2:  # the others belong to the root's group
                    fully_shard(block, **options)
            fully_shard(net, **options)
        return net

    def mesh(self) -> DeviceMesh:
        assert self.style is not None
        if self.style not in self.meshes:
            names = {
                "fsdp": ("shard",),
                "hsdp": ("replicate", "shard"),
                "tp": ("model",),
                "fsdp tp": ("data", "model"),
            }[self.style.kind]
            self.meshes[self.style] = init_device_mesh("cpu", self.style.mesh, mesh_dim_names=names)
        return self.meshes[self.style]

    @property
    def data_ranks(self) -> tuple[int, int]:
        """How many ranks have data of their own, and which of them this one is."""
        assert self.style is not None
        ranks, size = dist.get_world_size(), self.style.tensor_parallel
        return ranks // size, dist.get_rank() // size

    def whole(self, param: Tensor) -> Any:
        with torch.no_grad():
            return param.full_tensor() if isinstance(param, DTensor) else param.detach()

    def piece(self, param: Tensor, weight: Weight) -> dict[str, bytes]:
        if not isinstance(param, DTensor):
            return weight.stored()
        box = box_of(param)
        if not weight.quantized:
            assert weight.value is not None
            return {"": raw(weight.value[slices(box)])}
        assert weight.parts is not None
        return {name: _part_of(part, weight, box).tobytes() for name, part in weight.parts.items()}

    def compare_weight(self, name: str, param: Tensor, weight: Weight) -> None:
        super().compare_weight(name, param, weight)
        if isinstance(param, DTensor):
            grad = param.grad
            if (grad is None) != (weight.grad is None):
                raise Found(f"{name}: gradient {grad}, expected {weight.grad}")
            if grad is not None and weight.grad is not None:
                own = local(grad)
                wanted = weight.grad[slices(box_of(param))]
                if own.dtype != wanted.dtype or not same_values(own.reshape(wanted.shape), wanted):
                    raise Found(f"{name}: another gradient: {own}, expected {wanted}")

    def compare_states(self) -> None:
        wanted, params = self.twin.states(), self.named()
        for name in wanted:
            found = self.optimizer.state.get(params[name], {})
            box = box_of(params[name]) if isinstance(params[name], DTensor) else None
            own = {key: local(value) if isinstance(value, Tensor) else value for key, value in found.items()}
            other = {key: _state_of(value, params[name], box) for key, value in wanted[name].items()}
            own = {
                key: value.reshape(other[key].shape) if isinstance(value, Tensor) and key in other else value
                for key, value in own.items()
            }
            if not held_equal(own, other):
                raise Found(f"{name}: optimizer state\n{own}\nexpected\n{other}")


Box = Sequence[tuple[int, int]]


def box_of(param: DTensor) -> Box:
    """(start, stop) in each dim: tensor parallelism cuts first, then data parallelism what it left."""
    box = [(0, size) for size in param.shape]
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    order = sorted(range(mesh.ndim), key=lambda dim: names[dim] != "model")
    for dim in order:
        along = getattr(param.placements[dim], "dim", None)
        if along is None:
            continue
        start, stop = box[along]
        ranks, rank = mesh.size(dim), mesh.get_local_rank(dim)
        size = -(-(stop - start) // ranks)
        box[along] = (min(start + rank * size, stop), min(start + (rank + 1) * size, stop))
    return box


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _part_of(part: Any, weight: Weight, box: Box) -> Any:
    assert weight.facts is not None
    if part.ndim != len(weight.shape):
        return part  # of the whole tensor
    cut = [slice(start, stop) for start, stop in box[:-1]]
    if part is not weight.parts["payload"] and weight.facts.block == 1:
        return part[tuple(cut)]  # one scale a row
    (start, stop), ratio = box[-1], -(-weight.shape[-1] // part.shape[-1])
    return part[(*cut, slice(start // ratio, -(-stop // ratio)))]


def _state_of(value: Any, param: Tensor, box: Box | None) -> Any:
    if isinstance(value, Tensor) and box is not None and value.shape == param.shape:
        return value[slices(box)]
    return value


# -- steps -------------------------------------------------------------------------------------------------------------


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
        compare_exact(life, outputs, wanted)
    return None


def evaluate(life: Any, random: Random) -> None:
    """A forward without gradients."""
    xs, signs = life.batch(random.getrandbits(40))
    with life.under(), torch.no_grad():
        outputs = life.net(xs)
    compare_exact(life, outputs, twin.outputs(life.layers, life.weights, (xs, signs)))


def compare_exact(life: Any, outputs: Any, wanted: Any) -> None:
    """All but those that are sums of rounded products."""
    for number, (layer, y, other) in enumerate(zip(life.layers, outputs, wanted, strict=True)):
        if direction(layer, life.style.tensor_parallel) != "columns":
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
    partly = random.random() < 0.4
    full = random.random() < 0.5
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
}


def styles(ranks: int) -> list[Style]:
    """Every way to cut over so many ranks."""
    found = [Style("fsdp", (ranks,), reshard=flag, offload=off) for flag in (True, False) for off in (False, True)]
    found.append(Style("hsdp", (ranks, 1)))
    if ranks > 1:
        found += [Style("tp", (ranks,)), Style("hsdp", (1, ranks))]
    if ranks == 4:
        found += [Style("hsdp", (2, 2)), Style("fsdp tp", (2, 2)), Style("fsdp tp", (2, 2), reshard=False)]
    return found


# -- a life ------------------------------------------------------------------------------------------------------------


def live_era(case: tuple[Era, str, Any]) -> Any:
    """On every rank. `case`: the era, a directory, and what the era before came to; returns what this one came to."""
    era, where, before = case
    quiet()
    life = born(era, Path(where))
    try:
        if before is not None:
            take_over(life, before)
        life.agree()
        life.compare()
        life.tune()
        life.compare()
    except (Exception, CheckpointException) as error:
        raise Failure(-1, Step("born", 0), error) from error
    for number, taken in enumerate(era.plan.steps):
        try:
            STEPS[taken.name](life, Random(taken.seed))
            life.compare()
        except (Exception, CheckpointException) as error:
            raise Failure(number, taken, error) from error
    end = life.path / f"end-{era.plan.seed}"
    dcp.save({"model": life.net.state_dict()}, checkpoint_id=end, planner=QuantizedSavePlanner())
    stored_ = {name: (weight.parts, weight.value) for name, weight in life.weights.items()}
    return (str(end), life.layers, stored_) if dist.get_rank() == 0 else None


def born(era: Era, path: Path) -> RankLife:
    layers = list(era.plan.layers)
    weights = weights_of(layers)

    def values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return models.weights(shape, era.plan.seed + len(name) + sum(shape), dtype)

    life = RankLife(era.plan, path, layers, None, weights, style=era.style, meshes={})
    life.change = write
    life.uploads = dist.new_group(backend="gloo")
    with life.under():
        life.net = models.build(layers, values)
    life.net = life.shard(life.net)
    for name, weight in weights.items():
        weight.write(values(name, weight.shape, weight.dtype))
    return life


def take_over(life: RankLife, before: tuple[str, list[Layer], Mapping[str, Any]]) -> None:
    """Load what the era before has saved."""
    end, _, held = before
    dcp.load({"model": life.net.state_dict()}, checkpoint_id=end, planner=QuantizedLoadPlanner())
    for name, (parts, value) in held.items():
        life.weights[name].parts, life.weights[name].value = parts, value


def eras(seed: int) -> tuple[Era, ...]:
    """The eras of a seed's life. Each begins with the layers that the one before ended with."""
    random = Random(seed)
    layers = tuple(replace(each, preserved=False) for each in models.several(random, most_rows=40))
    found = []
    for _ in range(random.choice((1, 1, 2))):
        ranks = random.choice((1, 2, 2, 3, 4))
        names = list(OFTEN)
        chosen = random.choices(names, [OFTEN[name] for name in names], k=random.randint(4, 12))
        plain = all(layer.kind == "dense" or layer.storage == "high_precision" for layer in layers)
        plan = Plan(
            seed=random.getrandbits(40),
            layers=layers,
            steps=tuple(Step(name, random.getrandbits(40)) for name in chosen),
            defaults=random.choice(("float32", "float32", "bfloat16", "float64 meta")),
            optimizer=random.choice(("sgd", "momentum", "adam", "adamax", "rmsprop", "adamw", "radam")),
            masters=not plain or random.random() < 0.5,
            grouped=random.choice((0, 0, 1)) if len(layers) > 1 else 0,
        )
        found.append(Era(random.choice(styles(ranks)), plan))
    return tuple(found)
