"""report: what is measured, against numbers that numpy and ml_dtypes make of the stored bytes without our decoder."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from dcp_adapters.cli.report import tiles as tiles_module
from dcp_adapters.cli.report.channels import Channels
from dcp_adapters.cli.report.measure import measure_checkpoint, measure_tensor
from dcp_adapters.cli.report.tiles import tiles
from dcp_adapters.records.entry import Entry
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from qtensor import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from tests.dcp_adapters.cases import arbitrary, models, reference, save, values
from tests.dcp_adapters.live_storages import LiveStorages
from tests.ranks import run_ranks
from tests.recipes import facts, recipes

if TYPE_CHECKING:
    from dcp_adapters.cli.report.records import CheckpointReport, TensorReport

# not those whose encoding scales are rounded down to powers of two, which leaves room above: nothing is clipped
RECIPES = recipes(lambda each: not getattr(each.recipe, "power_of_two", False))
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
counted_recipes = pytest.mark.parametrize("recipe", [name for name in RECIPES if facts(RECIPES[name]).element.floating])
SHAPE = (64, 96)


def measured(tensor: Tensor, right: Tensor | None = None) -> TensorReport:
    recipe = tensor.recipe if isinstance(tensor, QuantizedTensor) else None
    stored = Entry("w", recipe, tuple(tensor.shape), tensor.dtype)
    return measure_tensor(stored, tensor, right)


def as_bytes(part: Tensor) -> np.ndarray:
    return part.contiguous().view(torch.uint8).numpy() if part.ndim else part.numpy()


def taken_apart(q: QuantizedTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(elements, scale of each element, scales by group) as float64: the formats' definitions, in numpy alone."""
    parts, known = q.parts(), facts(q.recipe)
    codes = as_bytes(parts["payload"])
    if known.element.bits == 4:  # two a byte
        codes = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(q.shape)
    elements = known.element.values(codes)
    scale = as_bytes(parts["scale"]).view(known.scale).astype(np.float32)
    if "global_scale" in known.parts:
        scale = scale * parts["global_scale"].numpy()
    scale = scale.astype(np.float64)
    each = np.repeat(scale, known.block, axis=-1)[..., : q.shape[-1]] if known.block > 1 else scale
    return elements, np.broadcast_to(each, elements.shape), scale


def largest_of(q: QuantizedTensor) -> tuple[float, float]:
    """The largest element, and half the step before it."""
    element = facts(q.recipe).element
    return element.largest, element.relative * 2.0**element.exponent


def groups_of(q: QuantizedTensor) -> np.ndarray:
    """[rows, K]: a number for each element, the same for elements under one scale."""
    rows, columns = np.indices(q.shape)
    known = facts(q.recipe)
    if known.block > 1:
        return rows // known.rows * 1000 + columns // known.block
    return np.zeros_like(rows) if known.tensor_wide else rows


# -- one tensor --------------------------------------------------------------------------------------------------------


@every_recipe
def test_the_error_is_that_of_an_independent_decoder(recipe: str) -> None:
    dense = values(SHAPE, 3)
    q = quantize(dense, RECIPES[recipe])
    elements, scale, _ = taken_apart(q)
    right, found = dense.double().numpy(), elements * scale
    report = measured(q, dense)
    noise = np.square(found - right).sum()
    assert report.snr_db == pytest.approx(10 * math.log10(np.square(right).sum() / noise), rel=1e-6)
    assert report.error.max_abs == pytest.approx(np.abs(found - right).max(), rel=1e-5)
    assert (report.error.not_finite, report.not_finite, report.compared) == (0, 0, "yes")
    assert 15 < report.snr_db < 50


@counted_recipes
def test_elements_at_the_end_of_the_range_are_counted(recipe: str) -> None:
    q = quantize(values(SHAPE, 4), RECIPES[recipe])
    q.payload.view(torch.uint8)[:, 3:7] = (
        0x77 if q.payload.dtype == torch.uint8 else 0x7E if largest_of(q)[0] < 500 else 0xFB
    )
    at_largest = np.abs(taken_apart(q)[0]) == largest_of(q)[0]
    report = measured(q)
    assert report.at_largest == at_largest.sum() >= 64 * 4
    assert report.saturated == at_largest.sum() - len(np.unique(groups_of(q)[at_largest]))
    assert report.clipped is None


