"""What became of the values of each tensor that `convert` converted, as a table or as JSON."""

from dataclasses import dataclass
from typing import Any

import torch

from dcp_adapters.plain.tables import table
from dcp_adapters.records.recipe_names import dtype_name, recipe_label
from dcp_adapters.stored.numeric_error import Error
from qtensor.spec.recipes import Recipe

Target = Recipe | torch.dtype
FORMAT = "dcp_adapters.convert/1"


@dataclass(frozen=True)
class Converted:
    """One tensor that was converted.

    before: what it was, in words. error: of its new values, with the old ones as the reference.
    """

    name: str
    before: str
    error: Error

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "from": self.before, "exact": self.error.exact, **self.error.to_json()}


@dataclass(frozen=True)
class Outcome:
    """What a conversion did: every tensor that was converted, and how many entries were copied as they are."""

    source: str
    destination: str
    to: Target
    tensors: list[Converted]
    copied: int

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are only ever added under the same FORMAT."""
        return {
            "format": FORMAT,
            "source": self.source,
            "destination": self.destination,
            "to": _label(self.to),
            "copied": self.copied,
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }

    def render(self) -> str:
        """For people: every tensor that was rounded, and a summary."""
        rounded = [tensor for tensor in self.tensors if not tensor.error.exact]
        columns = ("rounded", "from", "max |B-A|", "|B-A|/|A|", "SNR dB")
        body = table(columns, [_row(tensor) for tensor in rounded], right=columns[2:]) + "\n\n" if rounded else ""
        counts = f"{len(self.tensors) - len(rounded)} exactly, {len(rounded)} rounded"
        return (
            f"{body}{self.destination}: {len(self.tensors)} tensors converted to {_label(self.to)} ({counts}), "
            f"{self.copied} entries copied"
        )


def _row(tensor: Converted) -> tuple[str, ...]:
    name = tensor.name + (f" ({tensor.error.not_finite} not finite)" if tensor.error.not_finite else "")
    return (name, tensor.before, *tensor.error.cells())


def _label(to: Target) -> str:
    return dtype_name(to) if isinstance(to, torch.dtype) else recipe_label(to)
