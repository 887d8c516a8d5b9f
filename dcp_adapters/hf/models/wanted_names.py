"""Which tensors of a directory a model wants.

For a model of transformers its own rules tell (architectures.py). If they do not know all that is wanted, this may be
a state dict, a module inside a model (its text model, say), or one that holds it: then the rules of the model tell that
the directory's config.json names, behind one prefix or without it. If they do not know it, either, names stay.
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
    """Return the names in memory and in a directory.

    Args:
        tensors: names of its weights.
        wanted: what the model has, by its own names.
        architecture: of the model; None if it is not one of transformers.
        config: the directory's config.json.
        may_lack: globs over names of the model that the directory need not have.
    """
    names = FileNames() if architecture is None else architecture.named(tensors)
    own = [name for name in without_beside(wanted) if not matches(name, may_lack)]
    if all(name in names.in_files or _is_there(name, wanted[name], tensors) for name in own):
        return names
    # Building it takes time, so it is asked only if the target's own rules do not suffice.
    described = architecture_said(config)
    whole = FileNames() if described is None else described.named(tensors)
    found = names_of(own, whole, frozenset(tensors))
    known = {*tensors, *whole.in_memory}
    # A translation that leads to a name nobody has would hide, in the error, what the target asked for.
    return FileNames(found, whole.whole) if all(name in known for name in found.values()) else names


def _is_there(name: str, want: Entry, tensors: Collection[str]) -> bool:
    """Return whether the directory has the tensor under this name, or the linears of experts that make it up."""
    pieces = pieces_of(name, want.shape) if len(want.shape) == 3 else None
    return name in tensors or (bool(pieces) and all(f"{piece.module}.weight" in tensors for piece in pieces or ()))
