"""How a model is cut, and which piece of a whole tensor a rank then holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tests.adversary.lives.models import FACTS, Layer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tests.adversary.lives.twin import Weight


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


def styles(ranks: int) -> list[Style]:
    """Every way to cut over so many ranks."""
    found = [Style("fsdp", (ranks,), reshard=flag, offload=off) for flag in (True, False) for off in (False, True)]
    found.append(Style("hsdp", (ranks, 1)))
    if ranks > 1:
        found += [Style("tp", (ranks,)), Style("hsdp", (1, ranks))]
    if ranks == 4:
        found += [Style("hsdp", (2, 2)), Style("fsdp tp", (2, 2)), Style("fsdp tp", (2, 2), reshard=False)]
    return found


def direction(layer: Layer, ranks: int) -> str:
    """How tensor parallelism cuts a layer: "rows", "columns", or "" for not at all."""
    if ranks == 1 or layer.kind not in ("linear", "dense") or layer.bias:
        return ""
    unit = 1 if layer.kind == "dense" else max(FACTS[layer.recipe].block, 1)
    across = layer.columns % (ranks * unit) == 0
    down = layer.rows % ranks == 0
    choices = [name for name, fits in (("rows", down), ("columns", across)) if fits]
    return choices[(layer.rows // ranks + layer.columns) % len(choices)] if choices else ""


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


def part_of(part: Any, weight: Weight, box: Box) -> Any:
    assert weight.facts is not None
    if part.ndim != len(weight.shape):
        return part  # of the whole tensor
    cut = [slice(start, stop) for start, stop in box[:-1]]
    if part is not weight.parts["payload"] and weight.facts.block == 1:
        return part[tuple(cut)]  # one scale a row
    (start, stop), ratio = box[-1], -(-weight.shape[-1] // part.shape[-1])
    return part[(*cut, slice(start // ratio, -(-stop // ratio)))]


def state_of(value: Any, param: Tensor, box: Box | None) -> Any:
    if isinstance(value, Tensor) and box is not None and value.shape == param.shape:
        return value[slices(box)]
    return value
