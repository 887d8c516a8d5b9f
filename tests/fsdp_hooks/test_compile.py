"""Blocks with quantized linears compile as one graph, alone and per block under FSDP2, and once for all steps."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.fsdp_hooks.cases import RECIPES, K, Net, assert_same_bytes, batch, build, gathered, local, shard
from tests.ranks import run_ranks
from tests.recipes import WITH_HISTORY, facts
from tests.sampling import sampled

EVERY = RECIPES | WITH_HISTORY
# A compilation takes seconds: every recipe once, the storages in turn among recipes with and without a scale for all.
PAIRS = [
    (name, storages[number % len(storages)])
    for shared in (False, True)
    for number, (name, recipe) in enumerate(
        (name, recipe) for name, recipe in EVERY.items() if (facts(recipe).tensor_wide is not None) is shared
    )
    for storages in [facts(recipe).storages]
]
# In `make test` scales of rows and of tensors, each in either storage; the other recipes in `make test-all`.
COMPILED_FIRST = [pair for pair in PAIRS if pair[0] in ("float8_row", "mxfp8", "float8_delayed", "nvfp4")]


class Block(nn.Module):
    """A residual MLP: two quantized linears, a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K, dtype=torch.bfloat16)
        self.up = nn.Linear(K, 2 * K, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * K, K, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(recipe: Any, storage: str) -> nn.Sequential:
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage=storage):
        return nn.Sequential(Block(), *([Block()] if recipe == RECIPES["mxfp8"] else []))


def step(net: nn.Module, optimizer: Any, number: int) -> list[Tensor]:
    """One training step; the output and the gradients."""
    out = net(batch(number))
    out.float().square().mean().backward()
    grads = [param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad for param in net.parameters()]
    results = [out.detach(), *(grad.detach().clone() for grad in grads)]
    optimizer.step()
    sync_scales(net)
    optimizer.zero_grad()
    return results


