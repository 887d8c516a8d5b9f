"""Pairs of inputs: the same tokens in the quantized and in the unquantized model, or none."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.algorithms.algorithm import CROSS, HESSIAN, Inputs
from layerwise.statistics import accumulated
from layerwise.statistics.collector import Collector
from layerwise.statistics.lineage import Lineage
from tests.ranks import run_ranks

NEEDS = frozenset({HESSIAN, CROSS})
K, N, EXPERTS = 24, 16, 3
Pair = tuple[Tensor, Tensor]  # inputs of the quantized and of the unquantized model
Run = Callable[[Tensor], object]


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _pair(tokens: int, seed: int, scale: float = 1.0) -> Pair:
    x = _randn(tokens, K, seed=seed) * scale
    return x, x + 0.1 * scale * _randn(tokens, K, seed=seed + 1000)


def _collected(
    targets: dict[str, Tensor],
    pairs: Sequence[Pair],
    run: Run,
    group: dist.ProcessGroup | None = None,
    only: Sequence[str] | None = None,
) -> dict[tuple[str, ...], Inputs | None]:
    collector = Collector(targets, NEEDS, only=only)
    partners = collector.partners()
    assert partners is not None
    with torch.no_grad():
        for x, y in pairs:
            with partners.batch():
                run(y.clone())
            with collector.batch(partners):
                run(x.clone())
    statistics = collector.agree(group)
    return {facts.names: statistics.total(index, 0) for index, facts in enumerate(statistics.facts)}


def _assert_cross(inputs: Inputs | None, pairs: Sequence[Pair], tokens: int, unpaired: int = 0) -> None:
    """Of the pairs, over all tokens; fp32 products of some hundred terms err by less than 2^-18 of the largest."""
    assert inputs is not None
    assert (inputs.tokens, inputs.unpaired) == (tokens, unpaired)
    expected = sum(((y.double() - x.double()).T @ x.double() for x, y in pairs), start=torch.zeros(K, K).double())
    expected *= 2 / tokens
    assert inputs.cross is not None
    np.testing.assert_allclose(inputs.cross, expected, rtol=0, atol=float(expected.abs().max()) * 2**-18)


class _Attention(nn.Module):
    """q and k share an input; the input of o is made by both."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Parameter(_randn(K, K, seed=seed) / K**0.5) for seed in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.q) * torch.sigmoid(F.linear(x, self.k)), self.o)


def _targets(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.data for name, param in module.named_parameters()}


@pytest.mark.parametrize("tokens", [3, 200], ids=["rows wait", "multiplied at once"])
def test_products_of_the_difference_with_the_input(tokens: int) -> None:
    pairs = [_pair(tokens, seed) for seed in range(4)]
    net = _Attention()
    run = lambda x: F.linear(F.linear(x, targets["q"]) * torch.sigmoid(F.linear(x, targets["k"])), targets["o"])  # noqa: E731
    targets = _targets(net)
    found = _collected(targets, pairs, run)
    assert set(found) == {("q", "k"), ("o",)}
    _assert_cross(found["q", "k"], pairs, 4 * tokens)
    inner = [
        tuple(F.linear(s, targets["q"]) * torch.sigmoid(F.linear(s, targets["k"])) for s in pair) for pair in pairs
    ]
    _assert_cross(found["o",], inner, 4 * tokens)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulated, "SAFE", 0.0)  # no rows wait
        at_once = _collected(targets, pairs, run)
    for names, inputs in found.items():
        assert inputs is not None
        assert inputs.cross is not None
        other = at_once[names]
        assert other is not None
        assert other.cross is not None
        assert torch.equal(inputs.cross, other.cross)
    (single,) = (one for names, one in _collected(targets, pairs, run, only=["o"]).items() if names == ("o",))
    _assert_cross(single, inner, 4 * tokens)  # type: ignore[arg-type]
    assert _collected(targets, pairs, run, only=["o"])["q", "k"].cross is None  # type: ignore[union-attr]


# Sizes and magnitudes of batches differ, so that a sum in another order would have other last bits.
UNEVEN = [
    _pair(tokens, seed, scale) for seed, (tokens, scale) in enumerate([(7, 1), (90, 3), (2, 1e-3), (40, 50), (5, 1)])
]


