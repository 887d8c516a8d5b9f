"""The reference of a life: plain values in one process, numerics of its own, and torch's plain optimizers.

`Weight` is what one parameter holds, whole and unsharded; `Masters` is what MasterWeightOptimizer promises, written
down a second time: a plain torch optimizer on fp32 masters, and when a master is made anew from its parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.adversary.lives import numerics
from tests.adversary.lives.models import FACTS, Layer
from tests.recipes import Facts


@dataclass
class Weight:
    """One parameter. Quantized: `parts`, of which `dtype` is the appearance; else `value`, a plain tensor.

    facts: of the recipe; of a dense one None. gathered: a dense one is quantized for products.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    facts: Facts | None = None
    gathered: bool = False
    parts: numerics.Parts | None = None
    value: Tensor | None = None
    initial: Tensor | None = None
    preserves: bool = False
    requires_grad: bool = True
    grad: Tensor | None = None

    @property
    def quantized(self) -> bool:
        return self.facts is not None and not self.gathered

    def write(self, x: Tensor) -> None:
        """What a write of dense values leaves."""
        if not self.quantized:
            self.value = x.to(self.dtype, copy=True)
            return
        assert self.facts is not None
        self.parts = numerics.encode(as_array(x), self.facts)
        if self.preserves:
            self.initial = x.to(self.dtype, copy=True)

    def take(self, other: Weight) -> None:
        """The bytes of another one of its kind."""
        self.parts = None if other.parts is None else {name: part.copy() for name, part in other.parts.items()}
        self.value = None if other.value is None else other.value.clone()
        self.forget()

    def forget(self) -> None:
        """The preserved initial value is no longer that of the bytes."""
        self.initial, self.preserves = None, False

    def decoded(self) -> Tensor:
        """fp32."""
        if not self.quantized:
            assert self.value is not None
            return self.value.float()
        assert self.parts is not None
        assert self.facts is not None
        return torch.from_numpy(numerics.decode(self.parts, self.facts))

    def dense(self) -> Tensor:
        """The values in the dtype that the parameter has."""
        return self.decoded().to(self.dtype)

    def used(self) -> Tensor:
        """What a product uses."""
        if not self.gathered:
            return self.dense()
        assert self.facts is not None
        parts = numerics.encode(as_array(self.decoded()), self.facts)
        return torch.from_numpy(numerics.decode(parts, self.facts)).to(self.dtype)

    def start(self) -> Tensor:
        """What an update in place computes on."""
        return self.dense() if self.initial is None else self.initial.clone()

    def stored(self) -> dict[str, bytes]:
        """All bytes, by part."""
        if self.quantized:
            assert self.parts is not None
            return {name: part.tobytes() for name, part in self.parts.items()}
        assert self.value is not None
        return {"": raw(self.value)}


def as_array(x: Tensor) -> Any:
    return x.detach().to(torch.float32).contiguous().numpy()


def raw(x: Tensor) -> bytes:
    """The bytes of a plain tensor, with one NaN where its numbers are values: processors make several."""
    if x.is_floating_point() and x.dtype.itemsize > 1:
        x = torch.where(x != x, torch.full_like(x, torch.nan), x)  # noqa: PLR0124
    flat = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def weights_of(layers: Sequence[Layer]) -> dict[str, Weight]:
    """The parameters of a `Net`, by name and in its order, without values."""
    found = {}
    for number, layer in enumerate(layers):
        facts = None if layer.kind == "dense" else FACTS[layer.recipe]
        gathered = facts is not None and layer.storage == "high_precision"
        found[f"layers.{number}.{layer.weight}"] = Weight(
            layer.shape, layer.dtype, facts, gathered=gathered, preserves=layer.preserved
        )
        if layer.bias:
            found[f"layers.{number}.linear.bias"] = Weight((layer.rows,), layer.dtype)
    return found


