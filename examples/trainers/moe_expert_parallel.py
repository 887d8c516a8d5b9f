"""A mixture of experts on 4 ranks: experts on a mesh of their own, quantized, and sharded by FSDP2 along their rows.

    torchrun --nproc-per-node 4 examples/trainers/moe_expert_parallel.py
    python examples/trainers/moe_expert_parallel.py

    mesh      efsdp x ep = 2 x 2; ranks 0, 1 and ranks 2, 3 are groups of expert parallelism
    experts   [E, N, K]: two experts on each rank of a group ("ep"), of each half of the rows ("efsdp", Shard(1))
    tokens    each rank has its own; they go to the ranks of the group that have their experts, and come back
    the rest  sharded over a group, with a replica in the other

Both commands print the same losses and the same digest of all weights, though one process runs both groups, one after
the other. That needs equal sums: products of equal shapes (it routes the tokens of each rank by themselves), and
gradients that are added two by two, since a + b is b + a, while a sum of four depends on the order.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_adapters import digest
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize

GROUPS, EP = 2, 2
EXPERTS, TOP, WIDTH, INNER, WORDS, STEPS = 4, 2, 64, 96, 32, 6


class Exchange(torch.autograd.Function):
    """Rows go to other ranks of a group, and in backward their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        """Send [sum(sent), K], get [sum(received), K]."""
        ctx.back = sent, received, group
        came = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Do the same the other way."""
        return Exchange.apply(grads[0], *ctx.back), None, None, None  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """The experts of this rank, all in one quantized parameter for each of their two linears."""

    up: Tensor
    down: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"up": (EXPERTS, INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER)}.items():
            values = (torch.randn(shape) * 0.1).bfloat16()
            self.register_parameter(name, nn.Parameter(quantize(values, MXFP8BlockScaling())))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """[rows, K], those of one expert after the other."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        inner = [F.silu(F.linear(own, up[expert])) for expert, own in enumerate(rows.split(counts))]
        return torch.cat([F.linear(own, down[expert]) for expert, own in enumerate(inner)])


class Moe(nn.Module):
    """The TOP best experts for each token, weighted by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = Experts()
        self.ep: Any = None  # the group that the experts are shared out over

    def forward(self, chunks: list[Tensor]) -> list[Tensor]:
        """Tokens [T, K] of this rank; in one process, those of all ranks of a group."""
        normed = [self.norm(chunk) for chunk in chunks]
        weights, chosen = zip(*[torch.softmax(self.router(x).float(), dim=-1).topk(TOP) for x in normed], strict=True)
        orders = [torch.argsort(experts.flatten(), stable=True) for experts in chosen]  # [T * TOP]
        rows = torch.cat([x[order // TOP] for x, order in zip(normed, orders, strict=True)])
        counts = torch.stack([torch.bincount(experts.flatten(), minlength=EXPERTS) for experts in chosen])
        moved = []
        for x, own, order, scale in zip(chunks, self.routed(rows, counts), orders, weights, strict=True):
            back = own[torch.argsort(order)].unflatten(0, (-1, TOP))  # [T, TOP, K]
            moved.append(x + (back * scale.unsqueeze(-1).to(back.dtype)).sum(dim=1))
        return moved

    def routed(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        """Rows by source and expert, and how many of each, [sources, E] -> what experts make of them, by source."""
        sizes = counts.sum(dim=1).tolist()
        if self.ep is not None:
            there = counts.view(EP, -1)  # [ranks, experts of a rank]
            counts = torch.empty_like(there)  # [sources, experts of this rank]
            dist.all_to_all_single(counts, there, group=self.ep)
            way = counts.sum(dim=1).tolist(), there.sum(dim=1).tolist(), self.ep
            rows = Exchange.apply(rows, *way)  # type: ignore[no-untyped-call]
        experts = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
        order = torch.argsort(experts, stable=True)
        out = self.experts(rows[order], counts.sum(dim=0).tolist())[torch.argsort(order)]
        if self.ep is not None:
            out = Exchange.apply(out, way[1], way[0], self.ep)  # type: ignore[no-untyped-call]
        return out.split(sizes)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Words to the words behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Moe() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.bfloat16)

    def forward(self, batches: list[Tensor]) -> list[Tensor]:
        """Ids [T + 1] of each source -> a loss each."""
        hidden = [self.embed(ids[:-1]) for ids in batches]
        for layer in self.layers:
            hidden = layer(hidden)
        return [F.cross_entropy(self.head(x).float(), ids[1:]) for x, ids in zip(hidden, batches, strict=True)]


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Share the experts out, and shard everything; gradients are added up."""
    for layer in model.layers:
        for name, param in list(layer.experts.named_parameters()):
            own = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            layer.experts.register_parameter(name, nn.Parameter(own))
        layer.ep = mesh.get_group("ep")
        # along the rows of each expert: a mesh may have more ranks than a rank has experts
        fully_shard(layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=mesh)  # replicas over "efsdp", shards over "ep"
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


def batch(step: int, rank: int) -> Tensor:
    """Ids [49] that count up, in other steps for each rank."""
    return (torch.arange(49) * (rank + 1) + step) % WORDS


def main() -> tuple[list[list[float]], str]:
    """Train; returns the losses of each step, of this rank or of all, and the digest of the weights."""
    torch.manual_seed(0)
    model, sources = Model(), [[0, 1], [2, 3]]
    if dist.get_world_size() > 1:
        shard(model, init_device_mesh("cpu", (GROUPS, EP), mesh_dim_names=("efsdp", "ep")))
        sources = [[dist.get_rank()]]
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    history = []
    for step in range(STEPS):
        seen: list[float] = []
        for group in sources:
            losses = model([batch(step, rank) for rank in group])
            (sum(losses, torch.zeros(())) / (GROUPS * EP)).backward()
            seen += [loss.item() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
        history.append(seen)
    found = digest(model.state_dict())
    print(f"rank {dist.get_rank()}: losses {history[0]} -> {history[-1]}, digest {found}")
    return history, found


if __name__ == "__main__":
    single: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **single)
    main()
    dist.destroy_process_group()