@counted_recipes
def test_clipped_is_what_rounding_does_not_explain(recipe: str) -> None:
    dense = values(SHAPE, 5, torch.float32)
    q = quantize(dense, RECIPES[recipe])
    largest, half = largest_of(q)
    grown = dense * torch.where(torch.arange(SHAPE[0]) % 3 == 0, 1.3, 1.0).unsqueeze(
        1
    )  # the scales are of other values
    limit = (largest + half) * taken_apart(q)[1]
    expected = int((np.abs(grown.double().numpy()) > limit * (1 + 1e-7)).sum())
    assert measured(q, grown).clipped == expected > 0
    own = measured(q, dense).clipped
    assert own == int((np.abs(dense.double().numpy()) > limit * (1 + 1e-7)).sum())
    assert (own > 0) == (facts(RECIPES[recipe]).excess * largest > largest + half)  # "floor" leaves values out of range


@every_recipe
def test_histograms_of_scales(recipe: str) -> None:
    q = quantize(values((64, 128), 6) * 2.0 ** torch.arange(-20, 44).unsqueeze(1), RECIPES[recipe])
    stored = q.scale
    numbers = {
        torch.uint8: lambda: as_bytes(stored).view(ml_dtypes.float8_e8m0fnu).astype(np.float64),
        torch.float8_e4m3fn: lambda: as_bytes(stored).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
        torch.bfloat16: lambda: stored.double().numpy(),
        torch.float32: lambda: stored.double().numpy(),
    }[stored.dtype]()
    positive = numbers[numbers > 0]
    report = measured(q)
    assert report.scales[0].part == "scale"
    assert report.scales[0].counts == Counter((np.frexp(positive)[1] - 1).tolist())
    assert report.scales[0].zero == (numbers == 0).sum()
    wide = "global_scale" in facts(q.recipe).parts
    assert [scales.part for scales in report.scales[1:]] == (["global_scale"] if wide else [])
    if wide:
        assert report.scales[0].zero > 0
        assert report.scales[1].counts == {math.floor(math.log2(float(q.global_scale))): 1}


def test_scales_that_are_none_are_counted_apart() -> None:
    mxfp8, nvfp4 = quantize(values(SHAPE, 0), MXFP8BlockScaling()), quantize(values(SHAPE, 0), NVFP4BlockScaling())
    mxfp8.scale.fill_(127)
    mxfp8.scale[5, :2] = 255
    mxfp8.scale[6, 0] = 0  # 2^-127, not zero
    (scales,) = measured(mxfp8).scales
    assert (scales.counts, scales.not_finite, scales.zero) == ({0: 64 * 3 - 3, -127: 1}, 2, 0)
    assert measured(mxfp8).not_finite == 2 * 32
    nvfp4.scale.view(torch.uint8).fill_(0x38)  # 1.0
    nvfp4.scale.view(torch.uint8)[0, :4] = torch.tensor([0x7F, 0xFF, 0x00, 0x81], dtype=torch.uint8)  # NaN NaN 0 -2^-9
    nvfp4.global_scale.fill_(-1.0)
    block, whole = measured(nvfp4).scales
    assert (block.counts, block.not_finite, block.zero, block.negative) == ({0: 64 * 6 - 4}, 2, 1, 1)
    assert (whole.counts, whole.negative) == ({}, 1)
    float8 = quantize(values(SHAPE, 0), Float8CurrentScaling())
    float8.scale[:5, 0] = torch.tensor([-math.inf, math.nan, -0.0, -2.0, 2.0**-140])
    (scales,) = measured(float8).scales
    assert (scales.not_finite, scales.zero, scales.negative, scales.counts[-140]) == (2, 1, 1, 1)
    report = measured(nvfp4)
    assert (report.bad_scales, report.zero_scales) == (4, 1)


def test_nan_in_the_payload() -> None:
    dense = values(SHAPE, 0)
    for element, codes, nan in (("e4m3", [0x7F, 0xFF, 0x7E, 0xFE], 2), ("e5m2", [0x7C, 0xFD, 0x7F, 0x7B], 3)):
        q = quantize(dense, Float8CurrentScaling(element=element))
        q.payload.view(torch.uint8)[9, :4] = torch.tensor(codes, dtype=torch.uint8)
        report = measured(q, dense)
        assert (report.nan_codes, report.not_finite, report.error.not_finite) == (nan, nan, nan)
        assert math.isfinite(report.snr_db)
        assert report.zero_rows == 0


