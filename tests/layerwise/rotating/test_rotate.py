"""`rotate_` on models: the same function, the weights of dense products, or refused with nothing changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from layerwise import rotate_
from qtensor import MXFP8BlockScaling, quantize_
from tests.devices import every_device
from tests.layerwise.rotating.decoders import (
    BLOCK,
    HEAD,
    HEADS,
    HIDDEN,
    VOCAB,
    Attention,
    Decoder,
    Layer,
    Offset,
    decoder,
    digest,
    expected,
    filled,
    ids,
    rms_norm,
)
from tests.ranks import run_ranks

# Sums of up to 128 terms, 40 of them one after the other, in float64: far above 2**-53, far below a wrong product.
EXACT = 1e-12


def _difference(model: nn.Module, other: nn.Module) -> float:
    with torch.no_grad():
        before, after = model(ids()).double(), other(ids()).double()
    return float((before - after).norm() / before.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("where", [("stream",), ("values",), ("stream", "values")])
@pytest.mark.parametrize("seed", [None, 0])
def test_the_function_stays_and_the_weights_change(bias: bool, where: tuple[str, ...], seed: int | None) -> None:
    model = decoder(bias=bias)
    dense = copy.deepcopy(model)
    report = rotate_(model, ids(), where=where, block=BLOCK, seed=seed)
    assert _difference(dense, model) < EXACT
    assert report.difference < EXACT
    was, now = digest(dense), digest(model)
    assert {name for name in was if was[name] != now[name]} == {*report.changed}
    layer = ["self_attn.v_proj.weight", "self_attn.o_proj.weight"]
    if "stream" in where:
        layer += [f"self_attn.{name}_proj.weight" for name in "qk"] + [
            f"mlp.{name}_proj.weight" for name in ("gate", "up")
        ]
        layer += ["mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"]
        layer += ["self_attn.o_proj.bias", "mlp.down_proj.bias"] if bias else []
    if "values" in where:
        layer += ["self_attn.v_proj.bias"] if bias else []
    outside = {"embed_tokens.weight", "norm.weight", "lm_head.weight"} if "stream" in where else set()
    assert {*report.changed} == {f"layers.{index}.{name}" for index in range(2) for name in layer} | outside


@pytest.mark.parametrize(("block", "seed"), [(BLOCK, 5), (4, None)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_weights_are_the_products_of_dense_matrices(block: int, seed: int | None, bias: bool, offset: bool) -> None:
    model = decoder(bias=bias, norm=Offset if offset else rms_norm)
    wanted = expected(model, block, seed, offset=offset)
    rotate_(model, ids(), block=block, seed=seed)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            value, wanted[name], rtol=0, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes_are_rounded_at_the_end(dtype: torch.dtype) -> None:
    model = decoder(dtype)
    dense, wanted = copy.deepcopy(model), expected(model, BLOCK, 0)
    report = rotate_(model, ids(), block=BLOCK)
    assert _difference(dense, model) <= report.allowed
    for name, value in model.state_dict().items():
        assert value.dtype == dtype
        exact = wanted[name]
        # Half a unit in the last place, which is fixed below the smallest normal number.
        unit = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
        assert bool(((value.double() - exact).abs() <= 0.501 * unit + 1e-13).all()), name


def test_the_same_bytes_every_time_and_others_for_another_seed() -> None:
    first, second, third = decoder(torch.bfloat16), decoder(torch.bfloat16), decoder(torch.bfloat16)
    rotate_(first, ids(), block=BLOCK)
    rotate_(second, (ids()[:1],), block=BLOCK)
    rotate_(third, ids(), block=BLOCK, seed=1)
    assert digest(first) == digest(second)
    assert digest(first) != digest(third)


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bytes_on_every_device(device: str, dtype: torch.dtype) -> None:
    model, there = decoder(dtype, bias=True), decoder(dtype, bias=True).to(device)
    rotate_(model, ids(), block=BLOCK)
    rotate_(there, ids().to(device), block=BLOCK)
    assert there.lm_head.weight.device.type == device
    assert digest(there.cpu()) == digest(model)


def test_modules_that_train_do_so_again() -> None:
    model = decoder()
    model.layers[0].eval()
    rotate_(model, ids(), block=BLOCK)
    assert model.training
    assert not model.layers[0].mlp.training
    assert model.layers[1].mlp.training
    assert all(param.requires_grad for param in model.parameters())


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        attention_bias=True,
    )
    model = filled(transformers.LlamaForCausalLM(config), torch.float32)
    dense = copy.deepcopy(model)
    report = rotate_(model, {"input_ids": ids()})  # 96 = 3 blocks of 32; its cache is not looked into
    with torch.no_grad():
        before, after = (each(ids(), use_cache=False).logits for each in (dense, model))
    assert float((before - after).norm() / before.norm()) <= report.allowed < 1e-4
    assert bool((model.model.norm.weight == 1).all())
    weight, turned = (each.model.layers[1].mlp.down_proj.weight.detach().double() for each in (dense, model))
    torch.testing.assert_close(turned.norm(), weight.norm(), rtol=1e-6, atol=0)  # fp32, as weights are rounded
    assert float((turned - weight).norm() / weight.norm()) > 1


# -- ties --------------------------------------------------------------------------------------------------------------


def tied(*, uniform: bool) -> Any:
    model = decoder()
    model.lm_head.weight = model.embed_tokens.weight
    if uniform:
        nn.init.constant_(model.norm.weight, 0.7)
    return model


def test_a_tied_projection_behind_a_gain_is_refused_or_untied() -> None:
    model = tied(uniform=False)
    dense, was = copy.deepcopy(model), digest(model)
    message = (
        r"^rotate_: lm_head\.weight is tied to embed_tokens\.weight, and the gain of norm would have to go into one of "
        r'them alone; take tied="untie", which makes them two parameters$'
    )
    with pytest.raises(NotImplementedError, match=message):
        rotate_(model, ids(), block=BLOCK)
    assert digest(model) == was
    rotate_(model, ids(), block=BLOCK, tied="untie")
    assert model.lm_head.weight is not model.embed_tokens.weight
    assert _difference(dense, model) < EXACT


def test_a_tie_holds_behind_one_gain_for_all_channels() -> None:
    model = tied(uniform=True)
    dense = copy.deepcopy(model)
    report = rotate_(model, ids(), block=BLOCK)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert _difference(dense, model) < EXACT
    assert bool((model.norm.weight == 0.7).all())
    assert "norm.weight" not in report.changed


def test_an_untied_model_of_transformers_is_stored_so(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    model = filled(transformers.LlamaForCausalLM(config), torch.float32)
    rotate_(model, ids(), block=16, tied="untie")
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert digest(again) == digest(model)


def test_a_failed_run_ties_again() -> None:
    model = tied(uniform=False)
    model.config = type("Config", (), {"tie_word_embeddings": True})()
    with pytest.raises(ValueError, match="does not reach"):
        rotate_(model, ids()[:, :0], block=BLOCK, tied="untie")
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.config.tie_word_embeddings is True


def test_a_layer_that_is_called_twice_is_rotated_once() -> None:
    model = decoder()
    model.layers[1] = model.layers[0]
    dense = copy.deepcopy(model)
    rotate_(model, ids(), block=BLOCK)
    assert model.layers[1] is model.layers[0]
    assert _difference(dense, model) < EXACT


def test_modules_can_be_named() -> None:
    model, usual = decoder(), decoder()
    reads, writes = ["*.[qkv]_proj", "*.gate_proj", "*.up_proj", "lm_head"], ["embed_tokens", "*.o_proj", "*.down_proj"]
    rotate_(model, ids(), block=8, where=["stream"], reads=reads, writes=writes)
    rotate_(usual, ids(), block=8, where=["stream"])
    assert digest(model) == digest(usual)


# -- what is refused, with nothing changed -----------------------------------------------------------------------------


def refused(model: nn.Module, error: type[Exception], message: str, batch: Any = None, **options: Any) -> None:
    was = digest(model)
    with pytest.raises(error, match=f"^{re.escape('rotate_: ' + message)}"):
        rotate_(model, ids() if batch is None else batch, **({"block": BLOCK} | options))
    assert digest(model) == was


OPTIONS: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "no power": (ValueError, {"block": 24}, "block=24 is not a power of two from 2 on"),
    "one": (ValueError, {"block": 1}, "block=1 is not a power of two from 2 on"),
    "where": (ValueError, {"where": ("keys",)}, "where=('keys',); expected one or both of 'stream', 'values'"),
    "nowhere": (ValueError, {"where": ()}, "where=(); expected one or both of 'stream', 'values'"),
    "a string": (TypeError, {"where": "stream"}, "where is a list of patterns, got 'stream'; write ['stream']"),
    "reads": (TypeError, {"reads": "*.q_proj"}, "reads is a list of patterns, got '*.q_proj'; write ['*.q_proj']"),
    "seed": (ValueError, {"seed": 0.5}, "seed=0.5 is neither an integer nor None"),
    "head_dim": (ValueError, {"head_dim": 0}, "head_dim=0 is not a positive integer"),
    "tied": (ValueError, {"tied": "keep"}, "tied='keep' is neither 'refuse' nor 'untie'"),
    "no match": (ValueError, {"writes": ["*.wo"]}, "the pattern '*.wo' of writes= matches no module"),
    "stream": (ValueError, {"block": 32}, "block=32 does not divide the 48 channels of the residual stream"),
    "head": (
        ValueError,
        {"block": 64, "where": ("values",)},
        (
            "block=64 does not divide the 32 channels of a head of layers.0.self_attn.v_proj; take a smaller block, or "
            'where=("stream",)'
        ),
    ),
    "heads": (
        ValueError,
        {"head_dim": 40},
        "heads of 40 channels do not divide the 64 of layers.0.self_attn.v_proj and the 128 of layers.0.self_attn.o_p",
    ),
    "widths": (
        ValueError,
        {"reads": ["*.q_proj", "*.o_proj"]},
        (
            "the residual stream has 48 channels in layers.0.self_attn.q_proj and 128 in layers.0.self_attn.o_proj; "
            "expected the same everywhere"
        ),
    ),
    "no linear": (
        TypeError,
        {"reads": ["*.q_proj", "norm"]},
        "norm is a RMSNorm; only nn.Linear, as it is, can be rotated",
    ),
    "rest": (
        NotImplementedError,
        {"reads": ["*.[qkv]_proj", "lm_head"]},
        (
            "layers.0.post_attention_layernorm.weight [48], layers.0.mlp.gate_proj.weight [80, 48], "
            "layers.0.mlp.up_proj.weight [80, 48], layers.1.post_attention_layernorm.weight [48], "
            "layers.1.mlp.gate_proj.weight [80, 48] and 1 more may belong to the residual stream of 48 channels, and is"
        ),
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_do_not_fit_are_refused(case: str) -> None:
    error, options, message = OPTIONS[case]
    refused(decoder(), error, message, **options)


class Around(Decoder):
    """A decoder whose layers' outputs go through a function."""

    function: Callable[[Tensor], Tensor]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = self.function(layer(x))
        return self.lm_head(self.norm(x))


