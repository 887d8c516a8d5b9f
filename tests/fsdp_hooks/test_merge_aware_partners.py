"""merge_aware under FSDP2 for weights that share one scale, and training that goes through the merge at its end.

In one process tests/qtensor/test_merge_aware_partners.py shows what the bytes are.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import unsharded
from qtensor import LowRankUpdate, QuantizedTensor, linear_through_merge, merge_, merge_aware
from tests.fsdp_hooks.cases import Collectives, bits, local
from tests.qtensor.fused import RECIPES, K, Model, batch
from tests.qtensor.test_merge_aware_partners import TARGETS, adapted, loaded
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled


def sharded(model: Any) -> Any:
    """Each attention by itself, so that partners are gathered together."""
    for layer in model.base_model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def held(model: nn.Module) -> dict[str, Tensor]:
    """Name -> bytes of what the weights of a sharded, or plain, model hold, whole; one scale in all shards."""
    found = {}
    with unsharded(model) if isinstance(model, FSDPModule) else contextlib.nullcontext():
        for name, param in model.named_parameters():
            weight = local(param)
            if isinstance(weight, QuantizedTensor):
                for part, value in weight.parts().items():
                    if value.ndim == 1:
                        assert len(set(value.tolist())) == 1, name
                    found[f"{name}.{part}"] = bits(value[:1] if value.ndim == 1 else value)
    assert found
    return found


def look(model: Any) -> dict[str, Tensor]:
    """What forwards of a sharded model compute with: outputs of its linears for the loss of one batch."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            own = name.removeprefix("base_model.model.")
            handles.append(module.register_forward_hook(lambda _, __, y, own=own: found.update({own: y.detach()})))
    found["loss"] = model(batch(0).float()).detach()
    for handle in handles:
        handle.remove()
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{what}: {name}"


def _forwards_see_what_merge_writes(name: str) -> None:
    for targets in TARGETS[:2]:
        reference, model = adapted(name, targets), sharded(adapted(name, targets))
        mine, aware = merge_aware(reference), merge_aware(model)
        mine.start()
        with aware:
            look(model)
            with Collectives() as counted:
                through = look(model)
                model(batch(0).float()).backward()
        reductions = {kind: count for kind, count in counted.counts.items() if "gather" not in kind}
        assert set(reductions) <= {"_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"}, reductions
        assert_equal(through, look(reference), f"{name}, one process")
        merge_(model, aware.updates())
        merge_(reference, mine.updates())
        assert_equal(held(model), held(reference), f"{name}, merged")
        mine.stop()
        with model.disable_adapter(), reference.disable_adapter(), torch.no_grad():
            assert_equal(look(model), through, f"{name}, computed with what was written")


KEPT = [(2, ("float8_tensor",)), (3, ("nvfp4_square",))]
CASES = [*((ranks, tuple(RECIPES)) for ranks in (2, 3)), *KEPT]


@sampled(("ranks", "names"), CASES, KEPT)
def test_forwards_of_partners_see_what_merge_writes_to_the_shards(ranks: int, names: tuple[str, ...]) -> None:
    run_ranks_each(ranks, names, _forwards_see_what_merge_writes)


def _shards_do_not_agree_yet(name: str) -> None:
    """Each shard was written by itself, and nobody has called sync_scales: an update decides from what is there."""
    model = sharded(adapted(name, ["q_proj"]))
    with torch.no_grad():
        for number, (fqn, param) in enumerate(model.named_parameters()):
            if "lora_" not in fqn and "o_proj" not in fqn:
                shard = local(param)
                torch.manual_seed(100 * dist.get_rank() + number)
                shard.copy_(torch.randn(shard.shape) * (1 + dist.get_rank()) * (1 + number % 3))
    with merge_aware(model) as aware:
        through = look(model)
    merge_(model, aware.updates())
    held(model)  # one scale in all shards
    with model.disable_adapter(), torch.no_grad():
        assert_equal(look(model), through, name)


def test_scales_on_which_shards_do_not_agree_yet_are_those_of_all_behind_a_merge() -> None:
    run_ranks_each(3, ("nvfp4", "float8_tensor"), _shards_do_not_agree_yet)


def _partners_sharded_apart() -> None:
    model = adapted("nvfp4", ["q_proj", "v_proj"])
    for layer in model.base_model.model.layers:
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj):
            fully_shard(linear)
    with merge_aware(fully_shard(model)):
        model(batch(0).float())


def test_partners_that_are_not_gathered_together_are_refused_by_name() -> None:
    errors = run_ranks_catching(2, _partners_sharded_apart)
    assert len({*errors}) == 1
    layer = "base_model.model.layers.0"
    assert (
        f"{layer}.q_proj shares one scale with {layer}.k_proj, which is not gathered while that computes" in errors[0]
    )
    assert "let fully_shard take a module around" in errors[0]


