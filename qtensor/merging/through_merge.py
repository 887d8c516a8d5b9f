"""A linear layer that computes with the weight `merge_` would write: adapters are trained through their own merge.

    forward    M  = requantize(dequantize(W) + s b a)     the arithmetic of merge_, so its bytes
               y  = x @ dequantize(M).T + bias            # [T, K] @ [K, N] -> [T, N], as F.linear with M
    backward   dx = dy @ dequantize(M)                    # [T, N] @ [N, K] -> [T, K]
               db = s * dy.T @ (x @ a.T)                  # [N, T] @ [T, r] -> [N, r]
               da = s * (dy @ b).T @ x                    # [r, T] @ [T, K] -> [r, K]

The gradients of the factors are those of y = x @ (W + s b a).T: they pass straight through the rounding, also where it
takes an element of the update back, makes it zero or cuts it off at the largest number of the format. They are
multiplied from the right, as LoRA does it, so that no gradient [N, K] exists. (With P = dy.T @ x, db = s P a.T and
da = s b.T P.) Under a recipe with `gradients` dx is what F.linear makes of M; db and da are not rounded.

Backward keeps x, the factors and W, which are there anyway (under FSDP2 they are gathered again), and merges once more
when it needs M; or it keeps M, as quantized as W is, if asked to. In a compiled graph a merge is one operation: a
compiler might fuse a product with its sum, which rounds once less, and so give other bytes. That of backward takes the
gradient as an operand, so that M is not kept from forward on; late_decode.py tells the same story.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import constant_in_graphs, is_tracing, without_torch_function
from qtensor.merging.low_rank import LowRankUpdate, UpdateSum
from qtensor.numerics import kernels
from qtensor.products.linear import input_gradient
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.lens import OWN
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, specs_of
from qtensor.tensor.contents import parts_per_row
from qtensor.tensor.quantized_tensor import QuantizedTensor

Keep = Literal["nothing", "merged"]
DENSE = ""  # in the place of a recipe


def linear_through_merge(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    updates: LowRankUpdate | Sequence[LowRankUpdate],
    *,
    keep: Keep = "nothing",
) -> Tensor:
    """Compute F.linear(x, M, bias) with the weight M that `merge_` makes of `weight` and `updates`, bit for bit.

    Gradients reach x, the bias and the factors of the updates; the weight is frozen. For adapters of your own: call it
    in the forward of the module that has them. `merge_aware` does so for those of peft.

    Args:
        x: [.., K], bf16, fp16 or fp32.
        weight: [N, K], quantized or dense, not sharded: in a forward under FSDP2 it is the gathered one.
        bias: [N] or None.
        updates: factors of [N, K]; several are added in their order. What is trained are the tensors in them.
        keep: what backward finds of the merged weight. "nothing": it merges again. "merged": its quantized bytes stay
            from forward to backward, as many as those of `weight`, beside it, in each layer.

    Returns:
        [.., N], in the dtype of F.linear.

    Raises:
        ValueError: an update has another shape than the weight, there is none, or `keep` is not known.
        TypeError: the weight is sharded, stored dense for quantized gathers, or trained itself.

    Example:
        ```python
        >>> weight = quantize(torch.randn(32, 64), MXFP4BlockScaling())
        >>> a, b = torch.randn(4, 64, requires_grad=True), torch.zeros(32, 4, requires_grad=True)
        >>> y = linear_through_merge(torch.randn(8, 64), weight, None, LowRankUpdate(a=a, b=b, scaling=0.5))
        >>> y.sum().backward()
        >>> b.grad.shape
        torch.Size([32, 4])
        ```
    """
    each = (updates,) if isinstance(updates, LowRankUpdate) else tuple(updates)
    if not each:
        raise ValueError("linear_through_merge: no update is given; call F.linear")
    if keep not in ("nothing", "merged"):
        raise ValueError(f'linear_through_merge: keep={keep!r} is not known; expected "nothing" or "merged"')
    if (why := why_unfit(weight)) is not None:
        raise TypeError(f"linear_through_merge: the weight {why}")
    for update in each:
        if update.shape != tuple(weight.shape):
            raise ValueError(
                f"linear_through_merge: an update has shape {update.shape}, the weight {tuple(weight.shape)}"
            )
    factors = [factor for update in each for factor in (update.a, update.b)]
    return through_merge(x, weight, bias, factors, How(tuple(update.scaling for update in each), keep))


def why_unfit(weight: Tensor) -> str | None:
    """Return why no forward can merge into a weight, in words that follow its name, and what to do; None if it can."""
    if isinstance(weight, HighPrecisionWeight):
        return (
            'is stored dense (storage="high_precision"), and merge_ would round the sum to its dtype, which no forward '
            "sees; build the base with quantized storage"
        )
    if isinstance(weight, DTensor):
        return (
            f"is sharded, placed {tuple(weight.placements)}; under FSDP2 let fully_shard take a module around the "
            "adapted layer, so that it is gathered while that runs; tensor parallelism is not supported: train the "
            "adapter beside the weight there, and look at what merge_ reports"
        )
    if weight.requires_grad:
        return "is trained itself, so that the merge would move under it; call requires_grad_(False) on it"
    if not isinstance(weight, QuantizedTensor) and weight.dtype not in APPEARANCE_DTYPES:
        return f"holds {weight.dtype}; expected bf16, fp16, fp32 or a quantized weight"
    if weight.ndim != 2 or (isinstance(weight, QuantizedTensor) and weight._lens != OWN):
        return f"is a view, or no matrix [N, K]: {tuple(weight.shape)}; take the parameter of the layer"
    return None


class How(NamedTuple):
    """What of a layer's adapters is no tensor."""

    scalings: tuple[float, ...]
    keep: Keep


