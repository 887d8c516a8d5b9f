"""What a format is: the list of its parts, and pure functions from dense values to parts and back.

A `PartSpec` says how one part extends along the logical shape [.., N, K]; all code that cuts, joins, checks or saves
parts uses it, so no other code needs to know a format by name. A `Format` has the numerics, and a `Route` says how the
hardware multiplies. A format is one file (float8.py, float8_blocks.py, float8_delayed.py, int4.py, int8.py, mxfp4.py,
mxfp8.py, nf4.py, nvfp4.py) with its recipe, its numerics and its tensor class, built from the codecs in codecs/;
`register` (registry.py) makes it known.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qtensor.spec.blocks import BlockFacts


class Grain(NamedTuple):
    """How fine masters are kept as remainders (qtensor/states/lattice.py).

    Attributes:
        bits: of mantissa.
        least: the exponent, counted from that of the element's unit, from which on they are; equal distances below.
    """

    bits: int
    least: int


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
        zeros: a scale that is 0 where all that it scales is; other scales of fp32 and bf16 are positive.
        codes: torch's dtype for the numbers of a part that is stored as uint8; None where torch has none.
    """

    name: str
    dtype: torch.dtype
    per_row: bool = True
    block: int = 1
    ragged: bool = False
    length: int | None = None
    gathered: bool = True
    zeros: bool = False
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

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the part of a box of the logical tensor lies in the whole part, as (offsets, sizes)."""
        shape = self.shape(sizes)
        if not self.per_row:
            return (0,) * len(shape), shape
        return (*offsets[:-1], self.columns(offsets[-1], offsets[-1] + sizes[-1])[0]), shape

    def extends_along(self, dim: int, ndim: int) -> bool:
        """Whether cutting the logical tensor along `dim` cuts this part too."""
        return self.per_row and (dim != ndim - 1 or self.block > 0)


class Format(abc.ABC):
    """The numerics of one format, stateless: results depend on the arguments alone. `x` is always fp32 [.., N, K].

    A quantizer is a dict of plain tensors that decide every scale before any element is rounded. `encode` here is that
    of registry.py:

        encode(x, recipe, amax) == encode_with(x, recipe, quantizer(x, recipe, amax))                 bit for bit
        decode(encode_with(x, recipe, q)) == snap(x * enc, recipe) * dec, enc, dec = grid(recipe, q)  the same, finite x

    Of formats with `draws`, a quantizer may also hold `keys`, int32 [.., N, 1], one a row: elements are then rounded
    stochastically by the bits that these give (codecs/hashing.py), and not to the nearest.

    A format of your own defines the six methods that have no default. The others are for formats that can do more; each
    says who asks, and the default is the answer of a format that cannot.

    Attributes:
        converts: it has `fineness` and `fitted`.
        judges: it has `asked`.
        exact_in_bf16: bf16 holds the decoded values of the parts that `without_factors` returns, see
            qtensor/products/in_bf16.py.
        draws: a quantizer with `keys` rounds stochastically.
        marks_rows: the scale of a row tells that the row holds an element that is not finite. The amax of such a row is
            infinite, so that all pieces of a row that is cut along K get that scale.
    """

    converts: ClassVar[bool] = False
    judges: ClassVar[bool] = False
    exact_in_bf16: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    marks_rows: ClassVar[bool] = False

    @abc.abstractmethod
    def parts(self, recipe: Any) -> tuple[PartSpec, ...]:
        """The parts, payload first."""

    @abc.abstractmethod
    def quantizer(
        self, x: Tensor, recipe: Any, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        """What decides the scales of x, ignoring elements that are not finite; shared scales are made from `amax`.

        `blocks`, for formats with square blocks alone: facts of the blocks to use in place of those that x shows (see
        qtensor/scales/cut_blocks.py).
        """

    @abc.abstractmethod
    def grid(self, recipe: Any, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(enc, dec): x is multiplied by enc before rounding, and its elements by dec after it.

        One entry for each scale: [], [.., N, 1] or [.., N, ceil(K / block)]. Both are fp32, but enc may be fp64 where
        the format divides by its scale: x * enc is then fp64, and `snap` rounds it to fp32 first (see int4.py).
        """

    @abc.abstractmethod
    def encode_with(
        self, x: Tensor, recipe: Any, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Parts of x under any quantizer of its shape; they mark elements of x that are not finite.

        `enc` is the first result of `grid` for this quantizer, if the caller has it already.
        """

    @abc.abstractmethod
    def snap(self, scaled: Tensor, recipe: Any) -> Tensor:
        """The value of the element nearest to each of `scaled` (never NaN), ties to even, saturating; fp32."""

    @abc.abstractmethod
    def decode(self, parts: Mapping[str, Tensor], recipe: Any) -> Tensor:
        """fp32 [.., N, K]. A tensor-wide part may also be given per row ([N, 1, ..]), as a gathered weight has it."""

    def adopt(self, x: Tensor, recipe: Any, scale: Tensor, blocks: BlockFacts | None = None) -> dict[str, Tensor]:
        """`encode` under a shared scale that is already decided, shaped like the amax; the parts may lack a history.

        Asked of formats with a scale that the pieces of a cut tensor share (see formats.shares_scale_along).
        """
        raise self._cannot("adopt", "a scale that pieces of a cut tensor share")

    def step(self, x: Tensor, recipe: Any, amax: Tensor, scale: Tensor, history: Tensor) -> dict[str, Tensor]:
        """Parts of x under the scale that earlier steps decided, and the history with this step's amax.

        Asked of formats that keep a history (see float8_delayed.py).
        """
        raise self._cannot("step", "an amax history")

    def fineness(self, x: Tensor, recipe: Any) -> tuple[Any, Any]:
        """Facts (qtensor/numerics/fineness.py) of the values behind each scale, and behind each shared one (or None).

        Asked by conversions (qtensor/numerics/exact.py) of formats with `converts`: those whose usual scales are not
        the powers of two under which their elements hold most values.
        """
        raise self._cannot("fineness", "other scales than powers of two")

    def fitted(self, recipe: Any, facts: Any, shared: Any) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
        """(quantizer, enc, fits): what `encode_with` takes, and where it is exact then; asked as `fineness` is."""
        raise self._cannot("fitted", "other scales than powers of two")

    def grain(self, recipe: Any) -> Grain | None:
        """How fine masters are kept as remainders (qtensor/states/remainders.py); None: they cannot be."""
        return None

    def unit(self, scales: Mapping[str, Tensor], recipe: Any) -> Tensor:
        """What a remainder's steps are counted from: fp32, for each scale what it multiplies an element by.

        `scales` is a quantizer, or parts. Asked of formats that have a `grain`.
        """
        return self.grid(recipe, scales)[1]

    def crosses(
        self, before: Tensor, after: Tensor, recipe: Any, quantizer: Mapping[str, Tensor], amax: Tensor | None
    ) -> Tensor | None:
        """Where a magnitude must not become `after` from `before`, since its block would get another scale; bool.

        Both are [.., blocks, block]. Asked of formats that have a `grain`, about magnitudes below the unit times
        2^least. None: nowhere, since no amax is so small.
        """
        return None

    def turned(
        self, parts: Mapping[str, Tensor], recipe: Any, multiple: int
    ) -> tuple[dict[str, Tensor], Tensor] | None:
        """(parts of the transposed elements [K, N], with zeros behind N up to a multiple; factors of columns), or None.

        The factors are fp32 [1, N] or [1, 1]. Asked by the products of backward. Formats have it whose recipes take
        `gradients`, and whose transposed elements are elements of `of_backward`: under scales of whole rows, which
        become the factors, or of square blocks. For the others the values are quantized anew along N.
        """
        return None

    def asked(self, parts: Mapping[str, Tensor], recipe: Any, name: str, largest: Tensor) -> Tensor:
        """Where the scale of that name can be what `quantizer` makes, bool.

        Judged by the largest number that is stored under each; asked by own_scales.py of formats with `judges`.
        """
        raise self._cannot("asked", "scales that can be judged")

    def column_factors(self, parts: Mapping[str, Tensor], recipe: Any) -> Tensor | None:
        """The factors that `turned` returns, alone."""
        return None

    def without_factors(self, parts: Mapping[str, Tensor], recipe: Any) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """(parts of the values without the scales of rows or of the tensor; these, as fp32 factors of rows, or None).

        Asked of formats with `exact_in_bf16`. The factors are [rows, 1] or, one for all rows, [].
        """
        return parts, None

    def by_hand(self, recipe: Any) -> Any | None:
        """The kernels that somebody wrote for GPUs (qtensor.numerics.triton_kernels.ByHand), or None."""
        return None

    def _cannot(self, method: str, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {what}, so it has no {method}")


@dataclass(frozen=True, kw_only=True)
class GroupedRoute:
    """How the hardware multiplies groups of tokens with a stack of one format, by one call for all groups.

    Attributes:
        rows: (parts of tokens [T, C], parts of a stack [E, L, C], ends [E], output dtype, recipe of the stack) -> [T,
            L]; the rows of group e by matrix e, rows behind the last end are anything.
        columns: (parts [M, W], parts [L, W], ends [E], output dtype, recipe) -> [E, M, L]; the columns of group e by
            each other. A scale of rows is given a group, [E, M] and [E, L]; groups are whole blocks, none is empty.
        capabilities: the CUDA compute capabilities that have kernels, exactly these.
        multiple: what C and L must be multiples of.
    """

    rows: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, torch.dtype, Any], Tensor]
    columns: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, torch.dtype, Any], Tensor]
    capabilities: tuple[tuple[int, int], ...]
    multiple: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the hardware multiplies two tensors of one format.

    Attributes:
        multiply: (parts of x [M, K], parts of w [N, K], output dtype, recipe of w) -> [M, N]; tensor-wide parts of x
            are given per row, [M, 1], those of w as one value or, for a gathered weight, per row, [N, 1].
        capabilities: the CUDA compute capabilities that have kernels, as (major, least minor).
        columns, rows: what K and N must be multiples of.
        cuda: the least version of CUDA that torch must be built for, as (major, minor).
        grouped: the same for groups of tokens and a stack of weights; None where the hardware has no such product.
    """

    multiply: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], torch.dtype, Any], Tensor]
    capabilities: tuple[tuple[int, int], ...]
    columns: int
    rows: int = 16
    cuda: tuple[int, int] = (0, 0)
    grouped: GroupedRoute | None = None
