"""The main jobs stay easy to follow: how many files they enter, and how many calls lead from one into another."""

from __future__ import annotations

import pytest

from tests.hops import table

MOST = {  # job: files, hops
    "an optimizer step": (18, 48),
    "a save": (25, 100),
    "a load": (40, 136),
    "a converting load": (52, 296),
}


@pytest.mark.budget
@pytest.mark.filterwarnings("ignore")  # torch's, of a single process and of a directory that is saved into twice
def test_steps_saves_and_loads_make_no_detours() -> None:
    for line in table().splitlines()[1:]:
        name, files, hops = line[:22].strip(), *map(int, line[22:].split())
        most = MOST[name]
        assert files <= most[0], line
        assert hops <= most[1], line
