"""The reference of the lives gives the golden bytes, and decodes golden parts to the golden values."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests import recipes
from tests.adversary.lives import numerics
from tests.qtensor.test_golden import GOLDEN_RECIPES, Golden, golden_cases


@golden_cases
def test_the_reference_gives_the_golden_bytes(golden_dir: Path, name: str, case: str) -> None:
    facts, golden = recipes.facts(GOLDEN_RECIPES[name]), Golden(golden_dir, name)
    parts = {part: raw(value) for part, value in golden.parts(case).items()}
    own = numerics.encode(golden.input(case).float().numpy(), facts)
    assert {part: value.tobytes() for part, value in own.items()} == parts
    values = numerics.decode(own, facts)
    wanted = golden.decoded(case).numpy()
    assert np.array_equal(values.view(np.uint32)[~np.isnan(values)], wanted.view(np.uint32)[~np.isnan(wanted)])
    assert np.array_equal(np.isnan(values), np.isnan(wanted))


def raw(value) -> bytes:
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
