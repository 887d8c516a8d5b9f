"""Which formats there are, and what follows from the parts of each; format.py says what a format is.

`register` makes a format known by the type of its recipe. Everything else here is answered from the specs of its parts,
so no code but the format's own file needs to know it by name.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtensor.spec.blocks import BlockFacts, block_amax, finite, finite_amax, row_amax
from qtensor.spec.codecs.hashing import keys_of_content
from qtensor.spec.format import Format, PartSpec, Route
from qtensor.spec.recipes import Recipe

APPEARANCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Registration:
    """What belongs to one recipe type.

    Attributes:
        format: the numerics.
        tensor_class: the class of its quantized tensors.
        names: short names of common recipes, for a command line.
        route: the hardware's product; None where every product is emulated.
    """

    format: Format
    tensor_class: type[Any]
    names: Mapping[str, Recipe]
    route: Route | None


_registered: dict[type[Recipe], Registration] = {}


def register(
    recipe_type: type[Recipe],
    numerics: Format,
    tensor_class: type[Any],
    *,
    names: Mapping[str, Recipe] = MappingProxyType({}),
    route: Route | None = None,
) -> None:
    """Make a format known; all fields of its recipe have defaults. A second registration of a recipe type raises."""
    if recipe_type in _registered:
        raise ValueError(f"{recipe_type.__name__} is registered already")
    _registered[recipe_type] = Registration(numerics, tensor_class, names, route)


def registered(recipe: Recipe) -> Registration:
    """The registration of a recipe's type. Raises TypeError for anything that is not a recipe."""
    found = _registered.get(type(recipe))
    if found is None:
        known = ", ".join(kind.__name__ for kind in _registered)
        raise TypeError(f"expected a recipe ({known}), got {type(recipe).__name__}: {recipe!r}")
    return found


def registrations() -> Mapping[type[Recipe], Registration]:
    """All registrations by recipe type, in their order."""
    return MappingProxyType(_registered)


def format_of(recipe: Recipe) -> Format:
    """The numerics behind a recipe."""
    return registered(recipe).format


@functools.cache
def specs_of(recipe: Recipe) -> tuple[PartSpec, ...]:
    """The specs of a recipe's parts, payload first."""
    return format_of(recipe).parts(recipe)


def part_names() -> set[str]:
    """The names that parts have in any of the registered formats."""
    return {spec.name for kind in _registered for spec in specs_of(kind())}


def shared_amax(x: Tensor, recipe: Recipe) -> Tensor | None:
    """Largest finite magnitudes behind the scales that pieces of a cut tensor share (see `shares_scale_along`).

    fp32 [] for a tensor-wide scale, [.., N, 1] for one a row (infinite where `marks_rows` says so); None where every
    scale belongs to a block.
    """
    numerics = format_of(recipe)
    specs = numerics.parts(recipe)  # not specs_of: a tracer cannot see through its cache
    if not all(spec.per_row for spec in specs):
        return finite_amax(x)
    return None if all(spec.block for spec in specs) else row_amax(x, marked=numerics.marks_rows)


def encode(x: Tensor, recipe: Recipe, amax: Tensor | None, blocks: BlockFacts | None = None) -> dict[str, Tensor]:
    """Parts of x (fp32 [.., N, K]); shared scales are made from `amax`, that of `shared_amax` or an agreed one.

    `blocks`, for square blocks alone: the facts that block scales are made from; None: those of x.
    """
    numerics = format_of(recipe)
    return numerics.encode_with(x, recipe, numerics.quantizer(x, recipe, amax, blocks))


