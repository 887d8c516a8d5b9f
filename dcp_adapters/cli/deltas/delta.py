"""The command `delta`: delta/files.py writes the file."""

import argparse

from dcp_adapters.cli.arguments import add_checksums, add_json, add_progress
from dcp_adapters.cli.printing import FINE, show
from dcp_adapters.delta.files import write_delta

ABOUT = """\
Write what leads from OLD to NEW, byte for byte, as one compressed file. Both are checkpoints, or both are Hugging Face
directories, with the same names, recipes and shapes; other differences are named and refused. Entries of bytes that
changed are in the file whole. One tensor of each is in memory at a time. Needs
zstd: pip install "qtensor-fsdp[delta]"."""
EXAMPLES = """\
examples:
  %(prog)s exported-1 exported-2 1-to-2.delta
  %(prog)s runs/step-1000 runs/step-1010 step-1010.delta --json | jq .bytes"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("old", metavar="OLD", help="the state that receivers have")
    parser.add_argument("new", metavar="NEW", help="the state that they should get")
    parser.add_argument("out", metavar="OUT", help="the file to write; must not exist")
    add_checksums(parser)
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the delta, and print how large it is."""
    made = write_delta(
        arguments.old,
        arguments.new,
        arguments.out,
        verify_checksums=arguments.checksums,
        progress=arguments.progress,
    )
    show(made.to_json() if arguments.json else made.render())
    return FINE