def test_channels_that_stand_out() -> None:
    dense = torch.full((10, 40), 0.5)
    dense[3, 7] = -8.0  # row and column: 16 times the median
    dense[5, 9] = 2.0  # exactly 4 times: not over it
    dense[6, 11] = 2.1
    dense[8] = 0.0
    report = measured(dense)
    assert (report.row_outliers, report.column_outliers, report.zero_rows) == (2, 2, 1)
    assert [(one.axis, one.index, one.amax) for one in report.outliers[:2]] == [("row", 3, 8.0), ("column", 7, 8.0)]
    assert [one.factor for one in report.outliers] == pytest.approx([16.0, 16.0, 4.2, 4.2])
    assert report.profile.axis == "row"
    assert report.profile.bins[3] == 16.0
    assert report.profile.channels == 10


def test_the_median_is_of_channels_that_are_not_zero_and_needs_eight() -> None:
    x = torch.zeros(100, 12)
    x[:9, :] = torch.arange(1.0, 10.0).unsqueeze(1)  # median 5
    x[8, 0] = 21.0
    report = measured(x)
    assert [(one.axis, one.index, one.factor) for one in report.outliers] == [("row", 8, 4.2)]
    assert report.zero_rows == 91
    assert measured(x[1:8, :7] * torch.tensor([1.0, 1, 1, 1, 1, 1, 99])).outliers == ()


def test_the_largest_of_many_outliers_are_named() -> None:
    x = torch.ones(100, 64)
    x[:20, 0] = torch.arange(20.0, 40.0)
    report = measured(x)
    assert report.row_outliers == 20
    rows = [one.index for one in report.outliers if one.axis == "row"]
    assert rows == [19, 18, 17, 16, 15, 14, 13, 12]


def test_a_profile_keeps_the_largest_of_each_bin() -> None:
    channels = Channels(1, 1000)
    x = torch.ones(1, 1000)
    x[0, 777] = 50.0
    for tile in tiles(x):
        channels.add(tile)
    found = channels.profile("column")
    assert (len(found.bins), max(found.bins), found.channels) == (120, 50.0, 1000)
    assert found.bins.index(50.0) == next(
        i for i, bin_ in enumerate(np.array_split(np.arange(1000), 120)) if 777 in bin_
    )


def test_tensors_of_all_kinds() -> None:
    nan, inf = math.nan, math.inf
    rows = measured(torch.tensor([[0.0, 0.0], [nan, 0.0], [-0.0, 0.0], [0.0, 1.0]]))
    assert (rows.zero_rows, rows.not_finite) == (2, 1)
    assert measured(torch.tensor([1.0, nan, inf, -inf])).not_finite == 3
    scalar = measured(torch.tensor(2.0), torch.tensor(2.5))
    assert (scalar.error.max_abs, scalar.zero_rows, scalar.numel) == (0.5, None, 1)
    for empty in (torch.empty(0), torch.empty(0, 64), torch.empty(5, 0)):
        report = measured(empty, empty)
        assert (report.error.exact, report.outliers, report.not_finite) == (True, (), 0)
        assert report.zero_rows in (None, 0)
    for quantized in (values((0, 64), 0), values((3, 0), 0)):
        report = measured(quantize(quantized, NVFP4BlockScaling()), quantized)
        assert (report.at_largest, report.saturated, report.clipped) == (0, 0, 0)
    integers = measured(torch.tensor([[1, -5]]), torch.tensor([[1, 5]]))
    assert (integers.error.max_abs, integers.zero_rows, integers.outliers) == (10.0, None, ())
    assert measured(torch.tensor([True]), torch.tensor([False])).error.max_abs == 1.0
    assert measured(torch.tensor([[1 + 2j]]), torch.tensor([[1 + 5j]])).error.max_abs == 3.0
    double = torch.tensor([1 + 1e-12, 1.0], dtype=torch.float64)
    assert measured(double, torch.ones(2, dtype=torch.float64)).error.max_abs == pytest.approx(1e-12, rel=1e-3, abs=0)


