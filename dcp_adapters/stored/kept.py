"""How well each quantized tensor is kept: whose scales it has, what no healthy weight holds, its error against dense.

One tensor of each side is in memory at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.soundness import cut, slabs
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.numeric_error import Error, error_between
from dcp_adapters.stored.part_values import value_fault
from qtensor.numerics.own_scales import OwnScales
from qtensor.spec.selection import matches
from qtensor.states.kinds import IN_8_BITS

# Of the norm of the values. The coarsest format, INT4 in groups of 128, comes to 0.21 for values with heavy tails
# (Student's t with 3 degrees of freedom; 0.11 for normal ones). With the two codes of a byte exchanged it is 1.4.
FAR = 0.5


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One quantized tensor.

    Attributes:
        name: of the tensor.
        kind: the label of its recipe.
        shape: logical.
        bits: of all parts, for an element.
        scales: how many of its scales were judged: 0 if its format judges none.
        others: how many of them its values do not ask for: calibrated, converted exactly, or of another payload.
        error: of its values, those of the dense tensor being right; None if there is none to compare with.
        faults: what is wrong with it, in words.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bits: float
    scales: int
    others: int
    error: Error | None
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "bits": self.bits,
            "scales": self.scales,
            "other_scales": self.others,
            "error": None if self.error is None else self.error.to_json(),
            "faults": list(self.faults),
        }


def look_at_each(
    stored: Stored, against: Stored | None = None, match: Sequence[str] = (), *, advance: Advance = ignore_progress
) -> Iterator[Kept]:
    """Yield what is found of each quantized tensor, in their order.

    Args:
        stored: a checkpoint or a directory.
        against: where the dense tensors of the same names are.
        match: globs over names; empty: all.
        advance: told the bytes of each tensor that is done.
    """
    for entry in stored.entries.values():
        if not is_weight(entry) or not matches(entry.name, match or ["*"]):
            continue
        parts = stored.parts(entry.name)
        own = _judged(entry, parts)
        faults = [
            f"{entry.key(spec.name)}: {fault}"
            for spec in entry.specs()
            if (fault := value_fault(spec, parts[spec.name])) is not None
        ]
        error = None
        if against is not None:
            found = _error(entry, parts, against)
            error = found if isinstance(found, Error) else None
            faults += [found] if isinstance(found, str) else far_faults(found)
        yield Kept(
            name=entry.name,
            kind=entry.kind,
            shape=entry.shape,
            bits=8 * entry.nbytes / max(entry.numel, 1),
            scales=own.scales,
            others=own.others,
            error=error,
            faults=tuple(faults),
        )
        advance(entry.nbytes)


def is_weight(entry: Entry) -> bool:
    """Return whether an entry is quantized, and no moment of an optimizer that is kept in 8 bits."""
    return entry.recipe is not None and entry.name.rpartition(".")[2] not in IN_8_BITS


def _judged(entry: Entry, parts: Mapping[str, Tensor]) -> OwnScales:
    assert entry.recipe is not None
    own = OwnScales(entry.recipe)
    for piece in slabs(entry.shape, entry.recipe):
        own.see(cut(parts, entry.recipe, piece))
    own.judge_tensor_wide()
    return own


def _error(entry: Entry, parts: Mapping[str, Tensor], against: Stored) -> Error | str:
    """Return the error of a tensor, or why there is none."""
    right = against.entries.get(entry.name)
    if right is None:
        return f"{against.path} has no tensor of this name"
    turned = (*right.shape[:-2], *right.shape[:-3:-1])
    if right.shape == entry.shape:
        return error_between(against.read(entry.name), entry.tensor(parts))
    # models that multiply by weights of all experts as they are have their transposes
    if len(entry.shape) == 3 and turned == entry.shape and right.recipe is None:
        return error_between(against.read(entry.name).transpose(1, 2), entry.tensor(parts))
    return f"{against.path} has a tensor of {list(right.shape)} of this name, expected {list(entry.shape)}"


def far_faults(error: Error, most: float = FAR) -> list[str]:
    """Return what is wrong with values of such an error, in words; `most` of the norm is what any weight may lose."""
    if error.not_finite:
        return [f"{error.not_finite} values are not finite on one side alone"]
    if error.relative is None or error.relative > most:
        told = "not defined" if error.relative is None else f"{error.relative:.3g} of their norm"
        return [f"its values are far from the dense ones ({told}): codes or scales are not those of this weight"]
    return []
