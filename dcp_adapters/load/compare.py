"""What keeps a checkpoint from being loaded into a target: a pure comparison over plain records, no tensor is touched.

Every function returns sentences, one for each difference, naming the tensor, what the checkpoint holds and what the
target expects; an empty list means that the two fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_adapters.checksums import CHECKSUMS
from dcp_adapters.expand import quantized_local
from dcp_adapters.load.placements import placement_problem
from dcp_adapters.manifest import MANIFEST, Manifest, TensorEntry
from qtensor.contents import lens_of

# Dtypes whose elements are the values themselves; float8 elements are codes under some scale.
VALUES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
SEVERED = "it is a slice of some columns, which is a copy: what is read into it would be lost; load the whole weight"
TOO_LATE = (
    "its storage keeps the recipe only in an entry that is read too late for a conversion, so load it with the recipe "
    "it was saved with"
)
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
CONVERT = 'load with QuantizedLoadPlanner(on_mismatch="convert")'
BUILD_OR_CONVERT = f"build the target with the checkpoint's recipe, or {CONVERT}"


@dataclass(frozen=True)
class Dense:
    """A dense tensor of the target."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Target:
    """What is to be loaded.

    quantized, dense: the quantized tensors, and the other ones; others: names of what is no tensor.
    paths: where each leaf stands in the nested dict. unfit: why a leaf can not be loaded, whatever the
    checkpoint holds.
    """

    quantized: Mapping[str, TensorEntry]
    dense: Mapping[str, Dense]
    others: frozenset[str]
    paths: Mapping[str, tuple[Any, ...]]
    unfit: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> "Target":
        """The records of a flattened state dict."""
        quantized, dense, others, unfit = {}, {}, set(), {}
        for name, value in flat.items():
            q = quantized_local(value)
            severed = q is not None and lens_of(q).severed
            problem = placement_problem(value) or (SEVERED if severed else None)
            if problem is not None:
                unfit[name] = problem
            if q is not None:
                quantized[name] = TensorEntry(q.recipe.stored, tuple(value.shape), q.dtype)
            elif isinstance(value, Tensor):
                dense[name] = Dense(tuple(value.shape), value.dtype)
            else:
                others.add(name)
        return Target(quantized, dense, frozenset(others), {name: tuple(path) for name, path in paths.items()}, unfit)


def differences(
    target: Target, metadata: Metadata, manifest: Manifest | None, *, partial: bool, convert: bool = False
) -> list[str]:
    """All differences.

    `partial` permits tensors that only one side has, `convert` those that a conversion bridges; `manifest` is None
    where the storage dropped it.
    """
    stored = metadata.state_dict_metadata
    problems = [f"{name}: {problem}" for name, problem in target.unfit.items()]
    for name, want in target.quantized.items():
        problems += _quantized(name, want, stored, manifest, partial=partial, convert=convert)
    for name, dense in target.dense.items():
        problems += _dense(name, dense, stored, manifest, partial=partial, convert=convert)
    if not partial:
        problems += [f"{name}: missing in the checkpoint" for name in target.others if name not in stored]
        problems += _extra(target, metadata, manifest)
    return sorted(problems)


def to_convert(target: Target, metadata: Metadata, manifest: Manifest | None) -> dict[str, TensorEntry | None]:
    """The tensors to convert, by name: how the checkpoint holds them, None for dense. In the order of the target."""
    found = manifest.tensors if manifest is not None else {}
    names: dict[str, TensorEntry | None] = {}
    for name in target.paths:
        want, held = target.quantized.get(name), found.get(name)
        if want is not None and held is not None and held.recipe != want.recipe:
            names[name] = held
        elif want is not None and held is None and name in metadata.state_dict_metadata:
            names[name] = None
        elif name in target.dense and held is not None:
            names[name] = held
    return names


def recipe_differences(target: Target, manifest: Manifest) -> list[str]:
    """Differences in recipe and shape of tensors that both sides have quantized, where the manifest comes late."""
    return sorted(
        problem
        for name, want in target.quantized.items()
        if (found := manifest.tensors.get(name)) is not None
        for problem in _against(name, want, found, convert=False, way_out=TOO_LATE)
    )


def _against(
    name: str, want: TensorEntry, found: TensorEntry, *, convert: bool, way_out: str = BUILD_OR_CONVERT
) -> list[str]:
    problems = []
    if found.recipe != want.recipe and not convert:
        problems.append(f"{name}: the checkpoint holds {found.recipe}, the target is {want.recipe}; {way_out}")
    return problems + _shapes(name, found.shape, want.shape)


def _quantized(  # noqa: PLR0913 - one comparison
    name: str,
    want: TensorEntry,
    stored: Mapping[str, Any],
    manifest: Manifest | None,
    *,
    partial: bool,
    convert: bool,
) -> list[str]:
    found = manifest.tensors.get(name) if manifest is not None else None
    if found is not None and (found.recipe != want.recipe or found.shape != want.shape):
        return _against(name, want, found, convert=convert) or _missing_parts(name, found, stored)
    if name in stored and found is None:
        return _dense_source(name, want, stored[name], convert=convert)
    parts = {f"{name}.{part}": spec for part, spec in want.parts().items()}
    missing = [part for part in parts if part not in stored]
    if len(missing) == len(parts):
        return [] if partial else [f"{name}: missing in the checkpoint"]
    if missing:
        return [f"{name}: the checkpoint lacks {', '.join(missing)}"]
    return _other_parts(want, name, stored)


