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

A weight that shares its scale with others (`share_scales`) gets the one that all of them ask for once they are merged,
so a forward needs the partners and their updates, too; see merged_parts.py.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fsdp_hooks.ranks.scale_partners import check_complete
from fsdp_hooks.torch_private import constant_in_graphs
from qtensor.merging.low_rank import LowRankUpdate
from qtensor.merging.merged_parts import merged_weight, seen_of, together
from qtensor.products.linear import input_gradient
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.lens import OWN
from qtensor.spec.registry import APPEARANCE_DTYPES
from qtensor.tensor.quantized_tensor import QuantizedTensor

Keep = Literal["nothing", "merged"]
Updates = LowRankUpdate | Sequence[LowRankUpdate]
WHAT = "linear_through_merge"


def linear_through_merge(  # noqa: PLR0913 - the operands of F.linear, and what is merged
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    updates: Updates,
    *,
    partners: Sequence[tuple[Tensor, Updates]] = (),
    keep: Keep = "nothing",
) -> Tensor:
    """Compute F.linear(x, M, bias) with the weight M that `merge_` makes of `weight` and `updates`, bit for bit.

    Gradients reach x, the bias and the factors of the updates; the weight is frozen. For adapters of your own: call it
    in the forward of the module that has them. `merge_aware` does so for those of peft.

    Args:
        x: [.., K], bf16, fp16 or fp32.
        weight: [N, K], quantized or dense, not sharded: in a forward under FSDP2 it is the gathered one.
        bias: [N] or None.
        updates: factors of [N, K]; several are added in their order. What is trained are the tensors in them. None, as
            (), for a weight that only follows the scale of its partners.
        partners: of a weight that shares its scale (`share_scales`), all others of its group, each with its own updates
            (() if it has none). They decide the scale; no gradient reaches them here.
        keep: what backward finds of the merged weight. "nothing": it merges again. "merged": its quantized bytes stay
            from forward to backward, as many as those of `weight`, beside it, in each layer.

    Returns:
        [.., N], in the dtype of F.linear.

    Raises:
        ValueError: an update has another shape than the weight, there is none, partners are missing or are not its own,
            or `keep` is not known.
        TypeError: a weight is sharded, stored dense for quantized gathers, or trained itself.

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
    if keep not in ("nothing", "merged"):
        raise ValueError(f'{WHAT}: keep={keep!r} is not known; expected "nothing" or "merged"')
    own, others = _checked(weight, updates), [_checked(*partner) for partner in partners]
    _check_partners(weight, [partner for partner, _ in partners])
    if not own.factors and not partners:
        raise ValueError(f"{WHAT}: no update is given; call F.linear")
    shared = together(seen_of(*merge) for merge in (own, *others)) if partners else None
    return through_merge(x, own.weight, bias, own.factors, How(own.scalings, keep), shared)


class Merge(NamedTuple):
    """A weight [N, K], and what is merged into it: a and b of each update, one after the other, and its scaling."""

    weight: Tensor
    factors: list[Tensor]
    scalings: tuple[float, ...]


def _checked(weight: Tensor, updates: Updates) -> Merge:
    """Return a weight with its updates. Raises as `linear_through_merge` does."""
    each = (updates,) if isinstance(updates, LowRankUpdate) else tuple(updates)
    if (why := why_unfit(weight)) is not None:
        raise TypeError(f"{WHAT}: the weight {why}")
    for update in each:
        if update.shape != tuple(weight.shape):
            raise ValueError(f"{WHAT}: an update has shape {update.shape}, the weight {tuple(weight.shape)}")
    factors = [factor for update in each for factor in (update.a, update.b)]
    return Merge(weight, factors, tuple(update.scaling for update in each))


def _check_partners(weight: Tensor, others: Sequence[Tensor]) -> None:
    """Raise ValueError if these are not all with which a weight shares its scale."""
    own, *theirs = (getattr(each, "_partners", None) for each in (weight, *others))
    if any(one is None or own is None or one.names != own.names for one in theirs):
        raise ValueError(f"{WHAT}: `partners` has a weight that shares no scale with this one; see share_scales")
    check_complete(WHAT, [own, *theirs], "`partners`")


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


def through_merge(  # noqa: PLR0913, PLR0917 - the operands of a product, and how
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Sequence[Tensor], how: How, shared: Tensor | None
) -> Tensor:
    """Do `linear_through_merge`, without its checks; `factors` as in `Merge`, `shared` is that of `together`."""
    # dynamo sees one call, as it does of F.linear: it could not look into a quantized weight
    if torch.compiler.is_dynamo_compiling():
        _let_into_graphs()
    return _through_merge(x, weight, bias, factors, how.scalings, how.keep, shared)


@constant_in_graphs  # so it is called while dynamo traces, and an import of this module does not import dynamo
def _let_into_graphs() -> None:
    torch.compiler.allow_in_graph(_through_merge)


def _through_merge(  # noqa: PLR0913, PLR0917 - what a graph can hold: tensors and numbers
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Sequence[Tensor],
    scalings: Sequence[float],
    keep: Keep,
    shared: Tensor | None,
) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(x, merged_weight(weight, factors, scalings, shared=shared), bias)
    how = How(tuple(scalings), keep)
    return ThroughMerge.apply(x, weight, bias, how, shared, *factors)  # type: ignore[no-any-return, no-untyped-call]


OPERANDS = 5  # of ThroughMerge, before the factors


class ThroughMerge(torch.autograd.Function):
    """The products of a linear layer around a weight that is merged on the way."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - the operands of a product, and how
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How, shared: Tensor | None, *factors: Tensor
    ) -> Tensor:
        """Return the output [.., N] from x [.., K], weight [N, K], bias [N] or None, and a, b of each update."""
        merged = merged_weight(weight, factors, how.scalings, shared=shared)
        y = F.linear(x, merged, bias)
        of_x, of_factors = ctx.needs_input_grad[0], any(ctx.needs_input_grad[OPERANDS:])
        kept = merged if of_x and how.keep == "merged" else None
        again = of_x and kept is None
        saved = x if of_factors else None, weight if again else None, kept, shared if again else None
        ctx.save_for_backward(*saved, *factors)
        ctx.how, ctx.x_dtype, ctx.bias_dtype = how, x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradients of x, the bias and the factors from that of the output, [.., N]."""
        (grad,) = grads
        x, weight, merged, shared, *factors = ctx.saved_tensors
        needs, scalings = ctx.needs_input_grad, ctx.how.scalings
        dx = db = None
        if needs[0]:
            if merged is None:
                merged = merged_weight(weight, factors, scalings, shared=shared, after=grad)
            dx = input_gradient(grad, merged).to(ctx.x_dtype)
            merged = None  # the products below are not larger than it
        if needs[2]:
            db = (grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad).to(ctx.bias_dtype)
        of_factors: list[Tensor | None] = []
        for number, scaling in enumerate(scalings):
            pair = slice(2 * number, 2 * number + 2)
            of_factors += _factor_gradients(grad, x, factors[pair], scaling, needs[OPERANDS:][pair])
        return dx, None, db, None, None, *of_factors


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
