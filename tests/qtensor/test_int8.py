"""INT8 rows: the bytes of torchao, the scales of compressed-tensors, and all pieces of a row know that it is NaN."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_hooks import sync_scales
from qtensor import Int8RowScaling, MasterWeightOptimizer, QuantizedTensor, quantize
from qtensor.products.dynamic import product
from qtensor.spec.registry import format_of
from tests.qtensor.recipes_under_test import same_bytes, weight
from tests.ranks import run_ranks

NAN, LEAST = float("nan"), 2.0**-126
INT8 = Int8RowScaling()


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """[256, 256], rows of very different size, half of them with a negative number as the largest."""
    x = torch.ldexp(weight(256, 256, torch.float32), torch.arange(256).view(-1, 1) % 40 - 10)
    return x.to(dtype)


@pytest.fixture(scope="module")
def torchao_int8() -> Any:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its kernels for other machines
        from torchao.quantization import PerRow
        from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor
    return lambda x: Int8Tensor.from_hp(x, PerRow())


def test_bytes_and_values_are_those_of_torchao(torchao_int8: Any) -> None:
    x = rows()
    q, theirs = quantize(x, INT8), torchao_int8(x)
    assert torch.equal(q.payload, theirs.qdata)
    assert same_bytes(q.scale, theirs.scale)
    assert same_bytes(q.dequantize(), theirs.dequantize())
    assert {-128, 127} <= set(q.payload.unique().tolist())


def test_codes_of_torchao_agree_around_every_tie(torchao_int8: Any) -> None:
    """Three fp32 numbers on either side of each middle, under scales of many mantissas."""
    scale = 1 + torch.arange(0, 2**23, 16381).view(-1, 1).double() * 2.0**-23
    x = ((torch.arange(-127, 127).double() + 0.5) * scale).float()
    for ulps in range(-3, 4):
        near = (x.view(torch.int32) + ulps).view(torch.float32)
        near[:, 0] = -(127.5 * scale).float()[:, 0]  # the largest
        q, theirs = quantize(near, INT8), torchao_int8(near)
        assert torch.equal(q.payload, theirs.qdata)
        assert same_bytes(q.scale, theirs.scale)


def test_scales_are_those_of_compressed_tensors_and_codes_are_next_to_ties_at_most() -> None:
    """It divides; a product with the rounded reciprocal is up to 2^-23 of a code's magnitude away."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    x = rows()
    scale, zero_point = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
    codes = forward.quantize(x, scale, zero_point, args, dtype=torch.int8)
    q = quantize(x, INT8)
    assert same_bytes(q.scale, scale)
    differ = q.payload != codes
    exact = x.double() / scale.double()
    assert ((exact - exact.floor() - 0.5).abs()[differ] <= 128 * 2.0**-23).all()
    assert differ.sum() < x.numel() // 1000
    read = QuantizedTensor.from_parts({"payload": codes, "scale": scale}, INT8, torch.float32)
    assert same_bytes(read.dequantize(), forward.dequantize(codes, scale, args=args, dtype=torch.float32))


def test_tiny_rows_and_zeros_have_the_least_scale() -> None:
    x = torch.zeros(3, 64)
    x[0, 0], x[1, 5] = 127.4 * LEAST, 3 * LEAST
    q = quantize(x, INT8)
    assert q.scale.flatten().tolist() == [LEAST] * 3
    assert (q.payload[0, 0], q.payload[1, 5]) == (127, 3)
    assert (q.dequantize()[2] == 0).all()


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_its_codes_are_zeros(bad: float) -> None:
    x = rows()
    x[7, 100] = bad
    q, clean = quantize(x, INT8), quantize(rows(), INT8)
    assert q.scale[7].isnan()
    assert (q.payload[7] == 0).all()
    assert q.dequantize()[7].isnan().all()
    kept = torch.arange(256) != 7
    assert torch.equal(q.payload[kept], clean.payload[kept])
    # and under a quantizer that knows nothing of it
    quantizer = format_of(INT8).quantizer(rows(), INT8, rows().abs().amax(-1, keepdim=True))
    parts = format_of(INT8).encode_with(x, INT8, quantizer)
    assert all(same_bytes(parts[name], part) for name, part in q.parts().items())


def test_a_token_that_is_not_finite_is_nan_in_a_product() -> None:
    recipe = Int8RowScaling(activations="dynamic")
    w, x = quantize(weight(64, 96), recipe), weight(5, 96)
    x[2, 3] = float("inf")
    y = product(x, w)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


def test_every_code_decodes_to_its_number() -> None:
    codes = torch.arange(-128, 128).to(torch.int8).view(1, 256)
    q = QuantizedTensor.from_parts({"payload": codes, "scale": torch.ones(1, 1)}, INT8, torch.float32)
    assert q.dequantize().flatten().tolist() == [float(code) for code in range(-128, 128)]


# -- rows in pieces ----------------------------------------------------------------------------------------------------


def _nan_in_a_piece(how: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    own = weight(8, 128, torch.float32).chunk(2, 1)[rank].clone()
    if how == "bytes" and rank == 1:
        own[3, 5] = NAN
    param = nn.Parameter(DTensor.from_local(quantize(own, INT8), mesh, [Shard(1)], run_check=False))
    if how == "bytes":
        sync_scales([("w", param)])
    else:
        optimizer = MasterWeightOptimizer(torch.optim.SGD, [param], lr=1.0, masters=how)
        grad = torch.zeros(8, 64)
        if rank == 1:
            grad[3, 5] = float("inf")
        param.grad = DTensor.from_local(grad, mesh, [Shard(1)], run_check=False)
        optimizer.step()
    q: Any = param.detach().to_local()  # type: ignore[attr-defined]
    assert q.scale.isnan().flatten().nonzero().tolist() == [[3]], (how, rank, q.scale)
    assert (q.payload[3] == 0).all()
    return q.scale.nan_to_num(-1.0).flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["bytes", "fp32", "remainder"])
def test_all_pieces_of_a_row_learn_that_it_is_not_finite(how: str) -> None:
    """A save keeps the scale of one piece, and must not keep one that hides it."""
    first, second = run_ranks(2, _nan_in_a_piece, how)
    assert first == second
