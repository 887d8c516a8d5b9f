"""The command `report`: measure.py measures, page.py draws."""

import argparse
from pathlib import Path

from dcp_adapters.cli.arguments import add_checkpoint, add_json, add_match, add_progress, open_stored
from dcp_adapters.cli.printing import FINE, show
from dcp_adapters.cli.report.measure import measure_checkpoint
from dcp_adapters.cli.report.page import page, templates
from dcp_adapters.plain.progress_bar import progress_bar
from dcp_adapters.stored.inspect import inspect_checkpoint

ABOUT = """\
Write one HTML page about a checkpoint: sizes, quantization error by layer, histograms of scales, outlier channels,
saturated elements and NaN, and what each tensor costs to write. The page loads nothing, and docs/report.md says how to
read it. --against names the checkpoint whose values are right; tensors are matched by name, whatever number of ranks
wrote either, and without it there is no error to show. All data are read, one tensor at a time."""
EXAMPLES = """\
examples:
  %(prog)s runs/step-1000 --against dense            writes step-1000-report.html
  %(prog)s runs/step-1000 --match 'model.*'          without optimizer states
  %(prog)s runs/step-1000 -o page.html
  %(prog)s runs/step-1000 --against dense --json | jq '.tensors[] | [.snr_db, .name]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_checkpoint(parser)
    parser.add_argument("--against", metavar="DENSE", help="the checkpoint whose values are right")
    add_match(parser)
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="the file to write (default: CHECKPOINT-report.html here)"
    )
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the page, or print its numbers as JSON."""
    checkpoint = open_stored(arguments.checkpoint)
    against = None if arguments.against is None else open_stored(arguments.against)
    target = None
    if arguments.output is not None or not arguments.json:
        target = Path(arguments.output or f"{checkpoint.path.resolve().name}-report.html")
        # a package that is missing is told of now, not when all has been measured
        templates()
        if target.is_dir() or not target.parent.is_dir():
            raise ValueError(f"{target}: expected a file in a directory that exists")
    total = sum(tensor.nbytes for tensor in inspect_checkpoint(checkpoint, arguments.match).tensors)
    with progress_bar("measuring", total, enabled=arguments.progress) as advance:
        found = measure_checkpoint(checkpoint, against, arguments.match, advance=advance)
    if target is not None:
        target.write_text(page(found), encoding="utf-8")
    show(found.to_json() if arguments.json else f"{target}: {len(found.tensors)} tensors")
    return FINE
