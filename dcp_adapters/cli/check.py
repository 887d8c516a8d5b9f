"""The command `check`: hf/checking/ says what engines misread, stored/kept.py how well each weight is kept.

gguf/checking.py looks at GGUF files.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from dcp_adapters.cli.arguments import add_checkpoint, add_json, add_match, add_progress, open_stored
from dcp_adapters.cli.printing import FINE, FOUND, show
from dcp_adapters.gguf.checking import check_file, is_gguf, quantized_bytes
from dcp_adapters.hf.checking.misread import find_misread
from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.plain.progress_bar import progress_bar
from dcp_adapters.plain.tables import table
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.kept import Kept, is_weight, look_at_each
from dcp_adapters.stored.verifying.findings import Finding
from qtensor.spec.selection import matches

FORMAT = "dcp_adapters.check/1"
ABOUT = """\
Say what a quantized directory or checkpoint is, and whether an engine reads what is in it: the recipe of each weight,
whether each scale is the one that its values ask for (calibrated ones are not, which is no fault), the error of each
weight against the dense original, and what an engine would misread: fused linears with other scales, names that a list
of unquantized modules swallows, input scales that are missing, blocks that are cut. Works on files of any tool in the
layouts of compressed-tensors, ModelOpt, FP8 blocks and gpt-oss, and on GGUF files: the type, bits and error of each
tensor, against a GGUF file or a directory. Exit status 1 if there is any error; warnings alone leave it 0."""
EXAMPLES = """\
examples:
  %(prog)s exported                                  what is it, and would an engine misread it?
  %(prog)s exported --against original               and how far is each weight from the dense one?
  %(prog)s model-q4.gguf --against model-bf16.gguf   likewise of a GGUF file
  %(prog)s runs/step-1000 --json | jq '.weights[] | select(.other_scales > 0).name'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_checkpoint(parser)
    parser.add_argument("--against", metavar="DENSE", help="the directory or checkpoint whose values are right")
    add_match(parser)
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print a table of the weights and what was found."""
    if is_gguf(arguments.checkpoint):
        return _run_gguf(arguments)
    stored = open_stored(arguments.checkpoint)
    against = None if arguments.against is None else _open_beside(arguments.against, stored)
    match = arguments.match or ["*"]
    misread = find_misread(arguments.checkpoint) if is_directory(arguments.checkpoint) else []
    misread = [found for found in misread if matches(found.entry, match) or matches(_weight_of(found.entry), match)]
    total = sum(one.nbytes for one in stored.entries.values() if is_weight(one) and matches(one.name, match))
    with progress_bar("checking", total, enabled=arguments.progress) as advance:
        weights = list(look_at_each(stored, against, arguments.match, advance=advance))
    return _tell(arguments, stored.layout or "", weights, misread)


def _weight_of(name: str) -> str:
    """Return the weight that a finding is about: it names a module, or a tensor of one."""
    module, _, own = name.rpartition(".")
    return f"{module if own.endswith('scale') else name}.weight"


def _run_gguf(arguments: argparse.Namespace) -> int:
    """Check a GGUF file."""
    total = quantized_bytes(arguments.checkpoint)
    with progress_bar("checking", total, enabled=arguments.progress) as advance:
        weights, warned = check_file(arguments.checkpoint, arguments.against, arguments.match, advance=advance)
    return _tell(arguments, "gguf", weights, warned)


def _tell(arguments: argparse.Namespace, layout: str, weights: Sequence[Kept], found: Sequence[Finding]) -> int:
    """Print what was found, and return the exit status."""
    if arguments.match and not weights:
        raise ValueError(f"--match {' '.join(arguments.match)} matches no quantized tensor; see the names with inspect")
    findings = [*found, *(Finding("error", "", each.name, fault) for each in weights for fault in each.faults)]
    if not weights:
        findings.append(Finding("warning", "", "", "nothing is quantized here: there was nothing to check"))
    errors = sum(found.severity == "error" for found in findings)
    if arguments.json:
        show(_as_json(arguments, layout, weights, findings))
    else:
        show(_as_text(layout, weights, findings))
    return FOUND if errors else FINE


def _open_beside(path: str, stored: Stored) -> Stored:
    """Open what holds the dense tensors; weights of all experts are put together as `stored` has them."""
    return StoredDirectory(path, wanted=stored.entries) if is_directory(path) else open_stored(path)


def _as_json(
    arguments: argparse.Namespace, layout: str, weights: Sequence[Kept], findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return plain data; keys are only ever added under the same FORMAT."""
    told = [{"severity": one.severity, "file": one.file, "name": one.entry, "message": one.message} for one in findings]
    return {
        "format": FORMAT,
        "checkpoint": arguments.checkpoint,
        "against": arguments.against,
        "layout": layout or None,
        "weights": [each.to_json() for each in weights],
        "findings": told,
    }


def _as_text(layout: str, weights: Sequence[Kept], findings: Sequence[Finding]) -> str:
    columns = ("name", "recipe", "shape", "bits", "scales", "|error|/|values|", "SNR dB")
    body = [table(columns, [_row(each) for each in weights], right=columns[3:]) + "\n"] if weights else []
    if findings:
        keys = ("severity", "name", "message")
        body.append(table(keys, [[one.severity, one.entry or "-", one.message] for one in findings]) + "\n")
    kinds = ", ".join(dict.fromkeys(each.kind for each in weights)) or "no recipe"
    others = sum(each.others > 0 for each in weights)
    errors = sum(one.severity == "error" for one in findings)
    verdict = f"{errors} errors, {len(findings) - errors} warnings" if findings else "no errors"
    told = f", layout {layout}" if layout else ""
    body.append(
        f"{verdict} ({len(weights)} quantized tensors, {others} of them with scales that their values do not ask for; "
        f"{kinds}{told})"
    )
    return "\n".join(body)


def _row(each: Kept) -> tuple[str, ...]:
    _, relative, snr = ("", "", "") if each.error is None else each.error.cells()
    scales = "-" if not each.scales else "as asked" if not each.others else f"{each.others} of {each.scales} others"
    return each.name, each.kind, str(list(each.shape)), f"{each.bits:.2f}", scales, relative, snr
