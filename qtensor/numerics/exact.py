"""From recipe A to recipe B: exactly where the values allow it, else by B's encoding of A's fp32 values.

Each scale of B is decided by itself, and gets the first of these that keeps every value under it, bit for bit:

    kept      both recipes have elements of one kind, and A's scales are equal under B's: A's payload, and that scale
    fitted    the values fit B's elements under scales that are powers of two: these scales (see fineness.py)
    encoded   quantize(values): B's own scales, and elements rounded once more if they are not exact by themselves

MX formats and Float8 with power_of_two=True choose such powers of two by themselves; for them "encoded" is exact
wherever "fitted" would be.

A scale that pieces of a cut tensor share needs facts of all pieces: `claim` gives those of one piece, and their maxima
over all pieces decide for all of them alike. A scale of a block needs its block alone. So pieces that are made of whole
blocks get the bytes of converting the whole tensor.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import kernels
from qtensor.spec.blocks import scatter_blocks
from qtensor.spec.format import Format, PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import (
    block_multiple,
    format_of,
    keeps_history,
    registered,
    row_multiple,
    specs_of,
    tensor_wide,
)

Parts = Mapping[str, Tensor]
Choice = tuple[Tensor, Callable[[], Parts]]  # where it holds, for each scale that is decided; and the parts
CHUNK = 2**18  # elements that are encoded together
FACTS = 5  # amax, depth and broken (see fineness.py), and two about A's scales


def claim(values: Tensor, b: Recipe, parts: Parts | None = None, a: Recipe | None = None) -> Tensor | None:
    """Return what a piece says about the scales of B that it shares with others; all claims are maxima.

    Args:
        values: [.., N, K], in fp32 where they are those of A.
        b: the recipe to be.
        parts: what decodes to the values under `a`; None if they are not at hand, or the values are dense.
        a: the recipe of the values; None for dense ones, which are quantized.

    Returns:
        fp32, flat; None if B shares no scale.
    """
    if not kernels.shares_amax(b):
        return None
    return _claim(values, b, parts, None if a is None else _Facts.of(values, b, parts, a))


class _Facts(NamedTuple):
    """What is asked of the values of A more than once.

    powers: B's numerics, if it fits powers of two. fineness: of the values then, see there. scales: see
    `_equal_scales`.
    """

    powers: Format | None
    fineness: tuple[Any, Any] | None
    scales: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(values: Tensor, b: Recipe, parts: Parts | None, a: Recipe) -> "_Facts":
        powers = _fitting_powers(b)
        fineness = None if powers is None else powers.fineness(values, b)
        scales = None if parts is None or not values.numel() else _equal_scales(parts, a, b, values.shape)
        return _Facts(powers, fineness, scales)


def _claim(values: Tensor, b: Recipe, parts: Parts | None, facts: _Facts | None) -> Tensor | None:
    amax = kernels.shared_amax(values, b)
    if amax is None or facts is None:
        return None if amax is None else amax.reshape(-1)
    fine: tuple[Tensor, ...] = (torch.zeros_like(amax), torch.ones_like(amax))
    if facts.fineness is not None:
        _, shared = facts.fineness
        fine = shared.depth, shared.broken
    return torch.stack([amax, *fine, *_scale_facts(values, b, parts, facts, amax)]).reshape(-1)


def convert_parts(
    values: Tensor, b: Recipe, parts: Parts | None = None, a: Recipe | None = None, agreed: Tensor | None = None
) -> Parts:
    """Return the parts of B, from the arguments of `claim` and, as `agreed`, the maxima over the claims of all pieces.

    `agreed` is None if the tensor is not cut. Where `a` is None, this is `quantize(values, b)`. Parts may alias
    those of A.
    """
    facts = None if a is None or values.is_meta else _Facts.of(values, b, parts, a)
    agreed = _claim(values, b, parts, facts) if agreed is None else agreed
    shape = kernels.amax_shape(values.shape, b)
    if facts is None:
        return kernels.encode(values, b, None if agreed is None else agreed.view(-1)[: math.prod(shape)].view(shape))
    shared = None if agreed is None else agreed.view(FACTS, *shape)
    # Kept scales come first: with them not even a code changes.
    choices = [
        choice for choice in (_keep_payload(values, b, parts, facts, shared), _fit(values, b, facts, shared)) if choice
    ]
    return _settle(choices, lambda: kernels.encode(values, b, None if shared is None else shared[0]), b)


def _settle(choices: list[Choice], encoded: Callable[[], Parts], b: Recipe) -> Parts:
    """Return the first choice that holds, for every scale."""
    if not choices:
        return encoded()
    (holds, make), *others = choices
    if not is_tracing():  # a tracer cannot branch on values
        if not bool(holds.any()):
            return _settle(others, encoded, b)
        if bool(holds.all()):
            return make()
    return _merge(holds, make(), _settle(others, encoded, b), b)


def _merge(holds: Tensor, first: Parts, second: Parts, b: Recipe) -> Parts:
    """Return the first parts where they hold, else the second."""
    found = {}
    for spec in specs_of(b):
        one, other, where = first[spec.name], second[spec.name], holds
        if where.ndim and where.shape[-1] > 1:
            where = where.repeat_interleave(block_multiple(b) // spec.block, dim=-1)[..., : one.shape[-1]]
        # as bytes, since torch.where does not support float8
        if spec.dtype.itemsize == 1:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        found[spec.name] = torch.where(where, one, other).view(spec.dtype)
    return found


# -- powers of two -----------------------------------------------------------------------------------------------------


def _fitting_powers(b: Recipe) -> Format | None:
    """Return B's numerics if its usual scales are no powers of two, but could be; not where a history decides them."""
    numerics = format_of(b)
    fits = numerics.converts and not keeps_history(b) and not getattr(b, "power_of_two", False)
    return numerics if fits else None


