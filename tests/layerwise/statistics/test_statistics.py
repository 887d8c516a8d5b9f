"""Collector: what every linear of a layer gets, however the layer multiplies and however ranks share the batches."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp_hooks import unsharded
from layerwise.algorithms.algorithm import COLUMNS, HESSIAN, LOCAL_HESSIAN, Inputs
from layerwise.statistics import accumulated
from layerwise.statistics.accumulated import SAMPLE_ROWS
from layerwise.statistics.collector import Collector, partition
from tests.ranks import run_ranks, run_ranks_catching

ALL = frozenset({COLUMNS, LOCAL_HESSIAN, HESSIAN})
K, N, EXPERTS = 40, 24, 4  # K: the last block of the local Hessian is short


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _targets(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module.named_parameters() if param.ndim >= 2 and "norm" not in name}


def _everything(collector: Collector, group: dist.ProcessGroup | None = None) -> dict[tuple[str, ...], Inputs | None]:
    """All groups with their statistics, on every rank in turn; each total is asked for on all ranks."""
    statistics = collector.agree(group)
    found = {}
    for index, facts in enumerate(statistics.facts):
        for owner in range(1 if group is None else group.size()):
            inputs = statistics.total(index, owner, keep=owner + 1 < (1 if group is None else group.size()))
            if group is None or group.rank() == owner:
                found[facts.names] = inputs
            else:
                assert inputs is None
    return found


def _collect(
    targets: Mapping[str, Tensor],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> dict[tuple[str, ...], Inputs | None]:
    collector = Collector(targets, options.pop("needs", ALL), **options)
    with torch.no_grad():
        for batch in batches:
            with collector.batch():
                run(batch)
    return _everything(collector, group)


def _bytes(groups: Mapping[tuple[str, ...], Inputs | None]) -> list[Any]:
    """Everything in it, comparable bit for bit."""
    out: list[Any] = []
    for names, inputs in groups.items():
        fields = [] if inputs is None else [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
        out.append((names, [field.numpy().tobytes() if isinstance(field, Tensor) else field for field in fields]))
    return out


def _assert_describes(inputs: Inputs | None, rows: Sequence[Tensor]) -> None:
    """Against float64 numpy, of all batches' rows."""
    assert inputs is not None
    x = np.concatenate([one.detach().reshape(-1, one.shape[-1]).double().numpy() for one in rows])
    k = x.shape[1]
    assert inputs.tokens == len(x)
    assert float(inputs.amax) == np.abs(x).max()
    assert inputs.column_amax is not None
    np.testing.assert_array_equal(inputs.column_amax.double().numpy(), np.abs(x).max(axis=0))
    np.testing.assert_allclose(inputs.column_mean, np.abs(x).mean(axis=0), rtol=1e-5)
    scale = float((x**2).mean(axis=0).max())
    np.testing.assert_allclose(inputs.hessian, 2 * x.T @ x / len(x), atol=1e-5 * scale)
    padded = np.pad(x, ((0, 0), (0, -k % 16))).reshape(len(x), -1, 16)
    local = np.einsum("tbi,tbj->bij", padded, padded) / len(x)
    np.testing.assert_allclose(inputs.local_hessian, local, atol=1e-5 * scale)


