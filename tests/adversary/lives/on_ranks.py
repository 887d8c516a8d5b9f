"""Lives of sharded models: every rank lives them, and compares its shards with pieces of the one reference.

A life has eras, each on another number of ranks and cut in another way; it goes from one to the next as a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from tests.adversary.attack import Found
from tests.adversary.lives import models
from tests.adversary.lives.cutting import Style, box_of, direction, part_of, slices, state_of, styles
from tests.adversary.lives.life import Failure, Life, Plan, Step, local, quiet
from tests.adversary.lives.sharded import OFTEN, STEPS, write
from tests.adversary.lives.twin import Weight, held_equal, raw, same_values, weights_of

if TYPE_CHECKING:
    from tests.adversary.lives.models import Layer


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
        return {name: part_of(part, weight, box).tobytes() for name, part in weight.parts.items()}

    def compare(self) -> None:
        for module in self.net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without backward leaves the root gathered
        super().compare()

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
            other = {key: state_of(value, params[name], box) for key, value in wanted[name].items()}
            own = {
                key: value.reshape(other[key].shape) if isinstance(value, Tensor) and key in other else value
                for key, value in own.items()
            }
            if not held_equal(own, other):
                raise Found(f"{name}: optimizer state\n{own}\nexpected\n{other}")


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
    return (str(end), life.layers, stored_, life.saves) if dist.get_rank() == 0 else None


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


def take_over(life: RankLife, before: tuple[str, list[Layer], Mapping[str, Any], int]) -> None:
    """Load what the era before has saved, and count its saves on: the eras of a life share a directory."""
    end, _, held, life.saves = before
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