def through_merge(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Sequence[Tensor], how: How) -> Tensor:
    """Do `linear_through_merge`, without its checks; `factors` are a and b of each update, one after the other."""
    # dynamo sees one call, as it does of F.linear: it could not look into a quantized weight
    if torch.compiler.is_dynamo_compiling():
        _let_into_graphs()
    return _through_merge(x, weight, bias, factors, how.scalings, how.keep)


@constant_in_graphs  # so it is called while dynamo traces, and an import of this module does not import dynamo
def _let_into_graphs() -> None:
    torch.compiler.allow_in_graph(_through_merge)


def _through_merge(  # noqa: PLR0913, PLR0917 - what a graph can hold: tensors and numbers
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Sequence[Tensor], scalings: Sequence[float], keep: Keep
) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(x, merged_weight(weight, factors, scalings), bias)
    how = How(tuple(scalings), keep)
    return ThroughMerge.apply(x, weight, bias, how, *factors)  # type: ignore[no-any-return, no-untyped-call]


class ThroughMerge(torch.autograd.Function):
    """The products of a linear layer around a weight that is merged on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How, *factors: Tensor) -> Tensor:
        """Return the output [.., N] from x [.., K], weight [N, K], bias [N] or None, and a, b of each update."""
        merged = merged_weight(weight, factors, how.scalings)
        y = F.linear(x, merged, bias)
        of_x, of_factors = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        kept = merged if of_x and how.keep == "merged" else None
        ctx.save_for_backward(x if of_factors else None, weight if of_x and kept is None else None, kept, *factors)
        ctx.how, ctx.x_dtype, ctx.bias_dtype = how, x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of x, the bias and the factors from that of the output, [.., N]."""
        (grad,) = grads
        x, weight, merged, *factors = ctx.saved_tensors
        needs, scalings = ctx.needs_input_grad, ctx.how.scalings
        dx = db = None
        if needs[0]:
            merged = merged_weight(weight, factors, scalings, after=grad) if merged is None else merged
            dx = input_gradient(grad, merged).to(ctx.x_dtype)
            merged = None  # the products below are not larger than it
        if needs[2]:
            db = (grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad).to(ctx.bias_dtype)
        of_factors: list[Tensor | None] = []
        for number, scaling in enumerate(scalings):
            pair = slice(2 * number, 2 * number + 2)
            of_factors += _factor_gradients(grad, x, factors[pair], scaling, needs[4:][pair])
        return dx, None, db, None, *of_factors


