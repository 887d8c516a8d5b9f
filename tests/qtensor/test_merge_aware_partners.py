"""Adapters on weights that share one scale: forwards, `merge_`, and a quantization of the sums as one weight agree.

Shards are in tests/fsdp_hooks/test_merge_aware_partners.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_hooks import sync_scales
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    LowRankUpdate,
    NVFP4BlockScaling,
    linear_through_merge,
    merge_,
    merge_aware,
    quantize_,
    share_scales,
)
from qtensor.spec.registry import tensor_wide
from tests.qtensor.fused import GROUPS, NAMES, RECIPES, ROWS, K, Model, as_one, built, values
from tests.qtensor.recipes_under_test import raw, same_parts

EYE = torch.eye(K)  # its products are the weights themselves
TARGETS = (["q_proj", "k_proj", "v_proj", "o_proj"], ["q_proj", "v_proj"], ["k_proj"])
EVERY = RECIPES | {"float8_delayed": Float8DelayedScaling()}
each_recipe = pytest.mark.parametrize("name", RECIPES)
each_target = pytest.mark.parametrize("targets", TARGETS, ids="+".join)


def loaded(name: str, *, share: bool = True) -> Model:
    model = built(EVERY[name], torch.float32, share=share)
    model.load_state_dict(values(dtype=torch.float32))
    return model


def adapted(name: str, targets: list[str], *, share: bool = True, size: float = 3.0) -> Any:
    """A model of peft whose updates are larger than the weights: the one that leads in a group is another one then."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(loaded(name, share=share), config)
    with torch.no_grad():
        for number, (fqn, param) in enumerate(model.named_parameters()):
            if "lora_B" in fqn:
                param.mul_(size * (1 + number % 5))
    return model


def linears(model: Any) -> dict[str, Any]:
    """Name in the plain model -> the layer that computes there."""
    plain = {fqn: model.base_model.model.get_submodule(fqn) for group in GROUPS for fqn in group}
    return plain | {f"layers.{number}.o_proj": model.base_model.model.layers[number].o_proj for number in range(2)}


def weights(model: Any) -> dict[str, Any]:
    return {
        f"{name}.weight": getattr(layer, "base_layer", layer).weight.detach() for name, layer in linears(model).items()
    }


def seen(model: Any) -> dict[str, Tensor]:
    """What forwards compute with, [N, K] of the linears that share a scale."""
    return {name: layer(EYE).detach().T for name, layer in linears(model).items() if "o_proj" not in name}


def assert_merge_writes(model: Any, updates: Any, expected: dict[str, Tensor]) -> Any:
    """Merge into a copy, which must hold what forwards have seen, under one scale a group; return the report."""
    after = copy.deepcopy(model)
    report = merge_(after, updates)
    held = weights(after)
    for name, value in expected.items():
        assert torch.equal(held[f"{name}.weight"].dequantize(), value), name
    for group in NAMES:
        wide = tensor_wide(held[group[0]].recipe) or ""
        assert len({float(getattr(held[name], wide)) for name in group}) == 1
    return report


@each_target
@pytest.mark.parametrize("name", EVERY)
def test_forwards_of_partners_see_what_merge_writes(name: str, targets: list[str]) -> None:
    model = adapted(name, targets)
    before = seen(model)
    with merge_aware(model) as aware:
        through = seen(model)
        x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
        y = model(x)
    assert all(not torch.equal(before[each], through[each]) for each in through), "all of them follow"
    report = assert_merge_writes(model, aware.updates(), through)
    assert len(report.weights) == 2 * len(targets), "a line for each update, and none for those that follow"
    after = copy.deepcopy(model)
    merge_(after, aware.updates())
    assert torch.equal(after.unload()(x), y.detach())
    alone = adapted(name, targets, share=False)
    with merge_aware(alone):
        own = seen(alone)
    assert any(not torch.equal(own[each], through[each]) for each in through), "scales of their own would differ"


