"""Masters as remainders: 16 bits that say of an fp32 master what its weight's own bytes do not.

    remainder = count(master) - count(value of its code)          on the lattice of the element's unit, see lattice.py
    master    = value(count(value of its code) + remainder)

The lattice is so fine that the values of one code are at most 2^15 steps away from the code's own on either side:

    element     E4M3     E5M2     E2M1     INT4     INT8     NF4           E4M3 under a scale that saturates ("floor")
    mantissa    18 bits  17 bits  16 bits  17 bits  21 bits  16 bits       17 bits
    2^E / unit  2^-6     2^-14    1        4        64       1/4           2^-6

A master has to be on the lattice before its code is chosen. Rounding it behind that, within the values of its code,
would hold it where the code ends, for ever, if its updates are small. So there are two roundings:

    rounded     on `bits` of mantissa, which depends on no scale. Amaxes, and what ranks agree on, are those of the
                result
    split       under the scales that were decided: magnitudes below 2^E -> multiples of 2^(E - bits); then parts and
                remainders. It changes no scale: no amax is that small (but see `Format.crosses`)

Hence `parts == quantize(master)`, bit for bit, with the master that `join` returns. An element that is not finite
becomes NaN, with all others of its block if the format marks blocks.

bf16 weights: fp32 = bf16 + 16 bits, exactly. One number in 131072 is an exception, half-way above a bf16 number whose
last bit is 0: it rounds down to that, and 2^15 is beyond 16 bits. It moves to one of its fp32 neighbours.
"""

import functools
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel
from qtensor.numerics.tiles import cut_into_tiles, join_tiles, own_rows, packed_block, part_rows, pieces_of
from qtensor.spec.blocks import BlockFacts, canonical_nan, finite, tile, untile
from qtensor.spec.format import Grain
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, format_of, keeps_history, row_multiple, specs_of
from qtensor.states import lattice
from qtensor.states.draws import HALF, Positions, bits

FINEST = 22  # bits of mantissa: a lattice lacks at least every other number of fp32
LARGEST = 2**15 - 1  # a remainder
APART = 0x3C6EF372  # tells the draws of the second rounding from those of the first


def refuse_recipe(recipe: Recipe) -> str | None:
    """Return why masters of such weights cannot be remainders; None: they can."""
    grain, block = format_of(recipe).grain(recipe), block_multiple(recipe)
    if grain is None and keeps_history(recipe):
        return f"{recipe} decides its scales without the values' amax, so a code may stand for values of any size"
    if grain is None:
        return f"the format of {recipe} does not say how fine they would be (qtensor.spec.format.Format.grain)"
    if not 1 <= grain.bits <= FINEST or abs(grain.least) >= -lattice.LEAST or block >= lattice.ENOUGH:
        return (
            f"the format of {recipe} has {grain} and blocks of {block}, expected 1 to {FINEST} bits, a least exponent "
            f"between {lattice.LEAST} and {-lattice.LEAST} and blocks of less than {lattice.ENOUGH}"
        )
    return None


def rounded(master: Tensor, recipe: Recipe, at: Positions) -> Tensor:
    """Return fp32 [rows, K] rounded to the mantissa that remainders of a recipe hold: the first of two roundings."""
    kernel = _rounding(_grain(recipe).bits, drawn=at.drawn)
    pieces = list(pieces_of(master, 1, kernel))
    return joined([kernel(master[piece], *at.of(piece)) for piece in pieces])


