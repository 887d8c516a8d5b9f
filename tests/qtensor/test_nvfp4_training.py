"""What is special about NVFP4's backward: operands that are rotated and drawn, and square blocks read transposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtensor import NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.numerics import kernels
from qtensor.products.backward_operands import ROTATED, SIGNS, rotate
from qtensor.products.gradients import SeenWeight, kinds_of, turn_weight
from qtensor.spec.registry import format_of
from tests.qtensor.low_precision_backward import NVFP4, nvfp4, rows
from tests.qtensor.recipes_under_test import raw, same_bytes, weight
from tests.qtensor.test_gradients import inputs, parameter, run, seed
from tests.qtensor.test_products import gathered

SQUARE, ROW = NVFP4["nvfp4_square"], NVFP4["nvfp4_row"]
OF_ROWS = NVFP4BlockScaling()


def decoded(parts: dict[str, Tensor]) -> Tensor:
    return kernels.decode(parts, OF_ROWS, torch.float32)


def without_global_scale(q: QuantizedTensor) -> Tensor:
    """fp32: elements times the scales of their blocks."""
    return decoded({**q.detach().parts(), "global_scale": torch.ones(())})


def drawn(x: Tensor) -> Tensor:
    return decoded(kernels.encode_rows(x, OF_ROWS, drawn=True))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- stochastic rounding -----------------------------------------------------------------------------------------------


def rows_that_differ(first: Tensor, count: int) -> Tensor:
    """The same numbers [16 n] in each row, and behind them a block that no two rows have alike."""
    return torch.cat([first.expand(count, -1), normal(count, 16).clamp(-3, 3)], dim=1)


def test_rounding_adds_nothing_in_the_mean() -> None:
    """Of M independent roundings to neighbours a step apart the mean has a deviation of at most step / 2 / sqrt(M).

    Five of them, or 2^-20 of the number for fp32, are exceeded by one of 32 numbers in 50,000 cases. To the nearest,
    most numbers are further off.
    """
    first = torch.cat([torch.tensor([6.0]), torch.linspace(-5.9, 5.9, 31)])
    first[16] = 6.0  # the largest of each block is an element, so its scale is exact and nothing saturates
    count = 2**12
    x = rows_that_differ(first, count)
    found = drawn(x)[:, :32]
    size = first.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).double()
    bound = 5 * step / 2 / count**0.5 + 2.0**-20 * size
    assert ((found.double().mean(0) - first).abs() <= bound).all()
    assert ((found - first).abs() < step * (1 + 2.0**-20)).all()  # a neighbour
    nearest = decoded(kernels.encode_rows(x, OF_ROWS))[:, :32]
    assert ((nearest.double().mean(0) - first).abs() > bound).sum() > 20


def test_elements_are_drawn_independently() -> None:
    """Neighbours in a row, and the same place in rows: of M pairs both go up in a quarter, within five deviations."""
    count = 2**12
    found = drawn(rows_that_differ(torch.tensor([6.0, *[2.5] * 15]), count))[:, 1:16] > 2.5
    deviation = (3 / 16 / count) ** 0.5
    for a, b in ((found[:, 0], found[:, 1]), (found[:, 3], found[:, 11]), (found[:-1, 5], found[1:, 5])):
        assert abs((a & b).double().mean() - 0.25) <= 5 * deviation


def test_the_gradient_of_the_input_is_right_in_the_mean() -> None:
    """Of many tokens with equal gradients but for channels whose weights are 0; to the nearest it is not."""
    values = weight(64, 96, torch.float32)
    values[48:] = 0
    w = quantize(values, SQUARE)
    count = 2**12
    dy = rows_that_differ(torch.cat([torch.tensor([6.0]), torch.linspace(-5.9, 5.9, 47)]), count)
    dy[:, 16], dy[:, 32] = 6.0, 6.0
    exact = dy[0, :48].double() @ w.dequantize(torch.float32)[:48].double()
    size = dy[0, :48].abs().double()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    spread = (step[:, None] / 2 * w.dequantize(torch.float32)[:48].double()).square().sum(0).sqrt()
    for recipe, right in ((SQUARE, True), (NVFP4["nvfp4_nearest"], False)):
        q = QuantizedTensor.from_parts(w.parts(), recipe, torch.float32)
        x = torch.zeros(count, 96, requires_grad=True)
        F.linear(x, nn.Parameter(q)).backward(dy)
        off = (x.grad.double().mean(0) - exact).abs()
        # of fp32: 64 products and their sum
        bound = 5 * spread / count**0.5 + 64 * 2.0**-22 * (size @ w.dequantize(torch.float32)[:48].double().abs())
        assert bool((off <= bound).all()) is right


def test_bytes_of_a_token_depend_on_it_alone() -> None:
    """Not on the batch, its order, or what is computed before: a rank may hold any of them."""
    dy = seed(torch.empty(40, 64))
    whole = kernels.encode_rows(dy, OF_ROWS, drawn=True)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for some in (slice(7, 20), order):
        for name, part in kernels.encode_rows(dy[some], OF_ROWS, drawn=True).items():
            assert torch.equal(raw(part), raw(whole[name].view(torch.uint8)[some])), name


def test_a_row_that_differs_in_one_bit_draws_anew() -> None:
    """Far from what is compared: 31 numbers midway between elements go the same way in about half of all cases."""
    x = torch.full((2, 64), 2.5)
    x[:, 0] = x[:, 32] = 6.0
    x[1, 63] = torch.nextafter(torch.tensor(2.5), torch.tensor(3.0))
    found = drawn(x)[:, 1:32]
    assert 4 <= int((found[0] != found[1]).sum()) <= 27


def test_zeros_behind_a_row_draw_nothing_else() -> None:
    x = normal(3, 32)
    assert torch.equal(drawn(F.pad(x, (0, 32)))[:, :32], drawn(x))


def test_numbers_far_below_a_step_are_never_rounded_up() -> None:
    x = torch.full((64, 16), 2.0**-26)
    x[:, 0] = 6.0
    assert drawn(x)[:, 1:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_draw_the_bytes_of_the_reference(dtype: torch.dtype) -> None:
    """In chunks, eager: more rows than fit into one."""
    x = (normal(5000, 64) * 10.0 ** torch.linspace(-4, 2, 5000)[:, None]).to(dtype)
    found = drawn(x)
    for row in (0, 1, 2499, 4999):
        values = x[row].float().numpy()
        assert torch.equal(found[row], torch.from_numpy(nvfp4(values, ROW, of_gradient=True)))


@pytest.mark.full
def test_compiled_kernels_draw_the_same() -> None:
    x = seed(torch.empty(300, 96, dtype=torch.bfloat16))
    from fsdp_hooks.kernels.compiled import use_kernels

    found = []
    for mode in ("eager", "compiled"):
        with use_kernels(mode):
            found.append(kernels.encode_rows(x, OF_ROWS, drawn=True))
    for name, part in found[0].items():
        assert torch.equal(raw(part), raw(found[1][name])), name


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_tokens_are_rotated_by_the_matrix_of_others() -> None:
    """torchao's, given TransformerEngine's signs; sums of 16 numbers of 8 bits are exact in fp32."""
    utils = pytest.importorskip(
        "torchao.prototype.moe_training.nvfp4_training.hadamard_utils", reason="this torchao trains no NVFP4"
    )
    matrix = utils.get_rht_matrix(SIGNS, torch.device("cpu"), torch.float32, ROTATED)
    x = torch.randint(-127, 128, (5, 64), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(rotate(x), (x.view(5, 4, 16) @ matrix).view(5, 64))
    assert torch.equal(matrix @ matrix.T, torch.eye(16))


def test_an_outlier_is_spread_over_its_16_tokens() -> None:
    x = torch.zeros(1, 48)
    x[0, 20] = 8.0
    found = rotate(x)[0]
    assert (found[16:32].abs() == 2).all()
    assert found[:16].count_nonzero() == found[32:].count_nonzero() == 0


# -- square blocks, transposed -----------------------------------------------------------------------------------------


def turned(q: QuantizedTensor, recipe: Any = SQUARE) -> tuple[dict[str, Tensor], Tensor]:
    parts, factors = turn_weight(q.parts(), kinds_of(recipe), SeenWeight(tuple(q.shape), view=False, transposed=False))
    assert factors is not None
    return parts, factors


@pytest.mark.parametrize("n", [64, 48])
def test_square_blocks_are_read_transposed_without_another_rounding(n: int) -> None:
    values = weight(n, 96, torch.float32) * 10.0 ** torch.linspace(-6, 3, 96)  # the least scales, and 0
    values[16:32, 32:48] = 0
    values[40, 90] = torch.nan
    q = quantize(values, SQUARE)
    parts, factors = turned(q)
    assert parts["payload"].shape == (96, 32)
    found = decoded(parts)
    assert found[:, n:].count_nonzero() == 0
    assert same_bytes(found[:, :n].contiguous(), without_global_scale(q).T.contiguous())
    assert torch.equal(factors, q.global_scale.reshape(1, 1))
    whole = parts["scale"].view(torch.uint8).reshape(6, 16, 4)
    assert torch.equal(whole, whole[:, :1].expand_as(whole))


def test_rows_of_a_square_block_with_other_scales_are_rounded_under_the_largest() -> None:
    """As after writes into shards that cut blocks, before their scales are agreed."""
    own = quantize(weight(32, 32, torch.float32), SQUARE)
    factor = torch.ones(32, 1)
    factor[:8] = 0.625
    scale = (own.scale.float() * factor).to(torch.float8_e4m3fn)
    q = QuantizedTensor.from_parts({**own.parts(), "scale": scale}, SQUARE, torch.float32)
    found, largest = decoded(turned(q)[0]).T, own.scale[0].float().repeat_interleave(16)
    exact = without_global_scale(q) / largest
    half_step = torch.where(exact.abs() < 2, 0.25, torch.where(exact.abs() < 4, 0.5, 1))
    assert ((found[:8] / largest - exact[:8]).abs() <= half_step[:8]).all()
    assert not torch.equal(found[:8], without_global_scale(q)[:8])
    assert torch.equal(found[8:], without_global_scale(q)[8:])


def test_a_gathered_weight_brings_the_global_scale_of_every_shard() -> None:
    w, _ = gathered(SQUARE)
    x = inputs(7, 96)
    dy, dx, _ = run(x, w.requires_grad_())
    scales = torch.cat([scale.expand(32) for scale in w.detach().global_scale])
    assert len(scales.unique()) == 3
    assert same_bytes(dx, (rows(dy.float() * scales, SQUARE, "nvfp4") @ without_global_scale(w)).to(dx.dtype))


# -- what programs do --------------------------------------------------------------------------------------------------


def test_backward_twice_gives_the_same_and_takes_nothing_from_generators() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = run(inputs(40, 96), parameter(SQUARE))
    second = run(inputs(40, 96), parameter(SQUARE))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first, second, strict=True):
        assert same_bytes(a, b)


def test_an_outlier_of_fp16_does_not_overflow_where_tokens_are_summed() -> None:
    x = torch.full((16, 96), 60000.0, dtype=torch.float16, requires_grad=True)
    w = nn.Parameter(quantize(weight(64, 96, torch.float16), SQUARE))
    F.linear(x * 2.0**-20, w).backward(torch.full((16, 64), 60000.0, dtype=torch.float16))
    assert w.grad.isfinite().all()
    assert w.grad.count_nonzero() > 0


def test_the_three_kinds_say_what_they_leave_out() -> None:
    kinds = {name: kinds_of(NVFP4BlockScaling(activations="dynamic", gradients=name)) for name in
             NVFP4BlockScaling.gradient_elements}  # fmt: skip
    assert {name: (kind.rotated, kind.drawn) for name, kind in kinds.items()} == {
        "nvfp4": (True, True),
        "nvfp4-nearest": (True, False),
        "nvfp4-unrotated": (False, True),
    }
    assert {kind.gradient for kind in kinds.values()} == {OF_ROWS}
    assert format_of(OF_ROWS).draws


def test_gradients_choose_no_scales_by_the_error_of_the_nearest() -> None:
    kinds = kinds_of(NVFP4["nvfp4_4over6"])
    assert (kinds.gradient, kinds.other) == (OF_ROWS, NVFP4BlockScaling(scale_choice="4over6"))
    assert np.isfinite(rows(seed(torch.empty(4, 32)), NVFP4["nvfp4_4over6"], "nvfp4").numpy()).all()
