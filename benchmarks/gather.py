"""What does a compressed all-gather save? Bytes, copies and time of an FSDP2 step against bf16, over bandwidth.

    python -m benchmarks gather

Two ranks, gloo, one thread each, first on a cable without limit and then on slower and slower ones (gather_link.py).
All contenders live in the same two processes and take turns (gather_rank.py). Besides the steps, bare collectives of a
bf16 layer are timed, since gloo's all-gather does not always fill a cable.

Without namespaces, bytes and copies are still counted, and one ratio is measured on the loopback.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gather_copies import ALL_GATHER, REDUCE_SCATTER
from benchmarks.gather_link import ADDRESSES, CABLE, WIRE, NoLink, Ranks, free_port
from benchmarks.gather_rank import CONTENDERS, PEERS
from benchmarks.timing import ratio

WIDTH, LAYERS, TOKENS = 1024, 4, 256
LIMITS = (2000.0, 1000.0, 500.0, 250.0, 100.0)  # Mbit/s, each way
SECONDS = 12.0  # for each point of the curve, about; never fewer rounds than
ROUNDS = (3, 15)
BITS = 8 / 1e6  # bytes a second on the cable -> Mbit/s
BF16 = 2.0
STORAGES = ("quantized", "high_precision")
TITLES = {
    "quantized": 'storage="quantized", fp32 masters\n(bf16 with the same MasterWeightOptimizer = 1)',
    "high_precision": 'storage="high_precision", torch\'s AdamW\n(bf16 with the same AdamW = 1)',
}
COLOURS = {"float8-row": "C0", "mxfp8": "C1", "nvfp4": "C2"}


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
        "copies": ranks.ask(do="copies", width=WIDTH)[1],  # rank 1 has the shorter of two uneven shards
        "bytes": _bytes(ranks.ask(do="bytes")[0], linked=linked),
    }
    curve = results["curve"] = [_point(ranks, None, rounds=7)]
    if linked:
        said = [figures["predicted"] for figures in results["bytes"].values()]
        for mbit_s in LIMITS:
            on_the_cable = sum(row["gather"] + row["reduce"] for row in said) * BITS / mbit_s
            rounds = round(SECONDS / (sum(curve[0]["seconds"].values()) + on_the_cable))
            curve.append(_point(ranks, mbit_s, rounds=min(max(ROUNDS[0], rounds), ROUNDS[1])))
        ranks.limit(None)
    results["pays_below"] = _pays_below(results) if linked else {}
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
        "ratios": ratios,
    }


def _bytes(counted: dict[str, dict[str, int]], *, linked: bool) -> dict[str, dict[str, Any]]:
    """A row for each contender: bytes by the formats, bytes given to collectives, bytes that came over the cable."""
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


def _pays_below(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The bandwidth in Mbit/s below which a contender is faster than its peer."""
    at = positions(results["curve"])
    found = {name: [point["ratios"][name]["ratio"] for point in results["curve"]] for name in results["peers"]}
    return {name: dict(zip(("measured", "words"), crossing(at, ratios), strict=True)) for name, ratios in found.items()}


# -- figures ----------------------------------------------------------------------------------------------------------


def gathered_per_weight(recipe: str, width: int) -> float:
    """Bytes that an all-gather sends for each element: payload and scales, by the definition of the format.

    The tensor-wide scale of NVFP4, 4 bytes a shard, is left to `predicted_bytes`.
    """
    return {"bf16": BF16, "float8-row": 1 + 4 / width, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}[recipe]


def predicted_bytes(recipe: str, width: int, layers: int) -> dict[str, float]:
    """What a rank of two receives in one step: half of every weight, for the forward and again for the backward.

    A reduce-scatter needs half of every bf16 gradient, too. gloo does an all-reduce instead, which takes twice that.
    """
    half = layers * width * width / 2
    wide = 4 * layers if recipe == "nvfp4" else 0
    gather = 2 * (half * gathered_per_weight(recipe, width) + wide)
    return {"gather": gather, "reduce": 2 * half * BF16, "needed": gather + half * BF16}


def crossing(bandwidths: Sequence[float], ratios: Sequence[float]) -> tuple[float | None, str]:
    """The bandwidth below which all ratios are under 1, interpolated in its logarithm; and the result in words."""
    points = sorted(zip(bandwidths, ratios, strict=True))
    slower = next((number for number, (_, value) in enumerate(points) if value >= 1), None)
    if slower is None:
        return None, "faster at every bandwidth measured"
    if slower == 0:
        return None, "not faster at any bandwidth measured"
    (low, below), (high, above) = points[slower - 1], points[slower]
    share = (1 - below) / (above - below)
    found = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return round(found), f"faster below {found:.0f} Mbit/s"