class Attention(nn.Module):
    """q, k and v of one input, `o` of what comes of them, and a linear nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.unused = (nn.Linear(K, N, bias=False) for _ in range(4))
        self.o = nn.Linear(N, K)
        with torch.no_grad():
            for seed, param in enumerate(self.parameters()):
                param.copy_(_randn(*param.shape, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) * self.k(x).sigmoid() + self.v(x))


def test_groups_and_statistics_are_those_of_the_inputs() -> None:
    net = Attention()
    batches = [_randn(2, rows, K, seed=rows) for rows in (3, 9, 20)]
    o_inputs: list[Tensor] = []
    handle = net.o.register_forward_pre_hook(lambda _, args: o_inputs.append(args[0].clone()))
    groups = _collect(_targets(net), batches, net)
    handle.remove()
    assert list(groups) == [("q.weight", "k.weight", "v.weight"), ("unused.weight",), ("o.weight",)]
    assert groups["unused.weight",] is None
    _assert_describes(groups["q.weight", "k.weight", "v.weight"], batches)
    _assert_describes(groups["o.weight",], o_inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_forward_computes_what_it_computes_without(dtype: torch.dtype) -> None:
    net = Attention().to(dtype)
    x = _randn(5, K, dtype=dtype)
    with torch.no_grad():
        expected = net(x)
        collector = Collector(_targets(net), ALL)
        with collector.batch():
            got = net(x)
    assert got.view(torch.uint8).numpy().tobytes() == expected.view(torch.uint8).numpy().tobytes()
    _assert_describes(_everything(collector)["q.weight", "k.weight", "v.weight"], [x])


def test_only_what_is_asked_for() -> None:
    net = Attention()
    for needs in (frozenset(), frozenset({COLUMNS}), frozenset({LOCAL_HESSIAN}), frozenset({HESSIAN})):
        inputs = _collect(_targets(net), [_randn(5, K)], net, needs=needs)["o.weight",]
        assert inputs is not None
        assert (inputs.column_amax is not None) == (inputs.column_mean is not None) == (COLUMNS in needs)
        assert (inputs.local_hessian is not None) == (LOCAL_HESSIAN in needs)
        assert (inputs.hessian is not None) == (HESSIAN in needs)
        assert float(inputs.amax) > 0
    everything = _collect(_targets(net), [_randn(5, K)], net)
    # v comes last: by then the statistics of the input they share exist
    part = _collect(_targets(net), [_randn(5, K)], net, only=["v.weight"])
    qkv = ("q.weight", "k.weight", "v.weight")
    assert _bytes({qkv: part[qkv]}) == _bytes({qkv: everything[qkv]})
    assert part["o.weight",] is not None
    assert part["o.weight",].hessian is None
    assert part["o.weight",].column_mean is not None


def test_samples_are_rows_as_they_came() -> None:
    net = Attention().bfloat16()
    batches = [_randn(2, rows, K, seed=rows, dtype=torch.bfloat16) for rows in (4, 50)]
    collector = Collector(_targets(net), frozenset())
    with torch.no_grad():
        for batch in batches:
            with collector.batch():
                net(batch)
            batch.zero_()
    batches = [_randn(2, rows, K, seed=rows, dtype=torch.bfloat16) for rows in (4, 50)]
    samples = collector.samples("k.weight")
    assert samples is not None
    spaced = [index * 100 // SAMPLE_ROWS for index in range(SAMPLE_ROWS)]
    assert torch.equal(samples, torch.cat([batches[0].view(-1, K), batches[1].view(-1, K)[spaced]]))
    assert collector.samples("unused.weight") is None
    collector.agree(None)
    assert collector.samples("k.weight") is not None


@pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
def test_an_input_that_changes_between_two_linears_is_another(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    net = Attention()
    x = _randn(6, K)

    def run(batch: Tensor) -> None:
        with mode():
            batch = batch.clone()
            net.q(batch)
            batch.mul_(2)
            net.k(batch)
            net.v(batch)

    groups = _collect(_targets(net), [x.clone()], run)
    _assert_describes(groups["q.weight",], [x])
    _assert_describes(groups["k.weight", "v.weight"], [2 * x])


def test_batches_that_group_differently_are_complete_for_every_name() -> None:
    net = Attention()
    x, y = _randn(6, K), _randn(7, K, seed=1)

    def run(batch: Tensor) -> None:
        net.q(batch)
        net.k(batch if len(batch) == 6 else batch.clone())
        net.v(batch)

    for batches in ([x, y], [y, x]):
        for only in (None, ["k.weight"]):
            groups = _collect(_targets(net), batches, run, only=only)
            assert list(groups) == [("q.weight", "v.weight"), ("k.weight",), ("unused.weight",), ("o.weight",)]
            _assert_describes(groups["k.weight",], [x, y])
            qv = groups["q.weight", "v.weight"]
            if only is None:
                _assert_describes(qv, [x, y])
            else:
                assert qv is not None
                assert qv.hessian is None
    again = _collect(_targets(net), [y, x], run)
    assert _bytes(again) == _bytes(_collect(_targets(net), [x, y], run))


def _kept(collector: Collector) -> int:
    """Bytes of the statistics of all groups, before any total is asked for."""
    found = [one for own in collector._accumulated.values() for pair in own.rows for one in pair if one is not None]
    found += [
        bucket for own in collector._accumulated.values() for s in own.sums.values() for bucket in s.buckets.values()
    ]
    return sum(one.nbytes for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_wait_in_place_of_a_larger_hessian(dtype: torch.dtype) -> None:
    """Whoever has few tokens keeps them; the bits are those of the products of every batch, made at once."""
    w = _randn(N, K, dtype=dtype)
    itemsize = dtype.itemsize
    few, many = 4 * K // itemsize // 4, 4 * K // itemsize  # rows whose bytes are a quarter of fp32 [K, K], and all
    batches = [_randn(few, K, seed=seed, dtype=dtype) for seed in range(6)]
    expected = sum(2 / (6 * few) * (x.float().T @ x.float()).double() for x in batches)
    for order in (batches, batches[::-1]):
        collector = Collector({"w": w}, frozenset({HESSIAN}))
        for number, x in enumerate(order, 1):
            with torch.no_grad(), collector.batch():
                F.linear(x, w)
            # four batches are as large as the product in fp32; then there is a sum of them in fp64
            assert _kept(collector) == (number * few * K * itemsize if number <= 4 else 8 * K * K)
        (inputs,) = _everything(collector).values()
        assert inputs is not None
        np.testing.assert_allclose(inputs.hessian, expected, rtol=0, atol=float(expected.abs().max()) * 2**-20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accumulated, "SAFE", 0.0)
            at_once = _collect({"w": w}, order, lambda x: F.linear(x, w), needs=frozenset({HESSIAN}))
        assert _bytes(at_once) == _bytes({("w",): inputs})
    large = Collector({"w": w}, frozenset({HESSIAN}))
    with torch.no_grad(), large.batch():
        F.linear(_randn(many + 1, K, dtype=dtype), w)
    assert _kept(large) == 8 * K * K


def test_rows_that_wait_are_copies() -> None:
    """A layer may write into its hidden states once it has used them."""
    w, x = _randn(N, K), _randn(5, K)

    def run(batch: Tensor) -> None:
        F.linear(batch, w)
        batch.fill_(torch.nan)

    groups = _collect({"w": w}, [x.clone()], run)
    _assert_describes(groups["w",], [x])


def test_a_total_can_be_asked_for_again_where_it_is_kept() -> None:
    net = Attention()
    for rows in (5, 100):  # kept as rows, and as sums
        collector = Collector(_targets(net), ALL)
        with torch.no_grad(), collector.batch():
            net(_randn(rows, K))
        statistics = collector.agree(None)
        first, again, last = (statistics.total(0, 0, keep=keep) for keep in (True, True, False))
        names = statistics.facts[0].names
        assert _bytes({names: first}) == _bytes({names: again}) == _bytes({names: last})
        assert not statistics._accumulated.keys() & {names}, "it is used up"


def test_partition() -> None:
    names = ["a", "b", "c", "d"]
    assert partition([], names) == []
    assert partition([("a", "b"), ("c",)], names) == [(("a", "b"), [("a", "b")]), (("c",), [("c",)])]
    both = [("a", "b", "c"), ("b", "c"), ("a",)]
    expected = [(("a",), [("a",), ("a", "b", "c")]), (("b", "c"), [("a", "b", "c"), ("b", "c")])]
    assert partition(both, names) == partition(both[::-1], names) == expected


def test_a_batch_that_raises_leaves_nothing() -> None:
    net = Attention()
    collector = Collector(_targets(net), ALL)
    with pytest.raises(RuntimeError, match="shapes"), collector.batch():
        net.o(net(_randn(5, K)))
    assert collector.samples("q.weight") is None
    assert all(inputs is None for inputs in _everything(collector).values())


@pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
def test_with_gradients_and_under_inference_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    net = Attention()
    expected = _collect(_targets(net), [_randn(5, K), _randn(5, K, seed=1)], net)
    collector = Collector(_targets(net), ALL)
    with mode(), collector.batch():
        net(_randn(5, K))
    with mode(), collector.batch():
        net(_randn(5, K, seed=1))
    assert _bytes(_everything(collector)) == _bytes(expected)


def test_the_layers_precision_is_not_that_of_statistics() -> None:
    net = Attention()
    batches = [_randn(50, K)]
    expected = _collect(_targets(net), batches, net.q)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            got = _collect(_targets(net), batches, net.q)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert _bytes(got) == _bytes(expected)


def _experts(x: Tensor, w: Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to multiply x[e] [T, K] with w[e] [N, K]."""
    flat = x.reshape(-1, K)
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * x.shape[1]
    return {
        "linear": lambda: [F.linear(x[e], w[e]) for e in range(EXPERTS)],
        "a tensor as index": lambda: [F.linear(x[e], w[torch.tensor(e)]) for e in range(EXPERTS)],
        "unbind": lambda: [F.linear(*both) for both in zip(x.unbind(), w.unbind(), strict=True)],
        "keywords": lambda: [F.linear(input=x[e], weight=w[e]) for e in range(EXPERTS)],
        "operator": lambda: [x[e] @ w[e].T for e in range(EXPERTS)],
        "mm": lambda: [torch.mm(x[e], w[e].t()) for e in range(EXPERTS)],
        "addmm": lambda: [torch.addmm(torch.zeros(N), x[e], w.mT[e]) for e in range(EXPERTS)],
        "halves": lambda: [F.linear(y, half) for e in range(EXPERTS) for y in [x[e]] for half in w[e].chunk(2)],
        "bmm": lambda: torch.bmm(x, w.transpose(-2, -1)),
        "baddbmm": lambda: torch.baddbmm(torch.zeros(EXPERTS, 1, N), x, w.mT),
        "matmul": lambda: torch.matmul(x.unsqueeze(0), w.transpose(1, 2)),
        "grouped_mm": lambda: F.grouped_mm(flat, w.transpose(-2, -1), offs=ends),
        "grouped_mm of 3-D": lambda: F.grouped_mm(x, w.mT),
    }


