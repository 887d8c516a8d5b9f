"""`expert_inputs="all"`: for statistics every expert sees every token of its block; what layers return is as ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from layerwise import GPTAQ, GPTQ, Event, search_formats
from layerwise.algorithms.algorithm import HESSIAN, Inputs
from layerwise.algorithms.maximum import Max
from qtensor import NVFP4BlockScaling
from tests.layerwise.models import (
    DIM,
    Expert,
    Experts,
    Layer,
    Toy,
    assert_same,
    batches,
    expert_lists,
    filled,
    fingerprints,
    layers_of,
    outcome,
    qwen3_moe,
    run,
    shard,
    toy,
)
from tests.layerwise.small_runs import Stop, stopping
from tests.layerwise.test_experts import DATA, STARVED
from tests.ranks import run_ranks_each
from tests.sampling import halves

NVFP4 = NVFP4BlockScaling()
SEEN: dict[str, Inputs] = {}


@dataclass(frozen=True, kw_only=True)
class Recording(Max):
    """Max, which keeps what it is told of inputs."""

    needs_hessian: ClassVar[frozenset[str]] = frozenset({HESSIAN})

    @property
    def needs(self) -> frozenset[str]:
        return self.needs_hessian

    def decide(self, group: Any, recipe: Any) -> Any:
        if group.inputs is not None:
            SEEN.update({linear.name: group.inputs for linear in group.linears})
        return super().decide(group, recipe)


def recorded(model: nn.Module, data: Any, **options: Any) -> dict[str, Inputs]:
    """Name of a linear -> the statistics of its input."""
    SEEN.clear()
    run(model, data, NVFP4, Recording(), **options)
    return dict(SEEN)


# -- against statistics made by hand -----------------------------------------------------------------------------------


@torch.no_grad()
def tokens_of_blocks(model: nn.Module, data: list[Tensor]) -> list[list[Tensor]]:
    """For each layer what its block is called with, a [T, DIM] for each batch."""
    found: list[list[Tensor]] = [[] for _ in layers_of(model)]
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].reshape(-1, DIM)))
        for layer, own in zip(layers_of(model), found, strict=True)
    ]
    for ids in data:
        model(ids)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def by_hand(model: nn.Module, data: list[Tensor]) -> dict[str, list[Tensor]]:
    """Name of each linear of an expert -> its inputs, batch by batch, when the expert is called with all tokens."""
    found: dict[str, list[Tensor]] = {}
    for (name, block), tokens in zip(
        [(n, m) for n, m in model.named_modules() if n.endswith(".mlp")], tokens_of_blocks(model, data), strict=True
    ):
        if isinstance(block, Experts):
            for number, expert in enumerate(block.experts):
                inner = [torch.relu(expert.up_proj(x)) for x in tokens]
                found[f"{name}.experts.{number}.up_proj.weight"] = tokens
                found[f"{name}.experts.{number}.down_proj.weight"] = inner
            continue
        for number, weight in enumerate(block.experts.gate_up_proj):
            halves = [F.linear(x, weight).chunk(2, dim=-1) for x in tokens]
            found[f"{name}.experts.gate_up_proj[{number}]"] = tokens
            found[f"{name}.experts.down_proj[{number}]"] = [F.silu(gate) * up for gate, up in halves]
    return found


BUILDS: dict[str, tuple[Callable[[], Any], Callable[[], list[Tensor]]]] = {
    "list": (expert_lists, lambda: DATA),
    "eager": (lambda: qwen3_moe("eager"), batches),
    "grouped_mm": (lambda: qwen3_moe("grouped_mm"), batches),
}


@pytest.mark.parametrize("name", BUILDS)
def test_statistics_are_those_of_all_tokens(name: str) -> None:
    if name != "list":
        pytest.importorskip("transformers")
    build, data = BUILDS[name][0], BUILDS[name][1]()
    expected, found = by_hand(build(), data), recorded(build(), data, expert_inputs="all")
    assert expected.keys() == {linear for linear in found if ".experts." in linear}
    for linear, inputs in expected.items():
        rows = torch.cat(inputs).double()
        assert found[linear].tokens == len(rows), linear
        # Products of fp32 are off by one rounding for each of their terms, at most 8 columns' worth of 2^-24 each here.
        tolerance = 2.0**-21
        torch.testing.assert_close(found[linear].amax.double(), rows.abs().amax(), rtol=tolerance, atol=0.0)
        hessian = found[linear].hessian
        assert hessian is not None
        want = 2 / len(rows) * rows.T @ rows
        off = float((hessian.double() - want).norm() / want.norm())
        assert off < len(rows) * 2.0**-24, (linear, off)


@pytest.mark.parametrize("name", BUILDS)
def test_what_layers_return_stays_the_routed_output_bit_for_bit(name: str) -> None:
    if name != "list":
        pytest.importorskip("transformers")
    build, data = BUILDS[name][0], BUILDS[name][1]()

    def returned(**options: Any) -> tuple[list[Tensor], dict[str, Inputs]]:
        model, outputs = build(), []
        for layer in layers_of(model):
            layer.register_forward_hook(lambda *args: outputs.append(args[2].clone()))
        return outputs, recorded(model, data, **options)

    (routed, others), (found, own) = returned(), returned(expert_inputs="all")
    assert len(routed) == len(found) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, routed, strict=True))
    beside = [linear for linear in own if ".experts." not in linear]
    assert beside
    for linear in beside:  # attention, routers, the head
        assert torch.equal(own[linear].hessian, others[linear].hessian), linear
    within = [linear for linear in others if ".experts." in linear]
    assert all(own[linear].tokens > others[linear].tokens for linear in within)


def test_no_expert_is_starved_and_scales_of_inputs_cover_all_tokens() -> None:
    model = expert_lists()
    expected = by_hand(expert_lists(), DATA)
    result = run(model, DATA, NVFP4, Max(), inputs="static", expert_inputs="all")
    assert not result.starved
    assert list(run(expert_lists(), DATA, NVFP4, Max(), inputs="static").starved) == STARVED
    amaxes = {record.name: record.input_amax for record in result.report.records}
    for linear, inputs in expected.items():
        assert amaxes[linear] == float(torch.cat(inputs).abs().amax()), linear


def test_gptaq_has_a_partner_for_every_token() -> None:
    """A router sends tokens elsewhere when weights are quantized; with all tokens nothing depends on it."""
    pytest.importorskip("transformers")
    routed = run(qwen3_moe(), batches(), NVFP4, GPTAQ()).report.records
    every = run(qwen3_moe(), batches(), NVFP4, GPTAQ(), expert_inputs="all").report.records
    assert any(one.warning for one in routed if ".experts." in one.name)
    assert not any(one.warning for one in every)


def test_hessians_one_at_a_time_come_to_the_same_bytes() -> None:
    found = []
    for hessians in ("shared", "one_at_a_time"):
        model = expert_lists(layers=1)
        found.append(outcome(model, run(model, DATA, NVFP4, GPTQ(hessians=hessians), expert_inputs="all")))
    assert_same(found[1], found[0], "one at a time")


# -- ranks, and resuming -----------------------------------------------------------------------------------------------

CASES: list[tuple[str, Any]] = [("list", GPTQ()), ("list", GPTAQ()), ("eager", GPTAQ()), ("grouped_mm", Max())]


def _options(algorithm: Any) -> dict[str, Any]:
    return {"inputs": "static", "expert_inputs": "all"} if isinstance(algorithm, Max) else {"expert_inputs": "all"}


def _on_ranks(case: tuple[str, Any]) -> dict[str, dict[str, str]]:
    name, algorithm = case
    model: Any = BUILDS[name][0]()
    for layer in layers_of(model) if name == "list" else ():
        for expert in layer.mlp.experts:
            fully_shard(expert)
    data = BUILDS[name][1]()[dist.get_rank() :: 2]
    return outcome(model, run(shard(model), data, NVFP4, algorithm, **_options(algorithm)))


@halves("cases", CASES, CASES[1:3])
def test_two_ranks_come_to_the_bytes_of_one(cases: tuple[tuple[str, Any], ...]) -> None:
    pytest.importorskip("transformers")
    expected = []
    for name, algorithm in cases:
        model = BUILDS[name][0]()
        expected.append(outcome(model, run(model, BUILDS[name][1](), NVFP4, algorithm, **_options(algorithm))))
    for rank, outcomes in enumerate(run_ranks_each(2, cases, _on_ranks)):
        for case, found, one in zip(cases, outcomes, expected, strict=True):
            assert_same(found, one, f"{case} on rank {rank}")


def test_a_resumed_run_has_the_same_option_and_bytes(tmp_path: Path) -> None:
    model = expert_lists()
    expected = outcome(model, run(model, DATA, NVFP4, GPTQ(), expert_inputs="all"))
    options: dict[str, Any] = {"checkpoint_dir": tmp_path}
    with pytest.raises(Stop):
        run(expert_lists(), DATA, NVFP4, GPTQ(), expert_inputs="all", on_event=stopping("checkpoint", 0), **options)
    with pytest.raises(ValueError, match=r'other options: expert_inputs was "all", now there is none'):
        run(expert_lists(), DATA, NVFP4, GPTQ(), **options)
    again = expert_lists()
    result = run(again, DATA, NVFP4, GPTQ(), expert_inputs="all", **options)
    assert result.report.resumed
    assert_same(outcome(again, result), expected, "resumed")


def test_routed_is_the_default_also_for_checkpoints_of_before(tmp_path: Path) -> None:
    first = run(expert_lists(), DATA, NVFP4, GPTQ(), checkpoint_dir=tmp_path)
    model = expert_lists()
    again = run(model, DATA, NVFP4, GPTQ(), checkpoint_dir=tmp_path, expert_inputs="routed")
    assert again.report.resumed
    assert fingerprints(again.state_dict()) == fingerprints(first.state_dict())
    texts = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert texts
    assert not any("expert_inputs" in text for text in texts)


def test_formats_are_searched_for_on_all_tokens() -> None:
    def tokens(**options: Any) -> dict[str, int]:
        found: dict[str, int] = {}

        def note(event: Event) -> None:
            found.update({one.name: one.tokens for one in event.data.get("errors", ())})

        search_formats(
            expert_lists(),
            DATA,
            recipes=[NVFP4, None],
            bits_per_weight=10.0,
            progress=False,
            on_event=note,
            **options,
        )
        return found

    routed, every = tokens(), tokens(expert_inputs="all")
    assert {routed[name] for name in STARVED} == {0}
    assert {every[name] for name in STARVED} == {sum(ids.numel() for ids in DATA)}


# -- refusals ----------------------------------------------------------------------------------------------------------


class Normed(Experts):
    """Its experts get something else than its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x))


