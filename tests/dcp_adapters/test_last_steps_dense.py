"""NVFP4 as it is trained: some layers stay in bf16 from the beginning, and all go on in bf16 for the last steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, QuantizedTensor, quantize_
from tests.ranks import run_ranks

RECIPE = NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4")


def built(recipe: Any) -> tuple[nn.Module, MasterWeightOptimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32), nn.Tanh(), nn.Linear(32, 32)).bfloat16()
    if recipe is not None:
        assert quantize_(net, recipe, exclude=["4"]) == ["0.weight", "2.weight"]
    fully_shard(net)
    sync_scales(net)
    return net, MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-2)


def trained(net: nn.Module, optimizer: MasterWeightOptimizer, *steps: int) -> float:
    for number in steps:
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(number)).bfloat16()
        loss = (net(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _goes_on(path: Path) -> None:
    net, optimizer = built(RECIPE)
    first = trained(net, optimizer, 0)
    last = trained(net, optimizer, 1, 2, 3)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path, planner=QuantizedSavePlanner())

    dense, after = built(None)
    model, optim = get_state_dict(dense, after)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=path, planner=QuantizedLoadPlanner(on_mismatch="convert"))
    set_state_dict(dense, after, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for old, new in zip(net.parameters(), dense.parameters(), strict=True):
        values, kept = old.to_local().detach(), new.to_local().detach()
        if isinstance(values, QuantizedTensor):
            assert torch.equal(kept, values.dequantize())
        for name in ("master_weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(*(of.state[one][name].to_local() for of, one in ((optimizer, old), (after, new))))
    loss = trained(dense, after, 4, 5, 6)
    assert loss < last < first
    for param in dense.parameters():
        assert torch.equal(param.to_local().detach(), after.state[param]["master_weight"].to_local().bfloat16())


def test_a_checkpoint_of_nvfp4_goes_on_in_bf16_with_its_masters(shared_tmp_path: Path) -> None:
    run_ranks(2, _goes_on, shared_tmp_path)
