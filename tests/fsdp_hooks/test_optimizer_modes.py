"""Inner optimizers with modes (schedule-free ones): the weights follow the masters that train() and eval() move."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_hooks import unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init
from tests.ranks import run_ranks, run_ranks_catching
from tests.recipes import MAIN, ROW, WITH_HISTORY

if TYPE_CHECKING:
    from qtensor.spec.recipes import Recipe

BETA = 0.9
SWITCHES = ("step", "step", "eval", "eval", "train", "step", "eval", "train", "train", "step")


class ScheduleFree(torch.optim.Optimizer):
    """SGD as schedule-free: z walks, x is its mean, the weights are y = BETA x + (1 - BETA) z, or x after eval()."""

    through_data = fails = False  # copies of an optimizer lose attributes of their own

    def __init__(self, params: Any, lr: float = 0.1, *, through_data: bool = False) -> None:
        super().__init__(params, {"lr": lr, "train_mode": True, "k": 0})
        self.through_data = through_data

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.clone())
                x = param.lerp(z, 1 - 1 / BETA)
                z.sub_(param.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                param.copy_(x.lerp(z, 1 - BETA))

    def eval(self) -> None:
        self._switch(1 - 1 / BETA, train=False)

    def train(self) -> None:
        self._switch(1 - BETA, train=True)

    @torch.no_grad()
    def _switch(self, share: float, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        (param.data if self.through_data else param).lerp_(self.state[param]["z"], share)
                        if self.fails:
                            raise ValueError("no room")
                group["train_mode"] = train

    def first_step(self) -> None:
        """As of an optimizer with two steps."""


def built(recipe: Recipe, storage: str = "quantized") -> nn.Sequential:
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage=storage):
        return nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16))


def act(model: nn.Module, optimizer: Any, action: str, number: int) -> None:
    if action != "step":
        getattr(optimizer, action)()
        return
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        whole = torch.randn(param.shape, generator=generator).to(param.dtype)
        if isinstance(param, DTensor):
            rows = whole.chunk(param.device_mesh.size())[param.device_mesh.get_local_rank()]
            param.grad = DTensor.from_local(rows, param.device_mesh, param.placements)
        else:
            param.grad = whole
    optimizer.step()


def dense_of(param: Tensor) -> Tensor:
    values = param.detach()
    if isinstance(values, QuantizedTensor):
        return values.dequantize(torch.float32) + 0.0
    return getattr(values, "dense", values).float()


def quantized(optimizer: Any) -> list[tuple[Any, Tensor]]:
    """Each quantized parameter, and its master."""
    pairs = [(param, state.get("master_weight")) for param, state in optimizer.state.items()]
    return [(param, master) for param, master in pairs if isinstance(param.detach(), QuantizedTensor)]


def same(q: Any, other: Any) -> bool:
    return all(
        torch.equal(part.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        for part, theirs in zip(q.parts().values(), other.parts().values(), strict=True)
    )


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
@pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN.keys())
def test_the_weights_are_those_of_the_masters_after_every_switch(recipe: Recipe, through_data: bool) -> None:
    model = built(recipe)
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters(), through_data=through_data)
    plain = [nn.Parameter(dense_of(param)) for param in model.parameters()]
    expected = ScheduleFree(plain)
    for number, action in enumerate(SWITCHES):
        act(model, optimizer, action, number)
        for param, own in zip(model.parameters(), plain, strict=True):
            own.grad = None if param.grad is None else param.grad.float()
        getattr(expected, action)()
        assert optimizer.param_groups[0]["train_mode"] is expected.param_groups[0]["train_mode"]
        for param, own in zip(model.parameters(), plain, strict=True):
            assert torch.equal(optimizer.state[param]["master_weight"], own)
            if isinstance(param.detach(), QuantizedTensor):
                assert same(param.detach(), quantize(own.detach(), recipe))
            else:
                assert torch.equal(param, own.to(param.dtype))


def test_a_switch_that_moves_nothing_writes_nothing() -> None:
    """Not even the history of amaxes, to which every write adds one."""
    (recipe,) = WITH_HISTORY.values()
    model = built(recipe)
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    optimizer.eval()
    optimizer.train()
    act(model, optimizer, "step", 0)
    act(model, optimizer, "step", 1)
    for action, writes in (("train", False), ("eval", True), ("eval", False), ("train", True)):
        before = [(param.detach().clone(), param._version) for param, _ in quantized(optimizer)]
        getattr(optimizer, action)()
        for (param, _), (was, version) in zip(quantized(optimizer), before, strict=True):
            assert same(param.detach(), was) is not writes
            assert (param._version > version) is writes


def test_dense_weights_of_high_precision_storage_and_frozen_ones_follow() -> None:
    model = built(MAIN["mxfp8"], "high_precision")
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    for number in range(2):
        act(model, optimizer, "step", number)
    optimizer.eval()
    assert all(torch.equal(dense_of(p), s["master_weight"].bfloat16().float()) for p, s in optimizer.state.items())
    model = built(MAIN["mxfp8"])
    optimizer = MasterWeightOptimizer(ScheduleFree, model.parameters())
    for number in range(2):
        act(model, optimizer, "step", number)
    model.requires_grad_(False)  # after training, and then to be evaluated
    optimizer.eval()
    for param, master in quantized(optimizer):
        assert same(param.detach(), quantize(master.detach(), MAIN["mxfp8"]))


def test_modes_are_there_where_the_inner_optimizer_has_them_and_survive_copies_and_states() -> None:
    model = built(MAIN["mxfp8"])
    plain = MasterWeightOptimizer(torch.optim.AdamW, model.parameters())
    assert not hasattr(plain, "train")
    assert not hasattr(plain, "eval")
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    assert callable(optimizer.train)
    act(model, optimizer, "step", 0)
    act(model, optimizer, "step", 1)
    optimizer.eval()
    both = copy.deepcopy((model, optimizer))
    other = built(MAIN["mxfp8"])
    loaded: Any = MasterWeightOptimizer(ScheduleFree, other.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch aliases what it loads
    other.load_state_dict(model.state_dict())
    for one, its in ((model, optimizer), both, (other, loaded)):
        its.train()
        act(one, its, "step", 2)
    for param, copied, restored in zip(model.parameters(), both[0].parameters(), other.parameters(), strict=True):
        assert torch.equal(dense_of(param), dense_of(copied))
        assert torch.equal(dense_of(param), dense_of(restored))


def test_other_methods_of_the_inner_optimizer_are_no_attributes() -> None:
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, built(MAIN["mxfp8"]).parameters())
    text = (
        "'MasterWeightOptimizer' object has no attribute 'first_step', though its inner ScheduleFree has. What moves "
        "masters outside of step(), train() and eval() would leave the quantized weights behind, and gradients are the "
        "inner optimizer's during step() alone; use an optimizer that does its work in step()"
    )
    with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
        optimizer.first_step()
    with pytest.raises(AttributeError, match=r"^'MasterWeightOptimizer' object has no attribute 'second_step'$"):
        optimizer.second_step()


def _on_ranks(recipe: Recipe) -> list[dict[str, Tensor]]:
    model = built(recipe)
    for linear in model:
        fully_shard(linear)
    fully_shard(model)
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    found = []
    for number, action in enumerate(SWITCHES):
        act(model, optimizer, action, number)
        with unsharded(model):
            found.append({name: dense_of(param).clone() for name, param in model.named_parameters()})
    return found


@pytest.mark.parametrize("recipe", [ROW["nvfp4"], MAIN["mxfp8_square"]], ids=["nvfp4", "mxfp8_square"])
def test_shards_follow_as_one_process_does(recipe: Recipe) -> None:
    model = built(recipe)
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    expected = []
    for number, action in enumerate(SWITCHES):
        act(model, optimizer, action, number)
        expected.append({name: dense_of(param) for name, param in model.named_parameters()})
    for rank in run_ranks(2, _on_ranks, recipe):
        for found, one in zip(rank, expected, strict=True):
            assert all(torch.equal(found[name], value) for name, value in one.items())


def _frozen_after_one_rank_trained(recipe: Recipe, storage: str) -> list[Tensor]:
    """The masters of rank 0 alone move: half of the rows have gradients of zero, and one weight has one row."""
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage=storage):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1, bias=False))
    sharded = dist.is_initialized()
    for linear in model if sharded else []:
        fully_shard(linear)
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    for _ in range(2):
        for param in model.parameters():
            whole = torch.cat([torch.ones(param.shape[0] // 2 or 1, 64), torch.zeros(param.shape[0] // 2, 64)])
            param.grad = distribute_tensor(whole, param.device_mesh, [Shard(0)]) if sharded else whole
        optimizer.step()
    model.requires_grad_(False)
    optimizer.eval()
    with unsharded(model) if sharded else contextlib.nullcontext():
        return [F.linear(torch.eye(64), layer.weight.detach()) for layer in model]


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_shards_that_were_frozen_follow_where_masters_move_on_one_rank(storage: str) -> None:
    recipe = ROW["nvfp4"]
    expected = _frozen_after_one_rank_trained(recipe, storage)
    for rank in run_ranks(2, _frozen_after_one_rank_trained, recipe, storage):
        assert all(torch.equal(*pair) for pair in zip(rank, expected, strict=True))


def _fails_on_one_rank() -> None:
    model = built(ROW["nvfp4"])
    fully_shard(model)
    optimizer: Any = MasterWeightOptimizer(ScheduleFree, model.parameters())
    act(model, optimizer, "step", 0)
    act(model, optimizer, "step", 1)
    optimizer._inner.fails = torch.distributed.get_rank() == 1
    optimizer.eval()


def test_a_switch_that_fails_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks_catching(2, _fails_on_one_rank)
    assert "rank 1 failed before the ranks could agree" in first
    assert second == "ValueError: no room"
