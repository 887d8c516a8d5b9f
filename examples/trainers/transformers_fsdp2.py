"""Train an unmodified transformers model from its dense Hugging Face checkpoint, quantized as it is read, under FSDP2.

    torchrun --nproc-per-node 2 examples/trainers/transformers_fsdp2.py --out runs/hf [--checkpoint DIR]

DIR is what `save_pretrained` writes: config.json and safetensors; without it a tiny one is made. Every rank reads the
rows of its shards (with all that shares a scale with them, as quantize-then-shard wants it), so that no full model ever
exists. Do NOT use `from_pretrained(..., distributed_config=...)` for this: it puts its own dense shards into the place
of the quantized ones.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, quantized_model_init

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def make_checkpoint(directory: Path) -> None:
    """A tiny dense Llama with random weights, as `save_pretrained` leaves it; on rank 0."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(**TINY, num_hidden_layers=2, num_key_value_heads=2)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    dist.barrier()


def load_sharded(directory: Path) -> PreTrainedModel:
    """The model of a dense checkpoint, its linear weights quantized and sharded while they are read."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"), quantized_model_init(NVFP4BlockScaling()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # a table that no checkpoint holds
    tied = model.all_tied_weights_keys  # stored once, under the other name
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    reader, planner = HuggingFaceStorageReader(str(directory)), QuantizedLoadPlanner(on_mismatch="convert")
    dcp.load(state, storage_reader=reader, planner=planner)
    return model


def main(argv: list[str] | None = None) -> list[float]:
    """Load, train six steps, save; returns this rank's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="directory with config.json and safetensors")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.checkpoint is None:
        args.checkpoint = args.out / "dense"
        make_checkpoint(args.checkpoint)

    model = load_sharded(args.checkpoint)
    dcp.save({"model": model.state_dict()}, checkpoint_id=args.out / "quantized", planner=QuantizedSavePlanner())
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    tokens = (torch.arange(16) * torch.arange(1, 5)[:, None]) % TINY["vocab_size"]
    tokens = tokens[dist.get_rank() :: dist.get_world_size()]
    losses = []
    for _ in range(6):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dcp.save({"model": model.state_dict()}, checkpoint_id=args.out / "trained", planner=QuantizedSavePlanner())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
