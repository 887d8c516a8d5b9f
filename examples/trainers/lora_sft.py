"""LoRA on a base in 4 or 8 bits, under FSDP2, by TRL's SFTTrainer with peft; `--resume` goes on where a run stopped.

    torchrun --nproc-per-node 2 examples/trainers/lora_sft.py --base DIR --out runs/lora [--recipe NVFP4BlockScaling]

DIR, with a tokenizer, is dense or in a layout of engines (FP8 in blocks, MXFP4, NVFP4, INT4); its bytes stay.
"""

import argparse
from typing import Any

import torch.distributed as dist
from datasets import Dataset  # type: ignore[import-untyped]
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined] # it loads them lazily

import qtensor
from dcp_adapters.transformers import QTensorConfig, quantized_config
from dcp_adapters.transformers.trainer import QuantizedTrainer


class Tuner(QuantizedTrainer, SFTTrainer):
    """TRL's trainer, with checkpoints that go through dcp."""


def main(argv: list[str] | None = None) -> list[float]:
    """Train adapters, save them for peft; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--recipe", default="NVFP4BlockScaling", help="of a dense base: a class of qtensor")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    how: dict[str, Any] = {"quantization_config": QTensorConfig(getattr(qtensor, args.recipe)())}
    if hasattr(AutoConfig.from_pretrained(args.base), "quantization_config"):
        how = {"config": quantized_config(args.base)}
    set_seed(0)  # adapters begin alike on all ranks
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.base, **how), lora)
    for layer in (*model.base_model.model.model.layers, model):
        fully_shard(layer)
    data = Dataset.from_dict({"text": [f"{one} times {two} is {one * two}." for one in range(12) for two in range(12)]})
    options: dict[str, Any] = {
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
    }
    config = SFTConfig(args.out, learning_rate=2e-3, optim="adamw_torch", **options)
    trainer = Tuner(model, config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(args.base))
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(f"{args.out}/adapter")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"losses: {main()}")
