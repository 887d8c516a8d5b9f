"""One of the two ranks of benchmarks/gather.py: all contenders live in it and take turns. JSON lines in and out.

    python -m benchmarks.gather_rank

A contender is a stack of square Linear layers with its optimizer. Each layer is an FSDP2 group, gathered for the
forward and again for the backward, with gradients reduce-scattered in bf16. Every contender has a bf16 peer with the
same optimizer: MasterWeightOptimizer(AdamW) for quantized shards, with fp32 masters for the bf16 peer, too; for dense
shards that are gathered quantized, torch's AdamW on the shards themselves.
"""

import contextlib
import datetime as dt
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.gather_copies import Written, gather_writes, pad_shards, per_byte
from benchmarks.gather_link import received
from benchmarks.timing import Contender, interleaved, medians
from fsdp_hooks import sync_scales
from qtensor import Float8CurrentScaling, MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.model.model_init import quantized_model_init

RECIPES: dict[str, Any] = {
    "float8-row": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
PEERS = {"quantized": "bf16/masters", "high_precision": "bf16/adamw"}
CONTENDERS = (*PEERS.values(), *(f"{recipe}/{storage}" for storage in PEERS for recipe in RECIPES))
UNEVEN = 1001  # rows; the second rank's shard is a row short


class Model:
    """One contender: a sharded model, its optimizer and its input."""

    def __init__(self, name: str, width: int, layers: int, tokens: int) -> None:
        recipe, storage = name.split("/")
        torch.manual_seed(0)
        self.net = _stack(recipe, storage, [width] * layers, width)
        self.x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
        params = self.net.parameters()
        self.optimizer: torch.optim.Optimizer
        if storage in ("quantized", "masters"):
            self.optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, lr=1e-4, fused=True)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
        self.agrees = storage == "high_precision"

    def step(self) -> None:
        """Forward, backward, optimizer; with dense shards also the agreement on shared scales."""
        self.net(self.x).float().square().mean().backward()
        self.optimizer.step()
        if self.agrees:
            sync_scales(self.net)
        self.optimizer.zero_grad()


class Wide(nn.Module):
    """x + linear(relu(x)), cut or zero-padded to the width, so that the weight may have any number of rows."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, rows, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(torch.relu(x))
        return x + (y if y.shape[-1] == x.shape[-1] else nn.functional.pad(y, (0, x.shape[-1] - y.shape[-1])))


def _stack(recipe: str, storage: str, rows: list[int], width: int, groups: int | None = None) -> Any:
    """Layers of so many weight rows; the first `groups` of them (None: all) are FSDP2 groups of their own."""
    context: Any = contextlib.nullcontext()
    if recipe in RECIPES:
        context = quantized_model_init(RECIPES[recipe], storage=storage)
    with context:
        net = nn.Sequential(*[Wide(width, count) for count in rows])
    for layer in net[:groups]:
        fully_shard(layer)
    return fully_shard(net)


class Rank:
    """Answers jobs; the names of its methods are those of the jobs."""

    models: dict[str, Model]

    def join(self, rank: int, host: str, port: int, interface: str) -> list[str]:
        """Meet the other rank."""
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        timeout = dt.timedelta(seconds=60)
        dist.init_process_group("gloo", f"tcp://{host}:{port}", rank=rank, world_size=2, timeout=timeout)
        return list(CONTENDERS)

    def build(self, rank: int, width: int, layers: int, tokens: int) -> int:
        """Build all contenders and let each make two steps: later ones refill what the first has allocated."""
        self.models = {name: Model(name, width, layers, tokens) for name in CONTENDERS}
        for model in self.models.values():
            model.step()
            model.step()
        return sum(param.numel() for param in self.models[CONTENDERS[0]].net.parameters())

    def time(self, rank: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of each contender's step in each round."""
        turns = {name: Contender(call=model.step, before=dist.barrier) for name, model in self.models.items()}
        return interleaved(turns, rounds, warm_up=False)

    def bandwidth(self, rank: int, layer: int) -> dict[str, float]:
        """Bytes a second that a rank receives in bare collectives of a bf16 layer of `layer` bytes."""
        whole, shard = torch.zeros(layer // 2, dtype=torch.bfloat16), torch.zeros(layer // 4, dtype=torch.bfloat16)
        seconds = medians(
            {
                "gather": lambda: dist.all_gather_into_tensor(whole, shard),
                "reduce": lambda: dist.reduce_scatter_tensor(shard, whole),
            },
            7,
        )
        return {"gather": shard.nbytes / seconds["gather"], "reduce": whole.nbytes / seconds["reduce"]}

    def bytes(self, rank: int) -> dict[str, dict[str, int]]:
        """Bytes that one step gives to each collective, and bytes that TCP delivers meanwhile, less a barrier's."""
        nothing = min(self._received(lambda: None) for _ in range(5))
        return {
            name: {**_sent(model), "received": self._received(model.step) - nothing}
            for name, model in self.models.items()
        }

    def copies(self, rank: int, width: int) -> dict[str, dict[str, Any]]:
        """Writes of each payload byte in the first gather of a weight and in a later one, which refills it."""
        found: dict[str, dict[str, Any]] = {}
        for recipe in RECIPES:
            for rows, label in ((width, "even"), (UNEVEN, "uneven")):
                net = _stack(recipe, "quantized", [rows, width], width, groups=1)
                pad_shards(net, net[1])
                found[f"{recipe}, {label} shards"] = {
                    "first": per_byte(gather_writes(net[0])),
                    "later": per_byte(gather_writes(net[0])),
                }
        return found

    @staticmethod
    def _received(call: Callable[[], object]) -> int:
        dist.barrier()
        before = received()
        call()
        dist.barrier()
        return received() - before


def _sent(model: Model) -> dict[str, int]:
    with Written() as counter:
        model.step()
    return dict(counter.sent)


def main() -> None:
    """Say that this rank has started, then answer jobs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    torch.set_num_threads(1)
    rank = Rank()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(getattr(rank, job.pop("do"))(**job)), file=answers, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
