"""The command line: python -m dcp_adapters inspect | report | verify | diff | convert | export CHECKPOINT ...

Arguments in, text or JSON out; the work is done in a module a command. Exit status: 0, all is well; 1, something was
found (an error by verify, a difference by diff); 2, the command could not do its work (no such path, no checkpoint, an
unknown recipe): one message on stderr.
"""

import argparse
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from dcp_adapters.commands.convert_checkpoint import convert_checkpoint, plan_conversion
from dcp_adapters.commands.diff import diff
from dcp_adapters.commands.inspect_checkpoint import inspect_checkpoint
from dcp_adapters.commands.progress import Advance, progress
from dcp_adapters.commands.recipe_names import DTYPES, SHORT_NAMES, recipe_label, target_named
from dcp_adapters.commands.report.measure import measure_checkpoint
from dcp_adapters.commands.report.page import page
from dcp_adapters.commands.stored import StoredCheckpoint, checkpoint_directory
from dcp_adapters.commands.tables import human_bytes, table
from dcp_adapters.hf.export import export_hf
from dcp_adapters.hf.layout import LAYOUTS
from dcp_adapters.verification.verify import verify

__all__ = ["main"]

PROGRAM = "python -m dcp_adapters"
FINE, FOUND, FAILED = 0, 1, 2
VERIFY_FORMAT = "dcp_adapters.verify/1"

MAIN_HELP = """\
Look at, check, compare, convert and export PyTorch distributed checkpoints with quantized tensors in them.
A CHECKPOINT is a directory with a .metadata file, as torch.distributed.checkpoint.save writes it.
One process suffices, whatever number of ranks wrote it; no model is needed, and no GPU."""
MAIN_EXAMPLES = """\
examples:
  %(prog)s inspect runs/step-1000                    what is in it?
  %(prog)s report runs/step-1000 --against dense     a page to look at: how well are the weights kept?
  %(prog)s verify runs/step-1000                     is it whole and undamaged?
  %(prog)s diff runs/step-1000 runs/step-2000        what changed, and by how much?
  %(prog)s convert runs/step-1000 out --to nvfp4     the same weights in another format
  %(prog)s export runs/step-1000 out --config model  a directory that inference engines load

exit status: 0 fine; 1 something was found (an error, a difference); 2 the command could not do its work"""
INSPECT_HELP = """\
List the tensors of a checkpoint with their formats and sizes, and the totals for each format.
Reads the description only, no tensor data, so it is quick for checkpoints of any size."""
INSPECT_EXAMPLES = """\
examples:
  %(prog)s runs/step-1000
  %(prog)s runs/step-1000 --match 'model.layers.0.*'
  %(prog)s runs/step-1000 --json | jq .total.bytes_per_parameter"""
REPORT_HELP = """\
Write one HTML page about a checkpoint: sizes, quantization error by layer, histograms of scales, outlier channels,
saturated elements and NaN, and what each tensor costs to write. The page loads nothing, and docs/report.md says how to
read it. --against names the checkpoint whose values are right; tensors are matched by name, whatever number of ranks
wrote either, and without it there is no error to show. All data are read, one tensor at a time."""
REPORT_EXAMPLES = """\
examples:
  %(prog)s runs/step-1000 --against dense            writes step-1000-report.html
  %(prog)s runs/step-1000 -o page.html
  %(prog)s runs/step-1000 --against dense --json | jq '.tensors[] | [.snr_db, .name]'"""
VERIFY_HELP = """\
Read all of a checkpoint and check it: files missing or cut short, checksums, the manifest against what is stored.
Exit status 1 if there is any error; warnings alone leave it 0."""
VERIFY_EXAMPLES = """\
examples:
  %(prog)s runs/step-1000
  %(prog)s runs/step-1000 && rm -r runs/step-0500"""
DIFF_HELP = """\
Compare two checkpoints tensor by tensor. Tensors are matched by name, whatever number of ranks wrote them; a quantized
one is compared with a dense one, or with one of another recipe, by its dequantized values. For each tensor that
differs: how many bytes, the largest absolute error, the relative error (Frobenius norm) and the signal-to-noise ratio
of B, with A as the reference. One tensor of each is in memory at a time. Exit status 1 if anything differs."""
DIFF_EXAMPLES = """\
examples:
  %(prog)s saved-by-8-ranks saved-by-2-ranks
  %(prog)s dense quantized                           how much did quantizing cost?"""
