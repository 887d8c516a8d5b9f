"""QuantizedTensor: a tensor that looks like bf16 [.., N, K] and stores only quantized parts.

A wrapper subclass: it has the logical shape, contiguous strides and the appearance dtype, and its bytes live in plain
inner tensors, its parts, kept as attributes (`payload`, `scale`, ...). The invariants, with d = q.dequantize() and S =
the specs of the format:

    q.parts().keys() == names of S                       q.parts()[s].shape == s.shape(q.shape)
    bytes of q       == sum of the bytes of its parts    (no dense copy, no cached transpose)
    q[a:b].parts()   == the same rows of q.parts(), aliased
    d.dtype == q.dtype == what autograd and FSDP see     q.recipe says all the rest

A gathered weight differs in one point: its tensor-wide parts are vectors with one value a shard (see
fsdp_hooks.all_gather).

Which torch operations keep the quantized representation, which requantize and which raise is decided by one table; see
ops.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AllGatherHooks, Arrangement
from fsdp_hooks.torch_private import is_described, is_tracing, make_wrapper, tree_map, without_torch_function
from qtensor import kernels
from qtensor.agreement import AgreedScales
from qtensor.formats import (
    APPEARANCE_DTYPES,
    PartSpec,
    check_shape,
    describe,
    logical_shape,
    part_problems,
    registered,
    specs_of,
    tensor_wide,
)
from qtensor.pickling import rebuild, reduced
from qtensor.recipes import Recipe

# aten overload -> handler(func, args, kwargs), filled by ops.py and the modules that it names
OPS: dict[Any, Callable[..., Any]] = {}
# torch function -> handler(*args, **kwargs), filled by linear.py and ops.py
TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


@dataclass
class Preserved:
    """Holds a preserved initial value. Aliases share it: what is forgotten through one of them is forgotten by all."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Preserved":
        return Preserved()  # DCP stages attributes by deepcopy, and a checkpoint has no use for it


