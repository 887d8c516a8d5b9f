"""Which tensors of a directory are those that a model wants.

Of a model of transformers its own rules tell (architectures.py). Where these do not know all that is wanted, it may be
a state dict, a module inside a model (its text model, say), or one that holds it: then the rules tell of the model that
the directory's config.json names, behind one prefix or without it. Where these do not, either, names are as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dcp_adapters.hf.files.engine_names import pieces_of
from dcp_adapters.hf.models.architectures import Architecture, architecture_said
from dcp_adapters.hf.models.file_names import FileNames, names_of, without_beside
from dcp_adapters.records.entry import Entry
from qtensor.spec.selection import matches


def wanted_names(
    tensors: Collection[str],
    wanted: Mapping[str, Entry],
    architecture: Architecture | None,
    config: Mapping[str, Any],
    may_lack: Sequence[str] = (),
) -> FileNames:
    """Names in memory and in a directory.

    Args:
        tensors: names of its weights.
        wanted: what the model has, by its own names.
        architecture: of the model; None where it is none of transformers.
        config: the directory's config.json.
        may_lack: globs over names of the model that the directory need not have.
    """
    names = FileNames() if architecture is None else architecture.named(tensors)
    own = [name for name in without_beside(wanted) if not matches(name, may_lack)]
    if all(name in names.in_files or _is_there(name, wanted[name], tensors) for name in own):
        return names
    described = architecture_said(config)
    whole = FileNames() if described is None else described.named(tensors)
    found = names_of(own, whole, frozenset(tensors))
    known = {*tensors, *whole.in_memory}
    return FileNames(found, whole.whole) if all(name in known for name in found.values()) else names


def _is_there(name: str, want: Entry, tensors: Collection[str]) -> bool:
    """Whether the directory has the tensor under this name, or the linears of experts of which it is made."""
    pieces = pieces_of(name, want.shape) if len(want.shape) == 3 else None
    return name in tensors or (bool(pieces) and all(f"{piece.module}.weight" in tensors for piece in pieces or ()))
