"""Names as the kind of a tensor and the number of its layer.

    model.layers.12.mlp.experts.3.w1.weight   ->   ("model.layers.*.mlp.experts.*.w1.weight", 12)
    lm_head.weight                            ->   ("lm_head.weight", None)

The layer is the first number between dots. Tensors of one kind and layer, such as the experts of a mixture, share a
cell of the picture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_adapters.cli.report.records import TensorReport

COLUMNS = 100
ROWS = 16


@dataclass(frozen=True)
class Cell:
    """Tensors of one kind and one layer or a few; `worst` is the one of the lowest SNR among them."""

    worst: TensorReport
    tensors: int


@dataclass(frozen=True)
class Grid:
    """Kinds as rows, layers as columns.

    cells: (kind, column) -> cell; the column of what is in no layer is None. per_column: layers that share a column.
    layers: the first of each column. left_out: kinds that there was no room for; those of the lowest SNR are shown.
    """

    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    per_column: int
    cells: Mapping[tuple[str, int | None], Cell]
    left_out: int


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """Return the name with `*` for its numbers, and the first of them."""
    words = name.split(".")
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 10]
    kind = ".".join("*" if word.isdecimal() else word for word in words)
    return kind, numbers[0] if numbers else None


def grid_of(tensors: Sequence[TensorReport]) -> Grid:
    """Return the grid of all compared tensors, in the order they come, without kinds that are exact."""
    placed: dict[str, list[tuple[int | None, TensorReport]]] = {}
    for tensor in tensors:
        if tensor.error is not None:
            kind, layer = kind_and_layer(tensor.name)
            placed.setdefault(kind, []).append((layer, tensor))
    placed = {kind: some for kind, some in placed.items() if not all(tensor.exact for _, tensor in some)}
    worst = sorted(placed, key=lambda kind: min(badness(tensor) for _, tensor in placed[kind]))[:ROWS]
    kinds = tuple(kind for kind in placed if kind in set(worst))
    layers = sorted({layer for kind in kinds for layer, _ in placed[kind] if layer is not None})
    # by their order, since the numbers of a checkpoint may be far apart
    ordinal = {layer: index for index, layer in enumerate(layers)}
    per_column = max(-(-len(layers) // COLUMNS), 1)
    together: dict[tuple[str, int | None], list[TensorReport]] = {}
    for kind in kinds:
        for layer, tensor in placed[kind]:
            column = None if layer is None else ordinal[layer] // per_column
            together.setdefault((kind, column), []).append(tensor)
    cells = {place: Cell(min(some, key=badness), len(some)) for place, some in together.items()}
    return Grid(kinds, tuple(layers[::per_column]), per_column, cells, len(placed) - len(kinds))


def badness(tensor: TensorReport) -> float:
    """Return what tensors are sorted by, the worst first: SNR; without one, the worst, or the best if exact."""
    if tensor.snr_db is not None:
        return tensor.snr_db
    return float("inf") if tensor.exact else float("-inf")


def labels(kinds: Sequence[str]) -> dict[str, str]:
    """Return kinds without the words that all of them begin with, and without a last `.weight`."""
    words = [kind.split(".") for kind in kinds if "*" in kind]
    common = 0
    while words and all(len(some) > common + 2 and some[common] == words[0][common] for some in words):
        common += 1
    return {
        kind: (".".join(kind.split(".")[common:]) if "*" in kind else kind).removesuffix(".weight") or kind
        for kind in kinds
    }


def middle_left_out(name: str, length: int = 72) -> str:
    """Return a name, with its middle left out if it is long."""
    if len(name) <= length:
        return name
    end = length * 2 // 3
    return f"{name[: length - end - 1]}\u2026{name[-end:]}"
