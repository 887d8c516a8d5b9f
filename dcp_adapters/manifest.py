"""The manifest: what a checkpoint says about its quantized tensors, as versioned JSON.

    {"format_version": 1,
     "recipes": [{"type": "MXFP8BlockScaling", ...all fields...}],
     "tensors": {fqn: {"recipe": 0, "shape": [N, K], "dtype": "bfloat16", "parts": {name: {"dtype": ..., "shape":
     [...]}}}},
     "digests": {name: 32 hex digits}}

`digests` is there where the save was asked for it: of all tensors, quantized or not, as in dcp_adapters/weight_sums.py.
It is saved twice: as the entry `qtensor.manifest`, a uint8 tensor that any storage keeps and stock torch reads, and in
the planner data where the storage keeps that. Unknown keys are ignored, an unknown version is refused. Reading it needs
neither the model nor a process group. In the planner data alone, `converted` names tensors that `convert` rewrote.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata

from dcp_adapters.entry import Entry
from dcp_adapters.recipe_names import DTYPES, dtype_name
from dcp_adapters.weight_sums import DIGEST
from dcp_adapters.words import short
from qtensor.formats import check_shape
from qtensor.recipes import Recipe

FORMAT_VERSION = 1
MANIFEST = "qtensor.manifest"
MANIFEST_JSON = "qtensor.manifest.json"
CONVERTED = "converted"


@dataclass(frozen=True)
class Manifest:
    """All quantized tensors of a checkpoint, by state-dict name; digests: of all tensors, where they were recorded."""

    tensors: Mapping[str, Entry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    digests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the module docstring; it does not depend on the order of the tensors."""
        recipes: list[Recipe] = []
        records: dict[object, dict[str, Any]] = {}  # tensors alike share a record, so that pickle writes it once
        tensors = {}
        for name, entry in sorted(self.tensors.items()):
            format_ = (entry.recipe, entry.shape, entry.dtype)
            record = records.get(format_)
            if record is None:
                assert entry.recipe is not None, name
                if entry.recipe not in recipes:
                    recipes.append(entry.recipe)
                record = records[format_] = {
                    "recipe": recipes.index(entry.recipe),
                    "shape": list(entry.shape),
                    "dtype": dtype_name(entry.dtype),
                    "parts": {
                        part: {"dtype": dtype_name(dtype), "shape": list(shape)}
                        for part, (dtype, shape) in entry.parts().items()
                    },
                }
            tensors[name] = record
        return {
            "format_version": self.format_version,
            "recipes": [recipe.to_json() for recipe in recipes],
            "tensors": tensors,
            **({"digests": dict(sorted(self.digests.items()))} if self.digests else {}),
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Manifest":
        """The manifest of a JSON object.

        Raises:
            ValueError: an unknown format version or recipe type, parts that are not those of the recipe, digests that
                are none, or something that is no manifest.
        """
        if not isinstance(record, Mapping):
            raise ValueError(
                f"the checkpoint's qtensor.manifest is malformed: it holds a {type(record).__name__}, expected an "
                "object"
            )
        version = record.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"the checkpoint's qtensor.manifest has format_version {short(version)}; this library reads version "
                f"{FORMAT_VERSION}. Use a library version that knows it"
            )
        try:
            recipes = [Recipe.from_json(recipe) for recipe in record["recipes"]]
            tensors = {name: _parsed_entry(name, value, recipes) for name, value in record["tensors"].items()}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint's qtensor.manifest is malformed: {type(error).__name__}: {error}"
            ) from error
        return Manifest(tensors, digests=_parsed_digests(record.get("digests", {})))

    def to_tensor(self) -> Tensor:
        """uint8 [bytes]: UTF-8 JSON with sorted keys."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @staticmethod
    def from_tensor(data: Tensor) -> "Manifest":
        """The inverse of `to_tensor`. Raises ValueError for bytes that are no manifest."""
        try:
            record = json.loads(bytes(data.tolist()).decode())
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: a tensor of something else than bytes
            raise ValueError(f"the checkpoint's qtensor.manifest is not JSON: {error}") from error
        return Manifest.from_json(record)


def manifest_of(metadata: Metadata) -> Manifest | None:
    """The manifest in a checkpoint's planner data, None where the storage dropped it or there is none."""
    data = metadata.planner_data
    record = data.get(MANIFEST_JSON) if isinstance(data, Mapping) else None
    return None if record is None else Manifest.from_json(record)


def mark_converted(metadata: Metadata, names: Iterable[str]) -> None:
    """Say in the planner data which tensors were converted, and their masters were not."""
    metadata.planner_data[MANIFEST_JSON][CONVERTED] = sorted(names)


def converted_in(metadata: Metadata) -> frozenset[str]:
    """The tensors that `mark_converted` named."""
    data = metadata.planner_data
    record = data.get(MANIFEST_JSON) if isinstance(data, Mapping) else None
    names = record.get(CONVERTED) if isinstance(record, Mapping) else None
    return frozenset(name for name in names if type(name) is str) if isinstance(names, list) else frozenset()


def _parsed_entry(name: Any, value: Mapping[str, Any], recipes: list[Recipe]) -> Entry:
    index, dtype = value["recipe"], value["dtype"]
    if type(name) is not str or type(index) is not int or index < 0:
        raise TypeError(f"{short(name)} has the recipe {short(index)}, expected a name and the number of a recipe")
    if type(dtype) is not str or dtype not in DTYPES:
        raise TypeError(f"{short(dtype)} is no dtype that a quantized tensor can have")
    entry = Entry(name, recipes[index], _shape(value["shape"]), DTYPES[dtype])
    check_shape(entry.shape, recipes[index], f"the checkpoint's qtensor.manifest: {short(name)}", full=False)
    found = {part: (str(record["dtype"])[:64], _shape(record["shape"])) for part, record in value["parts"].items()}
    expected = {part: (dtype_name(dtype), shape) for part, (dtype, shape) in entry.parts().items()}
    if found != expected:
        raise ValueError(
            f"the checkpoint's qtensor.manifest lists parts {found} for {name}, expected {expected} of {entry.recipe}"
        )
    return entry


def _parsed_digests(value: Any) -> dict[str, str]:
    digests = dict(value) if isinstance(value, Mapping) else {"": value}
    wrong = [digest for digest in digests.values() if type(digest) is not str or not DIGEST.fullmatch(digest)]
    if wrong:
        raise ValueError(
            f"the checkpoint's qtensor.manifest has {short(wrong[0])} among its digests, expected 32 hex digits for "
            "each tensor"
        )
    return digests


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) not in (list, tuple) or any(type(extent) is not int or not 0 <= extent < 2**63 for extent in value):
        raise TypeError(f"a shape is {short(value)}, expected a list of counts")
    return tuple(value)
