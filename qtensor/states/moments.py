"""Moments of optimizers in 8 bits: MXFP8 parts (E4M3 elements, a power of two for each 32 along a row).

    first     m                 E4M3 of m                                      momentum: signed
    second    v = root^2        E4M3 of sqrt(v); positive ones never become 0  means of squares: not negative

The root needs half of the exponents that v needs. A second moment of 0 under a first one that is not 0 would be a step
of m / eps: so a positive root becomes at least the least element of its block, which makes steps smaller, not greater.

Elements round stochastically. By the nearest, sqrt(v) would stop at several times its value: it falls by 0.05 % a step
(beta2 = 0.999), and E4M3's elements are 6 to 12 % apart.

    scale = that of MXFP8, from the block's amax; x -> the lattice of E4M3 under it, stochastically; then MXFP8 of that
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel
from qtensor.formats.mxfp8 import BLOCK, MXFP8BlockScaling
from qtensor.numerics.tiles import cut_into_tiles, join_tiles, pieces_of
from qtensor.spec.blocks import finite, tile
from qtensor.spec.codecs import e8m0
from qtensor.spec.registry import format_of
from qtensor.states import lattice
from qtensor.states.draws import Positions
from qtensor.states.remainders import draws_of, joined

RECIPE = MXFP8BlockScaling()
BITS, LEAST = 3, -6  # E4M3: bits of mantissa, exponent of the least normal element


def encode_moment(x: Tensor, at: Positions, *, root: bool) -> dict[str, Tensor]:
    """Return the MXFP8 parts of a moment, fp32 [rows, K], K a multiple of 32; with `root`, of its square root."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"a moment of {x.shape[-1]} columns, expected a multiple of {BLOCK}; keep it in fp32")
    kernel = _encoding(root=root, drawn=at.drawn)
    found = [kernel(cut_into_tiles(x[piece], BLOCK), *at.of(piece)) for piece in pieces_of(x, 1, kernel)]
    return {name: joined([parts[name] for parts in found]) for name in found[0]}


def decode_moment(parts: Mapping[str, Tensor], *, root: bool) -> Tensor:
    """Return a moment, fp32 [rows, K], of its parts."""
    kernel = _decoding(root=root)
    payload, scale = parts["payload"], parts["scale"]
    pieces = pieces_of(payload, 1, kernel)
    return joined([kernel(cut_into_tiles(payload[piece], BLOCK), scale[piece]) for piece in pieces])


def root_of(x: Tensor) -> Tensor:
    """Return the fp32 next to the square root of each x.

    On CPUs torch's fp32 `sqrt` asks MKL, which is an ulp off for one in six; compiled code asks the processor. The root
    in fp64, rounded, is the nearest: no root of an fp32 number is as close to the middle between two as 2^-50 of it.
    """
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return x.sqrt()
    return x.to(torch.float64).sqrt().to(torch.float32)


@functools.cache
def _encoding(*, root: bool, drawn: bool) -> Kernel:
    numerics = format_of(RECIPE)

    def encoding(x: Tensor, keys: Tensor, first: Tensor) -> dict[str, Tensor]:
        values = join_tiles(x, BLOCK)
        values = root_of(values) if root else values
        quantizer = numerics.quantizer(values, RECIPE, None)
        enc, dec = numerics.grid(RECIPE, quantizer)
        floor = lattice.floor_of(dec.unsqueeze(-1), LEAST)
        tiles = tile(values, BLOCK)
        bits = draws_of(tiles, keys, first, drawn=drawn)
        magnitude = tiles.abs()
        low, _ = lattice.below(magnitude, BITS, floor, bits)
        above = lattice.by_mantissa(magnitude, BITS, bits)
        below = lattice.is_below(magnitude, floor)
        taken = lattice.choose(below, low.view(torch.int32), above.view(torch.int32)).view(torch.float32)
        if root:
            # the least element, where nothing else is left of something
            least = torch.where(magnitude > 0, lattice.value(torch.ones_like(floor), BITS, floor), 0.0)
            taken = torch.maximum(taken, least)
        taken = torch.where(finite(tiles), lattice.signed(taken, tiles), tiles)
        return numerics.encode_with(taken.flatten(-2), RECIPE, quantizer, enc)

    return Kernel(encoding, f"encode_moment{'_root' if root else ''}{'' if drawn else '_nearest'}")


@functools.cache
def _decoding(*, root: bool) -> Kernel:
    def decoding(payload: Tensor, scale: Tensor) -> Tensor:
        values = (tile(join_tiles(payload, BLOCK).float(), BLOCK) * e8m0.decode(scale).unsqueeze(-1)).flatten(-2)
        return values * values if root else values

    return Kernel(decoding, f"decode_moment{'_root' if root else ''}")
