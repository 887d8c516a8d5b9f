"""Changes of pickles, operation by operation, and of the zip files that torch.save puts around them."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from random import Random

from tests.adversary.bytes_read.changes import EXTREMES, TEXTS, changed_bytes
from tests.dcp_adapters.test_hostile import OPERATIONS, PROGRAMS, text

Records = list[tuple[str, bytes]]
NEW_NAMES = ("data/0", "data/1", "../data/0", "/etc/passwd", "constants.pkl", "version", "byteorder", "é", "")


def changed_pickle(rng: Random, data: bytes, told: list[str], sentinel: str) -> bytes:
    """One to three operations other than they were; or a program among them, which leaves a file at `sentinel`."""
    steps = _steps(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(steps))
        name, _, piece = steps[at]
        kind = rng.choices(("argument", "left out", "doubled", "swapped", "another", "a program"), (8, 2, 2, 2, 4, 2))[
            0
        ]
        if kind == "argument":
            at = rng.choice([place for place, step in enumerate(steps) if step[1] is not None] or [at])
            name, argument, piece = steps[at]
            piece = _with_argument(rng, argument, piece)
            steps[at] = (name, argument, piece)
        elif kind == "left out":
            del steps[at]
        elif kind == "doubled":
            steps.insert(at, steps[at])
        elif kind == "swapped":
            other = rng.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        elif kind == "another":
            steps[at : at + rng.randrange(2)] = [("another", None, rng.choice(OPERATIONS))]
        else:
            program = PROGRAMS[chosen := rng.choice(list(PROGRAMS))](sentinel)
            kind = f"the program {chosen}"
            steps.insert(at, (chosen, None, program[:-1].removeprefix(b"\x80\x04").removeprefix(b"\x80\x05")))
        told.append(f"{kind} of operation {at} {name}")
        if not steps:
            break
    return b"".join(piece for _, _, piece in steps)


def _steps(data: bytes) -> list[tuple[str, object, bytes]]:
    """(name, argument, bytes) of each operation of a sound pickle."""
    found = [(code.name, argument, place or 0) for code, argument, place in pickletools.genops(data)]
    ends = [place for _, _, place in found[1:]] + [len(data)]
    return [(name, argument, data[place:end]) for (name, argument, place), end in zip(found, ends, strict=True)]


def _with_argument(rng: Random, argument: object, piece: bytes) -> bytes:
    if isinstance(argument, str) and piece[:1] == b"c":  # a global: other modules, other names
        module, _, name = argument.partition(" ")
        module, name = rng.choice(((module, name + "x"), ("os", "mkdir"), ("torch", name), ("builtins", "eval")))
        return f"c{module}\n{name}\n".encode()
    if isinstance(argument, str):
        if rng.random() < 0.5:
            return text(argument[: rng.randrange(len(argument) + 1)] + rng.choice(("", "x", "0")))
        other = rng.choice(TEXTS).encode(errors="surrogatepass")
        return b"X" + struct.pack("<I", len(other)) + other
    if isinstance(argument, int) and piece[:1] in b"KMJ\x8a":
        other_number = rng.choice((argument + 1, argument - 1, argument * 2, rng.choice(EXTREMES)))
        return pickle.dumps(other_number, protocol=2)[2:-1]
    return changed_bytes(rng, piece, [])


def records_of(archive: bytes) -> Records:
    """(name, bytes) of the records of an archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return [(record.filename, opened.read(record)) for record in opened.infolist()]


def archive_of(records: Sequence[tuple[str, bytes]], *, compressed: bool = False) -> bytes:
    """An archive of these records."""
    held = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(held, "w") as opened:
        warnings.simplefilter("ignore")  # names that are there twice
        for name, data in records:
            opened.writestr(name, data, zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED)
    return held.getvalue()


def changed_archive(rng: Random, archive: bytes, told: list[str], sentinel: str) -> bytes:
    """An archive with other bytes between its records, with other records, or another description of its tensor."""
    kind = rng.choice(("bytes", "numbers", "records", "records", "description", "description", "description"))
    if kind == "bytes":
        return changed_bytes(rng, archive, told)
    if kind == "numbers":
        return _other_numbers(rng, archive, told)
    records = records_of(archive)
    if kind == "description":
        at = next(at for at, (name, _) in enumerate(records) if name.endswith("/data.pkl"))
        records[at] = (records[at][0], changed_pickle(rng, records[at][1], told, sentinel))
        return archive_of(records)
    return _other_records(rng, records, told)


def _other_numbers(rng: Random, archive: bytes, told: list[str]) -> bytes:
    """Other counts, sizes and places in a header of a record, in the directory, or behind it."""
    held = bytearray(archive)
    signature, size = rng.choice(((b"PK\x03\x04", 30), (b"PK\x01\x02", 46), (b"PK\x01\x02", 46), (b"PK\x05\x06", 22)))
    places = [at for at in range(len(held)) if held[at : at + 4] == signature]
    if not places:
        return bytes(held)
    at = rng.choice(places) + rng.randrange(4, size, 2)
    width = rng.choice((2, 4))
    now = int.from_bytes(held[at : at + width], "little")
    number = rng.choice((now + 1, now - 1, 0, rng.choice(EXTREMES))) % 2 ** (8 * width)
    held[at : at + width] = number.to_bytes(width, "little")
    told.append(f"{signature!r}: {now} at {at} becomes {number}")
    return bytes(held)


def _other_records(rng: Random, records: Records, told: list[str]) -> bytes:
    at = rng.randrange(len(records))
    name, data = records[at]
    top = name.partition("/")[0]
    changes: dict[str, Callable[[], object]] = {
        "left out": lambda: records.pop(at),
        "there twice": lambda: records.append((name, data)),
        "there twice, differently": lambda: records.append((name, data[::-1])),
        "renamed": lambda: records.__setitem__(at, (f"{top}/{rng.choice(NEW_NAMES)}", data)),
        "in another directory": lambda: records.__setitem__(at, (f"x/{name.partition('/')[2]}", data)),
        "cut": lambda: records.__setitem__(at, (name, data[: rng.randrange(len(data) + 1)])),
        "longer": lambda: records.__setitem__(at, (name, data + rng.randbytes(rng.choice((1, 8, 100))))),
        "with other bytes": lambda: records.__setitem__(at, (name, changed_bytes(rng, data, told))),
        "beside a new one": lambda: records.append((f"{top}/{rng.choice(NEW_NAMES)}", rng.randbytes(9))),
        "of another byte order": lambda: _set(records, "byteorder", b"big"),
        "compressed": lambda: None,
    }
    kind = rng.choice(list(changes))
    changes[kind]()
    told.append(f"the record {name} {kind}")
    return archive_of(records, compressed=kind == "compressed")


def _set(records: Records, own: str, data: bytes) -> None:
    for at, (name, _) in enumerate(records):
        if name.endswith(own):
            records[at] = (name, data)