def test_experts_are_rows_of_rows() -> None:
    dense = values((3, 32, 64), 1)
    found, flat = (measured(quantize(x, MXFP8BlockScaling()), x) for x in (dense, dense.reshape(96, 64)))
    assert found.shape == (3, 32, 64)
    for field in ("snr_db", "at_largest", "saturated", "outliers", "scales", "zero_rows"):
        assert getattr(found, field) == getattr(flat, field), field


@every_recipe
def test_how_a_tensor_is_cut_changes_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (256, 384)  # two by three pieces of whole blocks
    dense = values(shape, 8, torch.float32)
    for q in (quantize(dense, RECIPES[recipe]), arbitrary(shape, RECIPES[recipe], 9)):
        whole = measured(q, dense)
        assert len(list(tiles(q))) == 1
        with monkeypatch.context() as small:
            small.setattr(tiles_module, "WIDTH", 128)
            small.setattr(tiles_module, "ELEMENTS", 1024)
            small.setattr(tiles_module, "HEIGHT", 128)
            pieces = list(tiles(q))
            assert len(pieces) == 2 * 3
            cut = measured(q, dense)
        for field in (
            "at_largest",
            "saturated",
            "clipped",
            "nan_codes",
            "not_finite",
            "outliers",
            "zero_rows",
            "scales",
        ):
            assert getattr(cut, field) == getattr(whole, field), field
        assert cut.error.max_abs == whole.error.max_abs
        assert cut.error.relative == pytest.approx(whole.error.relative, rel=1e-12)
        joined = torch.full(shape, math.inf)
        for piece in pieces:
            joined[piece.rows, piece.columns] = piece.values
        assert torch.equal(joined.nan_to_num(), q.dequantize(torch.float32).nan_to_num())


# -- a checkpoint ------------------------------------------------------------------------------------------------------


def reported(tmp_path: Path, a: dict[str, Any], b: dict[str, Any] | None = None) -> CheckpointReport:
    save(a, tmp_path / "a")
    if b is not None:
        save(b, tmp_path / "b")
    return measure_checkpoint(StoredCheckpoint(tmp_path / "a"), None if b is None else StoredCheckpoint(tmp_path / "b"))


def save_models(path: Path) -> None:
    save(models(), path)


def test_checkpoints_of_other_world_sizes_are_matched_by_name(tmp_path: Path, shared_tmp_path: Path) -> None:
    run_ranks(2, save_models, shared_tmp_path / "2")
    save({"mxfp8": {"layers.0.weight": values((112, 64), 0)}}, tmp_path / "dense")
    two = StoredCheckpoint(shared_tmp_path / "2")
    report = measure_checkpoint(two, StoredCheckpoint(tmp_path / "dense"))
    found = {tensor.name: tensor for tensor in report.tensors}
    weight = found["mxfp8.layers.0.weight"]
    right = values((112, 64), 0)
    alone = measured(reference()["mxfp8"]["layers.0.weight"], right)
    assert (weight.compared, weight.chunks, weight.snr_db) == ("yes", 2, alone.snr_db)
    assert (weight.nbytes, weight.reference_bytes) == (112 * 64 + 112 * 2, 112 * 64 * 2)
    assert weight.entries == 2
    assert found["nvfp4.layers.0.weight"].compared == "absent"
    assert (report.world_size, len(report.files)) == (2, 2)
    assert sum(report.files.values()) > sum(tensor.nbytes for tensor in report.tensors)


def test_names_and_shapes_that_do_not_match_are_told(tmp_path: Path) -> None:
    a = {"w": values((4, 8), 0), "own": values((3,), 1), "shape": values((4, 8), 2), "type": torch.ones(2) * 1j}
    b = {"w": values((4, 8), 0), "shape": values((8, 4), 2), "more": values((3,), 1), "type": torch.ones(2)}
    report = reported(tmp_path, a | {"step": 3}, b)
    assert {tensor.name: (tensor.compared, tensor.snr_db) for tensor in report.tensors} == {
        "own": ("absent", None), "shape": ("shape", None), "type": ("undecodable", None), "w": ("yes", None),
    }  # fmt: skip
    assert (report.only_in_against, report.blobs, report.blob_bytes > 0) == (1, 1, True)
    assert next(tensor for tensor in report.tensors if tensor.name == "w").error.exact


