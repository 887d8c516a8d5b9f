"""The command line, `python -m dcp_adapters COMMAND ...`: lists the commands, and runs one.

Exit status: 0, all is well; 1, something was found (an error by verify, a difference by diff or digest); 2, the command
could not do its work (no such path, no checkpoint, an unknown recipe): one message on stderr.
"""

import argparse
import importlib
import os
import pickle
import sys
from collections.abc import Sequence
from typing import NoReturn

from dcp_adapters.cli.printing import FAILED, PROGRAM

COMMANDS = {  # name: its module in this folder, what the list of commands says of it
    "inspect": ("inspect", "list tensors, formats and sizes"),
    "report": ("report.command", "write a page with pictures"),
    "verify": ("verify", "check that nothing is missing or damaged"),
    "check": ("check", "what is it, and would an engine misread it?"),
    "digest": ("digest", "one value for all weights"),
    "diff": ("diff", "compare two checkpoints"),
    "convert": ("convert", "write a copy in another format"),
    "export": ("export", "write what inference engines load"),
    "delta": ("deltas.delta", "write what changed between two states"),
    "apply": ("deltas.apply", "write the state that deltas lead to"),
}
ABOUT = """\
Look at, check, digest, compare, convert, patch and export PyTorch distributed checkpoints with quantized tensors in
them. A CHECKPOINT is a directory with a .metadata file, as torch.distributed.checkpoint.save writes it; all commands
but export also take a Hugging Face directory of safetensors, dense or quantized.
One process suffices, whatever number of ranks wrote it; no model is needed, and no GPU."""
EXAMPLES = """\
examples:
  %(prog)s inspect runs/step-1000                    what is in it?
  %(prog)s report runs/step-1000 --against dense     a page to look at: how well are the weights kept?
  %(prog)s verify runs/step-1000                     is it whole and undamaged?
  %(prog)s check exported --against original         would an engine misread it?
  %(prog)s digest runs/step-1000 exported            are these the same weights?
  %(prog)s diff runs/step-1000 runs/step-2000        what changed, and by how much?
  %(prog)s convert runs/step-1000 out --to nvfp4     the same weights in another format
  %(prog)s export runs/step-1000 out --config model  a directory that inference engines load
  %(prog)s delta exported-1 exported-2 1-to-2.delta  what changed, byte for byte, in a small file
  %(prog)s apply exported-1 1-to-2.delta out         exported-2 again

exit status: 0 fine; 1 something was found (an error, a difference); 2 the command could not do its work"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. `argv` is without the program's name."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = parser(given).parse_args(given)
        refuse_unencodable(arguments)
        status = int(arguments.run(arguments))
        # an error of the last write must be caught here, not at Python's end
        sys.stdout.flush()
        return status
    # the reader of our output has seen enough (`| head`); Python flushes once more at its end, which would raise again
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, ValueError, EOFError, ImportError, pickle.PickleError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return FAILED


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as any other failure: a message of two lines, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n(see {self.prog} --help)")


def parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Describe the whole command line, and of the commands in full those that the arguments name."""
    whole = _Parser(
        prog=PROGRAM,
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        # what other commands need is not imported, so that each starts fast
        if name not in given:
            subparsers.add_parser(name, help=summary)
            continue
        command = importlib.import_module(f"dcp_adapters.cli.{module}")
        own = subparsers.add_parser(
            name,
            help=summary,
            description=command.ABOUT,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(own)
        own.set_defaults(run=command.run)
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