CONVERT_HELP = """\
Write a copy of SRC with tensors in another format: from recipe to recipe, from quantized to dense, from dense to
quantized. Without --include all quantized tensors are converted; with it the tensors that match, dense ones too (2 dims
or more; dense tensors are quantized but never cast to another dtype). Everything else, optimizer state for example, is
copied byte for byte. One tensor is in memory at a time. DST must not exist, and appears only when it is complete."""
CONVERT_EXAMPLES = """\
examples:
  %(prog)s step-1000 out --to bfloat16                      quantized weights to dense ones
  %(prog)s step-1000 out --to nvfp4 --exclude '*lm_head*'   another recipe
  %(prog)s dense out --to mxfp8 --include 'model.layers.*.weight' --exclude '*norm*'
  %(prog)s step-1000 out --to mxfp8 --option blocks=square --option scale_rounding=floor"""
EXPORT_HELP = """\
Write the weights of a checkpoint as a Hugging Face directory that inference engines load: safetensors with the very
bytes of the checkpoint, and the JSON that tells of them. OUT must not exist, and appears only when it is complete. One
file is in memory at a time."""
EXPORT_EXAMPLES = """\
examples:
  %(prog)s runs/step-1000 out --config model                 vLLM, SGLang, transformers
  %(prog)s runs/step-1000 out --config model --layout modelopt
  %(prog)s calibrated out --config model --rest model        the rest from the dense model"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `argv` is without the program's name."""
    try:
        arguments = _parser().parse_args(argv)
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python flushes once more at its end
        return FAILED
    except (OSError, ValueError, EOFError, pickle.PickleError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return FAILED


# -- commands ----------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    found = inspect_checkpoint(StoredCheckpoint(arguments.checkpoint), arguments.match)
    _show(found.to_json() if arguments.json else found.render())
    return FINE


def _report(arguments: argparse.Namespace) -> int:
    checkpoint = StoredCheckpoint(arguments.checkpoint)
    against = None if arguments.against is None else StoredCheckpoint(arguments.against)
    target = None
    if arguments.output is not None or not arguments.json:
        target = Path(arguments.output or f"{checkpoint.path.resolve().name}-report.html")
        if target.is_dir() or not target.parent.is_dir():  # now, not when all has been measured
            raise ValueError(f"{target}: expected a file in a directory that exists")
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    with progress("measuring", total, enabled=arguments.progress) as advance:
        found = measure_checkpoint(checkpoint, against, advance=advance)
    if target is not None:
        target.write_text(page(found), encoding="utf-8")
    _show(found.to_json() if arguments.json else f"{target}: {len(found.tensors)} tensors")
    return FINE


def _verify(arguments: argparse.Namespace) -> int:
    directory = checkpoint_directory(arguments.checkpoint)
    total = sum(file.stat().st_size for file in directory.glob("*.distcp"))
    with progress("verifying", total, enabled=arguments.progress) as advance:
        report = verify(directory, progress=_steps(advance))
    findings = [
        {"severity": found.severity, "file": found.file, "entry": found.entry, "message": found.message}
        for found in report.findings
    ]
    counts = {name: getattr(report, name) for name in ("tensors", "chunks", "bytes", "checksums")}
    errors = sum(found["severity"] == "error" for found in findings)
    if arguments.json:
        _show({"format": VERIFY_FORMAT, "checkpoint": arguments.checkpoint, **counts, "findings": findings})
        return FOUND if errors else FINE
    if findings:
        keys = ("severity", "file", "entry", "message")
        _show(table(keys, [[str(found[key] or "-") for key in keys] for found in findings]) + "\n")
    looked_at = f"{counts['tensors']} tensors, {counts['chunks']} chunks, {human_bytes(counts['bytes'])}"
    verdict = f"{errors} errors, {len(findings) - errors} warnings" if findings else "no errors"
    _show(f"{verdict} ({looked_at}, {counts['checksums']} checksums)")
    return FOUND if errors else FINE


def _diff(arguments: argparse.Namespace) -> int:
    a, b = StoredCheckpoint(arguments.a), StoredCheckpoint(arguments.b)
    total = sum(tensor.nbytes for tensor in a.tensors.values())
    with progress("comparing", total, enabled=arguments.progress) as advance:
        found = diff(a, b, advance=advance)
    _show(found.to_json() if arguments.json else found.render())
    return FOUND if found.differences else FINE


def _convert(arguments: argparse.Namespace) -> int:
    to = target_named(arguments.to, _options(arguments.option))
    source = StoredCheckpoint(arguments.source, check=True)
    plan = plan_conversion(source.tensors, to, arguments.include, arguments.exclude)
    for pattern in plan.idle:
        print(f"{PROGRAM}: warning: --exclude {pattern} matches no tensor", file=sys.stderr)
    total = sum(tensor.nbytes for tensor in source.tensors.values()) + sum(map(source.blob_size, source.blobs))
    with progress("converting", total, enabled=arguments.progress) as advance:
        convert_checkpoint(source, arguments.destination, plan, advance=advance)
    name = str(to).removeprefix("torch.") if isinstance(to, torch.dtype) else recipe_label(to)
    copied = len(source.tensors) - len(plan.changes) + len(source.blobs)
    _show(f"{arguments.destination}: {len(plan.changes)} tensors converted to {name}, {copied} entries copied")
    return FINE


def _export(arguments: argparse.Namespace) -> int:
    out = export_hf(
        arguments.source,
        arguments.destination,
        layout=arguments.layout,
        config=arguments.config,
        rest=arguments.rest,
        prefix=arguments.prefix,
        fused_scales=arguments.fused_scales,
        max_shard_size=arguments.max_shard_size,
        progress=arguments.progress,
    )
    files = sorted(out.glob("*.safetensors"))
    total = human_bytes(sum(file.stat().st_size for file in files))
    _show(f"{out}: {total} in {len(files)} file{'s' if len(files) > 1 else ''}, layout {arguments.layout}")
    return FINE


def _steps(advance: Advance) -> Callable[[int, int], None]:
    """`advance`, told the bytes since the last time, for work that reports all of them so far."""
    before = 0

    def report(done: int, _total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return report


def _options(texts: Sequence[str]) -> dict[str, str]:
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"--option {text}: expected KEY=VALUE, for example blocks=square")
        options[key] = value
    return options


def _show(result: Any) -> None:
    print(result if isinstance(result, str) else json.dumps(result, indent=2, allow_nan=False))


# -- arguments ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as any other failure: a message of two lines, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n(see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=MAIN_HELP,
        epilog=MAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_inspect(_command(commands, "inspect", "list tensors, formats and sizes", (INSPECT_HELP, INSPECT_EXAMPLES)))
    _add_report(_command(commands, "report", "write a page with pictures", (REPORT_HELP, REPORT_EXAMPLES)))
    _add_verify(
        _command(commands, "verify", "check that nothing is missing or damaged", (VERIFY_HELP, VERIFY_EXAMPLES))
    )
    _add_diff(_command(commands, "diff", "compare two checkpoints", (DIFF_HELP, DIFF_EXAMPLES)))
    _add_convert(_command(commands, "convert", "write a copy in another format", (CONVERT_HELP, CONVERT_EXAMPLES)))
    _add_export(_command(commands, "export", "write what inference engines load", (EXPORT_HELP, EXPORT_EXAMPLES)))
    return parser


def _command(commands: Any, name: str, summary: str, texts: tuple[str, str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=texts[0],
        epilog=texts[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")
    parser.add_argument("--match", metavar="GLOB", action="append", default=[], help="only these names (repeatable)")
    _add_json(parser)
    parser.set_defaults(run=_inspect)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")
    parser.add_argument("--against", metavar="DENSE", help="the checkpoint whose values are right")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="the file to write (default: CHECKPOINT-report.html here)"
    )
    _add_json(parser)
    _add_progress(parser)
    parser.set_defaults(run=_report)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")
    _add_json(parser)
    _add_progress(parser)
    parser.set_defaults(run=_verify)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="the reference")
    parser.add_argument("b", metavar="B", help="what is compared with it")
    _add_json(parser)
    _add_progress(parser)
    parser.set_defaults(run=_diff)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    globs: dict[str, Any] = {"metavar": "GLOB", "action": "extend", "nargs": "+", "default": []}
    parser.add_argument("source", metavar="SRC", help="the checkpoint to convert")
    parser.add_argument("destination", metavar="DST", help="the directory to write; must not exist")
    names = f"{', '.join(SHORT_NAMES)}, the name of a recipe's type, or {', '.join(DTYPES)}"
    parser.add_argument("--to", metavar="FORMAT", required=True, help=names)
    parser.add_argument("--include", **globs, help="convert the tensors with these names (default: all quantized ones)")
    parser.add_argument("--exclude", **globs, help="leave the tensors with these names as they are")
    parser.add_argument(
        "--option", metavar="KEY=VALUE", action="append", default=[], help="a field of the recipe (repeatable)"
    )
    _add_progress(parser)
    parser.set_defaults(run=_convert)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT", help="the directory of the checkpoint")
    parser.add_argument("destination", metavar="OUT", help="the directory to write; must not exist")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="compressed-tensors", help="default: %(default)s")
    parser.add_argument("--config", metavar="PATH", help="the model's directory, or its config.json")
    parser.add_argument("--rest", metavar="PATH", help="where to take tensors from that the checkpoint does not have")
    parser.add_argument("--prefix", metavar="NAME.", help="what the names of the weights begin with, in the checkpoint")
    parser.add_argument(
        "--fused-scales",
        choices=["raise", "requantize"],
        default="raise",
        help="where linears that engines fuse have different NVFP4 global scales: fail, or round them again",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a file; default: %(default)s")
    _add_progress(parser)
    parser.set_defaults(run=_export)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")
