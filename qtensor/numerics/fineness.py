"""How fine fp32 values are: whether elements under a scale that is a power of two hold them exactly.

Every value but 0 is odd * 2^p. An element with m mantissa bits, whose least step is 2^-s and whose largest value is L,
holds it under the scale 2^t exactly where

    odd < 2^(m + 1)      p >= t - s      |value| <= L * 2^t

The largest magnitude gives the least t; the least p then decides. A format asks for these facts of the values behind
each of its scales (`Format.fineness`) and answers with scales under which all of them are exact (`Format.fitted`), see
exact.py. All facts are maxima, so ranks that hold pieces can agree on them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.spec.blocks import finite, finite_magnitude, scatter_blocks, tile

ORIGIN = 300.0  # above every p of an fp32 number, so that depths are positive
_PIECE = 2**18  # elements that are looked at together, so that temporaries stay small


class Fineness(NamedTuple):
    """Facts of the values behind each scale, fp32, never negative; 0 if there are no values.

    amax: largest finite magnitude. depth: ORIGIN - p of the value with the least p, 0 if all are 0.
    broken: 1 where some value has too many bits for the element, or is infinite. nan: 1 where some value is NaN.
    number: 1 where some value is finite.
    """

    amax: Tensor
    depth: Tensor
    broken: Tensor
    nan: Tensor
    number: Tensor

    def spread(self, rows: int) -> "Fineness":
        """Spread the maxima over so many rows, those of square blocks, to each of them."""
        return Fineness(*(scatter_blocks(fact, rows) for fact in self))

    def joined(self) -> "Fineness":
        """Return the facts of all values together, fp32 [] each."""
        return Fineness(*(fact.amax() if fact.numel() else fact.new_zeros(()) for fact in self))


def fineness(x: Tensor, block: int, mantissa: int) -> Fineness:
    """Return the facts of each block of each row of x (fp32 [.., N, K]), [.., N, ceil(K / block)]; block 0: a row.

    `mantissa` is the number of mantissa bits of the element.
    """
    columns = -(-x.shape[-1] // block) if block else 1
    if not x.numel():
        none = torch.zeros((*x.shape[:-1], columns), dtype=torch.float32, device=x.device)
        return Fineness(none, none, none, none, none)
    rows = x.reshape(-1, x.shape[-1])
    # in pieces, as each fact takes a temporary of the size of the values
    pieces = [_facts(piece, block, mantissa) for piece in rows.split(max(_PIECE // rows.shape[1], 1))]
    return Fineness(*(torch.cat(facts).reshape(*x.shape[:-1], columns) for facts in zip(*pieces, strict=True)))


def fits(enc: Tensor, facts: Fineness, step: int) -> Tensor:
    """Return where values of which these are the facts are exact under the scale 1 / enc, bool; enc is a power of two.

    The scale itself must be a normal number. That no value saturates is up to whoever made enc from the amax.
    """
    exponent = (enc.view(torch.int32) >> 23) - 127
    deep_enough = facts.depth <= exponent + (ORIGIN + step)
    return (facts.broken == 0) & deep_enough & (exponent <= 126)


def _facts(x: Tensor, block: int, mantissa: int) -> Fineness:
    """Return the facts of rows [n, K], [n, blocks] each."""

    def largest(each: Tensor) -> Tensor:
        each = each.to(torch.float32)
        return tile(each, block).amax(dim=-1) if block else each.amax(dim=-1, keepdim=True)

    whole = finite(x)
    amax, nan, number = largest(finite_magnitude(x)), largest(x.isnan()), largest(whole)
    infinite = largest(~whole & ~x.isnan())
    bits = torch.where(whole, x, 0.0).view(torch.int32) & 0x7FFFFFFF
    exponent = (bits >> 23).clamp_(min=1)
    # value = digits * 2^(exponent - 150); below 2^23 the number is subnormal, and its bits are its digits
    digits = torch.where(bits < 1 << 23, bits, (bits & 0x7FFFFF) | 1 << 23)
    last = digits & -digits
    long = largest((digits > 0) & (digits >= last << (mantissa + 1)))
    low = (last.to(torch.float32).view(torch.int32) >> 23).add_(exponent).sub_(277)  # p
    depth = largest(torch.where(digits > 0, ORIGIN - low, 0.0))
    return Fineness(amax, depth, torch.maximum(long, infinite), nan, number)
