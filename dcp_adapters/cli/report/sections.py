"""The body of the page: errors, scales, outlier channels, elements at the end of their range, what writing costs."""

from collections.abc import Mapping, Sequence

from dcp_adapters.cli.report.cells import TOP, meter, name, number, share, table, tensors
from dcp_adapters.cli.report.channels import CHANNELS, FACTOR
from dcp_adapters.cli.report.drawing import heat_map, histogram, profile
from dcp_adapters.cli.report.layers import badness, grid_of
from dcp_adapters.cli.report.markup import Markup, joined, short, tag
from dcp_adapters.cli.report.records import CheckpointReport, ScaleHistogram, TensorReport
from dcp_adapters.tables import human_bytes

PROFILES = 6
HISTOGRAMS = 8
FILES = 24
SPANS = {"e4m3": (-9, 8)}
RANGES = {
    "e4m3": "E4M3 holds 2\u207b\u2079 to 448",
    "e8m0": "E8M0 holds 2\u207b\u00b9\u00b2\u2077 to 2\u00b9\u00b2\u2077",
    "fp32": "fp32",
}


def errors(report: CheckpointReport) -> Markup:
    """The picture of SNR by layer, and the tensors of the lowest."""
    if report.against is None:
        words = "Not measured: that takes the values that are right (--against DENSE)."
        return _section("Quantization error", words)
    differing = sorted(
        (tensor for tensor in report.tensors if tensor.error is not None and not tensor.error.exact), key=badness
    )
    if not differing:
        none = not any(tensor.error is not None for tensor in report.tensors)
        words = "No tensor could be compared." if none else "None: every value is equal to what it is compared with."
        return _section("Quantization error", words)
    grid = grid_of(report.tensors)
    rows = [_error_row(tensor) for tensor in differing[:TOP]]
    heads = ("lowest SNR", "kind", "shape", "SNR dB", "max |error|", "|error| / |value|", "not finite")
    limits = []
    if grid.per_column > 1:
        limits.append(f"{grid.per_column} layers share a column, numbered by the first")
    if grid.left_out:
        limits.append(f"{grid.left_out} kinds of tensors with higher SNR are left out")
    return _section(
        "Quantization error",
        "Signal-to-noise ratio of the weights, kind by layer. Where tensors share a cell (experts), the lowest. Kinds "
        f"that are equal throughout are not shown. {'; '.join(limits)}{'.' if limits else ''}",
        tag("div", heat_map(grid), class_="scroll broad"),
        table(heads, rows, right=heads[3:], more=len(differing) - TOP),
    )


def scales(report: CheckpointReport) -> Markup:
    """A histogram for each kind and part."""
    together: dict[tuple[str, str, str], list[ScaleHistogram]] = {}
    for tensor in report.tensors:
        for found in tensor.scales:
            together.setdefault((tensor.kind, found.part, found.stored_as), []).append(found)
    if not together:
        return _section("Scales", "There are none: no tensor is quantized.")
    cards = []
    for (kind, part, stored_as), some in list(together.items())[:HISTOGRAMS]:
        counts = _added(some)
        bad = {what: sum(getattr(one, what) for one in some) for what in ("zero", "negative", "not_finite")}
        odd = ", ".join(f"{many:,} {what.replace('_', ' ')}" for what, many in bad.items() if many)
        total = sum(counts.values()) + sum(bad.values())
        words = f"{total:,} in {tensors(len(some))}; {RANGES.get(stored_as, stored_as)}{'; ' + odd if odd else ''}"
        drawn = histogram(counts, SPANS.get(stored_as)) if counts else ""
        heading = tag("h3", f"{short(kind, 60)}: {part.replace('_', ' ')}")
        cards.append(tag("div", heading, tag("div", words, class_="soft small"), drawn))
    more = len(together) - HISTOGRAMS
    return _section(
        "Scales",
        "How much of their range the scales use, one count for each stored scale. Near the low end of a format "
        "scales are coarse, or 0.",
        tag("div", *cards, class_="cards wide"),
        tag("p", f"and {more} more kinds of scales", class_="soft small") if more > 0 else "",
    )


def outliers(report: CheckpointReport) -> Markup:
    """Profiles of the tensors with the largest outliers, and a table of channels."""
    words = (
        f"Rows (outputs) and columns (inputs) whose largest magnitude is over {FACTOR:g}\u00d7 the median of all rows "
        f"or columns of their tensor (of at least {CHANNELS}). Such a channel sets the scale for its neighbours."
    )
    found = sorted((t for t in report.tensors if t.outliers), key=lambda t: -t.outliers[0].factor)
    if not found:
        return _section("Outlier channels", words, tag("p", "There are none."))
    cards = [
        tag(
            "div",
            tag("h3", name(tensor.name)),
            tag("div", _outlier_words(tensor), class_="soft small"),
            profile(tensor.profile),
        )
        for tensor in found[:PROFILES]
        if tensor.profile is not None
    ]
    largest = found[0].outliers[0].factor
    rows = [
        (
            name(tensor.name),
            f"{tensor.row_outliers:,}",
            f"{tensor.column_outliers:,}",
            ", ".join(f"{one.axis} {one.index}" for one in tensor.outliers[:4]),
            f"{tensor.outliers[0].amax:.3g}",
            joined(_times(tensor.outliers[0].factor), meter(tensor.outliers[0].factor / largest, hot=True)),
        )
        for tensor in found[:TOP]
    ]
    heads = ("tensor", "rows", "columns", "the largest", "amax", "over the median")
    right = ("rows", "columns", "amax", "over the median")
    return _section(
        "Outlier channels",
        words,
        tag("div", *cards, class_="cards"),
        table(heads, rows, right=right, more=len(found) - TOP),
    )


