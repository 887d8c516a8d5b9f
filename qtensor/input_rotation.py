"""Linears whose inputs are rotated at run time, block by block, because their weights were rotated for good.

    W H      the stored weight: each block of `block` columns times Sylvester's Hadamard matrix / sqrt(block)
    x H      what reaches it: a forward pre-hook makes it of x, so F.linear(x H, W H) = x H H^T W^T = F.linear(x, W)

H has no random signs: it is what engines make of `"type": "hadamard"` with a `head_dim` in the `transform_config` of
compressed-tensors, whose matrix is Sylvester's, divided by sqrt(head_dim) as it is applied.

A module knows its block by an attribute, which copies, pickles and FSDP2 keep. So does its weight in a state dict:
keys are those of any other model, and whoever saves or exports it finds the block there. A copy of the tensor that
somebody makes (a full or offloaded state dict of torch's) does not have it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTE = "input_rotation"
COMPILED = "_orig_mod."  # what torch.compile(module) puts into names


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
    """The hook of state_dict() that notes the block at the weight; torch sets an attribute on such hooks."""

    block: int

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        if f"{prefix}weight" in state_dict:
            noted(state_dict[f"{prefix}weight"], self.block)


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


def noted(weight: Tensor, block: int) -> Tensor:
    """The same tensor, with a note that it is the weight of a linear whose inputs are rotated."""
    setattr(weight, ATTRIBUTE, block)
    return weight


def noted_block(value: Any) -> int:
    """The block that is noted at a tensor, 0 where there is none."""
    return getattr(value, ATTRIBUTE, 0) if isinstance(value, Tensor) else 0


def noted_rotations(flat: Mapping[str, Any]) -> dict[str, int]:
    """Module -> block, of a flat state dict; by the names that modules have before they are compiled."""
    return {module_of(name): block for name, value in flat.items() if (block := noted_block(value))}


def module_of(name: str) -> str:
    """The fqn of the module whose weight has this name, as it was before it was compiled."""
    return f".{name}".replace(COMPILED, "").removesuffix(".weight").removeprefix(".")
