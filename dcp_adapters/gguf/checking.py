"""A GGUF file as the command `check` sees it: the types, bits and values of its quantized tensors, whoever wrote it.

    values     by the decoders of the package gguf, times `<name>.scale` (NVFP4's global scale) where there is one
    dense      of --against: a GGUF file, tensor by tensor of the same name; or a Hugging Face directory, by the names
               and the order of rows that architectures.py knows

One tensor of each side is in memory at a time.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.gguf.architectures import ARCHITECTURES, name_in_file, pair_rows
from dcp_adapters.gguf.library import import_gguf
from dcp_adapters.gguf.like import open_like, read_like
from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.plain.words import short
from dcp_adapters.stored.kept import FAR, Kept, far_faults
from dcp_adapters.stored.numeric_error import Error, error_between
from dcp_adapters.stored.verifying.findings import Finding
from qtensor.spec.selection import matches
from qtensor.tensor.quantized_tensor import QuantizedTensor

MAGIC = b"GGUF"
PLAIN = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8"})  # numpy's own
NOT_QUANTIZED = PLAIN | {"BF16"}
# Types of less than three bits are far from any weight: of what FAR says, most holds from there on only.
FEW_BITS, FAR_OF_FEW = 3.0, 0.9
Dense = Callable[[str], "Tensor | None"]  # the dense tensor behind a name of the file; None if there is none


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Tell whether this is a GGUF file, by its first bytes."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def quantized_bytes(path: str | os.PathLike[str]) -> int:
    """Return how many bytes of the file `check_file` reads."""
    return sum(int(tensor.n_bytes) for tensor in open_like(path).tensors if _is_quantized(tensor))


def check_file(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    match: Sequence[str] = (),
    *,
    advance: Advance = ignore_progress,
) -> tuple[list[Kept], list[Finding]]:
    """Return what is found of each quantized tensor, and a warning for those whose type cannot be decoded.

    Args:
        path: of the file.
        against: a GGUF file or a Hugging Face directory whose values are right.
        match: globs over names; empty: all.
        advance: told the bytes of each tensor that is done.

    Raises:
        FileNotFoundError: one of them is not there.
        ValueError: a file that is damaged, or one of several; `against` is neither, or names of the file's
            architecture are not known.
        ImportError: the package gguf is not installed.
    """
    reader = open_like(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    dense = None if against is None else _dense_of(against, path, reader)
    kept: list[Kept] = []
    findings: list[Finding] = []
    for name, tensor in tensors.items():
        if not _is_quantized(tensor) or not matches(name, match or ["*"]):
            continue
        values = decoded(tensor, tensors)
        if values is None:
            told = f"the package gguf does not decode {tensor.tensor_type.name}: its values were not looked at"
            findings.append(Finding("warning", "", name, told))
        kept.append(_kept(tensor, values, dense, against))
        advance(int(tensor.n_bytes))
    return kept, findings


def decoded(tensor: Any, tensors: Mapping[str, Any]) -> Tensor | None:
    """Return the fp32 values of a tensor of a file, rows first; None for a type that the package cannot decode."""
    kind = tensor.tensor_type.name
    try:
        array = tensor.data if kind in PLAIN else import_gguf().quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        return None
    values = torch.from_numpy(array.astype("float32")).reshape(_shape(tensor))
    factor = tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
    if factor is not None and kind == "NVFP4":
        scale = torch.from_numpy(factor.data.astype("float32"))  # one, or one for each expert
        values = values * scale.reshape(-1, *([1] * (values.ndim - 1)))
    return values


def _kept(tensor: Any, values: Tensor | None, dense: Dense | None, against: Any) -> Kept:
    bits = 8 * int(tensor.n_bytes) / max(int(tensor.n_elements), 1)
    error: Error | None = None
    faults: list[str] = []
    if values is not None and not bool(values.isfinite().all()):
        faults.append(f"{int((~values.isfinite()).sum())} values are not finite")
    if values is not None and dense is not None:
        right = dense(tensor.name)
        if right is None:
            faults.append(f"{against} has no tensor of this name")
        elif right.shape != values.shape:
            faults.append(f"{against} has {list(right.shape)} of this name, expected {list(values.shape)}")
        else:
            error = error_between(right, values)
            faults += far_faults(error, FAR if bits >= FEW_BITS else FAR_OF_FEW)
    return Kept(
        name=tensor.name,
        kind=tensor.tensor_type.name,
        shape=_shape(tensor),
        bits=bits,
        scales=0,
        others=0,
        error=error,
        faults=tuple(faults),
    )


def _dense_of(against: str | os.PathLike[str], path: str | os.PathLike[str], reader: Any) -> Dense:
    """Return what reads the dense tensors."""
    if is_gguf(against):
        theirs = {tensor.name: tensor for tensor in open_like(against).tensors}
        return lambda name: decoded(theirs[name], theirs) if name in theirs else None
    if is_directory(str(against)):
        return _of_directory(str(against), path, reader)
    if not Path(against).exists():
        raise FileNotFoundError(f"{against}: no such file or directory; --against takes the dense original")
    raise ValueError(f"{against}: expected a GGUF file or a Hugging Face directory beside a GGUF file")


def _of_directory(against: str, path: str | os.PathLike[str], reader: Any) -> Dense:
    """Return what reads a directory's tensors by the names of the file, their rows in its order."""
    field = reader.get_field("general.architecture")
    architecture = "" if field is None else str(field.contents())
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path} is of the architecture {short(architecture)}, and the names of a directory are known for "
            f"{', '.join(ARCHITECTURES)} alone; give a GGUF file in F32, F16 or BF16 instead"
        )
    like, stored = read_like(path, reader), StoredDirectory(against)
    own: dict[str, str] = {}  # name in the file -> name in the directory
    for name in stored.entries:
        module, _, parameter = name.rpartition(".")
        known = name_in_file(like.known, module)
        if known is not None:
            own[f"{known}.{parameter}"] = name

    def read(name: str) -> Tensor | None:
        if name not in own:
            return None
        tensor = stored.read(own[name])
        rows = tensor.dequantize(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor
        module = name.rpartition(".")[0].rpartition(".")[2]
        return pair_rows(rows, like.heads[module]) if module in like.known.in_pairs else rows

    return read


def _is_quantized(tensor: Any) -> bool:
    return tensor.tensor_type.name not in NOT_QUANTIZED


def _shape(tensor: Any) -> tuple[int, ...]:
    """Rows first; the file names the fastest dim first."""
    return tuple(int(size) for size in reversed(tensor.shape))
