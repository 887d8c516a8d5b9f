"""What does a compressed all-gather save? Bytes, copies and time of an FSDP2 step against bf16, over bandwidth.

    python -m benchmarks gather

Two ranks, gloo, one thread each, at first on a cable without limit and then on slower and slower ones (gather_link.py).
All contenders live in the same two processes and take turns (gather_rank.py). Before the slow cables are measured, each
step's time there is predicted:

    own time     = time without limit - bytes / the bandwidth that a bare all-gather reaches there
    predicted    = own time + bytes by the definition of the formats / bandwidth

The bandwidth of a cable is what a bare all-gather of a bf16 layer reaches on it, measured together with the steps.

Where there can be no namespaces, bytes and copies are counted all the same, and one ratio is taken on the loopback.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gather_copies import ALL_GATHER, REDUCE_SCATTER
from benchmarks.gather_figures import (
    crossing,
    draw,
    markdown,
    meets,
    own_seconds,
    predicted_bytes,
    prediction_errors,
    seconds_at,
    targets,
)
from benchmarks.gather_link import ADDRESSES, CABLE, WIRE, NoLink, Ranks, free_port
from benchmarks.gather_rank import CONTENDERS, PEERS
from benchmarks.timing import ratio

__all__ = ["draw", "markdown", "run"]

WIDTH, LAYERS, TOKENS = 1024, 4, 256
LIMITS = (2000.0, 1000.0, 500.0, 250.0, 100.0)  # Mbit/s, each way
SECONDS = 12.0  # a point of the curve, about; never fewer rounds than
ROUNDS = (3, 15)
MESSAGE = WIDTH * WIDTH  # bytes of a bf16 layer that a rank gives to an all-gather
BITS = 8 / 1e6  # bytes a second on the cable -> Mbit/s


def run() -> dict[str, Any]:
    """All figures; see the module's docstring."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = Ranks(Path(folder), environment, linked=True)
            link: dict[str, Any] = {"limits_mbit_s": LIMITS}
        except NoLink as why:
            print(f"  no slow link: {why}", flush=True)
            ranks, link = Ranks(Path(folder), environment, linked=False), {"skipped": str(why)}
        with ranks:
            return _measured(ranks, link)


def _measured(ranks: Ranks, link: dict[str, Any]) -> dict[str, Any]:
    linked = "skipped" not in link
    host, interface = (ADDRESSES[0], CABLE) if linked else ("127.0.0.1", "lo")
    ranks.ask(do="join", host=host, port=29500 if linked else free_port(), interface=interface)
    print("  building", flush=True)
    weights = ranks.ask(do="build", width=WIDTH, layers=LAYERS, tokens=TOKENS)[0]
    results: dict[str, Any] = {
        "model": {"width": WIDTH, "layers": LAYERS, "tokens": TOKENS, "weights": weights},
        "peers": {name: _peer(name) for name in CONTENDERS if _peer(name) != name},
        "link": link,
        "copies": ranks.ask(do="copies", width=WIDTH)[1],  # of uneven shards, that of this rank is the shorter
        "bytes": _bytes(ranks.ask(do="bytes")[0], linked=linked),
        "model_of_time": {},
    }
    curve = results["curve"] = [_point(ranks, None, rounds=5)]
    if linked:
        _predict(results)
        for mbit_s in LIMITS:
            sum_of_all = sum(_predicted_seconds(results, name, mbit_s) for name in CONTENDERS)
            rounds = min(max(ROUNDS[0], round(SECONDS / sum_of_all)), ROUNDS[1])
            curve.append(_point(ranks, mbit_s, rounds=rounds))
            curve[-1]["predicted"] = _predicted_ratios(results, curve[-1]["achieved_mbit_s"])
        ranks.limit(None)
    results["pays_below"] = _pays_below(results) if linked else {}
    results["prediction_errors"] = prediction_errors(curve)
    results["targets"] = targets(results)
    return results


def _peer(name: str) -> str:
    return PEERS.get(name.split("/")[1], name)