@pytest.mark.parametrize("way", _experts(torch.empty(EXPERTS, 1, K), torch.empty(0)))
def test_experts_are_told_apart_however_they_are_multiplied(way: str) -> None:
    x, w = _randn(EXPERTS, 8, K), nn.Parameter(_randn(EXPERTS, N, K, seed=1))
    groups = _collect({"experts": w}, [None], lambda _: _experts(x, w)[way]())
    assert list(groups) == [(f"experts[{e}]",) for e in range(EXPERTS)]
    for e in range(EXPERTS):
        _assert_describes(groups[f"experts[{e}]",], [x[e]])


def test_the_fallback_of_transformers_is_a_product_too() -> None:
    import transformers.integrations.moe  # noqa: F401  registers it

    x, w = _randn(10, K), nn.Parameter(_randn(EXPERTS, N, K, seed=1))
    ends = torch.tensor([2, 2, 7, 9])
    run = torch.ops.transformers.grouped_mm_fallback
    groups = _collect({"w": w}, [None], lambda _: run(x, w.transpose(-2, -1), ends))
    assert groups["w[1]",] is None
    for expert, rows in ((0, x[:2]), (2, x[2:7]), (3, x[7:9])):  # the tenth row is nobody's
        _assert_describes(groups[f"w[{expert}]",], [rows])