def test_checkpoints_without_a_common_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"have no tensor of one name, .* for example 'model\.w' and 'w'$"):
        reported(tmp_path, {"model.w": torch.ones(2)}, {"w": torch.ones(2)})


def test_a_quantized_checkpoint_may_be_what_is_right(tmp_path: Path) -> None:
    a, b = quantize(values(SHAPE, 0), NVFP4BlockScaling()), quantize(values(SHAPE, 0), MXFP8BlockScaling())
    (tensor,) = reported(tmp_path, {"w": a}, {"w": b}).tensors
    assert tensor.snr_db == measured(a, b.dequantize(torch.float32)).snr_db


def test_the_record_as_json(tmp_path: Path) -> None:
    q = quantize(values(SHAPE, 0), NVFP4BlockScaling())
    bad = q.clone()
    bad.scale.view(torch.uint8)[0, 0] = 0x7F
    report = reported(
        tmp_path, {"w": q, "bad": bad, "zero": torch.zeros(4)}, {"w": values(SHAPE, 0), "zero": torch.ones(4)}
    )
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert found["format"] == "dcp_adapters.report/1"
    assert [tensor["name"] for tensor in found["tensors"]] == ["bad", "w", "zero"]
    w = found["tensors"][1]
    assert (w["kind"], w["shape"], w["bytes"], w["entries"]) == ("nvfp4", [64, 96], 64 * 96 * 9 // 16 + 4, 3)
    assert w["scales"][0]["part"] == "scale"
    assert sum(w["scales"][0]["log2"].values()) == 64 * 6
    assert found["tensors"][0]["scales"][0]["not_finite"] == 1
    assert w["write_seconds"] > 0 < w["read_seconds"]


def test_progress_adds_up_to_the_bytes(tmp_path: Path) -> None:
    save({"a": quantize(values(SHAPE, 0), NVFP4BlockScaling()), "b": torch.ones(7), "c": torch.ones(0)}, tmp_path / "a")
    told: list[int] = []
    report = measure_checkpoint(StoredCheckpoint(tmp_path / "a"), advance=told.append)
    assert told == [tensor.nbytes for tensor in report.tensors] == [64 * 96 * 9 // 16 + 4, 28, 0]


def test_writing_is_measured_on_all_parts_and_the_quickest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only `torch.save` and reading move: each save of a part takes longer than the one before."""
    now, saves = 0.0, 0

    def slow_save(part: Tensor, _: Any) -> None:
        nonlocal now, saves
        saves += 1
        now += 0.001 * saves

    save({"a": quantize(values(SHAPE, 0), NVFP4BlockScaling()), "b": torch.ones(7)}, tmp_path / "a")
    checkpoint = StoredCheckpoint(tmp_path / "a")
    with monkeypatch.context() as patched:
        patched.setattr("dcp_adapters.cli.report.measure.time.perf_counter", lambda: now)
        patched.setattr(torch, "save", slow_save)
        a, b = measure_checkpoint(checkpoint).tensors
    assert a.write_seconds == pytest.approx(0.001 * (1 + 2 + 3))
    # Three tries of 3 parts are 45 ms, the fourth is over what is enough: 12 saves before.
    assert b.write_seconds == pytest.approx(0.001 * 13)
    assert saves == 12 + 4
    assert (a.read_seconds, b.read_seconds) == (0.0, 0.0)


def test_one_tensor_at_a_time_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "ELEMENTS", 1024)
    monkeypatch.setattr(tiles_module, "WIDTH", 32)
    shape, peaks = (512, 96), {}
    for count in (1, 6):
        dense = {str(i): values(shape, i) for i in range(count)}
        save({name: quantize(x, MXFP8BlockScaling()) for name, x in dense.items()}, tmp_path / f"a{count}")
        save(dense, tmp_path / f"b{count}")
        del dense
        a, b = StoredCheckpoint(tmp_path / f"a{count}"), StoredCheckpoint(tmp_path / f"b{count}")
        with LiveStorages() as live:
            measure_checkpoint(a, b)
        peaks[count] = live.peak
    stored = 512 * 96 * (1 + 1 / 32 + 2)
    assert stored < peaks[6] < 1.05 * peaks[1] < 2 * stored + 20 * 1024 * 8