class Half(Expert):
    """Looks at some of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[: (len(x) + 1) // 2]).repeat(2, 1)[: len(x)]


class Writing(Expert):
    """Writes into its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Weighted(Expert):
    """Takes a weight for each token."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x * weights)


class Scaled(Expert):
    """May take a scale."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale)


class Bypassed(nn.Module):
    """Its experts are used by a method that is called past the module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Experts(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class StackedExperts(nn.Module):
    """Experts in two parameters; `kind` says what is unusual about them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up_proj, self.down_proj = nn.Parameter(torch.zeros(4, 32, DIM)), nn.Parameter(torch.zeros(4, DIM, 32))

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out, weights = torch.zeros_like(x), weights.expand_as(numbers)
        for expert in range(4):
            token, place = torch.where(numbers == expert)
            rows, factors = x[token], weights[token, place, None]
            if self.kind == "weighted":
                rows, factors = rows * factors, torch.ones_like(factors)
            if self.kind == "padded" and 0 < len(rows) < len(x):
                rows = F.pad(rows, (0, 0, 0, 1))
            if self.kind == "dense":  # one product for all experts
                made = torch.relu(torch.matmul(rows, self.up_proj.mT))[expert]
            else:
                made = torch.relu(F.linear(rows, self.up_proj[expert]))
            out.index_add_(0, token, F.linear(made, self.down_proj[expert])[: len(token)] * factors)
        return out


