"""The top of the page: what it is about, the figures to remember, what deserves a look, and where the bytes are."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dcp_adapters.cli.report.cells import TOP, breakable, count, share, table, tensors
from dcp_adapters.cli.report.channels import FACTOR
from dcp_adapters.cli.report.layers import badness
from dcp_adapters.cli.report.markup import Markup, joined, short, tag
from dcp_adapters.cli.report.records import CheckpointReport, TensorReport
from dcp_adapters.tables import human_bytes
from dcp_adapters.words import in_order

UNEVEN = 1.5  # largest file over the mean


class Note(NamedTuple):
    """One line under the figures; `level` chooses its sign."""

    level: Literal["bad", "look", "good"]
    words: str


def head(report: CheckpointReport) -> Markup:
    """The title and what was read."""
    saved = "no quantized tensors" if report.format_version is None else f"format version {report.format_version}"
    ranks = "" if report.world_size is None else f", by at least {_many(report.world_size, 'rank')}"
    against = f"compared with {short(report.against, 200)}" if report.against else "not compared with anything"
    facts = f"{saved}, {_many(len(report.files), 'file')}{ranks}, {'with' if report.checksums else 'without'} checksums"
    return joined(
        tag("h1", short(report.path, 200)),
        tag("p", f"Checkpoint report: {against} \u00b7 {facts}", class_="soft"),
    )


def tiles(report: CheckpointReport) -> Markup:
    """The figures."""
    nbytes, numel = _sum(report.tensors, "nbytes"), _sum(report.tensors, "numel")
    broken = sum(tensor.not_finite for tensor in report.tensors)
    found = [
        _tile(human_bytes(nbytes), f"in {tensors(len(report.tensors))}"),
        _tile(count(numel), "parameters"),
        _tile(f"{nbytes / numel:.3g}" if numel else "-", "bytes a parameter"),
    ]
    if report.against is not None:
        both = [tensor for tensor in report.tensors if tensor.reference_bytes is not None]
        other = sum(tensor.reference_bytes or 0 for tensor in both)
        ratio = f"{_sum(both, 'nbytes') / other:.2f}\u00d7" if other else "-"
        found.append(_tile(ratio, f"of the {human_bytes(other)} it is compared with"))
        worst = _worst(report)
        if worst is not None and worst.snr_db is not None:
            found.append(_tile(f"{worst.snr_db:.1f} dB", joined("lowest SNR: ", breakable(short(worst.name, 60)))))
        elif any(tensor.error is not None for tensor in report.tensors):
            found.append(_tile("none", "error: all values are equal") if worst is None else _tile("?", "SNR undefined"))
    found.append(_tile(count(broken), "values that are NaN or infinite"))
    return tag("div", *found, class_="tiles")


def notes(report: CheckpointReport) -> list[Note]:
    """What a reader should know first, the worst first."""
    found: list[Note] = []

    def tell(level: Literal["bad", "look", "good"], some: Sequence[TensorReport], words: str) -> None:
        if some:
            found.append(Note(level, f"{tensors(len(some))} {words}, {_names(some)}"))

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
    sizes = list(report.files.values())
    if sizes and max(sizes) * len(sizes) > UNEVEN * sum(sizes):
        ratio = max(sizes) * len(sizes) / sum(sizes)
        found.append(Note("look", f"the largest file is {ratio:.1f}\u00d7 the mean: its rank writes longest"))
    equal = [tensor for tensor in every if tensor.error is not None and tensor.error.exact]
    tell("good", equal, "with every value equal to that compared with")
    if every and not any(tensor.not_finite or tensor.bad_scales for tensor in every):
        found.append(Note("good", "no NaN, no infinity and no impossible scale in any tensor"))
    return found


def notes_list(report: CheckpointReport) -> Markup:
    """The notes."""
    found = notes(report)
    return (
        tag("ul", *(tag("li", note.words, class_=note.level) for note in found), class_="notes") if found else joined()
    )


def sizes(report: CheckpointReport) -> Markup:
    """Bytes by kind, as a bar and as a table."""
    kinds: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        kinds.setdefault(tensor.kind, []).append(tensor)
    order = sorted(kinds, key=lambda kind: -_sum(kinds[kind], "nbytes"))
    whole = _sum(report.tensors, "nbytes") + report.blob_bytes
    bars = [
        tag("i", class_=_shade(place), style=f"width:{100 * _sum(kinds[kind], 'nbytes') / whole:.4g}%", title=kind)
        for place, kind in enumerate(order[:TOP])
        if whole
    ]
    rows = [_kind_row(kinds[kind], kind, place, whole) for place, kind in enumerate(order[:TOP])]
    if report.blobs:
        cells = ("entries of bytes", str(report.blobs), "-", human_bytes(report.blob_bytes))
        rows.append((*cells, share(report.blob_bytes, whole), "-", "-"))
    heads = ("kind", "tensors", "parameters", "stored", "share", "bytes a parameter", "of what it is compared with")
    return tag(
        "section",
        tag("h2", "Sizes"),
        tag("p", "Stored bytes by recipe or dtype, scales included.", class_="soft"),
        tag("div", *bars, class_="stack"),
        table(heads, rows, right=heads[1:], more=len(order) - TOP),
    )


def _kind_row(some: Sequence[TensorReport], kind: str, place: int, whole: int) -> tuple[str, ...]:
    nbytes, numel = _sum(some, "nbytes"), _sum(some, "numel")
    matched = [tensor for tensor in some if tensor.reference_bytes is not None]
    other = sum(tensor.reference_bytes or 0 for tensor in matched)
    return (
        joined(tag("span", class_=f"key {_shade(place)}"), short(kind, 100)),
        f"{len(some):,}",
        count(numel),
        human_bytes(nbytes),
        share(nbytes, whole),
        f"{nbytes / numel:.4g}" if numel else "-",
        f"{_sum(matched, 'nbytes') / other:.3f}\u00d7" if other else "-",
    )


def _worst(report: CheckpointReport) -> TensorReport | None:
    """The tensor of the lowest SNR; None where all are equal or nothing was compared."""
    differing = [tensor for tensor in report.tensors if tensor.error is not None and not tensor.error.exact]
    return min(differing, key=badness, default=None)


def _sum(some: Sequence[TensorReport], field: Literal["nbytes", "numel"]) -> int:
    return sum(getattr(tensor, field) for tensor in some)


def _names(some: Sequence[TensorReport]) -> str:
    first = in_order(tensor.name for tensor in some)[0]
    return f"for example {short(first)}" if len(some) > 1 else short(first)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _shade(place: int) -> str:
    return f"k{min(place, 4)}"


def _tile(figure: str, words: str) -> Markup:
    return tag("div", tag("b", figure), tag("span", words), class_="tile")
