"""Patterns of files by others: those that tools write are used, those that could take for ever are refused."""

from __future__ import annotations

import re

import pytest

from dcp_adapters.hf.files.patterns import bounded

USUAL = [
    r".*self_attn\.(q|k|v|o)_proj$",
    r"model\.layers\.\d+\.mlp\..*",
    r".*mlp\.experts\.[0-9]+\.(gate|up|down)_proj",
    r"^(?!.*lm_head).*proj$",
    r".*\.(?:q|k)_proj\b",
    r"model[.]layers[.][]*+(]x",
    r"(a|b)?\(\)+",
    "",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_what_tools_write_is_used(pattern: str) -> None:
    assert bounded(pattern, 100) == re.compile(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(.*)*x", "(a|a)*b", "((a*)b)+", "(?:x(y|z))+", "(a{1,9}){9}", "([+)]*)*", "(a?){50}"]
)
def test_repeats_of_repeats_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(pattern))} repeats what has repeats or choices"):
        bounded(pattern, 10)


def test_many_repeats_are_bounded_by_the_length_of_names() -> None:
    pattern = ".*a.*b.*c.*d"
    assert bounded(pattern, 100).match("xaxbxcxd")
    with pytest.raises(ValueError, match=r"can fit in 1e\+08 ways, which could take for ever in names like these"):
        bounded(pattern, 101)


@pytest.mark.parametrize("pattern", ["a?" * 40 + "a" * 40, "(?:a|aa)" * 40 + "b", "a*?" * 5])
def test_many_choices_are_refused_as_many_repeats_are(pattern: str) -> None:
    with pytest.raises(ValueError, match="ways, which could take for ever in names like these"):
        bounded(pattern, 100)


def test_what_is_no_pattern_is_an_error_of_re() -> None:
    with pytest.raises(re.error):
        bounded("(", 3)
