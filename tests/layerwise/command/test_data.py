"""A file to batches: which samples, the same for any number of ranks, and each refusal by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from layerwise.command import data
from layerwise.command.config import DataKeys
from layerwise.command.data import batches_of, read_samples
from layerwise.command.yaml_text import ConfigError

CPU = torch.device("cpu")
IDS = np.arange(103)


class Letters:
    """A tokenizer: a token for each letter, behind one that begins a document."""

    def __call__(self, text: str, *, verbose: bool) -> dict[str, list[int]]:
        assert not verbose
        return {"input_ids": [1, *map(ord, text)]}


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_tokenizer", lambda directory: Letters())


def keys(path: Path, **changed: Any) -> DataKeys:
    return DataKeys(**{"path": path, "samples": 4, "sequence_length": 10, **changed})


def read(given: DataKeys, vocabulary: int = 256) -> torch.Tensor:
    samples = read_samples(given, Path("model"), vocabulary)
    assert samples.dtype == torch.int64
    return samples


def refusal(given: DataKeys, vocabulary: int = 256) -> str:
    with pytest.raises(ConfigError) as caught:
        read(given, vocabulary)
    return str(caught.value)


def saved(path: Path, ids: Any) -> Path:
    np.save(path / "ids.npy", ids)
    return path / "ids.npy"


def test_samples_are_blocks_of_the_stream_chosen_by_the_seed(tmp_path: Path) -> None:
    path = saved(tmp_path, IDS.astype(np.uint16))
    samples = read(keys(path))
    blocks = {tuple(range(start, start + 10)) for start in range(0, 100, 10)}
    assert len({*map(tuple, samples.tolist())} & blocks) == 4, "none twice, each a block"
    assert torch.equal(samples, read(keys(path)))
    assert not torch.equal(samples, read(keys(path, seed=1)))
    assert torch.equal(read(keys(path, samples=2)), samples[:2]), "more samples are those before and others"


def test_rows_of_a_matrix_are_samples(tmp_path: Path) -> None:
    rows = IDS[:100].reshape(10, 10)
    save_file({"a": rows, "b": rows + 1}, tmp_path / "ids.safetensors")
    found = read(keys(tmp_path / "ids.safetensors", field="b", samples=10))
    assert sorted(found.tolist()) == (rows + 1).tolist()


def test_documents_are_tokenized_one_by_one_and_joined(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcde", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n\n{"text": "c\\u2028"}\n', encoding="utf-8")
    assert read(keys(tmp_path / "a.txt", samples=1, sequence_length=6)).tolist() == [[1, 97, 98, 99, 100, 101]]
    lines = read(keys(tmp_path / "a.jsonl", samples=1, sequence_length=6), 10_000)
    assert lines.tolist() == [[1, 97, 98, 1, 99, 0x2028]]
    (tmp_path / "raw").write_text("abcde", encoding="utf-8")
    assert len(read(keys(tmp_path / "raw", format="text", samples=2, sequence_length=3))) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_ranks_share_the_batches(ranks: int) -> None:
    samples = torch.arange(10, dtype=torch.int64)[:, None]
    own = [batches_of(samples, 3, rank, ranks, CPU) for rank in range(ranks)]
    assert all(batch["use_cache"] is False for batches in own for batch in batches)
    found = sorted(batch["input_ids"].flatten().tolist() for batches in own for batch in batches)
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], "the same batches, whoever has them"


def test_what_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, IDS)
    assert refusal(keys(tmp_path / "gone.npy")) == f"data.path: {tmp_path / 'gone.npy'}: no such file"
    assert refusal(keys(path, samples=11)).startswith(
        f"data.samples: {path} has 10 samples of 10 tokens, and 11 were asked for; ask for fewer"
    )
    assert refusal(keys(path, samples=10), 99).startswith(
        f"data.path: {path} has token ids from 0 to 99, and the model knows those from 0 to 98"
    )
    assert "token ids from -1 to" in refusal(keys(saved(tmp_path, np.full(100, -1))))
    assert refusal(keys(saved(tmp_path, IDS[:100].reshape(5, 20)))).startswith(
        f"data.sequence_length: {path} has rows of 20 token ids, and the config says 10; say 20"
    )
    for wrong, found in ((np.zeros(100), "float64 [100]"), (np.zeros((1, 1, 9), int), "int64 [1, 1, 9]")):
        assert f"holds {found}; expected token ids" in refusal(keys(saved(tmp_path, wrong)))
    path.write_bytes(b"no numpy")
    assert refusal(keys(path)).startswith(f"data.path: {path} is no npy file: ")


def test_what_is_refused_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "ids.safetensors"
    save_file({"a": IDS, "b": IDS}, path)
    expected = "has the tensors a, b; expected the name of one of them, got "
    assert refusal(keys(path)) == f"data.field: {path} {expected}None"
    assert refusal(keys(path, field="c")) == f"data.field: {path} {expected}'c'"
    path.write_bytes(b"nothing")
    assert refusal(keys(path)).startswith(f"data.path: {path} is no safetensors file: ")


def test_what_is_refused_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    assert refusal(keys(path)) == f"data.field: {path}, line 2: expected a text under 'text', found body"
    path.write_text(json.dumps({"text": ["a"]}), encoding="utf-8")
    assert refusal(keys(path)) == f"data.field: {path}, line 1: expected a text under 'text', found text"
    path.write_text("{", encoding="utf-8")
    assert refusal(keys(path)).startswith(f"data.path: {path}, line 1: it is no JSON: ")
    path.write_bytes(b"\xff\xfe")
    assert refusal(keys(path)).startswith(f"data.path: {path} is no UTF-8 text: ")
    assert refusal(keys(path, format="text")).startswith(f"data.path: {path} is no UTF-8 text: ")
    path.write_text("", encoding="utf-8")
    assert refusal(keys(path)).startswith(f"data.samples: {path} has 0 samples of 10 tokens")
