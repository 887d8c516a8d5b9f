"""A delta as bytes: a safetensors file, which stock tools can list.

    __metadata__    {"qtensor.delta": JSON of the format version, digests, versions and the checksum of the table, with
                    a checksum of its own}
    table           zstd of JSON: entries with recipes, dtypes and shapes; a record and a checksum for each frame
    frame.000000    uint8, one for each run of changes, see dcp_adapters/delta/coding/codec.py
    blob.000000     uint8, zstd: one for each entry of bytes that changed, whole

Nothing is unpickled. Checksums are xxh3_64. Whatever a damaged or hostile file says of sizes is checked before memory
is taken for it; frames are read and decoded when they are asked for.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from dcp_adapters.delta.coding.codec import Coded
from dcp_adapters.delta.coding.damage import damaged
from dcp_adapters.delta.coding.zstd import compress, decompress
from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.delta.patches.patch import Blob, CodedFrame, Delta, Read, blob_name, checksum, frame_name
from dcp_adapters.plain.durable import give_file_name, hidden_name, sync
from dcp_adapters.plain.plain_memory import memory_of
from dcp_adapters.plain.words import short
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.recipe_names import dtype_name
from qtensor.spec.recipes import Recipe

FORMAT_VERSION = 1
METADATA = "qtensor.delta"
TABLE = "table"
LEVEL = 19
MOST_TABLE = 2**28  # bytes of JSON: a million tensors
MOST_BLOB = 2**31
MALFORMED = (KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def delta_to_bytes(delta: Delta) -> bytes:
    """The file's bytes; the same for the same delta and version of zstd.

    Example:
        ```python
        >>> delta = HeldVersion({"weight": torch.zeros(64, 64)}).since({"weight": torch.ones(64, 64)}, version=1)
        >>> message = delta_to_bytes(delta)
        >>> delta_from_bytes(message).version
        1
        ```
    """
    table = compress(_json(_table(delta)).encode(), LEVEL)
    header = {
        "format_version": FORMAT_VERSION,
        "base": delta.base,
        "result": delta.result,
        "base_version": delta.base_version,
        "version": delta.version,
        TABLE: checksum(table),
    }
    names = [frame_name(number) for number in range(len(delta.frames))]
    names += [blob_name(number) for number in range(len(delta.blobs))]
    tensors = {TABLE: _tensor(table)} | {name: _tensor(delta.read(name)) for name in names}
    return bytes(save(tensors, {METADATA: _json({"header": header, "checksum": checksum(_json(header).encode())})}))


def delta_from_bytes(data: bytes, where: str = "the delta") -> Delta:
    """Undo `delta_to_bytes`.

    Raises:
        ValueError: it is no delta, of another format version, or damaged.

    Example:
        ```python
        >>> delta = HeldVersion({"weight": torch.zeros(64, 64)}).since({"weight": torch.ones(64, 64)}, version=1)
        >>> delta_from_bytes(delta_to_bytes(delta)).result == delta.result
        True
        ```
    """
    try:
        # safetensors hands out the metadata of files, and not that of bytes in memory: the header is read once more.
        tensors = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is damaged or no delta: {error}; get it again") from error
    return _parse(metadata, lambda name: _bytes(tensors.get(name), name, where), where)


def save_delta(delta: Delta, path: str | os.PathLike[str]) -> Path:
    """Write a file, which has its name when it is complete and on the disk.

    Raises:
        FileExistsError, FileNotFoundError: the name is taken, or its directory does not exist. Nothing is overwritten.

    Example:
        ```python
        >>> delta = HeldVersion({"weight": torch.zeros(64, 64)}).since({"weight": torch.ones(64, 64)}, version=1)
        >>> save_delta(delta, "0-to-1.delta").name
        '0-to-1.delta'
        ```
    """
    final = Path(path)
    if final.exists() or final.is_symlink():
        raise FileExistsError(f"{final} exists already; choose another name, nothing is overwritten")
    if not final.absolute().parent.is_dir():
        raise FileNotFoundError(f"{final.absolute().parent}: no such directory; create it first")
    begun = hidden_name(final)
    try:
        begun.write_bytes(delta_to_bytes(delta))
        sync(begun)
        give_file_name(begun, final)
    except BaseException:
        with suppress(OSError):
            begun.unlink(missing_ok=True)
        raise
    return final


def open_delta(path: str | os.PathLike[str]) -> Delta:
    """Open a file as a delta; its frames are read when they are needed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no delta, of another format version, or damaged.

    Example:
        ```python
        >>> delta = HeldVersion({"weight": torch.zeros(64, 64)}).since({"weight": torch.ones(64, 64)}, version=1)
        >>> save_delta(delta, "0-to-1.delta")
        >>> open_delta("0-to-1.delta").version
        1
        ```
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        opened: Any = safe_open(path, "pt")
        names, metadata = set(opened.keys()), opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no delta: {error}; get it again") from error
    return _parse(
        metadata, lambda name: _bytes(opened.get_tensor(name) if name in names else None, name, str(path)), str(path)
    )


