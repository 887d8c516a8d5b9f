r"""Adapters of peft, merged into the quantized and sharded base they were trained on: what survives, and a check.

    torchrun --nproc-per-node 2 examples/trainers/qlora_peft.py --out runs/qlora --format float8
    torchrun --nproc-per-node 2 examples/trainers/qlora_merge.py --out runs/merged --format float8 \
        --base runs/qlora/base --adapters runs/qlora/step-6

Every rank adds its piece of each update to its shards, which are requantized under scales that all ranks agree on. The
report says how much of each update survived that: updates smaller than half a step of the format do not. Merged layers
are then compared with base and adapter on the inputs that these saw.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft.tuners.lora import LoraLayer
from qlora_peft import FORMATS, TOKENS, adapted_model, adapters_of, base_of
from torch import Tensor

from dcp_adapters import QuantizedSavePlanner
from fsdp_hooks import unsharded
from qtensor import LowRankUpdate, MergeReport, merge_


def adapted_layers(model: Any) -> dict[Any, str]:
    """Module -> name of its base weight, of all that have an adapter."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {module: f"{name}.base_layer.weight" for name, module in named}


def merge(model: Any) -> MergeReport:
    """Merge all adapters into their base weights; the adapters stay, for whoever wants to switch back."""
    updates = {}
    for module, name in adapted_layers(model).items():
        a, b = (factor["default"].weight.detach().full_tensor() for factor in (module.lora_A, module.lora_B))
        updates[name] = LowRankUpdate(a=a, b=b, scaling=module.scaling["default"])
    return merge_(model, updates)


@torch.no_grad()
def seen_by(model: Any) -> dict[Any, tuple[Tensor, Tensor]]:
    """Input and output of each adapted layer in one forward."""
    seen = {}

    def note(module: Any, inputs: Any, output: Any) -> None:
        seen[module] = inputs[0], output

    hooks = [module.register_forward_hook(note) for module in adapted_layers(model)]
    model(input_ids=TOKENS[dist.get_rank() :: dist.get_world_size()])
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def deviation(model: Any, seen: dict[Any, tuple[Tensor, Tensor]], report: MergeReport) -> float:
    """Of all layers the largest |x W'^T - y| of base weights W', as a share of what the report's errors allow.

    Without roundings y = x (W + U)^T, and |x W'^T - y| <= |x| |W' - (W + U)| (Cauchy-Schwarz). Rounding to bf16 adds at
    most 2^-9 of what is rounded: of two weights, and of at most five outputs, none larger than |x| times the sum of the
    norms below.
    """
    names, shares = adapted_layers(model), []
    for layer in model.base_model.model.model.layers:
        with unsharded(layer):
            for module in (module for module in layer.modules() if module in names):
                (x, y), line = seen[module], report[names[module]]
                roundings = 7 * 2**-9 * (line.merged_norm + line.update_norm + line.error_norm)
                off = (module.base_layer(x).double() - y.double()).norm()
                shares.append(float(off / (x.double().norm() * (line.error_norm + roundings))))
    return max(shares)


def main(argv: list[str] | None = None) -> float:
    """Merge, check, and save the merged base; returns the deviation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="directory with config.json and safetensors")
    parser.add_argument("--adapters", required=True, help="checkpoint of adapters, as qlora_peft.py saves it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", choices=FORMATS, required=True, help="what the adapters were trained on")
    args = parser.parse_args(argv)
    model = adapted_model(args.base, args.format)
    dcp.load({"adapters": adapters_of(model)}, checkpoint_id=args.adapters)
    seen = seen_by(model)
    report = merge(model)
    if dist.get_rank() == 0:
        print(report)
    share = deviation(model, seen, report)
    if share > 1:
        raise RuntimeError(f"a merged layer is {share:.1f} times as far from base + adapter as its error allows")
    dcp.save(base_of(model), checkpoint_id=args.out, planner=QuantizedSavePlanner())
    return share


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    print(f"largest deviation, of what is allowed: {main():.2f}")
    dist.destroy_process_group()
