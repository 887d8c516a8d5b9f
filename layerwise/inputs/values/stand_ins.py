"""What takes the places of the layers while their parent runs: stand-ins without parameters, and placeholder tensors.

    with swap_in(model, layers, answer):    every layer is replaced, wherever in the model it is registered
        with replace_forward(model, ...):   an early stop leaves the model's forward, but not the hooks around it
            model(batch)                    answer(index, args, kwargs) decides what each layer "returns"

A `Placeholder` has the shape of an output that is not known yet. Whatever is computed from placeholders is a
placeholder, too, and knows which layers it comes from: this shows between which layers a parent changes hidden states.
Code that looks at the values, or writes them into an ordinary tensor, would get zeros, so it raises `Escape`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.torch_private import hook_tables
from layerwise.inputs.values.stores import is_dense, is_ordinary
from layerwise.inputs.values.structure import flatten

# Functions that give away values; and those that write into their first argument, but do not end in "_".
READS = {"__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"}
READS |= {"allclose", "equal", "is_nonzero", "item", "numpy", "tolist"}
WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__"}
WRITES |= {"__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class EarlyStop(BaseException):
    """Leaves a model's forward; not an Exception, so that a parent that catches those lets it through."""


class Escape(EarlyStop):
    """The parent looked at values of hidden states, or wrote them into an ordinary tensor."""

    def __init__(self, origins: frozenset[int]) -> None:
        super().__init__()
        self.origins = origins


