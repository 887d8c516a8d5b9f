"""The training steps that `memory` measures: blocks of linears with Llama's shapes, an embedding and norms.

    build -> a first step, which makes the optimizer's state -> gradients freed      mark "rest"
    forward and backward                                                             mark "gradients"
    optimizer.step()                                                                 mark "step"
    gradients freed, as at the first mark                                            mark "rest again"

Attention is left out: it has no weights, and what activations take depends on the tokens, not on the optimizer.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.allocations import Meter, held
from benchmarks.memory_contenders import Contender
from qtensor import quantize_

Share = Literal["linears", "model"]
SHARES: tuple[Share, ...] = ("linears", "model")  # what is trained and counted
PARTS = ("weights", "masters", "moments", "gradients", "other", "temporaries")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a model."""

    hidden: int
    inner: int
    groups: int  # heads of queries for one of keys and values
    vocabulary: int
    layers: int = 1
    tokens: int = 64


class Block(nn.Module):
    """Seven linears and two norms."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._groups, keys = size.groups, size.hidden // size.groups
        self.norm, self.mlp_norm = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.q, self.o = _linear(size.hidden, size.hidden), _linear(size.hidden, size.hidden)
        self.k, self.v = _linear(size.hidden, keys), _linear(size.hidden, keys)
        self.gate, self.up = _linear(size.hidden, size.inner), _linear(size.hidden, size.inner)
        self.down = _linear(size.inner, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """A gate in the place of attention, which would mix the tokens."""
        y = self.norm(x)
        x = x + self.o(self.q(y) * (self.k(y) * self.v(y)).repeat(1, self._groups))
        y = self.mlp_norm(x)
        added: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + added


def _linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Model(nn.Sequential):
    """An embedding, blocks and a last norm."""

    def __init__(self, size: Size) -> None:
        blocks = (Block(size) for _ in range(size.layers))
        super().__init__(nn.Embedding(size.vocabulary, size.hidden), *blocks, nn.RMSNorm(size.hidden))

    def of_share(self, share: Share) -> Iterator[Tensor]:
        """The parameters that are trained and counted."""
        if share == "model":
            yield from self.parameters()
        else:
            yield from (module.weight for module in self.modules() if isinstance(module, nn.Linear))


def measure(contender: Contender, size: Size, share: Share, meter: Meter, device: str) -> dict[str, Any]:
    """Take two steps; `meter` has the marks afterwards, and `figures` makes what is said of them."""
    dtype = torch.float32 if contender.weights == "fp32" else torch.bfloat16
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    tokens = torch.randint(size.vocabulary, (size.tokens,), device=device)
    with meter:
        try:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                model = Model(size)
        finally:
            torch.set_default_dtype(before)
        if not isinstance(contender.weights, str):
            quantize_(model, contender.weights)
        model.requires_grad_(requires_grad=False)
        params = list(model.of_share(share))
        for param in params:
            param.requires_grad_()
        optimizer = contender.optimizer(params)
        _backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.mark("rest")
        _backward(model, tokens)
        meter.mark("gradients")
        optimizer.step()
        meter.mark("step")
        parts = _parts(model, params, optimizer, contender, device)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        meter.mark("rest again")
        del model, param, params, optimizer
        gc.collect()
        meter.mark("end")
    return parts


def _backward(model: Model, tokens: Tensor) -> None:
    model(tokens).float().square().mean().backward()
    gc.collect()  # the graph


def _parts(
    model: Model, params: list[Tensor], optimizer: torch.optim.Optimizer, contender: Contender, device: str
) -> dict[str, int]:
    """Bytes of storages by whose they are, each counted once, and the number of parameters.

    What a state calls master.. is one, and everything else in it belongs to the moments; what an optimizer keeps
    outside of its states comes out as "other". Both are in "host" if that is where they are kept.
    """
    seen: set[int] = set()
    own = held(params, seen)
    rest = held(model.parameters(), seen)
    states = [(key, value) for param in params for key, value in optimizer.state[param].items()]
    master = [value for key, value in states if key.startswith("master")]
    moments = [value for key, value in states if not key.startswith("master")]
    found = {
        "parameters": sum(param.numel() for param in params),
        "weights": own,
        "not counted": rest,
        "masters": held(master, seen),
        "moments": held(moments, seen),
        "gradients": held([param.grad for param in params], seen),
        "host": 0,
    }
    if contender.options.get("states") == "host":
        found["host"] = found["masters"] + found["moments"]
        # the allocator of a GPU does not know of them, that of the CPU has them among its own
        found |= {"masters": 0, "moments": 0, "not counted": rest + found["host"] * (device == "cpu")}
    return found


def figures(parts: dict[str, int], meter: Meter) -> dict[str, Any]:
    """Bytes a parameter: at rest, with gradients, at the peak of a step; and what the peak is made of.

    "other" is alive at rest and is neither a weight, a master nor a moment; "temporaries" are alive at the peak only.
    States in host memory are in none of these: "host" has them.
    """
    count, known = parts["parameters"], ("weights", "masters", "moments")
    rest, gradients, peak = (
        bytes_ - parts["not counted"] for bytes_ in (meter.alive["rest"], meter.alive["gradients"], meter.peak["step"])
    )
    made_of = {name: parts[name] for name in (*known, "gradients")}
    made_of["other"] = gradients - sum(made_of.values())
    made_of["temporaries"] = peak - gradients
    return {
        "parameters": count,
        "rest": round(rest / count, 4),
        "with gradients": round(gradients / count, 4),
        "peak": round(peak / count, 4),
        "at the peak": {name: round(made_of[name] / count, 4) for name in PARTS},
        "host": round(parts["host"] / count, 4),
        "grown by a step": meter.alive["rest again"] - meter.alive["rest"],
    }