def _partners_in_one_call() -> None:
    """fully_shard of a list gathers its modules together, whatever is around them."""
    model = adapted("nvfp4", ["q_proj", "v_proj"])
    reference = adapted("nvfp4", ["q_proj", "v_proj"])
    for layer in model.base_model.model.layers:
        fully_shard([layer.q_proj, layer.k_proj, layer.v_proj])
    with merge_aware(fully_shard(model)), merge_aware(reference):
        assert_equal(look(model), look(reference), "in one call")


def test_partners_may_be_sharded_in_one_call() -> None:
    run_ranks(2, _partners_in_one_call)


class Own(nn.Module):
    """Adapters written by hand on two of three partners."""

    def __init__(self) -> None:
        super().__init__()
        model: Model = loaded("nvfp4")
        self.layers = model.layers[:1].requires_grad_(requires_grad=False)
        torch.manual_seed(0)
        for name in ("q", "v"):
            rows = self.layers[0].get_submodule(f"{name}_proj").weight.shape[0]
            for factor, shape in (("a", (2, K)), ("b", (rows, 2))):
                setattr(self, f"{name}_{factor}", nn.Parameter(torch.randn(*shape)))

    def updates(self, whole: Any = lambda factor: factor) -> dict[str, LowRankUpdate]:
        return {
            name: LowRankUpdate(a=whole(getattr(self, f"{name}_a")), b=whole(getattr(self, f"{name}_b")))
            for name in ("q", "v")
        }

    def forward(self, x: Tensor) -> Tensor:
        updates: Any = self.updates()
        each = [(getattr(self.layers[0], f"{name}_proj").weight, updates.get(name, ())) for name in ("q", "k", "v")]
        outputs = [
            linear_through_merge(x, weight, None, update, partners=each[:number] + each[number + 1 :])
            for number, (weight, update) in enumerate(each)
        ]
        return torch.cat(outputs, dim=-1)


def _by_hand() -> None:
    reference, model = Own(), fully_shard(Own())
    x = batch(0).float()
    y = model(x)
    assert torch.equal(y.detach(), reference(x).detach())
    y.sum().backward()
    assert model.q_b.grad.full_tensor().abs().sum() > 0
    model.reshard()
    updates = model.updates(lambda factor: factor.detach().full_tensor())
    merge_(model, {f"layers.0.{name}_proj.weight": update for name, update in updates.items()})
    updates = reference.updates(lambda factor: factor.detach())
    merge_(reference, {f"layers.0.{name}_proj.weight": update for name, update in updates.items()})
    assert_equal(held(model), held(reference), "merged")


def test_adapters_written_by_hand_take_the_partners() -> None:
    run_ranks(3, _by_hand)


# -- the last steps of a training --------------------------------------------------------------------------------------

STEPS, LAST = 5, 3  # all of them, and those through the merge


class Training:
    """A training whose last steps go through the merge, as docs/merge_aware_lora.md tells it."""

    def __init__(self) -> None:
        self.model = sharded(adapted("nvfp4", ["q_proj", "v_proj"], size=0.3))
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.aware = merge_aware(self.model)

    def run(self, first: int, end: int) -> Training:
        for step in range(first, end):
            if step >= STEPS - LAST:
                self.aware.start()
            self.model(batch(step, dist.get_rank()).float()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": get_optimizer_state_dict(self.model, self.optimizer)}

    def save(self, path: Path) -> None:
        dcp.save(self.state(), checkpoint_id=path, planner=QuantizedSavePlanner())

    def load(self, path: Path) -> Training:
        state = self.state()
        dcp.load(state, checkpoint_id=path, planner=QuantizedLoadPlanner())
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])
        return self

    def factors(self) -> dict[str, Tensor]:
        return {name: param.full_tensor().detach() for name, param in self.model.named_parameters() if "lora_" in name}


def _resumes(path: Path) -> None:
    whole = Training().run(0, STEPS)
    for saved in (STEPS - LAST - 1, STEPS - LAST, STEPS - 1):
        first = Training().run(0, saved)
        first.save(path / str(saved))
        again = Training().load(path / str(saved)).run(saved, STEPS)
        assert_equal(again.factors(), whole.factors(), f"saved before step {saved}")
    plain = Training()
    plain.aware.remove()
    plain.aware.start = lambda: None  # type: ignore[method-assign]
    assert any(
        not torch.equal(value, whole.factors()[name]) for name, value in plain.run(0, STEPS).factors().items()
    ), "the last steps are other ones"
    merge_(whole.model, whole.aware.updates())
    with whole.model.disable_adapter(), torch.no_grad():
        merged = whole.model(batch(9).float())
    merge_(again.model, again.aware.updates())
    with again.model.disable_adapter(), torch.no_grad():
        assert torch.equal(again.model(batch(9).float()), merged)


def test_a_save_in_the_middle_of_the_last_steps_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run_ranks(2, _resumes, tmp_path)
