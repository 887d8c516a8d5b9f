"""The pages of the documentation as a test sees them: their code, headings, links, and one way to run the code.

The ```python blocks of a page are run in order in one namespace, which holds what the page says is yours
(`build_model`, `path`, ...). A line `...  # train` stands for code of the reader; whoever runs the page says what runs
in its place, so none is passed over unnoticed. A block that cannot run has a comment on the line above its fence:

    <!-- not run: needs a CUDA device -->

tests/docs/test_code.py counts these. Nothing here imports torch or MkDocs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent.parent
DOCS = REPO / "docs"

FENCED = re.compile(r"^(?P<ticks>`{3,})(?P<language>\w*)\n(?P<text>.*?)^(?P=ticks)$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->\n\Z")
DOTS = re.compile(r"^(?P<indent> *)\.\.\.(?: +#.*)?$", re.M)
HEADING = re.compile(r"^#{1,6} (?P<text>.+?) *#*$", re.M)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<inline>[^()\s]+)\)|^\[[^\]]+\]: (?P<target>\S+)$", re.M)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block; `line` is the number of lines above its text, `not_run` the reason, "" for one that runs."""

    language: str
    text: str
    line: int
    not_run: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return self.path.relative_to(REPO).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text with nothing in its blocks."""
        return FENCED.sub("", self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in FENCED.finditer(self.text):
            marked = NOT_RUN.search(self.text[: match.start()])
            found.append(
                Block(
                    language=match["language"],
                    text=match["text"],
                    line=self.text[: match.start("text")].count("\n"),
                    not_run=marked["reason"] if marked else "",
                )
            )
        return found

    @property
    def python(self) -> list[Block]:
        """The blocks that run."""
        return [block for block in self.blocks if block.language == "python" and not block.not_run]

    @cached_property
    def headings(self) -> list[str]:
        return [match["text"] for match in HEADING.finditer(self.prose)]

    @cached_property
    def anchors(self) -> set[str]:
        """As GitHub makes them; of two that are alike the second ends in -1."""
        found: set[str] = set()
        for heading in self.headings:
            slug = first = slug_of(heading)
            count = 0
            while slug in found:
                count += 1
                slug = f"{first}-{count}"
            found.add(slug)
        return found

    @cached_property
    def links(self) -> list[str]:
        return [match["inline"] or match["target"] for match in LINK.finditer(self.prose)]

    def run(
        self,
        names: dict[str, Any],
        *,
        dots: Sequence[str] = (),
        only: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """The blocks, or those of these numbers, in `names`; `dots` are the lines that run for `...`, all of them."""
        left = list(dots)
        for number, block in enumerate(self.python):
            if only is not None and number not in only:
                continue

            def replaced(match: re.Match[str]) -> str:
                assert left, f"{self.name}: nobody says what runs in the place of {match[0]!r}"
                return match["indent"] + left.pop(0)

            text = DOTS.sub(replaced, block.text)
            # Empty lines in front, so that a traceback shows the line of the page.
            exec(compile("\n" * block.line + text, str(self.path), "exec", dont_inherit=True), names)
        assert not left, f"{self.name}: no `...` is left for {left}"
        return names


def page(name: str) -> Page:
    """A page of docs/, or the README."""
    return Page(REPO / name if name == "README.md" else DOCS / name)


def pages() -> dict[str, Page]:
    """All pages of docs/, and the README, by their path in the repository."""
    found = [Page(REPO / "README.md"), *(Page(path) for path in sorted(DOCS.rglob("*.md")))]
    return {one.name: one for one in found}


def slug_of(heading: str) -> str:
    """What GitHub makes of a heading: its text in lower case, words and hyphens alone."""
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def namespace(**given: Any) -> dict[str, Any]:
    """What a page begins with."""
    return {"__name__": __name__, **given}
