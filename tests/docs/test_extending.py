"""What docs/extending.md adds from outside lives as ours do: sharded, trained, saved, loaded, refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, digest, export_hf
from dcp_adapters.stored.verify import verify
from qtensor import MasterWeightOptimizer, quantize, quantized_model_init
from tests.dcp_adapters.cases import save
from tests.docs.pages import namespace, page
from tests.qtensor.foreign import forget
from tests.ranks import run_ranks


def trained(recipe: Any, *, sharded: bool) -> nn.Module:
    torch.manual_seed(3)
    with quantized_model_init(recipe):
        model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32, bias=False))
    if sharded:
        fully_shard(model)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.linspace(-1, 1, 256).reshape(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _lives(folder: Path, world_size: int) -> str:
    names = page("extending.md").run(namespace())
    recipe = names["Int8BlockScaling"]()
    try:
        model = trained(recipe, sharded=world_size > 1)
        expected = digest(model)
        dcp.save(model.state_dict(), checkpoint_id=folder / f"{world_size}", planner=QuantizedSavePlanner())
        other = trained(recipe, sharded=world_size > 1)
        for p in other.parameters():
            p.detach().zero_()
        dcp.load(other.state_dict(), checkpoint_id=folder / f"{world_size}", planner=QuantizedLoadPlanner())
        assert digest(other) == expected
        with pytest.raises(ValueError, match="Int8BlockScaling"):
            export_hf(model.state_dict(), folder / "exported")
        assert not (folder / "exported").exists()
        return expected
    finally:
        forget(names["Int8BlockScaling"])


def test_a_format_from_outside_lives_as_ours_do(tmp_path: Path) -> None:
    one, two = run_ranks(1, _lives, tmp_path, 1), run_ranks(2, _lives, tmp_path, 2)
    assert {*one, *two} == {one[0]}  # the bytes of one process


def test_its_numbers_are_right(tmp_path: Path) -> None:
    names = page("extending.md").run(namespace())
    try:
        x = torch.randn(8, 64)
        q = quantize(x, names["Int8BlockScaling"]())
        step = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        assert ((q.dequantize() - x).unflatten(-1, (-1, 32)).abs() <= step / 2 * (1 + 2**-20)).all()
        x[3, 5] = torch.inf
        assert quantize(x, names["Int8BlockScaling"]()).dequantize().isnan().sum() == 32  # its block alone
        save({"w": q}, tmp_path / "saved")
        assert verify(tmp_path / "saved").findings == ()
    finally:
        forget(names["Int8BlockScaling"])
