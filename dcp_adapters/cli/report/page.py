"""The page: one HTML file that loads nothing, runs nothing, and is bounded in size whatever the checkpoint holds."""

from dcp_adapters.cli.report.glossary import glossary
from dcp_adapters.cli.report.markup import Markup, joined, tag
from dcp_adapters.cli.report.overview import head, notes_list, sizes, tiles
from dcp_adapters.cli.report.records import CheckpointReport
from dcp_adapters.cli.report.sections import cost, elements, errors, outliers, scales
from dcp_adapters.cli.report.style import STYLE

# Even if something slipped through, a browser would neither run nor fetch it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: CheckpointReport) -> str:
    """All of it as HTML."""
    sections = (errors, sizes, scales, outliers, elements, cost)
    if report.against is None:  # what there is, first
        sections = (sizes, scales, outliers, elements, cost, errors)
    body = tag(
        "main",
        head(report),
        tiles(report),
        notes_list(report),
        *(section(report) for section in sections),
        glossary(),
    )
    heading = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "Checkpoint report"),
        tag("style", Markup(STYLE)),
    )
    return joined(Markup("<!doctype html>\n"), tag("html", heading, tag("body", body), lang="en"), Markup("\n"))