def _dense_source(name: str, want: TensorEntry, entry: Any, *, convert: bool) -> list[str]:
    """Why a dense entry can not become the quantized target."""
    if not convert:
        held = "the checkpoint holds a dense tensor"
        return [f"{name}: {held}, the target is quantized ({want.recipe}); {CONVERT}, or into a dense model"]
    if not isinstance(entry, TensorStorageMetadata) or entry.properties.dtype not in VALUES:
        dtype = entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else "no tensor"
        return [f"{name}: the checkpoint holds {dtype}, which can not be converted to {want.recipe}"]
    return _shapes(name, tuple(entry.size), want.shape)


def _missing_parts(name: str, found: TensorEntry, stored: Mapping[str, Any]) -> list[str]:
    """What a conversion would read of a quantized source and the checkpoint does not hold as its manifest says."""
    missing = [f"{name}.{part}" for part in found.parts() if f"{name}.{part}" not in stored]
    if missing:
        return [f"{name}: the checkpoint lacks {', '.join(missing)}"]
    return _other_parts(found, name, stored)


def _other_parts(want: TensorEntry, name: str, stored: Mapping[str, Any]) -> list[str]:
    problems = []
    for part, (dtype, shape) in want.parts().items():
        entry = stored[f"{name}.{part}"]
        if (
            not isinstance(entry, TensorStorageMetadata)
            or entry.properties.dtype != dtype
            or tuple(entry.size) != shape
        ):
            held = (
                f"{entry.properties.dtype} {tuple(entry.size)}"
                if isinstance(entry, TensorStorageMetadata)
                else "no tensor"
            )
            problems.append(f"{name}.{part}: the checkpoint holds {held}, the target needs {dtype} {shape}")
    return problems


def _dense(  # noqa: PLR0913 - one comparison
    name: str, want: Dense, stored: Mapping[str, Any], manifest: Manifest | None, *, partial: bool, convert: bool
) -> list[str]:
    entry = stored.get(name)
    if entry is not None and not isinstance(entry, TensorStorageMetadata):
        return [f"{name}: the checkpoint holds no tensor, the target is a tensor of shape {want.shape}"]
    if entry is not None:
        return _shapes(name, tuple(entry.size), want.shape) + _dtypes(name, entry.properties.dtype, want.dtype)
    found = manifest.tensors.get(name) if manifest is not None else None
    if found is not None:
        return _quantized_source(name, want, found, stored, convert=convert)
    if manifest is None and MANIFEST in stored and f"{name}.payload" in stored:
        return [f"{name}: the checkpoint holds it quantized, the target is dense; {TOO_LATE}"]
    return [] if partial else [f"{name}: missing in the checkpoint"]


def _quantized_source(
    name: str, want: Dense, found: TensorEntry, stored: Mapping[str, Any], *, convert: bool
) -> list[str]:
    """Why a quantized tensor of the checkpoint can not become the dense target."""
    held = f"the checkpoint holds it quantized ({found.recipe})"
    if not convert:
        return [f"{name}: {held}, the target is dense; build the target with that recipe, or {CONVERT}"]
    if want.dtype not in VALUES:
        return [f"{name}: {held}, which can not be converted to {want.dtype}"]
    return _shapes(name, found.shape, want.shape) or _missing_parts(name, found, stored)


def _dtypes(name: str, held: torch.dtype, wanted: torch.dtype) -> list[str]:
    """DCP casts whatever it reads; codes that need a scale, and integers, do not become values by a cast."""
    if held == wanted or (held in VALUES and wanted in VALUES):
        return []
    if held in INTEGERS and wanted in INTEGERS and _range(held) <= _range(wanted):
        return []
    return [f"{name}: the checkpoint holds {held}, the target is {wanted}; a cast would not keep what the values mean"]


def _range(dtype: torch.dtype) -> "_Range":
    info = None if dtype == torch.bool else torch.iinfo(dtype)
    return _Range(0, 1) if info is None else _Range(info.min, info.max)


@dataclass(frozen=True)
class _Range:
    least: int
    most: int

    def __le__(self, other: "_Range") -> bool:
        return other.least <= self.least and self.most <= other.most


def _shapes(name: str, held: tuple[int, ...], wanted: tuple[int, ...]) -> list[str]:
    return [] if held == wanted else [f"{name}: the checkpoint holds shape {held}, the target has {wanted}"]


def _extra(target: Target, metadata: Metadata, manifest: Manifest | None) -> list[str]:
    """Tensors of the checkpoint that stand in a container of the target without having a counterpart there."""
    saved_paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    tensors = target.quantized.keys() | target.dense.keys()
    containers = {target.paths[name][:-1] for name in tensors}
    if not saved_paths and containers != {()}:
        return []  # the storage dropped the paths: which container an entry belongs to is not known
    expected = set(tensors) | {f"{name}.{part}" for name, want in target.quantized.items() for part in want.parts()}
    owners = {
        f"{name}.{part}": name
        for name, entry in (manifest.tensors if manifest else {}).items()
        for part in entry.parts()
    }
    extra = {
        owners.get(name, name)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and name not in {MANIFEST, CHECKSUMS}
        and name not in expected
        and owners.get(name, name) not in expected
        and _container(name, tuple(saved_paths.get(name, (name,))), owners) in containers
    }
    return [
        f"{name}: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)"
        for name in extra
    ]


def _container(name: str, path: tuple[Any, ...], owners: Mapping[str, str]) -> tuple[Any, ...]:
    """Where in the nested dict a tensor stood.

    A part stands where its weight did, which in a list is one step up: (.., 0, "payload").
    """
    in_list = name in owners and path[-1] == name[len(owners[name]) + 1 :]
    return path[:-2] if in_list else path[:-1]
