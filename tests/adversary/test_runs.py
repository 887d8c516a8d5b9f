"""Full saves, deltas to them and what removes them: the scenarios of a few seeds, and that a careless run is found."""

from __future__ import annotations

import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from tests.adversary.attack import Found
from tests.adversary.crashes import explore
from tests.adversary.crashes.host import Host
from tests.adversary.crashes.runs import Action, Run, step, there
from tests.adversary.histories import runs as histories
from tests.sampling import sampled


class Careless(Run):
    """Removes what is old, whatever needs it."""

    def tidy(self, action: Action, runs: Path) -> None:
        keep_newest(action, runs)


def keep_newest(action: Action, runs: Path) -> None:
    """What `Careless` does, for histories."""
    for number in there(runs)[: -action.keep]:
        shutil.rmtree(step(runs, number))


def scenario(seed: int, base: Path) -> explore.Told:
    """Runs in the process that has the recorder. Below 10: as the attack does it; from 10 on a careless run."""
    draw = random.Random(seed)
    if seed >= 20:
        with mock.patch.object(Action, "tidy", keep_newest) if seed >= 30 else nullcontext():
            return histories.scenario(draw, base)
    if seed >= 10:
        return explore.crashes(explore.Scene(base, Careless(draw)), draw)
    with mock.patch.object(explore, "OPENED", 40):
        return (explore.crashes, explore.errors)[seed % 2](explore.Scene(base, Run(draw)), draw)


@pytest.fixture(scope="module")
def host():
    with Host(__name__) as one:
        yield one


@sampled("seed", [0, 1], [0])
def test_a_run_that_is_interrupted_keeps_its_newest_save_and_what_that_needs(host: Host, seed: int) -> None:
    assert host.run(seed) == ("crash of run", "errors in run")[seed]


def test_a_base_that_goes_before_its_delta_is_found(host: Host) -> None:
    with pytest.raises(Found, match=r"(UNLINK|RMDIR) runs/step-001"):
        host.run(10)


@pytest.mark.parametrize("seed", [22, 24])
def test_histories_of_a_run_give_the_newest_save(host: Host, seed: int) -> None:
    assert host.run(seed) == "a run of saves and deltas"


def test_a_history_in_which_a_base_goes_is_found(host: Host) -> None:
    """Which one it is changes with the calls that a save makes; of fifty, fourteen are."""
    with pytest.raises(Found, match=r"is a delta to .*, where there is no checkpoint"):
        any(not host.run(seed) for seed in range(38, 58))
