"""Collectives on the parts of a quantized tensor: none is left under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtensor import NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.redistribute import scatter
from tests.qtensor.recipes_under_test import weight

if TYPE_CHECKING:
    from torch import Tensor


class _Work:
    """Of a collective that ends when somebody waits for it."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


def test_every_part_of_a_scatter_is_waited_for() -> None:
    """torch waits for the last part alone, which is what it is given; gloo often hides that others were not."""
    works: list[_Work] = []
    sizes: list[tuple[int, int]] = []

    def send(out: list[Tensor], pieces: list[list[Tensor]], *_: Any) -> tuple[list[Tensor], _Work]:
        works.append(_Work())
        sizes.append((out[0].nbytes, pieces[0][0].nbytes))
        return out, works[-1]

    q = quantize(weight(), NVFP4BlockScaling())
    (out,), last = scatter(send, ([q], [[q.clone(), q.clone()]], None, 0), {})
    assert isinstance(out, QuantizedTensor)
    assert out is q
    assert last is works[-1]
    assert len(works) == len(q.parts()) == 3
    assert [one.waited for one in works] == [True] * 3
    assert all(own == piece for own, piece in sizes)
