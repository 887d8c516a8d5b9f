"""The command `inspect`: the tensors of a checkpoint with formats and sizes; stored/inspect.py reads them."""

import argparse

from dcp_adapters.cli.arguments import add_checkpoint, add_json, add_match, open_stored
from dcp_adapters.cli.printing import FINE, show
from dcp_adapters.stored.inspect import inspect_checkpoint

ABOUT = """\
List the tensors of a checkpoint with their formats and sizes, and the totals for each format.
Reads the description only, no tensor data, so it is quick for checkpoints of any size."""
EXAMPLES = """\
examples:
  %(prog)s runs/step-1000
  %(prog)s runs/step-1000 --match 'model.layers.0.*'
  %(prog)s runs/step-1000 --json | jq .total.bytes_per_parameter"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_checkpoint(parser)
    add_match(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """List tensors and totals."""
    found = inspect_checkpoint(open_stored(arguments.checkpoint), arguments.match)
    show(found.to_json() if arguments.json else found.render())
    return FINE