def split(
    master: Tensor, recipe: Recipe, amax: Tensor | None, blocks: BlockFacts | None, at: Positions
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the parts and the remainders of masters that are `rounded`.

    Args:
        master: fp32 [rows, K].
        recipe: one that `refuse_recipe` does not refuse.
        amax: what decides shared scales, fp32 [] or [rows, 1]; None for recipes without them.
        blocks: facts of square blocks, if they are agreed on with others.
        at: where the rows are.

    Returns:
        the parts, and int16 [rows, K].
    """
    facts = () if blocks is None else tuple(blocks)
    kernel = _splitting(recipe.stored, decided=blocks is not None, drawn=at.drawn)
    block, group = block_multiple(recipe), 1 if facts else row_multiple(recipe)
    found = []
    for piece in pieces_of(master, group, kernel):
        tiles = cut_into_tiles(master[piece], block, group)
        found.append(
            kernel(tiles, *at.of(piece), own_rows(amax, piece), *(own_rows(fact, piece) for fact in facts))[:2]
        )
    if len(found) == 1:
        return found[0][0], found[0][1].to(torch.int16)
    specs = specs_of(recipe)
    parts = {
        spec.name: torch.cat([own[spec.name] for own, _ in found]) if spec.per_row else found[0][0][spec.name]
        for spec in specs
    }
    return parts, joined([remainder for _, remainder in found]).to(torch.int16)


def join(parts: Mapping[str, Tensor], remainder: Tensor, recipe: Recipe) -> Tensor:
    """Return the masters, fp32 [rows, K], of parts [rows, ..] and remainders [rows, K]; never -0.0."""
    specs, block = specs_of(recipe), packed_block(recipe)
    rows = [part_rows(parts[spec.name], spec, remainder.shape) for spec in specs]
    kernel = _joining(recipe.stored)
    words = readable(remainder)
    found = [
        kernel(
            cut_into_tiles(words[piece], block_multiple(recipe)),
            cut_into_tiles(rows[0][piece], block),
            *(own_rows(part, piece) for part in rows[1:]),
        )
        for piece in pieces_of(words, 1, kernel)
    ]
    return joined([masters.view(-1, remainder.shape[-1]) for masters in found])


def remainder_of(master: Tensor, parts: Mapping[str, Tensor], recipe: Recipe) -> Tensor:
    """Return the remainders, int16 [rows, K], with which `join` of these parts comes nearest to masters.

    Not for steps: the parts stay as they are, and may not be those of the masters.
    """
    grain, numerics, block = _grain(recipe), format_of(recipe), block_multiple(recipe)
    rows = {spec.name: part_rows(parts[spec.name], spec, master.shape) for spec in specs_of(recipe)}
    base = numerics.decode(rows, recipe)
    floor = lattice.floor_of(_over(numerics.unit(rows, recipe), block), grain.least)
    counts = [lattice.count(_tiled(x, block), grain.bits, floor) for x in (master, base)]
    left = _flat((counts[0] - counts[1]).clamp(-LARGEST, LARGEST), base)
    return torch.where(finite(master) & finite(base), left, 0).to(torch.int16)


def split_dense(master: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
    """Return bf16 and int16 remainders, [rows, K] both, of fp32 masters."""
    kernel = _dense_splitting(drawn=at.drawn)
    found = [kernel(master[piece], *at.of(piece)) for piece in pieces_of(master, 1, kernel)]
    return joined([weight for weight, _ in found]), joined([remainder for _, remainder in found]).to(torch.int16)


def join_dense(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 weights and remainders, both [rows, K]."""
    kernel, words = _dense_joining(), readable(remainder)
    return joined([kernel(weight[piece], words[piece]) for piece in pieces_of(weight, 1, kernel)])


def readable(remainder: Tensor) -> Tensor:
    """Return int16 as what kernels read: inductor has no vector code for int16, but on a CPU for bf16, as bits."""
    return remainder.view(torch.bfloat16) if remainder.device.type == "cpu" else remainder.to(torch.int32)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Return pieces of rows as one tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _grain(recipe: Recipe) -> Grain:
    grain = format_of(recipe).grain(recipe)
    if grain is None:
        raise ValueError(refuse_recipe(recipe))
    return grain


# -- kernels: one for each recipe and kind of arguments ----------------------------------------------------------------


@functools.cache
def _rounding(bits: int, *, drawn: bool) -> Kernel:
    def rounding(x: Tensor, keys: Tensor, first: Tensor) -> Tensor:  # [rows, K], [rows, 1], [1]
        return lattice.by_mantissa(x, lattice.constant(bits), draws_of(x, keys, first, drawn=drawn))

    return Kernel(rounding, f"round_masters_to_{bits}{'' if drawn else '_nearest'}")


@functools.cache
def _splitting(recipe: Recipe, *, decided: bool, drawn: bool) -> Kernel:
    numerics, own, elements = format_of(recipe), _grain(recipe), block_multiple(recipe)

    def splitting(
        x: Tensor, keys: Tensor, first: Tensor, amax: Tensor | None, *facts: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        grain, block = _constants(own, elements)
        values = join_tiles(x, block)
        quantizer = numerics.quantizer(values, recipe, amax, BlockFacts(*facts) if decided else None)
        enc, dec = numerics.grid(recipe, quantizer)
        floor = lattice.floor_of(_over(numerics.unit(quantizer, recipe), block), grain.least)
        tiles = _tiled(values, block)
        drawn_bits = draws_of(tiles, keys, first, drawn=drawn, salt=APART)
        magnitude = tiles.abs()
        low, other = lattice.below(magnitude, grain.bits, floor, drawn_bits)
        crosses = numerics.crosses(magnitude, low, recipe, quantizer, amax)
        if crosses is not None:
            low = torch.where(crosses, other, low)
        below = lattice.is_below(magnitude, floor)
        low = lattice.choose(below, low.view(torch.int32), magnitude.view(torch.int32)).view(torch.float32)
        # +0 for all zeros: a step of 0 would turn -0.0 into +0.0, which has another code
        settled = torch.where(finite(tiles), lattice.signed(low, tiles), tiles)
        scaled = (settled * _over(enc, block)).to(torch.float32)
        base = numerics.snap(scaled, recipe) * _over(dec, block)
        remainder = lattice.count(settled, grain.bits, floor) - lattice.count(base, grain.bits, floor)
        # a row's scale may be NaN, and what NaN is as a whole number depends on the instruction
        known = finite(tiles) & (base == base)  # noqa: PLR0124 - not isnan, in vector code
        remainder = torch.where(known, remainder, 0).clamp(-LARGEST, LARGEST)
        flat = _flat(settled, values)
        parts = numerics.encode_with(flat, recipe, quantizer, enc)
        return parts, _flat(remainder, values), enc

    return Kernel(splitting, f"split_{_name(recipe)}{'_of_cut_blocks' if decided else ''}{'' if drawn else '_nearest'}")


@functools.cache
def _joining(recipe: Recipe) -> Kernel:
    numerics, own, elements = format_of(recipe), _grain(recipe), block_multiple(recipe)
    names, packs = [spec.name for spec in specs_of(recipe)], packed_block(recipe) != elements

    def joining(remainder: Tensor, payload: Tensor, *others: Tensor) -> Tensor:  # tiles, or [rows, K]
        grain, block = _constants(own, elements)
        # each block as a row of its own: where blocks are joined to rows, inductor divides to find each element's
        if remainder.ndim == 3:
            # branches on one number make these constants of the compiled code
            if remainder.shape[-1] != block or payload.shape[-1] != (block // 2 if packs else block):
                raise AssertionError(f"tiles of {remainder.shape[-1]} and {payload.shape[-1]}, expected {block}")
            others = tuple(part if part.ndim == 0 else part.unsqueeze(-1) for part in others)
        parts = dict(zip(names, (payload, *others), strict=True))
        base = numerics.decode(parts, recipe)
        tiles = _tiled(base, block)
        floor = lattice.floor_of(_over(numerics.unit(parts, recipe), block), grain.least)
        number = lattice.count(tiles, grain.bits, floor) + _tiled(_whole(remainder), block)
        # an element may stand for 2^128, which is inf in fp32; its number is like any other
        whole = tiles == tiles  # noqa: PLR0124 - not isnan, in vector code
        found = torch.where(whole, lattice.value(number, grain.bits, floor), tiles)
        return canonical_nan(_flat(found, base))

    return Kernel(joining, f"join_{_name(recipe)}")


@functools.cache
def _dense_splitting(*, drawn: bool) -> Kernel:
    def splitting(x: Tensor, keys: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        weight, remainder = _cut(x)
        # half-way above a bf16 number whose last bit is 0: one fp32 step down, or up
        up = draws_of(x, keys, first, drawn=drawn) < 0
        step = torch.where(up, 1, -1).to(torch.int32)
        # exactly: a NaN of CUDA's, 0x7FFFFFFF, is further away, and the next number is -0.0
        moved = torch.where(remainder == LARGEST + 1, (x.view(torch.int32) + step).view(torch.float32), x)
        weight, remainder = _cut(moved)
        return weight, torch.where(x == x, remainder, 0)  # noqa: PLR0124 - isnan, in vector code

    return Kernel(splitting, f"split_bf16{'' if drawn else '_nearest'}")


def _cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return bf16 and int32, how many fp32 numbers x is further from 0 than that."""
    raw = x.view(torch.int32)
    # by bits: inductor would leave out a conversion to bf16 and back
    wide = (raw + 0x7FFF + ((raw >> 16) & 1)) & -0x10000
    weight = torch.where(x == x, wide.view(torch.float32), x).to(torch.bfloat16)  # noqa: PLR0124
    return weight, (raw & 0x7FFFFFFF) - (wide & 0x7FFFFFFF)


@functools.cache
def _dense_joining() -> Kernel:
    def joining(weight: Tensor, remainder: Tensor) -> Tensor:
        wide = weight.to(torch.float32)
        found = (wide.view(torch.int32) + _whole(remainder)).view(torch.float32)
        return torch.where(wide == wide, found, wide)  # noqa: PLR0124 - isnan, in vector code

    return Kernel(joining, "join_bf16")


def _whole(words: Tensor) -> Tensor:
    """Return int32 of what `readable` returned."""
    return words if words.dtype == torch.int32 else words.to(torch.float32).view(torch.int32) >> 16


def draws_of(x: Tensor, keys: Tensor, first: Tensor, *, drawn: bool, salt: int = 0) -> Tensor:
    """Return int32 bits for each of x, [rows, K] or [rows, blocks, block]; HALF if nothing is drawn."""
    if not drawn:
        return torch.full((), HALF, dtype=torch.int32, device=x.device)
    if x.ndim == 2:
        return bits(keys ^ salt, torch.arange(x.shape[1], dtype=torch.int32, device=x.device) + first)
    blocks, block = x.shape[1:]
    begins = torch.arange(blocks, dtype=torch.int32, device=x.device).unsqueeze(-1) * block
    columns = begins + torch.arange(block, dtype=torch.int32, device=x.device) + first
    return bits(keys.unsqueeze(-1) ^ salt, columns)


def _constants(grain: Grain, block: int) -> tuple[Grain, int]:
    return Grain(lattice.constant(grain.bits), lattice.constant(grain.least)), lattice.constant(block)


def _tiled(x: Tensor, block: int) -> Tensor:
    return x if block == 1 else tile(x, block)


def _over(scales: Tensor, block: int) -> Tensor:
    """Return scales so that they broadcast over what `_tiled` returns."""
    return scales if block == 1 else scales.unsqueeze(-1)


def _flat(x: Tensor, like: Tensor) -> Tensor:
    return x if x.ndim == like.ndim else untile(x, like.shape[-1])


def _name(recipe: Recipe) -> str:
    return re.sub(r"\W+", "_", repr(recipe)).strip("_")
