"""`python -m tests.adversary [ATTACK ...] [--budget 10m] [--seed 0] [--json FILE] | ATTACK --replay SEED`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from tests.adversary.attack import Attack, Tally, attacks, run

UNITS = {"s": 1, "m": 60, "h": 3600}


def main(argv: Sequence[str] | None = None) -> int:
    """0 where nothing was found, 1 where something was, 2 for a call that makes no sense."""
    there = attacks()
    options = _options(argv, sorted(there))
    chosen = [there[name] for name in options.attacks or sorted(there)]
    if options.replay is not None:
        return _replay(chosen, options.replay)
    tallies = [_run(attack, options.seed, seconds) for attack, seconds in _shares(chosen, options.budget)]
    for tally in tallies:
        print(_line(tally))
    for finding in (finding for tally in tallies for finding in tally.findings):
        print(f"\n{finding.what.rstrip()}\n    {finding.replay}")
    if options.json:
        told = [asdict(tally) for tally in tallies]
        report = {"seed": options.seed, "budget_seconds": options.budget, "attacks": told}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(tally.findings for tally in tallies))


def duration(text: str) -> float:
    """Seconds of "90s", "10m", "1.5h", or of a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: write 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2] or "s"]


def _options(argv: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"{', '.join(names)}; all where none is named")
    parser.add_argument("--budget", type=duration, default=600.0, help="time for all attacks together (10m)")
    parser.add_argument("--seed", type=int, default=0, help="the number from which all scenarios follow")
    parser.add_argument("--replay", type=int, help="run the one scenario of this seed, and let its error through")
    parser.add_argument("--json", help="also write tallies and findings to this file")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.attacks) - set(names)):
        parser.error(f"no attack {', '.join(unknown)}: there are {', '.join(names)}")
    if options.replay is not None and len(options.attacks) != 1:
        parser.error("--replay needs the one attack whose seed it is")
    return options


def _shares(chosen: Sequence[Attack], budget: float) -> list[tuple[Attack, float]]:
    whole = sum(attack.share for attack in chosen)
    return [(attack, budget * attack.share / whole) for attack in chosen]


def _run(attack: Attack, base: int, seconds: float) -> Tally:
    tally = Tally(attack.name)
    began = time.monotonic()
    with tqdm(total=round(seconds), desc=attack.name, unit="s", file=sys.stderr, disable=None) as bar:
        for tally in run(attack, base, seconds):
            bar.set_postfix_str(f"{tally.scenarios} scenarios, {len(tally.findings)} findings", refresh=False)
            bar.update(min(round(time.monotonic() - began), bar.total) - bar.n)
    return tally


def _replay(chosen: Sequence[Attack], seed: int) -> int:
    (attack,) = chosen
    with attack.held():
        print(f"{attack.name}: {attack.scenario(seed)}")
    return 0


def _line(tally: Tally) -> str:
    by_count = sorted(tally.ends.items(), key=lambda item: -item[1])
    ends = ", ".join(f"{count} {end}" for end, count in by_count)
    return f"{tally.attack}: {tally.scenarios} scenarios in {tally.seconds:.0f} s: {ends or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
