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

Which torch operations keep the quantized representation, which requantize and which raise is decided by the one table
in ops.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fsdp_hooks.all_gather import AllGatherHooks, Arrangement
from fsdp_hooks.torch_private import make_wrapper, tree_map, without_torch_function
from qtensor.blocks import canonical_nan, finite_amax
from qtensor.formats import APPEARANCE_DTYPES, PartSpec, check_shape, describe, format_of, registered, specs_of
from qtensor.recipes import Recipe

__all__ = ["OPS", "QuantizedTensor", "quantize", "rebuild"]

# aten overload -> handler(func, args, kwargs), filled by ops.py; torch function -> handler(*args, **kwargs), filled by
# linear.py
OPS: dict[Any, Callable[..., Any]] = {}
TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


@dataclass
class Preserved:
    """Holds a preserved initial value; aliases share it, so that what is forgotten through one of them is forgotten by all."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Preserved":
        return Preserved()  # DCP stages attributes by deepcopy, and a checkpoint has no use for it


class QuantizedTensor(AllGatherHooks, Tensor):
    """Base of Float8Tensor, MXFP8Tensor and NVFP4Tensor; built by `quantize` or `QuantizedTensor.from_parts`.

    Attributes:
        recipe: the recipe it was quantized with.
        payload, scale[, global_scale]: the parts (see the class of the format for shapes and dtypes).
        dtype, shape, device: what it pretends to be, and where its parts are.
    """

    recipe: Recipe
    payload: Tensor
    scale: Tensor
    preserved: Preserved

    @staticmethod
    def __new__(
        cls,
        parts: Mapping[str, Tensor],
        recipe: Recipe,
        dtype: torch.dtype,
        *,
        arrangement: Arrangement = Arrangement(),
        shape: torch.Size | None = None,
        init_value: Tensor | None = None,
    ) -> Self:
        """Internal: wraps parts without any check; `from_parts` is the checked way in."""
        payload = parts["payload"]
        if shape is None:
            shape = arrangement.flat or _logical_shape(payload, recipe)
        self: Any = make_wrapper(cls, shape, dtype, payload.device)
        self.recipe, self.arrangement, self.preserved = recipe, arrangement, Preserved(init_value)
        for name, part in parts.items():
            setattr(self, name, part)
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done in __new__."""

    # -- the public surface -------------------------------------------------------------------------------------------------

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
        specs = {spec.name: spec for spec in specs_of(recipe)}
        problems = _part_problems(parts, specs, recipe)
        if dtype not in APPEARANCE_DTYPES:
            problems.append(f"the appearance dtype {dtype} is not one of bfloat16, float16, float32")
        if problems:
            raise ValueError(f"these are no parts of {recipe}: " + "; ".join(problems))
        return registered(recipe).tensor_class({name: parts[name] for name in specs}, recipe, dtype)  # type: ignore[no-any-return]

    def parts(self) -> dict[str, Tensor]:
        """The inner tensors by name, payload first; they alias this tensor's bytes."""
        return {spec.name: getattr(self, spec.name) for spec in self.specs()}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense values, computed in fp32 and rounded once to `dtype` (default: the appearance dtype). Shape: self.shape."""
        with torch.no_grad():
            values = format_of(self.recipe).decode(self._parts_per_row(), self.recipe)
            dtype = dtype or self.dtype
            values = canonical_nan(values) if dtype == torch.float32 else values.to(dtype)
            return values.view(self.shape)

    @staticmethod
    def safe_globals() -> list[Any]:
        """What `torch.serialization.safe_globals` must allow for `torch.load(weights_only=True)` of a pickled quantized tensor."""
        return [rebuild, *Recipe.registry.values()]

    @property
    def init_value(self) -> Tensor | None:
        """The high-precision value it was initialised with, where that is preserved."""
        return self.preserved.value

    @init_value.setter
    def init_value(self, value: Tensor | None) -> None:
        self.preserved.value = value

    # -- what ops, hooks and adapters build on --------------------------------------------------------------------------------

    def specs(self) -> tuple[PartSpec, ...]:
        """The specs of the parts."""
        return specs_of(self.recipe)

    def tensor_wide(self) -> str | None:
        """The name of the tensor-wide scale, None for formats without one."""
        return next((spec.name for spec in self.specs() if not spec.per_row), None)

    def row_parts(self) -> frozenset[str]:
        """Names of the parts that extend along dim 0."""
        return frozenset(spec.name for spec in self.specs() if spec.extends_along(0, self.ndim))

    def with_parts(
        self,
        parts: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        arrangement: Arrangement,
        init_value: Tensor | None = None,
    ) -> Self:
        """A tensor of the same class and recipe around other parts."""
        return type(self)(parts, self.recipe, dtype or self.dtype, arrangement=arrangement, init_value=init_value)

    def write(self, dense: Tensor, amax: Tensor | None = None) -> None:
        """Requantize in place from dense values of the same shape; `amax` is the agreed amax of a tensor-wide format ([])."""
        with torch.no_grad():
            fmt, x = format_of(self.recipe), dense.to(torch.float32).reshape(self.arrangement.flat or self.shape)
            if amax is None:
                amax = fmt.tensor_amax(x, self.recipe)
            self.store(fmt.encode(x, self.recipe, amax))
            if self.init_value is not None:
                self.init_value.copy_(dense)

    def tensor_amax(self, dense: Tensor) -> Tensor:
        """[] fp32: the amax that decides the tensor-wide scale of dense values of this shape."""
        amax = format_of(self.recipe).tensor_amax(dense.to(torch.float32), self.recipe)
        assert amax is not None
        return amax

    def scale_claim(self) -> Tensor:
        """[2] fp32, what this shard brings to an agreement: its tensor-wide scale (0 where every value is 0, the scale of zeros says
        nothing), and the amax of its preserved initial value (0 without one).
        """
        with torch.no_grad():
            scale = getattr(self, self.tensor_wide() or "scale").amax()
            claim = torch.where(finite_amax(self.dequantize(torch.float32)) > 0, scale, torch.zeros_like(scale))
            init = self.init_value
            return torch.stack([claim, finite_amax(init.float()) if init is not None else torch.zeros_like(claim)])

    def adopt_scale(self, agreed: Tensor) -> None:
        """Re-encode under what `scale_claim` came to over all shards ([2] fp32); bytes stay where the scale is the same.

        With a preserved initial value this is the quantization of the full tensor's value, bit for bit.
        """
        scale, amax = agreed
        if self.init_value is not None:
            return self.write(self.init_value, amax)
        with torch.no_grad():
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            new = format_of(self.recipe).adopt(self.dequantize(torch.float32), self.recipe, scale)
            same = getattr(self, self.tensor_wide() or "scale") == scale
            for name, part in self.parts().items():
                if part.ndim == 0:
                    part.copy_(new[name])
                else:  # as bytes, since torch.where knows no float8
                    part.view(torch.uint8).copy_(torch.where(same, part.view(torch.uint8), new[name].view(torch.uint8)))

    def store(self, parts: Mapping[str, Tensor]) -> None:
        """Copy new bytes into the parts. A view of some rows refuses to change the tensor-wide scale of all rows."""
        wide = self.tensor_wide()
        if wide and self.arrangement.partial and not bool((getattr(self, wide) == parts[wide]).all()):
            raise RuntimeError(
                f"writing into some rows of {describe(self.shape, self.recipe)} would change its {wide}, which the other rows "
                "share; write the whole tensor, or use a recipe whose scales belong to rows"
            )
        for name, part in self.parts().items():
            part.copy_(parts[name])

    def _parts_per_row(self) -> dict[str, Tensor]:
        """The parts, with the vector of a gathered weight's tensor-wide part spread over the rows ([N, 1, ..])."""
        parts, shards, wide = self.parts(), self.arrangement.shards, self.tensor_wide()
        if shards is not None and wide is not None:
            rows, ndim = parts["payload"].shape[0], parts["payload"].ndim
            entry = (torch.arange(rows, device=self.device) + shards.offset) // shards.rows
            parts[wide] = parts[wide][entry].reshape(rows, *[1] * (ndim - 1))
        return parts

    # -- torch protocols --------------------------------------------------------------------------------------------------------

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
    def __torch_dispatch__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = OPS.get(func)
        if (
            handler is None and torch.is_inference_mode_enabled()
        ):  # composite ops arrive whole there, elsewhere in pieces
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if handler is None:
            names = ", ".join(sorted({kind.__name__ for kind in types}))
            raise NotImplementedError(
                f"{func} is not defined for quantized tensors (got {names}); call .dequantize() on them first if a dense "
                "result is what you want"
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
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # float8 tensors can not be pickled by every supported torch: parts travel as bytes plus the name of their dtype
        packed = {
            name: (
                _own_storage(part).reshape(-1).view(torch.uint8),
                str(part.dtype).removeprefix("torch."),
                tuple(part.shape),
            )
            for name, part in self.detach().parts().items()
        }
        shards = self.arrangement.shards
        state = {
            "shape": tuple(self.shape),
            "flat": self.arrangement.flat,
            "shards": None if shards is None else (shards.rows, shards.offset),
            "requires_grad": self.requires_grad,
            "parameter": isinstance(self, torch.nn.Parameter),
        }
        return rebuild, (packed, self.recipe, self.dtype, state)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', recipe={self.recipe})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raises: a quantized tensor has no storage of its own, only its parts have."""
        if (
            torch.compiler.is_compiling()
        ):  # a tracer describes every tensor it meets by its storage, and touches no byte of it
            return super().untyped_storage()
        raise RuntimeError(
            f"{describe(self.shape, self.recipe)} has no single storage to write, share or compare; use .parts(), and save "
            "it by dcp.save with planner=QuantizedSavePlanner() (or expand the state dict first)"
        )

    def tolist(self, *args: Any, **kwargs: Any) -> Any:
        """Raises, as do numpy() and __dlpack__() (which would hand out a null pointer): call .dequantize() first."""
        raise NotImplementedError(
            "tolist, numpy and DLPack are not defined for quantized tensors; call .dequantize() first"
        )

    numpy = __dlpack__ = tolist


def quantize(x: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Quantize a dense tensor.

    Args:
        x: bf16, fp16 or fp32 [.., K], 1-D and up, on any device. K must be a multiple of the recipe's block (Float8 1,
            MXFP8 32, NVFP4 16); for square blocks N too.
        recipe: Float8CurrentScaling, MXFP8BlockScaling or NVFP4BlockScaling.

    Returns:
        Float8Tensor, MXFP8Tensor or NVFP4Tensor of the same shape, appearance dtype and device, detached from autograd.
        The formulas stand in the module of the format.

    Raises:
        TypeError: x is quantized already, not floating point, or recipe is no recipe.
        ValueError: the shape does not fit the blocks.
    """
    registration = registered(recipe)
    if isinstance(x, QuantizedTensor):
        raise TypeError(f"quantize expects a dense tensor, got {describe(x.shape, x.recipe)}; call .dequantize() first")
    if x.dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"quantize expects bfloat16, float16 or float32, got {x.dtype}")
    check_shape(x.shape, recipe)
    with torch.no_grad():
        dense, fmt = x.detach().to(torch.float32), registration.format
        parts = fmt.encode(dense, recipe, fmt.tensor_amax(dense, recipe))
        return registration.tensor_class(parts, recipe, x.dtype)  # type: ignore[no-any-return]


def rebuild(packed: dict[str, Any], recipe: Recipe, dtype: torch.dtype, state: dict[str, Any]) -> QuantizedTensor:
    """The inverse of pickling; a function of this module because that is what torch's weights_only loader can allow."""
    from fsdp_hooks.all_gather import ShardRows

    parts = {name: data.view(getattr(torch, kind)).reshape(shape) for name, (data, kind, shape) in packed.items()}
    arrangement = Arrangement(flat=state["flat"], shards=ShardRows(*state["shards"]) if state["shards"] else None)
    q = registered(recipe).tensor_class(parts, recipe, dtype, arrangement=arrangement, shape=torch.Size(state["shape"]))
    if state["parameter"]:
        return torch.nn.Parameter(q, requires_grad=state["requires_grad"])  # type: ignore[return-value]
    return q.requires_grad_(state["requires_grad"])  # type: ignore[no-any-return]


def dense(value: Any) -> Any:
    """`value` with every quantized tensor in it dequantized."""
    return tree_map(lambda leaf: leaf.dequantize() if isinstance(leaf, QuantizedTensor) else leaf, value)


def _logical_shape(payload: Tensor, recipe: Recipe) -> torch.Size:
    packing = specs_of(recipe)[0].block
    return torch.Size((*payload.shape[:-1], payload.shape[-1] * packing))


def _own_storage(part: Tensor) -> Tensor:
    """`part` itself, or a copy where it is a view of something larger (pickling would drag all of that along)."""
    whole = part.untyped_storage().nbytes() == math.prod(part.shape) * part.itemsize
    return part if whole and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)


def _part_problems(parts: Mapping[str, Tensor], specs: Mapping[str, PartSpec], recipe: Recipe) -> list[str]:
    problems = [f"missing {name!r}" for name in specs.keys() - parts.keys()]
    problems += [f"unexpected {name!r}" for name in parts.keys() - specs.keys()]
    if problems:
        return sorted(problems)
    shape = _logical_shape(parts["payload"], recipe) if parts["payload"].ndim else ()
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
    return problems
