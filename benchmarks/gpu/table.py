"""What the answers of a GPU look like: a table for each question, one of all aims, and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.question import Aim, Row

Answers = Mapping[str, Sequence[Row]]  # by question
Aims = Mapping[str, Sequence[Aim]]
FARTHEST = 3.0  # of the picture


def of_question(rows: Sequence[Row]) -> list[str]:
    """A row a contender; columns in the order in which they first appear."""
    titles = list(dict.fromkeys(title for row in rows for title in row.figures))
    said = any(row.error or row.skipped for row in rows)
    lines = [f"| | {' | '.join([*titles, *(['why not'] if said else [])])} |"]
    lines.append("|---|" + "---:|" * len(titles) + ("---|" if said else ""))
    for row in rows:
        cells = [_shown(row.figures.get(title)) for title in titles]
        if said:
            cells.append(f"**{_cell(row.error)}**" if row.error else _cell(row.skipped))
        lines.append(f"| {_cell(row.what)} | {' | '.join(cells)} |")
    return lines


def of_aims(answers: Answers, aims: Aims) -> list[str]:
    """A row an aim of each question that was asked."""
    lines = ["| question | aim | measured | wanted | |", "|---|---|---:|---:|---|"]
    for question, aim, value in _judged(answers, aims):
        met = "not measured" if value is None else "met" if aim.met_by(value) else "**missed**"
        lines.append(f"| {question} | {_cell(aim.words)} | {_shown(value)} | {aim.wanted} | {met} |")
    return lines


def missed(answers: Answers, aims: Aims) -> list[str]:
    """Aims that were missed, or not measured; not those of rows that cannot be asked on this machine."""
    skipped = {(question, row.what) for question, rows in answers.items() for row in rows if row.skipped}
    return [
        f"{question}: {aim.words}"
        for question, aim, value in _judged(answers, aims)
        if not {(question, aim.row), (question, aim.over)} & skipped and (value is None or not aim.met_by(value))
    ]


def failed(answers: Answers) -> list[str]:
    """What has no answer, with the reason."""
    return [f"{question}: {row.what}: {row.error}" for question, rows in answers.items() for row in rows if row.error]


def document(about: Mapping[str, object], answers: Answers, aims: Aims, picture: str) -> str:
    """All of it as Markdown; `about` is told line by line, `picture` is a file's name, or empty."""
    lines = ["# On a GPU", "", *(f"* {name}: {value}" for name, value in about.items()), ""]
    if picture:
        lines += [f"![shares of aims]({picture})", ""]
    for question, rows in answers.items():
        lines += [f"## {question}", "", *of_question(rows), ""]
    return "\n".join([*lines, "## Aims", "", *of_aims(answers, aims), ""])


def draw(answers: Answers, aims: Aims, path: Path) -> None:
    """A bar an aim: what was measured over what is wanted, cut off at FARTHEST; the figure stands beside it."""
    from matplotlib.figure import Figure

    judged = [(name, aim, value) for name, aim, value in _judged(answers, aims) if value is not None and _wanted(aim)]
    figure = Figure(figsize=(11, 1.5 + 0.2 * len(judged)), layout="constrained")
    axes = figure.subplots()
    for at, (_, aim, value) in enumerate(judged):
        length = min(max(value / _wanted(aim), 0.0), FARTHEST)
        axes.barh(at, length, 0.8, color="C2" if aim.met_by(value) else "C3")
        axes.annotate(f" {_shown(value)}", (length, at), va="center", fontsize=6)
    names = [f"{name}: {aim.words} ({aim.wanted})" for name, aim, _ in judged]
    axes.set_yticks(range(len(judged)), names, fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, FARTHEST * 1.1)
    axes.set_xlabel("measured / wanted (green: met)")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)


def _wanted(aim: Aim) -> float:
    return aim.most if aim.most is not None else aim.least or 0.0


def _judged(answers: Answers, aims: Aims) -> Iterator[tuple[str, Aim, float | None]]:
    for question, rows in answers.items():
        for aim in aims.get(question, ()):
            yield question, aim, aim.value(rows)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
