"""A small model in the place of the examples' real one: its first layers, cut to its first tokens.

The examples find their weights in the files of an installed distribution. `install` makes such a distribution in a
directory that a program gets on its PYTHONPATH, before the real one: the metadata, weights and tokenizer of the real
file, as far as they are asked for. An example then takes the same way through the same code in seconds, where the whole
vocabulary alone would take a second a step and the tokenizer four. tests/examples/test_smollm2.py reads the real file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from examples import smollm2

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENS = 2048  # of 49152: special ones, all bytes, and what the first merges make of them
LISTED = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"}


def install(directory: Path, layers: int) -> dict[str, str]:
    """The environment of a program that finds the small model; `layers` of the real one's are in it."""
    about = directory / f"{smollm2._PACKAGE.replace('-', '_')}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {smollm2._PACKAGE}\nVersion: 0\n", encoding="utf-8")
    (about / "RECORD").write_text(f"small.gguf,,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n", encoding="utf-8")
    write(directory / "small.gguf", layers)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}


def write(path: Path, layers: int) -> None:
    reader = GGUFReader(smollm2.find_gguf())
    writer = GGUFWriter(path, "llama")
    known = set(reader.fields["tokenizer.ggml.tokens"].contents()[:TOKENS])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value: Any = field.contents()
        if name in LISTED:
            value = value[:TOKENS]
        elif name == "tokenizer.ggml.merges":
            value = [merge for merge in value if merge.replace(" ", "") in known and set(merge.split(" ")) <= known]
        elif name in {"llama.vocab_size", "llama.block_count"}:
            value = {"llama.vocab_size": TOKENS, "llama.block_count": layers}[name]
        kind = field.types[0]
        writer.add_key_value(name, value, kind, sub_type=field.types[-1] if kind is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < layers:
            rows = slice(TOKENS if tensor.name == "token_embd.weight" else None)
            writer.add_tensor(tensor.name, tensor.data[rows], raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
