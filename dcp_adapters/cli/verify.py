"""The command `verify`: stored/verifying/ checks checkpoints, hf/reading/verify_directory.py checks directories."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_adapters.cli.arguments import add_checkpoint, add_json, add_progress
from dcp_adapters.cli.printing import FINE, FOUND, show
from dcp_adapters.hf.reading.stored_directory import is_directory
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.plain.progress_bar import Advance, progress_bar
from dcp_adapters.plain.tables import human_bytes, table
from dcp_adapters.stored.checkpoint import checkpoint_directory
from dcp_adapters.stored.verifying.verify import verify

FORMAT = "dcp_adapters.verify/1"
ABOUT = """\
Read all of a checkpoint and check it: files missing or cut short, checksums and digests where it has some, the manifest
against what is stored. Of a Hugging Face directory: NaN, and the digests in the files of an export.
--deep reads the quantized tensors once more and finds what no checksum can: masters that do not requantize to the
weights beside them, an amax history that cannot have led to its scale, and (as warnings: calibration leaves such, too)
scales that their values do not ask for. Exit status 1 if there is any error; warnings alone leave it 0."""
EXAMPLES = """\
examples:
  %(prog)s runs/step-1000
  %(prog)s runs/step-1000 --deep                     are weights, scales and optimizer of one step?
  %(prog)s runs/step-1000 --own-scales               trained alone, never calibrated or imported
  %(prog)s runs/step-1000 && rm -r runs/step-0500"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_checkpoint(parser)
    parser.add_argument("--deep", action="store_true", help="also compare masters, histories and scales with payloads")
    parser.add_argument(
        "--own-scales",
        action="store_true",
        help="--deep, where no scale is calibrated, converted or imported: one its values do not ask for is an error",
    )
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check a checkpoint or a directory, and print the findings."""
    hugging_face = is_directory(arguments.checkpoint)
    directory = Path(arguments.checkpoint) if hugging_face else checkpoint_directory(arguments.checkpoint)
    level: Any = "own_scales" if arguments.own_scales else "deep" if arguments.deep else "bytes"
    # the bar needs to know how much there is before the first chunk is read
    files = directory.glob("*.safetensors" if hugging_face else "*.distcp")
    with progress_bar("verifying", sum(file.stat().st_size for file in files), enabled=arguments.progress) as advance:
        report = (
            verify_directory(directory, level=level, advance=advance)
            if hugging_face
            else verify(directory, level=level, progress=_report_steps(advance))
        )
    findings = [
        {"severity": found.severity, "file": found.file, "entry": found.entry, "message": found.message}
        for found in report.findings
    ]
    counts = {name: getattr(report, name) for name in ("tensors", "chunks", "bytes", "checksums")}
    if level != "bytes":
        counts |= {"judged": report.judged, "masters": report.masters}
    errors = sum(found["severity"] == "error" for found in findings)
    if arguments.json:
        show({"format": FORMAT, "checkpoint": arguments.checkpoint, **counts, "findings": findings})
        return FOUND if errors else FINE
    if findings:
        keys = ("severity", "file", "entry", "message")
        show(table(keys, [[str(found[key] or "-") for key in keys] for found in findings]) + "\n")
    looked_at = f"{counts['tensors']} tensors, {counts['chunks']} chunks, {human_bytes(counts['bytes'])}"
    verdict = f"{errors} errors, {len(findings) - errors} warnings" if findings else "no errors"
    judged = f", {report.judged} tensors judged, {report.masters} masters" if level != "bytes" else ""
    show(f"{verdict} ({looked_at}, {counts['checksums']} checksums{judged})")
    return FOUND if errors else FINE


def _report_steps(advance: Advance) -> Callable[[int, int], None]:
    """Return what tells `advance` the bytes since the last call, for work that reports all of them so far."""
    before = 0

    def report(done: int, _total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return report