def _dealt(kind: str) -> Tensor | None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    deal = {"interleaved": UNEVEN[rank::ranks], "all on the last": UNEVEN[::-1] if rank == ranks - 1 else []}[kind]
    w = _randn(N, K)
    inputs = _collected({"w": w}, deal, lambda x: F.linear(x, w), dist.group.WORLD)["w",]
    return None if inputs is None else inputs.cross


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bits_for_every_partition_of_the_batches(ranks: int) -> None:
    w = _randn(N, K)
    alone = _collected({"w": w}, UNEVEN, lambda x: F.linear(x, w))["w",]
    assert alone is not None
    assert alone.cross is not None
    for kind in ("interleaved", "all on the last"):
        found = run_ranks(ranks, _dealt, kind)[0]
        assert found is not None
        assert torch.equal(found.view(torch.int32), alone.cross.view(torch.int32)), kind


# -- routing -----------------------------------------------------------------------------------------------------------


class _Routed:
    """Two of three experts a token, in one of the ways that models have; a shared expert gets all tokens."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.router = _randn(EXPERTS, K, seed=1)
        self.shared = _randn(K, K, seed=2)
        self.experts = _randn(EXPERTS, N, K, seed=3)

    def targets(self) -> dict[str, Tensor]:
        if self.kind == "list":
            self.apart = [one.clone() for one in self.experts]
            return {"shared": self.shared, **{f"experts.{number}": one for number, one in enumerate(self.apart)}}
        return {"shared": self.shared, "experts": self.experts}

    def chosen(self, x: Tensor) -> Tensor:
        return (x @ self.router.T).topk(2, dim=-1).indices  # [tokens, 2]

    def __call__(self, x: Tensor) -> None:
        F.linear(x, self.shared)
        chosen = self.chosen(x)
        if self.kind == "list":
            for number, weight in enumerate(self.apart):
                # as Mixtral does: tokens by their first choice, then by their second
                _, tokens = torch.where((chosen == number).T)
                F.linear(x[tokens], weight)
        elif self.kind == "sorted":
            order = chosen.flatten().argsort(stable=True)
            rows = x.repeat_interleave(2, dim=0)[order]
            ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).tolist()
            for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                F.linear(rows[start:end], self.experts[number])
        elif self.kind == "buffer":
            rows = torch.zeros(EXPERTS, len(x), K)
            for number in range(EXPERTS):
                tokens = (chosen == number).any(dim=-1).nonzero()[:, 0]
                rows[number, : len(tokens)].copy_(x[tokens])
            torch.bmm(rows, self.experts.mT)
        else:
            mask = F.one_hot(chosen, EXPERTS).sum(dim=1).float()  # [tokens, experts]
            slots = (mask.cumsum(dim=0) - 1).long().clamp(min=0)
            dispatch = F.one_hot(slots, len(x)).float() * mask.unsqueeze(-1)  # [tokens, experts, slots]
            torch.bmm(torch.einsum("tes,tk->esk", dispatch, x), self.experts.mT)


KINDS = ["list", "sorted", "buffer", "one-hot products"]


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_pairs_where_all_selections_are_the_same(kind: str) -> None:
    routed = _Routed(kind)
    x = _randn(6, K, seed=7)
    y = x + 1e-4 * _randn(6, K, seed=8)
    assert torch.equal(routed.chosen(x), routed.chosen(y))
    found = _collected(routed.targets(), [(x, y)], routed)
    for names, inputs in found.items():
        assert inputs is not None, names
        assert inputs.unpaired == 0, names
        assert inputs.cross is not None, names
        assert inputs.cross.any(), names


@pytest.mark.parametrize("kind", KINDS)
def test_other_tokens_of_an_expert_are_no_pairs_even_if_they_are_as_many(kind: str) -> None:
    """Two tokens change places in what the router says, so each expert gets as many rows in both models."""
    routed = _Routed(kind)
    x = _randn(6, K, seed=7)
    experts = [set(one.tolist()) for one in routed.chosen(x)]
    token = next(token for token in range(1, 6) if experts[token] != experts[0])
    y = x.clone()
    y[[0, token]] = y[[token, 0]]
    counts = [torch.bincount(routed.chosen(one).flatten(), minlength=EXPERTS).tolist() for one in (x, y)]
    assert counts[0] == counts[1]
    found = _collected(routed.targets(), [(x, y)], routed)
    _assert_cross(found["shared",], [(x, y)], 6)
    for number in experts[0] ^ experts[token]:
        name = f"experts.{number}" if kind == "list" else f"experts[{number}]"
        (inputs,) = (one for names, one in found.items() if name in names)
        assert inputs is not None
        assert inputs.cross is not None
        assert inputs.unpaired == inputs.tokens > 0, name
        assert not inputs.cross.any(), "these tokens count as GPTQ counts them"


def test_batches_without_pairs_count_beside_those_with_them() -> None:
    routed = _Routed("list")
    targets = routed.targets()
    x = _randn(6, K, seed=7)
    near, far = (x, x + 1e-4 * _randn(6, K, seed=8)), (x, -x)
    tokens = [(routed.chosen(x) == 0).any(dim=-1), (routed.chosen(-x) == 0).any(dim=-1)]
    assert not torch.equal(tokens[0], tokens[1])
    count = int(tokens[0].sum())
    assert count
    inputs = _collected(targets, [near, far], routed)["experts.0",]
    rows = torch.where((routed.chosen(x) == 0).T)[1]
    _assert_cross(inputs, [(near[0][rows], near[1][rows])], 2 * count, unpaired=count)


def test_a_linear_that_is_called_twice_has_the_pairs_of_both_calls() -> None:
    w, (x, y) = _randn(K, K) / K**0.5, _pair(9, 0)

    def run(one: Tensor) -> None:
        F.linear(torch.tanh(F.linear(one, w)), w)

    second = (torch.tanh(x @ w.T), torch.tanh(y @ w.T))
    _assert_cross(_collected({"w": w}, [(x, y)], run)["w",], [(x, y), second], 18)


def test_inputs_are_those_of_their_time() -> None:
    """A layer may write into its hidden states once it has used them."""
    w, (x, y) = _randn(N, K), _pair(5, 0)

    def run(one: Tensor) -> None:
        F.linear(one, w)
        one.fill_(1.0)

    _assert_cross(_collected({"w": w}, [(x, y)], run)["w",], [(x, y)], 5)


def test_a_partner_that_is_not_finite_raises() -> None:
    w, (x, y) = _randn(N, K), _pair(5, 0)
    y[2, 3] = torch.inf
    with pytest.raises(RuntimeError, match=r"^w: "):
        _collected({"w": w}, [(x, y)], lambda one: F.linear(one, w))


# -- lineage -----------------------------------------------------------------------------------------------------------

x0 = _randn(4, K)


def _into_a_view(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.view(-1, K)[:2].copy_(x[x.sum(dim=1).argsort()[:2]])
    return out


def _set_items(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[x.sum(dim=1).argsort()] = x
    return out


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: torch.tanh(x) * 2.0 + 1,
    "a number from values": lambda x: x / float(x.abs().max()),
    "a fixed selection": lambda x: x[torch.tensor([1, 0])],
    "slices": lambda x: x[1:, : K // 2].reshape(-1),
}
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted": lambda x: x.sort(dim=0).values,
    "the largest": lambda x: x[x.sum(dim=1).argmax()],
    "a mask": lambda x: x[x[:, 0] > 0],
    "a slice from values": lambda x: x[int(x.sum(dim=1).argmax()) :],
    "gathered": lambda x: x.gather(0, x.argsort(dim=0)),
    "written in place": lambda x: x.clone().copy_(x[x.sum(dim=1).argsort()]),
    "written into a view": _into_a_view,
    "an item that is set": _set_items,
    "a branch": lambda x: x.flip(0) if float(x[0, 0]) > 0 else x * 1,
}


def _lineage(made: Callable[[Tensor], Tensor], x: Tensor) -> int:
    with Lineage() as lineage:
        return lineage.of(made(x))


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_depend_on_values_has_the_same_lineage(name: str) -> None:
    assert _lineage(SAME[name], x0) == _lineage(SAME[name], -x0) != 0


@pytest.mark.parametrize("name", OTHER)
def test_what_depends_on_values_has_another_lineage(name: str) -> None:
    assert _lineage(OTHER[name], x0) == _lineage(OTHER[name], x0.clone())
    assert _lineage(OTHER[name], x0) != _lineage(OTHER[name], -x0)


def test_lineage_changes_no_result() -> None:
    for made in (*SAME.values(), *OTHER.values()):
        with Lineage():
            found = made(x0)
        assert torch.equal(found, made(x0))
