"""Quantized parameters in unmodified models: which weights become quantized, and with which values."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from qtensor import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    clear_high_precision_init_val,
    high_precision_init_val,
    quantize,
    quantize_,
    quantized_model_init,
)
from qtensor.spec.registry import tensor_wide
from tests.qtensor.recipes_under_test import RECIPES, main_recipes, same_bytes, same_parts, tensor_wide_recipes, weight

MXFP8 = MXFP8BlockScaling()


class Block(nn.Module):
    """A bit of everything: linears with and without bias, a norm, an embedding, a convolution, an own parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, dtype=dtype)
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.up = nn.Linear(64, 96, dtype=dtype)
        self.down = nn.Linear(96, 64, bias=False, dtype=dtype)
        self.conv = nn.Conv1d(64, 32, 3, dtype=dtype)
        self.gate = nn.Parameter(torch.ones(64, 32, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(self.embed(ids)))))


def build(make: Callable[[], nn.Module], recipe: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if recipe is None:
        return make()
    with quantized_model_init(recipe, **options):
        return make()


def quantized_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)]


def assert_quantized_copy(model: nn.Module, plain: nn.Module, names: list[str], recipe: Any) -> None:
    """`model` is `plain` with the named weights quantized and everything else equal."""
    assert quantized_names(model) == names
    expected = dict(plain.named_parameters())
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, param in model.named_parameters():
        if name in names:
            assert isinstance(param, nn.Parameter)
            assert same_parts(param, quantize(expected[name].detach(), recipe)), name
        else:
            assert same_bytes(param, expected[name]), name


# -- quantized_model_init --------------------------------------------------------------------------------------------


@main_recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_quantized_plain_initialisation(recipe: Any, dtype: torch.dtype) -> None:
    """The same draws: everything after the weights is equal too, and so is the state of the generator."""
    plain = build(lambda: Block(dtype))
    state = torch.get_rng_state()
    model = build(lambda: Block(dtype), recipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert_quantized_copy(model, plain, ["up.weight", "down.weight"], recipe)


def test_disabled_is_as_if_it_were_not_there() -> None:
    assert_quantized_copy(build(Block, MXFP8, enabled=False), build(Block), [], MXFP8)


def test_models_built_afterwards_are_plain() -> None:
    build(Block, MXFP8)
    assert quantized_names(build(Block)) == []


def test_an_exception_inside_leaves_no_hook_behind() -> None:
    with pytest.raises(RuntimeError, match="boom"), quantized_model_init(MXFP8):
        raise RuntimeError("boom")
    assert quantized_names(build(Block)) == []


def test_the_inner_of_two_contexts_leaves_quantized_weights_alone_and_the_outer_sees_the_rest() -> None:
    with quantized_model_init(MXFP8):
        first = nn.Linear(64, 64)
        with quantized_model_init(NVFP4BlockScaling(), enabled=False):
            second = nn.Linear(64, 64)
    assert first.weight.recipe == second.weight.recipe == MXFP8


def test_the_model_is_not_kept_alive() -> None:
    with quantized_model_init(MXFP8):
        model = Block()
        alive = weakref.ref(model.up.weight)
        del model
        gc.collect()
        assert alive() is None


@main_recipes
def test_weights_assigned_to_a_linear_are_quantized(recipe: Any) -> None:
    with quantized_model_init(recipe):
        linear = nn.Linear(96, 64, bias=False)
        linear.weight = nn.Parameter(weight())
    assert same_parts(linear.weight, quantize(weight(), recipe))


@main_recipes
def test_frozen_weights_stay_frozen(recipe: Any) -> None:
    with quantized_model_init(recipe):
        linear = nn.Linear(96, 64, bias=False)
        linear.weight = nn.Parameter(weight(), requires_grad=False)
    assert not linear.weight.requires_grad


@main_recipes
def test_meta_device_to_empty_and_init_give_the_same_weights(recipe: Any) -> None:
    plain = build(Block)
    with torch.device("meta"):
        model = build(Block, recipe)
    assert quantized_names(model) == ["up.weight", "down.weight"]
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert {part.device.type for part in model.up.weight.parts().values()} == {"meta"}
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for child in model.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    with torch.no_grad():
        model.gate.fill_(1.0)
    assert_quantized_copy(model, plain, ["up.weight", "down.weight"], recipe)


@main_recipes
def test_a_dense_checkpoint_loads_into_a_model_made_on_meta(recipe: Any) -> None:
    plain = build(Block)
    with torch.device("meta"):
        model = build(Block, recipe)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert_quantized_copy(model, plain, ["up.weight", "down.weight"], recipe)


@main_recipes
def test_a_built_model_trains_and_copies(recipe: Any) -> None:
    model = build(Block, recipe)
    twin = copy.deepcopy(model)
    model(torch.arange(8)).sum().backward()
    assert model.up.weight.grad.shape == (96, 64)
    assert quantized_names(twin) == quantized_names(model)
    assert twin.up.weight.grad is None


@pytest.mark.parametrize("order", ["embedding first", "linear first"])
@main_recipes
def test_tied_weights_stay_dense_and_tied_in_both_directions(recipe: Any, order: str) -> None:
    with quantized_model_init(recipe):
        embed, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        if order == "embedding first":
            head.weight = embed.weight
        else:
            embed.weight = head.weight
    assert embed.weight is head.weight
    assert not isinstance(head.weight, QuantizedTensor)
    assert isinstance(head.weight, nn.Parameter)


def test_untying_a_linear_keeps_its_preserved_value() -> None:
    plain = build(lambda: nn.Linear(32, 64, bias=False))
    torch.manual_seed(0)
    with quantized_model_init(NVFP4BlockScaling(), preserve_high_precision_init_val=True):
        head = nn.Linear(32, 64, bias=False)
        embed = nn.Embedding(64, 32)
        embed.weight = head.weight
    assert same_bytes(embed.weight, plain.weight)


def test_attention_keeps_the_weight_that_it_reads_past_its_linear() -> None:
    """nn.MultiheadAttention never calls out_proj: it hands the weight to torch's attention, which needs it dense."""
    with quantized_model_init(MXFP8):
        model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    assert quantized_names(model) == ["linear1.weight", "linear2.weight"]
    model(torch.randn(2, 5, 64)).sum().backward()
    assert model.self_attn.out_proj.weight.grad is not None
    plain = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    assert quantize_(plain, MXFP8) == ["linear1.weight", "linear2.weight"]


@pytest.mark.parametrize(("recipe", "multiple"), [(MXFP8, 32), (NVFP4BlockScaling(), 16)])
def test_a_width_that_does_not_fit_the_blocks_is_an_error_and_leaves_no_hook(recipe: Any, multiple: int) -> None:
    with (
        pytest.raises(
            ValueError, match=rf"weight of nn.Linear: shape \(64, 40\) has K=40, which is not a multiple of {multiple}"
        ),
        quantized_model_init(recipe),
    ):
        nn.Linear(40, 64)
    assert type(nn.Linear(40, 64).weight) is nn.Parameter


def test_wrong_arguments_are_refused_before_anything_is_built() -> None:
    with (
        pytest.raises(ValueError, match=r"storage='shards' is not one of"),
        quantized_model_init(MXFP8, storage="shards"),
    ):
        pass
    with pytest.raises(TypeError, match="expected a recipe"), quantized_model_init("mxfp8"):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match=r"weight of nn.Linear is torch.float64"), quantized_model_init(MXFP8):
        nn.Linear(64, 64, dtype=torch.float64)


