"""What a checkpoint notes beside the tensors of its layers, looked at before a run goes on from it.

Digests tell that a record is the one that was written, and not that this library wrote it, or this version. So each
note (`Outcome.to_json`) is compared with the stage that it is about; nothing here changes anything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dcp_adapters.plain.words import few_of, short
from layerwise.report.report import LinearReport
from layerwise.resume.progress import Window
from layerwise.stages.stage import Stage

KEYS = ("dense", "input_amax", "gathered", "records", "output_snr", "pairs")
DTYPES = ("bfloat16", "float16", "float32", "float64")  # values that were rounded


def check_notes(window: Window, stages: Sequence[Stage]) -> None:
    """Raise ValueError if a window is not one of these stages, or its notes are not theirs."""
    own, notes = stages[window.first : window.last + 1], window.extra
    if window.last >= len(stages):
        raise ValueError(f"there are {len(stages)} stages")
    if type(notes) is not list or len(notes) != len(own):
        raise ValueError(f"the notes are {short(notes)}, expected a list of {len(own)}")
    for stage, note in zip(own, notes, strict=True):
        fault = next(_faults(note, stage), None)
        if fault is not None:
            raise ValueError(f"{stage.title}: {fault}")


def _faults(note: Any, stage: Stage) -> Iterator[str]:
    """Yield what is wrong with the note of a stage, in words."""
    if type(note) is not dict or any(key not in note for key in KEYS):
        yield f"its note is {short(note)}, expected {', '.join(KEYS)}"
        return
    params, targets = stage.params(), [target.name for target in stage.targets]
    if not _strings(note["dense"]) or any(name not in params for name in note["dense"]):
        yield f"dense is {short(note['dense'])}, expected names of its parameters"
    for key, fits, kind in (("input_amax", _amount, "a number or none"), ("gathered", _dtype, "a dtype")):
        if not _of_each(note[key], targets, fits):
            yield f"{key} is {short(note[key])}, expected {kind} for each of {few_of(targets)}"
    try:
        for record in note["records"]:
            LinearReport.from_json(record)
    except (TypeError, ValueError, AttributeError) as error:
        yield f"a record of its linears can not be read ({type(error).__name__}: {error})"
    if not _amount(note["output_snr"]):
        yield f"output_snr is {short(note['output_snr'])}, expected a number or none"
    if not _of_each(note.get("kv_amax", {}), list(stage.attentions), _heads):
        yield f"kv_amax is {short(note.get('kv_amax'))}, expected those of {few_of([*stage.attentions]) or 'nothing'}"
    if type(note["pairs"]) is not list or not all(map(_pair, note["pairs"])):
        yield f"pairs are {short(note['pairs'])}, expected lists of names, each with a name and a kind"


def _of_each(values: Any, names: Sequence[str], fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, Mapping) and {*values} == {*names} and all(map(fits, values.values()))


def _strings(values: Any) -> bool:
    return type(values) is list and all(type(value) is str for value in values)


def _amount(value: Any) -> bool:
    # Exact types: a bool is an int to `isinstance`.
    return value is None or type(value) in (int, float)


def _dtype(value: Any) -> bool:
    return type(value) is str and value in DTYPES


def _heads(value: Any) -> bool:
    """Return whether it holds a number for each head, as many for keys as for values."""
    kinds = [value[what] for what in ("k", "v")] if type(value) is dict and value.keys() == {"k", "v"} else []
    numbers = all(type(heads) is list and heads and all(type(one) is float for one in heads) for heads in kinds)
    return bool(kinds) and numbers and len(kinds[0]) == len(kinds[1])


def _pair(value: Any) -> bool:
    return type(value) is list and len(value) == 3 and _strings(value[0]) and _strings(value[1:])
