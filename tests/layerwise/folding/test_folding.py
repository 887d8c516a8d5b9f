"""Folding of column factors: found by probing where it is exact, refused where it is not, and rounded once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.algorithms.algorithm import Inputs
from layerwise.folding.folds import Fold, fold, tolerance, transform_inputs, verify_outputs
from layerwise.folding.probing import ABSTAIN, NO, YES, Producer, choose, producers_of, propose
from tests.fsdp_hooks.cases import assert_same_bytes
from tests.layerwise.explicit import inputs_of

HIDDEN, WIDE = 32, 48
DTYPES = [torch.float32, torch.bfloat16]
Run = Callable[[], Sequence[Tensor]]


def find_folds(
    groups: Sequence[Sequence[str]], weights: dict[str, Tensor], producers: Sequence[Producer], run: Run
) -> dict[int, Producer]:
    """Index of group -> the producer its factors can be folded into, as one process sees it."""
    return choose(propose(groups, weights, producers, run), producers)


def _filled(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Every parameter random, norms too: a gain of ones would hide what is done to it."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in layer.parameters():
            values = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.3 * values if param.ndim == 1 else values / param.shape[-1] ** 0.5)
    return layer.to(dtype).eval()


def _x(dtype: torch.dtype, tokens: int = 7) -> Tensor:
    return torch.randn(2, tokens, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)


def _runner(layer: nn.Module, x: Tensor, **kwargs: Any) -> Run:
    @torch.no_grad()
    def run() -> Sequence[Tensor]:
        out = layer(x, **kwargs)
        return [out] if isinstance(out, Tensor) else list(out)

    return run


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters())


def _found(layer: nn.Module, groups: Sequence[Sequence[str]], run: Run) -> dict[int, tuple[str, str]]:
    """What is found, after making sure that looking left every weight as it was."""
    before = {name: param.detach().clone() for name, param in layer.named_parameters()}
    found = find_folds(groups, _weights(layer), producers_of(layer), run)
    for name, param in layer.named_parameters():
        assert_same_bytes(param, before[name], name)
    return {index: (producer.name, producer.kind) for index, producer in found.items()}


# -- real layers -------------------------------------------------------------------------------------------------

LLAMA_GROUPS = [
    ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    ["self_attn.o_proj.weight"],
    ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    ["mlp.down_proj.weight"],
]


def _decoder(family: str, kv_heads: int, dtype: torch.dtype) -> tuple[nn.Module, Run]:
    pytest.importorskip("transformers")
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama

    module = {"Llama": modeling_llama, "Gemma": modeling_gemma}[family]
    config = getattr(module, f"{family}Config")(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        num_hidden_layers=1,
        vocab_size=8,
    )
    config._attn_implementation = "eager"
    layer = _filled(getattr(module, f"{family}DecoderLayer")(config, 0), dtype)
    x = _x(dtype)
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    rotary = getattr(module, f"{family}RotaryEmbedding")(config)(x, positions)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1).to(dtype)
    return layer, _runner(layer, x, position_embeddings=rotary, attention_mask=mask[None, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_llama_layer_with_equal_heads_folds_everywhere(dtype: torch.dtype) -> None:
    layer, run = _decoder("Llama", 4, dtype)
    assert _found(layer, LLAMA_GROUPS, run) == {
        0: ("input_layernorm", "norm"),
        1: ("self_attn.v_proj", "linear"),
        2: ("post_attention_layernorm", "norm"),
        3: ("mlp.up_proj", "linear"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_leave_the_output_projection_alone(dtype: torch.dtype) -> None:
    layer, run = _decoder("Llama", 2, dtype)
    assert sorted(_found(layer, LLAMA_GROUPS, run)) == [0, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gemma_layer_folds_into_one_plus_weight(dtype: torch.dtype) -> None:
    layer, run = _decoder("Gemma", 4, dtype)
    assert _found(layer, LLAMA_GROUPS, run) == {
        0: ("input_layernorm", "offset"),
        1: ("self_attn.v_proj", "linear"),
        2: ("post_attention_layernorm", "offset"),
        3: ("mlp.up_proj", "linear"),
    }


def test_a_part_of_the_linears_behind_a_norm_is_not_enough() -> None:
    layer, run = _decoder("Llama", 4, torch.float32)
    assert _found(layer, [LLAMA_GROUPS[0][:2], LLAMA_GROUPS[2][1:]], run) == {}


def _mixtral(tokens: int) -> tuple[nn.Module, Run]:
    pytest.importorskip("transformers")
    from transformers.models.mixtral import modeling_mixtral

    config = modeling_mixtral.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(HIDDEN)
            self.moe = modeling_mixtral.MixtralSparseMoeBlock(config)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.moe(self.norm(x))

    layer = _filled(Block(), torch.float32)
    return layer, _runner(layer, _x(torch.float32, tokens))


def test_the_router_takes_the_norms_output_too() -> None:
    layer, run = _mixtral(7)
    experts, router = "moe.experts.gate_up_proj", "moe.gate.weight"
    assert _found(layer, [[experts]], run) == {}
    assert _found(layer, [[experts, router]], run) == {0: ("norm", "norm")}


class _Routed(nn.Module):
    """norm -> a router that sends every token to one of three experts, each a -> relu -> b."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(HIDDEN, WIDE), "b": nn.Linear(WIDE, HIDDEN)}) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.router(y).softmax(-1)
        best, out = scores.argmax(-1), x.clone()
        for e, expert in enumerate(self.experts):
            to_it = best == e
            values = expert["b"](F.relu(expert["a"](y[to_it])))
            out[to_it] += scores[to_it][:, e : e + 1] * values
        return out