def elements(report: CheckpointReport) -> Markup:
    """Saturated and clipped elements, NaN, zeros."""
    odd = [t for t in report.tensors if t.quantized or t.not_finite or t.zero_rows]
    if not odd:
        return _section("Saturation and NaN", "No tensor is quantized, and none has NaN, infinities or rows of zeros.")
    order = sorted(odd, key=lambda t: (-t.not_finite, -t.bad_scales, -(t.clipped or 0), -_saturation(t)))
    most = max(map(_saturation, order)) or 1.0
    rows = [
        (
            name(tensor.name),
            number(tensor.not_finite, bad=True),
            number(tensor.nan_codes, bad=True),
            number(tensor.bad_scales, bad=True),
            number(tensor.zero_scales),
            number(tensor.zero_rows),
            number(tensor.clipped),
            "-" if tensor.at_largest is None else share(tensor.at_largest, tensor.numel),
            "-"
            if tensor.saturated is None
            else joined(share(tensor.saturated, tensor.numel), meter(_saturation(tensor) / most)),
        )
        for tensor in order[:TOP]
    ]
    heads = (
        *("tensor", "NaN or Inf values", "NaN codes", "bad scales", "zero scales", "zero rows", "clipped"),
        *("at the largest", "saturated"),
    )
    return _section(
        "Saturation and NaN",
        "Elements at the end of their format's range. Saturated: at the largest magnitude, beyond one for each scale; "
        "an upper bound of what was clipped, for most are rounded there. Clipped can be told from right values only.",
        table(heads, rows, right=heads[1:], more=len(order) - TOP),
    )


def cost(report: CheckpointReport) -> Markup:
    """The tensors that take longest to write, and how evenly files share the bytes."""
    order = sorted(report.tensors, key=lambda t: (-t.write_seconds, -t.nbytes))
    longest = max((t.write_seconds for t in order), default=0) or 1.0
    rows = [
        (
            name(tensor.name),
            joined(_seconds(tensor.write_seconds), meter(tensor.write_seconds / longest)),
            _seconds(tensor.read_seconds),
            human_bytes(tensor.nbytes),
            f"{tensor.entries}",
            f"{tensor.chunks}",
        )
        for tensor in order[:TOP]
    ]
    heads = ("slowest to write", "to write", "to read", "stored", "entries", "chunks")
    return _section(
        "Cost of writing",
        "Measured while this page was made, on one thread of this machine. To write: torch.save of the same bytes to "
        "nowhere and their checksum, the quickest of some tries (no disk, no network, no copy from a GPU). To read: "
        "once, from the files here. How fast the storage of the training job is, a checkpoint does not tell.",
        table(heads, rows, right=heads[1:], more=len(order) - TOP),
        _files(report.files),
    )


def _section(title: str, words: str, *body: str) -> Markup:
    return tag("section", tag("h2", title), tag("p", words, class_="soft"), *body)


def _error_row(tensor: TensorReport) -> tuple[str, ...]:
    error = tensor.error
    assert error is not None
    snr = "-" if tensor.snr_db is None else f"{tensor.snr_db:.2f}"
    return (
        name(tensor.name),
        short(tensor.kind, 40),
        " \u00d7 ".join(map(str, tensor.shape)) or "scalar",
        snr,
        f"{error.max_abs:.3g}",
        "inf" if error.relative is None else f"{error.relative:.3g}",
        number(error.not_finite, bad=True),
    )


def _added(some: Sequence[ScaleHistogram]) -> Mapping[int, int]:
    counts: dict[int, int] = {}
    for one in some:
        for exponent, some_more in one.counts.items():
            counts[exponent] = counts.get(exponent, 0) + some_more
    return counts


def _outlier_words(tensor: TensorReport) -> str:
    one = tensor.outliers[0]
    return f"{one.axis} {one.index}: {_times(one.factor)} the median"


def _times(factor: float) -> str:
    return f"{factor:.1f}\u00d7" if factor < 1e4 else f"{factor:.2g}\u00d7"


def _saturation(tensor: TensorReport) -> float:
    return (tensor.saturated or 0) / tensor.numel if tensor.numel else 0.0


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _files(files: Mapping[str, int]) -> Markup:
    if not files:
        return joined()
    order = sorted(files, key=lambda file: -files[file])
    rows = [
        (name(file), joined(human_bytes(files[file]), meter(files[file] / (files[order[0]] or 1))))
        for file in order[:FILES]
    ]
    return table(
        ("file (its rank is the number after __)", "entries in it"),
        rows,
        right=("entries in it",),
        more=len(files) - FILES,
    )
