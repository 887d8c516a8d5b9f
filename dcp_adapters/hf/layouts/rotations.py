"""Linears whose inputs are rotated at run time: which ones an export has, who can say so, and how it is said and read.

Their stored weights are W H, in blocks, and an engine has to make x H of x (qtensor/products/input_rotation.py). The
`transform_config` of compressed-tensors says this as a "hadamard" at the location "input", of the size head_dim: x
times Sylvester's matrix / sqrt(head_dim). It has a location "weight_input", too, which its loaders apply to the weights
that they find; ours are rotated already, so it is not written.

    transform_config(rotated)       what an export writes
    said_rotations(transforms)      the same, read: what is said, and what of it the library cannot do exactly
    said_markers(directory, ...)    an entry `<module>.input_rotation` for each linear that a directory says it of

Engines may read more than that (matrices of other kinds, other locations, targets that are patterns or classes). All of
it is refused by name: a model that leaves one transform out computes something else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.hf.files.config_sections import said_of_quantization
from dcp_adapters.hf.files.directory import CONFIG, Directory, FileTensor
from dcp_adapters.hf.files.engine_names import fused_sets
from dcp_adapters.hf.layouts.layout import Layout
from dcp_adapters.plain.words import few_of, in_lines, short
from qtensor.products.input_rotation import MARKER, is_size, marker

# What compressed-tensors takes for what is not said. Sylvester's matrix / sqrt(block) is its own inverse.
SCHEME = {"randomize": False, "requires_grad": False, "precision": "torch.float32"}
APPLY = {"inverse": False, "ignore": []}
READS = 'type "hadamard" with head_dim and precision "torch.float32", at the location "input" of linears by their names'


def check_rotations(rotated: Mapping[str, int], layout: Layout, modules: Sequence[str]) -> None:
    """Refuse a layout that cannot say that inputs are rotated, and linears that engines fuse and would rotate in part.

    Args:
        rotated: module -> block.
        layout: they are to be written in it.
        modules: of all linears.

    Raises:
        ValueError: one of both, by name.
    """
    if rotated and not layout.rotates:
        raise ValueError(
            f"{few_of(rotated)}: the inputs are rotated at run time, which the layout {layout.name} cannot say, so "
            'engines would compute something else; use layout="compressed-tensors"'
        )
    for members in fused_sets(modules):
        if len({rotated.get(module) for module in members}) > 1:
            told = ", ".join(f"{module}: {rotated.get(module, 'not at all')}" for module in members)
            raise ValueError(
                f"the inputs of these are rotated at run time in blocks of {told}; engines run them as one linear with "
                "one input: rotate those of all alike, or none"
            )


def transform_config(rotated: Mapping[str, int]) -> dict[str, Any]:
    """Return a `transform_config` that compressed-tensors reads: a group for each block, with the modules by name."""
    groups = {
        f"online_{block}": {
            "type": "hadamard",
            "apply": [
                {
                    "targets": [module for module, its in rotated.items() if its == block],
                    "location": "input",
                    "inverse": False,
                    "ignore": [],
                }
            ],
            "randomize": False,
            "requires_grad": False,
            "head_dim": block,
            "precision": "torch.float32",
        }
        for block in sorted(set(rotated.values()))
    }
    return {"config_groups": groups}


def said_rotations(transforms: Any) -> tuple[dict[str, int], list[str]]:
    """Map modules to blocks, as a `transform_config` says; and say in words what of it the library does not read."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not isinstance(groups, Mapping) or len(transforms) > 1:
        return {}, ["expected an object with config_groups, and nothing else"]
    rotated: dict[str, int] = {}
    problems: list[str] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("apply", []), list):
            problems.append(f"{name}: expected an object with a list apply")
            continue
        # What is not said has the default of compressed-tensors.
        scheme: dict[str, Any] = {**SCHEME, **group}
        problems += [f"{name}: {problem}" for problem in _scheme_problems(scheme)]
        for one in scheme.get("apply", []):
            targets, found = _targets(one)
            problems += [f"{name}: {problem}" for problem in found]
            problems += [f"{name}: {module} is a target twice" for module in targets if module in rotated]
            rotated |= {module: scheme.get("head_dim", 0) for module in targets}
    return rotated, problems