class QuantizedTensor(AllGatherHooks, AgreedScales, Tensor):
    """Base of Float8Tensor, MXFP8Tensor and NVFP4Tensor; built by `quantize` or `QuantizedTensor.from_parts`.

    Attributes:
        recipe: the recipe it was quantized with.
        payload: the codes of the elements (see the class of the format for shapes and dtypes of all parts).
        scale: what they are multiplied by; NVFP4 has a global_scale, too.
        dtype: what it pretends to be, as its shape is.
        device: where its parts are.
    """

    recipe: Recipe
    payload: Tensor
    scale: Tensor
    preserved: Preserved

    def __new__(  # noqa: PLR0913 - everything an instance consists of; internal
        cls,
        parts: Mapping[str, Tensor],
        recipe: Recipe,
        dtype: torch.dtype,
        *,
        arrangement: Arrangement = Arrangement(),
        shape: torch.Size | None = None,
        init_value: Tensor | None = None,
        preserved: Preserved | None = None,
    ) -> Self:
        """Internal: wraps parts without any check; `from_parts` is the checked way in."""
        payload = parts["payload"]
        outer = arrangement.flat or logical_shape(payload, recipe) if shape is None else shape
        self: Any = make_wrapper(cls, outer, dtype, payload.device)
        self.recipe, self.arrangement, self.preserved = recipe, arrangement, preserved or Preserved(init_value)
        for name, part in parts.items():
            setattr(self, name, part)
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done in __new__."""

    # -- the public surface --------------------------------------------------------------------------------------------

    @staticmethod
    def from_parts(parts: Mapping[str, Tensor], recipe: Recipe, dtype: torch.dtype) -> "QuantizedTensor":
        """A quantized tensor around existing parts, which it aliases.

        Args:
            parts: name -> tensor, shapes and dtypes as the format's class documents.
            recipe: what the parts were quantized with.
            dtype: the appearance dtype (bf16, fp16 or fp32).

        Raises:
            ValueError: for missing, extra, misshapen or wrongly typed parts, naming each.
        """
        problems = part_problems(parts, recipe)
        if dtype not in APPEARANCE_DTYPES:
            problems.append(f"the appearance dtype {dtype} is not one of bfloat16, float16, float32")
        if problems:
            raise ValueError(f"these are no parts of {recipe}: " + "; ".join(problems))
        ordered = {spec.name: parts[spec.name] for spec in specs_of(recipe)}
        return registered(recipe).tensor_class(ordered, recipe, dtype)  # type: ignore[no-any-return]

    def parts(self) -> dict[str, Tensor]:
        """The inner tensors by name, payload first; they alias this tensor's bytes."""
        return {spec.name: getattr(self, spec.name) for spec in self.specs()}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense values, shape self.shape, computed in fp32 and rounded once to `dtype` (None: self.dtype).

        Differentiable: the gradient of the values is the weight's gradient (straight through), in self.dtype.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _StraightThrough.apply(self, dtype)  # type: ignore[no-any-return, no-untyped-call]
        return self.decoded(dtype)

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """`dequantize` outside of autograd."""
        with torch.no_grad():
            values = kernels.decode(self._parts_per_row(), self.recipe, dtype or self.dtype)
            if self.arrangement.transposed:
                return values.transpose(-2, -1)
            return values if values.shape == self.shape else values.view(self.shape)

    @staticmethod
    def safe_globals() -> list[Any]:
        """What `torch.serialization.safe_globals` must allow for `torch.load(weights_only=True)` of them."""
        return [rebuild, *Recipe.registry.values()]

    @property
    def init_value(self) -> Tensor | None:
        """The high-precision value it was initialised with, where that is preserved."""
        return self.preserved.value

    @init_value.setter
    def init_value(self, value: Tensor | None) -> None:
        self.preserved.value = value

    # -- what ops, hooks and adapters build on -------------------------------------------------------------------------

    def specs(self) -> tuple[PartSpec, ...]:
        """The specs of the parts."""
        return specs_of(self.recipe)

    def tensor_wide(self) -> str | None:
        """The name of the tensor-wide scale, None for formats without one."""
        return tensor_wide(self.recipe)

    def row_parts(self) -> frozenset[str]:
        """Names of the parts that extend along dim 0."""
        ndim = self.payload.ndim  # a read of our own attributes would go through __torch_function__
        return frozenset(spec.name for spec in self.specs() if spec.extends_along(0, ndim))

    def gathered_parts(self) -> list[str]:
        """Names of the parts that an all-gather sends."""
        return [spec.name for spec in self.specs() if spec.gathered]

    def with_parts(
        self,
        parts: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        arrangement: Arrangement,
        shape: torch.Size | None = None,
        init_value: Tensor | None = None,
    ) -> Self:
        """A tensor of the same class and recipe around other parts; `shape`, where it is known, saves deriving it."""
        return type(self)(
            parts, self.recipe, dtype or self.dtype, arrangement=arrangement, shape=shape, init_value=init_value
        )

    def alias(self, arrangement: Arrangement, shape: torch.Size) -> Self:
        """Another look at the same parts, and at what is preserved beside them."""
        return type(self)(
            self.parts(), self.recipe, self.dtype, arrangement=arrangement, shape=shape, preserved=self.preserved
        )

    def write(self, dense: Tensor, amax: Tensor | None = None, *, step: bool = False) -> None:
        """Requantize in place from dense values of the same shape.

        `amax` is what the shards agreed on, of as many values as there are shared scales; without it that of the
        values is taken. `step` says that the values develop from those before, as an optimizer's do: recipes with a
        history continue it; otherwise it begins anew.
        """
        if self.arrangement.transposed:
            raise NotImplementedError(
                f"writing into a transposed view of {describe(self.arrangement.flat or (), self.recipe)}; write the "
                "weight itself"
            )
        if self.arrangement.splits_blocks:
            raise RuntimeError(
                f"writing values into rows that split square blocks of {describe(self.shape, self.recipe)}: "
                "the other rows of those blocks share their scales; write whole blocks, or the whole tensor"
            )
        with torch.no_grad():
            x = dense.detach().reshape(self.arrangement.flat or self.shape)
            amax = kernels.shared_amax(x, self.recipe) if amax is None else amax.view_as(self.shared_scale())
            self.store(self.encoded(x, amax, step=step))
            if self.init_value is not None:
                self.init_value.copy_(dense.reshape(self.init_value.shape))

    def encoded(self, x: Tensor, amax: Tensor | None, *, step: bool) -> dict[str, Tensor]:
        """The parts that `write` stores; classes whose recipe has a history continue it in a step."""
        return kernels.encode(x, self.recipe, amax)

    def shared_amax(self, dense: Tensor) -> Tensor | None:
        """fp32, flat: the amaxes of dense values of this shape that decide the scales shards may share."""
        amax = kernels.shared_amax(dense, self.recipe)
        return None if amax is None else amax.reshape(-1)

    def store(self, parts: Mapping[str, Tensor]) -> None:
        """Copy new bytes into the parts. A view of some rows refuses to change the tensor-wide scale of all rows."""
        if self.arrangement.severed:
            raise RuntimeError(
                f"writing into some columns of {describe(self.shape, self.recipe)}: a slice of columns is a copy, so "
                "the write would be lost; write the whole tensor, or clone() the slice to own it"
            )
        wide = self.tensor_wide()
        if wide and self.arrangement.partial and not bool((getattr(self, wide) == parts[wide]).all()):
            raise RuntimeError(
                f"writing into some rows of {describe(self.shape, self.recipe)} would change its {wide}, which the "
                "other rows share; write the whole tensor, or use a recipe whose scales belong to rows"
            )
        for name, part in self.parts().items():
            part.copy_(parts[name])

    def _parts_per_row(self) -> dict[str, Tensor]:
        """The parts, with the vector of a gathered weight's tensor-wide part spread over the rows ([N, 1, ..])."""
        parts, shards, wide = self.parts(), self.arrangement.shards, self.tensor_wide()
        if shards is not None and wide is not None:
            rows, ndim = parts["payload"].shape[0], parts["payload"].ndim
            entry = (torch.arange(rows, dtype=torch.int64, device=self.device) + shards.offset) // shards.rows
            parts[wide] = parts[wide][entry].reshape(rows, *[1] * (ndim - 1))
        return parts

    # -- torch protocols -----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = TORCH_FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is that of the C function it has by default
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = OPS.get(func)
        if handler is None and torch.is_inference_mode_enabled():
            # composite ops arrive whole there, elsewhere in pieces
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if handler is None:
            names = ", ".join(sorted({kind.__name__ for kind in types}))
            raise NotImplementedError(
                f"{func} is not defined for quantized tensors (got {names}); call .dequantize() on them first if a "
                "dense result is what you want"
            )
        if torch.is_inference_mode_enabled() and any(
            isinstance(arg, QuantizedTensor) and not arg.is_inference() for arg in args
        ):
            # a view must be the kind of tensor its base is, and what is made here would be an inference tensor
            with torch.inference_mode(mode=False), torch.no_grad():
                return handler(func, args, kwargs or {})
        return handler(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [spec.name for spec in self.specs()]
        return names + (["init_value"] if self.init_value is not None else []), (
            self.recipe,
            self.dtype,
            self.arrangement,
        )

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "QuantizedTensor":
        recipe, dtype, arrangement = context
        parts = {name: part for name, part in inner.items() if name != "init_value"}
        kind = registered(recipe).tensor_class
        return kind(parts, recipe, dtype, arrangement=arrangement, shape=outer_size, init_value=inner.get("init_value"))  # type: ignore[no-any-return]

    def _stable_hash_for_caching(self) -> str:
        return repr((type(self).__name__, self.recipe, self.dtype, self.arrangement))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "only quantized tensors that are leaves of the autograd graph can be deep-copied; detach() first"
            )
        copy: Any = self.detach().clone().requires_grad_(self.requires_grad)
        is_parameter = isinstance(self, torch.nn.Parameter)
        if is_parameter:
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch's own has no types
        looks = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"{type(self).__name__}({looks}, recipe={self.recipe})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raises: a quantized tensor has no storage of its own, only its parts have."""
        if is_tracing() or is_described():
            # a tracer describes every tensor it meets by its storage, and touches no byte of it
            return super().untyped_storage()
        raise self._without_storage()

    def __create_write_items__(self, fqn: str, value: Any) -> Any:
        """Raises: DCP asks this of a tensor, or of a DTensor around it, that it is about to write as it is.

        Here, while it plans, every rank learns of it and nothing has been written; further on torch's writer threads
        lose what they raise, and the save would succeed without the weight.
        """
        raise self._without_storage(f"{fqn}: ")

    def _without_storage(self, name: str = "") -> RuntimeError:
        return RuntimeError(
            f"{name}{describe(self.shape, self.recipe)} has no single storage to write, share or compare; use "
            ".parts(), and save it by dcp.save with planner=QuantizedSavePlanner() (or expand the state dict first)"
        )

    def tolist(self, *args: Any, **kwargs: Any) -> Any:
        """Raises, as do numpy() and __dlpack__() (which would hand out a null pointer): call .dequantize() first."""
        raise NotImplementedError(
            "tolist, numpy and DLPack are not defined for quantized tensors; call .dequantize() first"
        )

    numpy = __dlpack__ = tolist