class WeightsTokens(StackedExperts):
    """Weights its tokens before a product; `kind` says where."""

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if self.kind == "sums":
            weights = weights / weights.sum(dim=-1, keepdim=True)
        for expert in range(4):
            token, place = torch.where(numbers == expert)
            rows, factors = x[token], weights[token, place, None]
            if self.kind == "normed":
                rows = F.normalize(rows) * factors
            if self.kind == "cast":
                rows = (rows * factors).to(self.up_proj.dtype)
            made = torch.relu(F.linear(rows, self.up_proj[expert]))
            if self.kind in ("between", "sums"):
                made = made * factors
            out.index_add_(0, token, F.linear(made, self.down_proj[expert]).to(out))
        return out


class Fixed(StackedExperts):
    """Of parameters with different numbers of experts."""

    def __init__(self) -> None:
        super().__init__("")
        self.gate_proj = nn.Parameter(torch.zeros(3, 32, DIM))


class Past(Experts):
    """Uses its experts past their call; `way` says how."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], expert: Callable[[], nn.Module] = Expert) -> None:
        super().__init__(4)
        self.way, self.experts = way, nn.ModuleList(expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        chosen = (flat @ self.directions.to(flat).T).argmax(dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if bool(mine.any()):
                out[mine] = self.way(expert, flat[mine])
        return out.reshape(x.shape)


class Whole(Experts):
    """Calls all its experts with tokens [B, T, K]."""

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(x @ self.directions.T, dim=-1)
        return torch.stack([shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]).sum(dim=0)


class Reshaping(StackedExperts):
    """Takes tokens of any shape."""

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, DIM), numbers, weights).reshape(x.shape)


class WholeStacked(nn.Module):
    """Calls stacked experts with tokens [B, T, K]."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Reshaping("")

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.zeros(len(x.reshape(-1, DIM)), 2, dtype=torch.int64)
        return self.experts(x, numbers, torch.ones(numbers.shape))