def _fit(values: Tensor, b: Recipe, known: _Facts, shared: Tensor | None) -> Choice | None:
    if known.powers is None or known.fineness is None:
        return None
    facts, own = known.fineness
    agreed = None if shared is None else own._replace(amax=shared[0], depth=shared[1], broken=shared[2])
    quantizer, enc, holds = known.powers.fitted(b, facts, agreed)
    return holds, lambda: _encode_with(values, b, quantizer, enc)


def _encode_with(values: Tensor, b: Recipe, quantizer: Parts, enc: Tensor | None) -> Parts:
    """Do `Format.encode_with`, some rows at a time; the quantizer decides every scale."""
    # in pieces, as encoding takes several temporaries of fp32
    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    flat, size = values.reshape(rows, columns), max(CHUNK // max(columns, 1), 1)

    def cut(scales: Tensor, start: int) -> Tensor:
        return scales.reshape(rows, scales.shape[-1])[start : start + size] if scales.ndim else scales

    pieces = [
        format_of(b).encode_with(
            flat[start : start + size],
            b.of_rows,
            {name: cut(scales, start) for name, scales in quantizer.items()},
            None if enc is None else cut(enc, start),
        )
        for start in range(0, max(rows, 1), size)
    ]
    return {
        spec.name: torch.cat([piece[spec.name].view(torch.uint8) for piece in pieces])
        .view(spec.dtype)
        .reshape(spec.shape(values.shape))
        if spec.per_row
        else pieces[0][spec.name]
        for spec in specs_of(b)
    }


# -- scales that are kept ----------------------------------------------------------------------------------------------


def _scale_spec(recipe: Recipe) -> PartSpec | None:
    return next((spec for spec in specs_of(recipe) if spec.name == "scale"), None)


def _same_kind(a: Recipe, b: Recipe) -> bool:
    """Return whether equal payloads and scales mean equal values under both recipes."""
    classes = registered(a).tensor_class, registered(b).tensor_class
    # one class made from the other has the same elements
    if keeps_history(b) or not (issubclass(classes[0], classes[1]) or issubclass(classes[1], classes[0])):
        return False
    one, other = _scale_spec(a), _scale_spec(b)
    if one is None or other is None or (one.dtype, specs_of(a)[0]) != (other.dtype, specs_of(b)[0]):
        return False
    return not (one.block and other.block and one.block % other.block and other.block % one.block)


def _scale_facts(values: Tensor, b: Recipe, parts: Parts | None, facts: _Facts, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return, of the scale that B shares, the largest of A's scales behind it, and minus the least.

    Their sum is 0 if all of them are equal. Both are -inf if there are no values, so that others decide, and inf
    if A's scales cannot be kept.
    """
    if not values.numel():
        return torch.full_like(amax, -math.inf), torch.full_like(amax, -math.inf)
    if parts is None or facts.scales is None:
        return torch.full_like(amax, math.inf), torch.full_like(amax, math.inf)
    largest, least = facts.scales
    wide = tensor_wide(b)
    if wide in (None, "scale"):
        return largest, -least
    # in blocks, under a scale of all of them that A has, too
    differ = (largest != least).any()
    return torch.where(differ, math.inf, parts[wide]), -parts[wide]


def _keep_payload(
    values: Tensor, b: Recipe, parts: Parts | None, facts: _Facts, shared: Tensor | None
) -> Choice | None:
    """Return A's payload under A's scales, which holds if they equal B's; None if they mean nothing to B."""
    new: dict[str, Tensor] = {}
    if values.numel():
        if parts is None or facts.scales is None:
            return None
        new["scale"], holds = facts.scales[0], facts.scales[0] == facts.scales[1]
    elif shared is not None:  # a piece without values follows what the others keep
        parts = kernels.encode(values, b, shared[0])
    else:
        return None
    if shared is not None:
        new[tensor_wide(b) or "scale"], holds = shared[3], shared[3] + shared[4] == 0
    for number in new.values():
        # under this option B holds powers of two alone
        if getattr(b, "power_of_two", False):
            holds = holds & (number.view(torch.int32) & 0x7FFFFF == 0)
        holds = holds & (number < math.inf).all() if tensor_wide(b) else holds & (number < math.inf)
    specs = specs_of(b)
    return holds, lambda: {s.name: _from_numbers(new[s.name], s) if s.name in new else parts[s.name] for s in specs}


def _equal_scales(parts: Parts, a: Recipe, b: Recipe, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """Return the largest and the least of A's scales under each of B's, as numbers for `_from_numbers`.

    fp32 in the shape of B's `scale`; None if A's scales mean nothing under B.
    """
    one, other = _scale_spec(a), _scale_spec(b)
    if one is None or other is None or not _same_kind(a, b):
        return None
    scale = _numbers(parts["scale"])
    if not one.per_row:
        scale = scale.expand(*shape[:-1], 1)
    if not other.per_row or not other.block:
        dims = (-1,) if other.per_row else tuple(range(scale.ndim))
        return scale.amax(dim=dims, keepdim=other.per_row), scale.amin(dim=dims, keepdim=other.per_row)
    largest, least = _under_blocks(scale, one, other, shape[-1])
    if row_multiple(b) > 1:
        largest = scatter_blocks(largest, row_multiple(b), fill=-math.inf)
        least = -scatter_blocks(-least, row_multiple(b), fill=-math.inf)
    return largest, least


def _under_blocks(scale: Tensor, one: PartSpec, other: PartSpec, columns: int) -> tuple[Tensor, Tensor]:
    """Return the largest and the least scale (fp32 [.., N, blocks of `one`]) in each block of `other`.

    Blocks of one kind divide each other.
    """
    count = other.columns(0, columns)[1]
    if not (one.per_row and one.block):
        every = scale.expand(*scale.shape[:-1], count)
        return every, every
    if one.block >= other.block:
        every = scale.repeat_interleave(one.block // other.block, dim=-1)[..., :count]
        return every, every
    group = other.block // one.block
    short = -scale.shape[-1] % group
    both = [F.pad(each, (0, short), value=-math.inf).unflatten(-1, (count, group)).amax(-1) for each in (scale, -scale)]
    return both[0], -both[1]


def _numbers(scale: Tensor) -> Tensor:
    """Return scales as fp32 that are equal where the scales are; those of fewer bytes as their codes, NaN included."""
    # NaN differs from itself; infinity stands for a scale that cannot be kept
    if scale.dtype.itemsize == 4:
        return torch.where(scale.isnan(), math.inf, scale)
    return scale.view(torch.uint8 if scale.dtype.itemsize == 1 else torch.int16).to(torch.float32)


def _from_numbers(numbers: Tensor, spec: PartSpec) -> Tensor:
    """Undo `_numbers`; contiguous."""
    if spec.dtype.itemsize == 4:
        return numbers.contiguous()
    return numbers.to(torch.uint8 if spec.dtype.itemsize == 1 else torch.int16).contiguous().view(spec.dtype)