def test_experts_that_all_take_the_same_are_one_group() -> None:
    x, w = _randn(6, K), nn.Parameter(_randn(EXPERTS, N, K, seed=1))
    for run in (lambda _: x @ w.mT, lambda _: x[None] @ w.mT):
        ((names, inputs),) = _collect({"w": w}, [None], run).items()
        assert names == ("w[0]", "w[1]", "w[2]", "w[3]")
        _assert_describes(inputs, [x])


def test_weights_in_one_storage_are_told_apart() -> None:
    flat = _randn(3 * N * K)
    a, b, other = flat.view(3, N, K)
    x = _randn(5, K)
    groups = _collect({"a": a, "b": b}, [None], lambda _: (F.linear(x, b), F.linear(2 * x, other)))
    assert groups["a",] is None
    _assert_describes(groups["b",], [x])


UNFOLLOWED = {
    "einsum": lambda x, w: torch.einsum("tk,nk->tn", x, w[0]),
    "__getitem__": lambda x, w: torch.bmm(w[torch.tensor([0, 2])], x[:2, :, None]),
    "bfloat16": lambda x, w: F.linear(x.bfloat16(), w[0].bfloat16()),
    "matmul": lambda x, w: torch.matmul(w, x.T),
    "linear": lambda x, w: F.linear(x[:, :20], w[0][:, :20]),
    "_grouped_mm": lambda x, w: F.grouped_mm(x.expand(2, 5, K), w[0].T, offs=torch.tensor([8, 24]).int()),
}


