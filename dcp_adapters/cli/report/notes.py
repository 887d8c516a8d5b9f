"""What the page says of all tensors together: what deserves a look, where the bytes are, how scales are spread."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dcp_adapters.cli.report.channels import FACTOR
from dcp_adapters.cli.report.layers import middle_left_out
from dcp_adapters.cli.report.records import CheckpointReport, ScaleHistogram, TensorReport
from dcp_adapters.plain.words import in_natural_order

UNEVEN = 1.5  # largest file over the mean


class Note(NamedTuple):
    """One line under the figures; `level` chooses its sign."""

    level: Literal["bad", "look", "good"]
    words: str


class Sizes(NamedTuple):
    """What some tensors take; `matched` of their bytes are `reference` bytes in the dense checkpoint."""

    tensors: int
    numel: int
    nbytes: int
    matched: int
    reference: int


def notes(report: CheckpointReport) -> list[Note]:
    """Return what a reader should know first, the worst first."""
    found: list[Note] = []

    def tell(level: Literal["bad", "look", "good"], some: Sequence[TensorReport], words: str) -> None:
        if some:
            first = middle_left_out(in_natural_order(tensor.name for tensor in some)[0])
            found.append(Note(level, f"{tensors(len(some))} {words}, {'for example ' * (len(some) > 1)}{first}"))

    every = report.tensors
    tell("bad", [t for t in every if t.not_finite], "with values that are NaN or infinite")
    tell("bad", [t for t in every if t.bad_scales], "with scales that are negative, NaN or infinite")
    tell("bad", [t for t in every if t.compared == "shape"], "of another shape in what it is compared with")
    tell("look", [t for t in every if t.compared == "absent"], "not in what it is compared with")
    tell("look", [t for t in every if t.compared == "undecodable"], "that can not be compared")
    tell("look", [t for t in every if t.clipped], "with clipped elements")
    tell("look", [t for t in every if t.zero_rows], "with rows of zeros")
    tell("look", [t for t in every if t.outliers], f"with channels over {FACTOR:g}\u00d7 the median of theirs")
    if report.only_in_against:
        found.append(Note("look", f"{tensors(report.only_in_against)} only in what it is compared with"))
    sizes = report.files.values()
    if sizes and max(sizes) * len(sizes) > UNEVEN * sum(sizes):
        ratio = max(sizes) * len(sizes) / sum(sizes)
        found.append(Note("look", f"the largest file is {ratio:.1f}\u00d7 the mean: its rank writes longest"))
    tell("good", [t for t in every if t.exact], "with every value equal to that compared with")
    if every and not any(tensor.not_finite or tensor.bad_scales for tensor in every):
        found.append(Note("good", "no NaN, no infinity and no impossible scale in any tensor"))
    return found


def sizes_of(some: Sequence[TensorReport]) -> Sizes:
    """Return what some tensors take together."""
    matched = [tensor for tensor in some if tensor.reference_bytes is not None]
    return Sizes(
        len(some),
        sum(tensor.numel for tensor in some),
        sum(tensor.nbytes for tensor in some),
        sum(tensor.nbytes for tensor in matched),
        sum(tensor.reference_bytes or 0 for tensor in matched),
    )


def kinds_of(some: Sequence[TensorReport]) -> list[tuple[str, Sizes]]:
    """Return recipes and dtypes with what they take, the largest first."""
    kinds: dict[str, list[TensorReport]] = {}
    for tensor in some:
        kinds.setdefault(tensor.kind, []).append(tensor)
    return sorted(((kind, sizes_of(those)) for kind, those in kinds.items()), key=lambda kind: -kind[1].nbytes)


def scales_by_kind(some: Sequence[TensorReport]) -> list[tuple[str, int, ScaleHistogram]]:
    """Return (kind, how many tensors, their scales) for each kind and part, in the order they come."""
    found: dict[tuple[str, str, str], list[ScaleHistogram]] = {}
    for tensor in some:
        for one in tensor.scales:
            found.setdefault((tensor.kind, one.part, one.stored_as), []).append(one)
    return [(kind, len(those), sum(those[1:], those[0])) for (kind, *_), those in found.items()]


def tensors(number: int) -> str:
    """Return so many tensors, in words."""
    return "1 tensor" if number == 1 else f"{number:,} tensors"
