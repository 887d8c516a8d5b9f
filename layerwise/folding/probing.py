"""Finds the modules that column factors can be folded into, exactly, by probing.

SmoothQuant and AWQ multiply the columns of weights by factors s [K], so the input x has to be divided by s. That costs
nothing if one module makes x, channel by channel, and nothing else sees it: that module's channels are divided once
and for all. Names do not tell which module it is, so candidates are probed:

    multiply the channels of a candidate P by powers of two p [K], divide the columns of the group's weights by p
    -> run the layer on a few batches: its output must be the same, BIT FOR BIT
    -> put the weights back

Powers of two only move exponents, so every product and every sum inside the layer is what it was, unless another module
sees P's output, or P's channels are mixed, permuted or bent on their way to the group: then bits change. (They also
change if a value leaves the normal range of its dtype; such a fold is not used.)

A module that the batches do not reach, such as an expert without a token, would not show. So a candidate is accepted
only if dividing the group's columns alone changes the output, and if multiplying by p the columns of any other weight
that could take P's output (exactly what P would do to it) changes it too, one weight at a time. A rank whose batches do
not show this abstains; other ranks may see more.

    producers_of   the candidates of a layer
    propose        on each rank: NO, YES or ABSTAIN for every group and candidate; to be reduced by MIN over ranks
    choose         from the reduced answers: group -> producer
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fsdp_hooks.lazy_bits import resolve
from fsdp_hooks.wrappers import plain_modules
from qtensor.spec.registry import APPEARANCE_DTYPES

# In this order, so that the minimum over ranks is their common answer: one NO refuses, else one YES is enough.
NO, YES, ABSTAIN = 0, 1, 2

RunLayer = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Producer:
    """A module whose output channels can be scaled through its parameters.

    Attributes:
        name: fqn of the module.
        kind: "norm", whose gain is its weight [K]; "offset", a norm whose gain is 1 + weight (Gemma's); "linear", whose
            channels are the rows of its weight [K, N].
        weight: the gain is made from it.
        bias: [K], or None.
    """

    name: str
    kind: Literal["norm", "offset", "linear"]
    weight: Tensor
    bias: Tensor | None = None

    @property
    def channels(self) -> int:
        """Return how many channels it makes."""
        return self.weight.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that scaling the channels changes."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def producers_of(layer: nn.Module) -> list[Producer]:
    """Return all candidates in a layer, norms first. Call it while the layer's parameters are plain, full tensors.

    A norm is any module with a 1-D weight. It is listed twice, as "norm" and as "offset"; at most one of them can pass.
    The caller must leave out parameters that modules outside the layer use too: no probe of this layer sees those.
    """
    norms, linears = [], []
    for name, module in plain_modules(layer):
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is None or not _is_scalable(weight) or not (bias is None or _is_scalable(bias)):
            continue
        if isinstance(module, nn.Linear):
            linears.append(Producer(name, "linear", weight, bias))
        elif weight.ndim == 1 and (bias is None or bias.shape == weight.shape):
            norms += [Producer(name, "norm", weight, bias), Producer(name, "offset", weight, bias)]
    return [*norms, *linears]


def _is_scalable(tensor: Tensor) -> bool:
    """Return whether powers of two scale it exactly: it is a plain dense tensor, neither quantized nor a DTensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in APPEARANCE_DTYPES


@torch.no_grad()
def propose(
    groups: Sequence[Sequence[str]], weights: Mapping[str, Tensor], producers: Sequence[Producer], run: RunLayer
) -> Tensor:
    """Return what this rank's batches say about every group and candidate; no collective.

    Args:
        groups: names in `weights` of the linears that take the same input, one group each.
        weights: all parameters of the layer by fqn, plain and full; they are changed while probing and put back bit
            for bit, also when `run` raises.
        producers: the candidates, as `producers_of` returns them; the same list on every rank.
        run: runs the layer on a few local batches and returns everything that leaves it, caches too, as flat tensors;
            nothing on a rank without data. It must run the same way every time: a layer whose output changes from run
            to run gets only NO.

    Returns:
        int8 [groups, producers] of NO, YES and ABSTAIN. YES only if the fold was exact, and the batches reached
        everything else that could take the producer's output. Reduce by MIN over ranks, then `choose`.

    Raises:
        ValueError: the weights of a group have different K.
    """
    answers = torch.full((len(groups), len(producers)), NO, dtype=torch.int8, device="cpu")
    asked = [(i, j) for i, group in enumerate(groups) for j in _worth_probing(group, weights, producers)]
    if not asked:
        return answers
    probing = _Probing(weights, run)
    for i, j in asked:
        answers[i, j] = probing.answer(groups[i], producers[j])
    return answers


def choose(answers: Tensor, producers: Sequence[Producer]) -> dict[int, Producer]:
    """Map each group's index to its producer: the first YES in the order of `producers`; no module serves two."""
    chosen: dict[int, Producer] = {}
    for j, producer in enumerate(producers):
        for i in range(answers.shape[0]):
            # A norm is listed as two kinds, so its name and not the record tells whether it serves a
            # group already.
            taken = i in chosen or any(producer.name == other.name for other in chosen.values())
            if int(answers[i, j]) == YES and not taken:
                chosen[i] = producer
    return dict(sorted(chosen.items()))


def _worth_probing(group: Sequence[str], weights: Mapping[str, Tensor], producers: Sequence[Producer]) -> list[int]:
    """Return the indices of producers worth probing: every norm with K channels, and the nearest linears with K.

    The nearest are those in the smallest module around the group that holds any. Names only save probes here: a layer
    with 128 experts would need 128 x 128.
    """
    widths = {name: weights[name].shape[-1] for name in group}
    if len(set(widths.values())) != 1:
        raise ValueError(f"the weights of a group must have the same number of columns, found {widths}")
    if not all(_is_scalable(weights[name]) for name in group):
        return []
    columns = next(iter(widths.values()))
    members = {id(weights[name]) for name in group}
    fitting = [
        j for j, p in enumerate(producers) if p.channels == columns and members.isdisjoint(id(t) for t in p.tensors)
    ]
    norms = [j for j in fitting if producers[j].kind != "linear"]
    linears = [j for j in fitting if producers[j].kind == "linear"]
    paths = [name.split(".")[:-1] for name in group]  # of the modules that own the weights
    shared = paths[0][:-1]
    while shared and not all(path[: len(shared)] == shared for path in paths):
        shared = shared[:-1]
    for length in range(len(shared), -1, -1):
        near = [j for j in linears if producers[j].name.split(".")[:length] == shared[:length]]
        if near:
            return norms + near
    return norms


class _Probing:
    """Runs of the layer under changed weights, and what they have shown so far."""

    def __init__(self, weights: Mapping[str, Tensor], run: RunLayer) -> None:
        self.weights, self.run = weights, run
        self.plain = _copies(run())
        self.repeatable = _same_bytes(self.plain, run())
        self.seen: dict[tuple[str, ...], bool] = {}

    def answer(self, group: Sequence[str], producer: Producer) -> int:
        """Answer NO, YES or ABSTAIN."""
        if not self.plain:
            return ABSTAIN
        if not self.repeatable:
            return NO
        if producer.kind == "offset":
            # (1 + w) * p - 1 is seldom exact in w's dtype. Where the gain goes does not depend on w, so take w = 0.
            with _holding_values([(producer.weight, torch.zeros_like(producer.weight))]):
                return self._answer(group, producer, _copies(self.run()), producer.name)
        return self._answer(group, producer, self.plain, "")

    def _answer(self, group: Sequence[str], producer: Producer, before: Sequence[Tensor], state: str) -> int:
        probe = _probe(producer.channels, producer.weight.device)
        members = [self.weights[name] for name in group]
        # If the group's columns leave the output as it is, no token came to it, and nothing could be proven
        # by it.
        if not self._shows(members, 1 / probe, before, (state, *group)):
            return ABSTAIN
        changes = [(w, w * (1 / probe).to(w.dtype)) for w in members]
        changes += [(t, _scale_channels(producer, t, probe)) for t in producer.tensors]
        # Both changes in one run: they cancel, bit for bit, if the fold is right.
        with _holding_values(changes):
            if not _same_bytes(before, self.run()):
                return NO
        for name, weight in self.weights.items():
            if name in group or weight.ndim < 2 or weight.shape[-1] != producer.channels or not _is_scalable(weight):
                continue
            for e, single in enumerate(weight.unbind() if weight.ndim > 2 else [weight]):
                if not self._shows([single], probe, before, (state, name, str(e))):
                    return ABSTAIN
        return YES

    def _shows(
        self, weights: Sequence[Tensor], factors: Tensor, before: Sequence[Tensor], key: tuple[str, ...]
    ) -> bool:
        """Return whether scaling the columns of some weights alone changes the output."""
        # Each answer costs a run of the layer, and several candidates ask the same.
        if key not in self.seen:
            with _holding_values([(w, w * factors.to(w.dtype)) for w in weights]):
                self.seen[key] = not _same_bytes(before, self.run())
        return self.seen[key]


def _probe(channels: int, device: torch.device) -> Tensor:
    """Return powers of two from 1/2 to 4, in an order without a period that heads or shuffled channels could match."""
    mixed = (torch.arange(channels, dtype=torch.int64, device="cpu") * 2654435761) >> 13  # Knuth's multiplicative hash
    return torch.exp2((mixed % 4 - 1).float()).to(device)


def _scale_channels(producer: Producer, tensor: Tensor, factors: Tensor) -> Tensor:
    """Return one of the producer's tensors as fp32 with its channels multiplied."""
    spread = factors.reshape(-1, *[1] * (tensor.ndim - 1))
    if producer.kind == "offset" and tensor is producer.weight:
        return (1 + tensor.float()) * spread - 1
    return tensor.float() * spread


@contextmanager
def _holding_values(changes: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the tensors hold the given values; afterwards, whatever happens, they hold their old bytes."""
    saved = [(tensor, tensor.detach().clone()) for tensor, _ in changes]
    try:
        for tensor, value in changes:
            tensor.copy_(value)
        yield
    finally:
        for tensor, value in saved:
            tensor.copy_(value)


def _copies(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy outputs, since the next run may write into the same buffers."""
    return [output.detach().clone() for output in outputs]


def _same_bytes(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Return whether both hold the same bytes (a NaN equals itself, 0 and -0 differ)."""
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(left, right, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return resolve(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
