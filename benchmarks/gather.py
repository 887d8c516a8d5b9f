"""What does a compressed all-gather save? Bytes, copies and time of an FSDP2 step against bf16, over bandwidth.

    python -m benchmarks gather

Two ranks, gloo, one thread each, at first on a cable without limit and then on slower and slower ones (gather_link.py).
All contenders live in the same two processes and take turns (gather_rank.py). Before the slow cables are measured, each
step's time there is predicted:

    own time     = fastest step without limit - bytes / what bare collectives reach there
    predicted    = own time + bytes by the definition of the formats / limit of the cable
    explained    = own time + bytes by the definition of the formats / what bare collectives reach on that cable

A bare collective is one of a bf16 layer, timed beside the steps: gloo's all-gather does not always fill a cable.

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
    meets,
    positions,
    predicted_bytes,
    prediction_errors,
    seconds_at,
    targets,
)
from benchmarks.gather_link import ADDRESSES, CABLE, WIRE, NoLink, Ranks, free_port
from benchmarks.gather_rank import CONTENDERS, PEERS
from benchmarks.timing import ratio

WIDTH, LAYERS, TOKENS = 1024, 4, 256
LIMITS = (2000.0, 1000.0, 500.0, 250.0, 100.0)  # Mbit/s, each way
SECONDS = 12.0  # a point of the curve, about; never fewer rounds than
ROUNDS = (3, 15)
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
    curve = results["curve"] = [_point(ranks, None, rounds=7)]  # which the predictions stand on
    if linked:
        _predict(results)
        for mbit_s in LIMITS:
            sum_of_all = sum(_predicted_seconds(results, name, mbit_s, mbit_s) for name in CONTENDERS)
            rounds = min(max(ROUNDS[0], round(SECONDS / sum_of_all)), ROUNDS[1])
            curve.append(_point(ranks, mbit_s, rounds=rounds))
            reached = curve[-1]["reached_mbit_s"]
            curve[-1]["predicted"] = _ratios(results, mbit_s, mbit_s)
            curve[-1]["explained"] = _ratios(results, reached["gather"], reached["reduce"])
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
    answers = ranks.ask(do="bandwidth", layer=2 * WIDTH * WIDTH)
    reached = {kind: round(min(answer[kind] for answer in answers) * WIRE * BITS, 1) for kind in answers[0]}
    first, second = ranks.ask(do="time", rounds=rounds)
    seconds = {name: [max(pair) for pair in zip(first[name], second[name], strict=True)] for name in CONTENDERS}
    ratios = {name: ratio(values, seconds[_peer(name)]) for name, values in seconds.items() if _peer(name) != name}
    took = time.perf_counter() - began
    words = ", ".join(f"{name} {value['ratio']:.2f}" for name, value in ratios.items())
    label = "no limit" if mbit_s is None else f"{mbit_s:g} Mbit/s"
    print(f"  {label} (reached: {reached}), {rounds} rounds, {took:.0f} s: {words}", flush=True)
    return {
        "mbit_s": mbit_s,
        "reached_mbit_s": reached,
        "rounds": rounds,
        "seconds": {name: round(statistics.median(values), 5) for name, values in seconds.items()},
        "least_seconds": {name: round(min(values), 5) for name, values in seconds.items()},
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
    gather_s, reduce_s = (point["reached_mbit_s"][kind] / BITS for kind in ("gather", "reduce"))
    for name, seconds in point["least_seconds"].items():  # what else the machine does only adds to it
        row = {**predicted_bytes(name.split("/")[0], WIDTH, LAYERS), "own_seconds": 0.0}
        row["own_seconds"] = max(0.0, seconds - seconds_at(row, gather_s, reduce_s))
        results["model_of_time"][name] = row
    for mbit_s in LIMITS:
        words = ", ".join(f"{name} {value:.2f}" for name, value in _ratios(results, mbit_s, mbit_s).items())
        print(f"  predicted at {mbit_s:g} Mbit/s: {words}", flush=True)


def _predicted_seconds(results: dict[str, Any], name: str, gather: float, reduce: float) -> float:
    """At so many Mbit/s."""
    return seconds_at(results["model_of_time"][name], gather / BITS, reduce / BITS)


def _ratios(results: dict[str, Any], gather: float, reduce: float) -> dict[str, float]:
    seconds = {name: _predicted_seconds(results, name, gather, reduce) for name in CONTENDERS}
    return {name: round(seconds[name] / seconds[peer], 3) for name, peer in results["peers"].items()}


def _pays_below(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The bandwidth in Mbit/s below which a contender is faster than its peer, predicted and measured."""
    out: dict[str, dict[str, Any]] = {}
    curve, times = results["curve"], results["model_of_time"]
    at = positions(curve)
    for name, peer in results["peers"].items():
        meeting = meets(times[name], times[peer])
        measured, words = crossing(at, [point["ratios"][name]["ratio"] for point in curve])
        out[name] = {
            "measured": measured,
            "words": words,
            "predicted": None if meeting is None else round(meeting * BITS),
        }
    return out
