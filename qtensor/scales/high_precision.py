"""storage="high_precision": the shard stays dense, and is quantized on its way into the all-gather.

    at rest     one plain bf16 / fp16 / fp32 tensor: any torch optimizer, dense checkpoints, exact updates
    gather      the parts of quantize(shard), as for a quantized weight; the gathered weight is a QuantizedTensor
    backward    a plain gradient, reduce-scattered to the dense shard

A scale that shards share (tensor-wide, or of rows cut along K) needs the amax over all of them. `sync_scales`, called
once a step, finds it for the whole model by one all-reduce and leaves it beside each shard, together with the shard's
own amax at that moment:

    amax used in a gather = agreed amax    if the shard's own amax is still what it was at the agreement
                            own amax       elsewhere

So a value written after the agreement never saturates under a stale scale. Without an agreement every shard is
quantized under a scale of its own. Scales travel with the bytes, so the gather is exact either way.

Outside FSDP, `F.linear` quantizes the weight on the spot: the same numbers as under FSDP on one rank.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.all_gather import Sharding, SignedMethod
from fsdp_hooks.lazy_bits import call_resolved, resolve
from fsdp_hooks.ranks.scale_partners import Partners
from fsdp_hooks.scale_sync import scales_of_shard
from fsdp_hooks.torch_private import (
    is_described,
    is_tracing,
    make_wrapper,
    note_shard_rows,
    tree_map,
    without_torch_function,
)
from fsdp_hooks.versions import count_writes
from qtensor.numerics.graph_key import THIS_CODE, Keyed, KeyTag
from qtensor.numerics.kernels import amax_shape, shared_amax
from qtensor.ops.data_attribute import SET_DATA, exchange_data
from qtensor.ops.table import check_shard_shape, refuse_resharding_to_a_smaller_mesh
from qtensor.scales.agreement import DenseScales, claim_of, decide, encode_agreed, scale_of
from qtensor.scales.cut_blocks import CutBlocks
from qtensor.scales.high_precision_ops import ALIASES, KEEPS, RESHAPES_IN_PLACE, SAME_ROWS, TRANSPOSES, sends_parts
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import check_shape, describe, registered
from qtensor.tensor.made_anew import address, make_anew
from qtensor.tensor.moves import MoveNote, carry_note, freeze_noted, take_note
from qtensor.tensor.quantized_tensor import TORCH_FUNCTIONS, QuantizedTensor

if TYPE_CHECKING:
    from fsdp_hooks.row_pieces import RowPieces

aten = torch.ops.aten


@dataclass
class Agreement:
    """Holds what was agreed on. Aliases share it: a DTensor hands out a new alias of its local tensor each time.

    claims: fp32 [2, n], the maxima of `agreement.claim_of` over all shards, and this shard's own at that time.
    cut: the square blocks that shards cut.
    """

    claims: Tensor | None = None
    cut: CutBlocks | None = None


class HighPrecisionWeight(Keyed, Tensor):
    """A dense tensor [.., K] that FSDP2 gathers quantized.

    F.linear, t() and transpose() quantize it, because they begin products; any other operation sees the dense tensor.

    Attributes:
        dense: the values, a plain tensor of this shape, dtype and device.
        recipe: how to quantize them for a gather.
        agreement: the amaxes agreed on, if any.
        padded_rows: rows that FSDP allocated for the shard.

    `_partners` are the weights with which it shares its tensor-wide scale, see shared_scales.py.
    """

    dense: Tensor
    recipe: Recipe
    agreement: Agreement
    padded_rows: int | None
    _partners: Partners | None = None
    _note: MoveNote | None = None
    agreed = property(lambda self: self.agreement.claims)  # torch looks up the names from `__tensor_flatten__` here

    def __new__(
        cls,
        dense: Tensor,
        /,
        recipe: Any = None,
        *,
        agreement: Agreement | None = None,
        padded_rows: int | None = None,
        **remembered: Any,
    ) -> Self:
        """Wrap `dense`, aliased (copied if it is lazy, see fsdp_hooks/lazy_bits.py); internal."""
        # somebody builds a parameter anew by its class
        if remembered or recipe is None:
            return make_anew(cls, dense, {"recipe": recipe, **remembered}, cls)  # type: ignore[return-value]
        dense = resolve(dense)  # inside of a wrapper nobody would see the bit
        self: Any = make_wrapper(cls, dense.shape, dense.dtype, dense.device, strides=dense.stride())
        self.dense, self.recipe, self.padded_rows = dense, recipe, padded_rows
        self.agreement = agreement or Agreement()
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all is done in __new__."""

    def _like(
        self, dense: Tensor, *, agreement: Agreement | None = None, padded_rows: int | None = None
    ) -> "HighPrecisionWeight":
        """Return a weight of this recipe, with these partners, around other values."""
        made = HighPrecisionWeight(dense, self.recipe, agreement=agreement, padded_rows=padded_rows)
        made._partners = self._partners
        return made

    @torch.no_grad()
    def quantize(self) -> QuantizedTensor:
        """Return the parts that a gather sends, as a tensor of their own."""
        x, agreed = self.dense.detach(), self._agreed()
        parts = encode_agreed(x, self.recipe, self.agreement.cut if agreed is not None else None, agreed)
        kind = registered(self.recipe).tensor_class
        sharding = Sharding(padded_rows=self.padded_rows)
        return kind(parts, self.recipe, self.dtype, sharding=sharding)  # type: ignore[no-any-return]

    @torch.no_grad()
    def shared_scale(self) -> Tensor:
        """Return the scale that `quantize` makes, fp32 [] or [.., N, 1], without the rest of the work."""
        agreed, x = self._agreed(), self.dense.detach()
        amax, _ = decide(x, self.recipe, self.agreement.cut if agreed is not None else None, agreed)
        found = shared_amax(x, self.recipe) if amax is None else amax.view(amax_shape(x.shape, self.recipe))
        assert found is not None
        return scale_of(found, self.recipe)

    def _agreed(self) -> Tensor | None:
        """Return fp32 [n]: what was agreed on, if this shard still claims what it did then; else its own claim."""
        claims, cut = self.agreement.claims, self.agreement.cut
        # some rows of the shard
        if claims is None or (cut is not None and cut.rows != self.shape[-2]):
            return None
        # a value written since the agreement may exceed it, and would saturate without a sign
        own = claim_of(self.dense.detach(), self.recipe, cut)
        if claims.shape[1] != own.numel():
            return None
        ours, then = claims.to(own.device)
        return torch.where(own == then, ours, own)

    # -- FSDP2 ---------------------------------------------------------------------------------------------------------

    @partial(SignedMethod, short=lambda self: self.padded_rows not in {None, self.dense.shape[0]})
    def fsdp_pre_all_gather(self, *args: Any) -> "tuple[tuple[Tensor, ...], tuple[QuantizedTensor, int | RowPieces]]":
        """Return the inputs of the quantized shard; that shard, and its metadata. FSDP2 calls it on every rank."""
        q = self.quantize()
        inputs, metadata = q.fsdp_pre_all_gather(*args)
        return inputs, (q, metadata)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[Tensor],
        metadata: "tuple[QuantizedTensor, int | RowPieces]",
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Build, or refill, the gathered weight; see AllGatherHooks."""
        q, how = metadata
        return q.fsdp_post_all_gather(all_gather_outputs, how, param_dtype, out=out)

    # -- torch protocols -----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # nobody gathers outside of FSDP: quantizing here gives the numbers of FSDP on one rank
        if func is F.linear:
            args, kwargs = tree_map(_on_the_spot, (args, kwargs or {}))
            return F.linear(*args, **kwargs)
        if func == SET_DATA and isinstance(args[0], HighPrecisionWeight):
            free = all(getattr(each, "padded_rows", None) is None for each in args)
            if free and exchange_data(args[0], args[1], ["dense", "agreement"]):
                return None
            raise NotImplementedError(
                f"assigning .data of {describe(args[0].shape, args[0].recipe)} is not defined; call .copy_(value) on "
                "it under torch.no_grad(), or assign a new nn.Parameter to the module"
            )
        if func in TORCH_FUNCTIONS:
            return TORCH_FUNCTIONS[func](*args, **(kwargs or {}))
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is that of the C function it has by default
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_resolved(_dispatch, func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        KeyTag.put()
        context = self.recipe, self.padded_rows, self.agreement.cut, THIS_CODE
        return ["dense", *(["agreed"] if self.agreed is not None else [])], context

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "HighPrecisionWeight":
        recipe, padded_rows, cut, _ = context
        agreement = Agreement(inner.get("agreed"), cut)
        return HighPrecisionWeight(inner["dense"], recipe, agreement=agreement, padded_rows=padded_rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a parameter as a parameter; any other (a state dict's entry) as the plain tensor of its values."""
        # an entry of a state dict is dense, and a file of it needs nothing of this package
        if isinstance(self, torch.nn.Parameter):
            return rebuild_dense, (self.dense.detach(), self.recipe, self.requires_grad, self._partners)
        return self.dense.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch's own has no types
        return f"{type(self).__name__}({self.dense.detach()!r}, gathered as {self.recipe})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the dense values, which writers of checkpoints ask for.

        `data_ptr()` is 0 all the same, so that stagers copy the attributes and do not set the wrapper onto a storage.
        """
        return super().untyped_storage() if is_tracing() or is_described() else self.dense.untyped_storage()

    def data_ptr(self) -> int:
        """Return 0 to stagers, see `untyped_storage`; see made_anew.py for who gets another answer."""
        return address(self.dense)


scales_of_shard.register(HighPrecisionWeight, DenseScales)


class _Quantize(torch.autograd.Function):
    """Dense weight -> quantized weight, straight through in backward."""

    @staticmethod
    def forward(ctx: Any, weight: HighPrecisionWeight) -> QuantizedTensor:
        return weight.quantize()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]  # type: ignore[no-any-return]


def _on_the_spot(value: Any) -> Any:
    return _Quantize.apply(value) if isinstance(value, HighPrecisionWeight) else value  # type: ignore[no-untyped-call]


def to_dense(value: Any) -> Any:
    """Return `value` with every HighPrecisionWeight in it replaced by its dense tensor."""
    return tree_map(lambda leaf: leaf.dense if isinstance(leaf, HighPrecisionWeight) else leaf, value)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an op gives if one or more of its operands are such weights."""
    if func in RESHAPES_IN_PLACE:
        raise NotImplementedError(
            f"{func} of {describe(args[0].shape, args[0].recipe)}; use the op that returns a new tensor"
        )
    if torch.is_inference_mode_enabled():
        if func not in KEEPS and (whole := func.decompose(*args, **kwargs)) is not NotImplemented:
            # in inference mode composite ops arrive whole, otherwise in pieces
            return whole
        if (func in KEEPS or func in TRANSPOSES) and not args[0].is_inference():
            # a view of a normal tensor must be a normal tensor, but one made here would be an inference tensor
            with torch.inference_mode(mode=False), torch.no_grad():
                return func(*args, **kwargs)
    # on its way into a product, which must see quantized values
    if func in TRANSPOSES or sends_parts(func, args):
        return func(args[0].quantize(), *args[1:], **kwargs)
    if func is aten.split.Tensor:
        refuse_resharding_to_a_smaller_mesh(args[0], args[1])
        freeze_noted(args[0])
    result = func(*to_dense(args), **to_dense(kwargs))
    if result is None and func.__name__.startswith(("_foreach_", "_fused_")):  # written in place
        # plain members, too: torch leaves counting those of a list to us
        count_writes(args[0])
    if isinstance(result, Tensor) and func.__name__.split(".")[0].endswith("_"):
        return args[0]  # written in place
    if func not in KEEPS or not isinstance(args[0], HighPrecisionWeight):
        return result
    return _wrap(func, args, kwargs, result)