def _scheme_problems(scheme: Mapping[str, Any]) -> list[str]:
    """Return what the scheme of a group says that the library does not read."""
    expected = {"type": "hadamard", **SCHEME}
    problems = [
        f"{key} {short(scheme.get(key))}, expected {short(value)}"
        for key, value in expected.items()
        if scheme.get(key) != value
    ]
    if not is_size(scheme.get("head_dim")):
        problems.append(f"head_dim {short(scheme.get('head_dim'))}, expected a power of two from 2 on")
    problems += [f"{short(key)}, which is not known" for key in scheme.keys() - {*expected, "head_dim", "apply"}]
    return sorted(problems)


def _targets(said: Any) -> tuple[list[str], list[str]]:
    """Return the targets of one entry of apply, and what it says that the library does not read."""
    if not isinstance(said, Mapping):
        return [], [f"apply has {short(said)}, expected an object"]
    said = {**APPLY, **said}
    targets = [said["targets"]] if isinstance(said.get("targets"), str) else said.get("targets")
    problems = [f"{short(key)}, which is not known" for key in sorted(said.keys() - {*APPLY, "targets", "location"})]
    if said.get("location") != "input":
        problems.append(f"location {short(said.get('location'))}, expected 'input'")
    if not isinstance(said["inverse"], bool):
        problems.append(f"inverse {short(said['inverse'])}, expected true or false")
    if said["ignore"] != []:
        problems.append("targets that are ignored, expected none")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return [], [*problems, "targets, expected a list of names"]
    return targets, problems


def said_markers(
    directory: Directory, layout: Layout, shapes: Mapping[str, Sequence[int]], dense: Mapping[str, FileTensor]
) -> dict[str, FileTensor]:
    """Return a marker entry for each linear whose inputs are rotated, by the name that a state dict gives it.

    Args:
        directory: the linears are in it.
        layout: of these.
        shapes: module -> [N, K] of all that may be linears.
        dense: the tensors of the files that are no parts.

    Raises:
        ValueError: one error for all transforms that the library cannot do exactly, or that do not fit the linears.
    """
    transforms = (said_of_quantization(directory.config) or {}).get("transform_config")
    if not transforms:
        return {}
    rotated, problems = said_rotations(transforms)
    if not layout.rotates:
        problems.append(f"the quant_method {layout.name} has no transforms")
    markers = {}
    for module, block in rotated.items() if not problems else ():
        name = f"{module}.{MARKER}".lstrip(".")
        if module not in shapes:
            # The reader has left out modules that nobody asked for; their transforms concern nobody, either.
            if module not in directory.left_out:
                problems.append(
                    f"{short(module)}, of which the directory has no weight [N, K]; expected a module's name"
                )
        elif shapes[module][1] % block:
            problems.append(f"{module}: blocks of {block}, which do not divide its {shapes[module][1]} inputs")
        # A file may hold the marker, too; then both must say the same.
        elif name in dense and (dense[name].dtype, dense[name].shape) != ("U8", (block,)):
            problems.append(f"{module}: blocks of {block}, and {name} in {dense[name].file} is {dense[name]}")
        else:
            markers[name] = FileTensor(name, CONFIG, "U8", (block,))
    if problems:
        raise ValueError(
            f"{directory.path}: the transform_config of config.json says what the library does not read. It reads "
            f"{READS}. Weights with other transforms compute something else without them, so nothing has been loaded:"
            + in_lines(problems)
        )
    return markers


def said_tensor(tensor: FileTensor) -> Tensor:
    """Return the values of an entry of `said_markers`, which say nothing."""
    return marker(tensor.shape[0], torch.device("cpu"))