def around(function: Callable[[Tensor], Tensor]) -> Any:
    model = filled(Around(norm=rms_norm, bias=False))
    model.function = function
    return model


STREAM = (
    "other signs in all that makes and reads the residual stream, as planned, changed the model's outputs: something "
    "else takes part in it, or mixes its channels (LayerNorm subtracts means); name what reads"
)


@pytest.mark.parametrize(
    "function", [lambda x: x.roll(1, -1), lambda x: x - x.mean(-1, keepdim=True), torch.relu, lambda x: x + 0.01]
)
def test_a_stream_that_something_else_sees_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    refused(around(function), NotImplementedError, STREAM)
    rotate_(around(function), ids(), block=BLOCK, where=("values",))


def test_what_signs_do_not_show_is_found_in_the_outputs() -> None:
    model = around(torch.tanh)
    was = digest(model)
    message = (
        r"^rotate_: the model's outputs changed by 0\.\d+ \(relative RMS\), more than the [\d.e-]+ of rounding, so the "
        r"rotation is not exact in this model; everything was put back$"
    )
    with pytest.raises(RuntimeError, match=message):
        rotate_(model, ids(), block=BLOCK)
    assert digest(model) == was


class Gated(Attention):
    """A factor for each channel of the values' sums, as gates of attentions have: it commutes with signs alone."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        factors = 1 + 0.03 * torch.randn(HEADS * HEAD, generator=torch.Generator().manual_seed(1))
        self.o_proj.register_forward_pre_hook(lambda module, args: args[0] * factors.to(args[0].dtype))


def test_a_small_error_is_told_from_rounding_in_a_deep_model_of_few_bits() -> None:
    """A bound of all roundings would allow 0.15 here; the same rounding without a rotation makes about 0.016."""
    model = Decoder(norm=rms_norm, bias=False)
    model.layers = nn.ModuleList(Layer(rms_norm, bias=False) for _ in range(16))
    dense = filled(model, torch.bfloat16)
    report = rotate_(copy.deepcopy(dense), ids(), block=BLOCK, where=("values",))
    assert report.difference <= report.allowed < 0.1
    for layer in model.layers:
        layer.self_attn = Gated()
    was = digest(filled(model, torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"^rotate_: the model's outputs changed by 0\.1\d* \(relative RMS\), more"):
        rotate_(model, ids(), block=BLOCK, where=("values",))
    assert digest(model) == was


def test_outputs_that_do_not_repeat_are_refused() -> None:
    noise = torch.Generator().manual_seed(0)
    model = around(lambda x: x * (1 + torch.rand((), generator=noise, dtype=x.dtype)))
    refused(model, NotImplementedError, "the model's outputs on the same batch differ from run to run")


class Peeking(Layer):
    """Something beside the linears takes the output of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed) * torch.sigmoid(normed[..., :1])
        return x + self.mlp(self.post_attention_layernorm(x))


