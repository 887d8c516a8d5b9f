"""Models whose authors never heard of layerwise calibration, and what their layers see beside their arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

DIM, VOCABULARY = 32, 40


class Layer(nn.Module):
    """A residual branch of two linears; `body` is the branch."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def body(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(hidden))))

    def forward(self, hidden: Any) -> Any:
        return hidden + self.body(hidden)


class Stranger(nn.Module):
    """An embedding, three layers, a norm and a head."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(self.layer(index) for index in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                values = torch.randn(param.shape, generator=generator)
                param.copy_(0.3 * values if param.ndim > 1 else 0.5 + 0.1 * values)
        self.set_up()

    def set_up(self) -> None:
        """For subclasses."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.embed(ids), ids)))

    def run(self, hidden: Any, ids: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def batches() -> list[Tensor]:
    """Ids [2, 6]."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 6), generator=generator) for _ in range(4)]


SUPPORTED: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {}
Kind = type[Stranger]


def supported(kind: Kind) -> Kind:
    SUPPORTED[kind.__name__] = kind
    return kind


def refused(message: str) -> Callable[[Kind], Kind]:
    def note(kind: Kind) -> Kind:
        REFUSED[kind.__name__] = (kind, message)
        return kind

    return note


# -- hidden states that are handed on without being returned -----------------------------------------------------------


class Writes(Layer):
    """Adds its branch to what it is given, and returns nothing."""

    def forward(self, hidden: Tensor) -> None:
        hidden += self.body(hidden)


@supported
class WritesIntoItsArgument(Stranger):
    layer = Writes

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            layer(hidden)
        return hidden


@supported
class WritesWhereTorchDoesNotCount(WritesIntoItsArgument):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> None:
            hidden.data.copy_(hidden + self.body(hidden))


@supported
class ReturnsWhatNobodyTakes(WritesIntoItsArgument):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> Tensor:
            hidden += self.body(hidden)
            return hidden


@supported
class TwoBuffers(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor, *, out: Tensor) -> None:
            out.copy_(hidden + self.body(hidden))

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        other = torch.empty_like(hidden)
        for layer in self.layers:
            layer(hidden, out=other)
            hidden, other = other, hidden
        return hidden


@supported
class OneBufferForAllBatches(Stranger):
    """As a CUDA graph has it: static memory, of which a batch takes a part."""

    layer = Writes

    def set_up(self) -> None:
        self.register_buffer("static", torch.zeros(4, 6, DIM), persistent=False)

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        own = self.static[: len(hidden)]
        own.copy_(hidden)
        for layer in self.layers:
            layer(own)
        return own.clone()


@supported
class RunningSum(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor, total: Tensor) -> Tensor:
            total += hidden
            return self.body(total)

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden = layer(hidden, total)
        return hidden + total


@supported
class FillsADict(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, state: dict[str, Tensor]) -> None:
            state["hidden"] = state["hidden"] + self.body(state["hidden"])

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        state = {"hidden": hidden}
        for layer in self.layers:
            layer(state)
        return state["hidden"]


@supported
class AppendsToAList(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, states: list[Tensor]) -> None:
            states.append(states[-1] + self.body(states[-1]))

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        states = [hidden]
        for layer in self.layers:
            layer(states)
        return states[-1]


@supported
class FillsAnObject(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, state: SimpleNamespace) -> None:
            state.hidden = state.hidden + self.body(state.hidden)

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        state = SimpleNamespace(hidden=hidden)
        for layer in self.layers:
            layer(state)
        return state.hidden


NOT_KEPT = "is computed from the output of layers.0, which is not kept"


@refused(NOT_KEPT)
class ChangesWhatLayersWrote(Stranger):
    layer = Writes

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            layer(hidden)
            hidden.mul_(0.5)
        return hidden


@refused("the model takes the output of layers.0 and layers.1, which is not kept")
class AddsUpWhatLayersWrote(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, state: dict[str, Tensor]) -> None:
            state["hidden"] = state["hidden"] + self.body(state["hidden"])

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        state, total = {"hidden": hidden}, torch.zeros_like(hidden)
        for layer in self.layers:
            layer(state)
            total = total + state["hidden"]
        return total


@refused("layer layers.0 changes something of its own in each call")
class WritesIntoATensorInADict(FillsADict):
    class layer(Layer):  # noqa: N801
        def forward(self, state: dict[str, Tensor]) -> None:
            state["hidden"] += self.body(state["hidden"])


# -- what the model does to outputs between layers ---------------------------------------------------------------------


@supported
class ScalesInPlace(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            hidden.mul_(0.5)
            hidden[:, 0] = 0.25
        return hidden


@supported
class OtherShapes(Stranger):
    """A layer returns fewer tokens than those of its class before it, and the model relies on that."""

    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> Tensor:
            out = super().forward(hidden)
            return out[:, ::2] if self.index == 1 else out

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            assert hidden.shape[1] == (3 if layer.index else 6)
        return hidden


@refused(NOT_KEPT)
class ScalesPastTorch(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            hidden.data.mul_(0.5)
        return hidden


@refused("args[0] of layer layers.2 " + NOT_KEPT)
class AddsResiduals(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@refused(NOT_KEPT)
class ChecksValues(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            assert torch.isfinite(hidden).all()
        return hidden


@refused("layer layers.0 is called again in one forward of the model")
class CallsLayersTwice(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.cat([layer(half) for half in hidden.split(1)])
        return hidden


@refused("layer layers.2 was not called in the model's forward of batch 0")
class ReturnsEarly(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](hidden))


@refused("which is not kept: after the layers a model may use only that of the last one, layers.2")
class AveragesAllLayers(Stranger):
    def forward(self, ids: Tensor) -> Tensor:
        first = self.layers[0](self.embed(ids))
        second = self.layers[1](first)
        return self.head(self.norm(first) + self.norm(second) + self.norm(self.layers[2](second)))


# -- what a layer sees beside its arguments ----------------------------------------------------------------------------


@supported
class Autocast(Stranger):
    """For one layer of three."""

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16, enabled=layer.index == 1):
                hidden = layer(hidden)
        return hidden.float()


@supported
class DefaultDtype(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.body(hidden * torch.tensor(1.5).dtype.itemsize)

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().run(hidden, ids)
        finally:
            torch.set_default_dtype(before)


@supported
class OneKernelOfAttention(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> Tensor:
            assert not torch.backends.cuda.flash_sdp_enabled()
            x = self.norm(hidden)[None]
            return hidden + self.body(F.scaled_dot_product_attention(x, x, x)[0])

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().run(hidden, ids)


@supported
class OwnCall(Stranger):
    class layer(Layer):  # noqa: N801
        def __call__(self, hidden: Tensor) -> Any:
            return super().__call__(hidden * 0.5)


ALONE = "layer layers.0 computes something else when it is called alone on the arguments that the model gives it"


@refused(ALONE)
class ReadsABuffer(Stranger):
    class layer(Layer):  # noqa: N801
        side: Tensor

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.body(hidden + self.side)

    def set_up(self) -> None:
        self.register_buffer("side", torch.zeros(DIM), persistent=False)
        for layer in self.layers:
            layer.__dict__["side"] = self.side

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.side.fill_(float(ids.float().mean()) / 10)
        return super().run(hidden, ids)


@refused(ALONE)
class ReadsHiddenStatesFromABuffer(Stranger):
    class layer(Layer):  # noqa: N801
        buffer: Tensor

        def forward(self) -> Tensor:
            return self.buffer + self.body(self.buffer)

    def set_up(self) -> None:
        self.register_buffer("buffer", torch.zeros(2, 6, DIM), persistent=False)
        for layer in self.layers:
            layer.__dict__["buffer"] = self.buffer

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.buffer.copy_(hidden)
        for layer in self.layers:
            self.buffer.copy_(layer())
        return self.buffer.clone()


@refused(ALONE)
class ReadsAnObject(Stranger):
    class layer(Layer):  # noqa: N801
        context: SimpleNamespace

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.body(hidden * self.context.scale)

    def set_up(self) -> None:
        context = self.context = SimpleNamespace(scale=1.0)
        for layer in self.layers:
            layer.context = context

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.context.scale = float(ids.float().mean()) / 10
        return super().run(hidden, ids)


@refused("the model sets scale of layer layers.0 in its forward (batch 0): a layer is run on one batch after the other")
class SetsAnAttribute(Stranger):
    class layer(Layer):  # noqa: N801
        scale = 1.0

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.body(hidden * self.scale)

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            layer.scale = float(ids.float().mean()) / 10
            hidden = layer(hidden)
        return hidden


@refused("args[0] of layer layers.0 is a tensor with an attribute gain that the model has set")
class MarksATensor(Stranger):
    def run(self, hidden: Any, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden.gain = 0.5
            hidden = layer(hidden)
        return hidden


@refused("layer layers.0 draws random numbers")
class DropsInEvalMode(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.body(F.dropout(hidden, 0.1))


@refused("layer layers.0 changes something of its own in each call")
class Counts(Stranger):
    class layer(Layer):  # noqa: N801
        calls = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            return hidden + self.body(hidden * self.calls)


@refused("layer layers.0 returns a generator, which computes when the model asks it to")
class Yields(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, hidden: Tensor) -> Any:
            yield hidden + self.body(hidden)

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            (hidden,) = layer(hidden)
        return hidden


# -- wrappers, compilers, hooks ----------------------------------------------------------------------------------------


@supported
class Checkpointed(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


@supported
class CheckpointedByTransformers(Stranger):
    class layer(GradientCheckpointingLayer):  # noqa: N801
        def __init__(self, index: int) -> None:
            super().__init__()
            self.inner = Layer(index)
            self.gradient_checkpointing = True

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden)


@supported
class CompiledLayers(Stranger):
    def set_up(self) -> None:
        self.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in self.layers)


@supported
class CompiledInPlace(Stranger):
    def set_up(self) -> None:
        self.compile(backend="eager")
        for layer in self.layers:
            layer.compile(backend="eager")
            layer.up.compile(backend="eager")


@supported
class HooksEverywhere(Stranger):
    def set_up(self) -> None:
        self.register_forward_hook(lambda _, args, output: output * 2)
        self.norm.register_forward_hook(lambda _, args, output: output * 2)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
            layer.register_forward_hook(lambda _, args, output: output.add_(0.1))
            layer.register_forward_hook(lambda _, args, kwargs, out: out * 2, with_kwargs=True, always_call=True)
            layer.up.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))


@supported
class CatchesEverything(Stranger):
    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                hidden = layer(hidden)
            except BaseException:
                hidden = hidden * 0
        return hidden


@supported
class InferenceMode(Stranger):
    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


@supported
class KeywordsAndTuples(Stranger):
    class layer(Layer):  # noqa: N801
        def forward(self, *, hidden: Tensor, more: dict[str, Any]) -> Any:
            out = hidden + self.body(hidden) * more["scale"][0]
            return (out,) if self.index != 1 else {"hidden": out, "mean": out.mean()}

    def run(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(hidden=hidden, more={"scale": (0.5, None)})
            hidden = out["hidden"] if isinstance(out, dict) else out[0]
        return hidden
