"""share_scales: weights of a group are quantized as the rows of one weight would be, whatever writes them.

Shards are in tests/fsdp_hooks/test_shared_scales.py, exports in tests/dcp_adapters/hf.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_hooks import sync_scales
from fsdp_hooks.ranks.scale_partners import pool
from qtensor import (
    Float8DelayedScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantize_,
    share_scales,
)
from qtensor.model.loading import watch_loads
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import tensor_wide
from tests.qtensor.fused import GROUPS, NAMES, RECIPES, Model, as_one, batch, built, values
from tests.qtensor.recipes_under_test import raw

STORAGES = ("quantized", "high_precision")
NVFP4 = RECIPES["nvfp4"]
each_recipe = pytest.mark.parametrize("name", RECIPES)
each_storage = pytest.mark.parametrize("storage", STORAGES)


def parts_of(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What forwards compute with."""
    found = {}
    for name, weight in model.named_parameters():
        assert isinstance(weight, QuantizedTensor | HighPrecisionWeight)
        found[name] = (weight if isinstance(weight, QuantizedTensor) else weight.quantize()).parts()
    return found


def same(found: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]]) -> bool:
    assert found.keys() == expected.keys()
    return all(
        torch.equal(raw(found[name][part]), raw(value)) for name in expected for part, value in expected[name].items()
    )


def shares(model: nn.Module) -> bool:
    """Whether each group has one tensor-wide scale."""
    found = parts_of(model)
    wide = tensor_wide(next(model.parameters()).recipe) or ""
    return all(len({float(found[name][wide]) for name in group}) == 1 for group in NAMES)


def loaded(name: str, storage: str, **options: Any) -> Model:
    model = built(RECIPES[name], storage=storage, **options)
    model.load_state_dict(values())
    return model


@each_storage
@each_recipe
def test_a_load_quantizes_the_weights_of_a_group_as_one(name: str, storage: str) -> None:
    assert same(parts_of(loaded(name, storage)), as_one(values(), RECIPES[name]))
    assert not same(parts_of(loaded(name, storage, share=False)), as_one(values(), RECIPES[name]))


@each_recipe
def test_a_sync_agrees_on_what_dense_weights_became(name: str) -> None:
    model = loaded(name, "high_precision")
    changed = {name: value * (1 + number) for number, (name, value) in enumerate(values(1).items())}
    with torch.no_grad():
        for fqn, weight in model.named_parameters():
            weight.copy_(changed[fqn])
    assert not shares(model), "each has a scale that fits its values until then"
    assert sync_scales(model) == 0, "all-reduces"
    assert same(parts_of(model), as_one(changed, RECIPES[name]))


@each_recipe
def test_a_sync_rounds_quantized_weights_again_under_the_largest_scale(name: str) -> None:
    model = built(RECIPES[name])
    with torch.no_grad():
        for fqn, weight in model.named_parameters():
            weight.copy_(values()[fqn])  # under a scale of its own
    before = parts_of(copy.deepcopy(model))
    assert not shares(model)
    sync_scales(model)
    found, wide = parts_of(model), tensor_wide(RECIPES[name]) or ""
    for group in NAMES:
        largest = max(float(before[fqn][wide]) for fqn in group)
        for fqn in group:
            assert float(found[fqn][wide]) == largest
            if float(before[fqn][wide]) == largest:
                assert same({fqn: found[fqn]}, {fqn: before[fqn]}), "the one that leads keeps its bytes"
    again = parts_of(copy.deepcopy(model))
    sync_scales(model)
    assert same(parts_of(model), again), "those that agree keep their bytes"


@each_recipe
def test_a_preserved_initial_value_is_quantized_as_one(name: str) -> None:
    torch.manual_seed(0)
    model = built(RECIPES[name], preserve_high_precision_init_val=True)
    torch.manual_seed(0)
    sync_scales(model)
    assert same(parts_of(model), as_one(dict(Model().named_parameters()), RECIPES[name]))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@each_recipe
def test_master_weights_are_quantized_as_one_by_each_step(name: str, optimizer: Any) -> None:
    model = loaded(name, "quantized")
    trainer = MasterWeightOptimizer(optimizer, model.named_parameters(), lr=0.05)
    for step in range(3):
        model(batch(step)).backward()
        trainer.step()
        trainer.zero_grad()
        masters = {fqn: trainer.state[weight]["master_weight"] for fqn, weight in model.named_parameters()}
        assert same(parts_of(model), as_one(masters, RECIPES[name])), step


