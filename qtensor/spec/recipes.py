"""Recipes: frozen value objects that say how a tensor is quantized.

A recipe holds numbers and strings only (never a process group, a mesh, a rank or a tensor), so it can be hashed,
compared, pickled, put into JSON and baked into a compiled graph as a constant. The recipe of a format is in the file of
that format.

Most fields say what the stored bytes are. `activations`, `gradients` and `accumulation` say how to compute with them,
so no checkpoint holds them: recipes that differ only in these fields describe the same bytes. Code that moves bytes
compares `stored`.
"""

import dataclasses
from typing import Any, ClassVar, Self

NOT_STORED = {"stored": False}  # metadata of a field that says nothing about bytes
IF_SET = {"if_set": True}  # of one that came later: where it has its default, records and reprs are what they were


def check_choice(recipe: object, field: str, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless `recipe.field` is one of `choices`."""
    value = getattr(recipe, field)
    if value not in choices or type(value) not in map(type, choices):
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{type(recipe).__name__}: {field}={value!r} is not one of {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """Base of all recipes; subclasses are frozen dataclasses (repr=False) that validate themselves on construction.

    Args:
        activations: how a linear layer treats its input. None: it stays as it is and the weight is dequantized.
            "dynamic": each row (token) is quantized on the fly in the weight's format (qtensor/products/dynamic.py).
        gradients: what the products of backward are made of. None: dense values. An element ("e4m3" or "e5m2", where
            the format has it): the gradient of the output is quantized to that element, and weight and input to those
            of forward (see qtensor/products/gradients.py); needs activations="dynamic". NVFP4 names what it is
            trained with in place of an element.
        accumulation: how the hardware adds up in forward. None: in fp32 (`use_fast_accum=False` of torch's scaled_mm).
            "fast", for Float8 with scales of rows or tensors: in the tensor cores' own registers, which keep fewer bits
            of a sum, for more speed on compute capability 9.0; other devices add up as before. Backward always takes
            fp32, as torchao's default does. Needs activations="dynamic".

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> recipe = MXFP8BlockScaling(activations="dynamic")
        >>> isinstance(recipe, Recipe), recipe == MXFP8BlockScaling(activations="dynamic")
        (True, True)
        >>> recipe.activations
        'dynamic'
        ```
    """

    registry: ClassVar[dict[str, type["Recipe"]]] = {}
    gradient_elements: ClassVar[tuple[str, ...]] = ()  # what `gradients` may be besides None
    accumulations: ClassVar[tuple[str, ...]] = ()  # what `accumulation` may be besides None

    activations: str | None = dataclasses.field(default=None, metadata=NOT_STORED)
    gradients: str | None = dataclasses.field(default=None, metadata=NOT_STORED)
    accumulation: str | None = dataclasses.field(default=None, metadata=NOT_STORED)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Recipe.registry[cls.__name__] = cls

    def __post_init__(self) -> None:
        check_choice(self, "activations", (None, "dynamic"))
        if self.gradients is not None and not self.gradient_elements:
            known = ", ".join(name for name, kind in Recipe.registry.items() if kind.gradient_elements)
            raise ValueError(
                f"{type(self).__name__}: gradients={self.gradients!r} is not offered for this format, whose backward "
                f"products are dense; leave it None, or choose one of {known}"
            )
        check_choice(self, "gradients", (None, *self.gradient_elements))
        if self.gradients is not None and self.activations is None:
            raise ValueError(
                f'{type(self).__name__}: gradients={self.gradients!r} needs activations="dynamic", since a product '
                "whose input stays dense in forward has no quantized input for backward"
            )
        check_choice(self, "accumulation", (None, *self.accumulations))
        if self.accumulation is not None and self.activations is None:
            raise ValueError(
                f'{type(self).__name__}: accumulation={self.accumulation!r} needs activations="dynamic", since a dense '
                "product is torch's own"
            )

    def __repr__(self) -> str:
        """Like a dataclass's repr, but what says how to compute comes last, and only where it is set."""
        described = [f"{name}={value!r}" for name, value in _recorded(self).items()]
        computed = {name: getattr(self, name) for name in COMPUTED}
        described += [f"{name}={value!r}" for name, value in computed.items() if value is not None]
        return f"{type(self).__name__}({', '.join(described)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable, so nobody needs a second one

    @property
    def stored(self) -> Self:
        """Without what says how to compute. Two recipes describe the same bytes where their `stored` are equal."""
        return self if self.activations is None else dataclasses.replace(self, **dict.fromkeys(COMPUTED))

    @property
    def of_rows(self) -> "Recipe":
        """The recipe for activations: every row is quantized by itself, whatever the blocks of the weight."""
        if getattr(self, "blocks", "row") == "row":
            return self
        return dataclasses.replace(self, blocks="row")  # type: ignore[call-arg]

    @property
    def of_backward(self) -> "Recipe":
        """The recipe for inputs and weights in the products of backward, which are quantized along other dims."""
        return self.of_rows.stored

    @property
    def of_gradients(self) -> "Recipe":
        """The recipe for gradients of outputs: `of_backward` with the element that `gradients` names."""
        return dataclasses.replace(self.of_backward, element=self.gradients)  # type: ignore[call-arg]

    @property
    def rotates_tokens(self) -> bool:
        """Whether both operands of the weight's gradient are rotated along tokens (products/backward_operands.py)."""
        return False

    @property
    def draws_gradients(self) -> bool:
        """Whether gradients of outputs are rounded stochastically, in both products of backward."""
        return False

    def to_json(self) -> dict[str, Any]:
        """The fields that describe bytes plus the type's name, as stored in a checkpoint's manifest."""
        return {"type": type(self).__name__, **_recorded(self)}

    @staticmethod
    def from_json(record: dict[str, Any]) -> "Recipe":
        """The recipe of a manifest record; extra keys are ignored.

        Raises:
            ValueError: this version does not know the type, or a field has an invalid value.
        """
        kind = Recipe.registry.get(record.get("type", ""))
        if kind is None:
            known = ", ".join(sorted(Recipe.registry))
            raise ValueError(f"unknown recipe type {record.get('type')!r}; this version knows {known}")
        names = stored_names(kind)
        return kind(**{name: value for name, value in record.items() if name in names})


def stored_names(kind: type[Recipe]) -> tuple[str, ...]:
    """Names of the fields that describe bytes, in the order of their definition."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.metadata.get("stored", True))


def _recorded(recipe: Recipe) -> dict[str, Any]:
    """The fields that describe bytes by their names, without those that are recorded only if set, and are not."""
    later = {field.name: field.default for field in dataclasses.fields(recipe) if field.metadata.get("if_set")}
    found = {name: getattr(recipe, name) for name in stored_names(type(recipe))}
    return {name: value for name, value in found.items() if name not in later or value != later[name]}


COMPUTED = tuple(field.name for field in dataclasses.fields(Recipe))  # names of the fields that say how to compute
