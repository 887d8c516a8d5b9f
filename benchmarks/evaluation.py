"""How much of a dense language model is left after quantization? Formats, algorithms and libraries, by their outputs.

    python -m benchmarks.evaluation                             # the whole table, `bytes`; about 20 CPU-minutes
    python -m benchmarks.evaluation --model smollm2 --only 'NVFP4 | *' --sizes 4096 --eval-tokens 8192
    python -m benchmarks.evaluation --only 'NVFP4 | GPTQ*'      # some rows, by their names

Each contender calibrates on the first tokens of the text and is judged on held-out text, in two ways:

    KL          mean KL(dense || quantized) of next-token probabilities, in nats a token
    perplexity  of the next token, of a byte for the model `bytes`

Each with weights alone quantized (A16), and with inputs quantized too where an engine does so (dynamic: each token by
itself, by our own recipes, whoever calibrated the weights). KL is the finer figure: it asks what is left of the model,
and the difficulty of the text cancels out. Standard errors are over rows of 256 tokens; they tell how much the choice
of held-out text matters, and nothing of other models or calibration data. Differences are taken row by row.

Figures stay in a file that grows with each contender, so an interrupted run continues where it stopped.
"""

import argparse
import datetime as dt
import fnmatch
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import dense_models
from benchmarks.evaluation_contenders import FORMATS, Contender, NotRunError, calibrated, quantizing_inputs, table
from benchmarks.machine import machine_and_versions

RESULTS = Path(__file__).parent / "results"
SIZES = {"bytes": (4096, 32768, 131072), "smollm2": (4096, 16384, 65536)}  # tokens to calibrate on
BATCH = 4  # rows
REFERENCE = "GPTQ"  # what the others are compared with, on the same format and tokens
COLUMNS = ("format", "tokens", "algorithm", *("KL, A16", "difference", "perplexity"))
COLUMNS += ("KL, inputs too", "difference", "perplexity", "seconds")
Judged = dict[str, list[float]]  # "kl" and "loss", in nats a token, a value for each row of held-out text


