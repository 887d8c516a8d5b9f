"""Steps in which others than the optimizer write weights, by every route there is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn

from fsdp_hooks import unsharded
from qtensor import QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.lives import models, numerics
from tests.adversary.lives.models import FACTS
from tests.adversary.lives.twin import Weight, as_array

if TYPE_CHECKING:
    from tests.adversary.lives.life import Life

SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def in_place(life: Life, random: Random) -> None:
    """One weight is written in place."""
    name = random.choice(list(life.weights))
    param, weight = life.named()[name], life.weights[name]
    route = random.choice(list(ROUTES))
    x = models.weights(weight.shape, random.getrandbits(40), random.choice(SOURCES))
    with torch.no_grad(), life.under():
        ROUTES[route](param, weight, x)


def _copy(target: Callable[[Any], Any]) -> Callable[[Any, Weight, Tensor], None]:
    def route(param: Any, weight: Weight, x: Tensor) -> None:
        target(param).copy_(x)
        weight.write(x)

    return route


def _arithmetic(op: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Weight, Tensor], None]:
    def route(param: Any, weight: Weight, x: Tensor) -> None:
        value = weight.start()
        x = x.to(weight.dtype)
        op(value, x)
        op(param, x)
        weight.write(value)

    return route


def _quantized(param: Any, weight: Weight, x: Tensor) -> None:
    """Bytes of the same recipe."""
    q = quantize(x, weight.facts.recipe) if weight.facts and x.ndim > 1 else x
    param.copy_(q)
    if weight.quantized:
        weight.write(x)
        weight.forget()
    else:
        weight.write(q.dequantize() if isinstance(q, QuantizedTensor) else q)


def _data(param: Any, weight: Weight, x: Tensor) -> None:
    """`param.data = x` is refused where it would be lost."""
    if weight.facts is None:
        param.data = x.to(weight.dtype)
        weight.write(x)
        return
    try:
        param.data = x.to(weight.dtype)
    except NotImplementedError:
        return
    raise Found("param.data = x went through")


def _parts(param: Any, weight: Weight, x: Tensor) -> None:
    """Bytes into the parts, as a loader writes them."""
    if not weight.quantized:
        param.copy_(x)
        weight.write(x)
        return
    assert weight.facts is not None
    weight.parts = numerics.encode(as_array(x), weight.facts)
    for name, part in param.parts().items():
        held = part.view(torch.uint8) if part.ndim else part.reshape(1).view(torch.uint8)
        source = torch.frombuffer(bytearray(weight.parts[name].tobytes()), dtype=torch.uint8)
        held.copy_(source.view(held.shape))


ROUTES: dict[str, Callable[[Any, Weight, Tensor], None]] = {
    "copy_": _copy(lambda param: param),
    "data.copy_": _copy(lambda param: param.data),
    "detach().copy_": _copy(lambda param: param.detach()),
    "view.copy_": _copy(lambda param: param.view(param.shape)),
    "slice.copy_": _copy(lambda param: param[:]),
    "zero_": _arithmetic(lambda value, x: value.zero_()),
    "fill_": _arithmetic(lambda value, x: value.fill_(0.75)),
    "mul_": _arithmetic(lambda value, x: value.mul_(0.5)),
    "add_": _arithmetic(lambda value, x: value.add_(x)),
    "sub_ alpha": _arithmetic(lambda value, x: value.sub_(x, alpha=0.25)),
    "lerp_": _arithmetic(lambda value, x: value.lerp_(x, 0.5)),
    "clamp_": _arithmetic(lambda value, x: value.clamp_(-0.5, 0.5)),
    "foreach": _arithmetic(lambda value, x: torch._foreach_mul_([value], 0.5)),
    "quantized": _quantized,
    "data": _data,
    "parts": _parts,
}


def load_state_dict(life: Life, random: Random) -> None:
    """The whole state, dense or quantized, by torch's own routes."""
    how = random.choice(("load", "assign", "partly", "set", "set partly"))
    if how == "assign" and any(layer.kind == "tied" for layer in life.layers):
        how = "load"  # torch unties what it assigns
    partly = how in ("partly", "set partly")
    state: dict[str, Any] = {}
    writes: list[Callable[[], None]] = []
    for name, weight in life.weights.items():
        if partly and random.random() < 0.5:
            continue
        by_hand = len(weight.shape) == 3
        entry, write = entry_for(weight, random, assign=how == "assign", same=by_hand and how != "load")
        state[name] = entry
        writes.append(write)
        for number, layer in enumerate(life.layers):
            if layer.kind == "tied" and name == f"layers.{number}.linear.weight":
                state[f"layers.{number}.second.weight"] = entry
    with life.under():
        if how in ("set", "set partly"):
            options = dcp_state.StateDictOptions(strict=not partly, full_state_dict=random.random() < 0.5)
            dcp_state.set_model_state_dict(life.net, state, options=options)
        else:
            life.net.load_state_dict(state, strict=not partly, assign=how == "assign")
    for write in writes:
        write()
    if how == "assign":
        for weight in life.weights.values():
            weight.grad = None
        life.tune()