@pytest.mark.parametrize("function", UNFOLLOWED)
def test_a_weight_whose_inputs_can_not_be_seen_is_refused_by_name(function: str) -> None:
    x, w = _randn(5, K), nn.Parameter(_randn(EXPERTS, N, K, seed=1))
    with pytest.raises(
        RuntimeError, match=rf"^mlp.experts: calibration can not see .* through {function}\(\); expected"
    ):
        _collect({"mlp.experts": w}, [None], lambda _: UNFOLLOWED[function](x, w))
    # one that is seen, too, may also be read
    _collect({"mlp.experts": w}, [None], lambda _: (F.linear(x, w[1]), w.norm(), UNFOLLOWED[function](x, w)))


def test_unsuitable_targets_are_refused() -> None:
    w = _randn(N, K)
    for bad in (w[:, 1:], _randn(3), w.to("meta").as_subclass(_Other)):
        with pytest.raises(ValueError, match=r"^a.weight is a .* expected a plain contiguous \[N, K\] or \[E, N, K\]"):
            Collector({"a.weight": bad}, ALL)
    with pytest.raises(ValueError, match=r"^b and a are the same weight; name one of them"):
        Collector({"a": w, "b": w}, ALL)
    with pytest.raises(ValueError, match="no statistic and no linear of these targets: c, hessians"):
        Collector({"a": w}, frozenset({"hessians"}), only=["c"])


class _Other(Tensor):
    pass


def _broken(batch: Tensor, count: int, value: float) -> Tensor:
    batch = batch.clone()
    batch.view(-1)[:count] = value
    return batch


def test_values_that_are_not_finite_raise_by_name() -> None:
    net = Attention()
    batches = [_randn(5, K), _broken(_randn(5, K), 10, float("nan")), _broken(_randn(5, K), 2, float("-inf"))]
    message = r"^q.weight: its input holds 12 values that are not finite in 2 batches\. Look for an overflow"
    with pytest.raises(RuntimeError, match=message):
        _collect(_targets(net), batches, net.q)
    with pytest.raises(RuntimeError, match=r"q.weight: the squares of its input overflow fp32 in 1 batch"):
        _collect(_targets(net), [_broken(_randn(5, K), 1, 1e30)], net.q)
    _collect(_targets(net), [_broken(_randn(5, K), 1, 1e30)], net.q, needs=frozenset({COLUMNS}))
    many = {f"w{index}": _randn(2, K) for index in range(8)}
    with pytest.raises(RuntimeError, match=r"w4: its input .*; and 3 more\. Look"):
        _collect(many, batches, lambda x: [F.linear(x.clone(), w) for w in many.values()])


