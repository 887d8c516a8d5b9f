"""A Hugging Face directory as its JSON and the headers of its files tell it; no tensor is read.

    config.json, hf_quant_config.json         as they are
    model.safetensors.index.json              tensor -> file, or
    model.safetensors                         all tensors in one file
    headers                                   each tensor's dtype and shape; safetensors checks that its bytes are there

The directory is not trusted. Checked here, before anything is loaded: the index names only files inside of it, the
index and the headers agree, and no file is cut off.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dcp_adapters.plain.words import few_of, in_lines, short
from dcp_adapters.stored.reading.metadata_checks import is_stray_path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
AGAIN = "get the directory again"
MOST_JSON = 2**28  # bytes; an index of a million tensors has 100 MiB


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file; `dtype` is safetensors' word for it, "F8_E4M3".

    A tensor whose file is config.json is in no file: the JSON says that it is there, and its values say nothing.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_said(self) -> bool:
        """Return whether only config.json says that it is there, and no file holds it."""
        return self.file == CONFIG

    def __str__(self) -> str:
        """Return its dtype and shape, for messages."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Directory:
    """What the directory says.

    config: of config.json, {} without one. quantization: hf_quant_config.json's, None without one. notes: what headers
    say beside their tensors: key -> file -> text. left_out: modules whose tensors nobody asked for.
    """

    path: Path
    tensors: Mapping[str, FileTensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    notes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def read_directory(path: str | os.PathLike[str], *, any_name: bool = False) -> Directory:
    """Read all of the directory but its tensors.

    Args:
        path: the directory.
        any_name: it may also be one safetensors file, whose JSON stands beside it, or a directory of files with other
            names and without an index.

    Raises:
        FileNotFoundError: there are no safetensors, or files that the index names are missing.
        ValueError: files that are damaged, contradict each other or lead out of the directory.
    """
    root = Path(path)
    named = _find_other_names(root) if any_name else None
    if named is not None:
        root, files, assigned = named[0], named[1], None
    else:
        files, assigned = _list_files(root)
    missing = [name for name in files if not (root / name).is_file()]
    if missing:
        told = few_of(missing, 20, last=", ")
        raise FileNotFoundError(f"{root}: {INDEX} names files that are not there: {told}; {AGAIN}")
    tensors: dict[str, FileTensor] = {}
    notes: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for file in files:
        for tensor in _header(root, file, notes):
            other = tensors.get(tensor.name)
            if assigned is not None and assigned.get(tensor.name) != file:
                where = assigned.get(tensor.name)
                said = f"{INDEX} says {where}" if where else f"{INDEX} does not list it"
                problems.append(f"{tensor.name}: it is in {file}, and {said}")
            elif other is None:
                tensors[tensor.name] = tensor
            else:  # a file has a name once
                problems.append(
                    f"{tensor.name}: it is in {other.file} and in {file}, and no {INDEX} says which is meant"
                )
    lost = [name for name in assigned or () if name not in tensors]
    problems += [f"{name}: {INDEX} says {(assigned or {})[name]}, which lacks it" for name in lost]
    if problems:
        who = "the files" if assigned is None else "the index and the files"
        raise ValueError(f"{root}: {who} disagree; {AGAIN}:{in_lines(problems)}")
    quantization = _read_json(root / "hf_quant_config.json")
    return Directory(root, tensors, _read_json(root / CONFIG) or {}, quantization, notes)


def _find_other_names(path: Path) -> tuple[Path, list[str]] | None:
    """Return the directory and its files if their names are not the usual ones; None otherwise, or without files."""
    if path.is_file():
        return path.parent, [path.name]
    if (path / SINGLE).exists() or (path / INDEX).exists():
        return None
    files = sorted(file.name for file in path.glob("*.safetensors"))
    return (path, files) if files else None


def _list_files(root: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return the files of the directory, and which tensor the index says is in which."""
    single, index = (root / SINGLE).exists(), (root / INDEX).exists()
    if single and index:
        raise ValueError(
            f"{root}: {SINGLE} and {INDEX} are both there, and which of them is meant is not known; remove the other"
        )
    if single:
        return [SINGLE], None
    record = _read_json(root / INDEX)
    if record is None:
        raise FileNotFoundError(f"{root}: neither {SINGLE} nor {INDEX} is there; give a directory of safetensors")
    assigned = record.get("weight_map")
    if not isinstance(assigned, dict) or any(not isinstance(file, str) for file in assigned.values()):
        raise ValueError(f"{root / INDEX}: its weight_map is no object of file names; {AGAIN}")
    if not assigned:
        raise ValueError(f"{root / INDEX}: its weight_map names no tensors; {AGAIN}")
    # The index may come from anyone: "../x" would make an import read files that nobody meant to give.
    files = sorted(set(assigned.values()))
    stray = few_of((short(file) for file in files if is_stray_path(file)), 20, last=", ")
    if stray:
        raise ValueError(f"{root / INDEX}: it names files outside of the directory: {stray}; do not use it")
    return files, assigned


def _header(root: Path, file: str, notes: dict[str, dict[str, str]]) -> list[FileTensor]:
    """Return the tensors of one file; what else its header says is added to `notes`."""
    if not (root / file).is_file():
        raise ValueError(f"{root / file}: no ordinary file; {AGAIN}")
    try:
        # Opening a file reads its header, and checks that all bytes it names are there.
        with safe_open(root / file, "pt") as opened:
            for key, value in (opened.metadata() or {}).items():
                notes.setdefault(key, {})[file] = value
            found = []
            for name in opened.keys():  # noqa: SIM118 - no dict
                piece = opened.get_slice(name)
                found.append(FileTensor(name, file, piece.get_dtype(), tuple(piece.get_shape())))
            return found
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{root / file}: it is damaged or cut off: {error}. Nothing has been loaded; {AGAIN}"
        ) from error


def _read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no such file."""
    if not file.exists():
        return None
    if not file.is_file() or file.stat().st_size > MOST_JSON:
        raise ValueError(f"{file}: no ordinary file of at most {MOST_JSON} bytes; {AGAIN}")
    try:
        # Of a key that stands twice, json keeps the last one, and other readers may keep the first.
        record = json.loads(file.read_bytes(), object_pairs_hook=_refuse_twice)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: it is no JSON: {error}; {AGAIN}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file}: it holds a {type(record).__name__}, expected an object; {AGAIN}")
    return record


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, whose keys must occur once each."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{short(twice)} is there twice")
    return found
