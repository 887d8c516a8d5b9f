"""DCP checkpoints: `.metadata`, archives, the manifest, checksums and digests; read in every way there is."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, SafeFileSystemReader, read_manifest
from dcp_adapters.digests.stored import source_digests
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.inspect import inspect_checkpoint
from dcp_adapters.stored.verifying.verify import verify
from dcp_adapters.torch_private import is_marked
from tests.adversary.bytes_read.changes import EXTREMES, TEXTS, changed_bytes, changed_json
from tests.adversary.bytes_read.checkpoint_readers import READERS, stored
from tests.adversary.bytes_read.outcomes import Canaries, Case, facts
from tests.adversary.bytes_read.programs import changed_archive, changed_pickle
from tests.dcp_adapters import tampering
from tests.dcp_adapters.cases import alone
from tests.dcp_adapters.tampering import FILES
from tests.dcp_adapters.test_hostile import places, put, target

DATA = ".distcp"
Change = Callable[[Random, dict[str, bytes], Case], None]


class Checkpoints:
    """Two checkpoints of the same tensors, from two ranks without digests, and from one rank with them."""

    def __init__(self, root: Path) -> None:
        self.root, self.canaries = root, Canaries(root)
        self.path, self.readers = root / "checkpoint", dict(READERS)
        self.values = self.make(root)
        for name in self.originals:
            shutil.copyfile(root / name / FILES[0], root / f"outside{DATA}")
        self.expected = {name: self._of_original(name) for name in self.originals}

    def make(self, root: Path) -> dict[str, Any]:
        """Save the originals; returns the facts of what a load gives."""
        tampering.write(root / "by two ranks")
        state = target()
        with alone():
            dcp.load(state, storage_reader=SafeFileSystemReader(root / "by two ranks"), planner=QuantizedLoadPlanner())
            dcp.save(state | {"step": 7}, checkpoint_id=root / "by one", planner=QuantizedSavePlanner(digest=True))
        self.originals = {name: files_of(root / name) for name in ("by two ranks", "by one")}
        return facts(state)

    def scenario(self, rng: Random) -> str:
        """One mutant, read in one way."""
        name = rng.choice(list(self.originals))
        case = Case([name], (str(self.path), "checkpoint", ".metadata", MANIFEST))
        files = self._mutant(rng, name, case)
        write(self.path, files)
        reader = rng.choice(list(self.readers))
        try:
            return self.readers[reader](self, case, self.expected[name])
        finally:
            self.canaries.check(case.told)

    def _of_original(self, name: str) -> dict[str, Any]:
        write(self.path, self.originals[name])
        assert verify(self.path).ok
        return {
            "stored": stored(self.path),
            "manifest": read_manifest(self.path),
            "digests": source_digests(StoredCheckpoint(self.path)),
            "inspection": inspect_checkpoint(StoredCheckpoint(self.path)).to_json(),
        }

    # -- mutants -------------------------------------------------------------------------------------------------------

    def _mutant(self, rng: Random, name: str, case: Case) -> dict[str, bytes]:
        files = dict(self.originals[name])
        kinds = self.kinds()
        kind = rng.choice(list(kinds))
        case.told.append(kind)
        kinds[kind](rng, files, case)
        return files

    def kinds(self) -> dict[str, Change]:
        """What is done to the files of a checkpoint, by name."""
        return {
            "bytes of a file": self._bytes,
            "operations of .metadata": self._operations,
            "records of .metadata": self._records,
            "places": self._places,
            "the manifest": self._manifest,
            "the checksums": self._checksums,
            "an archive": self._archive,
        }

    def _bytes(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        name = rng.choice((".metadata", *files))
        case.told.append(name)
        files[name] = changed_bytes(rng, files[name], case.told)

    def _operations(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        files[".metadata"] = changed_pickle(rng, files[".metadata"], case.told, self.canaries.path())

    def _records(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        metadata = pickle.loads(files[".metadata"])
        found = [place for place in places(metadata) if not isinstance(place[0], MetadataIndex)]
        for _ in range(rng.choice((1, 1, 2))):
            holder, key = place = rng.choice(found)
            value = _other_value(rng, holder[key] if isinstance(holder, dict | list) else vars(holder)[key], metadata)
            case.told.append(f"{type(holder).__name__}.{key} is {value!r:.200}")
            put(place, value)
        put_metadata(files, metadata, rng)

    def _places(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        """Chunks exchanged, in another file, overlapping, or under another name."""
        metadata = pickle.loads(files[".metadata"])
        storage, records = metadata.storage_data, metadata.state_dict_metadata
        one, other = rng.sample(list(storage), 2)
        kind = rng.choice(
            ("exchanged", "shared", "moved", "elsewhere", "entries exchanged", "left out", "chunk left out")
        )
        case.told.append(f"{kind}: {one.fqn} {one.offset}, {other.fqn} {other.offset}")
        if kind == "exchanged":
            storage[one], storage[other] = storage[other], storage[one]
        elif kind == "shared":
            storage[one] = storage[other]
        elif kind == "moved":
            storage[one].offset += rng.choice((-1, 1, 8, -8, 64, 10**6, -(10**6)))
        elif kind == "elsewhere":
            storage[one].relative_path = rng.choice(
                (*files, f"../outside{DATA}", f"./{FILES[0]}", f"x/../{FILES[0]}", ".")
            )
        elif kind == "entries exchanged":
            records[one.fqn], records[other.fqn] = records[other.fqn], records[one.fqn]
        elif kind == "left out":
            if rng.random() < 0.5:
                del storage[one]
            else:
                del records[one.fqn]
        elif hasattr(records[one.fqn], "chunks"):
            records[one.fqn].chunks.pop()
        put_metadata(files, metadata, rng)

    def _manifest(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        """Other JSON in one or both of its copies; checksums and digests of the tensors stay."""
        metadata = pickle.loads(files[".metadata"])
        record = metadata.planner_data[MANIFEST_JSON]
        which = rng.choice(("both", "planner data", "entry", "entry alone"))
        changed = changed_json(rng, json.loads(json.dumps(record)), case.told, plain=True)
        case.told.append(which)
        if which in ("both", "planner data"):
            metadata.planner_data[MANIFEST_JSON] = changed
        if which == "entry alone":
            del metadata.planner_data[MANIFEST_JSON]
        if which != "planner data":
            try:
                text = json.dumps(changed).encode()
            except ValueError:  # more digits than Python writes
                text = b"{}"
            _replace(files, metadata, MANIFEST, torch.frombuffer(bytearray(text), dtype=torch.uint8))
        put_metadata(files, metadata, rng)

    def _checksums(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        metadata = pickle.loads(files[".metadata"])
        index = next(index for index in metadata.storage_data if index.fqn == CHECKSUMS)
        table = _tensor(files, metadata, index)
        kind = rng.choice(("bits", "rows exchanged", "row left out", "row twice", "dtype", "shape", "empty"))
        row = rng.randrange(len(table))
        case.told.append(f"{kind} {row}")
        changes: dict[str, Callable[[], Any]] = {
            "bits": lambda: table.index_put(
                (torch.tensor([row]), torch.tensor([rng.randrange(16)])), torch.tensor(9, dtype=torch.uint8)
            ),
            "rows exchanged": lambda: torch.cat([table[:, :8], table[:, 8:].roll(1, 0)], 1),
            "row left out": lambda: torch.cat([table[:row], table[row + 1 :]]),
            "row twice": lambda: torch.cat([table, table[row : row + 1]]),
            "dtype": lambda: table.to(torch.float32),
            "shape": lambda: table.reshape(-1, 8),
            "empty": lambda: table[:0],
        }
        _replace(files, metadata, CHECKSUMS, changes[kind]().contiguous())
        put_metadata(files, metadata, rng)

    def _archive(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        """Another archive behind the others, and its place in `.metadata`; the checksum is that of the original."""
        metadata = pickle.loads(files[".metadata"])
        index = rng.choice([index for index, info in metadata.storage_data.items() if not is_marked(info)])
        case.told.append(f"{index.fqn} {index.offset}")
        archive = changed_archive(rng, raw(files, metadata, index), case.told, self.canaries.path())
        append(files, metadata, index, archive)
        put_metadata(files, metadata, rng)


def write(path: Path, files: dict[str, bytes]) -> None:
    """The files of a directory, and nothing else."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def _other_value(rng: Random, value: Any, metadata: Metadata) -> Any:
    if rng.random() < 0.5:
        if isinstance(value, torch.Size) and len(value):
            at = rng.randrange(len(value))
            extents = list(value)
            extents[at] = rng.choice((extents[at] + 1, extents[at] - 1, 0, 2**62, -1))
            return rng.choice((torch.Size(extents), torch.Size(extents[::-1]), torch.Size(extents[:-1])))
        if isinstance(value, int):
            return rng.choice((value + 1, value - 1, -value, value * 2, rng.choice(EXTREMES)))
        if isinstance(value, torch.dtype):
            return rng.choice(
                (torch.uint8, torch.float32, torch.int64, torch.float8_e4m3fn, torch.complex128, torch.bool)
            )
        if isinstance(value, str):
            return rng.choice((value + "x", value[:-1], rng.choice(TEXTS)))
    holder, key = rng.choice(list(places(metadata)))
    elsewhere = holder[key] if isinstance(holder, dict | list) else vars(holder)[key]
    return rng.choice(
        (None, True, -1, 2**60, 0.5, "x", "../outside", [], {}, torch.Size([2**62]), elsewhere, elsewhere)
    )