class Copying(Layer):
    """A copy of a norm's output, in which that is not known again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x).clone())


@pytest.mark.parametrize("norm", [rms_norm, Offset])
def test_a_norm_that_something_else_takes_the_output_of_is_refused(norm: Any) -> None:
    model = decoder(norm=norm)
    model.layers[1] = Peeking(norm, bias=False)
    message = (
        "other signs in the gains of norms (layers.0.input_layernorm, layers.0.post_attention_layernorm, "
        "layers.1.input_layernorm, ...) and in the columns of the linears behind them changed the model's outputs"
    )
    refused(filled(model), NotImplementedError, message)


def test_a_norm_whose_output_is_copied_is_refused() -> None:
    model = decoder()
    model.layers[1] = Copying(rms_norm, bias=False)
    message = "layers.1.post_attention_layernorm.weight [48] may belong to the residual stream of 48 channels, and is"
    refused(filled(model), NotImplementedError, message)


class PostNorm(Layer):
    """Norms behind attention, too, whose output goes into the stream."""

    def __init__(self) -> None:
        super().__init__(rms_norm, bias=False)
        self.behind = rms_norm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.behind(self.self_attn(self.input_layernorm(x)))
        return x + self.mlp(self.post_attention_layernorm(x))


def test_parameters_that_may_belong_to_the_stream_are_refused() -> None:
    model = decoder()
    model.layers[1] = PostNorm()
    message = "layers.1.behind.weight [48] may belong to the residual stream of 48 channels, and is neither among the"
    refused(filled(model), NotImplementedError, message)
    model = decoder()
    model.layers[0].experts = nn.ParameterList([nn.Parameter(torch.ones(3, 8, HIDDEN))])
    message = "layers.0.experts.0 [3, 8, 48] may belong to the residual stream of 48 channels, and is neither among the"
    refused(model, NotImplementedError, message)


class Twofold(nn.Module):
    """Multiplies by the square of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,)) * self.weight**2


