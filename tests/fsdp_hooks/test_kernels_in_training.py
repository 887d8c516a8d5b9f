"""Training with compiled kernels, inside FSDP2's hooks and the optimizer: the bytes of training without a compiler."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_hooks.torch_private import local_of
from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, quantized_model_init, use_kernels
from tests.ranks import run_ranks


def train(mode: str, storage: str) -> list[Tensor]:
    """The bytes of all shards and of the outputs after three steps."""
    torch.manual_seed(0)
    with quantized_model_init(NVFP4BlockScaling(), storage=storage):
        net = nn.Sequential(*[nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)])
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-2)
    outputs = []
    with use_kernels(mode):
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            with torch.autocast("cpu", enabled=step == 2):  # no reason to compile anew
                y = net(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach().view(torch.uint8))
    shards = [local_of(parameter) for parameter in net.parameters()]
    parts = [part for shard in shards for part in (shard.parts().values() if storage == "quantized" else [shard.dense])]
    return [*outputs, *(part.detach().reshape(-1).view(torch.uint8) for part in parts)]


def compare(storage: str) -> None:
    eager = train("eager", storage)
    # A compilation takes seconds a kernel, so the first rank alone compiles: that the other does not changes no byte.
    compiled = train("compiled" if dist.get_rank() == 0 else "eager", storage)
    assert len(eager) == len(compiled) > 3
    for number, (one, other) in enumerate(zip(eager, compiled, strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.full
@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_compiled_kernels_train_to_the_bytes_of_eager_ones(storage: str) -> None:
    run_ranks(2, compare, storage)
