"""The comparison of a target with a checkpoint, as pure functions of records: the sentences it finds, word for word."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_adapters.load import compare as comparison
from dcp_adapters.load.compare import TOO_LATE, LoadTarget, lacking, recipe_differences, to_convert
from dcp_adapters.load.together import only_stored
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import leaves_of
from dcp_adapters.records.manifest import Manifest
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize

MX, NV = MXFP8BlockScaling(), NVFP4BlockScaling()
MX_TEXT = "MXFP8BlockScaling(element='e4m3', blocks='row', scale_rounding='up')"
NV_TEXT = "NVFP4BlockScaling(blocks='row')"
BUILD = "build the target with"
OWN = "build the target with the checkpoint's recipe"
CONVERT = 'load with QuantizedLoadPlanner(on_mismatch="convert")'
DENSE = "the checkpoint holds a dense tensor"


def entry(recipe: Any = MX, shape: tuple[int, ...] = (48, 64)) -> Entry:
    return Entry("", recipe, shape, torch.bfloat16)


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    return Entry("", None, shape, dtype)


def named(tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Entry]:
    """The tensors among values: entries, shapes of dense ones of this dtype; None is no tensor."""
    found = {name: dense(value, dtype) if isinstance(value, tuple) else value for name, value in tensors.items()}
    return {name: dataclasses.replace(value, name=name) for name, value in found.items() if value is not None}


def stored(tensors: dict[str, Any], paths: dict[str, Any] | None = None) -> tuple[Metadata, Manifest]:
    """A checkpoint of quantized entries, dense shapes and (None) bytes, at the top level unless `paths` says so."""
    entries = named(tensors, torch.float32)
    manifest = Manifest({name: value for name, value in entries.items() if value.recipe is not None})
    records: dict[str, Any] = {name: BytesStorageMetadata() for name, value in tensors.items() if value is None}
    for value in entries.values():
        for key, (dtype, shape) in value.stored().items():
            records[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
    planner_data = {name: (name,) for name in records} | (paths or {})
    return Metadata(records, planner_data=planner_data), manifest


def target(tensors: dict[str, Any], paths: dict[str, Any] | None = None) -> LoadTarget:
    others = frozenset(name for name, value in tensors.items() if value is None)
    places = {name: (name,) for name in tensors} | (paths or {})
    return LoadTarget(named(tensors, torch.bfloat16), others, places)


def differences(
    want: LoadTarget, metadata: Metadata, manifest: Manifest | None, *, partial: bool, convert: bool = False
) -> list[str]:
    """What a load by one rank alone is refused for."""
    found = comparison.differences(want, metadata, manifest, partial=partial, convert=convert)
    return sorted([*found, *([] if partial else map(only_stored, lacking(want, metadata, manifest)))])


def compare(have: dict[str, Any], want: dict[str, Any], **options: Any) -> list[str]:
    metadata, manifest = stored(have)
    if options.pop("dropped", False):
        metadata.planner_data, manifest = None, None
    return differences(
        target(want), metadata, manifest, partial=options.pop("partial", False), convert=options.pop("convert", False)
    )


EVERYTHING = {"w": entry(), "v": entry(NV), "b": (5,), "step": None}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "equal": (EVERYTHING, EVERYTHING, []),
    "recipe": (
        {"w": entry()},
        {"w": entry(NV)},
        [f"w: the checkpoint holds {MX_TEXT}, the target is {NV_TEXT}; {OWN}, or {CONVERT}"],
    ),
    "recipe and shape": (
        {"w": entry()},
        {"w": entry(NV, (4, 64))},
        [
            f"w: the checkpoint holds {MX_TEXT}, the target is {NV_TEXT}; {OWN}, or {CONVERT}",
            "w: the checkpoint holds shape (48, 64), the target has (4, 64)",
        ],
    ),
    "dense for quantized": (
        {"w": (48, 64)},
        {"w": entry()},
        [
            f"w: {DENSE}, the target is quantized ({MX_TEXT}); {CONVERT}, or into a dense model",
        ],
    ),
    "quantized for dense": (
        {"w": entry()},
        {"w": (48, 64)},
        [
            f"w: the checkpoint holds it quantized ({MX_TEXT}), the target is dense; {BUILD} that recipe, or {CONVERT}",
        ],
    ),
    "missing": (
        {"b": (5,)},
        {"b": (5,), "w": entry(), "c": (2,), "n": None},
        ["c: missing in the checkpoint", "n: missing in the checkpoint", "w: missing in the checkpoint"],
    ),
    "extra": (
        {"b": (5,), "w": entry(), "c": (2,), "n": None},
        {"b": (5,)},
        [
            "c: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)",
            "w: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)",
        ],
    ),
    "dense shape": ({"b": (5,)}, {"b": (6,)}, ["b: the checkpoint holds shape (5,), the target has (6,)"]),
    "no tensor": (
        {"b": None},
        {"b": (6,)},
        ["b: the checkpoint holds no tensor, the target is a tensor of shape (6,)"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_difference_is_one_sentence(case: str) -> None:
    have, want, sentences = CASES[case]
    assert compare(have, want) == sentences


def test_partial_permits_what_only_one_side_has_and_nothing_else() -> None:
    assert compare(CASES["missing"][0], CASES["missing"][1], partial=True) == []
    assert compare(CASES["extra"][0], CASES["extra"][1], partial=True) == []
    for case in ("recipe", "dense for quantized", "quantized for dense", "dense shape", "no tensor"):
        have, want, sentences = CASES[case]
        assert compare(have, want, partial=True) == sentences


def test_without_planner_data_parts_are_compared_by_name_dtype_and_shape() -> None:
    assert compare(EVERYTHING, EVERYTHING, dropped=True) == []
    assert compare({"w": entry()}, {"w": entry(NV)}, dropped=True) == [
        "w: the checkpoint lacks w.global_scale; use another one"
    ]
    e5m2 = entry(MXFP8BlockScaling(element="e5m2"))
    assert compare({"w": entry()}, {"w": e5m2}, dropped=True) == [
        "w.payload: the checkpoint holds torch.float8_e4m3fn (48, 64), the target needs torch.float8_e5m2 (48, 64)"
    ]
    assert compare({"w": entry(shape=(4, 64))}, {"w": entry()}, dropped=True) == [
        "w.payload: the checkpoint holds torch.float8_e4m3fn (4, 64), the target needs torch.float8_e4m3fn (48, 64)",
        "w.scale: the checkpoint holds torch.uint8 (4, 2), the target needs torch.uint8 (48, 2)",
    ]
    assert compare({"w": (48, 64)}, {"w": entry()}, dropped=True) == CASES["dense for quantized"][2]
    assert compare({"w": entry()}, {"w": (48, 64)}, dropped=True) == [
        "w.payload: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)",
        "w.scale: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)",
        "w: missing in the checkpoint",
    ]


def test_a_part_that_is_gone_is_named() -> None:
    metadata, manifest = stored({"w": entry(NV)})
    del metadata.state_dict_metadata["w.global_scale"]
    assert differences(target({"w": entry(NV)}), metadata, manifest, partial=False) == [
        "w: the checkpoint lacks w.global_scale; use another one"
    ]


def test_only_containers_the_target_has_can_hold_extra_tensors() -> None:
    metadata, manifest = stored(
        {"model.w": entry(), "model.b": (5,), "optim.m": (5,), "items.0": entry(), "items.1": entry()},
        {
            "model.w.payload": ("model", "w.payload"),
            "model.w.scale": ("model", "w.scale"),
            "model.b": ("model", "b"),
            "optim.m": ("optim", "m"),
        }
        | {f"items.{i}.{part}": ("items", i, part) for i in range(2) for part in ("payload", "scale")},
    )
    model = target({"model.w": entry()}, {"model.w": ("model", "w")})
    assert differences(model, metadata, manifest, partial=False) == [
        "model.b: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)"
    ]
    items = target({"items.0": entry()}, {"items.0": ("items", 0)})
    assert differences(items, metadata, manifest, partial=False) == [
        "items.1: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)"
    ]
    metadata.planner_data = None  # which container an entry belongs to is not known then
    assert differences(model, metadata, manifest, partial=False) == []
    mixed = target({"model.w": entry(), "model.b": (5,), "optim.m": (5,)}, {"model.w": ("model", "w")})
    assert differences(mixed, metadata, manifest, partial=False) == []


def test_recipe_differences_are_of_tensors_both_sides_have_quantized() -> None:
    manifest = Manifest({"w": entry(), "v": entry(NV), "only": entry()})
    assert recipe_differences(target({"w": entry(), "b": (5,), "more": entry()}), manifest) == []
    floor = entry(MXFP8BlockScaling(scale_rounding="floor"))
    floor_text = MX_TEXT.replace("'up'", "'floor'")
    assert recipe_differences(target({"w": floor, "v": entry(NV, (4, 64))}), manifest) == [
        "v: the checkpoint holds shape (48, 64), the target has (4, 64)",
        f"w: the checkpoint holds {MX_TEXT}, the target is {floor_text}; {TOO_LATE}",
    ]


def test_target_of_a_flattened_state_dict() -> None:
    flat = {"m.w": quantize(torch.ones(48, 64), NV), "m.b": torch.ones(5), "step": 3}
    found = LoadTarget.of(leaves_of(flat), {"m.w": ["m", "w"], "m.b": ("m", "b"), "step": ("step",)})
    assert found.entries == {
        "m.w": Entry("m.w", NV, (48, 64), torch.float32),
        "m.b": Entry("m.b", None, (5,), torch.float32),
    }
    assert found.others == {"step"}
    assert found.paths == {"m.w": ("m", "w"), "m.b": ("m", "b"), "step": ("step",)}


# -- what a conversion bridges -----------------------------------------------------------------------------------------

BRIDGED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense to quantized": ({"w": (48, 64)}, {"w": entry()}, {"w": (48, 64)}),
    "quantized to dense": ({"w": entry()}, {"w": (48, 64)}, {"w": entry()}),
    "recipe to recipe": ({"w": entry()}, {"w": entry(NV)}, {"w": entry()}),
    "the same": ({"w": entry(), "b": (5,), "n": None}, {"w": entry(), "b": (5,), "n": None}, {}),
}


@pytest.mark.parametrize("case", BRIDGED)
def test_what_a_conversion_bridges_is_no_difference(case: str) -> None:
    have, want, converted = BRIDGED[case]
    assert compare(have, want, convert=True) == []
    assert to_convert(target(want), *stored(have)) == named(converted, torch.float32)


INTEGERS = dense((48, 64), torch.int32)
CODES = dense((48, 64), torch.float8_e4m3fn)
NOT_BRIDGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another shape, dense": ({"w": (48, 32)}, {"w": entry()}, "the checkpoint holds shape (48, 32), the target has"),
    "another shape": ({"w": entry(NV, (4, 64))}, {"w": entry()}, "the checkpoint holds shape (4, 64), the target has"),
    "into another shape": ({"w": entry()}, {"w": (4, 64)}, "the checkpoint holds shape (48, 64), the target has"),
    "into integers": ({"w": entry()}, {"w": INTEGERS}, "which can not be converted to torch.int32"),
    "bytes": ({"w": None}, {"w": entry()}, "the checkpoint holds no tensor, which can not be converted to"),
    "codes without a scale": (
        {"w": CODES},
        {"w": entry()},
        "the checkpoint holds torch.float8_e4m3fn, which can not be converted to",
    ),
    "codes cast to values": (
        {"w": CODES},
        {"w": (48, 64)},
        "the checkpoint holds torch.float8_e4m3fn, the target is torch.bfloat16; a cast would not keep what the values",
    ),
    "integers cast to values": ({"w": INTEGERS}, {"w": (48, 64)}, "the checkpoint holds torch.int32, the target is"),
    "nothing": ({"b": (5,)}, {"b": (5,), "w": entry()}, "missing in the checkpoint"),
}


@pytest.mark.parametrize("case", NOT_BRIDGED)
def test_what_no_conversion_bridges_stays_a_difference(case: str) -> None:
    have, want, text = NOT_BRIDGED[case]
    (problem,) = compare(have, want, convert=True)
    assert problem.startswith("w: ")
    assert text in problem


def test_a_conversion_needs_all_parts_of_its_source() -> None:
    metadata, manifest = stored({"w": entry()})
    del metadata.state_dict_metadata["w.scale"]
    for want in ({"w": (48, 64)}, {"w": entry(NV)}):
        found = differences(target(want), metadata, manifest, partial=True, convert=True)
        assert found == ["w: the checkpoint lacks w.scale; use another one"]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.int32, torch.int64),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.uint8),
        (torch.uint8, torch.int16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_casts_that_keep_the_values_are_dcps_own(held: torch.dtype, wanted: torch.dtype) -> None:
    assert compare({"w": dense((4,), held)}, {"w": dense((4,), wanted)}) == []


def test_a_storage_that_drops_planner_data_tells_the_recipe_too_late_for_a_conversion() -> None:
    metadata, manifest = stored({"w": entry(), "qtensor.manifest": (9,)})
    metadata.planner_data = None
    found = differences(target({"w": (48, 64)}), metadata, None, partial=False, convert=True)
    assert f"w: the checkpoint holds it quantized, the target is dense; {TOO_LATE}" in found
    assert "load it with the recipe it was saved with" in TOO_LATE
    assert recipe_differences(target({"w": entry(MXFP8BlockScaling(blocks="square"))}), manifest)[0].endswith(TOO_LATE)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (torch.int64, torch.uint8),
        (torch.int64, torch.bool),
        (torch.int8, torch.uint8),
        (torch.complex64, torch.float32),
    ],
)
def test_casts_that_lose_are_refused(held: torch.dtype, wanted: torch.dtype) -> None:
    text = f"w: the checkpoint holds {held}, the target is {wanted}; a cast would not keep what the values mean"
    assert compare({"w": dense((4,), held)}, {"w": dense((4,), wanted)}) == [text]


def test_what_can_not_be_loaded_at_all_is_listed_with_the_rest() -> None:
    want = dataclasses.replace(target({"w": entry(), "b": (5,)}), unfit={"w": "it is a view"})
    metadata, manifest = stored({"w": entry(), "b": (6,)})
    assert differences(want, metadata, manifest, partial=False) == [
        "b: the checkpoint holds shape (6,), the target has (5,)",
        "w: it is a view",
    ]


@pytest.mark.parametrize("partial", [False, True])
def test_a_listed_weight_without_any_part_is_refused_in_partial_loads_too(partial: bool) -> None:
    metadata, manifest = stored({"w": entry()})
    metadata.state_dict_metadata.clear()
    problems = differences(target({"w": entry()}), metadata, manifest, partial=partial)
    assert problems == ["w: the checkpoint lacks w.payload, w.scale; use another one"]


def test_what_the_manifest_lists_counts_where_a_dense_tensor_has_the_name_too() -> None:
    metadata, manifest = stored({"w": entry()})
    metadata.state_dict_metadata |= stored({"w": (48, 64)})[0].state_dict_metadata
    want = target({"w": (48, 64)})
    text = f"w: the checkpoint holds it quantized ({MX_TEXT}), the target is dense; build the target with that recipe"
    assert differences(want, metadata, manifest, partial=False) == [f"{text}, or {CONVERT}"]
    assert to_convert(want, metadata, manifest) == named({"w": entry()}, torch.float32)