class Centered(Twofold):
    """A LayerNorm of another name."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,)) * self.weight


NORMS: dict[str, tuple[Any, str]] = {
    "LayerNorm": (
        lambda: nn.LayerNorm(HIDDEN, bias=False),
        (
            "layers.0.input_layernorm is a LayerNorm, which subtracts a mean or adds a bias and so does not commute "
            'with a rotation; take where=("values",)'
        ),
    ),
    "another": (
        Twofold,
        "layers.0.input_layernorm (a Twofold) multiplies its channels neither by its weight nor by 1 +",
    ),
    "centered": (
        Centered,
        "layers.0.input_layernorm (a Centered) does not commute with rotations: its output is off by",
    ),
}


@pytest.mark.parametrize("case", NORMS)
def test_norms_that_do_not_commute_are_refused(case: str) -> None:
    norm, message = NORMS[case]
    refused(decoder(norm=norm), NotImplementedError, message)
    rotate_(decoder(norm=norm), ids(), block=BLOCK, where=("values",))


def test_a_norm_with_a_bias_is_refused() -> None:
    model = decoder()
    model.norm.bias = nn.Parameter(torch.zeros(HIDDEN))
    refused(model, NotImplementedError, "norm is a RMSNorm, which subtracts a mean or adds a bias")


class Bent(Attention):
    """Its values are bent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.v_proj.register_forward_hook(lambda module, args, output: torch.relu(output))


