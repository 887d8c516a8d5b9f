"""How tensors of the files become weights while transformers reads them: dense ones are quantized, parts collected.

Quantize    a dense weight, once it is read
NameInFiles, Collect    tensors of a quantized weight; HandOver makes the weight of them once transformers has all
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, apply_converters

from dcp_adapters.hf.reading.handed_over import HandedOver
from dcp_adapters.hf.reading.schemes import weight_of
from qtensor.model.model_init import quantize_weight
from qtensor.spec.recipes import Recipe


class Quantize(ConversionOps):  # type: ignore[misc] # likewise
    """Quantizes the weights that transformers has read."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def convert(self, input_dict: Mapping[str, Any], *, model: Any, **_: Any) -> dict[str, Tensor]:
        """Return the same names with quantized weights; a weight may come as a list of one.

        Raises:
            ValueError: a weight has another shape than the model's. transformers leaves that to whoever quantizes.
        """
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        for name, value in found.items():
            expected = model.get_parameter(name).shape
            if value.shape != expected:
                raise ValueError(f"{name}: the files have the shape {list(value.shape)}, the model {list(expected)}")
        return {name: quantize_weight(value, self._recipe) for name, value in found.items()}


class NameInFiles(WeightRenaming):  # type: ignore[misc] # likewise
    """Renames nothing. transformers asks it first, so it knows what the tensor is called in the files."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.name = ""

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Keep the name."""
        self.name = source_key
        return source_key, None


class HandOver(ConversionOps):  # type: ignore[misc] # likewise
    """Makes a quantized weight of its tensors, name in the files -> list of one."""

    def __init__(self, held: HandedOver) -> None:
        self._held = held

    def convert(self, input_dict: Mapping[str, Any], *, full_layer_name: str, **_: Any) -> dict[str, Tensor]:
        """Return the weight under its name in memory."""
        tensors = {name: value[0] for name, value in input_dict.items()}
        return {full_layer_name: self._held.weight(full_layer_name, tensors)}


class Collect(WeightConverter):  # type: ignore[misc] # likewise
    """Collects the tensors of a quantized weight by their names in the files, whatever transformers' rules call them.

    The rules that a dense weight of this name would follow count as used: by them save_pretrained finds its name.
    """

    SOURCE = "quantized weights"  # a key of transformers' table of converters, and a pattern of no tensor

    def __init__(self, held: HandedOver, called: NameInFiles, rules: Sequence[Any]) -> None:
        super().__init__([self.SOURCE], [self.SOURCE], [HandOver(held)])
        self._held, self._called, self._rules = held, called, rules

    def __deepcopy__(self, memo: Any) -> "Collect":
        # One for each weight, which share all but what they collect.
        return Collect(self._held, self._called, self._rules)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name of the weight that the tensor is a part of."""
        owner = self._held.owners.get(self._called.name)
        if owner is None:
            return source_key, None
        apply_converters(weight_of(source_key), self._rules)
        return owner, self.SOURCE

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect by the name in the files."""
        super().add_tensor(target_key, source_key, source_key, future)

    def was_used(self) -> bool:
        """Return False: it is no rule for the names in other files."""
        return False
