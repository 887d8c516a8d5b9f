"""What became of each weight that was adopted, for people and for tests."""

from dataclasses import dataclass

from dcp_adapters.plain.tables import table
from dcp_adapters.stored.numeric_error import Error
from qtensor.spec.recipes import Recipe

_COLUMNS = ("weight", "library", "class", "recipe", "exact", "max |error|", "|error|/|w|", "SNR dB", "note")
_RIGHT = ("max |error|", "|error|/|w|", "SNR dB")


@dataclass(frozen=True, kw_only=True)
class AdoptedWeight:
    """What became of one weight.

    Attributes:
        name: fqn of the parameter, of the plain model.
        library: where it came from, such as "torchao".
        kind: the class that it was known by, such as "NVFP4Tensor".
        recipe: what it is now.
        exact: whether it decodes to the library's values, bit for bit in fp32.
        error: how far its values are from the library's; None if `exact`.
        note: what the library did besides, and this weight does not; "" if there is nothing to say.

    Example:
        ```python
        >>> report = adopt(model)
        >>> report.weights[0].kind, report.weights[0].exact
        ('NVFP4Tensor', True)
        ```
    """

    name: str
    library: str
    kind: str
    recipe: Recipe
    exact: bool = True
    error: Error | None = None
    note: str = ""


@dataclass(frozen=True)
class AdoptionReport:
    """What `adopt` did; `str()` of it is the table.

    Attributes:
        weights: one entry for each parameter, in model order; tied ones have one each.

    Example:
        ```python
        >>> report = adopt(model)
        >>> print(report)
        >>> report["0.weight"].exact
        True
        ```
    """

    weights: tuple[AdoptedWeight, ...]

    @property
    def exact(self) -> bool:
        """Whether every weight decodes to the library's values."""
        return all(weight.exact for weight in self.weights)

    def __getitem__(self, name: str) -> AdoptedWeight:
        """Return the entry of the parameter of this name; KeyError if it was not adopted."""
        return {weight.name: weight for weight in self.weights}[name]

    def table(self) -> str:
        """Return one line of text for each weight."""
        rows = [
            (
                weight.name,
                weight.library,
                weight.kind,
                repr(weight.recipe),
                "yes" if weight.exact else "no",
                *(("-", "-", "-") if weight.error is None else weight.error.cells()),
                weight.note,
            )
            for weight in self.weights
        ]
        return table(_COLUMNS, rows, right=_RIGHT)

    def __str__(self) -> str:
        """Return the table."""
        return self.table()
