"""NVFP4 with scale_choice="4over6": a block's amax becomes 6 or 4, by the smaller squared error."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from dcp_adapters.records.recipe_names import find_target, recipe_label
from fsdp_hooks.kernels.compiled import use_kernels
from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, QuantizedTensor, quantize, quantized_model_init
from qtensor.numerics.exact import convert_parts
from qtensor.numerics.own_scales import OwnScales
from qtensor.products.dynamic import quantize_rows
from qtensor.spec.registry import format_of
from tests.dcp_adapters.cases import load, save
from tests.qtensor.recipes_under_test import raw, same_bytes, same_parts, weight

CHOSEN, PLAIN = NVFP4BlockScaling(scale_choice="4over6"), NVFP4BlockScaling()

# What the authors' implementation in PyTorch makes of `pattern` (github.com/mit-han-lab/fouroversix, commit dadfad69,
# quantize/pytorch/reference.py: quantize(x, scale_rule=mse)): E4M3 scales as codes. Its codes are those of quantize.
SCALES = [
    [92, 86, 86, 92], [100, 95, 99, 100], [108, 103, 103, 108], [116, 110, 111, 116],
    [124, 118, 119, 124], [92, 87, 91, 92], [100, 95, 95, 100], [108, 102, 103, 108],
]  # fmt: skip
FIRST_CODES = [
    [222, 155, 65, 229, 189, 41, 84, 222],
    [155, 65, 229, 189, 41, 84, 222, 155],
    [65, 229, 189, 25, 84, 222, 155, 66],
]


def pattern() -> Tensor:
    x = (torch.arange(8 * 64) * 37 % 255 - 127).float().reshape(8, 64)
    return x * 2.0 ** (torch.arange(8) % 5).reshape(-1, 1)


def squared_error(x: Tensor, q: QuantizedTensor) -> Tensor:
    return (q.dequantize(torch.float32).double() - x.double()).square().view(x.shape[0], -1, 16).sum(-1)


def under(x: Tensor, factor: float, global_scale: Tensor) -> QuantizedTensor:
    """x under scales that bring each block's amax to 6 (factor 1) or 4 (1.5), by the general quantizer."""
    scale = x.abs().view(x.shape[0], -1, 16).amax(-1) / 6 / global_scale * factor
    quantizer = {"scale": scale.to(torch.float8_e4m3fn), "global_scale": global_scale}
    return QuantizedTensor.from_parts(format_of(PLAIN).encode_with(x, PLAIN, quantizer), PLAIN, torch.float32)


def test_scales_are_those_of_the_authors() -> None:
    q = quantize(pattern(), CHOSEN)
    assert q.scale.view(torch.uint8).tolist() == SCALES
    assert q.payload[:3, :8].tolist() == FIRST_CODES
    assert float(q.global_scale) == pytest.approx(127 * 16 / 1536, rel=2.0**-22)


def test_each_block_has_the_better_of_two_scales() -> None:
    """Both are taken; and a tie, as in a block of zeros, has that for 6."""
    x = weight(64, 256, torch.float32)
    x[0, :16] = 0
    q = quantize(x, CHOSEN)
    six, four = under(x, 1.0, q.global_scale), under(x, 1.5, q.global_scale)
    found, errors = squared_error(x, q), torch.stack([squared_error(x, six), squared_error(x, four)])
    # scales of the reference above are quotients: where they are not the same codes, errors differ
    same = (q.scale.float() == six.scale.float()) | (q.scale.float() == four.scale.float())
    assert same.float().mean() > 0.99
    assert torch.allclose(found[same], errors.amin(0)[same], rtol=1e-6, atol=0)
    taken = q.scale.float() == four.scale.float()
    assert 0.2 < taken.float().mean() < 0.8
    assert q.scale[0, 0] == 0
    assert found.sum() < 0.9 * squared_error(x, quantize(x, PLAIN)).sum()


