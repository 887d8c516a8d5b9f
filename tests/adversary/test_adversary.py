"""The runner itself: seeds, shares, findings and exit statuses. And of each attack the first scenarios of one seed."""

from __future__ import annotations

import json

import pytest

from tests.adversary import __main__ as command
from tests.adversary.attack import Attack, Found, attacks, run, seed_of

ATTACKS = attacks()
FIXED = 3  # scenarios of each attack in the ordinary suite


def test_seeds_differ_by_run_attack_and_number_and_stay_the_same():
    seeds = {seed_of(base, attack, number) for base in (0, 1) for attack in ("a", "b") for number in (0, 1)}
    assert len(seeds) == 8
    assert seed_of(0, "lives", 0) == seed_of(0, "lives", 0) < 2**53


@pytest.mark.parametrize("error", [Found("the second one"), BaseException("the second one")])
def test_a_finding_is_kept_with_its_seed_and_the_run_goes_on(error):
    def scenario(seed):
        if seed == seed_of(0, "odd", 1):
            raise error
        return "fine"

    tally = list(run(Attack("odd", scenario), 0, 60, most=3))[-1]
    assert tally.ends == {"fine": 2, "FOUND": 1}
    (finding,) = tally.findings
    assert "the second one" in finding.what
    assert finding.replay == f"python -m tests.adversary odd --replay {seed_of(0, 'odd', 1)}"


@pytest.mark.parametrize(("status", "found"), [(0, False), (1, True)])
def test_the_exit_status_tells_whether_something_was_found(monkeypatch, tmp_path, capsys, status, found):
    def scenario(seed):
        if found:
            raise Found("wrong bytes")
        return "fine"

    monkeypatch.setattr(command, "attacks", lambda: {"one": Attack("one", scenario)})
    assert command.main(["--budget", "0.01s", "--json", str(tmp_path / "run.json")]) == status
    assert ("wrong bytes" in capsys.readouterr().out) is found
    (tally,) = json.loads((tmp_path / "run.json").read_text())["attacks"]
    assert bool(tally["findings"]) is found


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("7", 7)])
def test_lengths_of_time(text, seconds):
    assert command.duration(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no attack nobody: there are"),
        (["--budget", "soon"], "'soon' is no length of time: write 90s, 10m or 1h"),
        (["--replay", "3"], "--replay needs the one attack whose seed it is"),
    ],
)
def test_calls_that_make_no_sense_say_why(capsys, arguments, message):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(ATTACKS) or [pytest.param("", marks=pytest.mark.skip("no attack yet"))])
def test_the_first_scenarios_of_every_attack_find_nothing(name):
    tally = list(run(ATTACKS[name], 0, 3600, most=FIXED))[-1]
    assert not tally.findings, tally.findings[0].what
