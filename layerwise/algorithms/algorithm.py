"""The interface of an algorithm, which turns statistics of a layer's inputs into decisions about its weights.

    Group      linears that take the same input, with the statistics of that input over all batches of all ranks
    smooth     Group -> Smoothing, factors s [K], or None        (SmoothQuant and AWQ; W * s, input / s)
    decide     Group -> one Decision for each of its linears

The driver does the rest: it runs the layer, collects and reduces what `needs` names, folds factors into the module in
front, rounds every weight by `Format.encode_with(weight, recipe, decision.quantizer)`, writes, saves and reports. An
algorithm sees 2-D weights only; experts [E, N, K] come one by one. Each group is decided by one rank, which gets the
same numbers whichever it is; all ranks get the result.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from qtensor.spec.recipes import Recipe

# The statistics of inputs that an algorithm can ask for; it always gets their amax.
COLUMNS, LOCAL_HESSIAN, HESSIAN, CROSS = "columns", "local_hessian", "hessian", "cross"
SUB_BLOCK = 16  # columns of one block of the local Hessian


@dataclass(frozen=True, eq=False)
class Inputs:
    """Statistics of one input x [tokens, K] over all batches of all ranks; what was not asked for is None.

    Attributes:
        tokens: rows of x.
        amax: fp32 [], largest finite |x|.
        column_amax: fp32 [K], largest |x| in each column.
        column_mean: fp32 [K], mean |x| in each column.
        local_hessian: fp32 [ceil(K / 16), 16, 16], x_b^T x_b / tokens for each block b of 16 columns (zero-padded).
        hessian: fp32 [K, K], 2 x^T x / tokens.
        cross: fp32 [K, K], 2 (y - x)^T x / tokens, where y is the same input in the unquantized model; None, too, where
            both are the same, as in the first layer. If there is no y for a batch (`unpaired`), it counts as x.
        unpaired: rows of x without a y: experts get other tokens in the unquantized model.

    Example:
        ```python
        >>> x = torch.randn(8, 64)
        >>> Inputs(tokens=8, amax=x.abs().amax(), column_amax=x.abs().amax(0), column_mean=x.abs().mean(0))
        ```
    """

    tokens: int
    amax: Tensor
    column_amax: Tensor | None = None
    column_mean: Tensor | None = None
    local_hessian: Tensor | None = None
    hessian: Tensor | None = None
    cross: Tensor | None = None
    unpaired: int = 0


@dataclass(frozen=True, eq=False)
class Linear:
    """One weight to decide on.

    Attributes:
        name: fqn of the parameter, with the number of the expert in brackets if it has several.
        weight: [N, K], the high-precision values in the model's dtype: the live tensor, or a copy of one that is stored
            transposed.
        amax: the amax that its shared scale is made from, as `formats.shared_amax` returns it; weights that share the
            scale have the same one. None for formats without a shared scale.

    Example:
        ```python
        >>> linear = Linear("layers.0.up_proj.weight", torch.randn(64, 64))
        >>> (decision,) = Max().decide(Group((linear,)), MXFP8BlockScaling())
        ```
    """

    name: str
    weight: Tensor
    amax: Tensor | None = None


def upright(linears: Iterable[Linear]) -> tuple[Linear, ...]:
    """Return the linears with row-major weights: sums over different strides may differ in last bits."""
    return tuple(dataclasses.replace(linear, weight=linear.weight.contiguous()) for linear in linears)


@dataclass(frozen=True, eq=False)
class Group:
    """Linears that take the same input; `inputs` is None where no token reached them on any rank.

    Example:
        ```python
        >>> group = Group((Linear("gate.weight", torch.randn(64, 64)), Linear("up.weight", torch.randn(32, 64))))
        >>> len(Mse().decide(group, MXFP8BlockScaling()))  # a decision for each
        2
        ```
    """

    linears: tuple[Linear, ...]
    inputs: Inputs | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """How one weight is quantized.

    Attributes:
        quantizer: what fixes every scale, as `Format.quantizer` returns it for this weight.
        weight: fp32 [N, K], the values to round instead of the weight's own; only algorithms that write weights set it.
        notes: what a report shows, such as a clip ratio (a number) or a warning (text under "warning").

    Example:
        ```python
        >>> group = Group((Linear("up.weight", torch.randn(64, 64)),))
        >>> (decision,) = Max().decide(group, MXFP8BlockScaling())
        >>> list(decision.quantizer), decision.weight
        (['scale'], None)
        ```
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

    Example:
        ```python
        >>> x, linear = torch.randn(8, 64), Linear("up.weight", torch.randn(64, 64))
        >>> inputs = Inputs(tokens=8, amax=x.abs().amax(), column_amax=x.abs().amax(0), column_mean=x.abs().mean(0))
        >>> SmoothQuant().smooth(Group((linear,), inputs), MXFP8BlockScaling()).factors.shape
        torch.Size([64])
        ```
    """

    factors: Tensor
    notes: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all algorithms; subclasses are frozen dataclasses whose fields are their options, checked when made.

    Attributes:
        writes_weights: whether it changes high-precision values before they are rounded. If it says False and writes
            all the same, an error names the weights, and nothing of the layer is stored.
        layer_inputs: what the next layer is calibrated on by default: the outputs of the "unquantized" or of the
            "quantized" layer.

    Example:
        ```python
        >>> class Rounded(Algorithm):  # three digits after the point, under Max's scales
        ...     writes_weights = True
        ...     def decide(self, group, recipe):
        ...         kept = zip(group.linears, Max().decide(group, recipe))
        ...         return [Decision(one.quantizer, linear.weight.float().round(decimals=3)) for linear, one in kept]
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> calibrate(model, None, recipe=MXFP8BlockScaling(), algorithm=Rounded(), layers=["0"])
        ```
    """

    writes_weights: ClassVar[bool]
    layer_inputs: ClassVar[str] = "unquantized"

    @property
    def needs(self) -> frozenset[str]:
        """Return which statistics of inputs it reads: COLUMNS, LOCAL_HESSIAN, HESSIAN, and CROSS beside HESSIAN."""
        return frozenset()

    @property
    def one_at_a_time(self) -> bool:
        """Return whether to hold one group's Hessian at a time, and to run the batches once more for each group."""
        return False

    @property
    def smooths(self) -> bool:
        """Return whether `smooth` may return factors; if not, no folds are looked for."""
        # Folds are found by probing, which costs forwards: an algorithm without `smooth` of its own is spared
        # them.
        return type(self).smooth is not Algorithm.smooth

    def smooth(self, group: Group, recipe: Recipe) -> Smoothing | None:
        """Return factors that the columns of the group's weights are multiplied by, and their input is divided by.

        None: there are no factors. The driver calls it only for groups whose input can be divided, by folding the
        factors into the module that produces it.
        """
        return None

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return one decision for each linear of the group, in their order."""
        raise NotImplementedError

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Estimate how long a group takes. Ranks share work by it, and GPTQ adds the cost of its scales to its own.

        By default N K, or N K^2 with the Hessian of an input.

        Args:
            rows: N, of all its weights together.
            columns: K.
            tokens: rows of its input, over all ranks.

        Returns:
            Multiplications in a product of matrices that would take as long.
        """
        return rows * columns * (columns if tokens and HESSIAN in self.needs else 1)

    def to_json(self) -> dict[str, Any]:
        """Return the name and the options, as a checkpoint's fingerprint compares them."""
        return {
            "type": type(self).__name__,
            **{field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)},
        }


def _plain(value: Any) -> Any:
    """Return an option as plain JSON; of an algorithm with its name, for two of them may have the same options."""
    if isinstance(value, Algorithm):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
