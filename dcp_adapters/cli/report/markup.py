"""HTML and SVG that can not be broken by what stands in it: text is escaped unless it is Markup, made by `tag`.

Names come from checkpoints, and checkpoints from anywhere.
"""

import html

from dcp_adapters.tables import printable

EMPTY = frozenset({"meta", "wbr", "rect", "line"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(element: str, /, *children: str, **attributes: object) -> Markup:
    """An element. Underscores in names of attributes are hyphens, a last one is dropped; None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in EMPTY and not children:
        return Markup(f"<{element}{written}>" if element in ("meta", "wbr") else f"<{element}{written}/>")
    return Markup(f"<{element}{written}>{joined(*children)}</{element}>")


def joined(*children: str) -> Markup:
    """One after the other."""
    return Markup("".join(map(text, children)))


def text(value: str) -> Markup:
    """Escaped, unless it is markup."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(printable(value), quote=True))


def short(name: str, length: int = 72) -> str:
    """A name with its middle left out where it is long."""
    if len(name) <= length:
        return name
    end = length * 2 // 3
    return f"{name[: length - end - 1]}\u2026{name[-end:]}"