class TwoLists(nn.Module):
    """The linears of an expert are in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.experts_up = nn.ModuleList(nn.Linear(DIM, 32, bias=False) for _ in range(4))
        self.experts_down = nn.ModuleList(nn.Linear(32, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.reshape(-1, DIM), []
        for rows, up, down in zip(flat.chunk(4), self.experts_up, self.experts_down, strict=False):
            out.append(down(torch.relu(up(rows))))
        return torch.cat(out).reshape(x.shape)


class Alone(StackedExperts):
    """Takes tokens alone."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))


class Router(nn.Module):
    """Sends each token to two experts."""

    def __init__(self, experts: nn.Module, *, numbers_of_all: bool = False) -> None:
        super().__init__()
        self.experts, self.numbers_of_all = experts, numbers_of_all
        self.register_buffer("directions", torch.eye(DIM)[:4])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        weights, numbers = torch.softmax(flat @ self.directions.T, dim=-1).topk(2, dim=-1)
        if self.numbers_of_all:
            weights = weights[:, :1]
        made = self.experts(flat) if isinstance(self.experts, Alone) else self.experts(flat, numbers, weights)
        return made.reshape(x.shape)


def with_experts(expert: Callable[[], nn.Module]) -> Experts:
    block = Experts(4)
    block.experts = nn.ModuleList(expert() for _ in range(4))
    return block


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "normed": (lambda: Normed(4), r"mlp\.experts\.0 got rows that are none of the tokens .* \(normed, weighted"),
    "half": (lambda: with_experts(Half), r"of 10 tokens that were sent to expert 0, 5 came to .*0\.up_proj\.weight;"),
    "writing": (lambda: with_experts(Writing), r"mlp\.experts: expert 0 writes into the tokens that it is called with"),
    "bypassed": (Bypassed, r"inner\.experts: .*experts\.0 is used while the module around the experts is not called"),
    "weighted": (
        lambda: Router(StackedExperts("weighted")),
        r"mlp\.experts: it weights its tokens before a product",
    ),
    **{
        f"weighted {kind}": (
            lambda kind=kind: Router(WeightsTokens(kind)),  # type: ignore[misc]
            r"mlp\.experts: it weights its tokens before a product",
        )
        for kind in ("between", "sums", "normed", "cast")
    },
    "padded": (
        lambda: Router(StackedExperts("padded")),
        r"up_proj\[\d\] got rows that are none of the tokens that the block is called with",
    ),
    "forward": (
        lambda: Past(lambda expert, x: expert.forward(F.normalize(x))),
        r"experts\.\d\.up_proj\.weight is used past the call of its expert layers\.0\.mlp\.experts\.\d",
    ),
    "parts": (
        lambda: Past(lambda expert, x: expert.down_proj(expert(x) @ expert.up_proj.weight.T)),
        r"experts\.\d\.(up|down)_proj\.weight is used past the call of its expert layers\.0\.mlp\.experts\.\d",
    ),
    "whole": (lambda: Whole(4), r"experts\.0 is called with torch\.float32 \[2, 5, 64\]; expected rows \[T, K\]"),
    "whole, stacked": (WholeStacked, r"it is called with x=torch\.float32 \[2, 5, 64\], .*; expected experts\(tokens"),
    "two values": (
        lambda: Past(lambda expert, x: expert(x, 0.5), Scaled),
        r"mlp\.experts\.\d is called with something else than one tensor",
    ),
    "two lists": (
        TwoLists,
        r"experts_down: the module around the experts is called without tokens \[\.\., K\] of a K that .* \(32\)",
    ),
    "dense": (
        lambda: Router(StackedExperts("dense")),
        r"all tokens were sent to expert 0, and .*up_proj\[0\] got some",
    ),
    "called otherwise": (
        lambda: Router(StackedExperts(""), numbers_of_all=True),
        r"mlp\.experts: it is called with x=torch\.float32 \[10, 64\], .* weights=torch\.float32 \[10, 1\]; expected",
    ),
}
PLANNED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "arguments": (lambda: with_experts(Weighted), r"mlp\.experts\.0 takes x, weights; expected an expert that takes"),
    "tokens alone": (lambda: Router(Alone("")), r"mlp\.experts takes x; expected experts\(tokens \[T, K\], numbers of"),
    "numbers": (lambda: Router(Fixed()), r"mlp\.experts has parameters of \[3, 4\] experts; expected"),
}


