"""The command `apply`: delta/files.py writes the copy."""

import argparse

from dcp_adapters.cli.arguments import add_json, add_progress
from dcp_adapters.cli.printing import FINE, show
from dcp_adapters.delta.files import patched_copy

ABOUT = """\
Write BASE with the changes of one or more deltas as OUT. BASE must be the state that the first delta starts from, or
one that a later one does; every delta must start where the one before it leads to. Digests are compared before and
after, and nothing is written if anything is wrong. OUT must not exist, or be empty, and appears only when it is
complete; where OUT holds the result already, nothing is done. Needs
zstd: pip install "qtensor-fsdp[delta]"."""
EXAMPLES = """\
examples:
  %(prog)s exported-1 1-to-2.delta out
  %(prog)s exported-1 1-to-2.delta 2-to-3.delta out"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("base", metavar="BASE", help="the state to start from")
    parser.add_argument("deltas", metavar="DELTA", nargs="+", help="files, in the order in which they were made")
    parser.add_argument("out", metavar="OUT", help="the directory to write; must not exist, or be empty")
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the patched copy, and print what it is made from."""
    done = patched_copy(arguments.base, arguments.deltas, arguments.out, progress=arguments.progress)
    show(done.to_json() if arguments.json else done.render())
    return FINE