# -- below the surface -------------------------------------------------------------------------------------------------


def _table(delta: Delta) -> dict[str, Any]:
    recipes: list[Recipe] = []
    entries: dict[str, Any] = {}
    for name, entry in sorted(delta.layout.entries.items()):
        if entry.recipe is not None and entry.recipe not in recipes:
            recipes.append(entry.recipe)
        number = None if entry.recipe is None else recipes.index(entry.recipe)
        entries[name] = [number, dtype_name(entry.dtype), list(entry.shape)]
    coded = [(frame.run, frame.coded, frame.checksum) for frame in delta.frames]
    return {
        "recipes": [recipe.to_json() for recipe in recipes],
        "entries": entries,
        "blobs": sorted(delta.layout.blobs),
        "frames": [[run, one.start, one.count, one.shift, list(one.lengths), check] for run, one, check in coded],
        "changed_blobs": [[blob.name, blob.size, blob.checksum] for blob in delta.blobs],
    }


def _parse(metadata: Mapping[str, str], read: Read, where: str) -> Delta:
    header = _header(metadata, where)
    # Sizes are believed only after both checksums: what a changed bit says of sizes would take memory.
    table = read(TABLE)
    if checksum(table) != header[TABLE]:
        raise damaged(where, "its table has another checksum than its header says")
    text = decompress(table, MOST_TABLE, f"{where}: its table")
    try:
        parsed = _parse_table(json.loads(text))
    except (ValueError, *MALFORMED) as error:
        raise damaged(where, f"its table is malformed: {type(error).__name__}: {error}") from error
    delta = Delta(header["base"], header["result"], *parsed, read, where=where)
    try:
        delta.check_table()
    except MALFORMED as error:
        raise damaged(where, f"its table is malformed: {type(error).__name__}: {error}") from error
    return replace(delta, base_version=header.get("base_version"), version=header.get("version"))


def _header(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    if METADATA not in metadata:
        raise ValueError(f"{where} is no delta: its metadata has no {METADATA}; give a file that save_delta wrote")
    try:
        outer = json.loads(metadata[METADATA])
        header: dict[str, Any] = outer["header"]
        sound = outer["checksum"] == checksum(_json(header).encode())
        version = header["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(where, f"its header is malformed: {type(error).__name__}: {error}") from error
    if not sound:
        raise damaged(where, "its header has another checksum than it says")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{where} has format_version {short(version)}; this library reads version {FORMAT_VERSION}. Use a library "
            "version that knows it"
        )
    digests = all(isinstance(header.get(key), str) for key in ("base", "result", TABLE))
    if not digests or any(type(header.get(key)) not in (int, type(None)) for key in ("base_version", "version")):
        raise damaged(where, "its header is malformed: digests and versions are missing")
    return header


def _parse_table(record: Any) -> tuple[StateLayout, tuple[CodedFrame, ...], tuple[Blob, ...]]:
    recipes = [Recipe.from_json(recipe) for recipe in record["recipes"]]
    entries = {}
    for name, (number, dtype, shape) in record["entries"].items():
        recipe = None if number is None else recipes[_count(number)]
        entries[name] = Entry(name, recipe, tuple(map(_count, shape)), DTYPES[dtype])
    frames = tuple(
        CodedFrame(
            _count(run), Coded(_count(start), _count(count), _count(shift), tuple(map(_count, lengths)), b""), check
        )
        for run, start, count, shift, lengths, check in record["frames"]
    )
    blobs = tuple(Blob(name, min(_count(size), MOST_BLOB), check) for name, size, check in record["changed_blobs"])
    return StateLayout(entries, frozenset(record["blobs"])), frames, blobs


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{short(value)} is no count")
    return value


def _json(record: Any) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(held: Tensor | None, name: str, where: str) -> bytes:
    if held is None:
        raise damaged(where, f"it lacks {name}")
    whole = held.contiguous()  # named, since what memory_of returns does not keep it alive
    return memory_of(whole).raw