class Questions:
    """Held-out tokens [n, seq_len], and what the dense model answers: log-probabilities, which stay in memory."""

    @torch.no_grad()
    def __init__(self, rows: Tensor, dense: nn.Module) -> None:
        self.rows = rows
        self.answers = [
            _log_probabilities(dense, ids) for ids in rows.split(BATCH)
        ]  # each [BATCH, seq_len, vocabulary]

    @torch.no_grad()
    def asked(self, model: nn.Module) -> Judged:
        """KL from the dense model, and next-token loss, of each row."""
        found: Judged = {"kl": [], "loss": []}
        for ids, wanted in zip(self.rows.split(BATCH), self.answers, strict=True):
            mine = _log_probabilities(model, ids)
            found["kl"] += F.kl_div(mine, wanted, log_target=True, reduction="none").sum(-1).mean(1).tolist()
            found["loss"] += F.nll_loss(mine[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1).tolist()
        return found


def _log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the next tokens, [n, seq_len, vocabulary]."""
    return F.log_softmax(model(input_ids=ids, use_cache=False).logits, dim=-1)


def row_of(
    contender: Contender, dense: nn.Module, calibration: Tensor, questions: Questions, peers_python: Path | None
) -> dict[str, Any]:
    """Calibrates, then judges with weights alone and, where the recipe says so, with inputs quantized too."""
    began = time.process_time(), time.perf_counter()
    try:
        model = calibrated(contender, dense, calibration, peers_python)
    except NotRunError as reason:
        return {"not_run": str(reason)}
    cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    answer: dict[str, Any] = {"cpu_seconds": round(cpu, 1), "seconds": round(wall, 1)}
    answer["A16"] = questions.asked(model)
    recipe = FORMATS[contender.format]
    if recipe.activations is not None:
        hooks = quantizing_inputs(model, dense_models.linear_names(model), recipe)
        answer["dynamic"] = questions.asked(model)
        for hook in hooks:
            hook.remove()
    return answer


def evaluate(  # noqa: PLR0913 - the options of a run, keyword-only
    path: Path,
    *,
    name: str,
    dense: nn.Module,
    contenders: Sequence[Contender],
    calibration: Tensor,
    held_out: Tensor,
    peers_python: Path | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Fills the file with the rows that it lacks, and returns all of it.

    Raises:
        ValueError: the file is of another model, or other held-out text.
    """
    about = {
        "model": name,
        "weights_sha256": dense_models.digest(dense),
        "parameters": sum(p.numel() for p in dense.parameters()),
        "values_in_32": dense_models.fewest_values(dense),
        "held_out_tokens": held_out.numel(),
        "seq_len": held_out.shape[1],
    }
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if results and results["about"] != about:
        raise ValueError(f"{path} is about {results['about']}, and this run about {about}; give another --out")
    results = results or {"about": about, **machine_and_versions(), "rows": {}}
    questions = Questions(held_out, dense)
    results["dense"] = questions.asked(dense)
    for number, contender in enumerate(contenders, 1):
        if contender.name not in results["rows"] or "not_run" in results["rows"][contender.name]:
            row = row_of(contender, dense, calibration, questions, peers_python)
            results["rows"][contender.name] = row
            store(path, results)
            seen = f"KL {statistics.fmean(row['A16']['kl']):.5f}" if "A16" in row else row["not_run"]
            say(f"[{number}/{len(contenders)}] {contender.name}: {seen}, {row.get('seconds', 0)} s")
    store(path, results)
    return results


def store(path: Path, results: dict[str, Any]) -> None:
    """The whole file or the old one, whenever it is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".json.new")
    rounded = json.loads(json.dumps(results), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    beside.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def against_reference(rows: dict[str, Any], name: str, inputs: str) -> tuple[float, float] | None:
    """KL minus that of `REFERENCE` on the same format and tokens, row by row; None where that is not known."""
    of, algorithm, tokens = name.split(" | ")
    other = rows.get(f"{of} | {REFERENCE} | {tokens}", {})
    if algorithm == REFERENCE or inputs not in other or inputs not in rows[name]:
        return None
    pairs = zip(rows[name][inputs]["kl"], other[inputs]["kl"], strict=True)
    return mean_and_error([mine - theirs for mine, theirs in pairs])


def markdown(results: dict[str, Any]) -> str:
    """A table of all rows, the best KL of each format and size in bold."""
    about, rows = results["about"], results["rows"]
    loss, _ = mean_and_error(results["dense"]["loss"])
    grid = about["values_in_32"]
    kinds = (
        f"{about['parameters'] / 1e6:.1f} million parameters in fp32. Blocks of 32 weights hold {grid['mean']:.1f} "
        f"different values on average; {grid['share_with_16_or_fewer']:.2%} hold 16 or fewer."
    )
    judged = (
        f"Dense perplexity: {math.exp(loss):.4f} on {about['held_out_tokens']} held-out tokens. KL is in thousandths "
        f"of a nat a token, ± its standard error; the difference is to `{REFERENCE}`, row by row of text."
    )
    lines = [f"# What is left of `{about['model']}` after quantization", "", kinds, "", judged, ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|---|---:|---|{'---:|' * (len(COLUMNS) - 3)}"]
    best = _best(rows)
    for name in sorted(rows, key=lambda each: _place(each, rows)):
        of, algorithm, tokens = name.split(" | ")
        if "not_run" in rows[name]:
            lines.append(f"| {of} | {tokens} | {algorithm} | not run: {rows[name]['not_run']} | | | | | | |")
            continue
        cells = [cell for inputs in ("A16", "dynamic") for cell in _cells(rows, name, inputs, best)]
        lines.append(f"| {of} | {tokens} | {algorithm} | {' | '.join(cells)} | {rows[name]['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def _cells(rows: dict[str, Any], name: str, inputs: str, best: dict[tuple[str, str, str], str]) -> list[str]:
    if inputs not in rows[name]:
        return ["-", "-", "-"]
    of, _, tokens = name.split(" | ")
    kl, error = mean_and_error(rows[name][inputs]["kl"])
    shown = f"{1e3 * kl:.3f} ± {1e3 * error:.3f}"
    gap = against_reference(rows, name, inputs)
    loss, spread = mean_and_error(rows[name][inputs]["loss"])
    return [
        f"**{shown}**" if best[of, tokens, inputs] == name else shown,
        "" if gap is None else f"{1e3 * gap[0]:+.3f} ± {1e3 * gap[1]:.3f}",
        f"{math.exp(loss):.4f} ± {math.exp(loss) * spread:.4f}",
    ]


def _best(rows: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """The row of least KL for each (format, tokens, inputs)."""
    best: dict[tuple[str, str, str], str] = {}
    for name, row in rows.items():
        of, _, tokens = name.split(" | ")
        for inputs in ("A16", "dynamic"):
            if inputs in row:
                least = best.setdefault((of, tokens, inputs), name)
                if statistics.fmean(row[inputs]["kl"]) < statistics.fmean(rows[least][inputs]["kl"]):
                    best[of, tokens, inputs] = name
    return best


def _place(name: str, rows: dict[str, Any]) -> tuple[int, int, float]:
    """Where a row stands: by format, tokens, then KL from the largest down."""
    of, _, tokens = name.split(" | ")
    kl = statistics.fmean(rows[name]["A16"]["kl"]) if "A16" in rows[name] else math.inf
    return list(FORMATS).index(of), int(tokens), -kl


def draw(results: dict[str, Any], path: Path) -> None:
    """KL with weights alone, on a log scale, a panel for each format on the size that has most rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    rows = {name: row for name, row in results["rows"].items() if "A16" in row}
    sizes = [name.split(" | ")[2] for name in rows]
    middle = max(set(sizes), key=sizes.count)
    shown = [of for of in FORMATS if any(name.startswith(f"{of} |") and name.endswith(f"| {middle}") for name in rows)]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.2 * len(shown), 4.6), layout="constrained", squeeze=False)
    for axis, of in zip(axes[0], shown, strict=True):
        names = [n for n in rows if n.startswith(f"{of} |") and n.endswith(f"| {middle}")]
        names.sort(key=lambda each: _place(each, rows))
        points = [mean_and_error(rows[name]["A16"]["kl"]) for name in names]
        labels = [name.split(" | ")[1] for name in names]
        colours = ["C7" if ": " in label else "C0" for label in labels]
        means, errors = ([1e3 * each[column] for each in points] for column in (0, 1))
        axis.hlines(labels, min(means), means, color="lightgrey")
        axis.errorbar(means, labels, xerr=errors, fmt="none", ecolor="C3")
        axis.scatter(means, labels, c=colours, zorder=3)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())  # they would overlap
        axis.set_title(of)
        axis.set_xlabel("KL, thousandths of a nat")
    figure.suptitle(f"{results['about']['model']}: weights alone, {middle} tokens (grey: other libraries)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description="Judges quantized models.")
    parser.add_argument("--model", choices=list(SIZES), default="bytes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="names of rows, 'NVFP4 | GPTQ* | *'")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="N", help="tokens to calibrate on; most on the middle")
    parser.add_argument("--eval-tokens", type=int, default=20480, metavar="N", help="held-out tokens to judge on")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--peers-python", type=Path, metavar="PATH", help="the Python of llm-compressor's environment")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the file of figures, ending in .json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, and write figures, tables and a picture."""
    asked = options(arguments)
    torch.set_num_threads(asked.threads)
    path = asked.out or RESULTS / f"{dt.date.today().isoformat()}-evaluation-{asked.model}.json"
    sizes = tuple(asked.sizes or SIZES[asked.model])
    chosen = [each for each in table(sizes) if any(fnmatch.fnmatchcase(each.name, glob) for glob in asked.only)]
    held_out = dense_models.token_rows(asked.model, "heldout")
    wanted = asked.eval_tokens // dense_models.SEQ_LEN
    if not 1 < wanted <= len(held_out):
        raise ValueError(f"--eval-tokens {asked.eval_tokens}: the held-out text has {held_out.numel()} tokens")
    results = evaluate(
        path,
        name=asked.model,
        dense=dense_models.dense_model(asked.model),
        contenders=chosen,
        calibration=dense_models.token_rows(asked.model, "train"),
        held_out=held_out[:wanted],
        peers_python=asked.peers_python,
        say=lambda line: print(line, flush=True),
    )
    path.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    if results["rows"]:
        draw(results, path.with_suffix(".png"))
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
