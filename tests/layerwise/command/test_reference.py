"""The config's reference: the example is a config, and the table of docs/ is that of the dataclasses."""

from __future__ import annotations

import re
from pathlib import Path

from layerwise.__main__ import ALGORITHMS
from layerwise.command.config import CalibrationKeys, DataKeys, ModelKeys
from layerwise.command.keys import keys_of
from layerwise.command.parsing import SECTIONS, parse
from layerwise.command.reference import example, table
from tests.docs.pages import page
from tests.layerwise.command.test_parsing import config

PAGE = page("calibrate_command.md")


def test_the_example_is_a_config_with_every_key() -> None:
    text = example(ALGORITHMS)
    short = parse(text, ALGORITHMS)
    assert short.calibration == CalibrationKeys()
    assert short.model == ModelKeys(path=Path("path/to/model"))
    every = parse(text.replace("#: ", ""), ALGORITHMS)  # every key written out
    assert every.data == short.data == DataKeys(path=Path("path/to/text.txt"))
    assert every.calibration == CalibrationKeys(checkpoint_dir=Path("path/to/state"))
    for section, kind in SECTIONS.items():
        part = text.partition(f"\n{section}:\n")[2]
        for name in keys_of(kind):
            assert re.search(rf"^  (#: )?{name}: ", part, re.MULTILINE), (section, name)
    for name, kind in ALGORITHMS.items():
        (told,) = re.findall(rf"^  #   {name}: .*\n(?:  #     .*\n)*", text, re.MULTILINE)  # a long one has more lines
        assert all(re.search(rf"\b{option}:\s", told) for option in keys_of(kind))
    assert max(map(len, text.splitlines())) <= 120


def test_the_table_of_the_page_is_that_of_the_config() -> None:
    assert table() in PAGE.text


def test_the_config_of_the_page_is_right() -> None:
    blocks = [block.text for block in PAGE.blocks if block.language == "yaml"]
    assert blocks
    for text in blocks:
        assert parse(text, ALGORITHMS).model.path.name
    assert config().recipe  # of the helper that other tests use
