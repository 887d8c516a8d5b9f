"""Checkpoints that are deltas to others: their marks, coded chunks, the link to the base, and the base itself.

runs/step-1    full, the save that step-2 is a delta to; at times its bytes are changed, too
runs/step-2    the mutant
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, SafeFileSystemReader, keep_latest, latest_verified
from dcp_adapters.delta.coding.zstd import compress, decompress
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON
from dcp_adapters.torch_private import DELTA, is_marked
from tests.adversary.bytes_read.changes import TEXTS, as_text, changed_bytes, changed_json
from tests.adversary.bytes_read.checkpoint_readers import READERS, Reader, stored
from tests.adversary.bytes_read.checkpoints import Change, Checkpoints, append, files_of, put_metadata, raw, write
from tests.adversary.bytes_read.outcomes import Case, facts
from tests.dcp_adapters import tampering
from tests.dcp_adapters.cases import alone
from tests.dcp_adapters.test_hostile import target

OLDER, BASE, NEWEST = "step-0", "step-1", "step-2"


class DeltaCheckpoints(Checkpoints):
    """Two deltas to one checkpoint: one of a few changes, one of tensors that are the same, changed, and others."""

    def make(self, root: Path) -> dict[str, Any]:
        runs = root / "runs"
        runs.mkdir()
        self.path, self.base, self.older = runs / NEWEST, runs / BASE, runs / OLDER
        self.readers = READERS | OWN
        tampering.write(self.base)
        state = target()
        with alone():
            dcp.load(state, storage_reader=SafeFileSystemReader(self.base), planner=QuantizedLoadPlanner())
            for value in state.values():
                part = value.payload if hasattr(value, "payload") else value
                part.view(-1)[:1].zero_()
            for name, options in (("a delta", {}), ("a delta with digests", {"digest": True})):
                planner = QuantizedSavePlanner(delta_to=self.base, **options)
                dcp.save(state | {"step": 7}, checkpoint_id=runs / name, planner=planner)
        self.originals = {}
        for name in ("a delta", "a delta with digests"):
            self.originals[name] = files_of(runs / name)
            (runs / name).rename(root / name)
        self.of_base = files_of(self.base)
        return facts(state)

    def scenario(self, rng: Random) -> str:
        changed = rng.random() < 0.2
        try:
            if changed:
                self._change_base(rng)
            return super().scenario(rng)
        finally:
            if changed or not self.base.exists():
                write(self.base, self.of_base)

    def kinds(self) -> dict[str, Change]:
        return super().kinds() | {
            "a coded chunk": self._coded,
            "a coded chunk, again": self._coded,
            "marks": self._marks,
            "the base": self._link,
        }

    def _change_base(self, rng: Random) -> None:
        """Its data, its records, or another checkpoint in its place."""
        kind, files = rng.choice(("data", "data", "records", "gone", "a delta", "file gone")), dict(self.of_base)
        data = rng.choice([name for name in files if name != ".metadata"])
        if kind == "data":
            files[data] = changed_bytes(rng, files[data], [])
        elif kind == "records":
            files[".metadata"] = changed_bytes(rng, files[".metadata"], [])
        elif kind == "gone":
            del files[".metadata"]
        elif kind == "a delta":
            files = self.originals["a delta"]
        else:
            del files[data]
        write(self.base, files)

    # -- mutants -------------------------------------------------------------------------------------------------------

    def _coded(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        """Other frames or other streams, compressed anew; the checksum is that of the chunk that was saved."""
        metadata = pickle.loads(files[".metadata"])
        marked = {
            index: raw(files, metadata, index) for index, info in metadata.storage_data.items() if is_marked(info)
        }
        changes = [index for index, data in marked.items() if b'"frames"' in data[:20000].partition(b"\n")[0]]
        index = rng.choice(changes if rng.random() < 0.8 else list(marked))
        line, _, body = marked[index].partition(b"\n")
        record = json.loads(line)
        kind = rng.choice(("line", "line", "stream", "stream", "bytes", "another's", "longer"))
        case.told.append(f"{kind} of {index.fqn} {index.offset} {line[:200]!r}")
        if kind == "line":
            line = as_text(changed_json(rng, record, case.told)).encode(errors="surrogatepass")
        elif kind == "stream" and "frames" in record:
            frame = rng.choice(record["frames"])
            line, body = _other_stream(rng, record, frame, body, case)
        elif kind == "another's":
            line, _, body = rng.choice(list(marked.values())).partition(b"\n")
        elif kind == "longer":
            body += rng.randbytes(rng.choice((1, 8, 1000)))
        else:
            body = changed_bytes(rng, body, case.told)
        append(files, metadata, index, line + b"\n" + body)
        put_metadata(files, metadata, rng)

    def _marks(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        """A chunk that is coded and does not say so, the other way round, or marked as something else."""
        metadata = pickle.loads(files[".metadata"])
        index = rng.choice(list(metadata.storage_data))
        if rng.random() < 0.2:
            index = next(index for index in metadata.storage_data if index.fqn in (MANIFEST, CHECKSUMS))
        marks: Any = rng.choice(
            (None, [], [DELTA], [DELTA, DELTA], ["zstd", DELTA], [DELTA, "zstd"], ["qtensor.delta/2"], (DELTA,), DELTA)
        )
        marks = marks if rng.random() < 0.9 else [rng.choice(TEXTS)]
        case.told.append(f"{index.fqn} {index.offset} is marked {marks!r:.100}")
        metadata.storage_data[index].transform_descriptors = marks
        put_metadata(files, metadata, rng)

    def _link(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        """Another base in the planner data: another path, digest or version, or none."""
        metadata = pickle.loads(files[".metadata"])
        record = metadata.planner_data[MANIFEST_JSON]
        link = record["base"]
        paths = (f"../{NEWEST}", ".", "../../runs/step-1", f"../{BASE}/", str(self.base), "..", "../nothing", *TEXTS)
        changes: dict[str, Callable[[], Any]] = {
            "path": lambda: link.__setitem__("path", rng.choice(paths)),
            "digest": lambda: link.__setitem__("digest", rng.choice(("0" * 32, link["digest"].upper(), "", 0, None))),
            "version": lambda: record.__setitem__("format_version", rng.choice((1, 3, True, 2.0, "2", None))),
            "none": lambda: record.pop("base"),
            "changed": lambda: record.__setitem__("base", changed_json(rng, link, case.told, plain=True)),
        }
        kind = rng.choice(list(changes))
        changes[kind]()
        case.told.append(f"the base's {kind}: {record.get('base')!r:.200}")
        put_metadata(files, metadata, rng)


def _other_stream(rng: Random, record: Any, frame: list[Any], body: bytes, case: Case) -> tuple[bytes, bytes]:
    """The line and the body with another content of one stream of a frame."""
    streams, at, place = [], 0, 0
    for each in record["frames"]:
        for number, length in enumerate(each[3]):
            if each is frame and number == 0:
                place = len(streams)
            streams.append(body[at : at + length])
            at += length
    one = rng.randrange(len(frame[3]))
    contents = decompress(streams[place + one], 2**20, "stream")
    changed = rng.choice((changed_bytes(rng, contents, case.told), contents * 2, b"\xff" * 10**6, contents[:-1]))
    streams[place + one] = compress(changed, 3)
    frame[3][one] = len(streams[place + one])
    return json.dumps(record).encode(), b"".join(streams)


# -- readers of a directory of saves -----------------------------------------------------------------------------------


def _read_latest(its: Any, case: Case, expected: dict[str, Any]) -> str:
    """The mutant verifies and has its values, or is passed over with a reason; nothing raises."""
    case.names += (NEWEST,)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = latest_verified(its.path.parent, level="deep", newest="number")
    if found.path == its.path:
        return case.read(
            "latest_verified, then StoredCheckpoint", lambda: stored(its.path, check=False), expected["stored"]
        )
    if found.path not in (its.base, None) or not any(NEWEST in str(each.message) for each in said):
        raise case.found("latest_verified", f"it gives {found.path}, and says {[str(each.message) for each in said]}")
    return "told"


def _read_retained(its: Any, case: Case, expected: dict[str, Any]) -> str:
    """What verifies stays with what it needs; where that cannot be told nothing goes."""
    case.names += (NEWEST, BASE)
    write(its.older, its.of_base)
    before = sorted(path.name for path in its.path.parent.iterdir())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = keep_latest(its.path.parent, 1, newest="number")
    except Exception as error:
        case.check_clear("keep_latest", error)
        if sorted(path.name for path in its.path.parent.iterdir()) != before:
            raise case.found("keep_latest", f"{error!r:.1000}, and something was removed") from error
        return "refused"
    finally:
        shutil.rmtree(its.older, ignore_errors=True)
    if not its.path.exists() or (its.path not in done.verified and not its.base.exists()):
        raise case.found("keep_latest", f"it has removed {done.removed}, and {done.verified} verified")
    if its.path not in done.verified:
        return "told"
    return case.read("keep_latest, then StoredCheckpoint", lambda: stored(its.path, check=False), expected["stored"])


OWN: dict[str, Reader] = {"latest": _read_latest, "retained": _read_retained}