def model_of(block: Callable[[], nn.Module]) -> Any:
    return filled(Toy([Layer(block())]), torch.float32)


@pytest.mark.parametrize("name", [*REFUSED, *PLANNED])
def test_what_cannot_be_sent_all_tokens_is_refused_by_name(name: str, tmp_path: Path) -> None:
    block, text = {**REFUSED, **PLANNED}[name]
    model = model_of(block)
    before = fingerprints(model.state_dict())
    whole = rf'calibrate: expert_inputs="all": layers\.0\..*{text}.*use expert_inputs="routed", or exclude them'
    path = tmp_path / "run"
    data = [] if name in PLANNED else DATA  # refused before data are looked at
    with pytest.raises(NotImplementedError, match=whole):
        run(model, data, NVFP4, Max(), expert_inputs="all", checkpoint_dir=path)
    assert fingerprints(model.state_dict()) == before
    assert not list(path.rglob("*.distcp"))
    for module in model.modules():  # nothing is left behind
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    if name != "arguments":  # whose experts are called with too few
        run(model, DATA, NVFP4, Max())


def test_stacked_experts_of_ones_own_are_taken() -> None:
    found = recorded(model_of(lambda: Router(StackedExperts(""))), DATA, expert_inputs="all")
    tokens = sum(ids.numel() for ids in DATA)
    assert {found[f"layers.0.mlp.experts.{name}_proj[{e}]"].tokens for name in ("up", "down") for e in range(4)} == {
        tokens
    }


