"""Deltas: the file, its header and table written anew with checksums that fit, its streams, and chains of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save

from dcp_adapters import apply_deltas, delta_from_bytes, delta_to_bytes, open_delta, patched_copy
from dcp_adapters.delta.coding.zstd import compress, decompress
from dcp_adapters.delta.make import delta_between
from dcp_adapters.delta.stored_states import InMemory, open_state
from qtensor import Float8CurrentScaling, NVFP4BlockScaling, quantize
from tests.adversary.bytes_read.changes import EXTREMES, as_text, changed_bytes, changed_json
from tests.adversary.bytes_read.directories import joined, split
from tests.adversary.bytes_read.outcomes import Case, facts
from tests.dcp_adapters.cases import alone, values

KEY, TABLE = "qtensor.delta", "table"


def checksum(data: bytes) -> str:
    """As the format has it."""
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(data))


def states(seed: int) -> dict[str, Any]:
    """One of three states of the same tensors."""
    steps = 0.01 * seed * values((32, 64), 7, torch.float32)
    return {
        "w": quantize(values((32, 64), 1, torch.float32) + steps, NVFP4BlockScaling()),
        "v": quantize(values((32, 64), 2, torch.float32) + steps, Float8CurrentScaling()),
        "b": values((64,), 3 + seed),
        "count": torch.tensor(seed),
    }


class Deltas:
    """Two deltas in a row between states in memory, and two between checkpoints with an entry of bytes."""

    def __init__(self, root: Path) -> None:
        import torch.distributed.checkpoint as dcp

        from dcp_adapters import QuantizedSavePlanner

        self.path, self.out = root / "delta", root / "out"
        self.bases = [root / str(number) for number in range(3)]
        for number, base in enumerate(self.bases):
            with alone():
                dcp.save(states(number) | {"step": number}, checkpoint_id=base, planner=QuantizedSavePlanner())
        held = [InMemory(states(number)) for number in range(3)]
        stored = [open_state(base) for base in self.bases]
        self.originals = {
            kind: [delta_to_bytes(delta_between(sides[at], sides[at + 1], versions=(at, at + 1))) for at in range(2)]
            for kind, sides in (("in memory", held), ("stored", stored))
        }

        self.begins = {delta_from_bytes(made[0]).base for made in self.originals.values()}

    def scenario(self, rng: Random) -> str:
        """One mutant, or one chain that is none."""
        if rng.random() < 0.1:
            return self._chain(rng)
        kind = rng.choice(("in memory", "in memory", "in memory", "stored"))
        case = Case([kind], (str(self.path), "the delta", "delta"))
        data = self._mutant(rng, self.originals[kind][0], case)
        self.path.write_bytes(data)
        if kind == "stored":
            return self._copied(case)
        reader = rng.choice((self._applied, self._applied, self._checked))
        return reader(case, data if rng.random() < 0.5 else None)

    def _mutant(self, rng: Random, data: bytes, case: Case) -> bytes:
        kinds: dict[str, Callable[[Random, bytes, list[str]], bytes]] = {
            "bytes": changed_bytes,
            "the header of the file": _file_header,
            "the header": _header,
            "the table": _table,
            "a stream": _stream,
        }
        kind = rng.choices(list(kinds), (2, 2, 3, 5, 3))[0]
        case.told.append(kind)
        return kinds[kind](rng, data, case.told)

    # -- readers -------------------------------------------------------------------------------------------------------

    def _opened(self, data: bytes | None) -> Any:
        return open_delta(self.path) if data is None else delta_from_bytes(data)

    def _checked(self, case: Case, data: bytes | None) -> str:
        """Everything decoded; what it leads to is not asked."""
        case.forged = True
        return case.read("Delta.check", lambda: self._opened(data).check(), None)

    def _applied(self, case: Case, data: bytes | None) -> str:
        """The result, or the state as it was; the digest of the result covers all of it."""
        state = states(0)
        before = facts(state)

        def apply() -> dict[str, Any]:
            try:
                count = apply_deltas(state, [self._opened(data)])
            except BaseException as error:
                if facts(state) != before:
                    raise case.found("apply_deltas", f"{error!r:.1500} and the target has changed") from error
                raise
            assert count == (before != facts(state))
            return facts(state)

        return case.read("apply_deltas", apply, self._expected(before, facts(states(1))))

    def _copied(self, case: Case) -> str:
        """A checkpoint, or nothing."""
        shutil.rmtree(self.out, ignore_errors=True)

        def copy() -> dict[str, Any]:
            try:
                patched_copy(self.bases[0], [self.path], self.out)
            except BaseException as error:
                if self.out.exists():
                    raise case.found("patched_copy", f"{error!r:.1500} and something was written") from error
                raise
            return _values(self.out)

        case.names += (str(self.bases[0]),)
        expected = self._expected(_values(self.bases[0]), _values(self.bases[1]))
        return case.read("patched_copy", copy, expected)

    def _expected(self, base: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """The result; or the base, of a delta that says that this is what it leads to."""
        with suppress(Exception):
            if open_delta(self.path).result in self.begins:
                return base
        return result

    def _chain(self, rng: Random) -> str:
        """Deltas in another order, with gaps, repeated, or none of the state that they are applied to."""
        begin, order = rng.randrange(3), [rng.randrange(2) for _ in range(rng.randrange(4))]
        case = Case([f"a chain of {order} from {begin}"], ("delta",))
        state = states(begin)
        before = facts(state)
        end = order[-1] + 1 if order else begin

        def apply() -> dict[str, Any]:
            try:
                apply_deltas(state, [delta_from_bytes(self.originals["in memory"][at]) for at in order])
            except BaseException as error:
                if facts(state) != before:
                    raise case.found("apply_deltas", f"{error!r:.1500} and the target has changed") from error
                raise
            return facts(state)

        return f"chain {case.read('apply_deltas', apply, facts(states(end)))}"


def _values(path: Path) -> dict[str, Any]:
    opened = open_state(path, check=True)
    parts = {
        entry.key(part): tensor
        for entry in opened.entries.values()
        for part, tensor in opened.parts(entry.name).items()
    }
    return facts(parts) | {name: opened.read_blob(name) for name in opened.blobs}


# -- mutants -----------------------------------------------------------------------------------------------------------


def _file_header(rng: Random, data: bytes, told: list[str]) -> bytes:
    header, rest = split(data)
    return joined(as_text(changed_json(rng, header, told)), rest)


def _opened(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    header, _ = split(data)
    return load(data), json.loads(header["__metadata__"][KEY])["header"]


def _written(tensors: dict[str, torch.Tensor], header: Any) -> bytes:
    """With a checksum that fits, as far as the header can be written as JSON."""
    try:
        text = json.dumps(json.loads(as_text(header)), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        text = as_text(header)
    sound = checksum(text.encode(errors="surrogatepass"))
    outer = f'{{"checksum":"{sound}","header":{text}}}'
    return bytes(save(tensors, {KEY: outer.encode(errors="replace").decode()}))


def _header(rng: Random, data: bytes, told: list[str]) -> bytes:
    tensors, header = _opened(data)
    return _written(tensors, changed_json(rng, header, told))


def _table(rng: Random, data: bytes, told: list[str]) -> bytes:
    tensors, header = _opened(data)
    record = json.loads(decompress(_bytes(tensors[TABLE]), 2**28, "table"))
    text = as_text(changed_json(rng, record, told))
    table = compress(text.encode(errors="surrogatepass"), 3)
    return _written(tensors | {TABLE: _tensor(table)}, header | {TABLE: checksum(table)})


def _stream(rng: Random, data: bytes, told: list[str]) -> bytes:
    """A frame or an entry of bytes with other contents, compressed and summed anew."""
    tensors, header = _opened(data)
    record = json.loads(decompress(_bytes(tensors[TABLE]), 2**28, "table"))
    number = rng.randrange(len(record["frames"]))
    frame, name = record["frames"][number], f"frame.{number:06d}"
    held, streams, at = _bytes(tensors[name]), [], 0
    for length in frame[4]:
        streams.append(held[at : at + length])
        at += length
    one = rng.randrange(len(streams))
    kind = rng.choice(("contents", "compressed bytes", "longer", "another's", "count"))
    told.append(f"{kind} of stream {one} of frame {number}")
    if kind == "contents":
        streams[one] = compress(changed_bytes(rng, decompress(streams[one], 2**20, "stream"), told), 3)
    elif kind == "compressed bytes":
        streams[one] = changed_bytes(rng, streams[one], told)
    elif kind == "longer":
        streams[one] = compress(b"\xff" * rng.choice((100, 10**5, 10**8)), 3)
    elif kind == "another's":
        streams[one] = rng.choice(streams)
    else:
        place = rng.randrange(1, 4)
        frame[place] = rng.choice((frame[place] + 1, frame[place] - 1, 0, rng.choice(EXTREMES)))
    frame[4] = [len(stream) for stream in streams]
    frame[5] = checksum(b"".join(streams))
    table = compress(as_text(record).encode(), 3)
    tensors |= {name: _tensor(b"".join(streams)), TABLE: _tensor(table)}
    return _written(tensors, header | {TABLE: checksum(table)})


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
