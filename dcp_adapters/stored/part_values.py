"""Values in the parts of a quantized tensor that no healthy weight has, found from the parts alone.

    payload        float8: no NaN and no infinity (packed nibbles have neither)
    scales         fp32, bf16: finite and positive; one byte (E8M0 as uint8, E4M3): no NaN, no negative (0: zeros)
    amax history   finite and not negative

The part's spec says what its numbers are. Where torch has no dtype for its codes, `value_fault` finds nothing in the
part, and `holds_nan` decodes the tensor.

A NaN in payload or block scale is how the formats store an element that was not finite when it was quantized. The bytes
are intact, but the weight they belong to is NaN, so this is reported as a fault.

Parts of one byte an element are judged by how often each of the 256 codes occurs.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qtensor import kernels
from qtensor.formats import PartSpec, specs_of
from qtensor.recipes import Recipe

WITHOUT_NAN = frozenset({torch.float4_e2m1fn_x2})

IN_CACHE = 2**18  # bytes compared at a time
PIECE = 2**24  # elements looked at together, so that temporaries stay small


def value_fault(spec: PartSpec, part: Tensor) -> str | None:
    """What is wrong with the values of a chunk of a part; None where nothing is."""
    if spec.numbers is None or spec.numbers in WITHOUT_NAN:
        return None
    if spec.dtype.itemsize == 1:
        return _byte_fault(spec, part)
    nan = sum(int((~piece.isfinite()).sum()) for piece in _in_pieces(part))
    if nan:
        return f"{nan} of {part.numel()} values are NaN or infinite"
    least = min((float(piece.min()) for piece in _in_pieces(part)), default=1.0)
    if least < 0 or (least == 0 and spec.length is None):
        return f"its least value is {least!r}, expected {'at least 0' if spec.length is not None else 'more than 0'}"
    return None


def _byte_fault(spec: PartSpec, part: Tensor) -> str | None:
    counts = torch.zeros(256, dtype=torch.int64, device="cpu")
    for piece in _in_pieces(part.view(torch.uint8)):
        counts += piece.bincount(minlength=256).to("cpu")
    values = _code_values(spec)
    nan = int(counts[~values.isfinite()].sum())
    if nan:
        what = "elements" if spec.name == "payload" else "scales"
        return f"{nan} of {part.numel()} {what} are NaN or infinite, so the weight is NaN there"
    negative = int(counts[values.signbit()].sum())
    if negative and spec.name != "payload":
        return f"{negative} of {part.numel()} scales are negative; quantizing writes none"
    return None


def holds_nan(recipe: Recipe, parts: Mapping[str, Tensor]) -> bool:
    """Whether a quantized tensor of these parts has values that are NaN or infinite."""
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
    codes = (~_code_values(spec).isfinite()).nonzero().flatten().tolist()
    pieces = part.view(torch.uint8).reshape(-1).split(IN_CACHE)
    return any(bool((piece == code).any()) for piece in pieces for code in codes)


def _code_values(spec: PartSpec) -> Tensor:
    """The numbers of the 256 codes of a part of one byte an element."""
    assert spec.numbers is not None
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(spec.numbers).float()


def _in_pieces(part: Tensor) -> Iterator[Tensor]:
    flat = part.reshape(-1)
    return (flat[start : start + PIECE] for start in range(0, flat.numel(), PIECE))
