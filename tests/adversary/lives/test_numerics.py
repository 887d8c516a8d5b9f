"""The reference of the lives gives the golden bytes, and decodes golden parts to the golden values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import recipes
from tests.adversary.lives import numerics
from tests.qtensor.recipes_under_test import raw
from tests.qtensor.test_golden import GOLDEN_RECIPES, Golden, golden_cases
from tests.qtensor.vectors.test_vectors import read


@golden_cases
def test_the_reference_gives_the_golden_bytes(golden_dir: Path, name: str, case: str) -> None:
    facts, golden = recipes.facts(GOLDEN_RECIPES[name]), Golden(golden_dir, name)
    own = numerics.encode(golden.input(case).float().numpy(), facts)
    wanted = {part: raw(value).numpy().tobytes() for part, value in golden.parts(case).items()}
    assert {part: value.tobytes() for part, value in own.items()} == wanted
    values, decoded = numerics.decode(own, facts), golden.decoded(case).numpy()
    assert np.array_equal(np.isnan(values), np.isnan(decoded))
    numbers = ~np.isnan(decoded)
    assert np.array_equal(values[numbers].view(np.uint32), decoded[numbers].view(np.uint32))


@pytest.mark.parametrize(("name", "file"), [("int8_row", "int8_row"), ("nf4_32", "nf4_32"), ("nf4", "nf4_64")])
def test_the_reference_gives_the_bytes_of_published_vectors(name: str, file: str) -> None:
    (facts,) = (each for each in recipes.TABLE if each.name == name)
    _, cases = read(file)
    for case, tensors in cases.items():
        own = numerics.encode(tensors["input"].float().numpy(), facts)
        wanted = {part: raw(tensors[part]).numpy().tobytes() for part in own}
        assert {part: value.tobytes() for part, value in own.items()} == wanted, case
