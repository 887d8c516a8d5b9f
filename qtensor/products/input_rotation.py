"""Linears whose inputs are rotated at run time, block by block, because their weights were rotated for good.

    W H      the stored weight: each block of `block` columns times Sylvester's Hadamard matrix / sqrt(block)
    x H      what reaches it: a forward pre-hook makes it of x, so F.linear(x H, W H) = x H H^T W^T = F.linear(x, W)

H has no random signs: it is what engines make of `"type": "hadamard"` with a `head_dim` in the `transform_config` of
compressed-tensors, whose matrix is Sylvester's, divided by sqrt(head_dim) as it is applied.

The module has a buffer, `input_rotation`, uint8 [block], beside the hook. It is in every state dict, so whoever copies,
saves, loads or exports that one sees whose inputs are rotated, and a model that does not rotate them does not fit. Its
name and its shape say everything. Its values say nothing: nobody reads them, and they need none on the meta device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.wrappers import plain_buffers

MARKER = "input_rotation"  # the buffer's name


def hadamard(values: Tensor, block: int) -> Tensor:
    """Return each block of the last dim times Sylvester's matrix / sqrt(block), in the dtype of `values`."""
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
        """Return the arguments of `module` with a rotated input."""
        if args:
            return (self.rotate(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self.rotate(kwargs["input"])}

    def rotate(self, values: Tensor) -> Tensor:
        """Rotate values [..., K], in their dtype.

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


def rotate_inputs_of(module: nn.Module, block: int) -> Callable[[], None]:
    """Rotate the inputs of a linear from now on; return what undoes it."""
    device = next((param.device for param in module.parameters(recurse=False)), torch.device("cpu"))
    # first: it refuses a name that is taken
    module.register_buffer(MARKER, marker(block, device))
    handle = module.register_forward_pre_hook(InputRotation(block), with_kwargs=True)

    def undo() -> None:
        delattr(module, MARKER)
        handle.remove()

    return undo


def marker(block: int, device: torch.device) -> Tensor:
    """Return the buffer, uint8 [block]."""
    # else nothing could be loaded into it later
    with torch.inference_mode(mode=False):
        return torch.zeros(block, dtype=torch.uint8, device=device)


def is_size(block: object) -> bool:
    """Return whether a Hadamard matrix of Sylvester's has this size."""
    return type(block) is int and block >= 2 and not block & (block - 1)


def is_block_marker(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return whether a tensor with the name of the buffer is one, by its dtype and shape."""
    return dtype == torch.uint8 and len(shape) == 1 and is_size(shape[0])


def input_rotations(model: nn.Module) -> dict[str, int]:
    """Return the plain fqn of each linear whose inputs are rotated -> its block."""
    return {
        name.removesuffix(MARKER).removesuffix("."): buffer.shape[0]
        for name, buffer in plain_buffers(model)
        if name.rpartition(".")[2] == MARKER and is_block_marker(buffer.dtype, buffer.shape)
    }
