"""ExactSum: the same bits for every order and every way to share batches, at the precision that it promises."""

import itertools
import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerwise.statistics import exact_sum
from layerwise.statistics.exact_sum import MAX_TENSORS, ExactSum, totals
from tests.ranks import run_ranks, run_ranks_catching

SHAPE = (3, 50)


def _batches(count: int, *, spread: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Batches whose values span many orders of magnitude, scaled by up to 2^spread apart."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, *SHAPE, generator=generator)
    values *= torch.exp2(torch.randint(-12, 1, values.shape, generator=generator).float())
    return [batch * math.exp2(spread * (index / max(count - 1, 1) - 0.5)) for index, batch in enumerate(values)]


def _sum(batches: Sequence[Tensor]) -> ExactSum:
    total = ExactSum(SHAPE, "cpu")
    for batch in batches:
        total.add(batch)
    return total


def _bytes(x: Tensor) -> bytes:
    return x.numpy().tobytes()


@pytest.mark.parametrize("spread", [0.0, 60.0, 240.0])
def test_every_order_and_every_partition_give_the_same_bits(spread: float) -> None:
    batches = _batches(5, spread=spread)
    expected = _bytes(_sum(batches).total(1 / 3))
    plain = {_bytes(sum(order[1:], order[0])) for order in itertools.permutations(batches)}
    assert len(plain) > 1 or spread > 200, "the order matters to a plain sum of these"
    for order in itertools.permutations(batches):
        assert _bytes(_sum(order).total(1 / 3)) == expected
    for cut in range(6):
        first, second = _sum(batches[:cut]), _sum(batches[cut:])
        second.merge(first)
        assert _bytes(second.total(1 / 3)) == expected
        assert first.tensors == cut


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_any_finite_values_in_any_order(values: list[list[float]], random: Random) -> None:
    """Also: off by at most half a unit of the grid for each batch, 2^-31 of its amax."""
    shuffled = list(values)
    random.shuffle(shuffled)
    results = []
    for rows in (values, shuffled):
        total = ExactSum((3,), "cpu")
        for row in rows:
            total.add(torch.tensor(row))
        results.append(sum(total.buckets[exponent] for exponent in sorted(total.buckets)) + torch.zeros(3))
    assert _bytes(results[0]) == _bytes(results[1])
    for column in range(3):
        exact = math.fsum(row[column] for row in values)
        allowed = sum(max(map(abs, row)) * 2.0**-31 for row in values)
        # the fp64 additions of several buckets round, too
        assert abs(float(results[0][column]) - exact) <= allowed + 2.0**-50 * sum(abs(row[column]) for row in values)


def test_the_largest_values_of_a_batch_keep_all_their_bits() -> None:
    for scale in (1.0, 2.0**-140, 2.0**120, 1.999):
        values = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) * (127 / 128) + 1 / 128
        values = (values * scale).reshape(SHAPE)
        values[0, 0] = scale
        assert _bytes(_sum([values]).total()) == _bytes(values)
    values = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    largest = ExactSum((2,), "cpu")
    largest.add(values)
    assert _bytes(largest.total()) == _bytes(values)


def test_the_total_is_that_of_float64_where_values_differ_little() -> None:
    batches = _batches(20)
    exact = np.sum([batch.double().numpy() for batch in batches], axis=0)
    amax = max(float(batch.abs().max()) for batch in batches)
    assert np.abs(_sum(batches).total().double().numpy() - exact).max() < 20 * amax * 2**-31 + 2**-24 * amax


def test_as_many_as_promised_stay_exact() -> None:
    """The worst case, all values at the upper end of the grid: the same as in unlimited integers."""
    value = torch.full((1,), float(np.nextafter(np.float32(256.0), np.float32(0))))
    total = ExactSum((1,), "cpu")
    for _ in range(64):
        total.add(value)
    for _ in range(9):  # doubled to 2^15 tensors
        total.merge(total)
    assert total.tensors == MAX_TENSORS == 2**15
    assert list(total.buckets) == [8]
    assert float(total.buckets[8]) == float(value) * MAX_TENSORS
    total.add(value)
    with pytest.raises(
        RuntimeError, match=r"32769 tensors were added to a sum of shape \(1,\), which is exact for up to 32768"
    ):
        total.total()
    with pytest.raises(RuntimeError, match="use fewer or larger batches"):
        totals([total], None)


