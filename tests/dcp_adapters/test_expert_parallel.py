"""Experts that ranks share out and FSDP2 shards again: what is made of their weights is what one process makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dcp_adapters import WeightStream, digest, export_hf
from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.live import HeldVersion
from dcp_adapters.delta.patches.patch_format import delta_from_bytes, delta_to_bytes
from qtensor import MasterWeightOptimizer
from tests.dcp_adapters.cases import load, save
from tests.fsdp_hooks.expert_meshes import ALONE, Layout, built, built_alone, laid_out
from tests.fsdp_hooks.test_compressed_states import train
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import sampled

CONFIG = {"model_type": "tiny", "tie_word_embeddings": False}
LAYOUTS = [Layout(2, 2, 1), Layout(2, 2, 0), Layout(4), Layout(1, 2, 1), Layout(1, 3), Layout(2, 4, 1)]
Made = dict[str, Any]


def made_of(name: str, layout: Layout, path: Path, delta: bytes | None = None) -> Made:
    """A digest, the delta of a step, an export and a stream; the step, once more, by a delta that others made."""
    model, behind = built(name, layout), built(name, layout)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), lr=0.01)
    base = HeldVersion(model.state_dict(), 1)
    train(model, optimizer, range(1))
    found: Made = {"digest": digest(model.state_dict())}
    between = base.since(model.state_dict(), 2)
    if between is not None:
        found["delta"] = delta_to_bytes(between)
    assert (between is None) == (dist.get_rank() > 0)
    if delta is not None:
        assert digest(behind.state_dict()) != found["digest"]
        assert apply_deltas(behind.state_dict(), [delta_from_bytes(delta)]) == 1
        assert digest(behind.state_dict()) == found["digest"]
    export_hf(model, path / str(layout), layout="modelopt", config=CONFIG)
    streamed = {
        key: tensor.clone()
        for bucket in WeightStream(model, layout="modelopt", config=CONFIG)
        for key, tensor in bucket.items()
    }
    if dist.get_rank() == 0:
        files = (path / str(layout)).glob("*.safetensors")
        found["export"] = {key: raw(tensor) for file in files for key, tensor in load_file(file).items()}
        found["stream"] = {key: raw(tensor) for key, tensor in streamed.items()}
        assert found["stream"] == found["export"]
    return found


def raw(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), flat.numpy().tobytes()


@sampled("layout", LAYOUTS, LAYOUTS[:1], ids=[layout.where for layout in LAYOUTS])
def test_digests_deltas_exports_and_streams_are_those_of_one_process(layout: Layout, shared_tmp_path: Path) -> None:
    (expected,) = run_ranks(1, made_of, "nvfp4", ALONE, shared_tmp_path)
    assert sum("experts." in key for key in expected["export"]) == 5 * 3 * 3  # the parts of gate, up and down
    first, *others = run_ranks(layout.ranks, made_of, "nvfp4", layout, shared_tmp_path, expected["delta"])
    assert first == expected
    assert all(other == {"digest": expected["digest"]} for other in others)


def saved(name: str, path: Path) -> str:
    model = built(name)
    train(model, MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), lr=0.01), range(1))
    save(model.state_dict(), path)
    return digest(model.state_dict())


def saved_dense(name: str, path: Path) -> str:
    """Values of any bits, and what they are quantized to."""
    model = built_alone(name)
    values = {key: torch.randn(param.shape).bfloat16() for key, param in model.named_parameters()}
    save(values, path)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.copy_(values[key])
    return digest(model.state_dict())


def filled(layout: Layout, name: str, path: Path) -> str:
    """No rank ever holds all experts."""
    with torch.device("meta"):
        model = built_alone(name)
    laid_out(model, layout).to_empty(device="cpu")
    load(model.state_dict(), path, on_mismatch="convert")
    return digest(model.state_dict())


FILLED = [(name, how) for name in ("nvfp4", "mxfp8_square") for how in (saved, saved_dense)]


@sampled(("name", "how"), FILLED, FILLED[1:2], ids=[f"{name} {how.__name__}" for name, how in FILLED])
def test_experts_on_the_meta_device_are_laid_out_and_loaded(name: str, how: Any, shared_tmp_path: Path) -> None:
    """Quantized ones, and dense ones that are quantized on the way."""
    expected = run_ranks(1, how, name, shared_tmp_path)
    assert run_ranks_each(4, LAYOUTS[:3], filled, name, shared_tmp_path) == [expected * 3] * 4
