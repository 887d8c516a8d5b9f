"""A model whose experts ranks share out, as trainers do it: hooks send tokens to the ranks that have their experts.

`GroupedExperts` gets rows sorted by expert. `ExpertParallel` places [E, N, K] as Shard(0) over a mesh dim; rows come
and go in hooks of distribute_module. `cut` gives the experts a mesh of their own under FSDP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.layerwise.models import DIM, Layer, Mlp, Toy, filled

INNER, TOP = 32, 2
UNEVEN = 5  # experts: 3 and 2 of them on two ranks


class GroupedExperts(nn.Module):
    """All experts in one parameter each, called with the rows of one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(count, INNER, DIM)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(count, DIM, INNER))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        out = []
        for expert, mine in enumerate(rows.split(counts.tolist())):
            inner = F.silu(F.linear(mine, w1[expert])) * F.linear(mine, w3[expert])
            out.append(F.linear(inner, w2[expert]))
        return torch.cat(out)


class Moe(nn.Module):
    """Two of the experts for each token."""

    def __init__(self, experts: nn.Module, count: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, count, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        weights, chosen = torch.softmax(self.gate(tokens), dim=-1).topk(TOP, dim=-1)  # [T, k]
        return self.computed(tokens, chosen, weights).reshape(x.shape)

    def computed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.gate.out_features)
        routed = self.experts(tokens[order // TOP], counts)
        back = torch.empty_like(routed)
        back[order] = routed
        return (back.reshape(-1, TOP, DIM) * weights.unsqueeze(-1)).sum(dim=1)


class StackedMoe(Moe):
    """The same, for experts that are called with numbers and weights."""

    def computed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.experts(tokens, chosen, weights)


class StackedExperts(GroupedExperts):
    """Called as transformers calls experts. Numbers of experts of other ranks are left out."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.w1.shape[0]):
            at, choice = torch.where(chosen == expert)
            if at.numel():
                inner = F.silu(F.linear(tokens[at], self.w1[expert])) * F.linear(tokens[at], self.w3[expert])
                out.index_add_(0, at, F.linear(inner, self.w2[expert]) * weights[at, choice, None])
        return out


def moe(*, experts: int = UNEVEN, stacked: bool = False, dense_first: bool = False) -> Toy:
    """Two layers of experts; or one of them, behind a dense one."""
    block, kind = (StackedMoe, StackedExperts) if stacked else (Moe, GroupedExperts)
    made = [Layer(block(kind(experts), experts)) for _ in range(1 if dense_first else 2)]
    return filled(Toy([Layer(Mlp(96, bias=False)), *made] if dense_first else made), torch.float32)


class ExpertParallel(ParallelStyle):
    """Shares experts out over a mesh of one dim, and sends rows to them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.received: list[int] = []
        self.order = torch.empty(0, dtype=torch.int64, device="cpu")

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, share_out, self.dispatch, self.combine)

    def dispatch(self, module: nn.Module, inputs: tuple[Tensor, Tensor], mesh: Any) -> tuple[Tensor, Tensor]:
        """[S, K] of this rank's tokens, sorted by expert -> the rows of this rank's experts."""
        rows, counts = inputs
        group = mesh.get_group()
        everyone = [torch.empty_like(counts) for _ in range(mesh.size())]
        dist.all_gather(everyone, counts, group=group)
        mine = torch.stack(everyone).chunk(mesh.size(), dim=1)[mesh.get_local_rank()]  # [ranks, experts here]
        self.sent = [int(piece.sum()) for piece in counts.chunk(mesh.size())]
        self.received = mine.sum(dim=1).tolist()
        came = exchanged(rows, self.received, self.sent, group)
        experts = torch.arange(mine.shape[1], device=rows.device).repeat(mesh.size())
        self.order = torch.argsort(experts.repeat_interleave(mine.reshape(-1)), stable=True)
        return came[self.order], mine.sum(dim=0)

    def combine(self, module: nn.Module, output: Tensor, mesh: Any) -> Tensor:
        """Back to the ranks whose tokens they are."""
        back = torch.empty_like(output)
        back[self.order] = output
        return exchanged(back, self.sent, self.received, mesh.get_group())


class Sharing(ExpertParallel):
    """Shares experts out, and sends nothing."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, share_out)


def share_out(name: str, module: nn.Module, mesh: Any) -> None:
    """Each rank takes its experts; all of them make the same values."""
    for key, param in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)], src_data_rank=None)))


def exchanged(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """all_to_all of rows [S, K]."""
    came = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
    return came


def meshes() -> tuple[Any, Any]:
    """A flat mesh for dense weights, and one of the same ranks for experts: FSDP x expert parallelism."""
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    return flat, init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("efsdp", "ep"))


def cut(model: Any, style: type[ParallelStyle] = ExpertParallel, **options: Any) -> Any:
    """Experts over pairs of ranks. With more ranks FSDP shards them over the others, and all else over all ranks."""
    flat, own = meshes()
    for layer in model.layers:
        if isinstance(layer.mlp, Moe):
            parallelize_module(layer.mlp, own["ep"], {"experts": style()})
            if dist.get_world_size() > 2:
                fully_shard(layer.mlp.experts, mesh=own["efsdp"], **options)
        if dist.get_world_size() > 2:
            fully_shard(layer, mesh=flat)
    return fully_shard(model, mesh=flat) if dist.get_world_size() > 2 else model
