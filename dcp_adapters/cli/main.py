"""The command line, `python -m dcp_adapters COMMAND ...`; arguments.py and help_texts.py describe the commands.

Arguments in, text or JSON out; other modules do the work. Exit status: 0, all is well; 1, something was found (an error
by verify, a difference by diff or digest); 2, the command could not do its work (no such path, no checkpoint, an
unknown recipe): one message on stderr.
"""

import argparse
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_adapters.cli.arguments import PROGRAM, parser, refuse_unencodable
from dcp_adapters.cli.diff import diff
from dcp_adapters.cli.digest import digest_of_each, opened
from dcp_adapters.cli.report.measure import measure_checkpoint
from dcp_adapters.cli.report.page import page
from dcp_adapters.convert.convert_checkpoint import convert_checkpoint, plan_conversion
from dcp_adapters.delta.files import patched_copy, write_delta
from dcp_adapters.format.recipe_names import target_named
from dcp_adapters.format.source import Stored
from dcp_adapters.gguf.export import export_gguf
from dcp_adapters.gguf.plan import GGUF
from dcp_adapters.hf.exporting.export import export_hf
from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.plain.progress_bar import Advance, progress_bar
from dcp_adapters.plain.tables import human_bytes, table
from dcp_adapters.stored.checkpoint import StoredCheckpoint, checkpoint_directory
from dcp_adapters.stored.inspect import inspect_checkpoint
from dcp_adapters.stored.verify import verify

