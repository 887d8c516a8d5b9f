"""Models whose parents pass hidden states on in all the ways that are met, and how they are replayed."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from layerwise.inputs.layers import find_layers
from layerwise.inputs.structure import flatten

if TYPE_CHECKING:
    from layerwise.inputs.replay import Recorder

DIM = 8


class Layer(nn.Module):
    """Returns `wrap` of its hidden states; counts its calls."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda h: h, out: int = DIM) -> None:
        super().__init__()
        self.linear, self.wrap, self.calls = nn.Linear(DIM, out), wrap, 0

    def forward(self, hidden: Any, *, mask: Tensor | None = None, **_: Any) -> Any:
        self.calls += 1
        first = hidden if isinstance(hidden, Tensor) else hidden[0]
        out = torch.tanh(self.linear(first)) + first
        return self.wrap(out if mask is None else out * mask)


class Parent(nn.Module):
    """Passes hidden states on: an embedding, layers, a norm and a head."""

    def __init__(self, layers: list[nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(layers or [Layer() for _ in range(4)])
        for param in self.layers.parameters():
            nn.init.normal_(param, std=0.5)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 16)
        self.runs = 0

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        self.runs += 1
        return self.head(self.norm(self.body(self.embed(ids) * scale, ids)))

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        mask = (ids > 3)[..., None].float()
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return hidden


Pair = namedtuple("Pair", "hidden extra")


@dataclasses.dataclass
class State:
    hidden: Tensor
    note: int = 3


class Unwraps(Parent):
    """Its layers return containers, whose first element it passes on as a keyword."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(hidden=hidden)
            hidden = out.hidden if isinstance(out, State | Pair) else out if isinstance(out, Tensor) else out[0]
        return hidden


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda h: (h, None),
    "list": lambda h: [h],
    "named tuple": lambda h: Pair(h, (h, 2)),
    "dataclass": State,
    "model output": lambda h: BaseModelOutput(last_hidden_state=h),
}


def of_two_classes() -> Parent:
    """Every other layer returns a tuple."""

    class Other(Layer):
        pass

    return Unwraps([Layer() if i % 2 else Other(lambda h: (h, None)) for i in range(6)])


class Mixes(Parent):
    """Its layers return pairs and take pairs, as they are."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        pair = (hidden, ids)
        for layer in self.layers:
            pair = layer(pair)
        return pair[0]


class Carries(Parent):
    """Its layers return an object beside hidden states, for the next layer; `looks`: the parent uses it, too."""

    class Makes(Layer):
        def forward(self, hidden: Tensor, *, carried: Any) -> Any:
            out = super().forward(hidden)
            return out + (0 if carried is None else carried.last), SimpleNamespace(last=hidden, scale=2.0)

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__([self.Makes() for _ in range(3)])
        self.looks = looks

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        carried = None
        for layer in self.layers:
            hidden, carried = layer(hidden, carried=carried)
            hidden = hidden * carried.scale if self.looks else hidden
        return hidden


class Skips(Parent):
    """The last layer takes the sum of what three earlier ones returned."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, parts: list[Tensor], older: dict[str, Tensor]) -> Tensor:
            return self.linear(sum(parts)) * older["first"]

    def __init__(self) -> None:
        super().__init__([Layer(), Layer(), Layer(), self.Sum()])

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        outs = [hidden]
        for layer in self.layers[:3]:
            outs.append(layer(outs[-1]))
        return self.layers[3](outs[1:], older={"first": outs[1]})


class Adds(Parent):
    """Adds something to hidden states between all layers."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden) + 0.25
        return hidden


class Deepstack(Parent):
    """Writes features into the hidden states behind the first two layers, in place."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        where = ids > 8
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if index < 2:
                hidden[where] += self.embed.weight[index]
        return hidden


class Looks(Parent):
    """Decides between two ways by the values of hidden states."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask=torch.tensor(2.0) if hidden.mean() > 0 else None)
        return hidden


class Scribbles(Parent):
    """Copies hidden states into a buffer of its own, which is what the next layer gets."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        buffer = torch.empty_like(hidden)
        for layer in self.layers:
            buffer[:] = layer(hidden)
            hidden = buffer.clone()
        return hidden


class Returns(Parent):
    """Adds the output of the first layer to that of the layer before the last, or of the last."""

    def __init__(self, behind: int) -> None:
        super().__init__()
        self.behind = behind

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        outs = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            outs.append(hidden)
            hidden = hidden + outs[0] if index == self.behind else hidden
        return hidden


class Calls(Parent):
    """Calls its layers in an order of its own."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for index in self.order:
            hidden = self.layers[index](hidden)
        return hidden


class Counts(Parent):
    """Tells its layers by a dict which one is running, writing into the same dict and the same tensor."""

    class Told(Layer):
        def forward(self, hidden: Tensor, *, told: dict[str, Any], step: Tensor) -> Tensor:
            return super().forward(hidden) * (told["index"] + 1) + step

    def __init__(self) -> None:
        super().__init__([self.Told() for _ in range(4)])

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        told, step = {"index": 0}, torch.zeros(1)
        for index, layer in enumerate(self.layers):
            told["index"] = index
            hidden = layer(hidden, told=told, step=step.add_(1))
        return hidden


class Shares(Parent):
    """Its layers leave something to later ones in an object that they share; `adds` changes hidden states midway."""

    class Leaves(Layer):
        def forward(self, hidden: Tensor, *, shared: Any) -> Tensor:
            got = shared["kept"][-1] if "kept" in shared else 0
            shared["kept"] = (*shared.get("kept", ()), hidden * 0.5)  # grows with every call
            return super().forward(hidden) + got * len(shared["kept"])

    def __init__(self, kind: type = dict, *, adds: bool = False) -> None:
        super().__init__([self.Leaves() for _ in range(4)])
        self.kind, self.adds = kind, adds

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        shared = self.kind()
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, shared=shared)
            hidden = hidden * 2 if self.adds and index == 1 else hidden
        return hidden


