"""Models whose parents pass hidden states on in all the ways that are met, and how they are replayed."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from collections.abc import Callable


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


class Hands(Parent):
    """Hands hidden states over inside an object: the same for all layers, or another for each."""

    class Opens(Layer):
        def forward(self, context: Any) -> Tensor:
            return super().forward(context.hidden)

    def __init__(self, *, anew: bool) -> None:
        super().__init__([self.Opens() for _ in range(4)])
        self.anew = anew

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        context = SimpleNamespace()
        for layer in self.layers:
            context = SimpleNamespace() if self.anew else context
            context.hidden = hidden
            hidden = layer(self.wrap(context))
        return hidden

    @staticmethod
    def wrap(context: Any) -> Any:
        return context


class Hides(Hands):
    """Hands hidden states over so deep inside an object that they are not found."""

    def __init__(self) -> None:
        super().__init__(anew=True)
        for layer in self.layers:
            layer.forward = lambda outer, layer=layer: type(layer).forward(layer, outer.inner)

    @staticmethod
    def wrap(context: Any) -> Any:
        return SimpleNamespace(inner=context)


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
    "hands over one object": lambda: Hands(anew=False),
    "hands over objects": lambda: Hands(anew=True),
    "skips": Skips,
    "adds": Adds,
    "deepstack": Deepstack,
    "counts": Counts,
    "shares a dict": Shares,
    "shares a user dict": lambda: Shares(UserDict),
    "shares and adds": lambda: Shares(adds=True),
    "in place": InPlace,
}