@each_recipe
def test_a_merge_has_the_bytes_of_all_rows_quantized_as_one(name: str) -> None:
    model = adapted(name, TARGETS[0])
    updates: Any = merge_aware(model).updates()
    plain = {fqn.removeprefix("base_model.model.").replace(".base_layer", ""): one for fqn, one in updates.items()}
    dense = {
        fqn: weight.dequantize() + plain[fqn]((slice(0, weight.shape[0]), slice(0, weight.shape[1])))
        for fqn, weight in weights(model).items()
    }
    merge_(model, updates)
    expected = as_one(dense, RECIPES[name])
    for fqn, weight in weights(model).items():
        for part, value in weight.parts().items():
            assert torch.equal(raw(value), raw(expected[fqn][part])), f"{fqn}.{part}"


@each_recipe
def test_partners_keep_their_bytes_while_the_scale_stays(name: str) -> None:
    model = adapted(name, ["layers.0.k_proj"], size=0.3)  # v_proj leads, and stays the one that does
    before = copy.deepcopy(weights(model))
    with merge_aware(model) as aware:
        through = seen(model)
    merge_(model, aware.updates())
    for fqn, weight in weights(model).items():
        if fqn != "layers.0.k_proj.weight":
            assert same_parts(weight, before[fqn]), fqn
    held = weights(model)
    assert all(torch.equal(held[f"{one}.weight"].dequantize(), value) for one, value in through.items())
    assert not same_parts(held["layers.0.k_proj.weight"], before["layers.0.k_proj.weight"])


def test_updates_of_zeros_move_no_partner_even_where_scales_do_not_agree_yet() -> None:
    model = loaded("nvfp4", share=False)
    share_scales(model, GROUPS)  # each has a scale of its own until sync_scales
    before = [copy.deepcopy(weight.detach()) for weight in model.parameters()]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    plain = seen(model)
    with merge_aware(model) as aware:
        through = seen(model)
    merge_(model, aware.updates())
    held = weights(model)
    assert all(map(same_parts, held.values(), (before[i] for i in (0, 1, 2, 4, 5, 6, 3, 7))))
    assert all(torch.equal(through[one], plain[one]) for one in plain)


@each_recipe
def test_scales_that_do_not_agree_yet_are_those_of_all_behind_a_merge(name: str) -> None:
    """An update decides from the values that are there, whatever their scales; nobody needs to call sync_scales."""
    model = loaded(name, share=False)
    share_scales(model, GROUPS)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with merge_aware(model) as aware:
        through = seen(model)
    assert_merge_writes(model, aware.updates(), through)


def test_adapters_that_are_switched_off_follow_their_partners() -> None:
    model = adapted("nvfp4", TARGETS[0])
    aware = merge_aware(model)
    linears(model)["layers.0.q_proj"].enable_adapters(False)
    for name in GROUPS[1]:
        linears(model)[name].enable_adapters(False)
    with aware:
        through = seen(model)
    updates: Any = aware.updates()
    assert len(updates) == 4
    assert_merge_writes(model, updates, through)
    own = weights(model)
    assert all(torch.equal(through[name], own[f"{name}.weight"].dequantize()) for name in GROUPS[1])


def test_gradients_pass_straight_through_and_reach_each_adapter_from_its_own_product() -> None:
    found = []
    for keep in ("nothing", "merged", "compiled"):
        model = adapted("nvfp4", ["q_proj", "v_proj"])
        call: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if keep == "compiled" else model
        with merge_aware(model, keep="merged" if keep == "merged" else "nothing"):
            x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
            call(x).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert len(grads) == 8
        assert all(grad.abs().sum() > 0 for grad in grads)
        found.append([x.grad, *grads])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
    layer = linears(model)["layers.0.q_proj"]
    with merge_aware(adapted("nvfp4", ["q_proj", "v_proj"])) as aware:
        other = linears(aware._model)["layers.0.q_proj"]
        other(EYE).sum().backward()
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    # y = x (W + s b a).T with x = 1 and dy = 1: db = s 1 (1 a.T), whole sums of the columns of one factor
    expected = 2.0 * a.sum(1).expand(b.shape[0], -1)  # peft's scaling is 8 / 4
    assert torch.allclose(other.lora_B.default.weight.grad, expected, rtol=1e-5, atol=1e-5)  # sums in another order


