"""QuantizedTensor: a tensor that looks like bf16 [.., N, K] and stores only quantized parts.

A wrapper subclass: it has the logical shape, contiguous strides and the appearance dtype, and its bytes live in plain
inner tensors, its parts, kept as attributes (`payload`, `scale`, ...). The invariants, with d = q.dequantize() and S =
the specs of the format:

    q.parts().keys() == names of S                       q.parts()[s].shape == s.shape(q.shape)
    bytes of q       == sum of the bytes of its parts    (no dense copy, no cached transpose)
    q[a:b].parts()   == the same rows of q.parts(), aliased
    d.dtype == q.dtype == what autograd and FSDP see     q.recipe says everything else

A gathered weight differs in two points: its tensor-wide parts are vectors with one value a shard (see
fsdp_hooks.all_gather), and under a recipe with `gradients` its operand of backward is kept until FSDP reshards (see
fsdp_hooks.until_reshard).

The public methods here are for users; the library itself uses the functions of contents.py.

One table decides which torch operations keep the quantized representation, which requantize and which raise; see
qtensor/ops.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AT_REST, AllGatherHooks, PartNames, Sharding
from fsdp_hooks.lazy_bits import call_resolved
from fsdp_hooks.ranks.scale_partners import Partners
from fsdp_hooks.torch_private import is_described, is_fake, is_tracing, make_wrapper, tree_map, without_torch_function
from fsdp_hooks.until_reshard import UntilReshard
from qtensor.numerics import kernels
from qtensor.numerics.graph_key import THIS_CODE, Keyed, KeyTag
from qtensor.spec.lens import OWN, Lens
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import (
    APPEARANCE_DTYPES,
    check_shape,
    describe,
    logical_shape,
    part_problems,
    registered,
    specs_of,
)
from qtensor.tensor.contents import Preserved, contents_of, decode, initial_value, preserve
from qtensor.tensor.made_anew import address, make_anew
from qtensor.tensor.moves import MoveNote
from qtensor.tensor.old_paths import before_rooms
from qtensor.tensor.pickling import rebuild, reduce

# aten overload -> handler(func, args, kwargs), filled by qtensor/ops
OPS: dict[Any, Callable[..., Any]] = {}
# torch function -> handler(*args, **kwargs), filled by products/linear.py and ops/
TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


class QuantizedTensor(AllGatherHooks, Keyed, Tensor):
    """Base of the tensor classes of all formats; built by `quantize` or `QuantizedTensor.from_parts`.

    Attributes:
        recipe: the recipe it was quantized with.
        payload: the codes of the elements (see the class of the format for shapes and dtypes of all parts).
        scale: what the codes are multiplied by; NVFP4 has a global_scale, too.
        dtype: the appearance dtype, which autograd and FSDP see.
        device: where its parts are.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), MXFP8BlockScaling())
        >>> again = QuantizedTensor.from_parts(q.parts(), q.recipe, q.dtype)
        >>> torch.equal(again.dequantize(), q.dequantize())
        True
        ```
    """

    recipe: Recipe
    payload: Tensor
    scale: Tensor
    _lens: Lens
    _preserved: Preserved
    _partners: Partners | None = None  # the weights with which it shares its tensor-wide scale, see shared_scales.py
    _note: MoveNote | None = None
    _turned: UntilReshard | None = None  # of a gathered weight: its operand in the products of backward
    _init_value = property(initial_value, preserve)  # torch looks up the names from `__tensor_flatten__` here

    def __new__(  # noqa: PLR0913 - everything an instance consists of; internal
        cls,
        parts: Mapping[str, Tensor],
        recipe: Recipe = None,  # type: ignore[assignment] # given, but by those who build a parameter anew
        dtype: torch.dtype = None,  # type: ignore[assignment] # likewise
        *,
        lens: Lens = OWN,
        sharding: Sharding = AT_REST,
        shape: torch.Size | None = None,
        preserved: Preserved | None = None,
        **remembered: Any,
    ) -> Self:
        """Wrap parts (and an initial value) without any check; internal: `from_parts` is the checked constructor.

        A tensor in the place of parts comes from those who build a parameter anew by its class, see made_anew.py.
        """
        given: Any = parts
        # accelerate moves parameters by type(p)(value, **p.__dict__)
        if isinstance(given, Tensor):
            made: Any = make_anew(QuantizedTensor, given, {"recipe": recipe, **remembered}, quantize)
            return made  # type: ignore[no-any-return]
        payload = parts["payload"]
        outer = logical_shape(payload, recipe) if shape is None else shape
        self: Any = make_wrapper(cls, outer, dtype, payload.device)
        self.recipe, self._lens, self._sharding, self._preserved = recipe, lens, sharding, preserved or Preserved()
        for name, part in parts.items():
            setattr(self, name, part)
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all is done in __new__."""

    # -- the public surface --------------------------------------------------------------------------------------------

    @staticmethod
    def from_parts(parts: Mapping[str, Tensor], recipe: Recipe, dtype: torch.dtype) -> "QuantizedTensor":
        """Return a quantized tensor around existing parts, which it aliases.

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
        """Return the inner tensors by name, payload first; they alias this tensor's bytes."""
        return {spec.name: getattr(self, spec.name) for spec in specs_of(self.recipe)}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense values, shape self.shape, computed in fp32 and rounded once to `dtype` (None: self.dtype).

        Differentiable: the gradient of the values is the weight's gradient (straight through), in self.dtype.
        """
        # a read of our own attributes would go through __torch_function__
        with without_torch_function():
            # without a gradient to hand on, an autograd node costs more than a small decode
            if torch.is_grad_enabled() and self.requires_grad:
                return _StraightThrough.apply(self, dtype)  # type: ignore[no-any-return, no-untyped-call]
            return decode(self, dtype)

    @staticmethod
    def safe_globals() -> list[Any]:
        """Return what `torch.serialization.safe_globals` must allow for `torch.load(weights_only=True)` of them."""
        named = [rebuild, *Recipe.registry.values()]
        return [*named, *before_rooms(named)]

    # -- what FSDP2's hooks ask for ------------------------------------------------------------------------------------

    def _part_names(self) -> PartNames:
        # a read of our own attributes would go through __torch_function__
        return _part_names(self.recipe, self.payload.ndim)

    def _build_gathered(self, parts: Mapping[str, Tensor], dtype: torch.dtype, sharding: Sharding) -> Tensor:
        return self._like(parts, dtype=dtype, sharding=sharding)

    def _kept_beside(self, gathered: Any) -> tuple[Tensor, ...]:
        if self.recipe.gradients is None:
            return ()
        gathered._turned = UntilReshard(len(specs_of(self.recipe.of_backward)), gathered.device)
        return gathered._turned.held  # type: ignore[no-any-return]

    # -- what the packages build from one ------------------------------------------------------------------------------

    def _like(
        self,
        parts: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        lens: Lens = OWN,
        sharding: Sharding = AT_REST,
        shape: torch.Size | None = None,
    ) -> "QuantizedTensor":
        """Return a tensor of this class, recipe and partners around other parts, by default of the shape they have."""
        made = type(self)(parts, self.recipe, dtype or self.dtype, lens=lens, sharding=sharding, shape=shape)
        if self._partners is not None:
            made._partners = self._partners
        return made

    def _alias(self, lens: Lens, shape: torch.Size) -> "QuantizedTensor":
        """Return another look at the same parts, and at what is preserved beside them."""
        sharding, preserved = self._sharding, self._preserved
        made = type(self)(
            self.parts(), self.recipe, self.dtype, lens=lens, sharding=sharding, shape=shape, preserved=preserved
        )
        if self._partners is not None:
            made._partners = self._partners
        if self._turned is not None:
            made._turned = self._turned
        return made

    # -- torch protocols -----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = TORCH_FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **kwargs) if kwargs else handler(*args)
        # torch's own default would wrap plain results in this class again
        with without_torch_function():
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is that of the C function it has by default
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = OPS.get(func)
        if handler is None and torch.is_inference_mode_enabled():
            # in inference mode composite ops arrive whole, otherwise in pieces
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
            # a view of a normal tensor must be a normal tensor, but one made here would be an inference tensor
            with torch.inference_mode(mode=False), torch.no_grad():
                return call_resolved(handler, func, args, kwargs or {})
        return call_resolved(handler, func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # a graph cached on disk must not be found by another version of this code
        KeyTag.put()
        return list(contents_of(self)), (self.recipe, self.dtype, self._lens, self._sharding, THIS_CODE)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "QuantizedTensor":
        recipe, dtype, lens, sharding, _ = context
        kind = registered(recipe).tensor_class
        return kind(inner, recipe, dtype, lens=lens, sharding=sharding, shape=outer_size)  # type: ignore[no-any-return]

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
        return reduce(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch's own has no types
        looks = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"{type(self).__name__}({looks}, recipe={self.recipe})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raise: a quantized tensor has no storage of its own, only its parts have."""
        if is_tracing() or is_described() or is_fake(self.payload):
            # a tracer describes every tensor it meets by its storage, but touches no byte of that
            return super().untyped_storage()
        raise self._storage_error()

    def data_ptr(self) -> int:
        """Return 0, as for every tensor without a storage; see made_anew.py for who gets another answer."""
        return address(self.payload)

    def __create_write_items__(self, fqn: str, value: Any) -> Any:
        """Raise. DCP calls this on a tensor, or on a DTensor around it, that it is about to write as it is.

        DCP is still planning then: every rank learns of the error, and nothing has been written. An error in torch's
        writer threads would be lost, and the save would succeed without the weight.
        """
        raise self._storage_error(f"{fqn}: ")

    def _storage_error(self, name: str = "") -> RuntimeError:
        return RuntimeError(
            f"{name}{describe(self.shape, self.recipe)} has no single storage to write, share or compare; use "
            ".parts(), and save it by dcp.save with planner=QuantizedSavePlanner() (or expand the state dict first)"
        )

    def tolist(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, as numpy() and __dlpack__() do, which would hand out a null pointer: call .dequantize() first."""
        raise NotImplementedError(
            "tolist, numpy and DLPack are not defined for quantized tensors; call .dequantize() first"
        )

    numpy = __dlpack__ = tolist


@functools.cache
def _part_names(recipe: Recipe, ndim: int) -> PartNames:
    specs = specs_of(recipe)
    return PartNames(
        every=tuple(spec.name for spec in specs),
        along=frozenset(spec.name for spec in specs if spec.extends_along(0, ndim)),
        sent=tuple(spec.name for spec in specs if spec.gathered),
    )


class _StraightThrough(torch.autograd.Function):
    """Dequantize; backward hands the gradient of the dense values to the weight."""

    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = q.dtype
        return decode(q, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def quantize(x: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Quantize a dense tensor.

    Args:
        x: bf16, fp16 or fp32 [.., K], 1-D and up, on any device. K must be a multiple of the recipe's block (MXFP8 and
            MXFP4 32, NVFP4 16, INT4 its group, NF4 its block; any K fits Float8 and INT8); for square blocks N too.
            Square blocks need 2-D and up.
        recipe: Float8CurrentScaling, Float8DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, MXFP4BlockScaling,
            NVFP4BlockScaling, Int4GroupScaling, Int8RowScaling or NF4BlockScaling.

    Returns:
        A tensor of the format's class (Float8Tensor, MXFP8Tensor, MXFP4Tensor, NVFP4Tensor, Int4Tensor, Int8Tensor or
        NF4Tensor) of the same shape, appearance dtype and device, detached from autograd. The formulas are in the
        module of the format.

    Raises:
        TypeError: x is quantized already, a DTensor, or not bf16, fp16 or fp32; or `recipe` is not a recipe.
        ValueError: the shape does not fit the blocks.

    Example:
        ```python
        >>> q = quantize(torch.ones(4, 64, dtype=torch.bfloat16), MXFP8BlockScaling())
        >>> q.shape, q.dtype, q.payload.dtype
        (torch.Size([4, 64]), torch.bfloat16, torch.float8_e4m3fn)
        >>> q.dequantize().sum()
        tensor(256., dtype=torch.bfloat16)
        ```
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


def dequantize_all(value: Any) -> Any:
    """Return `value` with every quantized tensor in it dequantized."""
    return tree_map(lambda leaf: decode(leaf) if isinstance(leaf, QuantizedTensor) else leaf, value)