class InPlace(Parent):
    """Its layers write into their own arguments."""

    class Writes(Layer):
        def forward(self, hidden: Tensor, *, mask: Tensor | None = None, **_: Any) -> Tensor:
            hidden += self.linear(hidden)
            return hidden

    def __init__(self) -> None:
        super().__init__([self.Writes() for _ in range(3)])


PARENTS: dict[str, Callable[[], Parent]] = {
    "plain": Parent,
    **{f"returns a {name}": lambda wrap=wrap: Unwraps([Layer(wrap) for _ in range(3)]) for name, wrap in WRAPS.items()},
    "two classes": of_two_classes,
    "pairs": lambda: Mixes([Layer(lambda h: (h, h * 2)) for _ in range(3)]),
    "carries objects": Carries,
    "skips": Skips,
    "adds": Adds,
    "deepstack": Deepstack,
    "counts": Counts,
    "shares a dict": Shares,
    "shares a user dict": lambda: Shares(UserDict),
    "shares and adds": lambda: Shares(adds=True),
    "in place": InPlace,
}


def id_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 16, (2, 5 + extra), generator=generator) for extra in (0, 2, 0)]


@torch.no_grad()
def plain(model: nn.Module, batches: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """What the model returns, and what each layer returned, for each batch."""
    outs: list[list[Any]] = []
    handles = [
        layer.register_forward_hook(lambda _, __, out: outs[-1].append(_copied(out))) for _, layer in find_layers(model)
    ]
    results = []
    for batch in batches:
        outs.append([])
        results.append(call(model, batch))
    for handle in handles:
        handle.remove()
    return results, outs


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(*batch) if isinstance(batch, tuple) else model(**batch)


def _copied(out: Any) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(out)[0]]


@torch.no_grad()
def replay(
    recorder: Recorder, times: int = 2, cast: torch.dtype | None = None
) -> tuple[list[Any], list[list[Any]], list[int]]:
    """As `plain`, by a recorder that runs each layer several times; and for which layers the parent ran."""
    outs: list[list[Any]] = [[] for _ in range(len(recorder))]
    prepared = []
    for index, (_, layer) in enumerate(recorder.layers):
        if recorder.needs_parent(index):
            prepared.append(index)
            recorder.prepare(index)
        for batch in range(len(recorder)):
            for _ in range(times):
                args, kwargs = recorder.inputs(index, batch, cast=cast)
                out = layer.forward(*args, **kwargs)
                recorder.put(index, batch, out)
            outs[batch].append(_copied(out))
        recorder.done(index)
    return [recorder.run_tail(batch) for batch in range(len(recorder))], outs, prepared


def assert_same(one: Any, other: Any, what: str) -> None:
    """Bit for bit, everything that is in two values."""
    ones, others = flatten(one)[0], flatten(other)[0]
    assert len(ones) == len(others), what
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype, what
            assert torch.equal(a, b), f"{what}: differs by {(a.float() - b.float()).abs().max()}"
        elif isinstance(a, bool | int | str | None):
            assert a == b, what
