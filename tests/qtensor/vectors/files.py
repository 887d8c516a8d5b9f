"""The recipes, and each one's file: written here byte for byte, so that no version of a library changes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.qtensor.vectors.cases import Case, cases_of
from tests.qtensor.vectors.numbers import E2M1, E4M3, E5M2, FP32
from tests.qtensor.vectors.oracle import MX, NF4, NVFP4, Float8, Int4, Int8, Scheme, quantize

FOLDER = Path(__file__).resolve().parents[3] / "qtensor" / "vectors"
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
ITEM = {"F32": np.uint32, "BF16": np.uint16, "U8": np.uint8, "I8": np.uint8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8}


def schemes() -> Iterator[tuple[str, Scheme]]:
    """(name of the file, recipe)"""
    for element, number in ELEMENTS.items():
        for power_of_two in (False, True):
            end = "_pow2" * power_of_two
            options: dict[str, Any] = {"element": element, "power_of_two": power_of_two}
            for granularity, rows in (("row", 1), ("tensor", None)):
                recipe = {"type": "Float8CurrentScaling", "granularity": granularity, **options}
                yield f"float8_{element}_{granularity}{end}", Float8(recipe=recipe, number=number, rows=rows)
            for blocks, rows in (("row", 1), ("square", 128)):
                recipe = {"type": "Float8BlockScaling", "blocks": blocks, **options}
                scheme = Float8(recipe=recipe, number=number, rows=rows, columns=128)
                yield f"float8_{element}_{rows}x128{end}", scheme
    for element, blocks, rounding in (*((e, "row", r) for e in ELEMENTS for r in ("up", "floor")), SQUARE):
        recipe = {"type": "MXFP8BlockScaling", "element": element, "blocks": blocks, "scale_rounding": rounding}
        rows = 1 if blocks == "row" else 32
        scheme = MX(recipe=recipe, number=ELEMENTS[element], rows=rows, columns=32, stored=np.uint8, nan=255)
        yield f"mxfp8_{element}_{rows}x32_{rounding}", scheme
    for rounding in ("up", "floor"):
        recipe = {"type": "MXFP4BlockScaling", "scale_rounding": rounding}
        yield f"mxfp4_{rounding}", MX(recipe=recipe, number=E2M1, columns=32, stored=np.uint8, nan=255)
    for blocks, rows in (("row", 1), ("square", 16)):
        recipe = {"type": "NVFP4BlockScaling", "blocks": blocks}
        yield f"nvfp4_{rows}x16", NVFP4(recipe=recipe, rows=rows, columns=16, stored=np.uint8, nan=0x7F)
    for group in (32, 64, 128):
        recipe = {"type": "Int4GroupScaling", "group": group}
        yield f"int4_{group}", Int4(recipe=recipe, columns=group, stored=np.uint16, nan=0x7FC0)

    yield "int8_row", Int8(recipe={"type": "Int8RowScaling"}, nan=FP32.nan)
    for block in (32, 64, 128):
        recipe = {"type": "NF4BlockScaling", "block": block}
        yield f"nf4_{block}", NF4(recipe=recipe, columns=block, nan=FP32.nan)


SQUARE = ("e4m3", "square", "up")
EVERY_TIE = ("float8_e4m3_row", "float8_e5m2_row", "mxfp8_e4m3_1x32_up", "mxfp8_e5m2_1x32_up")
# Rounding a scale to a power of two knows nothing of the element: once will do, for E5M2.
LEFT_OUT = {f"float8_e5m2_{scales}_pow2" for scales in ("tensor", "1x128", "128x128")}
SCHEMES = {name: scheme for name, scheme in schemes() if name not in LEFT_OUT}


def cases(name: str) -> dict[str, Case]:
    scheme = SCHEMES[name]
    return cases_of(scheme, every_tie=name in EVERY_TIE or scheme.packed)


@cache
def contents(name: str) -> bytes:
    """The whole file."""
    scheme, tensors = SCHEMES[name], {}
    for case, (bits, narrow) in cases(name).items():
        found = quantize(bits, scheme)
        tensors[f"{case}.input"] = ("BF16", (bits >> 16).astype(np.uint16)) if narrow else ("F32", bits)
        tensors[f"{case}.values"] = ("F32", found.pop("values"))
        for part, array in found.items():
            tensors[f"{case}.{part}"] = (_dtype(scheme, part), array)
    return safetensors(tensors, {"recipe": json.dumps(scheme.recipe), "cases": json.dumps([*cases(name)])})


def _dtype(scheme: Scheme, part: str) -> str:
    if part == "payload":
        if scheme.packed:
            return "U8"
        if isinstance(scheme, Int8):
            return "I8"
        return "F8_E4M3" if scheme.number is E4M3 else "F8_E5M2"
    if part == "global_scale" or isinstance(scheme, Float8 | Int8 | NF4):
        return "F32"
    return {MX: "U8", NVFP4: "F8_E4M3", Int4: "BF16"}[type(scheme)]


def safetensors(tensors: dict[str, tuple[str, np.ndarray]], metadata: dict[str, str]) -> bytes:
    """The wide numbers first, so that each is aligned."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, (dtype, array) in sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
        assert array.dtype == ITEM[dtype]
        held = array.astype(array.dtype.newbyteorder("<")).tobytes()
        header[name] = {"dtype": dtype, "shape": [*array.shape], "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data