def put_metadata(files: dict[str, bytes], metadata: Any, rng: Random) -> None:
    try:
        files[".metadata"] = pickle.dumps(metadata, protocol=rng.choice((2, 4)))
    except (RuntimeError, TypeError, AttributeError, UnicodeEncodeError):  # records of nonsense refuse to be written
        files[".metadata"] = files[".metadata"][:-1]


def raw(files: dict[str, bytes], metadata: Any, index: MetadataIndex) -> bytes:
    info = metadata.storage_data[index]
    return files[info.relative_path][info.offset : info.offset + info.length]


def _tensor(files: dict[str, bytes], metadata: Any, index: MetadataIndex) -> Any:
    return torch.load(io.BytesIO(raw(files, metadata, index)), weights_only=True)


def append(files: dict[str, bytes], metadata: Any, index: MetadataIndex, data: bytes) -> None:
    info = metadata.storage_data[index]
    info.offset, info.length = len(files[info.relative_path]), len(data)
    files[info.relative_path] += data


def _replace(files: dict[str, bytes], metadata: Any, name: str, tensor: torch.Tensor) -> None:
    """Another tensor as the one chunk of an entry."""
    held = io.BytesIO()
    torch.save(tensor, held)
    index = next(index for index in metadata.storage_data if index.fqn == name)
    entry = metadata.state_dict_metadata[name]
    fresh = tampering.entry(tensor, [type(entry.chunks[0])(torch.Size([0] * tensor.ndim), tensor.shape)])
    metadata.state_dict_metadata[name] = fresh
    info = metadata.storage_data.pop(index)
    index = MetadataIndex(name, torch.Size([0] * tensor.ndim))
    metadata.storage_data[index] = info
    append(files, metadata, index, held.getvalue())