def test_memory_is_one_copy_taken_when_needed() -> None:
    total = ExactSum(SHAPE, "cpu")
    assert not total.buckets
    total.add(torch.zeros(SHAPE))
    assert not total.buckets
    assert total.tensors == 1
    for batch in _batches(10):
        total.add(batch.clamp(-7.9, 7.9).index_fill_(0, torch.tensor([0]), 7.9))
    assert [bucket.dtype for bucket in total.buckets.values()] == [torch.float64]


def test_nothing_added_is_zero() -> None:
    assert _bytes(ExactSum(SHAPE, "cpu").total()) == _bytes(torch.zeros(SHAPE))
    (total,) = totals([ExactSum(SHAPE, "cpu")], None) or [torch.ones(1)]
    assert _bytes(total) == _bytes(torch.zeros(SHAPE))
    assert totals([], None) == []
    assert ExactSum((0, 4), "cpu").total().shape == (0, 4)


def test_sums_in_chunks_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = _batches(4, spread=60.0)
    expected = _bytes(_sum(batches).total(0.7))
    monkeypatch.setattr(exact_sum, "CHUNK", 7)
    assert _bytes(_sum(batches).total(0.7)) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_total(value: float) -> None:
    total = _sum(_batches(2))
    bad = torch.zeros(SHAPE)
    bad[1, 7] = value
    total.add(bad)
    for act in (total.total, lambda: totals([total], None)):
        with pytest.raises(
            RuntimeError, match=r"1 of the 3 tensors of a sum of shape \(3, 50\) hold values that are not"
        ):
            act()


def test_other_tensors_are_refused() -> None:
    total = ExactSum((2,), "cpu")
    with pytest.raises(ValueError, match=r"got torch.float64 \(2,\) to add to a sum of torch.float32 \(2,\)"):
        total.add(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got torch.float32 \(3,\)"):
        total.add(torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(3,\) can not be merged into one of \(2,\)"):
        total.merge(ExactSum((3,), "cpu"))


def _partitions(spread: float) -> list[list[bytes]]:
    """This rank's totals for several ways to share eight batches, and three sums at a time; either rank owns some."""
    batches, others = _batches(8, spread=spread), _batches(8, seed=5)
    out = []
    for owners in ("01010101", "00001111", "00000001", "11111111", "01101001"):
        mine = [index for index, owner in enumerate(owners) if int(owner) == dist.get_rank()]
        sums = [_sum([batches[index] for index in mine]), ExactSum(SHAPE, "cpu"), _sum([others[i] for i in mine])]
        owner = len(owners.strip("1")) % 2
        results = totals(sums, dist.group.WORLD, [0.3, 1.0, 1.0], owner=owner)
        assert not any(one.buckets for one in sums)
        assert (results is None) == (dist.get_rank() != owner)
        out.append([_bytes(result) for result in results or ()])
    return out


@pytest.mark.parametrize("message", [2**23, 1])
def test_on_two_ranks_every_partition_gives_the_bits_of_one_process(message: int) -> None:
    for spread in (0.0, 100.0):
        expected = [
            _bytes(_sum(_batches(8, spread=spread)).total(0.3)),
            _bytes(torch.zeros(SHAPE)),
            _bytes(_sum(_batches(8, seed=5)).total()),
        ]
        first, second = run_ranks(2, _with_message, message, spread)
        assert [bool(one) for one in first] == [not one for one in second]
        assert any(first)
        assert any(second)
        assert [one or other for one, other in zip(first, second, strict=True)] == [expected] * 5


def _with_message(message: int, spread: float) -> list[list[bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_sum, "MESSAGE", message)
        return _partitions(spread)


def _one_rank_breaks_it() -> None:
    total = _sum(_batches(2))
    if dist.get_rank():
        total.add(torch.full(SHAPE, math.inf))
    totals([ExactSum((1,), "cpu"), total], dist.group.WORLD)


def test_all_ranks_raise_for_what_one_of_them_added() -> None:
    for error in run_ranks_catching(2, _one_rank_breaks_it):
        assert error.startswith("RuntimeError: 1 of the 5 tensors of a sum of shape (3, 50)"), error
