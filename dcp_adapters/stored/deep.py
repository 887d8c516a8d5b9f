"""`verify` beyond bytes: what each tensor of a checkpoint or a Hugging Face directory means (see soundness.py).

One tensor at a time, some rows of its parts and its master at a time. Of a Hugging Face directory a whole tensor is in
memory; it holds no masters and no histories.
"""

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor

from dcp_adapters.entry import Entry
from dcp_adapters.soundness import DenseCheck, Level, Masters, Problem, TensorCheck, cut, slabs, unfit
from dcp_adapters.source import Stored
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.findings import Finding, Report
from dcp_adapters.words import listed
from qtensor.formats import specs_of

CONVERTED = "converted since they were saved, so not judged: look at what they were converted from"
NUMBERED = (
    "the masters of these states were not compared: they are kept under numbers instead of names; save what "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns"
)
Rows = Callable[[slice], Mapping[str, Tensor]]


def and_deep(report: Report, opened: Callable[[], Stored], level: Level) -> Report:
    """A report on bytes, with what every quantized tensor and every master mean, if the bytes are sound.

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
        masters = Masters.among(source.entries)
        findings = tuple(_judged(source, masters, level))
    except (OSError, ValueError) as error:  # it has changed since
        findings = (Finding("error", "", "", f"it can not be read again: {error}"),)
        return dataclasses.replace(report, findings=report.findings + findings)
    quantized = {entry.name for entry in source.entries.values() if entry.recipe is not None}
    judged = len(quantized - source.converted)
    return dataclasses.replace(report, findings=report.findings + findings, judged=judged, masters=len(masters.named))


def _judged(source: Stored, masters: Masters, level: Level) -> list[Finding]:
    """What is found in the tensors of a source, in their order, and in their masters."""
    found: list[Problem] = []
    said: list[Mapping[str, Problem | None]] = []
    for entry in source.entries.values():
        beside = masters.beside.get(entry.name, [])
        if entry.name in source.converted or (entry.recipe is None and not beside):
            continue  # what was converted has scales of its own, and its master is that of another recipe
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
        for problem in [*found, *unfit(said)]
    ]
    if source.converted:
        findings.append(Finding("warning", "", listed(sorted(source.converted), 3), CONVERTED))
    if masters.numbered:
        findings.append(Finding("warning", "", listed(masters.numbered, 3), NUMBERED))
    return findings


def _rows_of(source: Stored, entry: Entry) -> Rows:
    """Reads some rows of an entry's parts."""
    if entry.recipe is None:
        return lambda piece: {"": _dense_rows(source, entry.name, piece)}
    recipe = entry.recipe
    if not isinstance(source, StoredCheckpoint):
        whole = source.parts(entry.name)
        return lambda piece: cut(whole, recipe, piece)
    wide = {spec.name: source.part(entry.name, spec.name) for spec in specs_of(recipe) if not spec.per_row}
    per_row = [spec.name for spec in specs_of(recipe) if spec.per_row]
    return lambda piece: {**{part: source.rows(entry.key(part), piece) for part in per_row}, **wide}


def _dense_rows(source: Stored, name: str, piece: slice) -> Tensor:
    """Some rows of a dense tensor."""
    return source.rows(name, piece) if isinstance(source, StoredCheckpoint) else source.part(name, "")[piece]