def targets(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Copies a side; the bytes are held against the formats."""
    rows = [figures for gathers in results["copies"].values() for figures in gathers.values()]
    found = {
        "copies of a payload byte before the collective": max(row["copy_in"] + row["hooks"] for row in rows),
        "copies of a payload byte after the collective": max(row["copy_out"] for row in rows),
    }
    out: dict[str, dict[str, Any]] = {
        name: {"value": value, "target": 1.0, "met": value <= 1.0, "why": "" if value <= 1.0 else "the hooks copy, too"}
        for name, value in found.items()
    }
    off = max(abs(row["given_over_predicted"] - 1) for row in results["bytes"].values())
    name = "bytes given to collectives, distance from the formats'"
    out[name] = {"value": off, "target": 0.0, "met": off == 0, "why": "" if off == 0 else "see the table of bytes"}
    return out


def markdown(results: dict[str, Any]) -> str:
    """Tables of bytes, copies and, where there was a slow link, of ratios over bandwidth."""
    model = results["model"]
    title = (
        f"One FSDP2 step of {model['layers']} Linear layers {model['width']} x {model['width']}, {model['tokens']} "
        "tokens, 2 ranks on gloo, one thread each. Times are ratios to bf16 FSDP2 with the same optimizer, median "
        "(least - greatest) of rounds in which all contenders take turns."
    )
    lines = [
        title,
        "",
        *_table_of_bytes(results["bytes"]),
        "",
        *_table_of_copies(results["copies"]),
        "",
    ]
    if "skipped" in results["link"]:
        lines += [f"No slow link: {results['link']['skipped']}.", ""]
    return "\n".join([*lines, *_table_of_ratios(results)])


def _table_of_bytes(figures: dict[str, Any]) -> list[str]:
    heads = (
        "a rank of two, in a step",
        "gathered, bytes a weight",
        "of bf16's",
        "given to collectives / by format",
        "TCP payload / by format",
        "gathers and gradients, of bf16's",
        "with a true reduce-scatter",
    )
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for name, row in figures.items():
        wire = row["received_over_predicted"]
        cells = (
            name,
            f"{row['gather_per_weight']:.3f}",
            f"{row['gather_over_bf16']:.3f}",
            f"{row['given_over_predicted']:.4f}",
            "-" if wire is None else f"{wire:.4f}",
            f"{row['all_over_bf16']:.3f}",
            f"{row['needed_over_bf16']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table_of_copies(figures: dict[str, Any]) -> list[str]:
    lines = ["| writes of each payload byte | FSDP2's copy-in | FSDP2's copy-out | ours |", "|---|---:|---:|---:|"]
    for name, gathers in figures.items():
        same = gathers["first"] == gathers["later"]
        rows = {"every gather": gathers["first"]} if same else gathers
        for when, row in rows.items():
            lines.append(f"| {name}, {when} | {row['copy_in']:g} | {row['copy_out']:g} | {row['hooks']:g} |")
    return lines


def _table_of_ratios(results: dict[str, Any]) -> list[str]:
    curve = results["curve"]
    names = list(curve[0]["ratios"])
    heads = [f"{point['mbit_s']:g} Mbit/s" if point["mbit_s"] else "no limit" for point in curve]
    reached = [f"{(row := point['reached_mbit_s'])['gather']:.0f} / {row['reduce']:.0f}" for point in curve]
    lines = [
        f"| time of a step / bf16's | {' | '.join(heads)} | pays below, Mbit/s |",
        f"|---|{'---:|' * (len(heads) + 1)}",
        f"| a bare all-gather / reduce-scatter reaches | {' | '.join(reached)} | |",
    ]
    for name in names:
        cells = [
            f"{(row := point['ratios'][name])['ratio']:.2f} ({row['min']:.2f} - {row['max']:.2f})" for point in curve
        ]
        pays = results["pays_below"].get(name, {"measured": "-"})
        lines.append(f"| {name} | {' | '.join(cells)} | {pays['measured'] or pays['words']} |")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel a storage: the ratio of step times over bandwidth, a line a recipe."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    curve = results["curve"]
    at = positions(curve)
    for axes, storage in zip(panels, STORAGES, strict=True):
        for recipe, colour in COLOURS.items():
            name = f"{recipe}/{storage}"
            rows = [point["ratios"][name] for point in curve]
            middle = [row["ratio"] for row in rows]
            spread = [
                [max(0.0, row["ratio"] - row["min"]) for row in rows],
                [max(0.0, row["max"] - row["ratio"]) for row in rows],
            ]
            label = recipe if len(curve) == 1 else f"{recipe}: {results['pays_below'][name]['words']}"
            axes.errorbar(at, middle, spread, color=colour, marker="o", capsize=3, elinewidth=0.8, label=label)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xscale="log", title=TITLES[storage], xlabel="limit of the cable between the ranks, Mbit/s each way")
        ticks = [round(value) for value in at]
        axes.set_xticks(ticks, [f"{tick}\nno limit" if tick == ticks[0] else str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(
            loc="upper left" if len(curve) > 1 else "upper right",
            title="bars: least and greatest round",
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("time of a step / bf16's   (below 1: faster than bf16)")
    figure.suptitle(
        "Below which bandwidth does a compressed all-gather make an FSDP2 step faster? (gloo, 2 ranks, CPU)"
    )
    figure.savefig(path, dpi=120)


def positions(curve: Sequence[dict[str, Any]]) -> list[float]:
    """Mbit/s of each point: the limit, or what a bare all-gather reaches without one."""
    return [point["mbit_s"] or point["reached_mbit_s"]["gather"] for point in curve]
