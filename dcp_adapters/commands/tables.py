"""Tables for people: through `rich` where it is installed, plain aligned text otherwise."""

import io
import shutil
import sys
from collections.abc import Sequence

__all__ = ["human_bytes", "table"]

WIDE = 1000  # columns where nobody looks: a file or a pipe should hold every name whole


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Rows under a head, as text; the columns in `right` are right-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return _plain(columns, rows, right)
    grid = Table(box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))  # Text: a name with [brackets] is no markup
    console = Console(file=io.StringIO(), width=shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE)
    with console.capture() as captured:
        console.print(grid)
    return _trimmed(captured.get())


def human_bytes(count: float) -> str:
    """A number of bytes with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB" if count < 1000 else f"{count:.0f} TiB"


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> str:
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    lines = [
        " ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        for line in (columns, *rows)
    ]
    return _trimmed("\n".join(lines))


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