def gradients(layers: Sequence[Layer], weights: Mapping[str, Weight], batches: Sequence[Any]) -> list[list[Tensor]]:
    """Add the gradients of all batches to those of the weights, exactly, and return the outputs of each batch."""
    told = []
    for xs, signs in batches:
        leaves = {name: weight.used().clone().requires_grad_(weight.requires_grad) for name, weight in weights.items()}
        outputs = [_output(number, layer, leaves, xs[number]) for number, layer in enumerate(layers)]
        loss = sum((y * sign).sum() for y, sign in zip(outputs, signs, strict=True))
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                own = weights[name]
                own.grad = leaf.grad if own.grad is None else own.grad + leaf.grad
        told.append([y.detach() for y in outputs])
    return told


def outputs(layers: Sequence[Layer], weights: Mapping[str, Weight], batch: Any) -> list[Tensor]:
    """What a forward gives."""
    leaves = {name: weight.used() for name, weight in weights.items()}
    return [_output(number, layer, leaves, batch[0][number]) for number, layer in enumerate(layers)]


def _output(number: int, layer: Layer, leaves: Mapping[str, Tensor], x: Tensor) -> Tensor:
    weight = leaves[f"layers.{number}.{layer.weight}"]
    if layer.kind == "experts":
        return torch.stack([F.linear(tokens, matrix) for tokens, matrix in zip(x, weight, strict=True)])
    y = F.linear(x, weight, leaves.get(f"layers.{number}.linear.bias"))
    return y + F.linear(x, weight) if layer.kind == "tied" else y


class Masters:
    """fp32 masters under a plain optimizer."""

    def __init__(self, weights: Mapping[str, Weight], kind: Any, groups: Sequence[Sequence[str]], options: Any) -> None:
        self.weights, self.kind, self.options = dict(weights), kind, dict(options)
        self.masters: dict[str, nn.Parameter] = {}
        self.fresh: set[str] = set()
        self.written: dict[str, tuple[dict[str, bytes], bytes]] = {}
        self.published: set[str] = set()
        self.groups = [list(group) for group in groups]
        self.inner = kind([{"params": self._begin(group)} for group in self.groups], **self.options)

    def add_group(self, names: Iterable[str]) -> None:
        self.groups.append(list(names))
        self.inner.add_param_group({"params": self._begin(self.groups[-1])})

    def _begin(self, names: Iterable[str]) -> list[nn.Parameter]:
        made = []
        for name in names:
            self.masters[name] = nn.Parameter(torch.zeros(self.weights[name].shape, dtype=torch.float32, device="cpu"))
            self._anew(name)
            made.append(self.masters[name])
        return made

    def _anew(self, name: str) -> None:
        """A master follows its parameter."""
        weight = self.weights[name]
        with torch.no_grad():
            self.masters[name].copy_(weight.decoded() if weight.initial is None else weight.initial.float())
            if weight.quantized:
                self.masters[name].add_(0.0)
        if weight.quantized:
            self.fresh.add(name)
        self.written[name] = self._held(name)

    def _held(self, name: str) -> tuple[dict[str, bytes], bytes]:
        weight = self.weights[name]
        return weight.stored(), b"" if weight.initial is None else raw(weight.initial)

    def low(self, name: str) -> bool:
        """Whether it has a master beside it."""
        weight = self.weights[name]
        return weight.quantized or weight.dtype is not torch.float32

    def step(self) -> None:
        for name in self.masters:
            known = self.written.get(name)
            if not self.low(name):
                with torch.no_grad():
                    self.masters[name].copy_(self.weights[name].decoded())
            elif known is not None and known[0] != self._held(name)[0]:
                if known[1] == self._held(name)[1]:
                    self.weights[name].forget()  # the value belongs to other bytes
                self._anew(name)
        stepped = [name for name in self.masters if self.weights[name].grad is not None]
        stepped = [name for name in stepped if self.weights[name].requires_grad]
        for name, master in self.masters.items():
            grad = self.weights[name].grad
            master.grad = grad.float().clone() if name in stepped and grad is not None else None
        self.inner.step()
        self.published.update(stepped)
        for name in stepped:
            self._write(name)
        for name in self.masters:
            if name in stepped or name not in self.written:
                self.written[name] = self._held(name)

    def _write(self, name: str) -> None:
        weight, master = self.weights[name], self.masters[name].detach()
        if not weight.quantized:
            weight.value = master.to(weight.dtype, copy=True)
            return
        if name in self.fresh and not bool((weight.decoded() != master).any()):
            return
        self.fresh.discard(name)
        assert weight.facts is not None
        if weight.facts.history:
            assert weight.parts is not None
            weight.parts = numerics.advance(as_array(master), weight.facts, weight.parts)
        else:
            weight.parts = numerics.encode(as_array(master), weight.facts)
        if weight.initial is not None:
            weight.initial = master.to(weight.dtype, copy=True)

    def states(self) -> dict[str, dict[str, Any]]:
        """What `state` of the product must hold."""
        found = {}
        for name, master in self.masters.items():
            own = dict(self.inner.state.get(master, {}))
            if name in self.published or own:
                found[name] = ({"master_weight": master.detach()} if self.low(name) else {}) | own
        return found

    def reloaded(self, weights: Mapping[str, Weight]) -> Masters:
        """A new optimizer, over these weights, that has loaded the state of this one."""
        other = Masters(weights, self.kind, self.groups, self.options)
        other.inner.load_state_dict(copy.deepcopy(self.inner.state_dict()))
        for name, values in self.states().items():
            if self.low(name):
                with torch.no_grad():
                    other.masters[name].copy_(values["master_weight"])
                other.written.pop(name, None)
            other.published.add(name)
        return other


