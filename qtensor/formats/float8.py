"""Float8: one fp32 scale a tensor or a row; value = q * scale, q in E4M3 or E5M2.

    amax  = max |x| over the finite elements of the tensor or row
    enc   = 1 if amax == 0 else max_q / amax          (one division, inf -> FLT_MAX; power_of_two clears its mantissa)
    scale = 1 / enc
    q     = RNE(clamp(x * enc, -max_q, max_q))

These are the formulas of TransformerEngine's current-scaling kernels. An element that is not finite becomes NaN and
affects no other element.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import (  # type: ignore[attr-defined] # torch's stubs lack grouped products
    ScalingType,
    scaled_grouped_mm,
    scaled_mm,
)

from qtensor.numerics import transposing
from qtensor.numerics.fineness import Fineness, fineness, fits
from qtensor.numerics.triton_kernels import ByHand
from qtensor.spec.blocks import BlockFacts, encoding_scale, finite, quotient
from qtensor.spec.codecs import fp8
from qtensor.spec.codecs.fp8 import ELEMENTS
from qtensor.spec.codecs.rounding import power_of_two_floor
from qtensor.spec.format import Format, Grain, GroupedRoute, PartSpec, Route
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

# Row-wise kernels: CUTLASS for 8.9, 9.x and 10.x, cuBLAS from CUDA 12.9 for 9.x.
CAPABILITIES = ((8, 9), (9, 0), (10, 0))


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8CurrentScaling(Recipe):
    """Float8 with scales taken from the tensor's own amax.

    Args:
        element: "e4m3" (largest value 448) or "e5m2" (57344).
        granularity: "row" (one scale for each row, [.., N, 1]) or "tensor" (one scale for all, []).
        power_of_two: round the encoding scale down to a power of two.
        activations: None, or "dynamic": a linear layer quantizes its input too, with one scale a row whatever the
            granularity.
        gradients: None, or with activations="dynamic" the element of gradients: "e5m2" (more range; what
            TransformerEngine's HYBRID takes) or "e4m3" (more digits). Both products of backward are then low-precision
            ones, see qtensor/products/gradients.py.
        accumulation: None, or with activations="dynamic" "fast": tensor cores add up the product of forward in fewer
            bits, as torchao's default does (see docs/numerics.md).

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Float8CurrentScaling(granularity="row"))
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 64), 'scale': (4, 1)}
        ```
    """

    gradient_elements: ClassVar[tuple[str, ...]] = tuple(ELEMENTS)
    accumulations: ClassVar[tuple[str, ...]] = ("fast",)

    element: str = "e4m3"
    granularity: str = "row"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "element", tuple(ELEMENTS))
        check_choice(self, "granularity", ("row", "tensor"))
        check_choice(self, "power_of_two", (False, True))

    @property
    def of_rows(self) -> Recipe:
        """With one scale a row, which is found and used in one pass over the row."""
        # made anew each time: dynamo warns of caches that it traces through
        return self if self.granularity == "row" else dataclasses.replace(self, granularity="row")


class Float8(Format):
    """The numerics of Float8, see `Format`."""

    converts = True
    judges = True
    exact_in_bf16 = True

    def parts(self, recipe: Float8CurrentScaling) -> tuple[PartSpec, ...]:
        """The parts."""
        dtype, _ = ELEMENTS[recipe.element]
        per_row = recipe.granularity == "row"
        return PartSpec("payload", dtype), PartSpec("scale", torch.float32, per_row=per_row, block=0)

    def quantizer(
        self, x: Tensor, recipe: Float8CurrentScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        """The amax itself: fp32 [] or [.., 1]."""
        assert amax is not None
        return {"amax": amax}

    def grid(self, recipe: Float8CurrentScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """1 / scale and scale, shaped like the amax."""
        return grid_of(quantizer["amax"], recipe.element, power_of_two=recipe.power_of_two)

    def encode_with(
        self, x: Tensor, recipe: Float8CurrentScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Parts under the scale that the quantizer's amax gives."""
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        return {"payload": fp8.encode(x * enc, finite(x), recipe.element), "scale": quotient(1.0, enc)}

    def adopt(
        self, x: Tensor, recipe: Float8CurrentScaling, scale: Tensor, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        """Parts under a scale."""
        return {"payload": fp8.encode(x / scale, finite(x), recipe.element), "scale": scale.clone()}

    def fineness(self, x: Tensor, recipe: Float8CurrentScaling) -> tuple[Fineness, Fineness | None]:
        """Of each row, or of all of x."""
        facts = fineness(x, 0, fp8.MANTISSA[recipe.element])
        facts = facts.joined() if recipe.granularity == "tensor" else facts
        return facts, facts

    def fitted(
        self, recipe: Float8CurrentScaling, facts: Fineness, shared: Fineness
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The powers of two that `power_of_two` would choose."""
        enc = power_of_two_floor(encoding_scale(ELEMENTS[recipe.element][1], shared.amax))
        return {}, enc, fits(enc, shared, fp8.STEP[recipe.element])

    def asked(self, parts: Mapping[str, Tensor], recipe: Float8CurrentScaling, name: str, largest: Tensor) -> Tensor:
        """By the largest element under each scale."""
        return asked_of(parts[name], largest, recipe.element, power_of_two=recipe.power_of_two)

    def grain(self, recipe: Float8CurrentScaling) -> Grain | None:
        """That of its elements."""
        return Grain(*fp8.GRAIN[recipe.element])

    def unit(self, scales: Mapping[str, Tensor], recipe: Float8CurrentScaling) -> Tensor:
        """The scale, or what the amax makes it."""
        return scales["scale"] if "scale" in scales else self.grid(recipe, scales)[1]

    def snap(self, scaled: Tensor, recipe: Float8CurrentScaling) -> Tensor:
        """Nearest E4M3 or E5M2 values."""
        return fp8.snapped(scaled, recipe.element)

    def decode(self, parts: Mapping[str, Tensor], recipe: Float8CurrentScaling) -> Tensor:
        """`payload * scale`."""
        return parts["payload"].float().mul_(parts["scale"])

    def by_hand(self, recipe: Float8CurrentScaling) -> ByHand | None:
        """Its kernels for GPUs."""
        options = {"element": ELEMENTS[recipe.element][0], "power_of_two": recipe.power_of_two}
        return ByHand("float8", options, turns=True, wide=recipe.granularity == "tensor")

    def without_factors(
        self, parts: Mapping[str, Tensor], recipe: Float8CurrentScaling
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """The elements."""
        return {**parts, "scale": torch.ones_like(parts["scale"])}, parts["scale"]

    def turned(
        self, parts: Mapping[str, Tensor], recipe: Float8CurrentScaling, multiple: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The same elements with scales of 1; the scales are factors of the rows, which become columns."""
        payload = parts["payload"]  # [.., N, K] -> [.., K, N padded]
        if payload.ndim == 2:
            payload = transposing.turned(payload, multiple)
        else:
            payload = transposing.padded(payload.transpose(-2, -1), multiple)
        ones = torch.ones((*payload.shape[:-1], 1), dtype=torch.float32, device=payload.device)
        return {"payload": payload, "scale": ones}, self.column_factors(parts, recipe)

    def column_factors(self, parts: Mapping[str, Tensor], recipe: Float8CurrentScaling) -> Tensor:
        """The scales."""
        scale = parts["scale"]
        return scale.transpose(-2, -1) if scale.ndim else scale.reshape(1, 1)


def grid_of(amax: Tensor, element: str, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """1 / scale and scale, for amaxes of any shape."""
    enc = encoding_scale(ELEMENTS[element][1], amax)
    if power_of_two:
        enc = power_of_two_floor(enc)
    return enc, quotient(1.0, enc)


def asked_of(scale: Tensor, largest: Tensor, element: str, *, power_of_two: bool) -> Tensor:
    """Where fp32 scales can be what `grid_of` makes of an amax, given the largest element under each of them; bool.

    amax * enc is max_q up to two fp32 roundings, which rounding stochastically may take to the element before it. With
    `power_of_two` it lies between max_q / 2 and max_q. Only zeros have the scale 1 and no element but 0. Where the
    scale is no normal number, enc may have been clamped, and nothing is known.
    """
    dtype, top = ELEMENTS[element]
    least = top / 2 if power_of_two else top - 2.0 ** math.floor(math.log2(top)) * torch.finfo(dtype).eps
    made = largest >= least
    if power_of_two:
        made = made & (scale.view(torch.int32) & 0x7FFFFF == 0)
    return made | ((largest == 0) & (scale == 1)) | (scale < torch.finfo(torch.float32).tiny)


class Float8Tensor(QuantizedTensor):
    """A Float8 quantized tensor: `payload` float8 [.., K].

    `scale` is fp32: [.., 1] (a row), [] (the tensor) or [.., ceil(K / 128)] (blocks).

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Float8CurrentScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('Float8Tensor', torch.float8_e4m3fn, torch.float32)
        ```
    """


def multiply(x: Mapping[str, Tensor], w: Mapping[str, Tensor], dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """The hardware's product, row-wise: a tensor-wide scale of w is spread over its rows."""
    w_scale = w["scale"].reshape(1, -1).expand(1, w["payload"].shape[0]).contiguous()  # [1, N]
    return scaled_mm(
        x["payload"],  # [M, K]
        w["payload"].t(),  # [K, N]
        x["scale"],  # [M, 1]
        ScalingType.RowWise,
        w_scale,
        ScalingType.RowWise,
        output_dtype=dtype,
        use_fast_accum=recipe.accumulation == "fast",
    )