class Placeholder(Tensor):
    """A tensor without its values; `origins` are the indices of the layers it would come from."""

    origins: frozenset[int] = frozenset()
    uncounted: bool = False  # it comes from `.data`, through which writes do not count

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; its results are placeholders with the origins of all its arguments."""
        kwargs = kwargs or {}
        # Before it runs: what it writes into an ordinary tensor cannot be taken back.
        origins = frozenset[int]().union(*(found.origins for found in _placeholders((args, kwargs))))
        name = getattr(func, "__name__", "")
        if name in READS or ("out" in kwargs and not isinstance(kwargs["out"], Placeholder)):
            raise Escape(origins)
        in_place = name in WRITES or (name.endswith("_") and not name.endswith("__"))
        # A write into an ordinary tensor would leave zeros in it. One through `.data` raises no version, so it would
        # not show that a placeholder is no longer what a layer returned.
        if in_place and isinstance(args[0], Tensor) and (not isinstance(args[0], Placeholder) or args[0].uncounted):
            raise Escape(origins)
        result: Any = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        uncounted = func == DATA or any(found.uncounted for found in _placeholders((args, kwargs)))
        for made in _placeholders(result):
            made.origins |= origins
            made.uncounted |= uncounted
        if in_place and isinstance(args[0], Placeholder):
            args[0].origins |= origins
        return result


def _placeholders(value: Any) -> Iterator[Placeholder]:
    if isinstance(value, Placeholder):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _placeholders(element)
    elif isinstance(value, dict):
        for element in value.values():
            yield from _placeholders(element)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values; two equal specs can replace each other (strides may differ)."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None = field(default=None, compare=False)  # None: contiguous

    @classmethod
    def of(cls, value: Any) -> "TensorSpec | None":
        """Return the spec of a tensor, None for anything else."""
        if not isinstance(value, Tensor):
            return None
        stride = value.stride() if is_ordinary(value) and is_dense(value) else None
        return cls(value.shape, value.dtype, value.device, stride)

    def placeholder(self, origin: int, zeros: dict[Any, Tensor]) -> Placeholder:
        """Make a placeholder; all of one size share memory from `zeros`, but each counts its own writes."""
        key = (self.shape.numel(), self.dtype, self.device)
        if key not in zeros:
            with torch.inference_mode(mode=False):
                zeros[key] = torch.zeros(self.shape.numel(), dtype=self.dtype, device=self.device)
        stride = self.stride or torch.empty(self.shape, dtype=self.dtype, device="meta").stride()
        # A tensor made under inference_mode would count no writes. `set_` makes a tensor that is no view of another: a
        # view would have the version counter of what it is a view of.
        with torch.inference_mode(mode=False):
            own = torch.empty(0, dtype=self.dtype, device=self.device)
            own.set_(zeros[key].untyped_storage(), 0, self.shape, stride)
        made = own.as_subclass(Placeholder)
        made.origins = frozenset({origin})
        return made


class StandIn(nn.Module):
    """Takes a layer's place: has the layer's attributes, none of its parameters, and reports its calls.

    Args:
        layer: the layer.
        answer: is called with args and kwargs, and says what is to be returned.
        on_attribute: is called with the name of an attribute that somebody sets.
    """

    def __init__(
        self,
        layer: nn.Module,
        answer: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        on_attribute: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        # Past nn.Module's `__setattr__`: a submodule's parameters would be the stand-in's, too.
        self.__dict__["layer"] = layer
        self.answer = answer
        self.training = layer.training
        self.__dict__["on_attribute"] = on_attribute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Report the call and return what is to be returned."""
        return self.answer(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Parents ask layers for their attention type, say.
        return getattr(self.__dict__["layer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "on_attribute" in self.__dict__ and getattr(self.__dict__["layer"], name, None) is not value:
            self.__dict__["on_attribute"](name)
        super().__setattr__(name, value)


@contextmanager
def swap_in(
    model: nn.Module,
    layers: Sequence[nn.Module],
    answer: Callable[[int, tuple[Any, ...], dict[str, Any]], Any],
    on_attribute: Callable[[int, str], None] = lambda _, __: None,
) -> Iterator[None]:
    """Return a context manager in which stand-ins take the layers' places; afterwards the layers are back.

    Attributes and hooks that the modules around the layers got in the meantime are removed, too.

    Args:
        model: the model that contains them.
        layers: modules inside it.
        answer: says what a stand-in returns, given the layer's index and its arguments.
        on_attribute: is called with the layer's index and the name of an attribute that somebody sets on the stand-in.
    """

    def stand_in(index: int) -> StandIn:
        return StandIn(
            layers[index], lambda args, kwargs: answer(index, args, kwargs), lambda name: on_attribute(index, name)
        )

    stand_ins = {layer: stand_in(index) for index, layer in enumerate(layers)}
    # A layer may be registered in several places; it is replaced in each.
    fqns = [(fqn, child) for fqn, child in model.named_modules(remove_duplicate=False) if child in stand_ins]
    split = [(fqn.rpartition("."), child) for fqn, child in fqns]
    places = [(model.get_submodule(parent), name, child) for (parent, _, name), child in split]
    # Not the layers themselves: if one runs, it runs for real, and what it sets up may stay.
    inside = {inner for layer in layers for inner in layer.modules()}
    around = [(module, _list_set_up(module)) for module in model.modules() if module not in inside]
    try:
        for parent, name, layer in places:
            setattr(parent, name, stand_ins[layer])
        yield
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)
        for module, before in around:
            _remove_new(module, before)


# Some modules set things up in their first forward alone; here they would do so without their layers, and never again
# (transformers installs the hooks that collect router logits that way). So new attributes and hooks are removed.
def _list_set_up(module: nn.Module) -> dict[str, set[Any]]:
    return {"": set(vars(module)), **{name: set(table) for name, table in hook_tables(module).items()}}


def _remove_new(module: nn.Module, before: dict[str, set[Any]]) -> None:
    for name in set(vars(module)) - before[""]:
        delattr(module, name)
    for name, table in hook_tables(module).items():
        for key in set(table) - before[name]:
            del table[key]


@contextmanager
def replace_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager that replaces a model's forward; its hooks, FSDP's too, still run around it."""
    before = vars(model).get("forward")
    # nn.Module's `__call__` asks the object for `forward`, inside of its hooks, so this hides that of the class.
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = before


@contextmanager
def refuse_placeholders(model: nn.Module, refusal: Callable[[str, frozenset[int]], Exception]) -> Iterator[None]:
    """Return a context manager in which modules that are given a placeholder raise, before any other hook sees it.

    Args:
        model: only its modules without children are watched: one that holds others may be passed more than it uses.
        refusal: makes the error, of who takes the placeholder and of the layers that it would come from.
    """

    def check(fqn: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for leaf in flatten((args, kwargs))[0]:
                if isinstance(leaf, Placeholder):
                    raise refusal(f"module {fqn}", leaf.origins)

        return hook

    outside = [(fqn, module) for fqn, module in model.named_modules() if not any(True for _ in module.children())]
    handles = [
        module.register_forward_pre_hook(check(fqn), prepend=True, with_kwargs=True)
        for fqn, module in outside
        if not isinstance(module, StandIn)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
