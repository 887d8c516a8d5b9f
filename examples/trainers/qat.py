"""Quantization-aware training: the loss of the quantized weights trains dense fp32 shards; ends with an export.

    torchrun --nproc-per-node 2 examples/trainers/qat.py --out runs/qat [--format mxfp4] [--checkpoint DIR]

DIR is a dense Hugging Face directory; without it a tiny one is made. Shards stay dense, any optimizer updates them, and
every forward computes with their quantization, which is what travels in the all-gather. Gradients pass straight through
the rounding. mxfp8 quantizes the inputs of linear layers as well (W8A8), the other formats weights alone.

At the end OUT/trained has the dense weights, to go on from, and OUT/exported the quantized ones, for inference engines.
`qad.py` trains against a dense teacher instead of labels.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dcp_adapters import export_hf, fused_linears, import_hf
from fsdp_hooks import sync_scales
from qtensor import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantized_model_init, share_scales

FORMATS = {
    "nvfp4": NVFP4BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp8": MXFP8BlockScaling(activations="dynamic"),
}
TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def options(words: str) -> argparse.ArgumentParser:
    """The command line of both recipes."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="directory with config.json and safetensors")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def make_checkpoint(directory: Path) -> Path:
    """A tiny dense Llama with random weights, as `save_pretrained` leaves it; its head is its embedding."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(**TINY, num_hidden_layers=2, tie_word_embeddings=True, initializer_range=0.1)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    dist.barrier()
    return directory


def sharded(directory: Path, form: str, *, trained: bool = True) -> PreTrainedModel:
    """The model of a directory without its values, on the meta device: fp32 shards that compute in bf16, or bf16."""
    config = AutoConfig.from_pretrained(directory)
    dtype = torch.float32 if trained else torch.bfloat16
    with torch.device("meta"), quantized_model_init(FORMATS[form], storage="high_precision", enabled=trained):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    share_scales(model, fused_linears(model))  # NVFP4: as engines run them, q, k and v under one global scale
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # a table that no checkpoint holds
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def rows(step: int) -> torch.Tensor:
    """Four sequences that count up in steps of 1 to 4: token ids [4, 16]."""
    return (torch.arange(16) * torch.arange(1, 5)[:, None] + step) % TINY["vocab_size"]


def batch(step: int) -> torch.Tensor:
    """This rank's share of them, [4 / ranks, 16]."""
    return rows(step)[dist.get_rank() :: dist.get_world_size()]


def optimizer_of(model: PreTrainedModel, lr: float) -> torch.optim.Optimizer:
    """Any optimizer of torch; now and behind each step the ranks agree on scales that shards have in common."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer.register_step_post_hook(lambda *_: (sync_scales(model), None)[1])
    sync_scales(model)
    return optimizer


def deploy(model: PreTrainedModel, directory: Path, out: Path) -> None:
    """Save the dense weights, and export the bytes that the forwards computed with."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=out / "trained")
    export_hf(model, out / "exported", config=directory, dtype=torch.bfloat16)


def main(argv: list[str] | None = None) -> list[float]:
    """Train and export; returns this rank's losses before each step, and that of the model which is exported."""
    args = options(__doc__ or "").parse_args(argv)
    args.checkpoint = args.checkpoint or make_checkpoint(args.out / "dense")
    model = sharded(args.checkpoint, args.format)
    import_hf(args.checkpoint, model)
    optimizer, losses = optimizer_of(model, 5e-3), []
    for step in range(args.steps + 1):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        losses.append(loss.item())
        if step < args.steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    deploy(model, args.checkpoint, args.out)
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
