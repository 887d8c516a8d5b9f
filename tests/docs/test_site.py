"""The pages belong together: links lead somewhere, on GitHub and in the site; navigation and API are complete."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.messages import PACKAGES
from tests.docs.pages import DOCS, REPO, Page, pages

CONFIG = REPO / "mkdocs.yml"
# Where a module has the name of what it is for, the name is found in the module: `::: layerwise.calibrate.calibrate`.
ENTRY = re.compile(r"^::: (?P<path>(?P<package>\w+)\.(?:(?P<module>\w+)\.)?(?P<name>\w+))$", re.M)


@pytest.mark.parametrize("name", [*pages(), "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files_and_anchors(name: str) -> None:
    one = Page(REPO / name)
    for link in one.links:
        target, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        assert not re.match(r"[a-z]+:|/", link), link
        path = (one.path.parent / target).resolve() if target else one.path
        assert path.is_file(), f"{link}: the site has no page for a directory"
        assert path.is_relative_to(REPO), link
        if anchor and path.is_relative_to(DOCS / "api"):
            assert anchor in {entry["path"] for entry in ENTRY.finditer(Page(path).text)}, link
        elif anchor:
            assert anchor in Page(path).anchors, link


def test_links_that_are_defined_are_used_and_the_other_way_round() -> None:
    for one in pages().values():
        defined = {name.lower() for name in re.findall(r"^\[([^\]]+)\]: \S+$", one.prose, re.M)}
        text = re.sub(r"`[^`]*`|^\[[^\]]+\]: \S+$", "", one.prose, flags=re.M)
        used = {name.lower() for name in re.findall(r"\[[^\[\]]+\]\[([^\]]+)\]", text)}
        shortcuts = {name.lower() for name in re.findall(r"\[([^\[\]]+)\](?![\[(:])", text)}
        assert used <= defined, one.name
        assert defined <= used | shortcuts, one.name


def test_the_navigation_lists_every_page_once() -> None:
    text = CONFIG.read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text[text.index("\nnav:\n") :], re.M)
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_page_of_a_package_has_every_public_name_once(package: str) -> None:
    one = Page(DOCS / "api" / f"{package}.md")
    listed = [(match["package"], match["name"]) for match in ENTRY.finditer(one.text)]
    public = importlib.import_module(package).__all__
    assert sorted(listed) == sorted((package, name) for name in public)
    of_modules = {name for name in public if (REPO / package / f"{name}.py").is_file()}
    doubled = {
        match["name"]
        for match in ENTRY.finditer(one.text)
        if match["path"].endswith(f"{match['name']}.{match['name']}")
    }
    assert doubled == of_modules, "of two alike, MkDocs takes the module for the function"
    members = re.findall(r"^::: [\w.]+\.(\w+)\n +options:\n +members: \[(.+)\]$", one.text, re.M)
    for name, names in members:
        documented = getattr(importlib.import_module(package), name)
        for member in names.split(", "):
            assert getattr(documented, member).__doc__, f"{name}.{member}"


class Built(HTMLParser):
    """What a page of the site has: names of elements, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {str(found["id"])} if found.get("id") else set()
        self.classes |= {*str(found.get("class")).split()}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in {"script", "img", "iframe", "source"} and found.get("src"):
            self.loaded.append(str(found["src"]))
        if tag == "link" and found.get("rel") not in {"canonical", "prev", "next"}:
            self.loaded.append(str(found["href"]))


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("MkDocs is not installed (make docs installs it)")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    built = {path.relative_to(tmp_path).as_posix(): Built(path) for path in tmp_path.rglob("*.html")}
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert Page(path).anchors <= built[name].anchors, f"{name} has other anchors than GitHub makes"
    for package in PACKAGES:
        made = built[f"api/{package}.html"]
        assert {entry["path"] for entry in ENTRY.finditer(Page(DOCS / "api" / f"{package}.md").text)} <= made.anchors
        assert "doc-symbol-module" not in made.classes, "a module was taken for the function of its name"
        assert "doc-contents" in made.classes
    for name, one in built.items():
        if name == "404.html":  # is served from any depth, so its links begin at the root
            continue
        here = (tmp_path / name).parent
        for loaded in one.loaded:
            assert not re.match(r"(https?:)?//", loaded), f"{name} loads {loaded}"
            assert (here / loaded.partition("?")[0]).exists(), f"{name} loads {loaded}"
        for link in one.links:
            target, _, anchor = link.partition("#")
            if re.match(r"https?://", link):
                continue
            path = (here / target).resolve() if target else tmp_path / name
            assert path.exists(), f"{name}: {link}"
            if anchor and path.suffix == ".html" and not anchor.startswith("__"):
                assert anchor in built[path.relative_to(tmp_path).as_posix()].anchors, f"{name}: {link}"