# -- the preserved value ---------------------------------------------------------------------------------------------


@main_recipes
def test_the_initial_value_is_preserved_in_high_precision(recipe: Any) -> None:
    plain = build(Block)
    model = build(Block, recipe, preserve_high_precision_init_val=True)
    assert_quantized_copy(model, plain, ["up.weight", "down.weight"], recipe)
    assert same_bytes(high_precision_init_val(model.up.weight), plain.up.weight)
    assert high_precision_init_val(model.gate) is None
    assert high_precision_init_val(model.up.weight.detach()) is high_precision_init_val(model.up.weight) or same_bytes(
        high_precision_init_val(model.up.weight.detach()), plain.up.weight
    )
    clear_high_precision_init_val(model.up.weight)
    assert high_precision_init_val(model.up.weight) is None
    assert high_precision_init_val(model.down.weight) is not None
    clear_high_precision_init_val(model.gate)  # nothing to forget


@main_recipes
def test_nothing_is_preserved_unasked(recipe: Any) -> None:
    assert high_precision_init_val(build(Block, recipe).up.weight) is None


@main_recipes
def test_the_preserved_value_follows_writes_slices_and_the_meta_device(recipe: Any) -> None:
    with torch.device("meta"):
        model = build(Block, recipe, preserve_high_precision_init_val=True)
    model.to_empty(device="cpu")
    x = weight(96, 64, dtype=torch.float32)
    with torch.no_grad():
        model.up.weight.copy_(x)
    assert same_bytes(high_precision_init_val(model.up.weight), x)
    assert same_bytes(high_precision_init_val(model.up.weight.detach()[32:64]), x[32:64])
    assert same_bytes(high_precision_init_val(copy.deepcopy(model).up.weight), x)


# -- transformers ----------------------------------------------------------------------------------------------------


def tiny_llama(*, tie: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=32,
        tie_word_embeddings=tie,
    )
    return transformers.LlamaForCausalLM(config)


