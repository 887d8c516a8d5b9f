"""What a source says of one weight: taken, or refused and why; and what it gives back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qtensor.spec.recipes import Recipe
from qtensor.tensor.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """A weight of ours that holds the bytes of the library's.

    Attributes:
        weight: ours; it may share memory with the library's tensors.
        values: the library's own values [.., N, K], fp32, by its formula; asked for only where `exact` is False.
        exact: whether ours decodes to the library's values, bit for bit in fp32.
        note: what a user should know: what the library did besides, which ours does not.
        dtype_known: whether the library says in which dtype the weight appears; if not, it gets that of the model's
            dense parameters.
    """

    weight: QuantizedTensor
    values: Callable[[], Tensor] | None = None
    exact: bool = True
    note: str = ""
    dtype_known: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Refused:
    """Why no recipe of ours holds a weight as it is.

    Attributes:
        reason: in words.
        values: the library's values in the dtype that the weight appears in; None: they are not known either, so that
            it cannot be requantized.
        nearest: the recipe to requantize with that comes closest.
        note: as of `Taken`, of a weight that is requantized.
    """

    reason: str
    values: Callable[[], Tensor] | None = None
    nearest: Recipe | None = None
    note: str = ""


Outcome = Taken | Refused


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What a module of a library has in the place of a weight of ours.

    Attributes:
        tensors: its parameters, by name.
        attributes: what else it has.
        finish: called with the module that has both.
    """

    tensors: Mapping[str, Tensor]
    attributes: Mapping[str, Any]
    finish: Callable[[nn.Module], object]