class Sparse(nn.Module):
    """Experts in one parameter; a batch goes to the experts that its first value names, and its length decides on k."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.experts = nn.Parameter(_randn(EXPERTS, N, K, seed=1))

    def forward(self, batch: tuple[int, Tensor]) -> None:
        index, x = batch
        if index % 2:
            x = self.attention(x)
        else:
            self.attention.q(x)
        F.linear(x[: index + 1], self.experts[index % 3])


def _batches(dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    return [(index, _randn(3 + index, K, seed=index, dtype=dtype) * 3.0**index) for index in range(6)]


def _shared_batches(owners: str) -> tuple[list[Any], int]:
    net = Sparse().bfloat16()
    batches = [
        batch for batch, owner in zip(_batches(torch.bfloat16), owners, strict=True) if int(owner) == dist.get_rank()
    ]
    return _bytes(_collect(_targets(net), batches, net, dist.group.WORLD)), len(batches)


@pytest.mark.parametrize("owners", ["010101", "111101", "000111", "111111"])
def test_two_ranks_find_the_bits_of_one_process(owners: str) -> None:
    net = Sparse().bfloat16()
    expected = _collect(_targets(net), _batches(torch.bfloat16), net)
    assert expected["experts[3]",] is None
    assert ("attention.k.weight", "attention.v.weight") in expected
    results = run_ranks(2, _shared_batches, owners)
    assert sum(count for _, count in results) == 6
    for got, _ in results:
        assert got == _bytes(expected)


def _sharded() -> list[Any]:
    net = Attention()
    for module in (net.q, net.o, net):
        fully_shard(module)
    with unsharded(net):
        batches = [_randn(5, K, seed=seed) for seed in range(3)][dist.get_rank() :: 2]
        return _bytes(_collect(_targets(net), batches, net.forward, dist.group.WORLD))


def test_a_gathered_layer() -> None:
    net = Attention()
    expected = _collect(_targets(net), [_randn(5, K, seed=seed) for seed in range(3)], net)
    for got in run_ranks(2, _sharded):
        assert got == _bytes(expected)


def _one_rank_has_bad_data() -> None:
    net = Attention()
    batches = [_randn(5, K)] * 2 if dist.get_rank() == 0 else [_broken(_randn(5, K), 3, float("inf"))]
    _collect(_targets(net), batches, net.q, dist.group.WORLD)


def test_all_ranks_raise_for_the_data_of_one() -> None:
    for error in run_ranks_catching(2, _one_rank_has_bad_data):
        assert error.startswith("RuntimeError: q.weight: its input holds 3 values that are not finite in 1 batch"), (
            error
        )


def _count_collectives(batches: int) -> int:
    """How many calls into the group it takes to agree, and to have every total once on each of two ranks."""
    net = Attention()
    calls = 0
    patched = ["all_reduce", "reduce", "all_gather", "all_gather_object"]
    with pytest.MonkeyPatch.context() as patch:
        for name in patched:
            original = getattr(dist, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                return original(*args, **kwargs)

            patch.setattr(dist, name, counted)
        _collect(_targets(net), [_randn(5, K)] * batches * (1 + dist.get_rank()), net, dist.group.WORLD)
    return calls


def test_collectives_do_not_grow_with_batches() -> None:
    assert (
        run_ranks(2, _count_collectives, 1) == run_ranks(2, _count_collectives, 3) == [10, 10]
    )  # 2 + 2 groups * 2 * 2


def _llama() -> tuple[nn.Module, Callable[[Tensor], Any]]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
        attn_implementation="sdpa",
    )  # fmt: skip
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    return layer, lambda x: layer(x, position_embeddings=rotary(x, torch.arange(x.shape[1])[None]))


def test_a_llama_layer() -> None:
    layer, run = _llama()
    batches = [_randn(2, rows, 32, seed=rows) for rows in (3, 8)]
    seen: dict[str, list[Tensor]] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0]))
    groups = _collect(_targets(layer), batches, run)
    attention, mlp = "self_attn.{}_proj.weight", "mlp.{}_proj.weight"
    assert list(groups) == [
        tuple(attention.format(one) for one in "qkv"),
        (attention.format("o"),),
        (mlp.format("gate"), mlp.format("up")),
        (mlp.format("down"),),
    ]
    for names, inputs in groups.items():
        for name in names:
            _assert_describes(inputs, seen[name.removesuffix(".weight")])


def _qwen3_moe(implementation: str) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, num_hidden_layers=1,
        experts_implementation=implementation,
    )  # fmt: skip
    block = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        for seed, param in enumerate(block.parameters()):
            param.copy_(_randn(*param.shape, seed=seed) * 0.2)
    return block


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_mixture_of_experts(implementation: str) -> None:
    block = _qwen3_moe(implementation)
    batches = [_randn(1, rows, 32, seed=rows) for rows in (2, 1)]
    groups = _collect(_targets(block), batches, block)
    flat = torch.cat([batch.view(-1, 32) for batch in batches])
    with torch.no_grad():
        chosen = (flat @ block.gate.weight.T).topk(2).indices
    starved = set(range(8)) - set(chosen.flatten().tolist())
    assert starved
    for expert in range(8):
        rows = flat[(chosen == expert).any(dim=1)]
        up, down = (groups[f"experts.{name}_proj[{expert}]",] for name in ("gate_up", "down"))
        if expert in starved:
            assert up is down is None
        else:
            _assert_describes(up, [rows])
            gate, plain = F.linear(rows, block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            hidden = F.silu(gate) * plain
            assert down is not None
            assert down.tokens == len(rows)
            np.testing.assert_allclose(down.column_amax, hidden.abs().amax(dim=0).detach(), rtol=1e-4)
    _assert_describes(groups["gate.weight",], [flat])


def test_experts_multiplied_through_copies_are_refused() -> None:
    block = _qwen3_moe("batched_mm")
    with pytest.raises(RuntimeError, match=r"experts\.(gate_up|down)_proj: .* through __getitem__.*set_experts_impl"):
        _collect(_targets(block), [_randn(1, 5, 32)], block)
