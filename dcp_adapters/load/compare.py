"""What keeps a checkpoint from being loaded into a target: a pure comparison over plain records, no tensor is touched.

Differences are sentences, one for each, naming the tensor, what the checkpoint holds and what the target expects; an
empty list means that the two fit.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_adapters.load.state_forms import WAY, counterpart, missing_option, parted_remainders
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.entry import Entry, owners_of
from dcp_adapters.records.expand import Leaf, entries_of
from dcp_adapters.records.manifest import MANIFEST, Manifest
from dcp_adapters.records.placements import placement_kind, placement_problem
from dcp_adapters.records.rotations import block_of, has_weight, markers_among, say_inputs, weight_beside
from fsdp_hooks.torch_private import without_torch_function

# Dtypes whose elements are the values themselves; float8 elements are codes under some scale.
VALUES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
SEVERED = "it is a slice of some columns, which is a copy: what is read into it would be lost; load the whole weight"
TOO_LATE = (
    "its storage keeps the recipe only in an entry that is read too late for a conversion, so load it with the recipe "
    "it was saved with"
)
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
OWN = frozenset({MANIFEST, CHECKSUMS})  # entries of the checkpoint's own
Container = tuple[Any, ...]  # where a leaf's dict or list stands in the nested dict
CONVERT = 'load with QuantizedLoadPlanner(on_mismatch="convert")'
BUILD_OR_CONVERT = f"build the target with the checkpoint's recipe, or {CONVERT}"


@dataclass(frozen=True)
class LoadTarget:
    """What is to be loaded.

    entries: the tensors; others: names of what is no tensor. paths: where each leaf stands in the nested dict.
    unfit: why a leaf cannot be loaded, whatever the checkpoint holds.
    """

    entries: Mapping[str, Entry]
    others: frozenset[str]
    paths: Mapping[str, tuple[Any, ...]]
    unfit: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(leaves: Mapping[str, Leaf], paths: Mapping[str, Any]) -> "LoadTarget":
        """Return the records of the leaves of a flattened state dict."""
        unfit: dict[str, str] = {}
        placed: dict[object, str | None] = {}  # kind of placement -> what is wrong with it
        # each attribute of a subclass would go through __torch_function__, thousands of times
        with without_torch_function():
            entries = entries_of(leaves)
            for name, leaf in leaves.items():
                problem, value = None, leaf.value
                if isinstance(value, DTensor) and leaf.place is None:
                    key = placement_kind(value)
                    if key not in placed:
                        placed[key] = placement_problem(value)
                    problem = placed[key]
                if problem is None and leaf.quantized is not None and leaf.quantized._lens.severed:
                    problem = SEVERED
                if problem is not None:
                    unfit[name] = problem
        places = {name: tuple(path) for name, path in paths.items()}
        return LoadTarget(entries, frozenset(leaves.keys() - entries.keys()), places, unfit)


def differences(
    target: LoadTarget, metadata: Metadata, manifest: Manifest | None, *, partial: bool, convert: bool = False
) -> list[str]:
    """Return all differences of what the target has; for what it has not, see `lacking`.

    `partial` permits tensors that the checkpoint has not, `convert` differences that a conversion bridges; `manifest`
    is None if the storage dropped it.
    """
    stored = metadata.state_dict_metadata
    rotations = rotation_differences(target, metadata)
    problems = [f"{name}: {problem}" for name, problem in target.unfit.items()] + [*rotations.values()]
    for want in target.entries.values():
        # told by the rotation, which says why: a second sentence about the marker would only confuse
        if want.name in rotations:
            continue
        held = _record_of(want.name, metadata, manifest)
        if isinstance(held, Entry):
            problems += _compare(want, held, stored, convert=convert)
        elif held is not None:
            problems.append(_say_no_tensor(want, convert=convert))
        else:
            problems += _compare_unlisted(want, stored, partial=partial, dropped=manifest is None)
    if not partial:
        problems += [missing_option(name) for name in target.others if name not in stored]
    if convert:
        problems += parted_remainders(target.entries, to_convert(target, metadata, manifest).keys())
    return sorted(problems)


def rotation_differences(target: LoadTarget, metadata: Metadata) -> dict[str, str]:
    """Return the linears whose inputs one side rotates at run time, and the other not, or in different blocks.

    They are looked for only if both sides have the weight. They count in a partial load, too: the model would compute
    something else.

    Returns:
        Name of the entry that says so -> the difference.

    Raises:
        ValueError: an entry of that name has another form.
    """
    stored = metadata.state_dict_metadata
    problems = {}
    for name in sorted(markers_among(target.entries, stored)):
        want, held = target.entries.get(name), _record_of(name, metadata, None)
        if not (has_weight(name, target.entries) and has_weight(name, stored)):
            continue
        if (want and want.format) != (held.format if isinstance(held, Entry) else held):
            on_disk, own = (block_of(side) if isinstance(side, Entry) else 0 for side in (held, want))
            problems[name] = (
                f"{weight_beside(name)}: the checkpoint has it for {say_inputs(on_disk)}, the target for "
                f"{say_inputs(own)}; layerwise.rotate_inputs_ gives a model that is built anew the rotations of its "
                "checkpoint"
            )
    return problems


def to_convert(target: LoadTarget, metadata: Metadata, manifest: Manifest | None) -> dict[str, Entry]:
    """Return name -> how the checkpoint holds it, for the tensors to convert, in the order of the target."""
    names = {}
    for name in target.paths:
        want = target.entries.get(name)
        held = None if want is None else _record_of(name, metadata, manifest)
        if want is not None and isinstance(held, Entry) and held.recipe != want.recipe:
            names[name] = held
    return names


def recipe_differences(target: LoadTarget, manifest: Manifest) -> list[str]:
    """Return differences in recipe and shape of tensors that both sides hold quantized; the manifest came late."""
    problems = []
    for name, want in target.entries.items():
        held = manifest.tensors.get(name)
        if want.recipe is not None and held is not None:
            problems += _compare_recipes(want, held, TOO_LATE) + _compare_shapes(want, held)
    return sorted(problems)


def stored_names(target: LoadTarget, metadata: Metadata, manifest: Manifest | None) -> list[str]:
    """Return the tensors of the target that the checkpoint has, in one form or another."""
    stored = metadata.state_dict_metadata
    # if the storage dropped the manifest, only the names of its parts tell of a quantized weight
    return [
        name
        for name in target.entries
        if _record_of(name, metadata, manifest) is not None or f"{name}.payload" in stored
    ]


def _record_of(name: str, metadata: Metadata, manifest: Manifest | None) -> Any:
    """Return how the checkpoint holds a name: a tensor's entry, DCP's record of anything else, or None."""
    listed = manifest.tensors.get(name) if manifest is not None else None
    found = metadata.state_dict_metadata.get(name)
    if listed is not None or not isinstance(found, TensorStorageMetadata):
        return listed or found
    return Entry(name, None, tuple(found.size), found.properties.dtype)


def _compare(want: Entry, held: Entry, stored: Mapping[str, Any], *, convert: bool) -> list[str]:
    """Return the differences of a tensor that both sides have."""
    if held.recipe == want.recipe:
        if want.recipe is None:
            return _compare_shapes(want, held) + _compare_dtypes(want.name, held.dtype, want.dtype)
        return _compare_shapes(want, held) or _compare_parts(want, stored)
    if not convert:
        problems = _compare_recipes(want, held, BUILD_OR_CONVERT)
        return (
            problems + _compare_shapes(want, held) if want.recipe is not None and held.recipe is not None else problems
        )
    # float8 elements without a scale are codes: there are no values to convert
    for side in (held, want):
        if side.recipe is None and side.dtype not in VALUES:
            return [_say_no_values(want, held)]
    return _compare_shapes(want, held) or _compare_parts(held, stored)


def _compare_recipes(want: Entry, held: Entry, way_out: str) -> list[str]:
    """Compare recipes; return the difference, if there is one, and what to do."""
    if held.recipe == want.recipe:
        return []
    if held.recipe is None:
        way_out = f"{CONVERT}, or into a dense model"
        return [f"{want.name}: the checkpoint holds a dense tensor, the target is quantized ({want.recipe}); {way_out}"]
    if want.recipe is None:
        held_as = f"{want.name}: the checkpoint holds it quantized ({held.recipe})"
        return [f"{held_as}, the target is dense; build the target with that recipe, or {CONVERT}"]
    return [f"{want.name}: the checkpoint holds {held.recipe}, the target is {want.recipe}; {way_out}"]


def _say_no_values(want: Entry, held: Entry) -> str:
    """Say that one side is dense and its elements are no values, so that nothing can be converted."""
    if held.recipe is None:
        return f"{want.name}: the checkpoint holds {held.dtype}, which can not be converted to {want.recipe}"
    what = f"the checkpoint holds it quantized ({held.recipe})"
    return f"{want.name}: {what}, which can not be converted to {want.dtype}"


def _say_no_tensor(want: Entry, *, convert: bool) -> str:
    """Say that the checkpoint has something else than a tensor under the name."""
    if want.recipe is None:
        return f"{want.name}: the checkpoint holds no tensor, the target is a tensor of shape {want.shape}"
    if convert:
        return f"{want.name}: the checkpoint holds no tensor, which can not be converted to {want.recipe}"
    return _compare_recipes(want, replace(want, recipe=None), BUILD_OR_CONVERT)[0]


def _compare_unlisted(want: Entry, stored: Mapping[str, Any], *, partial: bool, dropped: bool) -> list[str]:
    """Return the differences of a tensor that neither manifest nor metadata name; its parts may be there."""
    if want.recipe is not None and any(key in stored for key in want.part_keys()):
        return _compare_parts(want, stored)
    if want.recipe is None and dropped and MANIFEST in stored and f"{want.name}.payload" in stored:
        return [f"{want.name}: the checkpoint holds it quantized, the target is dense; {TOO_LATE}"]
    # also in a partial load: the rest of the state would be of another step
    if (other := counterpart(want.name, stored)) is not None:
        return [f"{want.name}: the checkpoint holds {other} in its place; {WAY}"]
    return [] if partial else [f"{want.name}: missing in the checkpoint"]


def _compare_parts(entry: Entry, stored: Mapping[str, Any]) -> list[str]:
    """Return which parts of an entry are not stored as they should be."""
    parts = entry.stored()
    missing = [key for key in parts if key not in stored]
    if missing:
        return [f"{entry.name}: the checkpoint lacks {', '.join(missing)}; use another one"]
    problems = []
    for key, (dtype, shape) in parts.items():
        found, held = stored[key], "no tensor"
        if isinstance(found, TensorStorageMetadata):
            if (found.properties.dtype, tuple(found.size)) == (dtype, shape):
                continue
            held = f"{found.properties.dtype} {tuple(found.size)}"
        problems.append(f"{key}: the checkpoint holds {held}, the target needs {dtype} {shape}")
    return problems


def _compare_dtypes(name: str, held: torch.dtype, wanted: torch.dtype) -> list[str]:
    """Compare dtypes; return the difference unless a cast keeps the values. DCP casts whatever it reads."""
    if held == wanted or (held in VALUES and wanted in VALUES):
        return []
    if held in INTEGERS and wanted in INTEGERS:
        (least, most), (lowest, highest) = _range(held), _range(wanted)
        if lowest <= least and most <= highest:
            return []
    return [f"{name}: the checkpoint holds {held}, the target is {wanted}; a cast would not keep what the values mean"]


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _compare_shapes(want: Entry, held: Entry) -> list[str]:
    if held.shape == want.shape:
        return []
    return [f"{want.name}: the checkpoint holds shape {held.shape}, the target has {want.shape}"]


def lacking(target: LoadTarget, metadata: Metadata, manifest: Manifest | None) -> dict[str, Container]:
    """Return tensors of the checkpoint that stand in a container of the target and have no counterpart there.

    Another rank's target may have them: see together.py.

    Returns:
        Name -> the container.
    """
    containers = {target.paths[name][:-1] for name in target.entries}
    if not _paths_in(metadata) and containers != {()}:
        # the storage dropped the paths: which container an entry belongs to is not known
        return {}
    expected = target.entries.keys() | owners_of(target.entries.values()).keys()
    found = {
        name: container
        for key, name, container in _in_containers(containers, metadata, manifest)
        if key not in expected and name not in expected and counterpart(name, expected) is None
    }
    # the marker of a rotation is an entry, too; `differences` says more of it
    known = rotation_differences(target, metadata) if found else {}
    return {name: container for name, container in found.items() if name not in known}


def not_among(
    had: Collection[str], containers: Collection[Container], metadata: Metadata, manifest: Manifest | None
) -> list[str]:
    """Return the tensors of the checkpoint in these containers whose entry and name are not in `had`."""
    found = _in_containers(containers, metadata, manifest)
    return sorted({name for key, name, _ in found if key not in had and name not in had})


def owners_in(manifest: Manifest | None) -> dict[str, str]:
    """Return entry of a part -> the tensor that it is a part of."""
    return owners_of(manifest.tensors.values()) if manifest else {}


def _in_containers(
    containers: Collection[Container], metadata: Metadata, manifest: Manifest | None
) -> Iterator[tuple[str, str, Container]]:
    """Yield entry, tensor and container of all tensors of the checkpoint that stand in one of these containers."""
    saved_paths = _paths_in(metadata)
    owners = owners_in(manifest)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and key not in OWN:
            container = _container(key, tuple(saved_paths.get(key, (key,))), owners)
            if container in containers:
                yield key, owners.get(key, key), container


def _paths_in(metadata: Metadata) -> Mapping[str, Any]:
    """Return entry -> its path in the nested dict that was saved; nothing if the storage dropped them."""
    return metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}


def _container(name: str, path: tuple[Any, ...], owners: Mapping[str, str]) -> Container:
    """Return where in the nested dict a tensor stood.

    A part stands where its weight did; the path of a part of a weight in a list is one longer: (.., 0, "payload").
    """
    in_list = name in owners and path[-1] == name[len(owners[name]) + 1 :]
    return path[:-2] if in_list else path[:-1]
