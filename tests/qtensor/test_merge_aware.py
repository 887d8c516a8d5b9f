"""merge_aware on models of peft: what is trained is what merge_ writes, the switch, and what is refused by name.

peft's own products are the reference where nothing is rounded: a dense fp32 base and small whole numbers, whose sums
are exact in any order.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    NVFP4BlockScaling,
    merge_,
    merge_aware,
    quantized_model_init,
)
from qtensor.merging.low_rank import UpdateSum
from tests.qtensor.recipes_under_test import every_main_recipe

NVFP4 = NVFP4BlockScaling()
X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


class Net(nn.Module):
    """Two linears, a table, a convolution and a linear that stays dense."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        with quantized_model_init(recipe, storage=getattr(recipe, "stored_as", "quantized")):
            self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.table, self.conv, self.dense = nn.Embedding(8, 64), nn.Conv1d(5, 5, 3, padding=1), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.down(self.up(x).relu()))  # type: ignore[no-any-return]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": ["up", "down", "dense"], "init_lora_weights": False, "lora_alpha": 1, **options}
    )


def adapted(recipe: Any = NVFP4, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A bf16 model of peft whose adapters are not zero, in `dtype`."""
    model = get_peft_model(Net(recipe).to(torch.bfloat16), lora(**options))
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = (param.data.float() * 1.01).to(dtype)  # fp32 ones are no numbers of bf16
    return model


def merged_output(model: Any, updates: Any) -> Tensor:
    """What a copy computes once merge_ and unload() have made a plain model of it."""
    alone = copy.deepcopy(model)
    merge_(alone, updates)
    with torch.no_grad():
        return alone.unload()(X)  # type: ignore[no-any-return]


def train(model: Any, steps: int = 2, rate: float = 0.05) -> None:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=rate)
    for _ in range(steps):
        model(X).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@every_main_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_trained_is_what_merge_writes(recipe: Any, dtype: torch.dtype) -> None:
    model = adapted(recipe, dtype)
    names = list(model.state_dict())
    with merge_aware(model) as aware:
        assert list(model.state_dict()) == names
        train(model)
        y = model(X)
    updates = aware.updates()
    assert list(updates) == [f"base_model.model.{name}.base_layer.weight" for name in ("up", "down", "dense")]
    assert torch.equal(merged_output(model, updates), y)
    assert not torch.equal(model(X), y), "base and adapter beside one another round nothing"
    assert list(model.state_dict()) == names


def test_a_fresh_adapter_leaves_the_base_as_it_is() -> None:
    model = adapted(Int4GroupScaling(), init_lora_weights=True)
    with merge_aware(model):
        y = model(X)
    assert torch.equal(y, model.unload()(X))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_gradients_are_those_of_peft_where_nothing_is_rounded(use_rslora: bool) -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(64, 32)), lora(target_modules=["0"], use_rslora=use_rslora))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator))
    x = torch.randint(-2, 3, (5, 64), generator=generator).float().requires_grad_()
    dy = torch.randint(-2, 3, (5, 32), generator=generator).float()
    found = []
    for aware in (None, merge_aware(model)):
        if aware:
            aware.start()
        y = model(x)
        y.backward(dy)
        found.append([y.detach(), x.grad, *(param.grad for param in model.parameters() if param.requires_grad)])
        model.zero_grad()
        x.grad = None
    assert len(found[0]) == 4
    assert all(map(torch.equal, *found))


def test_scalings_and_several_adapters_are_read_in_each_forward() -> None:
    model = adapted(lora_alpha=6)
    model.add_adapter("second", lora(r=2, lora_alpha=3, use_rslora=True, target_modules=["up"]))
    model.base_model.set_adapter(["default", "second"])
    aware, seen = merge_aware(model), []
    layer = model.base_model.model.up

    def look() -> None:
        with aware:
            seen.append(model(X))
        assert torch.equal(merged_output(model, aware.updates()), seen[-1])

    look()
    layer.scale_layer(0.25)
    look()
    model.base_model.set_adapter("second")
    look()
    assert len(aware.updates()) == 1
    with aware, model.disable_adapter():
        seen.append(model(X))
        assert aware.updates() == {}
    assert torch.equal(seen[-1], model.unload()(X))
    assert all(not torch.equal(*pair) for pair in itertools.pairwise(seen))


def test_a_switch_that_is_off_computes_what_peft_computes() -> None:
    model = adapted()
    plain = model(X)
    aware = merge_aware(model)
    assert torch.equal(model(X), plain)
    aware.start()
    through = model(X)
    copied = copy.deepcopy(model)
    aware.stop()
    assert torch.equal(model(X), plain)
    assert torch.equal(copied(X), through), "a copy has a switch of its own"
    aware.start()
    assert torch.equal(model(X), through)
    aware.remove()
    assert torch.equal(model(X), plain)
    with pytest.raises(RuntimeError, match=r"its hooks were removed; call merge_aware\(model\) again"):
        aware.start()


def fresh(*, rate: float = 1e-4) -> Any:
    """A model whose adapters are trained by so little that all of it is smaller than half a step."""
    model = adapted(MXFP4BlockScaling(), init_lora_weights=True, target_modules=["up", "down"])
    return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=rate)


def step(model: Any, optimizer: Any) -> None:
    model(X).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_merge_warns_of_no_loss_that_the_training_has_seen() -> None:
    """Warnings are errors here: a lost update is one, unless its last step went through the merge."""
    model, optimizer = fresh()
    aware = merge_aware(model)
    aware.start()
    step(model, optimizer)
    aware.stop()
    with torch.no_grad():
        model(X)  # looks at the adapters beside their weights, and trains nothing
    updates: Any = aware.updates()
    assert all(update.through_merge for update in updates.values())
    report = merge_(copy.deepcopy(model), updates)
    assert all(line.through_merge and not line.lost and not line.worse for line in report.weights)
    assert max(line.survived for line in report.weights) < 0.1, "the share itself is told as it is"
    step(model, optimizer)
    updates = aware.updates()
    assert not any(update.through_merge for update in updates.values())
    with pytest.warns(UserWarning, match="rounding took the update back from .*up.base_layer.weight, .*down"):
        report = merge_(copy.deepcopy(model), updates)
    assert all(line.lost for line in report.weights)


def test_merge_warns_of_the_weights_that_were_not_trained_through_it() -> None:
    model, optimizer = fresh()
    aware = merge_aware(model)
    model.base_model.model.up.enable_adapters(False)  # as its last forward with gradients has it
    with aware:
        step(model, optimizer)
    model.base_model.model.up.enable_adapters(True)
    with torch.no_grad():
        model.base_model.model.up.lora_B.default.weight.fill_(1e-5)
    updates: Any = aware.updates()
    assert [update.through_merge for update in updates.values()] == [False, True]
    with pytest.warns(
        UserWarning, match=r"took the update back from base_model\.model\.up\.base_layer\.weight: nearly"
    ):
        merge_(model, updates)


def test_a_sum_was_trained_through_the_merge_if_all_of_it_was() -> None:
    model = adapted(target_modules=["up"])
    model.add_adapter("second", lora(r=2, target_modules=["up"]))
    model.base_model.set_adapter(["default", "second"])
    with merge_aware(model) as aware:
        model(X)
    (update,) = aware.updates().values()
    assert update.through_merge  # type: ignore[attr-defined]
    first, second = update.updates  # type: ignore[attr-defined]
    assert not UpdateSum((first, dataclasses.replace(second, through_merge=False))).through_merge


@pytest.mark.parametrize("on", [False, True])
def test_a_copy_of_a_model_gets_a_switch_of_its_own(on: bool) -> None:
    """The copies of hooks cannot be switched by anybody, and compute nothing once the copy has another switch."""
    model = adapted()
    plain, aware = model(X), merge_aware(model)
    if on:
        aware.start()
    both = copy.deepcopy((model, aware))
    copied, lost = both
    mine = merge_aware(copied)
    assert torch.equal(copied(X), plain)
    with mine:
        through = copied(X)
        step(copied, torch.optim.SGD(copied.parameters(), lr=0.5))
        assert not torch.equal(copied(X), through), "it has adapters of its own"
    assert not torch.equal(through, plain)
    assert torch.equal(model(X), through if on else plain), "the model that was copied goes on"
    with pytest.raises(RuntimeError, match=r"its hooks were removed; call merge_aware\(model\) again"):
        lost.start()
    again = merge_aware(copy.deepcopy(copied))  # a copy of a copy
    with again:
        again._model(X)
    with pytest.raises(ValueError, match="its base layer has hooks"):
        merge_aware(copied)
    mine.remove()
    merge_aware(copied)


def test_a_base_that_leaves_its_layer_computes_by_itself() -> None:
    """`unload` takes the base out of the layer while the switch is on; so does whoever calls it alone."""
    model = adapted()
    with merge_aware(model) as aware:
        y = model(X)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(X[..., :32])
        alone = model.base_model.model.dense.base_layer
        assert alone(X).shape == (2, 5, 32)
        merge_(model, aware.updates())
        assert torch.equal(model.unload()(X), y)


def test_a_block_leaves_the_switch_as_it_was() -> None:
    model = adapted()
    aware = merge_aware(model)
    plain = model(X)
    aware.start()
    with aware:
        through = model(X)
        with aware:
            pass
        assert torch.equal(model(X), through)
    assert torch.equal(model(X), through)
    aware.stop()
    with pytest.raises(ZeroDivisionError), aware:
        raise ZeroDivisionError
    with aware:
        aware.start()
    assert torch.equal(model(X), plain)
    aware.start()
    with aware:
        aware.remove()
    assert torch.equal(model(X), plain)


def test_compiled_code_sees_the_switch_whenever_it_was_compiled() -> None:
    model = adapted()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = compiled(X)
    aware = merge_aware(model)
    for _ in range(2):
        with aware:
            expected, found = [], []
            for call, into in ((model, expected), (compiled, found)):
                into.append(call(X))
                into[0].float().square().sum().backward()
                into += [param.grad for param in model.parameters() if param.grad is not None]
                model.zero_grad()
        assert len(found) == 7
        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], plain)
        assert torch.equal(compiled(X), plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    model, found = adapted(MXFP4BlockScaling()), []
    x = X.clone().requires_grad_()
    with merge_aware(model):
        for call in (model, lambda one: checkpoint(model, one, use_reentrant=reentrant)):
            call(x).float().square().sum().backward()
            found.append([x.grad, *(param.grad for param in model.parameters() if param.grad is not None)])
            model.zero_grad()
            x.grad = None
    assert len(found[0]) == 7
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_computed_again_by_another_switch_is_refused(reentrant: bool) -> None:
    """Gradients would be those of base and adapter beside one another; torch itself sees that only without reentry."""
    model = adapted(MXFP4BlockScaling())
    aware, x = merge_aware(model), X.clone().requires_grad_()
    with aware:
        y = checkpoint(model, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"model\.up is computed again in a backward, and the switch was changed"):
        y.sum().backward()
    y = checkpoint(model, x, use_reentrant=reentrant)
    with aware, pytest.raises(RuntimeError, match="call backward inside the block"):
        y.sum().backward()
    with aware:
        y = model(x)
    y.sum().backward()  # nothing is computed again


def test_keeping_the_merged_bytes_changes_no_gradient() -> None:
    found = []
    for keep in ("nothing", "merged"):
        model = adapted()
        with merge_aware(model, keep=keep):  # type: ignore[arg-type]
            model(X).float().square().sum().backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert len(found[0]) == 6
    assert all(map(torch.equal, *found))


def test_an_adapter_dtype_is_that_of_both_the_forwards_and_the_updates() -> None:
    model = adapted(Float8CurrentScaling())
    with merge_aware(model, adapter_dtype=torch.bfloat16) as aware:
        y = model(X)
    assert torch.equal(merged_output(model, aware.updates()), y)
    aware.remove()
    with merge_aware(model):
        assert not torch.equal(model(X), y)


def test_adapters_that_peft_merges_meanwhile_are_in_the_base() -> None:
    """Merging once more would count them twice."""
    model = get_peft_model(nn.Sequential(nn.Linear(64, 32)), lora(target_modules=["0"]))
    with merge_aware(model) as aware:
        model.merge_adapter()
        assert torch.equal(model(X.float()), model.base_model.model[0].base_layer(X.float()))
        assert aware.updates() == {}
        model.unmerge_adapter()
        assert len(aware.updates()) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_merge_alike(mode: Any) -> None:
    model = adapted()
    with merge_aware(model):
        y = model(X)
        with mode():
            alone = model(X)
    assert torch.equal(alone, y)
    assert not alone.requires_grad


# -- refusals ----------------------------------------------------------------------------------------------------------


def _dense_storage() -> Any:
    with quantized_model_init(NVFP4, storage="high_precision"):
        net = nn.ModuleDict({"up": nn.Linear(64, 96)})
    return get_peft_model(net, lora(target_modules=["up"]))


def _trained_base() -> Any:
    model = adapted()
    model.base_model.model.up.base_layer.weight.requires_grad_(True)
    return model


def _tied() -> Any:
    net = Net(NVFP4)
    net.table = nn.Embedding(32, 64)
    net.table.weight = net.dense.weight
    return get_peft_model(net, lora(target_modules=["dense"], ensure_weight_tying=False))


def _hooked() -> Any:
    model = adapted()
    merge_aware(model)
    return model


def _merged() -> Any:
    model = get_peft_model(nn.Sequential(nn.Linear(64, 32)), lora(target_modules=["0"]))
    model.merge_adapter()
    return model


def _transposed() -> Any:
    model = adapted()
    model.base_model.model.up.fan_in_fan_out = True
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "a transposed weight": (_transposed, r"model\.up: fan_in_fan_out says that its weight is transposed"),
    "dropout": (
        lambda: adapted(lora_dropout=0.1),
        r"base_model\.model\.up: the adapter 'default' has dropout 0\.1, .*set lora_dropout=0",
    ),
    "DoRA": (lambda: adapted(use_dora=True, target_modules=["dense"]), "'default' is a DoraLinearVariant; plain LoRA"),
    "a bias": (lambda: adapted(lora_bias=True, target_modules=["up"]), "has a bias of its own.*lora_bias=False"),
    "an embedding": (
        lambda: adapted(target_modules=["table"]),
        r"base_model\.model\.table: it is a Embedding of peft; LoRA on linears",
    ),
    "a convolution": (lambda: adapted(target_modules=["conv"]), r"base_model\.model\.conv: it is a Conv1d of peft"),
    "another method": (
        lambda: get_peft_model(Net(NVFP4), LoHaConfig(r=4, target_modules=["dense"])),
        r"base_model\.model\.dense: it is a Linear of peft; LoRA on linears",
    ),
    "dense storage": (_dense_storage, "its base weight is stored dense"),
    "a base that is trained": (_trained_base, r"model\.up: its base weight is trained itself"),
    "a tied weight": (_tied, r"is tied, as base_model\.model\.table\.weight and base_model\.model\.dense\.base_layer"),
    "hooks on the base": (_hooked, r"its base layer has hooks on its forward.*by its remove\(\)"),
    "adapters that are merged": (_merged, r"peft has merged its adapters into the weight; call unmerge_adapter\(\)"),
    "no adapter": (lambda: Net(NVFP4), r"no layers with adapters of peft; .*qtensor\.linear_through_merge"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_in_a_forward_is_refused_by_name(case: str) -> None:
    make, text = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=f"^merge_aware: .*{text}"):
        merge_aware(model)


def test_all_that_is_wrong_is_told_at_once_and_no_hook_is_left() -> None:
    model = adapted(lora_dropout=0.5)
    with pytest.raises(ValueError, match=r"up: .*dropout.*down: .*dropout.*dense: .*dropout.*Nothing was changed"):
        merge_aware(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match='keep="all" is not known'.replace('"', "['\"]")):
        merge_aware(adapted(), keep="all")  # type: ignore[arg-type]


def test_a_forward_that_sees_other_adapters_is_refused() -> None:
    model = adapted()
    aware = merge_aware(model)
    model.add_adapter("late", lora(lora_dropout=0.5))
    model.set_adapter("late")
    with aware, pytest.raises(RuntimeError, match=r"model\.up: the adapter 'late' was not active when"):
        model(X)
    model.set_adapter("default")
    with aware, pytest.raises(RuntimeError, match=r"model\.up is called with adapter_names.*stop\(\)"):
        model.base_model.model.up(X, adapter_names=["default", "__base__"])
    model.to(torch.bfloat16)
    with (
        aware,
        pytest.raises(RuntimeError, match=r"'default' are torch\.float32, and this forward sees torch\.bfloat1"),
    ):
        model(X)
    with pytest.raises(RuntimeError, match=r"adapter_dtype=torch\.bfloat16"):
        aware.updates()


def test_an_adapter_that_was_made_anew_under_its_name_is_refused() -> None:
    """It may have dropout, or be of another kind; one token would be no error by its shape."""
    model = adapted(target_modules=["up"])
    aware = merge_aware(model)
    model.add_adapter("other", lora(target_modules=["up"]))
    model.set_adapter("other")
    model.delete_adapter("default")
    model.add_adapter("default", lora(target_modules=["up"], lora_dropout=0.5))
    model.set_adapter("default")
    for call in (lambda: model(X[0, :1]), aware.updates):
        with (
            aware,
            pytest.raises(RuntimeError, match=r"the adapter 'default' was not active when .* or was made since"),
        ):
            call()


def test_hooks_that_a_base_got_since_are_refused() -> None:
    model = adapted()
    aware = merge_aware(model)
    base = model.base_model.model.up.base_layer
    hooks = (base.register_forward_hook, lambda *_: None), (base.register_forward_pre_hook, lambda *_: None)
    for register, hook in hooks:
        handle = register(hook)
        model(X)
        with aware, pytest.raises(RuntimeError, match=r"model\.up\.base_layer has got hooks on its forward since"):
            model(X)
        handle.remove()
    with aware:
        model(X)


def test_modules_that_peft_trains_whole_are_left_alone() -> None:
    model = adapted(target_modules=["up", "down"], modules_to_save=["dense"])
    with merge_aware(model) as aware:
        train(model)
        y = model(X)
    assert torch.equal(merged_output(model, aware.updates()), y)
