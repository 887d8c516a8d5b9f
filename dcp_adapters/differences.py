"""What keeps a checkpoint from being loaded into a target: a pure comparison over plain records, no tensor is touched.

Every function returns sentences, one for each difference, naming the tensor, what the checkpoint holds and what the
target expects; an empty list means that the two fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_adapters.checksums import CHECKSUMS
from dcp_adapters.expand import quantized_local
from dcp_adapters.manifest import MANIFEST, Manifest, TensorEntry

__all__ = ["Target", "differences", "recipe_differences"]


@dataclass(frozen=True)
class Target:
    """What is to be loaded.

    quantized, dense: the quantized tensors, and the shapes of the other ones; others: names of what is no tensor.
    paths: where each leaf stands in the nested dict.
    """

    quantized: Mapping[str, TensorEntry]
    dense: Mapping[str, tuple[int, ...]]
    others: frozenset[str]
    paths: Mapping[str, tuple[Any, ...]]

    @staticmethod
    def of(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> "Target":
        """The records of a flattened state dict."""
        quantized, dense, others = {}, {}, set()
        for name, value in flat.items():
            q = quantized_local(value)
            if q is not None:
                quantized[name] = TensorEntry(q.recipe.stored, tuple(value.shape), q.dtype)
            elif isinstance(value, Tensor):
                dense[name] = tuple(value.shape)
            else:
                others.add(name)
        return Target(quantized, dense, frozenset(others), {name: tuple(path) for name, path in paths.items()})


def differences(target: Target, metadata: Metadata, manifest: Manifest | None, *, partial: bool) -> list[str]:
    """All differences.

    `partial` permits tensors that only one side has; `manifest` is None where the storage dropped it.
    """
    stored = metadata.state_dict_metadata
    problems: list[str] = []
    for name, want in target.quantized.items():
        problems += _quantized(name, want, stored, manifest, partial=partial)
    for name, shape in target.dense.items():
        problems += _dense(name, shape, stored, manifest, partial=partial)
    if not partial:
        problems += [f"{name}: missing in the checkpoint" for name in target.others if name not in stored]
        problems += _extra(target, metadata, manifest)
    return sorted(problems)


def recipe_differences(target: Target, manifest: Manifest) -> list[str]:
    """Differences in recipe and shape of tensors that both sides have quantized."""
    return sorted(
        problem
        for name, want in target.quantized.items()
        if (found := manifest.tensors.get(name)) is not None
        for problem in _against(name, want, found)
    )


def _against(name: str, want: TensorEntry, found: TensorEntry) -> list[str]:
    problems = []
    if found.recipe != want.recipe:
        problems.append(
            f"{name}: the checkpoint holds {found.recipe}, the target is {want.recipe}; build the target with the "
            "checkpoint's recipe"
        )
    if found.shape != want.shape:
        problems.append(f"{name}: the checkpoint holds shape {found.shape}, the target has {want.shape}")
    return problems


def _quantized(
    name: str, want: TensorEntry, stored: Mapping[str, Any], manifest: Manifest | None, *, partial: bool
) -> list[str]:
    parts = {f"{name}.{part}": spec for part, spec in want.parts().items()}
    found = manifest.tensors.get(name) if manifest is not None else None
    if found is not None and (problems := _against(name, want, found)):
        return problems
    if name in stored:
        found_dense = "the checkpoint holds a dense tensor"
        return [
            f"{name}: {found_dense}, the target is quantized ({want.recipe}); load into a dense model, then quantize"
        ]
    missing = [part for part in parts if part not in stored]
    if len(missing) == len(parts):
        return [] if partial else [f"{name}: missing in the checkpoint"]
    if missing:
        return [f"{name}: the checkpoint lacks {', '.join(missing)}"]
    problems = []
    for part, (dtype, shape) in parts.items():
        entry = stored[part]
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
            problems.append(f"{part}: the checkpoint holds {held}, the target needs {dtype} {shape}")
    return problems


def _dense(
    name: str, shape: tuple[int, ...], stored: Mapping[str, Any], manifest: Manifest | None, *, partial: bool
) -> list[str]:
    entry = stored.get(name)
    if isinstance(entry, TensorStorageMetadata):
        if tuple(entry.size) != shape:
            return [f"{name}: the checkpoint holds shape {tuple(entry.size)}, the target has {shape}"]
        return []
    if entry is not None:
        return [f"{name}: the checkpoint holds no tensor, the target is a tensor of shape {shape}"]
    found = manifest.tensors.get(name) if manifest is not None else None
    if found is not None:
        held = f"the checkpoint holds it quantized ({found.recipe})"
        return [f"{name}: {held}, the target is dense; build the target with that recipe"]
    return [] if partial else [f"{name}: missing in the checkpoint"]


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
