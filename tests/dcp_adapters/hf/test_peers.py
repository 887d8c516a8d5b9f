"""Directories that compressed-tensors and ModelOpt made themselves: their bytes and values, on any number of ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dcp_adapters import import_hf
from dcp_adapters.hf.checking.misread import find_misread
from dcp_adapters.hf.layouts.layout import KINDS
from dcp_adapters.hf.reading.stored_directory import StoredDirectory
from dcp_adapters.stored.kept import look_at_each
from qtensor.tensor.quantized_tensor import QuantizedTensor
from tests.dcp_adapters.cases import assert_holds, bits
from tests.dcp_adapters.hf.directories import meta_model, sharded
from tests.ranks import run_ranks_each

# The peers take half a minute to make theirs. test_reader.py has directories that are written by hand, of each kind and
# with each refusal.
pytestmark = pytest.mark.full

REPO = Path(__file__).resolve().parents[3]
READ = {
    "compressed-tensors": {
        "FP8": "fp8_tensor",
        "FP8_DYNAMIC": "fp8_row",
        "FP8_BLOCK": "fp8_block",
        "MXFP8": "mxfp8",
        "MXFP8A16": "mxfp8",
        "MXFP4": "mxfp4",
        "MXFP4A16": "mxfp4",
        "W4A16": "int4_128",
        "W4A16+32": "int4_32",
        "NVFP4": "nvfp4",
        "NVFP4A16": "nvfp4",
        "W8A8": "int8_row",
    },
    "modelopt": {
        "FP8_DEFAULT_CFG+KV": "fp8_tensor",
        "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_row",
        "MXFP8_DEFAULT_CFG": "mxfp8",
        "NVFP4_DEFAULT_CFG": "nvfp4",
        "NVFP4_MLP_ONLY_CFG+KV": "nvfp4",
        "W4A16_NVFP4_CFG": "nvfp4",
    },
}
REFUSED = {
    "compressed-tensors": {
        "MXFP4xFP8": "config.json says inputs of num_bits 8, expected 4",
        "W6A16": "integers packed into int32 (pack-quantized), of other bits or in other groups",
        "W4A16_ASYM": "zero points",
        "W4AFP8": "int8, or narrower integers in int8",
    },
    "modelopt": {
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "FP8 in blocks that this layout does not have",
        "INT8_DEFAULT_CFG": "int8",
        "W4A8_NVFP4_FP8_CFG": "(the JSON says 'W4A8_NVFP4_FP8')",
    },
}
WHOLE = {
    "compressed-tensors": {
        "MXFP8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8A16", "MXFP4", "MXFP4A16", "W4A16", "W4A16+32", "W8A8",
    },
    "modelopt": set(READ["modelopt"]),
}  # fmt: skip
MODULES = {"compressed-tensors": "compressed_tensors", "modelopt": "modelopt"}
PARTS = {  # part -> its names in a file
    "payload": ("weight", "weight_packed"),
    "scale": ("weight_scale",),
    "global_scale": ("weight_scale_2", "weight_global_scale"),
}
each_read = pytest.mark.parametrize(
    ("peer", "scheme"), [(peer, name) for peer, names in READ.items() for name in names]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Peer -> the directory of its directories; they are made when they are first asked for."""
    found: dict[str, Path] = {}

    def make(peer: str) -> Path:
        if importlib.util.find_spec(MODULES[peer]) is None or importlib.util.find_spec("transformers") is None:
            pytest.skip(f"{peer} or transformers is not installed")
        if peer not in found:
            found[peer] = out = tmp_path_factory.mktemp(peer)
            command = [sys.executable, "-m", "tests.dcp_adapters.hf.peers", peer, str(out), *READ[peer], *REFUSED[peer]]
            env = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
            done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=280, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
        return found[peer]

    return make