def entry_for(weight: Weight, random: Random, *, assign: bool, same: bool = False) -> tuple[Any, Callable[[], None]]:
    """An entry of a state dict for a weight, and what loading it does to the reference.

    same: only bytes of its own recipe. Parameters that were made by hand have no hook that quantizes anything else.
    """
    dtype = weight.dtype if assign else random.choice(SOURCES)
    x = models.weights(weight.shape, random.getrandbits(40), dtype)
    if weight.facts is None or (not same and random.random() < 0.5):
        return x, lambda: weight.write(x)
    other = weight.facts
    if len(weight.shape) < 3 and random.random() < 0.3:
        fitting = [each for each in FACTS.values() if fits(each, weight.shape)]
        other = random.choice(fitting)
    q = quantize(x, other.recipe)
    if weight.quantized and other is weight.facts:

        def kept() -> None:
            weight.write(x)
            weight.forget()

        return q, kept
    values = torch.from_numpy(numerics.decode(numerics.encode(as_array(x), other), other))
    return q, lambda: weight.write(values if weight.quantized else values.to(weight.dtype))


def fits(facts: Any, shape: tuple[int, ...]) -> bool:
    """Whether a recipe has this shape."""
    if facts.ragged:
        return True
    return shape[-1] % facts.block == 0 and (not facts.square or shape[-2] % facts.block == 0)


def gathered(life: Life, random: Random) -> None:
    """A write inside of `unsharded`, nested, left by an exception or not."""
    names = [name for name in life.weights if random.random() < 0.5]
    params, x = life.named(), {}
    for name in names:
        x[name] = models.weights(life.weights[name].shape, random.getrandbits(40), random.choice(SOURCES))
    fails = random.random() < 0.3
    inner = unsharded(random.choice(list(life.net.layers)), writeback=random.random() < 0.5)
    with (
        life.under(),
        contextlib.suppress(KeyboardInterrupt),
        torch.no_grad(),
        unsharded(life.net, writeback=True),
        inner,
    ):
        for name in names:
            params[name].copy_(x[name])
        if fails:
            raise KeyboardInterrupt
    for name in names:
        life.weights[name].write(x[name])  # without FSDP there is nothing to take back


def replace_parameter(life: Life, random: Random) -> Any:
    """A new parameter in the place of a quantized one; a new optimizer follows."""
    numbers = [number for number, layer in enumerate(life.layers) if layer.quantized and layer.kind != "tied"]
    if not numbers:
        return "none"
    number = random.choice(numbers)
    layer = life.layers[number]
    name = f"layers.{number}.{layer.weight}"
    weight = life.weights[name]
    x = models.weights(weight.shape, random.getrandbits(40), weight.dtype)
    owner = life.net.get_submodule(name.rpartition(".")[0])
    with life.under():
        owner.weight = nn.Parameter(quantize(x, FACTS[layer.recipe].recipe), requires_grad=weight.requires_grad)
    weight.write(x)
    weight.grad = None
    weight.forget()
    life.tune()
    return None


STEPS = {
    "in_place": in_place,
    "load_state_dict": load_state_dict,
    "gathered": gathered,
    "replace_parameter": replace_parameter,
}