FINE, FOUND, FAILED = 0, 1, 2
VERIFY_FORMAT = "dcp_adapters.verify/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `argv` is without the program's name."""
    try:
        arguments = parser(COMMANDS).parse_args(argv)
        refuse_unencodable(arguments)
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python flushes once more at its end
        return FAILED
    except (OSError, ValueError, EOFError, ImportError, pickle.PickleError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return FAILED


# -- commands ----------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    found = inspect_checkpoint(_opened(arguments.checkpoint), arguments.match)
    _show(found.to_json() if arguments.json else found.render())
    return FINE


def _report(arguments: argparse.Namespace) -> int:
    checkpoint = _opened(arguments.checkpoint)
    against = None if arguments.against is None else _opened(arguments.against)
    target = None
    if arguments.output is not None or not arguments.json:
        target = Path(arguments.output or f"{checkpoint.path.resolve().name}-report.html")
        if target.is_dir() or not target.parent.is_dir():  # now, not when all has been measured
            raise ValueError(f"{target}: expected a file in a directory that exists")
    total = sum(tensor.nbytes for tensor in inspect_checkpoint(checkpoint, arguments.match).tensors)
    with progress_bar("measuring", total, enabled=arguments.progress) as advance:
        found = measure_checkpoint(checkpoint, against, arguments.match, advance=advance)
    if target is not None:
        target.write_text(page(found), encoding="utf-8")
    _show(found.to_json() if arguments.json else f"{target}: {len(found.tensors)} tensors")
    return FINE


def _verify(arguments: argparse.Namespace) -> int:
    hugging_face = is_directory(arguments.checkpoint)
    directory = Path(arguments.checkpoint) if hugging_face else checkpoint_directory(arguments.checkpoint)
    level: Any = "own_scales" if arguments.own_scales else "deep" if arguments.deep else "bytes"
    files = directory.glob("*.safetensors" if hugging_face else "*.distcp")
    with progress_bar("verifying", sum(file.stat().st_size for file in files), enabled=arguments.progress) as advance:
        report = (
            verify_directory(directory, level=level, advance=advance)
            if hugging_face
            else verify(directory, level=level, progress=_steps(advance))
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
        _show({"format": VERIFY_FORMAT, "checkpoint": arguments.checkpoint, **counts, "findings": findings})
        return FOUND if errors else FINE
    if findings:
        keys = ("severity", "file", "entry", "message")
        _show(table(keys, [[str(found[key] or "-") for key in keys] for found in findings]) + "\n")
    looked_at = f"{counts['tensors']} tensors, {counts['chunks']} chunks, {human_bytes(counts['bytes'])}"
    verdict = f"{errors} errors, {len(findings) - errors} warnings" if findings else "no errors"
    judged = f", {report.judged} tensors judged, {report.masters} masters" if level != "bytes" else ""
    _show(f"{verdict} ({looked_at}, {counts['checksums']} checksums{judged})")
    return FOUND if errors else FINE


def _digest(arguments: argparse.Namespace) -> int:
    paths = [arguments.a] if arguments.b is None else [arguments.a, arguments.b]
    sources = opened(paths, arguments.prefix)
    total = sum(tensor.nbytes for source in sources for tensor in source.entries.values())
    with progress_bar("digesting", total, enabled=arguments.progress) as advance:
        found = digest_of_each(paths, sources, advance=advance)
    _show(found.to_json() if arguments.json else found.render())
    return FINE if found.sound else FOUND


def _diff(arguments: argparse.Namespace) -> int:
    a, b = _opened(arguments.a), _opened(arguments.b)
    total = sum(tensor.nbytes for tensor in a.entries.values())
    with progress_bar("comparing", total, enabled=arguments.progress) as advance:
        found = diff(a, b, advance=advance)
    _show(found.to_json() if arguments.json else found.render())
    return FOUND if found.differences else FINE


def _convert(arguments: argparse.Namespace) -> int:
    to = target_named(arguments.to, _options(arguments.option))
    source = _opened(arguments.source, check=arguments.checksums)
    plan = plan_conversion(source.entries, to, arguments.include, arguments.exclude)
    for pattern in plan.idle:
        print(f"{PROGRAM}: warning: --exclude {pattern} matches no tensor", file=sys.stderr)
    total = sum(tensor.nbytes for tensor in source.entries.values()) + sum(map(source.blob_size, source.blobs))
    with progress_bar("converting", total, enabled=arguments.progress) as advance:
        done = convert_checkpoint(source, arguments.destination, plan, advance=advance)
    _show(done.to_json() if arguments.json else done.render())
    return FINE


def _delta(arguments: argparse.Namespace) -> int:
    made = write_delta(
        arguments.old,
        arguments.new,
        arguments.out,
        verify_checksums=arguments.checksums,
        progress=arguments.progress,
    )
    _show(made.to_json() if arguments.json else made.render())
    return FINE


def _apply(arguments: argparse.Namespace) -> int:
    done = patched_copy(arguments.base, arguments.deltas, arguments.out, progress=arguments.progress)
    _show(done.to_json() if arguments.json else done.render())
    return FINE


def _export(arguments: argparse.Namespace) -> int:
    if (arguments.layout == GGUF.name) != (arguments.like is not None):
        raise ValueError(f"--layout {GGUF.name} and --like go together: a GGUF file is made like another of the model")
    if arguments.like is not None:
        return _export_gguf(arguments)
    out = export_hf(
        arguments.source,
        arguments.destination,
        layout=arguments.layout,
        config=arguments.config,
        rest=arguments.rest,
        prefix=arguments.prefix,
        fused_scales=arguments.fused_scales or "raise",
        max_shard_size=arguments.max_shard_size or "5GB",
        verify_checksums=arguments.checksums,
        progress=arguments.progress,
        adapters=arguments.adapters,
    )
    files = sorted(out.glob("*.safetensors"))
    total = human_bytes(sum(file.stat().st_size for file in files))
    if arguments.config is None:
        why = "without --config, config.json tells of the quantization alone; engines need the model's"
        print(f"{PROGRAM}: warning: {why}", file=sys.stderr)
    _show(f"{out}: {total} in {len(files)} file{'s' if len(files) > 1 else ''}, layout {arguments.layout}")
    return FINE


def _export_gguf(arguments: argparse.Namespace) -> int:
    for option in ("config", "fused_scales", "max_shard_size"):
        if getattr(arguments, option) is not None:
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"--layout {GGUF.name} takes no {flag}: it is one file, and --like describes the model")
    out = export_gguf(
        arguments.source,
        arguments.destination,
        like=arguments.like,
        rest=arguments.rest,
        prefix=arguments.prefix,
        verify_checksums=arguments.checksums,
        progress=arguments.progress,
        adapters=arguments.adapters,
    )
    _show(f"{out}: {human_bytes(out.stat().st_size)}, layout {GGUF.name}")
    return FINE


def _opened(path: str, *, check: bool = False) -> Stored:
    """A checkpoint, or a Hugging Face directory."""
    return StoredDirectory(path) if is_directory(path) else StoredCheckpoint(path, check=check)


def _steps(advance: Advance) -> Callable[[int, int], None]:
    """`advance`, told the bytes since the last time, for work that reports all of them so far."""
    before = 0

    def report(done: int, _total: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return report


def _options(texts: Sequence[str]) -> dict[str, str]:
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"--option {text}: expected KEY=VALUE, for example blocks=square")
        options[key] = value
    return options


def _show(result: Any) -> None:
    text = result if isinstance(result, str) else json.dumps(result, indent=2, allow_nan=False)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # a path may hold bytes that are no text


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "report": _report,
    "verify": _verify,
    "digest": _digest,
    "diff": _diff,
    "convert": _convert,
    "export": _export,
    "delta": _delta,
    "apply": _apply,
}
