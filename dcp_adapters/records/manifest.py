"""The manifest: what a checkpoint says about its quantized tensors, as versioned JSON.

    {"format_version": 1,
     "recipes": [{"type": "MXFP8BlockScaling", ...all fields...}],
     "tensors": {fqn: {"recipe": 0, "shape": [N, K], "dtype": "bfloat16", "parts": {name: {"dtype": ..., "shape":
     [...]}}}},
     "digests": {name: 32 hex digits},
     "base": {"path": "../step-1000", "digest": 32 hex digits}}

`digests` is there if the save was asked for it: of all tensors, quantized or not, as in weight_sums.py. `base` is there
if the checkpoint is a delta to another one; only then the version is 2, so who knows version 1 alone refuses.
The manifest is saved twice: as the entry `qtensor.manifest`, a uint8 tensor that any storage keeps and stock torch
reads, and in the planner data if the storage keeps that. Unknown keys are ignored, an unknown version is refused.
Reading it needs neither the model nor a process group. In the planner data alone, `converted` names tensors that
`convert` rewrote.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata

from dcp_adapters.plain.words import short
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.recipe_names import DTYPES, dtype_name
from dcp_adapters.records.weight_sums import DIGEST
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import check_shape

FORMAT_VERSION = 1
DELTA_VERSION = 2  # of a checkpoint that is a delta to another
MANIFEST = "qtensor.manifest"
MANIFEST_JSON = "qtensor.manifest.json"
USE_ANOTHER = "use another checkpoint"
CONVERTED = "converted"


@dataclass(frozen=True)
class BaseLink:
    """The full checkpoint that a delta was made against.

    path: of its directory, relative to that of the delta, with slashes. digest: xxh3_128 of its `.metadata`, which no
    other save has.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> dcp.save(state, checkpoint_id="step-1010", planner=QuantizedSavePlanner(delta_to="step-1000"))
        >>> read_manifest("step-1010").base.path
        '../step-1000'
        ```
    """

    path: str
    digest: str

    @staticmethod
    def from_json(record: Any) -> "BaseLink":
        """Undo `vars`. Raises ValueError for anything else than a path and a digest."""
        path, digest = (record.get(key) if isinstance(record, Mapping) else None for key in ("path", "digest"))
        if (
            (type(path) is str and path and "\0" not in path and not PurePosixPath(path).is_absolute())
            and type(digest) is str
            and DIGEST.fullmatch(digest)
        ):
            return BaseLink(path, digest)
        raise ValueError(
            f"the checkpoint's qtensor.manifest has the base {short(path)} with the digest {short(digest)}, expected a "
            "relative path and 32 hex digits"
        )


@dataclass(frozen=True)
class Manifest:
    """All quantized tensors of a checkpoint, by state-dict name.

    digests: of all tensors, where they were recorded. base: what the checkpoint is a delta to; None: it is a full one.

    Example:
        ```python
        >>> dcp.save({"weight": torch.ones(4)}, checkpoint_id="dense", planner=QuantizedSavePlanner())
        >>> manifest = read_manifest("dense")
        >>> manifest.tensors, manifest.base  # nothing quantized, and a full checkpoint
        ({}, None)
        ```
    """

    tensors: Mapping[str, Entry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    digests: Mapping[str, str] = field(default_factory=dict)
    base: BaseLink | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the module docstring; it does not depend on the order of the tensors."""
        recipes: list[Recipe] = []
        # Tensors alike share a record: pickle writes it once into .metadata, which every rank unpickles at a load.
        records: dict[object, dict[str, Any]] = {}
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
            **({"base": dict(vars(self.base))} if self.base is not None else {}),
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Manifest":
        """Parse the manifest of a JSON object.

        Raises:
            ValueError: an unknown format version or recipe type, parts that are not those of the recipe, something in
                the place of digests, or something that is no manifest.
        """
        if not isinstance(record, Mapping):
            raise ValueError(
                f"the checkpoint's qtensor.manifest is malformed: it holds a {type(record).__name__}, expected an "
                f"object; {USE_ANOTHER}"
            )
        version = _version_of(record)
        try:
            recipes = [_parse_recipe(recipe) for recipe in record["recipes"]]
            tensors = _parse_tensors(record["tensors"], recipes)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint's qtensor.manifest is malformed: {type(error).__name__}: {error}; {USE_ANOTHER}"
            ) from error
        base = BaseLink.from_json(record.get("base")) if version == DELTA_VERSION else None
        return Manifest(tensors, version, _parse_digests(record.get("digests", {})), base)

    def to_tensor(self) -> Tensor:
        """uint8 [bytes]: UTF-8 JSON with sorted keys."""
        return tensor_of(self.to_json())

    @staticmethod
    def from_tensor(data: Tensor) -> "Manifest":
        """Undo `to_tensor`. Raises ValueError for bytes that are no manifest."""
        try:
            record = json.loads(bytes(data.tolist()).decode())
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: a tensor of something else than bytes
            raise ValueError(f"the checkpoint's qtensor.manifest is not JSON: {error}; {USE_ANOTHER}") from error
        return Manifest.from_json(record)


def tensor_of(record: Mapping[str, Any]) -> Tensor:
    """`Manifest.to_tensor` of what `Manifest.to_json` has made."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def manifest_of(metadata: Metadata) -> Manifest | None:
    """Return the manifest in a checkpoint's planner data; None if the storage dropped it or there is none."""
    data = metadata.planner_data
    record = data.get(MANIFEST_JSON) if isinstance(data, Mapping) else None
    return None if record is None else Manifest.from_json(record)


def mark_converted(metadata: Metadata, names: Iterable[str]) -> None:
    """Say in the planner data which tensors were converted, and their masters were not."""
    metadata.planner_data[MANIFEST_JSON][CONVERTED] = sorted(names)


def converted_names(metadata: Metadata) -> frozenset[str]:
    """Return the names of the tensors that `mark_converted` was told."""
    data = metadata.planner_data
    record = data.get(MANIFEST_JSON) if isinstance(data, Mapping) else None
    names = record.get(CONVERTED) if isinstance(record, Mapping) else None
    return frozenset(name for name in names if type(name) is str) if isinstance(names, list) else frozenset()


def with_base(manifest: Manifest, base: BaseLink) -> Manifest:
    """Return the manifest of the same state as a delta to a full checkpoint."""
    return replace(manifest, format_version=DELTA_VERSION, base=base)


def base_of(metadata: Metadata) -> BaseLink | None:
    """Return what a checkpoint's planner data say that it is a delta to; None for a full one. Parses nothing else."""
    data = metadata.planner_data
    record = data.get(MANIFEST_JSON) if isinstance(data, Mapping) else None
    if not isinstance(record, Mapping) or _version_of(record) != DELTA_VERSION:
        return None
    return BaseLink.from_json(record.get("base"))


def _version_of(record: Mapping[str, Any]) -> int:
    version = record.get("format_version")
    if type(version) is not int or version not in (FORMAT_VERSION, DELTA_VERSION):
        raise ValueError(
            f"the checkpoint's qtensor.manifest has format_version {short(version)}; this library reads versions "
            f"{FORMAT_VERSION} and {DELTA_VERSION}. Use a library version that knows it"
        )
    return version


def _parse_recipe(value: Any) -> Recipe:
    try:
        return Recipe.from_json(value)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint's qtensor.manifest has a recipe that can not be read: {error}; use a library version "
            "that knows it, or another checkpoint"
        ) from error


def _parse_tensors(records: Mapping[str, Any], recipes: list[Recipe]) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    # By the record itself, which tensors alike share (to_json), also when unpickled: a model
    # of many experts has few of them, and each is parsed once.
    parsed: dict[int, Entry] = {}
    for name, record in records.items():
        like = parsed.get(id(record))
        if like is None or type(name) is not str:
            like = parsed[id(record)] = _parse_entry(name, record, recipes)
        tensors[name] = Entry(name, like.recipe, like.shape, like.dtype)
    return tensors


def _parse_entry(name: Any, value: Mapping[str, Any], recipes: list[Recipe]) -> Entry:
    index, dtype = value["recipe"], value["dtype"]
    if type(name) is not str or type(index) is not int or index < 0:
        raise TypeError(f"{short(name)} has the recipe {short(index)}, expected a name and the number of a recipe")
    if type(dtype) is not str or dtype not in DTYPES:
        raise TypeError(f"{short(dtype)} is no dtype that a quantized tensor can have")
    entry = Entry(name, recipes[index], _shape(value["shape"]), DTYPES[dtype])
    # The sizes of parts follow from a shape; a hostile one is refused before anyone takes memory for them.
    check_shape(entry.shape, recipes[index], f"the checkpoint's qtensor.manifest: {short(name)}", full=False)
    found = {part: (str(record["dtype"])[:64], _shape(record["shape"])) for part, record in value["parts"].items()}
    expected = {part: (dtype_name(dtype), shape) for part, (dtype, shape) in entry.parts().items()}
    if found != expected:
        raise ValueError(
            f"the checkpoint's qtensor.manifest lists parts {found} for {name}, expected {expected} of {entry.recipe}; "
            f"{USE_ANOTHER}"
        )
    return entry


def _parse_digests(value: Any) -> dict[str, str]:
    digests = dict(value) if isinstance(value, Mapping) else {"": value}
    wrong = [digest for digest in digests.values() if type(digest) is not str or not DIGEST.fullmatch(digest)]
    if wrong:
        raise ValueError(
            f"the checkpoint's qtensor.manifest has {short(wrong[0])} among its digests, expected 32 hex digits for "
            f"each tensor; {USE_ANOTHER}"
        )
    return digests


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) not in (list, tuple) or any(type(extent) is not int or not 0 <= extent < 2**63 for extent in value):
        raise TypeError(f"a shape is {short(value)}, expected a list of counts")
    return tuple(value)
