"""`verify` beyond bytes: what each tensor of a checkpoint or a Hugging Face directory means (see soundness.py).

One tensor at a time, some rows of its parts and its master at a time. Of a Hugging Face directory a whole tensor is in
memory; it holds no masters and no histories.
"""

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor

from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.masters import Masters, explain_left_out
from dcp_adapters.records.soundness import (
    DenseCheck,
    Level,
    Problem,
    TensorCheck,
    cut,
    find_unfit,
    negative_root,
    slabs,
)
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.verifying.findings import Finding, VerifyReport
from qtensor.spec.registry import specs_of
from qtensor.states.kinds import MASTER, REMAINDER, ROOTS

CONVERTED = "converted since they were saved, so not judged: look at what they were converted from"
NOTHING = "nothing is quantized here, and no masters are kept: there was nothing to judge beyond bytes"
NONE = "none could be compared, so nothing is known of whether weights and masters are of one step"
Rows = Callable[[slice], Mapping[str, Tensor]]


def and_deep(report: VerifyReport, opened: Callable[[], Stored], level: Level) -> VerifyReport:
    """Add to a report on bytes what every quantized tensor and every master mean, if the bytes are sound.

    Args:
        report: on the bytes.
        opened: opens what they belong to.
        level: "deep" or "own_scales".
    """
    if not report.ok:
        message = "what the tensors mean was not looked at, since their bytes are not sound"
        return dataclasses.replace(report, findings=(*report.findings, Finding("warning", "", "", message)))
    try:
        source = opened()
        masters = Masters.among(source.entries, source.converted)
        findings = tuple(_judge(source, masters, level))
    # it has changed since its bytes were verified
    except (OSError, ValueError) as error:
        findings = (Finding("error", "", "", f"it can not be read again: {error}"),)
        return dataclasses.replace(report, findings=report.findings + findings)
    quantized = {entry.name for entry in source.entries.values() if entry.recipe is not None}
    judged = len(quantized - source.converted)
    compared = {one for name, beside in masters.beside.items() if name not in source.converted for one in beside}
    return dataclasses.replace(report, findings=report.findings + findings, judged=judged, masters=len(compared))


def _judge(source: Stored, masters: Masters, level: Level) -> list[Finding]:
    """Return what is found in the tensors of a source, in their order, and in their masters."""
    found: list[Problem] = []
    said: list[Mapping[str, Problem | None]] = []
    for entry in source.entries.values():
        if entry.name.rpartition(".")[2] in ROOTS:
            found += _judge_root(source, entry)
        beside = masters.beside.get(entry.name, [])
        # what was converted has scales of its own, and its master is that of another recipe
        if entry.name in source.converted or (entry.recipe is None and not beside):
            continue
        rows = _rows_of(source, entry)
        check: TensorCheck | DenseCheck
        check = DenseCheck(entry, beside) if entry.recipe is None else TensorCheck(entry, level, beside)
        for piece in slabs(entry.shape, entry.recipe):
            parts, dense = rows(piece), {master: _dense_rows(source, master, piece) for master in beside}
            if isinstance(check, TensorCheck):
                check.see(parts, dense)
            else:
                check.see(parts[""], dense)
        said.append(check.master_problems())
        found += check.problems() if isinstance(check, TensorCheck) else []
    findings = [
        Finding("error" if problem.fault else "warning", "", problem.entry, problem.message)
        for problem in [*found, *find_unfit(said)]
    ]
    if source.converted:
        findings.append(Finding("warning", "", few_of(sorted(source.converted), 3), CONVERTED))
    return findings + _list_left_out(source, masters)


def _judge_root(source: Stored, entry: Entry) -> list[Problem]:
    """Return what is found in a mean of squares that is kept as its root: its shape, and its signs."""
    state = entry.name.rpartition(".")[0]
    found = []
    for name in (MASTER, REMAINDER):
        master = source.entries.get(f"{state}.{name}")
        if master is not None and master.shape != entry.shape:
            found.append(Problem(entry.name, f"its shape is {entry.shape}, that of {master.name} is {master.shape}"))
    rows = _rows_of(source, entry)
    negative = negative_root(entry, map(rows, slabs(entry.shape, entry.recipe)))
    return [*found, negative] if negative is not None else found


def _list_left_out(source: Stored, masters: Masters) -> list[Finding]:
    """Return what was not compared: an error if nothing was, since then nothing is proved."""
    held = {master for beside in masters.beside.values() for master in beside}
    reasons = explain_left_out(masters.left, len(held) + len(masters.left))
    if masters.left and not held:
        return [Finding("error", "", names, f"{sentence}; {NONE}") for names, sentence in reasons]
    found = [Finding("warning", "", names, sentence) for names, sentence in reasons]
    if not held and all(entry.recipe is None for entry in source.entries.values()):
        found.append(Finding("warning", "", "", NOTHING))
    return found


def _rows_of(source: Stored, entry: Entry) -> Rows:
    """Return what reads some rows of an entry's parts."""
    if entry.recipe is None:
        return lambda piece: {"": _dense_rows(source, entry.name, piece)}
    recipe = entry.recipe
    if not isinstance(source, StoredCheckpoint):
        whole = source.parts(entry.name)
        return lambda piece: cut(whole, recipe, piece)
    # one value for all rows: read once, and given to every piece
    wide = {spec.name: source.part(entry.name, spec.name) for spec in specs_of(recipe) if not spec.per_row}
    per_row = [spec.name for spec in specs_of(recipe) if spec.per_row]
    return lambda piece: {**{part: source.rows(entry.key(part), piece) for part in per_row}, **wide}


def _dense_rows(source: Stored, name: str, piece: slice) -> Tensor:
    """Return some rows of a dense tensor."""
    return source.rows(name, piece) if isinstance(source, StoredCheckpoint) else source.part(name, "")[piece]
