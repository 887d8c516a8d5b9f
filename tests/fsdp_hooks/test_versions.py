"""A weight written between forward and backward: the error that a plain weight gives under the same writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from fsdp_hooks.versions import count_writes
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize_,
    quantized_model_init,
    stochastic_rounding,
)
from tests.dcp_adapters.cases import alone
from tests.ranks import run_ranks

K = 64
RECIPES = {
    "float8": Float8CurrentScaling(granularity="tensor"),
    "mxfp8": MXFP8BlockScaling(activations="dynamic"),
    "nvfp4": NVFP4BlockScaling(),
}
STALE = "has been modified by an inplace operation"


def model(recipe: Any = None) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(K, K, bias=False, dtype=torch.bfloat16)
    if recipe is not None:
        quantize_(linear, recipe)
    return linear


def dense() -> Tensor:
    return torch.ones(K, K, dtype=torch.bfloat16)


def stepping(build: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Linear, Path], None]:
    def step(net: nn.Linear, path: Path) -> None:
        build([net.weight]).step()

    return step


def rounded_step(net: nn.Linear, path: Path) -> None:
    with stochastic_rounding(torch.Generator().manual_seed(0)):
        torch.optim.AdamW([net.weight], lr=0.1).step()


def loaded(net: nn.Linear, path: Path) -> None:
    with alone():
        dcp.load(net.state_dict(), checkpoint_id=path / "own", planner=QuantizedLoadPlanner())


def converted(net: nn.Linear, path: Path) -> None:
    with alone():
        planner = QuantizedLoadPlanner(on_mismatch="convert")
        dcp.load(net.state_dict(), checkpoint_id=path / "dense", planner=planner)


WRITERS: dict[str, Callable[[nn.Linear, Path], Any]] = {
    "copy_": lambda net, path: net.weight.copy_(dense()),
    "copy_ of its like": lambda net, path: net.weight.copy_(net.weight.detach().clone()),
    "zero_": lambda net, path: net.weight.zero_(),
    "mul_": lambda net, path: net.weight.mul_(2),
    "rows": lambda net, path: net.weight[:32].mul_(1),
    "alias": lambda net, path: net.weight.detach().add_(1),
    "init": lambda net, path: nn.init.normal_(net.weight),
    "foreach": lambda net, path: torch._foreach_add_([net.weight], 1.0),
    "foreach copy": lambda net, path: torch._foreach_copy_([net.weight], [dense()]),
    "load_state_dict": lambda net, path: net.load_state_dict({"weight": dense()}),
    "load_state_dict of its own": lambda net, path: net.load_state_dict(net.state_dict()),
    "sgd": stepping(lambda params: torch.optim.SGD(params, lr=0.1, foreach=True)),
    "sgd, one by one": stepping(lambda params: torch.optim.SGD(params, lr=0.1, foreach=False)),
    "stochastic": rounded_step,
    "masters": stepping(lambda params: MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1)),
    "dcp.load": loaded,
    "dcp.load, converting": converted,
}


def outcome(net: nn.Linear, write: Callable[[nn.Linear, Path], Any], path: Path) -> str:
    """What a backward through a forward from before the write does; a gradient is there for optimizers."""
    held: Any = SimpleNamespace(  # FSDP's root shows what it has gathered after a forward
        weight=net.weight, state_dict=net.state_dict, load_state_dict=net.load_state_dict
    )
    x = torch.ones(2, K, dtype=torch.bfloat16, requires_grad=True)
    net(x).sum().backward()
    y = net(x).sum()
    with torch.no_grad():
        write(held, path)
    try:
        y.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", RECIPES)
def test_a_write_between_forward_and_backward_is_the_error_of_a_plain_weight(name: str, tmp_path: Path) -> None:
    with alone():
        dcp.save(model(RECIPES[name]).state_dict(), checkpoint_id=tmp_path / "own", planner=QuantizedSavePlanner())
        dcp.save(model().state_dict(), checkpoint_id=tmp_path / "dense", planner=QuantizedSavePlanner())
    for what, write in WRITERS.items():
        if what == "rows" and name != "mxfp8":
            continue  # their rows share a scale
        (tmp_path / "plain").unlink(missing_ok=True)
        plain = outcome(model(), write, plain_path(tmp_path))
        assert STALE in plain, what
        assert STALE in outcome(model(RECIPES[name]), write, tmp_path), what


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", ["add", "copy", "mul"])
def test_writes_of_a_list_are_counted_for_plain_members_too(name: str, storage: str) -> None:
    """A saved plain tensor that an update beside quantized ones changed would give wrong gradients."""
    with alone(), quantized_model_init(MXFP8BlockScaling(), storage=storage):  # type: ignore[arg-type]
        weight: Any = nn.Linear(K, K, bias=False).weight
    plain = [torch.ones(K, K), torch.ones(K, K)]
    with torch.no_grad():
        for members, operands in (
            ([weight, plain[0]], [plain[1], plain[1]]),
            ([plain[0], weight], [plain[1], plain[1]]),
            ([plain[0]], [weight.detach()]),
        ):
            before = [member._version for member in members]
            getattr(torch, f"_foreach_{name}_")(members, operands)
            assert all(member._version > old for member, old in zip(members, before, strict=True)), members


def plain_path(path: Path) -> Path:
    """Where "own" is a checkpoint that a plain model loads as it is."""
    directory = path / "for plain"
    directory.mkdir(exist_ok=True)
    for name in ("own", "dense"):
        if not (directory / name).exists():
            (directory / name).symlink_to(path / "dense")
    return directory


def _sharded(path: Path) -> None:
    """FSDP2 lets some writes pass, for a plain weight, too: backward gathers anew, and counts no refill."""
    for name, recipe in (("own", RECIPES["nvfp4"]), ("dense", None)):
        state = fully_shard(model(recipe)).state_dict()
        dcp.save(state, checkpoint_id=path / name, planner=QuantizedSavePlanner())
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        plain_path(path)
    torch.distributed.barrier()
    for keeps in (False, True):
        for what in ("mul_", "sgd", "masters", "dcp.load", "load_state_dict of its own"):
            plain, ours = fully_shard(model(), reshard_after_forward=not keeps), model(RECIPES["nvfp4"])
            fully_shard(ours, reshard_after_forward=not keeps)
            expected = outcome(plain, WRITERS[what], path / "for plain")
            found = outcome(ours, WRITERS[what], path)
            assert bool(found) == bool(expected), (what, keeps, expected, found)
            assert not found or STALE in found


@pytest.mark.parametrize("world_size", [1, 2])
def test_under_fsdp_it_is_what_a_plain_weight_does(world_size: int, shared_tmp_path: Path) -> None:
    run_ranks(world_size, _sharded, shared_tmp_path)


def _writes_into_shards_are_counted() -> None:
    """The parameter itself is a tensor that others may have saved, as products of DTensors do."""
    net = fully_shard(model(RECIPES["nvfp4"]))
    for write in (sync_scales, lambda net: MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1).step()):
        net(torch.ones(2, K, dtype=torch.bfloat16)).sum().backward()
        before = net.weight._version
        write(net)
        assert net.weight._version > before, write


def test_writes_into_shards_are_counted() -> None:
    run_ranks(2, _writes_into_shards_are_counted)


class Deep(nn.Module):
    """Layers of which some are computed again in backward, one of them twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model(RECIPES["nvfp4"]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(layer, torch.tanh(x), use_reentrant=False)
        return x.square().mean()


def _trains() -> None:
    for master in (False, True):
        net = Deep()
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        options = {"lr": 0.01}
        optimizer = (
            MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), **options)
            if master
            else torch.optim.AdamW(net.parameters(), **options)
        )
        for _ in range(2):
            for _ in range(2):
                net(torch.ones(2, K, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_training_with_accumulation_and_checkpointing_raises_nothing() -> None:
    run_ranks(2, _trains)


def test_inference_tensors_have_no_count() -> None:
    with torch.inference_mode():
        weight = model(RECIPES["mxfp8"]).weight
        count_writes([weight])
        before = weight.dequantize()
        torch._foreach_mul_([weight], 2.0)
        assert torch.equal(weight.dequantize(), 2 * before)
