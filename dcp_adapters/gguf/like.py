"""What an existing GGUF file of the same model tells: its metadata, which tensors it has, how many heads.

llama.cpp needs a model's sizes, its tokenizer and its chat template in the file. Its own converter writes them from a
Hugging Face directory, for each architecture in its own way; here they are taken from any file that it made of the
model, in whatever type its weights are.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_adapters.gguf.architectures import ARCHITECTURES, GGUFArchitecture
from dcp_adapters.gguf.library import import_gguf
from dcp_adapters.plain.words import short

# Tensors that llama.cpp's converter makes from the config, not from weights.
OF_CONFIG = frozenset({"rope_freqs.weight"})
# Keys that are not copied: a file describes itself by them, and a file with other weights differs in them.
OF_FILE = ("GGUF.", "general.architecture", "general.alignment", "general.file_type", "quantize.")


@dataclass(frozen=True)
class Like:
    """What a file tells.

    Attributes:
        path: of the file, for messages.
        architecture: a key of ARCHITECTURES.
        heads: name of a linear in a block ("attn_q") -> how many heads it has, for linears whose rows are reordered.
        shapes: of all tensors by name, rows first.
    """

    path: str
    architecture: str
    heads: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def known(self) -> GGUFArchitecture:
        """Its architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def tied(self) -> bool:
        """True if the output projection is the embedding."""
        return "output.weight" not in self.shapes


def open_like(path: str | os.PathLike[str]) -> Any:
    """Return a `gguf.GGUFReader` of the file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no GGUF file, one of several that are one model, or one for big-endian machines.
        ImportError: the package gguf is not installed.
    """
    gguf = import_gguf()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; like= takes a GGUF file of the same model")
    try:
        reader = gguf.GGUFReader(path)
    # The reader believes the numbers in a damaged file, and raises whatever they lead to.
    except Exception as error:
        raise ValueError(f"{path} is damaged or no GGUF file: {error}") from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ValueError(f"{path} is for big-endian machines; give one for little-endian ones")
    if int(_value(reader, "split.count", 1)) > 1:
        raise ValueError(f"{path} is one of several files of a model; merge them (llama-gguf-split --merge)")
    return reader


def read_like(path: str | os.PathLike[str], reader: Any) -> Like:
    """Return what an export needs of the file.

    Raises:
        ValueError: its architecture is not known here.
    """
    name = str(_value(reader, "general.architecture", ""))
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{path} is of the architecture {short(name)}, and names and orders of rows are known of "
            f"{', '.join(ARCHITECTURES)} alone; export a Hugging Face directory (export_hf), and convert that by "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    # A model whose layers differ has a list here, and `heads` has one number for all layers.
    count = _value(reader, f"{name}.attention.head_count", None)
    heads = {"attn_q": count, "attn_k": _value(reader, f"{name}.attention.head_count_kv", count)}
    if any(type(number) is not int or number < 1 for number in heads.values()):
        raise ValueError(f"{path}: its layers have {short(count)} heads; expected one number for all layers")
    # GGUF names the fastest dim first.
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    return Like(str(path), name, heads, shapes)


def _value(reader: Any, key: str, default: Any) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()
