"""What a format is: the list of its parts, and pure functions from dense values to parts and back.

A `PartSpec` says how one part extends along the logical shape [.., N, K]; all code that cuts, joins, checks or saves
parts uses it, so no other code needs to know a format by name. A format is one file (float8.py, float8_blocks.py,
float8_delayed.py, int4.py, mxfp4.py, mxfp8.py, nvfp4.py) with its recipe, its numerics and its tensor class, built from
the codecs in qtensor/codecs; `register` makes it known.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtensor.blocks import BlockFacts, block_amax, finite, finite_amax, row_amax
from qtensor.recipes import Recipe

APPEARANCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PartSpec:
    """How one part follows the logical shape [.., N, K].

    Attributes:
        per_row: the part has the leading dims of the logical shape; otherwise it is tensor-wide and fp32: the shared
            scale, one value of shape [], or, with a `length`, a vector [length].
        block: logical elements along K behind one element of the part (2 for packed nibbles, 32 for MXFP8 scales); 0
            means that a whole row shares one element, stored with a last dim of 1.
        ragged: the last block of a row may hold fewer elements; otherwise K is a multiple of `block`.
        gathered: FSDP's all-gather sends it; products need it.
        codes: torch's dtype for the numbers of a part that is stored as uint8; None where torch has none.
    """

    name: str
    dtype: torch.dtype
    per_row: bool = True
    block: int = 1
    ragged: bool = False
    length: int | None = None
    gathered: bool = True
    codes: torch.dtype | None = None

    @property
    def numbers(self) -> torch.dtype | None:
        """The floating dtype of the part's numbers; None where only the format knows what they are."""
        return self.dtype if self.dtype.is_floating_point else self.codes

    def shape(self, logical: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part of a tensor of shape `logical`."""
        if not self.per_row:
            return () if self.length is None else (self.length,)
        return (*logical[:-1], self.columns(0, logical[-1])[1])

    def columns(self, start: int, stop: int) -> tuple[int, int]:
        """Where the part for the logical columns start:stop begins and ends; these must be whole blocks."""
        if not self.block:
            return 0, 1
        behind = stop + self.block - 1 if self.ragged else stop  # a tracer could not tell that both agree
        return start // self.block, behind // self.block

    def extends_along(self, dim: int, ndim: int) -> bool:
        """Whether cutting the logical tensor along `dim` cuts this part too."""
        return self.per_row and (dim != ndim - 1 or self.block > 0)


class Format(Protocol):
    """The numerics of one format, stateless: results depend on the arguments alone. `x` is always fp32 [.., N, K].

    A quantizer is a dict of plain tensors that decide every scale before any element is rounded. `encode` here is the
    function below:

        encode(x, recipe, amax) == encode_with(x, recipe, quantizer(x, recipe, amax))                 bit for bit
        decode(encode_with(x, recipe, q)) == snap(x * enc, recipe) * dec, enc, dec = grid(recipe, q)  the same, finite x

    A format with scales that the pieces of a cut tensor share has one more method, `adopt(x, recipe, scale)`: `encode`
    under a shared scale that is already decided (see the function of that name). A format that keeps a history also has
    `step(x, recipe, amax, scale, history)`, see float8_delayed.py.

    A format whose usual scales are not the powers of two under which its elements hold most values has two more, for
    conversions (see exact.py):

        fineness(x, recipe)            facts of the values behind each scale, and behind each shared scale (or None)
        fitted(recipe, facts, shared)  (quantizer, enc, fits): what `encode_with` takes, and where it is exact then

    One whose scales belong to whole rows, and whose recipes take `gradients`, has one more for the backward products:

        turned(parts, recipe)          (parts of the transposed elements [K, N], factors of its columns [1, N])

    One whose stored scales can be judged has `asked(parts, recipe, name, largest)`: where its scale of that name can be
    what `quantizer` makes, bool, by the largest number that is stored under each (see own_scales.py).

    One with kernels written by hand for GPUs has `by_hand(recipe)`: which these are (see triton_kernels).
    """

    def parts(self, recipe: Any) -> tuple[PartSpec, ...]:
        """The parts, payload first."""

    def quantizer(self, x: Tensor, recipe: Any, amax: Tensor | None) -> dict[str, Tensor]:
        """What decides the scales of x, ignoring elements that are not finite; shared scales are made from `amax`.

        A format with square blocks takes a fourth argument, `blocks`: facts of the blocks to use in place of those that
        x shows (see qtensor/cut_blocks.py); so does its `adopt`.
        """

    def grid(self, recipe: Any, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(enc, dec): x is multiplied by enc before rounding, and its elements by dec after it.

        One entry for each scale: [], [.., N, 1] or [.., N, ceil(K / block)]. Both are fp32, but enc may be fp64 where
        the format divides by its scale: x * enc is then fp64, and `snap` rounds it to fp32 first (see int4.py).
        """

    def encode_with(
        self, x: Tensor, recipe: Any, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Parts of x under any quantizer of its shape; they mark elements of x that are not finite.

        `enc` is the first result of `grid` for this quantizer, if the caller has it already.
        """

    def snap(self, scaled: Tensor, recipe: Any) -> Tensor:
        """The value of the element nearest to each of `scaled` (never NaN), ties to even, saturating; fp32."""

    def decode(self, parts: Mapping[str, Tensor], recipe: Any) -> Tensor:
        """fp32 [.., N, K]. A tensor-wide part may also be given per row ([N, 1, ..]), as a gathered weight has it."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the hardware multiplies two tensors of one format.

    Attributes:
        multiply: (parts of x [M, K], parts of w [N, K], output dtype) -> [M, N]; tensor-wide parts of x are given per
            row, [M, 1], those of w as one value or, for a gathered weight, per row, [N, 1].
        capabilities: the CUDA compute capabilities that have kernels, as (major, least minor).
        columns, rows: what K and N must be multiples of.
    """

    multiply: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], torch.dtype], Tensor]
    capabilities: tuple[tuple[int, int], ...]
    columns: int
    rows: int = 16


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
    fmt: Format,
    tensor_class: type[Any],
    *,
    names: Mapping[str, Recipe] = MappingProxyType({}),
    route: Route | None = None,
) -> None:
    """Make a format known; all fields of its recipe have defaults. A second registration of a recipe type raises."""
    if recipe_type in _registered:
        raise ValueError(f"{recipe_type.__name__} is registered already")
    _registered[recipe_type] = Registration(fmt, tensor_class, names, route)


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

    fp32 [] for a tensor-wide scale, [.., N, 1] for one a row; None where every scale belongs to a block.
    """
    specs = format_of(recipe).parts(recipe)  # not specs_of: a tracer cannot see through its cache
    if not all(spec.per_row for spec in specs):
        return finite_amax(x)
    return None if all(spec.block for spec in specs) else row_amax(x)


def encode(x: Tensor, recipe: Recipe, amax: Tensor | None, blocks: BlockFacts | None = None) -> dict[str, Tensor]:
    """Parts of x (fp32 [.., N, K]); shared scales are made from `amax`, that of `shared_amax` or an agreed one.

    `blocks`, for square blocks alone: the facts that block scales are made from; None: those of x.
    """
    fmt: Any = format_of(recipe)
    facts = () if blocks is None else (blocks,)
    return fmt.encode_with(x, recipe, fmt.quantizer(x, recipe, amax, *facts))  # type: ignore[no-any-return]


def adopt(x: Tensor, recipe: Recipe, scale: Tensor, blocks: BlockFacts | None = None) -> dict[str, Tensor]:
    """`encode` under a given shared scale, shaped like the amax; the parts may lack a history."""
    fmt: Any = format_of(recipe)
    facts = () if blocks is None else (blocks,)
    return fmt.adopt(x, recipe, scale, *facts)  # type: ignore[no-any-return]


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