class Peak(Expert):
    """Keeps the largest value that it saw, in a buffer, and rounds at random."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.peak.copy_(torch.maximum(self.peak, x.abs().amax()))
        self.calls = self.calls + 1
        return super().forward((x + torch.rand_like(x)) / self.peak)


def test_buffers_and_random_numbers_stay_those_of_the_routed_run() -> None:
    def states(expert_inputs: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = model_of(lambda: with_experts(Peak))
        found: list[Tensor] = []
        model.layers[0].register_forward_hook(lambda *args: found.append(args[2].clone()))
        run(model, DATA, NVFP4, Max(), expert_inputs=expert_inputs, layers=())
        return [*found, *model.buffers()]

    routed, every = states("routed"), states("all")
    assert len(every) == len(routed) > 8
    assert all(torch.equal(one, other) for one, other in zip(every, routed, strict=True))


class Inference(Experts):
    """Runs in inference mode."""

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


def test_blocks_in_inference_mode_are_taken_and_their_writes_seen() -> None:
    def block(expert: Callable[[], nn.Module]) -> Experts:
        made = Inference(4)
        made.experts = nn.ModuleList(expert() for _ in range(4))
        return made

    class InferenceLayer(Layer):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    assert not run(model_of(lambda: block(Expert)), DATA, NVFP4, Max(), expert_inputs="all").starved
    for expert in (Expert, Writing):
        model = filled(Toy([InferenceLayer(block(expert))]), torch.float32)
        if expert is Expert:
            assert not run(model, DATA, NVFP4, Max(), expert_inputs="all").starved
            continue
        with pytest.raises(NotImplementedError, match="writes into the tokens"):
            run(model, DATA, NVFP4, Max(), expert_inputs="all")


class Cut(nn.Module):
    """Multiplies with the two halves of a fused gate and up, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down_proj = nn.Linear(DIM, 64, bias=False), nn.Linear(32, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up.weight.chunk(2)
        x = x * 2
        return self.down_proj(F.silu(F.linear(x, gate)) * F.linear(x, up))


def test_keywords_and_cut_weights_are_taken() -> None:
    blocks: list[Callable[[], nn.Module]] = [
        lambda: Past(lambda expert, x: expert(x=x)),
        lambda: with_experts(Cut),
    ]
    tokens = sum(ids.numel() for ids in DATA)
    for block in blocks:
        found = recorded(model_of(block), DATA, expert_inputs="all")
        assert {inputs.tokens for name, inputs in found.items() if ".experts." in name} == {tokens}


def test_casts_by_hooks_of_experts_are_theirs() -> None:
    """As those of FSDP's mixed precision: what the block gives them is looked at, and not what hooks make of it."""
    model = model_of(lambda: Past(lambda expert, x: expert(x).float()))
    for expert in model.layers[0].mlp.experts:
        expert.bfloat16().register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    found = recorded(model, DATA, expert_inputs="all")
    tokens = sum(ids.numel() for ids in DATA)
    assert {inputs.tokens for name, inputs in found.items() if ".experts." in name} == {tokens}


def test_products_that_cannot_be_seen_are_refused_with_what_helps() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(NotImplementedError, match=r"no product of .* was seen .* model\.set_experts_implementation"):
        run(qwen3_moe("batched_mm"), batches(), NVFP4, Max(), expert_inputs="all")


def test_what_an_expert_raises_says_where_it_came_from() -> None:
    class Failing(Expert):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 10:  # the whole first batch
                raise ValueError("ten are too many")
            return super().forward(x)

    with pytest.raises(ValueError, match="ten are too many") as error:
        run(model_of(lambda: with_experts(Failing)), DATA[1:2] + DATA[:1], NVFP4, Max(), expert_inputs="all")
    assert error.value.__notes__[0] == (
        'while all tokens were sent to expert 0 of layers.0.mlp.experts, for expert_inputs="all"'
    )


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_inputs='every' is not one of 'routed', 'all'"):
        run(expert_lists(), DATA, NVFP4, Max(), expert_inputs="every")
    with pytest.raises(ValueError, match=r'expert_inputs="all": the model has no experts to quantize; expected a list'):
        run(toy(), batches(), NVFP4, Max(), expert_inputs="all")
    with pytest.raises(ValueError, match=r'expert_inputs="all" sends the tokens of all batches .* no rank has a batch'):
        run(expert_lists(), [], NVFP4, Max(), expert_inputs="all")
    layers = ["layers.*.mlp.experts"]
    text = r"the experts of layers\.0\.mlp\.experts are in another layer than the module that is called with"
    with pytest.raises(ValueError, match=text):
        run(expert_lists(), DATA, NVFP4, Max(), expert_inputs="all", layers=layers)
    with pytest.raises(ValueError, match="no experts to quantize"):
        run(expert_lists(), DATA, NVFP4, Max(), expert_inputs="all", exclude=["*.experts.*"])
