"""Linears whose inputs are rotated at run time, block by block, because their weights were rotated for good.

    W H      the stored weight: each block of `block` columns times Sylvester's Hadamard matrix / sqrt(block)
    x H      what reaches it: a forward pre-hook makes it of x, so F.linear(x H, W H) = x H H^T W^T = F.linear(x, W)

H has no random signs: it is what engines make of `"type": "hadamard"` with a `head_dim` in the `transform_config` of
compressed-tensors, whose matrix is Sylvester's, divided by sqrt(head_dim) as it is applied.

A module knows its block by an attribute, which copies, pickles and FSDP2 keep. A state dict knows it by its
`_metadata`, where torch keeps what belongs to a module and is no tensor: its keys are those of any other model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTE = "input_rotation"


def hadamard(values: Tensor, block: int) -> Tensor:
    """Each block of the last dim times Sylvester's matrix / sqrt(block), in the dtype of `values` [..., width]."""
    shape, half = values.shape, 1
    while half < block:
        pairs = values.reshape(-1, 2, half)
        values = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        half *= 2
    return values.mul(1 / math.sqrt(block)).reshape(shape)


@dataclass(frozen=True)
class InputRotation:
    """The forward pre-hook of a linear that rotates its input: in fp32 (fp64 for fp64), rounded to the input's dtype.

    block: size of the Hadamard matrices, a power of two.
    """

    block: int

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `module` with a rotated input."""
        if args:
            return (self.rotated(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self.rotated(kwargs["input"])}

    def rotated(self, values: Tensor) -> Tensor:
        """Values [..., K] in their dtype.

        Raises:
            ValueError: the block does not divide K, as where tensor parallelism cuts a block.
        """
        if values.shape[-1] % self.block:
            raise ValueError(
                f"a linear whose inputs are rotated in blocks of {self.block} got {values.shape[-1]} channels, which "
                "are no whole blocks; shard it along K by whole blocks, or take a smaller block"
            )
        wide = values if values.dtype == torch.float64 else values.float()
        return hadamard(wide, self.block).to(values.dtype)


@dataclass
class _Note:
    """The hook of state_dict() that writes the block into `_metadata`; torch sets an attribute on such hooks."""

    block: int

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        local_metadata[ATTRIBUTE] = self.block


def rotate_inputs_of(module: nn.Module, block: int) -> Callable[[], None]:
    """Rotate the inputs of a linear from now on. Returns what undoes it."""
    handles = (
        module.register_forward_pre_hook(InputRotation(block), with_kwargs=True),
        module.register_state_dict_post_hook(_Note(block)),
    )
    setattr(module, ATTRIBUTE, block)

    def undo() -> None:
        delattr(module, ATTRIBUTE)
        for handle in handles:
            handle.remove()

    return undo


def input_rotations(model: nn.Module) -> dict[str, int]:
    """Fqn of each linear whose inputs are rotated -> its block."""
    return {name: getattr(module, ATTRIBUTE) for name, module in model.named_modules() if hasattr(module, ATTRIBUTE)}


def noted_rotations(state_dict: Any) -> dict[str, int]:
    """The same of a state dict, nested or flat, by names that begin with the keys under which it is nested."""
    found: dict[str, int] = {}
    for module, record in getattr(state_dict, "_metadata", {}).items():
        if isinstance(record, Mapping) and ATTRIBUTE in record:
            found[module] = record[ATTRIBUTE]
    if isinstance(state_dict, Mapping):
        for key, value in state_dict.items():
            if isinstance(value, Mapping):
                found |= {f"{key}.{module}".rstrip("."): block for module, block in noted_rotations(value).items()}
    return found
