"""The command `convert`: convert/ writes the copy."""

import argparse
from collections.abc import Sequence
from typing import Any

from dcp_adapters.cli.arguments import add_checksums, add_json, add_progress, open_stored
from dcp_adapters.cli.printing import FINE, show, warn
from dcp_adapters.convert.convert_checkpoint import convert_checkpoint, plan_conversion
from dcp_adapters.plain.progress_bar import progress_bar
from dcp_adapters.records.recipe_names import DTYPES, find_target, short_names

ABOUT = """\
Write a copy of SRC with tensors in another format: from recipe to recipe, from quantized to dense, from dense to
quantized. Without --include all quantized tensors are converted; with it the tensors that match, dense ones too (2 dims
or more; dense tensors are quantized but never cast to another dtype). Everything else, optimizer state for example, is
copied byte for byte. From recipe to recipe values stay as they are where the new format can hold them, and are rounded
once more where it cannot: the tensors that were rounded are listed with their errors. One tensor is in memory at a
time, and is compared with its checksums, if SRC has some. DST must not exist, or be empty, and appears only when it is
complete."""
EXAMPLES = """\
examples:
  %(prog)s step-1000 out --to bfloat16                      quantized weights to dense ones
  %(prog)s step-1000 out --to nvfp4 --exclude '*lm_head*'   another recipe
  %(prog)s dense out --to mxfp8 --include 'model.layers.*.weight' --exclude '*norm*'
  %(prog)s step-1000 out --to mxfp8 --option blocks=square --option scale_rounding=floor
  %(prog)s step-1000 out --to nvfp4 --json | jq '.tensors[] | [.relative, .name]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    globs: dict[str, Any] = {"metavar": "GLOB", "action": "extend", "nargs": "+", "default": []}
    parser.add_argument("source", metavar="SRC", help="the checkpoint to convert")
    parser.add_argument("destination", metavar="DST", help="the directory to write; must not exist, or be empty")
    names = f"{', '.join(short_names())}, the name of a recipe's type, or {', '.join(DTYPES)}"
    parser.add_argument("--to", metavar="FORMAT", required=True, help=names)
    parser.add_argument("--include", **globs, help="convert the tensors with these names (default: all quantized ones)")
    parser.add_argument("--exclude", **globs, help="leave the tensors with these names as they are")
    parser.add_argument(
        "--option", metavar="KEY=VALUE", action="append", default=[], help="a field of the recipe (repeatable)"
    )
    add_checksums(parser)
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the copy, and print what was rounded."""
    to = find_target(arguments.to, _options(arguments.option))
    source = open_stored(arguments.source, check=arguments.checksums)
    plan = plan_conversion(source.entries, to, arguments.include, arguments.exclude)
    for pattern in plan.idle:
        warn(f"--exclude {pattern} matches no tensor")
    total = sum(tensor.nbytes for tensor in source.entries.values()) + sum(map(source.blob_size, source.blobs))
    with progress_bar("converting", total, enabled=arguments.progress) as advance:
        done = convert_checkpoint(source, arguments.destination, plan, advance=advance)
    show(done.to_json() if arguments.json else done.render())
    return FINE


def _options(texts: Sequence[str]) -> dict[str, str]:
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"--option {text}: expected KEY=VALUE, for example blocks=square")
        options[key] = value
    return options
