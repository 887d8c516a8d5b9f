"""Tables and numbers of the page. Each table has a bounded number of rows and says how many it leaves out."""

from collections.abc import Sequence

from dcp_adapters.cli.report.markup import Markup, joined, short, tag

TOP = 12


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), more: int = 0) -> Markup:
    """Rows under a head; `more` are not shown."""
    side = ["r" if head in right else None for head in heads]
    head = tag("tr", *(tag("th", head, class_=where) for head, where in zip(heads, side, strict=True)))
    body = [tag("tr", *(tag("td", cell, class_=where) for cell, where in zip(row, side, strict=True))) for row in rows]
    note = tag("p", f"and {more:,} more", class_="soft small") if more > 0 else ""
    return joined(tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll"), note)


def name(value: str) -> Markup:
    """The name of a tensor, at most a line or two of it; all of it in a tooltip, as far as that goes."""
    return tag("span", breakable(short(value)), class_="name", title=short(value, 300) if len(value) > 72 else None)


def breakable(value: str) -> Markup:
    """A name that may be broken after its dots."""
    *words, last = value.split(".")
    return joined(*(joined(f"{word}.", tag("wbr")) for word in words), last)


def number(value: int | None, *, bad: bool = False) -> str:
    """A count: 0 in grey, anything else plain or, where there should be none, in colour."""
    if value is None:
        return tag("span", "-", class_="soft")
    return tag("span", f"{value:,}", class_="soft" if not value else "alarm" if bad else None)


def meter(part: float, *, hot: bool = False) -> Markup:
    """A bar for a share of 1."""
    width = f"width:{100 * min(max(part, 0.0), 1.0):.3g}%"
    return tag("span", tag("i", class_="hot" if hot else None, style=width), class_="meter")


def share(part: float, whole: float) -> str:
    """In percent; a part is never shown as 0."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    return "< 0.001%" if 0 < percent < 0.001 else f"{percent:.3g}%"


def count(number: float) -> str:
    """A number in three digits and a word."""
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if word == "k" else size)
            return f"{scaled:.3g}{word}" if scaled < 999.5 else f"{scaled:.0f}{word}"
    return f"{number:,.0f}"


def tensors(number: int) -> str:
    """So many tensors, in words."""
    return "1 tensor" if number == 1 else f"{number:,} tensors"