def _wrap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return the result of an op of `KEEPS`, wrapped as one or more weights."""
    weight: HighPrecisionWeight = args[0]
    for piece in result if isinstance(result, list | tuple) else [result]:
        if piece.ndim == weight.ndim > 1:  # tensor parallelism may cut K
            check_shape(piece.shape, weight.recipe, f"a piece of {describe(weight.shape, weight.recipe)}", full=False)
    if isinstance(result, list | tuple):
        return [weight._like(piece) for piece in result]
    if func is aten.new_zeros.default:
        return _padded_shard(weight, result) if result.ndim == weight.ndim else result
    if func in SAME_ROWS or (func is aten.view.default and result.shape == weight.shape):
        agreement = dataclasses.replace(weight.agreement) if func is aten.clone.default else weight.agreement
        same = weight._like(result, agreement=agreement, padded_rows=weight.padded_rows)
        if func is aten._to_copy.default:
            return take_note(weight, same)
        return carry_note(weight, same) if func in ALIASES else same
    from_start = func is not aten.slice.Tensor or (args[1:2] in ((), (0,)) and not (args[2:3] or (None,))[0])
    keeps_padding = from_start and func in (aten.slice.Tensor, aten.view.default)
    if not keeps_padding:
        return weight._like(result)
    return weight._like(result, agreement=weight.agreement, padded_rows=weight.padded_rows)


def _padded_shard(weight: HighPrecisionWeight, result: Tensor) -> HighPrecisionWeight:
    """Return the padded shard, which FSDP allocates by `new_zeros`; its row count is remembered.

    FSDP pads uneven shards again before the first forward and after a load, so the new shard takes over the agreement.
    """
    check_shard_shape(weight, tuple(result.shape))
    check_shape(result.shape, weight.recipe, "shard", full=False)
    if result.shape[1:] == weight.shape[1:]:
        note_shard_rows(weight, result.shape[0])
    return weight._like(result, agreement=weight.agreement, padded_rows=result.shape[0])


def rebuild_dense(
    values: Tensor,
    recipe: Recipe,
    requires_grad: bool,  # noqa: FBT001 - called by pickle
    partners: Partners | None = None,
) -> Any:
    """Make the parameter whose pickle this is."""
    weight = HighPrecisionWeight(values, recipe)
    weight._partners = partners
    return torch.nn.Parameter(weight, requires_grad=requires_grad)


_rebuild = rebuild_dense  # as files of version 0.1 name it