def quietly(fn: Any) -> Any:
    """Under FSDP2 dynamo asks every parameter, plain ones too, for a .grad that it has none of, and torch warns."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            return fn(*args, **kwargs)

    return wrapped


@quietly
def compiles_once(recipe: Any, storage: str, *, sharded: bool, compiler: str) -> None:
    net, eager = blocks(recipe, storage), blocks(recipe, storage)
    lr = 0.01 if compiler == "aot_eager" else 0.0  # else the two would drift apart from step to step
    torch.compiler.reset()
    # Inductor takes seconds a graph, the same on all ranks: the first one has its code.
    backend = compiler if dist.get_rank() == 0 else "aot_eager"
    for each in net:
        each.compile(fullgraph=True, backend=backend)
    optimizers = []
    for model in (net, eager):
        if sharded:
            for each in model:
                fully_shard(each)
            fully_shard(model)
            sync_scales(model)
        optimizers.append(MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=lr))
    for number in range(2):
        # the first step compiles forward and backward
        with torch.compiler.set_stance("default" if number == 0 else "fail_on_recompile"):
            found = step(net, optimizers[0], number)
        for index, (mine, its) in enumerate(zip(found, step(eager, optimizers[1], number), strict=True)):
            if compiler == "aot_eager":  # the same kernels
                assert_same_bytes(mine, its, f"step {number}, tensor {index}")
            else:  # Inductor fuses and so rounds to bf16 less often: a few roundings of 2^-8 of the largest value
                assert (mine - its).abs().max() <= 2.0**-5 * its.abs().max(), f"step {number}, tensor {index}"
    torch.compiler.reset()


def test_every_storage_is_compiled_with_scales_of_rows_and_of_tensors() -> None:
    for pairs in (PAIRS, COMPILED_FIRST):
        assert len({(storage, facts(EVERY[name]).tensor_wide is None) for name, storage in pairs}) == 4


@sampled(("name", "storage"), PAIRS, COMPILED_FIRST)
def test_blocks_compile_as_one_graph_and_once(name: str, storage: str) -> None:
    if storage == "quantized":
        run_ranks(1, compiles_once, EVERY[name], storage, sharded=False, compiler="aot_eager")
    run_ranks(2, compiles_once, EVERY[name], storage, sharded=True, compiler="aot_eager")


@pytest.mark.full
@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_inductor_compiles_blocks_under_fsdp(storage: str) -> None:
    run_ranks(2, compiles_once, RECIPES["mxfp8"], storage, sharded=True, compiler="inductor", timeout=280)


def compiles_with_dynamic_activations(name: str) -> None:
    recipe = type(RECIPES[name])(**{**RECIPES[name].__dict__, "activations": "dynamic"})
    compiles_once(recipe, "quantized", sharded=True, compiler="aot_eager")


@pytest.mark.parametrize("name", ["float8_row", "nvfp4"])
def test_dynamic_activations_compile_too(name: str) -> None:
    run_ranks(1, compiles_with_dynamic_activations, name)


def holds_no_group(storage: str) -> None:
    """Everything that is reachable from weights and recipes pickles, and no process group is among it."""
    for name, recipe in RECIPES.items():
        net = shard(build(recipe, (32,), storage=storage))
        sync_scales(net)
        net(batch(0)).float().sum().backward()
        q: Any = local(net.head.weight)
        assert isinstance(q, QuantizedTensor | HighPrecisionWeight)
        assert not groups_reachable_from(q), name
        assert not groups_reachable_from(recipe), name
        pickle.loads(pickle.dumps(q))
        assert pickle.loads(pickle.dumps(recipe)) == recipe
        assert hash(recipe) == hash(copy.deepcopy(recipe))


def groups_reachable_from(thing: Any) -> list[Any]:
    """Process groups, meshes and stores that gc finds behind an object; autograd, modules and code are not followed."""
    found, seen, todo = [], set(), [thing]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | type(pickle)) or callable(each):
            continue
        seen.add(id(each))
        if isinstance(each, dist.ProcessGroup | dist.DeviceMesh | dist.Store):
            found.append(each)
        todo += gc.get_referents(each)
        todo += list(getattr(each, "__dict__", {}).values())
    return found


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_no_process_group_is_reachable_from_a_shard_or_a_recipe(storage: str) -> None:
    run_ranks(2, holds_no_group, storage)


def test_the_search_for_groups_can_find_one() -> None:
    run_ranks(1, finds_a_group)


def finds_a_group() -> None:
    q = quantize(torch.ones(2, 32), RECIPES["mxfp8"])
    q.hidden = {"deep": [dist.group.WORLD]}
    assert groups_reachable_from(q)


def test_recipes_are_constants_to_the_compiler() -> None:
    """Two models that differ in their recipe alone are two graphs; the same recipe, made anew, is not."""
    x = batch(0, rank=0)
    torch.compiler.reset()
    compiled = torch.compile(lambda weight, x: nn.functional.linear(x, weight), fullgraph=True, backend="aot_eager")
    weight = torch.randn(32, K).to(torch.bfloat16)
    for name in ("mxfp8", "float8_row"):
        recipe = RECIPES[name]
        expected = nn.functional.linear(x, quantize(weight, recipe))
        assert torch.equal(compiled(quantize(weight, recipe), x), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(quantize(weight, copy.copy(recipe)), x), expected)
    torch.compiler.reset()


@quietly
def state_survives() -> None:
    """A compiled, sharded model gathers the same bytes as an eager one."""
    net, eager = (shard(build(RECIPES["nvfp4"], (48,))) for _ in range(2))
    for block in net.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for model in (net, eager):
        sync_scales(model)
    assert_same_bytes(net(batch(0)).detach(), eager(batch(0)).detach(), "output")
    assert isinstance(net, Net)
    for fqn, parts in gathered(net).items():
        for part, value in parts.items() if isinstance(parts, dict) else []:
            assert_same_bytes(value, gathered(eager)[fqn][part], f"{fqn}.{part}")
    torch.compiler.reset()


def test_compiling_after_sharding_changes_no_byte() -> None:
    run_ranks(2, state_survives)
