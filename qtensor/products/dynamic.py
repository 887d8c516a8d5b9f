"""The product y = Q(x) @ Q(w).T of a recipe with activations="dynamic".

The input is quantized on the fly in the weight's format, every row (token) by itself:

    Float8   one scale a row, whatever the granularity of the weight
    MXFP8    1x32 blocks
    MXFP4    1x32 blocks
    INT4     groups along K
    INT8     one scale a row
    NF4      blocks along K
    NVFP4    1x16 blocks under a global scale a row

No amax is taken over several tokens, so the bytes of a token depend on that token alone: not on the batch, its padding,
or how ranks share it. No collective is needed.

There are three routes to the product. The hardware's is torch.nn.functional.scaled_mm; a format says in its own file
how to call it and where its kernels exist (its `Route`), and `scaled_mm_support` tells whether they support a case, and
why if they do not. On a GPU that has none, bf16 holds what most formats decode to, and multiplies it at full speed
(in_bf16.py). Everything else is emulated: both operands are decoded to fp32, multiplied in fp32 and rounded once to the
input's dtype. The routes differ in the order and width of the accumulation, and in where scales are rounded in fp32:
the first two apply them to sums, the emulation to elements. The CPU always emulates; elsewhere one warning tells of it
(emulation.py).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import kernels
from qtensor.products import in_bf16
from qtensor.products.emulation import tell_of_emulation, without_autocast
from qtensor.spec.format import Route
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import describe, registered
from qtensor.tensor.contents import decode, parts_per_row
from qtensor.tensor.quantized_tensor import QuantizedTensor

Parts = Mapping[str, Tensor]
OTHER_SHAPE = "scaled_mm is not used for a weight that is a view of parts of another shape"


def product(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Compute Q(x) @ Q(w).T with the rows of x quantized on the fly; not differentiable.

    Args:
        x: dense [.., K], bf16, fp16 or fp32, 1-D and up.
        weight: [N, K], also a gathered weight whose shards have different tensor-wide scales.

    Returns:
        [.., N] in x.dtype, rounded once.

    Raises:
        ValueError: the shapes do not fit.
    """
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} does not fit {describe(weight.shape, weight.recipe)}; expected "
            "[.., K] and [N, K]"
        )
    rows, columns = weight.shape
    with torch.no_grad():
        flat = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)  # [M, K]
        parts = quantize_rows(flat, weight.recipe)
        supported, reason = scaled_mm_support(x.device, weight.recipe, x.dtype, rows, columns)
        route = registered(weight.recipe).route
        # the hardware reads parts as they are stored, and knows no other shape or order
        stored = weight._lens.described is None
        if supported and route is not None and stored:
            y = route.multiply(parts, parts_per_row(weight), x.dtype, weight.recipe)
        elif stored and in_bf16.holds(x.device, weight.recipe, x.dtype):
            y = in_bf16.multiply(parts, weight.recipe.of_rows, parts_per_row(weight), weight.recipe, x.dtype)
        else:
            name = type(weight.recipe).__name__
            if is_tracing():  # sizes may be no numbers there
                reason = _unfit_device(x.device, name, route)
            tell_of_emulation(x.device, name, reason or ("" if is_tracing() else OTHER_SHAPE))
            y = emulate(parts, weight, x.dtype)
        # not a view: autograd would refuse in-place writes to one
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], rows))  # type: ignore[no-any-return]


def quantize_rows(x: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """Return the parts of x [.., K], every row by itself: a tensor-wide scale becomes one scale a row, [.., 1]."""
    return kernels.encode_rows(x, recipe.of_rows)


def emulate(x: Parts, weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the product in fp32 of the decoded operands, [M, N], rounded once to `dtype`."""
    rows = weight.recipe.of_rows
    values = kernels.decode(x, rows, torch.float32)
    with without_autocast(values.device):
        return F.linear(values, decode(weight, torch.float32)).to(dtype)


def scaled_mm_support(
    device: torch.device, recipe: Recipe, dtype: torch.dtype, rows: int, columns: int
) -> tuple[bool, str]:
    """Return whether scaled_mm computes [.., columns] @ [rows, columns].T in `dtype` under this recipe; if not, why."""
    registration = registered(recipe)
    reason = _unfit_device(device, type(recipe).__name__, registration.route)
    if not reason and registration.route is not None:
        payload = registration.format.parts(recipe)[0]
        reason = _unfit_operands(payload.dtype, registration.route, dtype, rows, columns)
    return not reason, reason


def _unfit_device(device: torch.device, name: str, route: Route | None) -> str:
    if route is None:
        return f"scaled_mm does not know {name}"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"scaled_mm is used on NVIDIA GPUs, not on this device ({device.type})"
    version = tuple(int(number) for number in torch.version.cuda.split(".")[:2])
    if version < route.cuda:
        return f"scaled_mm knows {name} in torch built for CUDA {route.cuda[0]}.{route.cuda[1]} or later"
    found = torch.cuda.get_device_properties(device)
    if any(found.major == major and found.minor >= minor for major, minor in route.capabilities):
        return ""
    known = ", ".join(f"{major}.{minor}" for major, minor in route.capabilities)
    return f"scaled_mm knows {name} on compute capability {known}, not on {found.major}.{found.minor}"


def _unfit_operands(payload: torch.dtype, route: Route, dtype: torch.dtype, rows: int, columns: int) -> str:
    if payload == torch.float8_e5m2:
        return "scaled_mm does not multiply e5m2 by e5m2"
    if dtype != torch.bfloat16:
        return f"scaled_mm is used for bfloat16 inputs, not for {dtype}"
    if rows % route.rows or columns % route.columns or 0 in (rows, columns):
        return f"scaled_mm needs N a multiple of {route.rows} and K of {route.columns}, not N={rows} and K={columns}"
    return ""


def swizzle(scale: Tensor) -> Tensor:
    """Return scales of blocks [rows, blocks], one byte each, as tensor cores read them (SWIZZLE_32_4_4), flat.

    Tiles have 128 rows and 4 blocks, padded with zeros. In a tile, row r goes to line r % 32, where the four rows with
    that remainder stand side by side. Equals torchao's `to_blocked`.
    """
    rows, blocks = scale.shape
    tiles = -(-rows // 128), -(-blocks // 4)
    padded = F.pad(scale.view(torch.uint8), (0, 4 * tiles[1] - blocks, 0, 128 * tiles[0] - rows))
    tiled = padded.reshape(tiles[0], 4, 32, tiles[1], 4)  # [.., r // 32, r % 32, .., block]
    return tiled.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)