class Plain:
    """A plain torch optimizer: what it would write, quantized."""

    def __init__(self, weights: Mapping[str, Weight], kind: Any, groups: Sequence[Sequence[str]], options: Any) -> None:
        self.weights, self.kind, self.options = dict(weights), kind, dict(options)
        self.groups = [list(group) for group in groups]
        self.params: dict[str, nn.Parameter] = {}
        self.inner = kind([{"params": self._begin(group)} for group in self.groups], **self.options)

    def add_group(self, names: Iterable[str]) -> None:
        self.groups.append(list(names))
        self.inner.add_param_group({"params": self._begin(self.groups[-1])})

    def _begin(self, names: Iterable[str]) -> list[nn.Parameter]:
        made = {name: nn.Parameter(self.weights[name].start()) for name in names}
        self.params |= made
        return list(made.values())

    def step(self) -> None:
        stepped = [name for name in self.params if self.weights[name].grad is not None]
        for name, param in self.params.items():
            with torch.no_grad():
                param.copy_(self.weights[name].start())
            grad = self.weights[name].grad
            param.grad = None if grad is None else grad.clone()
        self.inner.step()
        for name in stepped:
            self.weights[name].write(self.params[name].detach())

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: dict(self.inner.state[param]) for name, param in self.params.items() if param in self.inner.state}

    def reloaded(self, weights: Mapping[str, Weight]) -> Plain:
        """A new optimizer, over these weights, that has loaded the state of this one."""
        other = Plain(weights, self.kind, self.groups, self.options)
        other.inner.load_state_dict(copy.deepcopy(self.inner.state_dict()))
        return other


def held_equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two states of one parameter are the same, bit for bit."""
    if found.keys() != wanted.keys():
        return False
    return all(_same(value, wanted[name]) for name, value in found.items())


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(found, Tensor):
        return bool(found == wanted)
    return found.dtype == wanted.dtype and found.shape == wanted.shape and same_values(found, wanted)


def same_values(found: Tensor, wanted: Tensor) -> bool:
    """Whether two plain tensors hold the same numbers; NaN is NaN, and zeros have no sign."""
    return bool(((found == wanted) | ((found != found) & (wanted != wanted))).all())  # noqa: PLR0124 - NaN
