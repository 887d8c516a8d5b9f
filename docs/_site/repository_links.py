"""Links of pages to files of the repository: on GitHub they open the file, in the site a page that shows it.

A page may link to any file by its relative path (`../tests/ranks.py`). The site holds only what is in docs/, so for
each file outside of it that some page links to, a page is made: Markdown as it is, a picture as it is, everything else
as text. Links of these pages are treated alike, but only as far as files that other pages show; further ones lose their
link and keep their text. Nothing here fetches anything, or asks which host the repository is on.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

SHOWN_UNDER = "repository"
PICTURES = {".png", ".svg", ".jpg"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml"}
# [text](target#anchor) and [name]: target#anchor
LINK = re.compile(
    r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<inline>[^()\s]+)\)|^(?P<name>\[[^\]]+\]:) (?P<target>\S+)$", re.M
)
FENCED = re.compile(r"^(`{3,}).*?^\1$", re.M | re.S)

_shown: dict[str, str] = {}  # path in the repository -> path in the site's sources


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each file outside of docs/ that a page links to."""
    docs = Path(config.docs_dir)
    _shown.clear()
    for page in files.documentation_pages():
        here = posixpath.join(docs.name, page.src_uri)
        for target in _targets(page.content_string):
            path = _in_repository(here, target)
            if path and not path.startswith(f"{docs.name}/") and path not in _shown:
                file = docs.parent / path
                if file.is_file():
                    _shown[path] = f"{SHOWN_UNDER}/{path}" + ("" if file.suffix in {".md", *PICTURES} else ".md")
    for path, shown in _shown.items():
        files.append(_made(config, docs.parent / path, path, shown))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links at the pages that were made."""
    docs = Path(config.docs_dir).name
    source = page.file.src_uri
    made = {shown: path for path, shown in _shown.items()}
    here = made.get(source, posixpath.join(docs, source))
    return _outside_code(markdown, lambda text: LINK.sub(lambda m: _relinked(m, here, source, docs, made), text))


def _relinked(match: re.Match[str], here: str, source: str, docs: str, made: dict[str, str]) -> str:
    target, hash_, anchor = (match["inline"] or match["target"]).partition("#")
    path = _in_repository(here, target)
    if path is None:
        return match[0]
    if path.startswith(f"{docs}/"):
        to = path.removeprefix(f"{docs}/")
        to += "/README.md" if (Path(path).is_dir()) else ""
    elif path in _shown:
        to = _shown[path]
    elif source in made:  # a file that no page of docs/ links to
        return match["text"].removeprefix("!")[1:-1] if match["inline"] else ""
    else:
        return match[0]  # MkDocs says that it is broken
    link = posixpath.relpath(to, posixpath.dirname(source)) + hash_ + anchor
    return f"{match['text']}({link})" if match["inline"] else f"{match['name']} {link}"


def _made(config: Any, file: Path, path: str, shown: str) -> File:
    if file.suffix in PICTURES:
        return File.generated(config, shown, abs_src_path=str(file))
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".md":
        fence = "`" * (3 + max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=0))
        text = f"{UNSEARCHED}# {path}\n\n{fence}{LANGUAGES.get(file.suffix, '')}\n{text}\n{fence}\n"
    return File.generated(config, shown, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def _targets(markdown: str) -> list[str]:
    found = LINK.finditer(_outside_code(markdown, lambda text: text, code=lambda _: ""))
    return [(match["inline"] or match["target"]).partition("#")[0] for match in found]


def _in_repository(here: str, target: str) -> str | None:
    """The path of a link's target from the repository's root; None for a link to somewhere else, or within the page."""
    if not target or re.match(r"[a-z]+:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return None if path.startswith("..") else path


def _outside_code(markdown: str, change: Callable[[str], str], code: Callable[[str], str] = str) -> str:
    """`change` of every stretch of text that is no code, and `code` of every block of code."""
    done, parts = 0, []
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[done : block.start()]), code(block[0])]
        done = block.end()
    return "".join([*parts, change(markdown[done:])])