def encode_drawn(x: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """Parts of x (fp32 [.., K]), every row by itself, rounded stochastically by bits that are made of the row itself.

    The recipe is one of rows, of a format that `draws`.
    """
    numerics = format_of(recipe)
    quantizer = {**numerics.quantizer(x, recipe, row_amax(x)), "keys": keys_of_content(x)}
    return numerics.encode_with(x, recipe, quantizer)


def adopt(x: Tensor, recipe: Recipe, scale: Tensor, blocks: BlockFacts | None = None) -> dict[str, Tensor]:
    """`encode` under a given shared scale, shaped like the amax; the parts may lack a history."""
    return format_of(recipe).adopt(x, recipe, scale, blocks)


def block_facts(x: Tensor, recipe: Recipe) -> BlockFacts:
    """Facts of the row of each block that every row of x (fp32 [.., N, K]) holds."""
    block = block_multiple(recipe)
    broken = (~finite(x)).to(torch.float32)
    return BlockFacts(block_amax(x, block, square=False), block_amax(broken, block, square=False))


@functools.cache
def block_multiple(recipe: Recipe) -> int:
    """What cuts along K must be multiples of: the number of elements in a block, or 1."""
    return math.lcm(*(spec.block for spec in specs_of(recipe) if spec.per_row and spec.block))


@functools.cache
def column_multiple(recipe: Recipe) -> int:
    """What K must be a multiple of: the number of elements in a block, or 1 where the last block may be smaller."""
    return math.lcm(*(spec.block for spec in specs_of(recipe) if spec.per_row and spec.block and not spec.ragged))


def row_multiple(recipe: Recipe) -> int:
    """How many rows share one block scale: those of a whole square block, else 1."""
    return block_multiple(recipe) if getattr(recipe, "blocks", "row") == "square" else 1


def _ragged(recipe: Recipe) -> bool:
    """Whether the last block of a row, and of a column of square blocks, may be smaller."""
    return any(spec.ragged for spec in specs_of(recipe))


@functools.cache
def tensor_wide(recipe: Recipe) -> str | None:
    """The name of the part that is the tensor-wide scale, None for formats without one."""
    return next((spec.name for spec in specs_of(recipe) if not spec.per_row), None)


@functools.cache
def keeps_history(recipe: Recipe) -> bool:
    """Whether the scale is made from the amaxes of earlier steps, which an `amax_history` among the parts holds."""
    return any(spec.length is not None for spec in specs_of(recipe))


def shares_scale_along(recipe: Recipe, dim: int, ndim: int) -> bool:
    """Whether the pieces of a tensor cut along `dim` share a scale, on which they must agree then.

    True along every dim for a tensor-wide scale, along K for a scale a row, never for scales of blocks.
    """
    return not all(spec.extends_along(dim, ndim) for spec in specs_of(recipe))


def check_values(value: torch.Tensor, into: str) -> None:
    """Raise TypeError where a dense tensor has a one-byte dtype: it can only hold codes, which a cast would misread."""
    if value.dtype.itemsize == 1:
        raise TypeError(
            f"{into} got {value.dtype}: codes without their scale, not values; dequantize them first, or read the "
            "files they come from with dcp_adapters.import_hf"
        )


def check_shape(shape: Sequence[int], recipe: Recipe, what: str = "tensor", *, full: bool = True) -> None:
    """Raise ValueError where `shape` cannot be quantized under `recipe`.

    `full` also checks the rows of square blocks, for a full tensor; a shard may hold any number of rows.
    """
    multiple = column_multiple(recipe)
    if len(shape) == 0:
        raise ValueError(f"{what}: a 0-dim tensor can not be quantized; expected [.., K]")
    if shape[-1] % multiple:
        raise ValueError(
            f"{what}: shape {tuple(shape)} has K={shape[-1]}, which is not a multiple of {multiple}, as {recipe} "
            "needs; leave this weight out (exclude=..., or build it outside of quantized_model_init), or "
            "choose a Float8 recipe"
        )
    rows = row_multiple(recipe) if full else 1
    if rows > 1 and _ragged(recipe):
        if len(shape) < 2:
            raise ValueError(
                f"{what}: shape {tuple(shape)} is one row, and the square blocks of {recipe} need [.., N, K]; use "
                'blocks="row"'
            )
    elif rows > 1 and (len(shape) < 2 or shape[-2] % multiple):
        raise ValueError(
            f"{what}: shape {tuple(shape)} needs its last two dims to be multiples of {multiple} for the square "
            f'blocks of {recipe}; use blocks="row"'
        )


def logical_shape(payload: Tensor, recipe: Recipe) -> torch.Size:
    """Shape of the tensor whose payload this is; the payload may pack several elements into a byte."""
    packing = specs_of(recipe)[0].block
    if packing == 1:
        return payload.shape
    return torch.Size((*payload.shape[:-1], payload.shape[-1] * packing))


def part_problems(parts: Mapping[str, Tensor], recipe: Recipe) -> list[str]:
    """Why `parts` are not the parts of one tensor under `recipe`, in words; empty where they are."""
    specs = {spec.name: spec for spec in specs_of(recipe)}
    problems = [f"missing {name!r}" for name in specs.keys() - parts.keys()]
    problems += [f"unexpected {name!r}" for name in parts.keys() - specs.keys()]
    if problems:
        return sorted(problems)
    shape = logical_shape(parts["payload"], recipe) if parts["payload"].ndim else ()
    try:
        check_shape(shape, recipe, full=False)
    except ValueError as error:
        return [str(error)]
    for name, spec in specs.items():
        got, want = parts[name], spec.shape(shape)
        if got.dtype != spec.dtype or tuple(got.shape) != want:
            problems.append(f"{name!r} is {got.dtype} {tuple(got.shape)}, expected {spec.dtype} {want}")
        elif got.device != parts["payload"].device:
            problems.append(f"{name!r} is on {got.device}, the payload on {parts['payload'].device}")
        elif got.is_neg() or got.is_conj():
            problems.append(f"{name!r} is a lazy negative, whose memory holds other values; resolve_neg() it")
        elif isinstance(got, DTensor):
            problems.append(f"{name!r} is a DTensor; a DTensor goes around a quantized tensor, not inside of it")
    return problems


def describe(shape: Sequence[int], recipe: Recipe) -> str:
    """A quantized weight in words, for error messages."""
    return f"a quantized weight of shape {tuple(shape)} ({recipe})"
