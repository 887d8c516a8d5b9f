"""The inputs of linears in the unquantized model, batch by batch: partners of those that statistics are made of.

    partners = UnquantizedInputs(targets, only=...)
    with partners.batch():
        layer.forward(inputs of the unquantized model)
    with collector.batch(partners):
        layer.forward(inputs of the quantized model, of the same batch)

Both runs multiply with each weight as often, so the n-th input of one is the partner of the n-th input of the other, if
its rows stand for the same tokens (lineage.py). That fails for experts that a router sends other tokens to: the batch
has no pairs for them then. Whether it has depends on the batch alone, and not on who ran it.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from layerwise.stages.experts import ExpertBlock
from layerwise.statistics.every_token import EveryToken
from layerwise.statistics.lineage import Lineage
from layerwise.statistics.watching import Product, Watch, WeightsByStorage


@dataclass(frozen=True, eq=False)
class Partner:
    """One input.

    Attributes:
        rows: [tokens, K], a copy.
        origin: equal for two runs if its rows stand for the same tokens.
    """

    rows: Tensor
    origin: tuple[int, ...]


_Inputs = dict[tuple[int, ...], tuple[Tensor, Partner]]  # with the input, so that no other gets its id


@dataclass(eq=False)
class UnquantizedInputs:
    """The inputs of one batch in the unquantized model.

    Args:
        targets: the live weights, as of a `Collector`.
        only: names of the linears whose inputs are kept.
        blocks: whose experts see every token.
    """

    targets: WeightsByStorage
    only: Collection[str]
    blocks: Sequence[ExpertBlock] = ()
    _found: dict[str, list[Partner]] = field(default_factory=dict, init=False)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Inside, a batch runs, and its inputs are kept; those of the batch before are freed."""
        self._found = {}
        seen: _Inputs = {}
        lineage = Lineage()
        every = EveryToken(self.blocks, lambda product: self._take(seen, lineage, product), partial(_forgetting, seen))
        with Watch(self.targets, every.take), lineage, every.hooks():
            yield

    def partner(self, name: str, number: int, origin: tuple[int, ...], rows: Tensor) -> Partner | None:
        """Return the partner of a linear's input number `number` in this batch; None if its rows are other tokens."""
        found = self._found.get(name, [])
        one = found[number] if number < len(found) else None
        return one if one is not None and one.origin == origin and one.rows.shape == rows.shape else None

    def _take(self, seen: _Inputs, lineage: Lineage, product: Product) -> None:
        wanted = [name for name in product.names if name in self.only]
        if not wanted or not product.rows.numel():
            return
        x = product.x
        key = (id(x), 0 if x.is_inference() else x._version, *product.part)
        with torch.inference_mode(mode=False), torch.no_grad():
            rows = product.rows.detach().reshape(-1, product.rows.shape[-1])
            known = seen.get(key)
            # Inference tensors count no writes, so only the values tell whether x is still what it was.
            if known is None or (x.is_inference() and not torch.equal(known[1].rows, rows)):
                known = x, Partner(rows.clone(memory_format=torch.contiguous_format), origin_of(lineage, product))
                seen[key] = known
        for name in wanted:
            self._found.setdefault(name, []).append(known[1])


@contextmanager
def _forgetting(seen: _Inputs, tokens: Tensor) -> Iterator[None]:
    """Inside, inputs come that nothing outside takes, but for `tokens`: afterwards they are freed."""
    before = {*seen}
    yield
    for key in [key for key, (x, _) in seen.items() if key not in before and x is not tokens]:
        del seen[key]


def origin_of(lineage: Lineage, product: Product) -> tuple[int, ...]:
    """Return how the rows of a product came about."""
    return lineage.of(product.x), *product.part