LLAMA_WEIGHTS = [
    f"model.layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]


@main_recipes
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_llama_of_transformers_is_quantized_unmodified(recipe: Any, tie: bool) -> None:
    plain, model = build(lambda: tiny_llama(tie=tie)), build(lambda: tiny_llama(tie=tie), recipe)
    names = LLAMA_WEIGHTS + ([] if tie else ["lm_head.weight"])
    assert_quantized_copy(model, plain, names, recipe)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    ids = torch.arange(12).view(1, 12)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    assert out.loss.isfinite()
    assert all(type(param.grad) is Tensor for param in model.parameters())


def test_llama_on_meta_takes_a_dense_checkpoint() -> None:
    plain = build(lambda: tiny_llama(tie=True))
    with torch.device("meta"):
        model = build(lambda: tiny_llama(tie=True), MXFP8)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.load_state_dict(plain.state_dict())
    assert_quantized_copy(model, plain, LLAMA_WEIGHTS, MXFP8)


def test_gpt2_keeps_its_own_kind_of_linear_and_its_tied_head() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=32)
    plain, model = (build(lambda: transformers.GPT2LMHeadModel(config), recipe) for recipe in (None, MXFP8))
    assert_quantized_copy(model, plain, [], MXFP8)
    assert model.lm_head.weight is model.transformer.wte.weight


# -- quantize_ -------------------------------------------------------------------------------------------------------


@main_recipes
def test_quantize_replaces_the_weights_of_a_built_model(recipe: Any) -> None:
    plain, model = build(Block), build(Block)
    assert quantize_(model, recipe) == ["up.weight", "down.weight"]
    assert_quantized_copy(model, plain, ["up.weight", "down.weight"], recipe)
    assert quantize_(model, recipe) == []  # again: nothing left to do


def test_quantize_works_on_a_lone_linear_and_on_meta() -> None:
    lone = nn.Linear(64, 64)
    assert quantize_(lone, MXFP8) == ["weight"]
    with torch.device("meta"):
        model = Block()
    assert quantize_(model, MXFP8) == ["up.weight", "down.weight"]
    assert model.up.weight.is_meta


def test_quantize_keeps_frozen_weights_frozen() -> None:
    model = build(Block).requires_grad_(requires_grad=False)
    quantize_(model, MXFP8)
    assert not model.up.weight.requires_grad


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*"], ["lm_head"], LLAMA_WEIGHTS),
        (["lm_head"], [], ["lm_head.weight"]),
        (["model.layers.1.*"], [], LLAMA_WEIGHTS[7:]),
        (["*.mlp.*", "lm_head"], ["*.0.*"], [*LLAMA_WEIGHTS[11:], "lm_head.weight"]),
        (["model.layers.0.self_attn.?_proj"], ["*.o_proj"], LLAMA_WEIGHTS[:3]),
        (["*"], ["*"], []),
    ],
)
def test_quantize_chooses_by_globs_over_module_names(
    include: list[str], exclude: list[str], expected: list[str]
) -> None:
    model = build(lambda: tiny_llama(tie=False))
    assert quantize_(model, MXFP8, include=include, exclude=exclude) == expected
    assert quantized_names(model) == expected


def test_quantize_leaves_tied_weights_alone() -> None:
    model = build(lambda: tiny_llama(tie=True))
    assert quantize_(model, MXFP8) == LLAMA_WEIGHTS
    assert model.lm_head.weight is model.model.embed_tokens.weight
    pair = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    pair[1].weight = pair[0].weight
    assert quantize_(pair, MXFP8) == []
    assert pair[1].weight is pair[0].weight