def test_values_that_are_bent_are_refused() -> None:
    model = decoder()
    model.layers[1].self_attn = Bent(bias=False)
    message = STREAM.replace("the residual stream", "the values of attentions")
    refused(filled(model), NotImplementedError, message, where=("values",))
    rotate_(model, ids(), block=BLOCK, where=("stream",))


def test_a_model_without_attentions_or_usual_names_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16).double())
    batch = torch.ones(1, 16, dtype=torch.float64)
    message = "no attention has v_proj beside o_proj, so its values cannot be rotated"
    refused(model, ValueError, message, batch, where=("values",))
    refused(model, ValueError, "no module has one of the usual names of what reads the residual stream", batch)


def test_a_module_that_the_batch_does_not_reach_is_refused() -> None:
    model = decoder()
    model.layers[0].spare = nn.ModuleDict({"up_proj": nn.Linear(HIDDEN, 8)}).double()
    message = "the batch does not reach layers.0.spare.up_proj, so nothing can be shown of it; give more tokens"
    refused(model, ValueError, message)
    refused(decoder(), ValueError, "the batch does not reach embed_tokens, so", batch=ids()[:, :0])


def test_a_linear_behind_two_norms_is_refused() -> None:
    model = decoder()
    model.layers[1].self_attn = model.layers[0].self_attn
    message = (
        "layers.0.self_attn.q_proj takes the outputs of several modules (layers.0.input_layernorm, "
        "layers.1.input_layernorm), so no gain can be moved into it"
    )
    refused(model, NotImplementedError, message)


def test_weights_that_are_tied_across_the_plan_are_refused() -> None:
    model = decoder()
    model.layers[0].mlp.gate_proj.weight = model.layers[1].mlp.gate_proj.weight
    message = (
        "layers.1.mlp.gate_proj.weight is tied to layers.0.mlp.gate_proj.weight, and both would have to be changed in "
        "different ways"
    )
    refused(model, NotImplementedError, message)
    model = decoder()
    model.extra = nn.Linear(HIDDEN, VOCAB, bias=False)
    model.extra.weight = model.lm_head.weight
    refused(
        model, NotImplementedError, "extra.weight is tied to lm_head.weight, and is not rotated with it; name 'extra'"
    )


def test_weights_that_are_not_dense_are_refused() -> None:
    model = decoder(torch.bfloat16)
    quantize_(model, MXFP8BlockScaling(), include=["*.o_proj"])
    with pytest.raises(
        TypeError, match=r"^rotate_: layers\.0\.self_attn\.o_proj\.weight is a MXFP8Tensor; rotate the dense "
    ):
        rotate_(model, ids(), block=BLOCK)
    with pytest.raises(
        ValueError, match=r"^rotate_: embed_tokens\.weight is on the meta device; load the weights first$"
    ):
        rotate_(decoder().to("meta"), ids(), block=BLOCK)
    model = decoder()
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, HIDDEN, dtype=torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"^rotate_: lm_head\.weight has dtype torch\.float8_e4m3fn; expected one of "):
        rotate_(model, ids(), block=BLOCK)
    model = decoder()
    nn.utils.parametrizations.weight_norm(model.layers[0].mlp.up_proj)
    with pytest.raises(TypeError, match=r"^rotate_: the weight of layers\.0\.mlp\.up_proj is no parameter of"):
        rotate_(model, ids(), block=BLOCK)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.self_attn.o_proj.bias", "norm.weight"])