def _factor_gradients(
    grad: Tensor, x: Tensor | None, pair: Sequence[Tensor], scaling: float, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a [r, K] and b [N, r] in their dtypes, from dy [.., N] and x [.., K]."""
    (a, b), (of_a, of_b) = pair, wanted
    if x is None or not (of_a or of_b):
        return None, None
    # as LoRA's own products: in the adapter's dtype, if that is the wider one
    dtype = functools.reduce(torch.promote_types, (grad.dtype, a.dtype, b.dtype))
    dy, tokens = (each.reshape(-1, each.shape[-1]).to(dtype) for each in (grad, x))  # [T, N], [T, K]
    da = (dy @ b.to(dtype)).mul_(scaling).T @ tokens if of_a else None
    db = dy.T @ (tokens @ a.to(dtype).T).mul_(scaling) if of_b else None
    return None if da is None else da.to(a.dtype), None if db is None else db.to(b.dtype)


# -- the merge ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merged_weight(
    weight: Tensor, factors: Sequence[Tensor], scalings: Sequence[float], *, after: Tensor | None = None
) -> Tensor:
    """Return the weight that `merge_` would write, of the kind that `weight` is; a weight that nothing moves stays.

    after: what a compiled graph must have before it merges, see the module's docstring.
    """
    with without_torch_function():
        if not isinstance(weight, QuantizedTensor):
            (values,) = _merge([weight.detach()], factors, scalings, None, after)
            return values
        recipe = weight.recipe.stored
        parts = parts_per_row(weight)
        held = [parts[spec.name] for spec in specs_of(recipe)]
        new = _merge(held, factors, scalings, recipe, after)
        named = {spec.name: part for spec, part in zip(specs_of(recipe), new, strict=True)}
        return type(weight)(named, weight.recipe, weight.dtype)


def _merge(
    held: Sequence[Tensor],
    factors: Sequence[Tensor],
    scalings: Sequence[float],
    recipe: Recipe | None,
    after: Tensor | None,
) -> Sequence[Tensor]:
    if not is_tracing():
        return merged_parts(held, factors, scalings, recipe)
    waits = [] if after is None else [after]
    plain = [factor.detach() for factor in factors]
    return torch.ops.qtensor.merged_parts(list(held), plain, list(scalings), _text(recipe), waits)  # type: ignore[no-any-return]


def merged_parts(
    held: Sequence[Tensor], factors: Sequence[Tensor], scalings: Sequence[float], recipe: Recipe | None
) -> list[Tensor]:
    """Return new parts of a weight, in the order of the format, or the dense one [N, K] if it has no recipe."""
    each = [
        LowRankUpdate(a=a, b=b, scaling=scaling)
        for a, b, scaling in zip(factors[::2], factors[1::2], scalings, strict=True)
    ]
    rows, columns = each[0].shape
    change = UpdateSum(tuple(each))((slice(0, rows), slice(0, columns)))  # fp32 [N, K]
    # else writing its own values could choose other codes; told on the device, where nobody waits for it
    moves = (change != 0).any()
    if recipe is None:
        values = held[0].to(torch.float32).add_(change) if held[0].dtype != torch.float32 else held[0] + change
        return [torch.where(moves, values.to(held[0].dtype), held[0])]
    names = [spec.name for spec in specs_of(recipe)]
    change.add_(kernels.decode(dict(zip(names, held, strict=True)), recipe, torch.float32))
    new = kernels.encode(change, recipe)
    return [_chosen(moves, new[name], part) for name, part in zip(names, held, strict=True)]


def _chosen(moves: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` if the update moves any element, else `old`, in the shape of `old`; a tensor of its own."""
    dtype = old.dtype
    # as bytes, since torch.where does not support float8
    if dtype.itemsize == 1:
        new, old = new.view(torch.uint8), old.view(torch.uint8)
    return torch.where(moves, new, old).view(dtype)


@constant_in_graphs
@functools.cache
def _text(recipe: Recipe | None) -> str:
    """Return a text that another process understands, too: it may find this graph, compiled, in a cache on disk."""
    return DENSE if recipe is None else json.dumps(recipe.to_json())


@functools.cache
def _recipe(text: str) -> Recipe | None:
    return None if text == DENSE else Recipe.from_json(json.loads(text))


@torch.library.custom_op("qtensor::merged_parts", mutates_args=())
def _merged_parts(
    held: list[Tensor], factors: list[Tensor], scalings: list[float], recipe: str, after: list[Tensor]
) -> list[Tensor]:
    """Compute `merged_parts`."""
    return merged_parts(held, factors, scalings, _recipe(recipe))


@_merged_parts.register_fake
def _(
    held: list[Tensor], factors: list[Tensor], scalings: list[float], recipe: str, after: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(part, memory_format=torch.contiguous_format) for part in held]
