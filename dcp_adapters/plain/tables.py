"""Tables for people: through `rich` if it is installed, plain aligned text otherwise.

Colours appear on terminals only, and not if NO_COLOR is set or TERM is `dumb`. The cells come from checkpoints:
characters that control a terminal or change the direction of text are shown as a replacement character.
"""

import io
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence

WIDE = 1000  # columns of a file or a pipe, which should hold every name whole


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    style: Callable[[str, str], str] | None = None,
) -> str:
    """Set rows under a head, as text.

    Args:
        columns: the head.
        rows: a cell for each column.
        right: columns that are right-aligned.
        style: (column, cell) -> a style of `rich`, used on terminals with colours; None: no colours.
    """
    rows = [[sanitize(cell) for cell in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return _align(columns, rows, right)
    coloured = style is not None and _has_colours()
    grid = Table(box=None, pad_edge=False, header_style="bold" if coloured else "")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        looks = [style(*cell) if style is not None else "" for cell in zip(columns, row, strict=True)]
        # rich would take a plain string with [brackets] in it for markup, and leave that out
        grid.add_row(*(Text(cell, style=look) for cell, look in zip(row, looks, strict=True)))
    # A file or a pipe has no width: rich would fold names at 80 columns, and nobody could search for them.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    console = Console(file=io.StringIO(), width=width, force_terminal=coloured)
    with console.capture() as captured:
        console.print(grid)
    return _trim(captured.get())


def sanitize(words: str) -> str:
    """Replace control and format characters, and halves of surrogate pairs, in a text."""
    return "".join("\ufffd" if unicodedata.category(one) in ("Cc", "Cf", "Cs") else one for one in words)


def human_bytes(count: float) -> str:
    """Write a number of bytes with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB" if count < 1000 else f"{count:.0f} TiB"


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _align(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> str:
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    lines = [
        " ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        for line in (columns, *rows)
    ]
    return _trim("\n".join(lines))


def _trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
