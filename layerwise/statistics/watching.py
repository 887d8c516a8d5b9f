"""Sees which inputs are multiplied with which weights while a layer runs, whatever modules the layer is made of.

Modules do not show this: experts live in one 3-D parameter, and each model has its own way to multiply with it. So
products are watched. `Watch` is a TorchFunctionMode, which sees every torch function called inside it. A product whose
right operand lies in the storage of a target weight is reported, before it is computed, as

    on_product(Product(x, part, rows, names))

    F.linear(x, w), x @ w.T                    all of x goes to w
    F.linear(x, w[e]), x[e] @ w[e].T           all of that tensor goes to expert e
    torch.bmm(x, w.mT), x @ w.mT               x[e] goes to expert e; an x for all experts goes to all
    F.grouped_mm(x, w.mT, offs=offs)           the rows between offs[e - 1] and offs[e] go to expert e

with w.mT for w if the weight is stored transposed: x @ w, torch.addmm(bias, x, w), torch.bmm(x, w).

A view of the weight counts like the weight: only its place in the storage matters. Any other use of a weight (a copy in
another dtype or order, a product from the left, einsum) is noted in `unfollowed`, since the statistics of that weight
would silently be missing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from layerwise.stages.targets import linear_names

PRODUCTS_SEEN = (
    "expected F.linear(x, w), x @ w.T, torch.bmm(x, w.mT) or F.grouped_mm(x, w.mT). For experts of a transformers "
    'model, model.set_experts_implementation("eager") helps; else exclude it'
)
_PLAIN = (Tensor, Parameter)

# Product functions by name (some have several names, and some are private to torch or transformers), with the positions
# and keywords of both operands, and how the right one holds the weight.
_LINEAR = {"linear": (0, "input", 1, "weight")}
_MATMUL = {
    "matmul": (0, "input", 1, "other"),
    "__matmul__": (0, "input", 1, "other"),
    "mm": (0, "input", 1, "mat2"),
    "bmm": (0, "input", 1, "mat2"),
    "addmm": (1, "mat1", 2, "mat2"),
    "baddbmm": (1, "batch1", 2, "batch2"),
}
_GROUPED = {
    "grouped_mm": (0, "mat_a", 1, "mat_b"),
    "_grouped_mm": (0, "self", 1, "mat2"),
    "grouped_mm_fallback": (0, "input", 1, "weight"),
}


@dataclass(frozen=True, eq=False)
class Product:
    """One input on its way to weights.

    Attributes:
        x: the tensor that the product was called with.
        part: which part of x goes to these weights; () for all of it.
        rows: that part, [.., K].
        names: the linears that take it.
    """

    x: Tensor
    part: tuple[int, ...]
    rows: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _WatchedWeight:
    fqn: str
    names: tuple[str, ...]
    offset: int  # elements, within the storage
    shape: tuple[int, int, int]  # experts (1 for a 2-D weight), N, K
    turned: bool = False  # stored [.., K, N]


class WeightsByStorage:
    """Finds weights by the place of their views in storages.

    Args:
        weights: fqn -> the live weight, [N, K] or [E, N, K], plain and contiguous, or the transposed view of one that
            is stored [K, N] or [E, K, N].
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._by_storage: dict[int, list[_WatchedWeight]] = {}
        for fqn, weight in weights.items():
            plain = type(weight) in _PLAIN and weight.ndim in (2, 3)
            # A transposed view of a contiguous parameter: the model stores [K, N] and multiplies x @ W.
            turned = plain and not weight.is_contiguous()
            if not plain or (turned and not weight.mT.is_contiguous()):
                raise ValueError(
                    f"{fqn} is a {type(weight).__name__} {tuple(weight.shape)} with strides {weight.stride()}, "
                    "expected a plain contiguous [N, K] or [E, N, K]; gather it with unsharded() first"
                )
            shape = (math.prod(weight.shape[:-2]), weight.shape[-2], weight.shape[-1])
            target = _WatchedWeight(fqn, linear_names(fqn, weight.shape), int(weight.storage_offset()), shape, turned)
            others = self._by_storage.setdefault(weight.untyped_storage().data_ptr(), [])
            for other in others:
                if other.offset == target.offset:
                    raise ValueError(f"{fqn} and {other.fqn} are the same weight; name one of them")
            others.append(target)

    def locate(self, x: Any) -> _WatchedWeight | None:
        """Return the target in whose storage x lies; None for any other tensor."""
        if type(x) not in _PLAIN:
            return None
        for target in self._by_storage.get(x.untyped_storage().data_ptr(), ()):
            experts, n, k = target.shape
            if 0 <= x.storage_offset() - target.offset < experts * n * k:
                return target
        return None

    def names(self, target: _WatchedWeight, form: Tensor) -> tuple[str, ...] | None:
        """Return the linears in a view [.., n, K] of a target, in order; None if the view is not made of whole rows."""
        _, n, k = target.shape
        expert, within = divmod(int(form.storage_offset()) - target.offset, n * k)
        steps = (1, n) if target.turned else (k, 1)  # from row to row, from column to column
        strides = (n * k, *steps)[3 - form.ndim :]
        rows = form.shape[-2] if form.ndim >= 2 else 0
        if (
            form.ndim not in (2, 3)
            or form.shape[-1] != k
            or within % steps[0]
            or within // steps[0] + rows > n
            or any(size > 1 and got != want for size, got, want in zip(form.shape, form.stride(), strides, strict=True))
        ):
            return None
        count = form.shape[0] if form.ndim == 3 else 1
        return target.names[expert : expert + count]