class _StraightThrough(torch.autograd.Function):
    """Dequantize whose backward hands the gradient of the dense values to the weight."""

    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        """The dense values."""
        ctx.dtype = q.dtype
        return q.decoded(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """The gradient in the weight's dtype."""
        return grads[0].to(ctx.dtype), None


def quantize(x: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Quantize a dense tensor.

    Args:
        x: bf16, fp16 or fp32 [.., K], 1-D and up, on any device. K must be a multiple of the recipe's block (Float8 1,
            MXFP8 32, NVFP4 16); for square blocks N too.
        recipe: Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling or NVFP4BlockScaling.

    Returns:
        Float8Tensor, MXFP8Tensor or NVFP4Tensor of the same shape, appearance dtype and device, detached from autograd.
        The formulas stand in the module of the format.

    Raises:
        TypeError: x is quantized already, a DTensor, not floating point, or recipe is no recipe.
        ValueError: the shape does not fit the blocks.
    """
    registration = registered(recipe)
    if isinstance(x, QuantizedTensor):
        raise TypeError(f"quantize expects a dense tensor, got {describe(x.shape, x.recipe)}; call .dequantize() first")
    if isinstance(x, DTensor):
        raise TypeError(
            f"quantize expects a plain tensor, got a DTensor {tuple(x.shape)} {tuple(map(str, x.placements))}; "
            "quantize the full one and distribute that (distribute_tensor(quantize(full, recipe), mesh, placements)), "
            "or load the dense values into a quantized model (load_state_dict)"
        )
    if x.dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"quantize expects bfloat16, float16 or float32, got {x.dtype}")
    check_shape(x.shape, recipe)
    with torch.no_grad():
        parts = kernels.encode(x.detach(), recipe)
        return registration.tensor_class(parts, recipe, x.dtype)  # type: ignore[no-any-return]


def dense(value: Any) -> Any:
    """`value` with every quantized tensor in it dequantized."""
    return tree_map(lambda leaf: leaf.decoded() if isinstance(leaf, QuantizedTensor) else leaf, value)
