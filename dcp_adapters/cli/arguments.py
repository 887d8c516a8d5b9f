"""The commands and their arguments, as argparse reads them; main.py does what they ask for."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dcp_adapters.cli.help_texts import HELP, MAIN
from dcp_adapters.format.recipe_names import DTYPES, short_names
from dcp_adapters.gguf.plan import GGUF
from dcp_adapters.hf.layouts.layout import LAYOUTS
from dcp_adapters.hf.models.adapters import ADAPTERS

PROGRAM = "python -m dcp_adapters"


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as any other failure: a message of two lines, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n(see {self.prog} --help)")


def parser(commands: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """Of the whole command line; `run` of what it returns is the function of the command, in this order in the help."""
    whole = _Parser(
        prog=PROGRAM,
        description=MAIN.about,
        epilog=MAIN.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, run in commands.items():
        text = HELP[name]
        own = subparsers.add_parser(
            name,
            help=text.summary,
            description=text.about,
            epilog=text.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _ARGUMENTS[name](own)
        own.set_defaults(run=run)
    return whole


def refuse_unencodable(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a text that no path and no name can be; a shell gives none, other programs may."""
    for value in vars(arguments).values():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            try:
                held = os.fsencode(text)
            except UnicodeEncodeError as error:
                raise ValueError(f"{text!r} is no path and no name: {error.reason}") from None
            if b"\0" in held:
                raise ValueError(f"{text!r} is no path and no name: it holds a NUL")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")
    parser.add_argument("--match", metavar="GLOB", action="append", default=[], help="only these names (repeatable)")
    _add_json(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")
    parser.add_argument("--against", metavar="DENSE", help="the checkpoint whose values are right")
    parser.add_argument("--match", metavar="GLOB", action="append", default=[], help="only these names (repeatable)")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="the file to write (default: CHECKPOINT-report.html here)"
    )
    _add_json(parser)
    _add_progress(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")
    parser.add_argument("--deep", action="store_true", help="also compare masters, histories and scales with payloads")
    parser.add_argument(
        "--own-scales",
        action="store_true",
        help="--deep, where no scale is calibrated, converted or imported: one its values do not ask for is an error",
    )
    _add_json(parser)
    _add_progress(parser)


def _add_digest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a checkpoint or a Hugging Face directory")
    parser.add_argument("b", metavar="B", nargs="?", help="what is compared with it")
    parser.add_argument("--prefix", metavar="NAME.", help="what the names of the weights begin with, in checkpoints")
    _add_json(parser)
    _add_progress(parser)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="the reference")
    parser.add_argument("b", metavar="B", help="what is compared with it")
    _add_json(parser)
    _add_progress(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
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
    _add_checksums(parser)
    _add_json(parser)
    _add_progress(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT", help="the directory of the checkpoint")
    parser.add_argument("destination", metavar="OUT", help="the directory to write; must not exist, or be empty")
    layouts = sorted([*LAYOUTS, GGUF.name])
    parser.add_argument("--layout", choices=layouts, default="compressed-tensors", help="default: %(default)s")
    parser.add_argument("--like", metavar="FILE", help="for gguf: a GGUF file of the same model, in any type")
    parser.add_argument("--config", metavar="PATH", help="the model's directory, or its config.json; engines need it")
    parser.add_argument("--rest", metavar="PATH", help="where to take tensors from that the checkpoint does not have")
    parser.add_argument("--prefix", metavar="NAME.", help="what the names of the weights begin with, in the checkpoint")
    parser.add_argument(
        "--fused-scales",
        choices=["raise", "requantize"],
        help="where linears that engines fuse have different NVFP4 global scales: fail (the default), or round again",
    )
    parser.add_argument(
        "--adapters",
        choices=ADAPTERS,
        default="raise",
        help="where the checkpoint has adapters of peft: fail (the default), or take the model below them",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of a file; default: 5GB")
    _add_checksums(parser)
    _add_progress(parser)


def _add_delta(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="the state that receivers have")
    parser.add_argument("new", metavar="NEW", help="the state that they should get")
    parser.add_argument("out", metavar="OUT", help="the file to write; must not exist")
    _add_checksums(parser)
    _add_json(parser)
    _add_progress(parser)


def _add_apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="the state to start from")
    parser.add_argument("deltas", metavar="DELTA", nargs="+", help="files, in the order in which they were made")
    parser.add_argument("out", metavar="OUT", help="the directory to write; must not exist, or be empty")
    _add_json(parser)
    _add_progress(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_checksums(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-checksums",
        dest="checksums",
        action="store_false",
        help="do not compare what is read with the checkpoint's checksums",
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")


_ARGUMENTS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "inspect": _add_inspect,
    "report": _add_report,
    "verify": _add_verify,
    "digest": _add_digest,
    "diff": _add_diff,
    "convert": _add_convert,
    "export": _add_export,
    "delta": _add_delta,
    "apply": _add_apply,
}