def test_experts_of_their_own_need_all_others_at_work() -> None:
    """An expert that no token reached could take anything; a rank on which all work can tell."""
    layer = _filled(_Routed(), torch.float32)
    groups = [[f"experts.{e}.b.weight"] for e in range(3)]
    groups.append(["router.weight", *(f"experts.{e}.a.weight" for e in range(3))])
    all_work = _runner(layer, _x(torch.float32, 30))
    with torch.no_grad():
        best = layer.router(layer.norm(_x(torch.float32, 30))).argmax(-1)
    assert best.unique().numel() == 3
    assert _found(layer, groups, all_work) == {
        0: ("experts.0.a", "linear"),
        1: ("experts.1.a", "linear"),
        2: ("experts.2.a", "linear"),
        3: ("norm", "norm"),
    }
    layer.router.bias.data[1] = -1e3
    one_rests = propose(groups, _weights(layer), producers_of(layer), all_work)
    assert YES not in one_rests[:3]
    assert (one_rests[:3] == ABSTAIN).any()


# -- small layers ------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """norm -> a -> relu -> b, with what is around it given by `flow`."""

    def __init__(self, flow: str = "", *, bias: bool = True) -> None:
        super().__init__()
        self.flow = flow
        self.norm = nn.LayerNorm(HIDDEN)
        self.a = nn.Linear(HIDDEN, WIDE, bias=bias)
        self.b = nn.Linear(WIDE, HIDDEN, bias=bias)
        self.side = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(x)
        between = self.a(y.roll(8, dims=-1) if self.flow == "permuted" else y)  # as if heads were exchanged
        between = F.gelu(between) if self.flow == "bent" else F.relu(between)
        out = self.b(between) + (y if self.flow == "residual" else x)
        if self.flow == "aside":
            return out, self.side(y)
        if self.flow == "returned":
            return out, between
        if self.flow == "seldom" and bool((y[..., 0] > 1e6).any()):
            return out, self.side(y)
        return (out,)