def test_a_partner_without_a_gradient_follows_the_scale() -> None:
    model = loaded("nvfp4", "quantized")
    trainer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=1.0)
    before = parts_of(copy.deepcopy(model))
    leads = max(NAMES[0], key=lambda fqn: float(values()[fqn].abs().max()))
    weight = model.get_parameter(leads)
    weight.grad = -weight.dequantize()  # doubles it
    trainer.step()
    assert shares(model)
    for fqn in NAMES[0]:
        assert float(parts_of(model)[fqn]["global_scale"]) == 2 * float(before[fqn]["global_scale"])
    assert all(torch.equal(raw(parts_of(model)[fqn]["payload"]), raw(before[fqn]["payload"])) for fqn in NAMES[1])
    written = parts_of(copy.deepcopy(model))
    for param in model.parameters():
        param.grad = torch.zeros(param.shape, dtype=param.dtype)
    trainer.step()
    assert same(parts_of(model), written), "a step that moves no master moves no byte"


def test_dense_weights_agree_in_a_step_with_masters() -> None:
    model = loaded("nvfp4", "high_precision")
    trainer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.05)
    model(batch(0)).backward()
    trainer.step()
    dense = {name: weight.dense.detach() for name, weight in model.named_parameters()}
    assert not torch.equal(dense[NAMES[0][0]], values()[NAMES[0][0]])
    assert same(parts_of(model), as_one(dense, NVFP4))


def test_delayed_scaling_shares_its_history() -> None:
    recipe = Float8DelayedScaling(amax_history_len=4)
    model = built(recipe)
    model.load_state_dict(values())
    trainer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.5)
    for step in range(2):
        assert shares(model)
        for group in NAMES:
            first, *others = (parts_of(model)[name]["amax_history"] for name in group)
            assert all(torch.equal(first, other) for other in others)
        model(batch(step)).backward()
        trainer.step()
    largest = max(float(trainer.state[model.get_parameter(name)]["master_weight"].abs().max()) for name in NAMES[0])
    assert largest in parts_of(model)[NAMES[0][1]]["amax_history"]


# -- what keeps it -----------------------------------------------------------------------------------------------------


def deep_copied(model: Model) -> Any:
    return copy.deepcopy(model)


def pickled(model: Model) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Model) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def on_meta_and_back(model: Model) -> Any:
    return model.to("meta").to_empty(device="cpu")


def assigned(model: Model) -> Any:
    model.load_state_dict(values(2), assign=True)
    return model


def assigned_from_a_file(model: Model) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.serialization.safe_globals(QuantizedTensor.safe_globals()):
        model.load_state_dict(torch.load(file), assign=True)
    return model


def in_another_dtype(model: Model) -> Any:
    return model.float().bfloat16()


WAYS = (deep_copied, pickled, saved, on_meta_and_back, assigned, assigned_from_a_file, in_another_dtype)


@pytest.mark.parametrize("way", WAYS)
@each_storage
def test_weights_know_their_partners_wherever_they_go(storage: str, way: Any) -> None:
    model = way(loaded("nvfp4", storage))
    model.load_state_dict(values(1))
    assert same(parts_of(model), as_one(values(1), NVFP4))
    with torch.no_grad():
        model.layers[0].k_proj.weight.mul_(8)
    sync_scales(model)
    assert shares(model)


@each_storage
def test_on_the_meta_device(storage: str) -> None:
    with torch.device("meta"):
        model = built(NVFP4, storage=storage)
    model.to_empty(device="cpu").load_state_dict(values())
    assert same(parts_of(model), as_one(values(), NVFP4))


@each_storage
def test_copies_of_a_model_share_nothing_in_a_load(storage: str) -> None:
    one = built(NVFP4, storage=storage)
    both = nn.ModuleDict({"student": one, "ema": copy.deepcopy(one)})
    watch_loads([both])
    states = {"student": values(1), "ema": {name: 100 * value for name, value in values(2).items()}}
    both.load_state_dict({f"{who}.{name}": value for who, state in states.items() for name, value in state.items()})
    for who, state in states.items():
        assert same(parts_of(both[who]), as_one(state, NVFP4)), who


@each_storage
def test_one_of_them_loaded_alone_has_a_scale_of_its_own_until_a_sync(storage: str) -> None:
    model = loaded("nvfp4", storage)
    value = 5 * values(3)[NAMES[0][1]]
    model.layers[0].k_proj.load_state_dict({"weight": value})
    found = parts_of(model)[NAMES[0][1]]
    assert all(torch.equal(raw(found[part]), raw(own)) for part, own in quantize(value, NVFP4).parts().items())
    assert not shares(model)
    sync_scales(model)
    assert shares(model)