def test_quantize_refuses_an_include_that_matches_nothing_and_changes_nothing() -> None:
    model = build(Block)
    with pytest.raises(ValueError, match=r"include pattern 'dwon' matches no nn.Linear of the model"):
        quantize_(model, MXFP8, include=["up", "dwon"])
    with pytest.raises(ValueError, match="include pattern 'norm'"):
        quantize_(model, MXFP8, include=["norm"])
    assert quantized_names(model) == []


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dense_entry_that_is_loaded_becomes_an_initial_value_of_its_own(dtype: torch.dtype, assign: bool) -> None:
    with quantized_model_init(MXFP8, preserve_high_precision_init_val=True):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    entry = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    model.load_state_dict({"weight": entry}, assign=assign)
    expected = entry.to(torch.bfloat16, copy=True)
    entry.zero_()
    held = high_precision_init_val(model.weight)
    assert held is not None
    assert same_bytes(held, expected)


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_dense_shards_in_place_of_quantized_ones_are_refused(storage: Any) -> None:
    """A loader that shards a model by itself would leave it dense."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))

        def shards(values: Tensor) -> nn.Parameter:
            return nn.Parameter(DTensor.from_local(values, mesh, [Shard(0)], run_check=False))

        with quantized_model_init(MXFP8, storage=storage):
            model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            held = model.weight = shards(model.weight.detach())
            model.weight = shards(held.to_local().detach())  # quantized ones may come and go
            with pytest.raises(RuntimeError, match=r"a dense DTensor of shape \(128, 64\) replaces a quantized weight"):
                model.weight = shards(torch.zeros(64, 64, dtype=torch.bfloat16))
            model.bias = shards(torch.zeros(64, dtype=torch.bfloat16))
    finally:
        dist.destroy_process_group()


def test_quantize_warns_of_an_exclude_that_matches_nothing() -> None:
    model = build(Block)
    with pytest.warns(UserWarning, match=r"exclude pattern 'lm_head' matches no nn.Linear of the model"):
        assert quantize_(model, MXFP8, exclude=["lm_head"]) == ["up.weight", "down.weight"]


def test_quantize_names_the_weight_that_does_not_fit_and_changes_nothing() -> None:
    model = nn.ModuleDict({"fits": nn.Linear(64, 64), "odd": nn.Linear(40, 64)})
    with pytest.raises(ValueError, match=r"odd.weight: shape \(64, 40\) has K=40, which is not a multiple of 32"):
        quantize_(model, MXFP8)
    assert quantized_names(model) == []
    assert quantize_(model, MXFP8, exclude=["odd"]) == ["fits.weight"]
    wrong = nn.ModuleDict({"fits": nn.Linear(64, 64), "wide": nn.Linear(64, 64, dtype=torch.float64)})
    with pytest.raises(TypeError, match=r"wide\.weight is torch.float64"):
        quantize_(wrong, MXFP8)
    assert quantized_names(wrong) == []


def test_a_string_is_one_pattern_only_by_mistake() -> None:
    with pytest.raises(TypeError, match="include"):
        quantize_(build(Block), MXFP8, include="up")
    with pytest.raises(TypeError, match="exclude"):
        quantize_(build(Block), MXFP8, exclude="up")


@tensor_wide_recipes
def test_tensor_wide_scales_belong_to_each_weight(recipe: Any) -> None:
    model = build(Block)
    with torch.no_grad():
        model.up.weight.mul_(100)
    quantize_(model, recipe)
    scale = tensor_wide(model.up.weight.recipe)
    assert getattr(model.up.weight, scale) > 10 * getattr(model.down.weight, scale)


def test_every_recipe_is_a_value() -> None:
    for recipe in RECIPES.values():
        assert hash(recipe) == hash(copy.copy(recipe))
        assert copy.deepcopy(recipe) == recipe
        assert recipe.from_json(recipe.to_json()) == recipe
    assert len({*RECIPES.values()}) == len(RECIPES)
    assert Float8CurrentScaling() != MXFP8


def test_a_model_can_be_cast_inside_the_context() -> None:
    """Module.to swaps quantized parameters, which torch refuses where something holds a weak reference to one."""
    with torch.device("meta"), quantized_model_init(MXFP8BlockScaling()):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)).to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert isinstance(model[0].weight, QuantizedTensor)


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_what_was_noted_on_a_parameter_stays_noted(storage: str) -> None:
    """Such as a loader's mark that a parameter has its value, without which it would be drawn anew."""
    value = nn.Parameter(torch.randn(32, 32))
    value.has_its_value = True  # type: ignore[attr-defined]
    with quantized_model_init(MXFP8BlockScaling(), storage=storage):
        linear = nn.Linear(32, 32)
        linear.weight = value
    assert type(linear.weight) is not nn.Parameter
    assert linear.weight.has_its_value is True


class _WithMask(nn.Linear):
    """Has a tensor of its own whose name begins with the weight's."""

    def __init__(self) -> None:
        super().__init__(64, 64, bias=False)
        self.register_buffer("weight_mask", torch.ones(64))


@pytest.mark.parametrize("end", ["packed", "scale_inv", "blocks"])
def test_parts_in_the_layout_of_engines_are_not_passed_over(end: str) -> None:
    """strict=False would leave the weight as it was, beside others that are loaded."""
    model = nn.Sequential(nn.Linear(64, 64), _WithMask())
    quantize_(model, MXFP8BlockScaling())
    before = {name: same.clone() for name, same in model.state_dict().items()}
    state = {"0.bias": torch.ones(64), f"0.weight_{end}": torch.zeros(64, 32, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=rf"0\.weight: the state dict has 0\.weight_{end} in its place"):
        model.load_state_dict(state, strict=False)
    assert torch.equal(model[0].bias, before["0.bias"])
    model.load_state_dict({"1.weight_mask": torch.zeros(64)}, strict=False)
    assert not model[1].weight_mask.any()