def _point(ranks: Ranks, mbit_s: float | None, *, rounds: int) -> dict[str, Any]:
    """Rounds at one bandwidth: medians in seconds, ratios to the peers. A step is over when both ranks are done."""
    began = time.perf_counter()
    ranks.limit(mbit_s)
    achieved = min(ranks.ask(do="bandwidth", nbytes=MESSAGE)) * WIRE * BITS
    first, second = ranks.ask(do="time", rounds=rounds)
    seconds = {name: [max(pair) for pair in zip(first[name], second[name], strict=True)] for name in CONTENDERS}
    ratios = {name: ratio(values, seconds[_peer(name)]) for name, values in seconds.items() if _peer(name) != name}
    took = time.perf_counter() - began
    words = ", ".join(f"{name} {value['ratio']:.2f}" for name, value in ratios.items())
    label = "no limit" if mbit_s is None else f"{mbit_s:g} Mbit/s"
    print(f"  {label} ({achieved:.0f} reached), {rounds} rounds, {took:.0f} s: {words}", flush=True)
    return {
        "mbit_s": mbit_s,
        "achieved_mbit_s": round(achieved, 1),
        "rounds": rounds,
        "seconds": {name: round(statistics.median(values), 5) for name, values in seconds.items()},
        "ratios": ratios,
    }


def _bytes(counted: dict[str, dict[str, int]], *, linked: bool) -> dict[str, dict[str, Any]]:
    """A row a contender: what the formats say, what was given to collectives, what came over the cable."""
    rows: dict[str, dict[str, Any]] = {}
    bf16 = predicted_bytes("bf16", WIDTH, LAYERS)
    for name, found in counted.items():
        said = predicted_bytes(name.split("/")[0], WIDTH, LAYERS)
        both = said["gather"] + said["reduce"]
        received = found.pop("received") if linked else None
        gathered, reduced = found.pop(ALL_GATHER), found.pop(REDUCE_SCATTER)
        rows[name] = {
            "predicted": said,
            "given": {"gather": gathered, "reduce": reduced, "other": found},  # a rank of two receives what it gives
            "received": received,
            "gather_per_weight": round(gathered / (LAYERS * WIDTH * WIDTH), 4),  # each half of them twice
            "gather_over_bf16": round(said["gather"] / bf16["gather"], 4),
            "all_over_bf16": round(both / (bf16["gather"] + bf16["reduce"]), 4),
            "needed_over_bf16": round(said["needed"] / bf16["needed"], 4),
            "given_over_predicted": (gathered + reduced) / both,
            "received_over_predicted": None if received is None else round(received / both, 5),
        }
    return rows


def _predict(results: dict[str, Any]) -> None:
    """From the point without limit: each contender's own time, its bytes, and what follows for the slow cables."""
    point = results["curve"][0]
    for name, seconds in point["seconds"].items():
        said = predicted_bytes(name.split("/")[0], WIDTH, LAYERS)
        received = said["gather"] + said["reduce"]
        own = own_seconds(seconds, received, point["achieved_mbit_s"] / BITS)
        results["model_of_time"][name] = {"own_seconds": own, "bytes": received}
    for mbit_s in LIMITS:
        words = ", ".join(f"{name} {value:.2f}" for name, value in _predicted_ratios(results, mbit_s).items())
        print(f"  predicted at {mbit_s:g} Mbit/s: {words}", flush=True)


def _predicted_seconds(results: dict[str, Any], name: str, mbit_s: float) -> float:
    row = results["model_of_time"][name]
    return seconds_at(row["own_seconds"], row["bytes"], mbit_s / BITS)


def _predicted_ratios(results: dict[str, Any], mbit_s: float) -> dict[str, float]:
    seconds = {name: _predicted_seconds(results, name, mbit_s) for name in CONTENDERS}
    return {name: round(seconds[name] / seconds[peer], 3) for name, peer in results["peers"].items()}


def _pays_below(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The bandwidth in Mbit/s below which a contender is faster than its peer, predicted and measured."""
    out: dict[str, dict[str, Any]] = {}
    curve, times = results["curve"], results["model_of_time"]
    at = [point["achieved_mbit_s"] for point in curve]
    for name, peer in results["peers"].items():
        mine, its = ((times[one]["own_seconds"], times[one]["bytes"]) for one in (name, peer))
        meeting = meets(mine, its)
        measured, words = crossing(at, [point["ratios"][name]["ratio"] for point in curve])
        out[name] = {
            "measured": measured,
            "words": words,
            "predicted": None if meeting is None else round(meeting * BITS),
        }
    return out