@dataclass(eq=False)
class Watch(TorchFunctionMode):
    """Reports the products of targets inside it; it changes no result.

    Attributes:
        unfollowed: fqn -> a function that used the target in another way.
    """

    targets: WeightsByStorage
    on_product: Callable[[Product], None]
    unfollowed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        products = self._products(name, args, kwargs)
        if products is None:
            result = func(*args, **kwargs)
            self._note_copies(name, args, kwargs, result)
            return result
        for product in products:
            self.on_product(product)
        return func(*args, **kwargs)

    def _products(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Product] | None:
        """Return the products of targets in this call; None if there are none, or if the use is not understood."""
        operands = _LINEAR.get(name) or _MATMUL.get(name) or _GROUPED.get(name)
        if operands is None:
            return None
        at, keyword, weight_at, weight_keyword = operands
        x: Any = args[at] if at < len(args) else kwargs.get(keyword)
        weight: Any = args[weight_at] if weight_at < len(args) else kwargs.get(weight_keyword)
        target = self.targets.locate(weight)
        if target is None or type(x) not in _PLAIN or x.ndim == 0:
            return None
        form = weight if name in _LINEAR or weight.ndim < 2 else weight.transpose(-2, -1)
        names = self.targets.names(target, form)
        if names is None or x.shape[-1] != form.shape[-1]:
            return None
        if name not in _GROUPED:
            return list(_split_batch(x, names))
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        if form.ndim == 2 or x.ndim - (offsets is None) != 2:  # groups of columns, or of the sums in a product
            return None
        return list(_split_groups(x, names, offsets))

    def _note_copies(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        first = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(first, Tensor) or not first.is_floating_point() or self.targets.locate(first) is not None:
            return
        for arg in (*args, *kwargs.values()):
            for x in arg if isinstance(arg, tuple | list) else (arg,):
                target = self.targets.locate(x)
                if target is not None:
                    # No error yet: it is one only if no product of this weight is seen in any batch.
                    self.unfollowed.setdefault(target.fqn, name)


def _split_batch(x: Tensor, names: tuple[str, ...]) -> Iterator[Product]:
    """Pair x [.., T, K] with a batch of weights: each weight takes its own x, or all take the same one."""
    if len(names) == 1 or x.ndim < 3 or x.shape[-3] == 1:
        yield Product(x, (), x, names)
        return
    for expert, name in enumerate(names):
        yield Product(x, (expert,), x.select(-3, expert), (name,))


def _split_groups(x: Tensor, names: tuple[str, ...], offsets: Tensor | None) -> Iterator[Product]:
    """Cut x [S, K], sorted by expert; `offsets` holds the end of each expert's rows. Without it, x is [E, T, K]."""
    if offsets is None:
        yield from _split_batch(x, names)
        return
    start = 0
    for name, end in zip(names, offsets.tolist(), strict=True):
        yield Product(x, (start, end), x[start:end], (name,))
        start = end
