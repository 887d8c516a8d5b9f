"""Values in the parts of a quantized tensor that no healthy weight has, found from the parts alone.

    payload        float8: no NaN and no infinity (packed nibbles have neither)
    scales         fp32, bf16: finite and positive, or 0 where the spec says so; one byte (E8M0 as uint8, E4M3): no NaN,
                   no negative (0: zeros)
    amax history   finite and not negative

The part's spec says what its numbers are. Where torch has no dtype for its codes, `value_fault` finds nothing in the
part, and `holds_nan` decodes the tensor.

A NaN in payload or block scale is how the formats store an element that was not finite when it was quantized. The bytes
are intact, but the weight they belong to is NaN, so this is reported as a fault.

Parts of one byte an element are judged by how often each of the 256 codes occurs.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from qtensor.numerics import kernels
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of

WITHOUT_NAN = frozenset({torch.float4_e2m1fn_x2})

IN_CACHE = 2**18  # bytes looked at together on a CPU
PIECE = 2**24  # elements looked at together, so that temporaries stay small


def value_fault(spec: PartSpec, part: Tensor) -> str | None:
    """Return what is wrong with the values of a chunk of a part; None if nothing is."""
    if spec.numbers is None or spec.numbers in WITHOUT_NAN:
        return None
    if spec.dtype.itemsize == 1:
        return _byte_fault(spec, part)
    nan = sum(int((~piece.isfinite()).sum()) for piece in _in_pieces(part))
    if nan:
        return f"{nan} of {part.numel()} values are NaN or infinite"
    least = min((float(piece.min()) for piece in _in_pieces(part)), default=1.0)
    # an amax history may hold zeros; a scale of 0 would make zeros of all that it scales, and of some formats does
    may_be_zero = spec.length is not None or spec.zeros
    if least < 0 or (least == 0 and not may_be_zero):
        return f"its least value is {least!r}, expected {'at least 0' if may_be_zero else 'more than 0'}"
    return None


def _byte_fault(spec: PartSpec, part: Tensor) -> str | None:
    counts = torch.zeros(256, dtype=torch.int64, device="cpu")
    for piece in _in_pieces(part.view(torch.uint8)):
        counts += piece.bincount(minlength=256).to("cpu")
    assert spec.numbers is not None
    values = _values_of(spec.numbers)
    nan = int(counts[~values.isfinite()].sum())
    if nan:
        what = "elements" if spec.name == "payload" else "scales"
        return f"{nan} of {part.numel()} {what} are NaN or infinite, so the weight is NaN there"
    negative = int(counts[values.signbit()].sum())
    if negative and spec.name != "payload":
        return f"{negative} of {part.numel()} scales are negative; quantizing writes none"
    return None


def holds_nan(recipe: Recipe, parts: Mapping[str, Tensor]) -> bool:
    """Return whether a quantized tensor of these parts has values that are NaN or infinite."""
    specs = specs_of(recipe)
    if any(_not_finite(spec, parts[spec.name]) for spec in specs):
        return True
    if all(spec.numbers is not None for spec in specs):
        return False
    return not bool(kernels.decode(parts, recipe, torch.float32).isfinite().all())


def _not_finite(spec: PartSpec, part: Tensor) -> bool:
    if spec.numbers is None or spec.numbers in WITHOUT_NAN:
        return False
    if spec.dtype.itemsize > 1:
        return not bool(part.isfinite().all())
    codes = part.view(torch.uint8).reshape(-1)
    pieces = [piece for piece in codes.split(IN_CACHE if part.device.type == "cpu" else PIECE) if len(piece)]
    mask, least = _not_finite_codes(spec.numbers)
    if mask is None:
        return not all(bool(piece.view(spec.numbers).float().isfinite().all()) for piece in pieces)
    largest = [(piece & mask).max() for piece in pieces]
    # one read for all pieces: each would wait for the device
    return bool(largest) and int(torch.stack(largest).max()) >= least


@cache
def _not_finite_codes(numbers: torch.dtype) -> tuple[int | None, int]:
    """Return a mask, and the least code under it that is not finite; None if larger ones are finite again.

    The mask leaves out the sign, which E8M0 does not have. 256 is the least if all codes are finite.
    """
    finite = _values_of(numbers).isfinite()
    codes = torch.arange(256, dtype=torch.int64, device="cpu")
    for mask in (0x7F, 0xFF):
        least = min((codes & mask)[~finite].tolist(), default=256)
        if torch.equal(finite, (codes & mask) < least):
            return mask, least
    return None, 256


def _values_of(numbers: torch.dtype) -> Tensor:
    """Return the numbers of the 256 codes of a part of one byte an element."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(numbers).float()


def _in_pieces(part: Tensor) -> Iterator[Tensor]:
    flat = part.reshape(-1)
    return (flat[start : start + PIECE] for start in range(0, flat.numel(), PIECE))
