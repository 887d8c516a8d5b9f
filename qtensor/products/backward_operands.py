"""What the products of backward are made of: rows and columns of tokens, quantized; rotated and drawn if a recipe asks.

    rows      of dy [T, N] * factors    every token by itself, along N
    columns   of dy [T, N], x [T, K]    every channel by itself, along T

Most recipes round both to the nearest (transposing.py). NVFP4 is trained otherwise (NVIDIA 2025, "Pretraining Large
Language Models with NVFP4", arXiv 2509.25149, sections 4.2 and 4.4; the recipe NVFP4BlockScaling of TransformerEngine):

    rotated   both operands of dw: H D x of every 16 tokens, D the SIGNS on a diagonal, H the Hadamard matrix / 4. One
              outlier becomes 16 numbers of a quarter of its size. H D is orthogonal: (H D dy)^T (H D x) = dy^T x
    drawn     dy, in both products: stochastically, so that what rounding adds is 0 in the mean

The last tokens are filled up with zeros to 16. Sums and differences of tokens 1, 2, 4 and 8 apart are taken in fp32,
and nothing is rounded between them and the codes.

Bits are drawn of a row's own numbers (keys_of_content of hashing.py), after factors and rotation. Nothing is counted:
no steps, calls or layers. So there is no state to save, to share among ranks, to capture in a graph or to keep from a
forward that runs twice, and a token has the same bytes on whichever rank. Gradients that are equal in all bits are
rounded alike, though: what averages out over steps is the rounding of gradients that differ.
"""

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import kernels, transposing
from qtensor.products.input_rotation import hadamard
from qtensor.spec.recipes import Recipe

ROTATED = 16  # tokens
# TransformerEngine's: chosen once at random, the same for all layers and steps
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NEGATIVE = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)


def encode_rows(x: Tensor, factors: Tensor | None, recipe: Recipe, multiple: int, *, drawn: bool) -> dict[str, Tensor]:
    """Return the parts of x * factors, every row by itself, with zeros behind each up to a multiple.

    Args:
        x: dense [rows, columns] in any floating dtype.
        factors: fp32 [1, columns] or [1, 1], multiplied in fp32; None: there are none.
        recipe: of rows.
        multiple: what the length of a row is padded to.
        drawn: round stochastically.
    """
    if not drawn:
        return transposing.encode_scaled(x, factors, recipe, multiple)
    scaled = x if factors is None else x.to(torch.float32) * factors
    return kernels.encode_rows(transposing.padded(scaled, multiple), recipe, drawn=True)


def encode_columns(x: Tensor, recipe: Recipe, multiple: int, *, rotated: bool, drawn: bool) -> dict[str, Tensor]:
    """Return the parts of x.T, every column of x by itself, with zeros behind each up to a multiple.

    Args:
        x: dense [tokens, columns] in any floating dtype.
        recipe: of rows.
        multiple: what the length of a column is padded to; of 16, if `rotated`.
        rotated: every 16 tokens.
        drawn: round stochastically.
    """
    if not rotated and not drawn:
        return transposing.encode_columns(x, recipe, multiple)
    values = transposing.turned(x, multiple)  # [columns, tokens padded]
    return kernels.encode_rows(rotate(values) if rotated else values, recipe, drawn=drawn)


def rotate(values: Tensor) -> Tensor:
    """Return H D of every 16 of [.., tokens], a multiple of 16, in fp32."""
    # no table of the CPU's, for which a GPU would have to wait
    places = torch.arange(ROTATED, dtype=torch.int32, device=values.device)
    signs = 1.0 - 2.0 * (NEGATIVE >> places & 1).to(torch.float32)
    if is_tracing():  # what is padded by nothing keeps the strides of a transpose, whatever the graph was traced with
        values = values.clone(memory_format=torch.contiguous_format)
    signed = values.to(torch.float32).unflatten(-1, (-1, ROTATED)) * signs
    return hadamard(signed, ROTATED).flatten(-2)
