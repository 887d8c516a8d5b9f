"""Linears whose inputs are rotated at run time: which ones an export has, who can say so, and how it is said.

Their stored weights are W H, in blocks, and an engine has to make x H of x (qtensor/input_rotation.py). The
`transform_config` of compressed-tensors says this as a "hadamard" at the location "input", of the size head_dim: x
times Sylvester's matrix / sqrt(head_dim). It has a location "weight_input", too, which its loaders apply to the weights
that they find; ours are rotated already, so it is not written.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dcp_adapters.hf.layout import Layout
from dcp_adapters.hf.names import fused_sets
from dcp_adapters.words import listed


def check_rotations(rotated: Mapping[str, int], layout: Layout, modules: Sequence[str]) -> None:
    """Refuse a layout that cannot say that inputs are rotated, and linears that engines fuse and would rotate in part.

    Args:
        rotated: module -> block.
        layout: in which they are to be written.
        modules: of all linears.

    Raises:
        ValueError: one of both, by name.
    """
    if rotated and not layout.rotates:
        raise ValueError(
            f"{listed(rotated)}: the inputs are rotated at run time, which the layout {layout.name} cannot say, so "
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
    """What compressed-tensors reads: a group for each block, with the modules by name."""
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
