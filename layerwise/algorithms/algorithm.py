"""What an algorithm is: pure mathematics between the statistics of a layer's inputs and the decision about its weights.

    Group      linears that take the very same input, with the statistics of that input over all batches of all ranks
    smooth     Group -> Smoothing, factors s [K], or None        (SmoothQuant and AWQ; W * s, input / s)
    decide     Group -> one Decision for each of its linears

The driver does the rest: it runs the layer, collects and reduces what `needs` names, folds factors into the module in
front, rounds every weight by `Format.encode_with(weight, recipe, decision.quantizer)`, writes, saves and reports. An
algorithm sees 2-D weights only; experts [E, N, K] come one by one. It gets the same numbers on every rank, so its
decision is the same on every rank.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from qtensor.recipes import Recipe

# What an algorithm can ask to know about inputs; their amax is always known.
COLUMNS, LOCAL_HESSIAN, HESSIAN = "columns", "local_hessian", "hessian"
SUB_BLOCK = 16  # columns of one block of the local Hessian


@dataclass(frozen=True, eq=False)
class Inputs:
    """Statistics of one input X [tokens, K] over all batches of all ranks; what was not asked for is None.

    Attributes:
        tokens: rows of X.
        amax: fp32 [], largest finite |X|.
        column_amax: fp32 [K], of each column.
        column_mean: fp32 [K], the mean of |X| in each column.
        local_hessian: fp32 [ceil(K / 16), 16, 16], X_b^T X_b / tokens for each block b of 16 columns (zero-padded).
        hessian: fp32 [K, K], 2 X^T X / tokens.
    """

    tokens: int
    amax: Tensor
    column_amax: Tensor | None = None
    column_mean: Tensor | None = None
    local_hessian: Tensor | None = None
    hessian: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Linear:
    """One weight to decide on.

    Attributes:
        name: fqn of the parameter, with the number of the expert in brackets where it has several.
        weight: [N, K], the high-precision values in the model's dtype: the live tensor.
        amax: what decides its shared scale, as `formats.shared_amax` returns it, agreed with the siblings that share
            it; None for formats without a shared scale.
    """

    name: str
    weight: Tensor
    amax: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """Linears that take the same input; `inputs` is None where no token reached them on any rank."""

    linears: tuple[Linear, ...]
    inputs: Inputs | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """How one weight is quantized.

    Attributes:
        quantizer: what decides every scale, as `Format.quantizer` returns it for this weight.
        weight: fp32 [N, K], the values to round instead of the weight's own; only of algorithms that write weights.
        notes: what a report shows, such as a clip ratio (a number) or a warning (text under "warning").
    """

    quantizer: Mapping[str, Tensor]
    weight: Tensor | None = None
    notes: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Factors for the columns of a group's weights.

    Attributes:
        factors: fp32 [K], finite and positive; weights are multiplied by them, their input is divided.
        notes: what a report shows beside the decisions of these linears, such as "alpha".
    """

    factors: Tensor
    notes: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all algorithms; subclasses are frozen dataclasses whose fields are their options, checked when made.

    Attributes:
        writes_weights: it changes high-precision values before they are rounded. One that says False and writes is
            refused, by name, and nothing of the layer is stored.
        layer_inputs: whose outputs the next layer is calibrated on by default, those of the "unquantized" or of the
            "quantized" layer.
    """

    writes_weights: ClassVar[bool]
    layer_inputs: ClassVar[str] = "unquantized"

    @property
    def needs(self) -> frozenset[str]:
        """Which statistics of inputs it reads: any of COLUMNS, LOCAL_HESSIAN, HESSIAN."""
        return frozenset()

    @property
    def one_at_a_time(self) -> bool:
        """Whether to hold only one group's Hessian at a time, and to run the batches once more for each group."""
        return False

    def smooth(self, group: Group, recipe: Recipe) -> Smoothing | None:
        """Factors for the columns of the group's weights, by which their input is divided; None for none.

        Called only for groups whose input can be divided by folding the factors into the module that produces it.
        """
        return None

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """One decision for each linear of the group, in their order."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Name and options, as a checkpoint's fingerprint compares them."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}