def test_a_partner_that_is_computed_again_by_another_switch_is_refused() -> None:
    """By itself, where no adapted layer is computed again with it."""
    model = adapted("nvfp4", ["q_proj"])
    follower = linears(model)["layers.0.k_proj"]
    aware, x = merge_aware(model), EYE.clone().requires_grad_()
    with aware:
        y = checkpoint(follower, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.k_proj is computed again in a backward, and the switch was"):
        y.sum().backward()
    with aware:
        checkpoint(follower, x, use_reentrant=True).sum().backward()
        (expected,) = torch.autograd.grad(follower(x).sum(), x)
    assert torch.equal(x.grad, expected)


def test_training_ends_with_the_model_that_was_trained() -> None:
    model = adapted("nvfp4", ["q_proj", "v_proj"], size=0.3)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    with merge_aware(model) as aware:
        for step in range(3):
            model(torch.randn(5, K, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        through = seen(model)
    assert_merge_writes(model, aware.updates(), through)


# -- merge_ alone ------------------------------------------------------------------------------------------------------


def update_of(rows: int, size: float = 1.0) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(rows)
    a, b = torch.randn(2, K, generator=generator), torch.randn(rows, 2, generator=generator) * size
    return LowRankUpdate(a=a, b=b)


def test_dense_storage_gathers_partners_under_the_scale_of_the_merged_values() -> None:
    model = built(NVFP4BlockScaling(), storage="high_precision")
    model.load_state_dict(values())
    name, follower = NAMES[0][0], model.get_parameter(NAMES[0][1])
    writes = follower._version
    merge_(model, {name: update_of(ROWS["q_proj"], 5.0)})
    assert follower._version == writes, "no byte of it changes"
    dense = {fqn: weight.dense.detach().clone() for fqn, weight in model.named_parameters()}
    expected = as_one(dense, NVFP4BlockScaling())
    for fqn, weight in model.named_parameters():
        for part, value in weight.quantize().parts().items():
            assert torch.equal(raw(value), raw(expected[fqn][part])), f"{fqn}.{part}"


def test_a_partner_that_is_not_there_is_refused_and_nothing_is_written() -> None:
    model = loaded("nvfp4")
    before = copy.deepcopy(dict(model.named_parameters()))
    name = NAMES[0][0]
    with pytest.raises(ValueError, match=r"^merge_: layers\.0\.k_proj\.weight, .*v_proj\.weight: not among the param"):
        merge_([(name, model.get_parameter(name))], {name: update_of(ROWS["q_proj"])})
    assert all(same_parts(weight, before[fqn]) for fqn, weight in model.named_parameters())
    others = [(fqn, weight) for fqn, weight in model.named_parameters() if "layers.0" in fqn]
    merge_(others, {name: update_of(ROWS["q_proj"])})  # its group is enough


def test_a_sync_behind_a_merge_changes_nothing() -> None:
    model = loaded("nvfp4")
    merge_(model, {NAMES[0][0]: update_of(ROWS["q_proj"])})
    written = copy.deepcopy(dict(model.named_parameters()))
    sync_scales(model)
    assert all(same_parts(weight, written[fqn]) for fqn, weight in model.named_parameters())


# -- adapters of one's own ---------------------------------------------------------------------------------------------


@each_recipe
def test_linear_through_merge_takes_the_partners(name: str) -> None:
    model = loaded(name).requires_grad_(requires_grad=False)
    q, k, v = (model.get_parameter(fqn) for fqn in NAMES[0])
    updates = {fqn: update_of(weight.shape[0], 0.3) for fqn, weight in zip(NAMES[0], (q, k, v), strict=True)}
    del updates[NAMES[0][1]]
    each = [(q, updates[NAMES[0][0]]), (k, ()), (v, updates[NAMES[0][2]])]
    through = []
    for number, (weight, update) in enumerate(each):
        others = each[:number] + each[number + 1 :]
        through.append(linear_through_merge(EYE, weight, None, update, partners=others))
    merge_(model, updates)
    assert all(torch.equal(y.T, weight.dequantize()) for y, weight in zip(through, (q, k, v), strict=True))


def test_linear_through_merge_refuses_partners_that_are_not_all_of_them() -> None:
    model = loaded("nvfp4").requires_grad_(requires_grad=False)
    q, k, v = (model.get_parameter(fqn) for fqn in NAMES[0])
    o, update = model.get_parameter("layers.0.o_proj.weight"), update_of(ROWS["q_proj"])
    for given in ([], [(k, ())]):
        with pytest.raises(ValueError, match=r"v_proj\.weight: not among `partners`, and shares one scale with layers"):
            linear_through_merge(EYE, q, None, update, partners=given)
    with pytest.raises(ValueError, match="has a weight that shares no scale with this one; see share_scales"):
        linear_through_merge(EYE, q, None, update, partners=[(k, ()), (v, ()), (o, ())])
    with pytest.raises(ValueError, match="has a weight that shares no scale"):
        linear_through_merge(torch.ones(1, 96), o, None, (), partners=[(k, ())])
    with pytest.raises(ValueError, match=r"q_proj\.weight is there 2 times"):
        linear_through_merge(EYE, q, None, update, partners=[(k, ()), (v, ()), (q, ())])


# -- refusals ----------------------------------------------------------------------------------------------------------


def _trained_partner() -> Any:
    model = adapted("nvfp4", ["q_proj"])
    linears(model)["layers.0.k_proj"].weight.requires_grad_(True)
    return model


def _no_linear() -> Any:
    net = nn.ModuleDict({"up": nn.Linear(64, 32), "table": nn.Linear(64, 32)})
    quantize_(net, Float8CurrentScaling(granularity="tensor"))
    share_scales(net, [["up", "table"]])
    table = nn.Embedding(32, 64)
    table.weight, net["table"] = net["table"].weight, table
    return get_peft_model(net, LoraConfig(target_modules=["up"]))


def _incomplete() -> Any:
    model = loaded("nvfp4")
    model.layers[0].v_proj = nn.Linear(K, ROWS["v_proj"], bias=False)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def _dropout() -> Any:
    model = loaded("nvfp4")
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj"], lora_dropout=0.5))


REFUSED: dict[str, tuple[Any, str]] = {
    "a partner that is trained": (
        _trained_partner,
        r"layers\.0\.k_proj, which shares one scale with .*layers\.0\.q_proj\.base_layer: its weight is trained itself",
    ),
    "a partner that is no linear": (_no_linear, r"table, which shares one scale with .*: it is a Embedding, expected"),
    "a partner that is not there": (_incomplete, r"v_proj\.weight: not among the parameters of this model"),
    "a partner with dropout": (_dropout, r"layers\.0\.q_proj: .*dropout 0\.5.*layers\.0\.k_proj: .*dropout 0\.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_partners_that_no_forward_can_follow_are_refused_by_name(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=f"^merge_aware: .*{text}"):
        merge_aware(make())


def test_hooks_of_followers_are_removed_with_the_others() -> None:
    model = adapted("nvfp4", ["q_proj"])
    plain = seen(model)
    aware = merge_aware(model)
    off = seen(model)
    aware.start()
    aware.remove()
    removed = seen(model)
    assert all(torch.equal(plain[name], off[name]) and torch.equal(plain[name], removed[name]) for name in plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