def test_values_that_are_not_finite_are_refused(name: str, value: float) -> None:
    """A rotation would spread them over their blocks, and where no token meets them no output tells."""
    model = decoder(torch.float16, bias=True)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    message = f"{name} holds values that are not finite (NaN or infinities), which a rotation would spread"
    refused(model, ValueError, message, ids() % (VOCAB - 1))


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        model = decoder()
    message = (
        "embed_tokens.weight was made under torch.inference_mode(), so it cannot be written; make the model outside"
    )
    refused(model, TypeError, message)


def test_a_buffer_of_the_streams_width_is_refused() -> None:
    """A scale for each channel of the stream commutes with signs, and not with a rotation."""
    model = around(lambda x: x * model.scale)
    model.register_buffer("scale", 1 + 1e-9 * torch.arange(HIDDEN, dtype=torch.float64))
    refused(model, NotImplementedError, "scale [48] may belong to the residual stream of 48 channels, and is neither")
    rotate_(model, ids(), block=BLOCK, where=("values",))


def sharded() -> str:
    model = decoder()
    weight = distribute_tensor(model.lm_head.weight.detach(), init_device_mesh("cpu", (1,)))
    model.lm_head.weight = nn.Parameter(weight)
    with pytest.raises(TypeError) as refusal:
        rotate_(model, ids(), block=BLOCK)
    return str(refusal.value)


def test_a_sharded_model_is_refused() -> None:
    (message,) = run_ranks(1, sharded)
    assert message == "rotate_: lm_head.weight is sharded (a DTensor); rotate the model before fully_shard"


def test_all_is_put_back_where_a_value_leaves_its_range() -> None:
    model = decoder(torch.float16)
    with torch.no_grad():
        model.lm_head.weight.fill_(5e4)  # the last to be written
        model.norm.weight.mul_(1e-3)
        model.norm.weight[:8] = 1.0
    was = digest(model)
    with pytest.raises(OverflowError, match=r"^rotated values leave the range of torch\.float16"):
        rotate_(model, ids(), block=BLOCK, seed=None)
    assert digest(model) == was


def test_all_is_put_back_where_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every run in turn: while it is traced, under changed signs, and after the weights were written."""
    for last in range(10):
        model, runs = decoder(norm=Offset), 0
        was = digest(model)

        def fail(*_: Any, last: int = last) -> None:
            nonlocal runs
            runs += 1
            if runs > last:
                raise KeyboardInterrupt

        model.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            rotate_(model, ids(), block=BLOCK)
        assert digest(model) == was, f"after {last} runs"
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.layers.modules())
    assert runs == 10


@pytest.mark.parametrize("last", [0, 3, 30])
def test_an_interrupt_right_behind_a_change_of_signs_leaves_nothing(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Signs are undone by changing them again, which needs to know of the change: copies do not."""
    model, multiply, calls = decoder(norm=Offset), Tensor.mul_, 0
    was = digest(model)

    def interrupted(tensor: Tensor, other: Tensor) -> Tensor:
        nonlocal calls
        multiply(tensor, other)
        calls += 1
        if calls == last + 1:
            raise KeyboardInterrupt
        return tensor

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "mul_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rotate_(model, ids(), block=BLOCK)
    assert digest(model) == was


class Silent(nn.Module):
    """Returns no numbers, or numbers that have nothing to do with its weights."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.output = decoder(), output

    def forward(self, ids: Tensor) -> Any:
        return self.output(self.inner(ids))


def test_outputs_that_tell_nothing_are_refused() -> None:
    message = "the model returned no floating-point tensor for this batch, so nothing can be compared"
    refused(Silent(lambda logits: logits.argmax(-1)), ValueError, message)
    message = "other signs of the residual stream do not show in the model's outputs on this batch; give another"
    refused(Silent(torch.zeros_like), ValueError, message)