def test_a_later_call_replaces_the_groups() -> None:
    model = loaded("nvfp4", "high_precision")
    assert share_scales(model, GROUPS[:1]) == NAMES[:1]
    model.load_state_dict(values(1))
    alone = {name: quantize(value, NVFP4).parts() for name, value in values(1).items()}
    expected = as_one(values(1), NVFP4)
    assert same(parts_of(model), {name: (expected if name in NAMES[0] else alone)[name] for name in alone})
    assert share_scales(model, []) == []
    model.load_state_dict(values(1))
    assert same(parts_of(model), alone)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_has_no_tensor_wide_scale_has_none_to_share() -> None:
    model = built(MXFP8BlockScaling(), share=False)
    assert share_scales(model, GROUPS) == []
    assert share_scales(Model(), GROUPS) == []
    with torch.no_grad():
        model.layers[0].k_proj.weight.mul_(2)
    assert sync_scales(model) == 0


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([["layers.0.q_proj", "layers.0.x_proj"]], "no parameter layers.0.x_proj.weight; give names of named_modules"),
        ([GROUPS[0], GROUPS[0][1:]], r"layers.0.k_proj.weight is in the group of .*q_proj.weight.* and in that of"),
        (
            [["layers.0.q_proj", "layers.1.q_proj"]],
            r'q_proj.weight is NVFP4.* storage="quantized" and layers.1.q_proj.weight is not quantized; quantize all',
        ),
        (
            [["layers.0.q_proj", "layers.0.o_proj"]],
            r"q_proj.weight is NVFP4\S* with .* and layers.0.o_proj.weight is MXFP8",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused_by_name(groups: Any, words: str) -> None:
    model = Model()
    quantize_(model, NVFP4, include=["layers.0.*"], exclude=["*.o_proj"])
    quantize_(model, MXFP8BlockScaling(), include=["*.o_proj"])
    with pytest.raises(ValueError, match=words):
        share_scales(model, groups)
    assert all(getattr(param, "_partners", None) is None for param in model.parameters())


def test_a_string_is_no_group() -> None:
    with pytest.raises(TypeError, match=r"'layers\.0\.q_proj' is a string; a group is a list of the names of modules"):
        share_scales(built(NVFP4), ["layers.0.q_proj"])


@each_storage
def test_a_partner_that_is_not_given_is_named(storage: str) -> None:
    model = loaded("nvfp4", storage)
    with pytest.raises(
        ValueError,
        match=r"sync_scales: layers.0.k_proj.weight, layers.0.v_proj.weight: not among the parameters, and shares one "
        r"scale with layers.0.q_proj.weight; give all that share one, or leave their group out of qtensor.share_scales",
    ):
        sync_scales([model.layers[0].q_proj.weight])
    assert sync_scales(model.layers[0]) == 0, "the whole group"
    copies = nn.ModuleList([model, copy.deepcopy(model)])
    with pytest.raises(
        ValueError, match=r"layers.0.q_proj.weight is there 2 times, as in copies of a model.* all of t"
    ):
        sync_scales(copies)
    share_scales(copies, [[f"{number}.{name}" for name in group] for number in range(2) for group in GROUPS])
    sync_scales(copies)


@each_storage
def test_a_partner_that_is_not_trained_is_named(storage: str) -> None:
    words = r"layers.1.v_proj.weight: not among the parameters that it trains \(frozen ones are not\), and shares one"
    model = loaded("nvfp4", storage)
    some = [param for name, param in model.named_parameters() if name != NAMES[1][2]]
    with pytest.raises(ValueError, match=f"MasterWeightOptimizer: {words}"):
        MasterWeightOptimizer(torch.optim.SGD, some, lr=0.1)
    trainer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model.get_parameter(NAMES[1][2]).requires_grad_(False)
    model(batch(0)).backward()
    with pytest.raises(ValueError, match=f"MasterWeightOptimizer.step: {words}"):
        trainer.step()
    with pytest.raises(ValueError, match=f"MasterWeightOptimizer: {words}"):
        MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    for name in NAMES[1]:
        model.get_parameter(name).requires_grad_(False)
    MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1).step()
    assert shares(model)


def test_nvfp4_square_blocks_have_their_own_recipe() -> None:
    model = Model()
    quantize_(model, NVFP4, include=["*.q_proj", "*.v_proj"])
    quantize_(model, NVFP4BlockScaling(blocks="square"), include=["*.k_proj"])
    with pytest.raises(ValueError, match=r'q_proj.weight is .*blocks="?\'?row.* and layers.0.k_proj.weight is'):
        share_scales(model, GROUPS)


@pytest.mark.gpu
def test_partners_on_different_devices_are_pooled_where_each_is() -> None:
    """As with weights of which some are offloaded."""
    claims = [
        torch.tensor([value, 7.0], dtype=torch.float32, device=device)
        for value, device in ((1.0, "cpu"), (2.0, "cuda"), (3.0, "cpu"))
    ]
    found = pool(["qkv", "qkv", None], [1, 1, 1], claims)
    assert [(one.device.type, one.tolist()) for one in found] == [
        ("cpu", [2.0, 7.0]),
        ("cuda", [2.0, 7.0]),
        ("cpu", [3.0, 7.0]),
    ]