GROUPS = [["a.weight"], ["b.weight"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("flow", "found"),
    [
        ("", {0: ("norm", "norm"), 1: ("a", "linear")}),
        ("residual", {1: ("a", "linear")}),
        ("permuted", {1: ("a", "linear")}),
        ("aside", {1: ("a", "linear")}),
        ("bent", {0: ("norm", "norm")}),
        ("returned", {0: ("norm", "norm")}),
    ],
)
def test_only_what_nobody_else_sees_is_folded_into(
    flow: str, found: dict[int, tuple[str, str]], dtype: torch.dtype
) -> None:
    layer = _filled(_Block(flow), dtype)
    if flow in ("", "bent", "returned", "permuted", "residual"):
        del layer.side
    assert _found(layer, GROUPS, _runner(layer, _x(dtype))) == found


def test_what_the_batches_do_not_reach_is_no_evidence() -> None:
    """`side` takes the norm's output on other inputs than these; nothing shows that here."""
    layer = _filled(_Block("seldom"), torch.float32)
    answers = propose(GROUPS, _weights(layer), producers_of(layer), _runner(layer, _x(torch.float32)))
    names = [(p.name, p.kind) for p in producers_of(layer)]
    assert answers[0, names.index(("norm", "norm"))] == ABSTAIN
    assert answers[1, names.index(("a", "linear"))] == YES
    # A group that shows nothing itself proves nothing either.
    dead = propose([["side.weight"]], _weights(layer), producers_of(layer), _runner(layer, _x(torch.float32)))
    assert set(dead[0].tolist()) == {NO, ABSTAIN}


def test_a_rank_without_data_abstains_and_one_no_is_enough() -> None:
    layer = _filled(_Block(), torch.float32)
    del layer.side
    producers = producers_of(layer)
    here = propose(GROUPS, _weights(layer), producers, _runner(layer, _x(torch.float32)))
    nothing = propose(GROUPS, _weights(layer), producers, list)
    assert choose(nothing, producers) == {}
    assert torch.equal(torch.minimum(here, nothing), here)
    against = torch.where(here == YES, NO, here)
    assert choose(torch.minimum(here, against), producers) == {}
    assert {i: p.name for i, p in choose(torch.minimum(here, nothing), producers).items()} == {0: "norm", 1: "a"}


def test_a_producer_is_used_once_and_norms_come_first() -> None:
    norm, linear = Producer("n", "norm", torch.ones(4)), Producer("l", "linear", torch.ones(4, 4))
    offset = Producer("n", "offset", norm.weight)
    answers = torch.tensor([[YES, YES, YES], [YES, YES, YES], [YES, NO, NO]])
    assert choose(answers, [norm, offset, linear]) == {0: norm, 1: linear}


def test_a_layer_that_never_runs_the_same_way_twice_is_left_alone() -> None:
    layer = _filled(_Block(), torch.float32)
    noise = torch.Generator().manual_seed(1)
    run = _runner(layer, _x(torch.float32))
    answers = propose(
        GROUPS, _weights(layer), producers_of(layer), lambda: [run()[0] + torch.randn((), generator=noise)]
    )
    assert set(answers.flatten().tolist()) == {NO}


@pytest.mark.parametrize("failing", range(2, 7))
def test_weights_are_put_back_when_the_layer_fails(failing: int) -> None:
    layer = _filled(_Block(), torch.bfloat16)
    before = {name: param.detach().clone() for name, param in layer.named_parameters()}
    run, calls = _runner(layer, _x(torch.bfloat16)), 0

    def failing_run() -> Sequence[Tensor]:
        nonlocal calls
        calls += 1
        if calls == failing:
            changed = [n for n, p in layer.named_parameters() if not torch.equal(p, before[n])]
            assert changed or failing == 2, "nothing to put back"
            raise ArithmeticError("in the layer")
        return run()

    with pytest.raises(ArithmeticError, match="in the layer"):
        find_folds(GROUPS, _weights(layer), producers_of(layer), failing_run)
    for name, param in layer.named_parameters():
        assert_same_bytes(param, before[name], name)


def test_weights_whose_scaling_is_not_exact_are_not_candidates() -> None:
    from qtensor import NVFP4BlockScaling, quantize

    layer = _filled(_Block(bias=False), torch.bfloat16)
    layer.a.weight = nn.Parameter(quantize(layer.a.weight.detach(), NVFP4BlockScaling()), requires_grad=False)
    assert "a" not in [p.name for p in producers_of(layer)]
    assert propose([["a.weight"]], _weights(layer), producers_of(layer), list).eq(NO).all()


def test_a_group_of_different_widths_is_an_error() -> None:
    layer = _Block()
    with pytest.raises(ValueError, match=re.escape("found {'a.weight': 32, 'b.weight': 48}")):
        propose([["a.weight", "b.weight"]], _weights(layer), producers_of(layer), list)


# -- folding -----------------------------------------------------------------------------------------------------


def _factors(channels: int, seed: int = 11) -> Tensor:
    return torch.exp(torch.randn(channels, generator=torch.Generator().manual_seed(seed)))


def _folds(layer: nn.Module, groups: Sequence[Sequence[str]], run: Run) -> list[Fold]:
    weights = _weights(layer)
    return [
        Fold(producer, tuple(weights[name] for name in groups[index]), _factors(producer.channels, index))
        for index, producer in find_folds(groups, weights, producers_of(layer), run).items()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_folding_a_whole_layer_changes_its_output_by_rounding_only(family: str, dtype: torch.dtype) -> None:
    layer, run = _decoder(family, 4, dtype)
    folds = _folds(layer, LLAMA_GROUPS, run)
    assert len(folds) == 4
    before, allowed = run(), tolerance(dtype, len(folds), WIDE)
    fold(folds)
    moved = verify_outputs(before, run(), allowed, "layer 0")
    assert 0 < moved < allowed / 2, "rounding uses less than half of what is allowed"
    layer.mlp.up_proj.weight.data[:8] *= 2  # a fold that is wrong in a sixth of its channels
    with pytest.raises(RuntimeError, match=re.escape("layer 0: folding changed its outputs by")):
        verify_outputs(before, run(), allowed, "layer 0")


def test_folded_layers_have_the_statistics_that_were_derived() -> None:
    layer, run = _decoder("Llama", 4, torch.float32)
    seen: list[Tensor] = []
    for group in LLAMA_GROUPS:
        layer.get_submodule(group[0].removesuffix(".weight")).register_forward_pre_hook(
            lambda _, args: seen.append(args[0].detach().flatten(0, -2))
        )
    folds = _folds(layer, LLAMA_GROUPS, run)
    seen.clear()
    run()
    before, factors = [inputs_of(x) for x in seen], fold(folds)
    seen.clear()
    run()
    for old, s, x in zip(before, factors, seen, strict=True):
        got, want = transform_inputs(old, s), inputs_of(x)
        for name in ("amax", "column_amax", "column_mean", "local_hessian", "hessian"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_producer_and_target_is_rounded_once() -> None:
    layer = _filled(_Block(), torch.bfloat16)
    old = {name: param.detach().double() for name, param in layer.named_parameters()}
    of_norm, of_a = _factors(HIDDEN), _factors(WIDE)
    norm = Producer("norm", "norm", layer.norm.weight, layer.norm.bias)
    a = Producer("a", "linear", layer.a.weight, layer.a.bias)
    # By two names for one weight, as they come from two places.
    used, same = fold([Fold(norm, (layer.a.weight.detach(),), of_norm), Fold(a, (layer.b.weight,), of_a)])
    torch.testing.assert_close(used, of_norm, rtol=2**-8, atol=0)
    assert torch.equal(same, of_a)
    exact = {
        "norm.weight": old["norm.weight"] / of_norm,
        "norm.bias": old["norm.bias"] / used,
        "a.weight": old["a.weight"] * used / of_a[:, None],
        "a.bias": old["a.bias"] / of_a,
        "b.weight": old["b.weight"] * of_a,
        "b.bias": old["b.bias"],
    }
    for name, value in exact.items():
        param = layer.get_parameter(name).detach()
        assert param.dtype == torch.bfloat16
        assert ((param.double() - value).abs() <= value.abs() * 2**-8 * (1 + 1e-4)).all(), name  # half a bf16 step
    # What rounding the gain lost or won, the columns have back.
    torch.testing.assert_close(layer.norm.weight.double() * used, old["norm.weight"], rtol=1e-6, atol=0)


def test_experts_are_scaled_one_and_all() -> None:
    stacked, norm = torch.randn(3, 5, 8), torch.ones(8)
    old, s = stacked.clone(), _factors(8)
    fold([Fold(Producer("n", "norm", norm), (stacked,), s)])
    assert torch.equal(norm, 1 / s)
    torch.testing.assert_close(stacked, old * s)


def test_the_factors_of_an_offset_are_those_its_rounded_gain_leaves() -> None:
    """A gain of 1/1000 is weight -0.999, which bf16 cannot hold: dividing by 1000 must not double or drop it."""
    weight = torch.tensor([0.0, 0.5, -0.75, 0.0, -1.0], dtype=torch.bfloat16)
    columns = torch.ones(2, 5)
    gain = 1 + weight.float()
    (applied,) = fold([Fold(Producer("n", "offset", weight), (columns,), torch.tensor([3.0, 0.3, 100.0, 1e4, 2.0]))])
    torch.testing.assert_close((1 + weight.float()) * columns[0], gain)
    assert torch.equal(columns[0], applied)
    assert applied[3] == 1, "a gain that rounds to nothing stays as it is"
    assert applied[4] == 1, "a gain of zero stays zero"
    assert abs(applied[0] - 3) < 0.02


@pytest.mark.parametrize("bad", [torch.ones(3), torch.tensor([1, 0, 1, 1.0]), torch.tensor([1, torch.inf, 1, 1])])
def test_factors_that_can_not_be_divided_by_are_refused(bad: Tensor) -> None:
    weight, columns = torch.ones(4), torch.ones(2, 4)
    with pytest.raises(ValueError, match=re.escape("factors for n: found (")):
        fold([Fold(Producer("n", "norm", weight), (columns,), bad)])
    assert torch.equal(columns, torch.ones(2, 4))


def test_leaving_the_range_of_the_dtype_is_refused_before_anything_is_written() -> None:
    weight, columns = torch.ones(4, dtype=torch.float16), torch.full((2, 4), 100.0, dtype=torch.float16)
    with pytest.raises(OverflowError, match=r"folding factors into n takes values out of the range of torch.float16"):
        fold([Fold(Producer("n", "norm", weight), (columns,), torch.full((4,), 1e3))])
    assert torch.equal(weight, torch.ones_like(weight))
    assert torch.equal(columns, torch.full_like(columns, 100.0))


def test_the_statistics_of_a_divided_input() -> None:
    x, s = torch.randn(50, 40, dtype=torch.float64), _factors(40).double()
    got, want = transform_inputs(inputs_of(x, torch.float64), s), inputs_of(x / s, torch.float64)
    for name in ("amax", "column_amax", "column_mean", "local_hessian", "hessian"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    assert got.tokens == 50
    with pytest.raises(ValueError, match="ask for COLUMNS"):
        transform_inputs(Inputs(tokens=1, amax=torch.ones(())), s)


def test_verify_ignores_what_is_no_number_on_both_sides() -> None:
    before = [torch.tensor([1.0, float("-inf"), float("nan")]), torch.tensor([3])]
    assert verify_outputs(before, [before[0].clone(), torch.tensor([4])], 0.0, "layer") == 0
    assert verify_outputs([], [], 0.0, "layer") == 0
    with pytest.raises(RuntimeError, match="changed its outputs by nan"):
        verify_outputs([torch.ones(2)], [torch.tensor([1.0, float("nan")])], 1.0, "layer")
    with pytest.raises(RuntimeError, match="changed its outputs by inf"):
        verify_outputs([torch.zeros(2)], [torch.ones(2)], 1.0, "layer")