def _multiply_rows(
    x: Mapping[str, Tensor], w: Mapping[str, Tensor], ends: Tensor, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    """The hardware's grouped product: tokens [T, K] by the matrix [N, K] of their group, with scales of rows.

    torch's kernels begin a group at any row: rows of K bytes keep the alignment that they need.
    """
    experts, rows, _ = w["payload"].shape
    y: Tensor = scaled_grouped_mm(
        x["payload"].contiguous(),  # [T, K]
        w["payload"].transpose(-2, -1),  # [E, K, N]
        x["scale"].reshape(-1),  # [T]
        ScalingType.RowWise,
        (w["scale"].squeeze(-1) if w["scale"].ndim else w["scale"]).expand(experts, rows).contiguous(),  # [E, N]
        ScalingType.RowWise,
        offs=ends,
        output_dtype=dtype,
        use_fast_accum=recipe.accumulation == "fast",
    )
    return y


def _multiply_columns(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], ends: Tensor, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    """The same along tokens: columns [M, W] by [L, W], with scales of a row in a group, [E, M] and [E, L]."""
    dw: Tensor = scaled_grouped_mm(
        a["payload"],  # [M, W]
        b["payload"].t(),  # [W, L]
        a["scale"].reshape(-1),  # [E * M], group by group
        ScalingType.RowWise,
        b["scale"].reshape(-1),
        ScalingType.RowWise,
        offs=ends,
        output_dtype=dtype,
    )
    return dw


# CUTLASS for 9.0 alone (aten/src/ATen/native/cuda/ScaledGroupMM.cu)
GROUPED = GroupedRoute(rows=_multiply_rows, columns=_multiply_columns, capabilities=((9, 0),), multiple=16)
ROUTE = Route(multiply=multiply, capabilities=CAPABILITIES, columns=16, grouped=GROUPED)
NAMES = {"float8-row": Float8CurrentScaling(), "float8-tensor": Float8CurrentScaling(granularity="tensor")}
register(Float8CurrentScaling, Float8(), Float8Tensor, names=NAMES, route=ROUTE)
