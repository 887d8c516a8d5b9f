"""Recipes: frozen value objects that say how a tensor is quantized.

A recipe holds numbers and words only - never a process group, a mesh, a rank or a tensor - so it can be hashed,
compared, pickled, put into JSON and baked into a compiled graph as a constant. The recipe of a format stands in the
file of that format.
"""

import dataclasses
from typing import Any, ClassVar, Self

__all__ = ["Recipe", "check_choice"]


def check_choice(recipe: object, field: str, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless `recipe.field` is one of `choices`."""
    value = getattr(recipe, field)
    if value not in choices or type(value) is not type(choices[0]):
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{type(recipe).__name__}: {field}={value!r} is not one of {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes; subclasses are frozen dataclasses that validate themselves on construction."""

    registry: ClassVar[dict[str, type["Recipe"]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Recipe.registry[cls.__name__] = cls

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a value: staging and deepcopy need no second one

    def to_json(self) -> dict[str, Any]:
        """All fields plus the type's name, as stored in a checkpoint's manifest."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(record: dict[str, Any]) -> "Recipe":
        """The recipe of a manifest record; extra keys are ignored.

        Raises:
            ValueError: a type that this version does not know.
        """
        kind = Recipe.registry.get(record.get("type", ""))
        if kind is None:
            known = ", ".join(sorted(Recipe.registry))
            raise ValueError(f"unknown recipe type {record.get('type')!r}; this version knows {known}")
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in record.items() if name in names})
