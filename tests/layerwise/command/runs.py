"""A tiny Llama in a directory, configs for it, and runs of the command."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from layerwise.__main__ import ALGORITHMS
from layerwise.command.main import main

VOCABULARY, LENGTH, SAMPLES, BATCH = 96, 16, 6, 2
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def save_model(directory: Path, *, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Path:
    """A random Llama of two layers, as `save_pretrained` leaves it, and token ids beside it."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changed})).to(dtype).save_pretrained(directory / "model")
    ids = torch.randint(0, VOCABULARY, (20 * LENGTH,), dtype=torch.int64, device="cpu").numpy()
    np.save(directory / "ids.npy", ids)
    return directory / "model"


def write_config(directory: Path, name: str = "config", **changed: Any) -> Path:
    """A config for what `save_model` has left; its outputs are named after it. `None` leaves a section out."""
    sections: dict[str, Any] = {
        "model": {"path": str(directory / "model"), "device": "cpu"},
        "recipe": "nvfp4",
        "algorithm": "GPTQ",
        "data": {
            "path": str(directory / "ids.npy"),
            "samples": SAMPLES,
            "sequence_length": LENGTH,
            "batch_size": BATCH,
        },
        "calibration": {"exclude": ["lm_head"], "inputs": "static", "checkpoint_dir": str(directory / f"{name}-state")},
        "output": {"path": str(directory / f"{name}-out"), "report": [str(directory / f"{name}.json")]},
    }
    for section, keys in changed.items():
        held = sections.get(section)
        sections[section] = {**held, **keys} if isinstance(held, dict) and isinstance(keys, dict) else keys
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump({name: keys for name, keys in sections.items() if keys is not None}))
    return path


def command(*arguments: object, algorithms: Mapping[str, Any] = ALGORITHMS) -> tuple[int, str]:
    """Exit status, and what stderr was told; in this process, or in this rank."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        status = main([*map(str, arguments)], algorithms=algorithms)
    return status, told.getvalue()


def environment() -> dict[str, str]:
    """For a process that is no rank of this one's."""
    other = ("TORCHELASTIC", "MASTER_", "GROUP_", "ROLE_", *OF_A_RANK)
    return {name: value for name, value in os.environ.items() if not name.startswith(other)}


def files_of(directory: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def same_files(paths: Sequence[Path]) -> bool:
    """Whether directories hold the same files."""
    return all(files_of(path) == files_of(paths[0]) for path in paths)