@each_read
def test_bytes_and_values_are_the_peers_own(peer: str, scheme: str, made: Any) -> None:
    path = made(peer) / scheme
    found: dict[str, Any] = import_hf(path)
    stored, expected = load_file(path / "model.safetensors"), load_file(path.with_name(f"{scheme}.safetensors"))
    quantized = {name: value for name, value in found.items() if isinstance(value, QuantizedTensor)}
    assert quantized.keys() == expected.keys()
    assert len(expected) == (6 if "MLP_ONLY" in scheme else 14)
    for name, q in quantized.items():
        module = name.removesuffix(".weight")
        assert q.recipe == KINDS[READ[peer][scheme]]
        assert q.dtype == torch.bfloat16
        for part, tensor in q.parts().items():
            held = next(stored[key] for own in PARTS[part] if (key := f"{module}.{own}") in stored)
            if part == "global_scale" and peer == "compressed-tensors":
                held = 1 / held
            if part == "payload" and held.dtype == torch.int32:
                held = torch.stack([held >> 8 * byte & 255 for byte in range(4)], dim=-1).flatten(-2).to(torch.uint8)
            if part == "scale" and held.dtype == torch.bfloat16 and tensor.dtype == torch.float32:
                held = held.float()  # engines compute with fp32
            if part == "scale" and scheme == "FP8_BLOCK":  # one of a block; we have one for each of its rows
                held = held.repeat_interleave(128, dim=0)[: q.shape[0]]
            assert bits(tensor) == bits(held), (name, part)
        if scheme in WHOLE[peer]:
            assert torch.equal(q.dequantize(torch.float32), expected[name]), name
        else:  # compressed-tensors divides by the global scale, we multiply by its reciprocal
            torch.testing.assert_close(q.dequantize(torch.float32), expected[name], rtol=2.0**-22, atol=0)
    check_scales(found, stored)
    plain = found.keys() - quantized.keys()
    assert all(bits(found[name]) == bits(stored[name]) for name in plain if name in stored and "scale" not in name)


@each_read
def test_no_engine_misreads_them(peer: str, scheme: str, made: Any) -> None:
    """Their own tool made them, and knows what engines do, but for one thing.

    compressed-tensors gives fused weights global scales of their own, which llm-compressor makes one of before.
    """
    path = made(peer) / scheme
    errors = [found.entry for found in find_misread(str(path)) if found.severity == "error"]
    fused = ["mlp.gate_proj", "self_attn.k_proj"] if (peer, scheme[:5]) == ("compressed-tensors", "NVFP4") else []
    assert errors == [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in fused]
    assert [fault for one in look_at_each(StoredDirectory(path)) for fault in one.faults] == []


def check_scales(found: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Every scale of inputs and of the KV cache in the file is there, under the calibrated name."""
    inputs = {name: value for name, value in stored.items() if name.endswith(".input_scale")}
    inputs |= {
        name.replace("global_", ""): 1 / value for name, value in stored.items() if name.endswith("input_global_scale")
    }
    cache = {
        name.replace(f"{name[-7]}_proj.", ""): v for name, v in stored.items() if name.endswith(("k_scale", "v_scale"))
    }
    expected = inputs | cache
    assert {name for name in found if name.endswith("_scale")} == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == ()
        assert found[name].item() == value.float().item()


@pytest.mark.parametrize(("peer", "scheme"), [(peer, name) for peer, names in REFUSED.items() for name in names])
def test_what_else_they_make_is_refused(peer: str, scheme: str, made: Any) -> None:
    path = made(peer) / scheme
    with pytest.raises(ValueError, match="quantized in ways that the library does not read") as caught:
        import_hf(path)
    assert REFUSED[peer][scheme] in str(caught.value)
    assert "  model.layers.0.mlp.down_proj: " in str(caught.value)


def _shards(case: tuple[str, str]) -> None:
    path, kind = case
    full: dict[str, Any] = import_hf(path)
    recipes = {
        name.removesuffix(".weight"): KINDS[kind] for name, value in full.items() if isinstance(value, QuantizedTensor)
    }
    assert_holds(import_hf(path, sharded(meta_model(full, recipes))), full)


@pytest.mark.parametrize("peer", READ)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_of_them(ranks: int, peer: str, made: Any) -> None:
    run_ranks_each(ranks, [(str(made(peer) / scheme), kind) for scheme, kind in READ[peer].items()], _shards)


@each_read
def test_transformers_hands_over_the_same_bytes(peer: str, scheme: str, made: Any) -> None:
    from transformers import AutoModelForCausalLM

    from dcp_adapters.transformers import quantized_config

    path = made(peer) / scheme
    expected: dict[str, Any] = import_hf(path, progress=False)
    model, told = AutoModelForCausalLM.from_pretrained(path, config=quantized_config(path), output_loading_info=True)
    assert not any(told.values()), told
    for name, param in model.named_parameters():
        held: Any = param.detach()
        assert type(held) is type(expected[name]), name
        if isinstance(held, QuantizedTensor):
            parts = expected[name].parts()
            assert all(bits(tensor) == bits(parts[part]) for part, tensor in held.parts().items()), name
        else:
            assert bits(held) == bits(expected[name]), name
