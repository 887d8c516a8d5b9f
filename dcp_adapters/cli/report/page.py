"""The page: one HTML file that loads nothing, runs nothing, and is bounded in size whatever the checkpoint holds.

This module decides what is shown and in which order, templates/ where and how. Names come from checkpoints, and
checkpoints from anywhere: whatever a template prints is escaped, and control characters are replaced.
"""

from typing import Any

from dcp_adapters.cli.report.channels import CHANNELS, FACTOR
from dcp_adapters.cli.report.drawing import heat_map, histogram, profile
from dcp_adapters.cli.report.layers import badness, grid_of, middle_left_out
from dcp_adapters.cli.report.notes import kinds_of, notes, scales_by_kind, sizes_of, tensors
from dcp_adapters.cli.report.records import CheckpointReport
from dcp_adapters.plain.tables import human_bytes, sanitize

MISSING = "a page is made by jinja2, which is not installed: pip install 'qtensor[report]'"


def templates() -> Any:
    """Return the templates, ready to be filled. Raises ImportError without jinja2, which nothing else needs."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise ImportError(MISSING) from None
    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def page(report: CheckpointReport) -> str:
    """Return the whole page as HTML."""
    environment = templates()
    used = (compact, heat_map, histogram, human_bytes, profile, middle_left_out, tensors)
    environment.filters.update({function.__name__: function for function in used}, thousands="{:,}".format)
    every = report.tensors
    made: str = environment.get_template("page.html").render(
        report=report,
        notes=notes(report),
        whole=sizes_of(every),
        kinds=kinds_of(every),
        any_compared=any(tensor.error is not None for tensor in every),
        differing=sorted((t for t in every if t.error is not None and not t.exact), key=badness),
        grid=grid_of(every),
        scales=scales_by_kind(every),
        outlying=sorted((t for t in every if t.outliers), key=lambda t: -t.outliers[0].factor),
        odd=sorted(
            (t for t in every if t.quantized or t.not_finite or t.zero_rows),
            key=lambda t: (-t.not_finite, -t.bad_scales, -(t.clipped or 0), -t.saturation),
        ),
        slowest=sorted(every, key=lambda t: (-t.write_seconds, -t.nbytes)),
        files=sorted(report.files.items(), key=lambda file: -file[1]),
        FACTOR=FACTOR,
        CHANNELS=CHANNELS,
    )
    return made


def compact(number: float) -> str:
    """Return a number in three digits and a word."""
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if word == "k" else size)
            return f"{scaled:.3g}{word}" if scaled < 999.5 else f"{scaled:.0f}{word}"
    return f"{number:,.0f}"


def _finalize(value: Any) -> Any:
    """Return what `{{ value }}` prints: markup as it is, coordinates to two decimals, text by `sanitize`."""
    if hasattr(value, "__html__"):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else sanitize(str(value))