def test_it_is_nvfp4_to_whoever_reads_it() -> None:
    q = quantize(weight(64, 96), CHOSEN)
    assert same_bytes(QuantizedTensor.from_parts(q.parts(), PLAIN, q.dtype).dequantize(), q.dequantize())
    judged = OwnScales(PLAIN)
    judged.see(q.parts())
    assert judged.others == 0  # block scales; the largest of all is another
    converted = convert_parts(q.dequantize(torch.float32), PLAIN, q.parts(), CHOSEN)
    assert all(same_bytes(part, q.parts()[name]) for name, part in converted.items())


@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_requantizing_decoded_values_keeps_them(exponent: int) -> None:
    """A block may get its other scale if that holds its values, too: bytes may change, values by fp32's rounding."""
    values = quantize(weight(64, 256, torch.float32) * 2.0**exponent, CHOSEN).dequantize()
    again = quantize(values, CHOSEN).dequantize()
    assert torch.allclose(again, values, rtol=2.0**-22, atol=0)


@pytest.mark.full
def test_compiled_kernels_choose_the_same() -> None:
    """Of nearly equal errors, too: many blocks of few different numbers, which tie or almost do."""
    generator = torch.Generator().manual_seed(1)
    ties = torch.randint(-12, 13, (4096, 64), generator=generator).float() / 2
    for x in (weight(300, 96, torch.float32), ties, ties.bfloat16() * 1.001):
        found = []
        for mode in ("eager", "compiled"):
            with use_kernels(mode):
                found.append(quantize(x, CHOSEN))
        assert same_parts(*found)


def test_tokens_choose_by_themselves() -> None:
    x = weight(40, 96)
    whole = quantize_rows(x, CHOSEN)
    for name, part in quantize_rows(x[7:20], CHOSEN).items():
        assert torch.equal(raw(part), raw(whole[name].view(torch.uint8)[7:20])), name


def test_what_is_not_finite_marks_its_block_alone() -> None:
    x = weight(4, 96, torch.float32)
    clean = quantize(x, CHOSEN)
    x[1, 20] = torch.inf
    q = quantize(x, CHOSEN)
    assert q.dequantize()[1, 16:32].isnan().all()
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1, 1] = False
    assert torch.equal(q.scale.view(torch.uint8)[keep], clean.scale.view(torch.uint8)[keep])


def test_masters_in_two_bytes_are_refused_by_name() -> None:
    with quantized_model_init(CHOSEN):
        net = nn.Linear(64, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"scale_choice=.4over6.\W"):
        MasterWeightOptimizer(torch.optim.AdamW, net.named_parameters(), masters="remainder")


def test_masters_write_what_quantize_writes() -> None:
    with quantized_model_init(CHOSEN, preserve_high_precision_init_val=True):
        net = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    net(weight(8, 64)).square().mean().backward()
    optimizer.step()
    assert same_parts(net.weight.detach(), quantize(optimizer.state[net.weight]["master_weight"], CHOSEN))


def test_a_checkpoint_says_which_it_is(tmp_path: Path) -> None:
    q = quantize(weight(), CHOSEN)
    save({"w": q}, tmp_path)
    other: Any = quantize(weight(seed=1), CHOSEN)
    load({"w": other}, tmp_path)
    assert same_parts(other, q)
    with pytest.raises(CheckpointException, match=r"scale_choice=.4over6.\W"):
        load({"w": quantize(weight(seed=1), PLAIN)}, tmp_path)


def test_names_of_recipes() -> None:
    assert find_target("nvfp4", {"scale_choice": "4over6"}) == CHOSEN
    assert find_target("nvfp4-4over6") == CHOSEN
    assert recipe_label(dataclasses.replace(CHOSEN, activations="dynamic")) == "nvfp4-4over6"
    with pytest.raises(ValueError, match="has no option 'element'; it has blocks, scale_choice"):
        find_target("nvfp4", {"element": "e2m1"})
