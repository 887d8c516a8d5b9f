"""A layer of experts that ranks share out, each rank's experts sharded again by FSDP2; every function runs in a rank.

Layout(ep=2, efsdp=2, dim=1) is how trainers lay out 4 ranks: the experts on the mesh dim "ep", and on "efsdp" along
their rows or, with dim=0, by experts once more; all else on all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qtensor import quantize
from tests.fsdp_hooks.cases import RECIPES

K, INNER = 96, 32  # two and four ranks cut the 96 rows of down_proj inside of blocks of 32


class Layout(NamedTuple):
    """How many ranks share experts out, how many shard those of each, along which dim, and how often all that is."""

    ep: int = 1
    efsdp: int = 1
    dim: int = 0
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.ep * self.efsdp * self.replicas

    @property
    def where(self) -> str:
        return f"ep={self.ep} efsdp={self.efsdp} dim={self.dim}" + (" replicas" if self.replicas > 1 else "")


ALONE = Layout()


class Experts(nn.Module):
    """Two stacks [E, N, K]; each expert takes its own tokens, [experts here, T, K]."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        scale = torch.exp2(torch.arange(count)).reshape(-1, 1, 1) / 64  # another magnitude for every expert
        for key, shape in {"gate_up_proj": (count, 2 * INNER, K), "down_proj": (count, K, INNER)}.items():
            rows = torch.exp2(torch.arange(shape[1]) % 24 // 8).reshape(1, -1, 1)  # and for rows of one block
            values = torch.randn(shape) * scale * rows
            setattr(self, key, nn.Parameter(quantize(values.bfloat16(), RECIPES[name])))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate_up_proj, self.down_proj))
        gate, value = torch.bmm(x, up.transpose(1, 2)).chunk(2, dim=-1)
        return torch.bmm(torch.tanh(gate) * value, down.transpose(1, 2))


class Layer(nn.Module):
    """Experts beside parameters that all ranks shard."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.experts = Experts(name, count)
        self.mix = nn.Linear(K, 33, dtype=torch.bfloat16)


def laid_out(layer: Any, layout: Layout, **options: Any) -> Any:
    """Share out and shard a layer that all ranks have whole."""
    names = ("replicas", "efsdp", "ep")
    mesh = init_device_mesh("cpu", (layout.replicas, layout.efsdp, layout.ep), mesh_dim_names=names)
    flat = init_device_mesh("cpu", (layout.replicas, layout.efsdp * layout.ep), mesh_dim_names=("replicas", "shard"))
    replicated = layout.replicas > 1
    if layout.ep > 1:
        for key, param in list(layer.experts.named_parameters()):
            own = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(layer.experts, key, nn.Parameter(own))
    if layout.efsdp > 1 or layout.ep == 1:
        fully_shard(
            layer.experts,
            mesh=mesh["replicas", "efsdp"] if replicated else mesh["efsdp"],
            shard_placement_fn=lambda _: Shard(layout.dim) if layout.dim else None,
        )
    return fully_shard(
        layer,
        mesh=flat if replicated else flat["shard"],
        ignored_params={*layer.experts.parameters()} if layout.efsdp == 1 < layout.ep else None,
        **options,
    )


def built(name: str, layout: Layout = ALONE, *, count: int = 5, seed: int = 0) -> Any:
    """The layer in a layout, of the same values everywhere."""
    return laid_out(built_alone(name, count=count, seed=seed), layout)


def built_alone(name: str, *, count: int = 5, seed: int = 0) -> Layer:
    """The layer of one process."""
    torch.manual_seed(seed)
    return Layer(name, count)
