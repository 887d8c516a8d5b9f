"""Values that reach each branch of a kernel, always the same ones; made of patches, which are what a scale is for.

wild    patches of all magnitudes: denormal ones, the largest, zeros of both signs, what is not finite
round   patches whose largest number makes a scale that is a power of two, up to one that all values share
ties    `round`, with numbers halfway between two neighbouring codes under these very scales, and beside them
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.kernels.probes import INTEGERS
from qtensor.spec import registry as formats
from qtensor.spec.recipes import Recipe

CPU = torch.device("cpu")
# Largest numbers of elements, and of elements under scales that have a largest number; some between two scales.
LARGEST = (6.0, 7.5, 448.0, 57344.0, 2688.0, 1.0, 1.75, 13.0, 7.5 * (1 + 2.0**-8), 7.5 * (1 + 3 * 2.0**-8), 6.375, 6.75)
LEAST = 2.0**-127  # of scales that are powers of two
MOST_DECADES = 24  # powers of two below a tensor's largest number that patches begin at


class Patches(NamedTuple):
    """How [rows, columns] are cut: `down` patches of `rows` rows, each of `across` patches of `columns` columns."""

    down: int
    rows: int
    across: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """That of the values."""
        return self.down * self.rows, self.across * self.columns

    def joined(self, patches: Tensor) -> Tensor:
        """Return values [rows, columns] of patches [patches, numbers of one]."""
        cut = patches.view(self.down, self.across, self.rows, self.columns)
        return cut.transpose(1, 2).reshape(self.shape)

    def cut(self, values: Tensor) -> Tensor:
        """Undo `joined`."""
        cut = values.view(self.down, self.rows, self.across, self.columns)
        return cut.transpose(1, 2).reshape(self.down * self.across, -1)


def wild(dtype: torch.dtype, patches: Patches, seed: int = 0) -> Tensor:
    """Return values of all magnitudes that a dtype has, and of none."""
    generator, facts = torch.Generator("cpu").manual_seed(seed), torch.finfo(dtype)
    count, each = patches.down * patches.across, patches.rows * patches.columns
    least, most = (torch.tensor(number, dtype=torch.float64, device=CPU).log2() for number in (facts.tiny, facts.max))
    lowest = int(least) - _mantissa(dtype)
    top = torch.randint(lowest, int(most) + 1, (count, 1), generator=generator, dtype=torch.int64, device=CPU)
    below = torch.randint(0, 14, (count, each), generator=generator, dtype=torch.int64, device=CPU)
    fraction = 1 + torch.rand(count, each, generator=generator, dtype=torch.float64, device=CPU)
    sign = 1.0 - 2.0 * torch.randint(0, 2, (count, each), generator=generator, dtype=torch.int64, device=CPU)
    found = (sign * torch.ldexp(fraction, top - below)).clamp(-facts.max, facts.max).to(dtype)
    _spoil(found)
    return patches.joined(found)


def _spoil(found: Tensor) -> None:
    """Write what is not finite, and other numbers of note, into the first patches; as many as there are."""
    facts, each, every = torch.finfo(found.dtype), found.shape[1], slice(None)
    least = facts.tiny * 2.0 ** -_mantissa(found.dtype)
    inf, nan = float("inf"), float("nan")
    # of each patch: which numbers, and what stands there
    notes: list[list[tuple[int | slice, float]]] = [
        [(1, nan), (2, -inf), (each // 2, -0.0), (each - 1, inf)],
        [(slice(0, None, 2), -0.0), (slice(1, None, 2), 0.0)],
        [(every, least), (slice(0, None, 3), -3 * least)],
        [(0, facts.max), (each - 2, -facts.max)],
        [(1, nan)],
        [(2, inf)],
        [(each - 1, -inf)],
        [(every, nan)],
        [(every, -inf)],
        [(slice(1, None), 0.0)],
        [(slice(0, each - 1), -0.0)],
    ]
    bits = found.view(INTEGERS[found.itemsize])
    amaxes = [*(largest * LEAST for largest in LARGEST), *LARGEST]
    for patch, amax in zip(found[len(notes) :], amaxes, strict=False):
        patch.copy_(patch.sign() * amax)
    # the next numbers above
    bits[len(notes) + len(LARGEST) : len(notes) + 2 * len(LARGEST)] += 1
    for patch, own in zip(found, notes, strict=False):
        for which, value in own:
            patch[which] = value
    # a NaN with a sign, and with other bits than the default one
    bits[0, 1] = bits[0, 1] | -(1 << 8 * found.itemsize - 1) | 3


def round_(dtype: torch.dtype, patches: Patches, most: float, seed: int = 1) -> Tensor:
    """Return values up to `most`, which the first one is; the first one of each patch is its largest."""
    generator = torch.Generator("cpu").manual_seed(seed)
    count, each = patches.down * patches.across, patches.rows * patches.columns
    known = torch.tensor(LARGEST, dtype=torch.float64, device=CPU)
    largest = known[torch.arange(count, dtype=torch.int64, device=CPU) % len(LARGEST)]
    highest = (most / largest).log2().floor().to(torch.int64)
    down = torch.randint(0, MOST_DECADES, (count,), generator=generator, dtype=torch.int64, device=CPU)
    amax = torch.ldexp(largest, highest - down)
    amax[0] = most
    found = (2 * torch.rand(count, each, generator=generator, dtype=torch.float64, device=CPU) - 1) * amax[:, None]
    # a few codes are far smaller than the others
    found *= torch.exp2(
        -torch.randint(0, 5, found.shape, generator=generator, dtype=torch.int64, device=CPU).to(torch.float64)
    )
    found[:, 0] = amax
    return patches.joined(found.to(dtype))


def ties(x: Tensor, patches: Patches, recipe: Recipe, amax: Tensor | None) -> Tensor:
    """Return x of `round_` with what is halfway between two codes in place of all but each patch's first number.

    A third of them are the next numbers below, and a third those above.
    """
    parts = formats.encode(x.to(torch.float32), recipe, amax)
    fmt = formats.format_of(recipe)
    both = fmt.decode(parts, recipe), fmt.decode(_next_codes(parts, recipe), recipe)
    middle = ((both[0].double() + both[1].double()) / 2).to(x.dtype)
    integers = INTEGERS[x.itemsize]
    steps = torch.arange(x.numel(), dtype=torch.int64, device=CPU).view(x.shape) % 3 - 1
    beside = (middle.view(integers) + steps.to(integers)).view(x.dtype)
    found = patches.cut(torch.where(middle == 0, middle, beside)).clone()
    own = patches.cut(x)
    # the scale is to stay
    kept = ~(found.abs() < own[:, :1].abs() * 0.99)
    kept[:, 0] = True
    return patches.joined(torch.where(kept, own, found))


def _next_codes(parts: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """Return parts with the next larger code in place of each."""
    raw = parts["payload"].view(torch.uint8)
    packed = formats.specs_of(recipe)[0].block == 2
    larger = ((raw + 1) & 15) | ((raw & 240) + 16) if packed else raw + 1
    return {**parts, "payload": larger.view(parts["payload"].dtype)}


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 2) -> Tensor:
    """Return codes or scales of any bits; if there are 256 or more of one byte, all of them."""
    if dtype == torch.float32:
        # few scales are NaN or infinite, and none is negative
        size = torch.Size(shape).numel()
        return wild(dtype, Patches(1, 1, -(-size // 16), 16), seed).abs().reshape(-1)[:size].reshape(shape)
    found = any_bytes(shape, dtype, seed)
    if dtype.itemsize == 2:
        # NaN with other bits than the default one, infinity, the least number, zero
        noted = torch.tensor([0x7FFD, 0x7FC0, 0x7F80, 1, 0], dtype=torch.int16, device=CPU)
        first = found.view(torch.int16).view(-1)[: len(noted)]
        first.copy_(noted[: len(first)])
    return found


def any_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 2) -> Tensor:
    """Return numbers of any bits; if there are 256 or more of one byte, all of them."""
    generator = torch.Generator("cpu").manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    found = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8, device=CPU)
    every = torch.arange(min(256, size), dtype=torch.uint8, device=CPU)
    if dtype.itemsize == 1:
        found[: len(every)] = every
    return found.view(dtype).view(shape)


def _mantissa(dtype: torch.dtype) -> int:
    """Return how many bits a number has behind its leading one."""
    return {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
