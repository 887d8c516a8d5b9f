"""From a file to batches of token ids, the same ones for any number of ranks.

    text        one document; JSON lines: a document a line
    documents   tokenized one by one, with what the tokenizer adds to each, and put one after the other
    tokens      cut into samples of `sequence_length`; what is left at the end is dropped
    samples     as many as were asked for, chosen by the seed, never one twice
    batches     `batch_size` samples each; rank r of n takes batches r, r + n, r + 2 n, ..

Rank 0 reads the file; the samples are what the others get. Which rank has which batch decides nothing: a calibration
depends on the batches that all ranks have together.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcp_adapters.plain.words import few_of, short
from layerwise.command.config import DataKeys, data_format
from layerwise.command.model import transformers_library
from layerwise.command.yaml_text import ConfigError


def read_samples(keys: DataKeys, model: Path, vocabulary: int) -> Tensor:
    """Return the samples, int64 [samples, sequence_length] on the CPU, in the order that the seed gives them.

    Args:
        keys: which.
        model: the model's directory; its tokenizer is taken if no other is named.
        vocabulary: how many token ids the model knows.

    Raises:
        ConfigError: no such file, or it is not what its format says; too few tokens; ids that the model does not know.
    """
    if not keys.path.is_file():
        raise ConfigError(f"data.path: {keys.path}: no such file")
    kind = data_format(keys)
    held = _ids_in_file(keys, str(kind)) if kind in ("npy", "safetensors") else _ids_of_text(keys, str(kind), model)
    rows = _rows(held, keys)
    if len(rows) < keys.samples:
        raise ConfigError(
            f"data.samples: {keys.path} has {len(rows)} samples of {keys.sequence_length} tokens, and {keys.samples} "
            "were asked for; ask for fewer or shorter ones, or give more text"
        )
    generator = torch.Generator(device="cpu").manual_seed(keys.seed)
    # On the CPU and in int64, so that a seed chooses the same samples on any machine.
    chosen = torch.randperm(len(rows), generator=generator, dtype=torch.int64, device="cpu")[: keys.samples]
    samples = torch.from_numpy(np.asarray(rows[chosen.numpy()]).astype(np.int64))
    # The embedding would refuse such an id much later, on a GPU by an assertion that names nothing.
    least, most = int(samples.min()), int(samples.max())
    if least < 0 or most >= vocabulary:
        raise ConfigError(
            f"data.path: {keys.path} has token ids from {least} to {most}, and the model knows those from 0 to "
            f"{vocabulary - 1}; tokenize it by the model's own tokenizer"
        )
    return samples


def batches_of(samples: Tensor, size: int, rank: int, ranks: int, device: torch.device) -> list[dict[str, Any]]:
    """Return the batches of one rank, as arguments of the model."""
    # Without a cache: layers run one by one, and nothing is generated.
    return [{"input_ids": batch.to(device), "use_cache": False} for batch in samples.split(size)[rank::ranks]]


def _rows(ids: Any, keys: DataKeys) -> Any:
    """Return an array [n, sequence_length]: rows of a matrix, or consecutive tokens."""
    if ids.ndim == 1:
        whole = len(ids) // keys.sequence_length
        return ids[: whole * keys.sequence_length].reshape(whole, keys.sequence_length)
    if ids.shape[1] != keys.sequence_length:
        raise ConfigError(
            f"data.sequence_length: {keys.path} has rows of {ids.shape[1]} token ids, and the config says "
            f"{keys.sequence_length}; say {ids.shape[1]}"
        )
    return ids


def _ids_in_file(keys: DataKeys, kind: str) -> Any:
    """Return an array of integers, [tokens] or [n, tokens]."""
    try:
        # Mapped, since a file of ids may be larger than the memory; no pickles, since the file is not trusted.
        ids = np.load(keys.path, mmap_mode="r", allow_pickle=False) if kind == "npy" else _from_safetensors(keys)
    except ConfigError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"data.path: {keys.path} is no {kind} file: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or not ids.size:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else "several arrays"
        raise ConfigError(
            f"data.path: {keys.path} holds {found}; expected token ids, integers [tokens] or [samples, tokens]"
        )
    return ids


def _from_safetensors(keys: DataKeys) -> Any:
    try:
        with safe_open(keys.path, "np") as file:
            names = list(file.keys())
            name = keys.field if keys.field is not None else names[0] if len(names) == 1 else None
            if name not in names:
                raise ConfigError(
                    f"data.field: {keys.path} has the tensors {few_of(names)}; expected the name of one of them, got "
                    f"{short(keys.field)}"
                )
            return file.get_tensor(name)
    except SafetensorError as error:  # it is of no other type
        raise ValueError(str(error)) from None


def _ids_of_text(keys: DataKeys, kind: str, model: Path) -> Any:
    """Return an array [tokens] of all documents."""
    tokenizer = _tokenizer(keys.tokenizer or model)
    # verbose=False: a whole document is longer than the model takes, and the tokenizer would warn of that.
    parts = [np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64) for text in _texts(keys, kind)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _tokenizer(directory: Path) -> Any:
    try:
        return transformers_library().AutoTokenizer.from_pretrained(
            # Nothing is downloaded, and code from the directory is never run.
            directory,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (ValueError, OSError, TypeError, KeyError) as error:
        raise ConfigError(
            f"data.tokenizer: {directory} has no tokenizer that can be read ({error}); name the directory of one, or "
            "give token ids"
        ) from None


def _texts(keys: DataKeys, kind: str) -> Iterator[str]:
    try:
        text = keys.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path: {keys.path} is no UTF-8 text: {error}") from None
    if kind == "text":
        yield text
        return
    field = keys.field or "text"
    # Not splitlines(): JSON texts may hold U+2028 and the like, which would cut a line in two.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data.path: {keys.path}, line {number}: it is no JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            keys_there = few_of(record) if isinstance(record, dict) else f"no object but {short(record)}"
            raise ConfigError(
                f"data.field: {keys.path}, line {number}: expected a text under {field!r}, found {keys_there}"
            )
        yield record[field]
