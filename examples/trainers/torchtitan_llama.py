"""torchtitan's Llama 3, quantized under FSDP2, in a loop of its own; `torchtitan_checkpoint.py` adds its checkpoints.

    torchrun --nproc-per-node 2 examples/trainers/torchtitan_llama.py

What does not work (torchtitan 0.3), and what is done about it here:
  * importing its models without Triton: kernels of expert parallelism, which no dense model runs, are stood in for.
  * the fused `wqkv`: in state dicts its hooks cut a reshaped weight, which no quantized weight allows.
    Take separate wq, wk and wv, with the same names in checkpoints.
  * attention on CPU: flex and varlen want a GPU; `ScaledDotProductAttention` runs anywhere.
  * `apply_fsdp_to_decoder` on gloo, which lacks the reduction it asks for; torch's `fully_shard` does.
"""

import os
import sys
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize_


def sharded_llama() -> Any:
    """Two layers of torchtitan's debug model, quantized and sharded; the same values on any number of ranks."""
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", Mock())
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_gqa_config
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        init = layer.attention.wo.param_init
        layer.attention = make_gqa_config(
            dim=config.dim,
            n_heads=layer.attention.n_heads,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=layer.attention.rope,
            fuse_qkv=False,
        )
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    quantize_(model, MXFP8BlockScaling(), exclude=["lm_head"])
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return model


def loss_of(model: Any, step: int) -> torch.Tensor:
    """The loss of this rank's share of four sequences that count up in steps of 1 to 4."""
    tokens = (torch.arange(16) * torch.arange(1, 5)[:, None] + step)[dist.get_rank() :: dist.get_world_size()]
    return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> list[float]:
    """Train six steps; returns this rank's losses."""
    model = sharded_llama()
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=2e-3)
    losses = []
    for step in range(6):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
