"""Arguments that several commands have, and the checkpoint that one of them names."""

import argparse

from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.checkpoint import StoredCheckpoint


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint that the command looks at."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory")


def add_match(parser: argparse.ArgumentParser) -> None:
    """Add patterns of names."""
    parser.add_argument("--match", metavar="GLOB", action="append", default=[], help="only these names (repeatable)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the choice between text and JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_checksums(parser: argparse.ArgumentParser) -> None:
    """Add the choice not to compare checksums."""
    parser.add_argument(
        "--no-checksums",
        dest="checksums",
        action="store_false",
        help="do not compare what is read with the checkpoint's checksums",
    )


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Add the choice to see no progress bar."""
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")


def open_stored(path: str, *, check: bool = False) -> Stored:
    """Open a checkpoint (compared with its checksums as it is read, with `check`), or a Hugging Face directory."""
    return StoredDirectory(path) if is_directory(path) else StoredCheckpoint(path, check=check)
