"""Models with storage="high_precision" are exported as the quantized weights that their forwards compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dcp_adapters import WeightStream, export_hf, fused_linears
from fsdp_hooks import sync_scales, unsharded
from fsdp_hooks.torch_private import local_of
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
    share_scales,
)
from tests.dcp_adapters.streams.cases import assert_same, files, streamed
from tests.qtensor.fused import GROUPS, Model, built, values
from tests.ranks import agreed, run_ranks, run_ranks_catching, run_ranks_each

NVFP4 = NVFP4BlockScaling()
RECIPES: dict[str, Any] = {
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "float8_row": Float8CurrentScaling(),
    "float8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "int4": Int4GroupScaling(group=32),
    "nvfp4": NVFP4,
}
CONFIG = {"model_type": "mine"}


def dense_storage(recipe: Any, **options: Any) -> Model:
    """fp32 shards to be, with values."""
    model = built(recipe, torch.float32, storage="high_precision", **options)
    model.load_state_dict(values(dtype=torch.float32))
    return model


def written(source: Any, path: Path, **options: Any) -> dict[str, Tensor]:
    export_hf(source, path, **{"config": CONFIG, "progress": False, **options})
    return files(path)


@pytest.mark.parametrize("name", RECIPES)
def test_the_export_is_that_of_the_quantized_weights(name: str, tmp_path: Path) -> None:
    model = dense_storage(RECIPES[name])
    stored = built(RECIPES[name], torch.float32)
    stored.load_state_dict(values(dtype=torch.float32))
    found = written(model, tmp_path / "out")
    assert_same(found, written(stored, tmp_path / "stored"))
    assert_same(found, written({"model": model.state_dict(), "step": torch.zeros(())}, tmp_path / "b", prefix="model."))
    assert_same(found, streamed(WeightStream(model, config=CONFIG)))
    for key in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / key).read_bytes() == (tmp_path / "stored" / key).read_bytes()
    assert not any(tensor.dtype == torch.float32 and tensor.numel() > 64 * 4 for tensor in found.values())


def test_the_table_of_fused_linears_is_that_of_the_export(tmp_path: Path) -> None:
    model = dense_storage(NVFP4, share=False)
    assert fused_linears(model) == GROUPS
    with pytest.raises(ValueError, match=r"theirs differ: layers.0.q_proj.weight .*train them together \(qtensor.sh"):
        written(model, tmp_path / "refused")
    requantized = written(model, tmp_path / "again", fused_scales="requantize")
    share_scales(model, fused_linears(model))
    sync_scales(model)
    found = written(model, tmp_path / "shared")
    assert found.keys() == requantized.keys()
    leads = found["layers.0.q_proj.weight_global_scale"]
    for name in GROUPS[0]:
        assert torch.equal(found[f"{name}.weight_global_scale"], leads)
        weight = model.get_submodule(name).weight.quantize()
        assert torch.equal(found[f"{name}.weight_packed"], weight.payload)
        assert torch.equal(torch.reciprocal(leads[0]), weight.global_scale)


def test_fused_linears_are_found_inside_of_compiled_and_wrapped_modules() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2, self.w3 = (nn.Linear(16, 16) for _ in range(3))

    model = nn.ModuleDict({"experts": nn.ModuleList([Expert(), Expert()]), "attn": Model().layers[0]})
    model["attn"].compile()
    wrapped = nn.ModuleDict({"inner": torch.compile(model)})
    assert fused_linears(wrapped) == [
        ["inner._orig_mod.experts.0.w1", "inner._orig_mod.experts.0.w3"],
        ["inner._orig_mod.experts.1.w1", "inner._orig_mod.experts.1.w3"],
        [f"inner._orig_mod.attn.{name}_proj" for name in "qkv"],
    ]
    assert fused_linears(nn.Linear(16, 16)) == []


def test_both_storages_in_one_model_are_exported_quantized(tmp_path: Path) -> None:
    """Weights that are dense at rest must not slip into the file as dense ones."""
    with quantized_model_init(MXFP8BlockScaling(), storage="high_precision"):
        dense = nn.Linear(64, 32, bias=False)
    with quantized_model_init(MXFP8BlockScaling()):
        stored = nn.Linear(64, 32, bias=False)
    found = written(nn.ModuleDict({"a": dense, "b": stored}), tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        f"{module}.{part}": dtype
        for module in "ab"
        for part, dtype in (("weight", torch.float8_e4m3fn), ("weight_scale", torch.uint8))
    }


def test_other_tensors_get_the_dtype_that_forwards_compute_in(tmp_path: Path) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(32, 64)
            self.up = nn.Linear(64, 32)
            self.register_buffer("counts", torch.arange(3))

    with quantized_model_init(NVFP4, storage="high_precision"):
        model = Embedded()
    plain = written(model, tmp_path / "plain", config={"torch_dtype": "float32"})
    found = written(model, tmp_path / "bf16", config={"torch_dtype": "float32"}, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert (config["dtype"], "torch_dtype" in config) == ("bfloat16", False)
    of_fp32 = quantize(model.up.weight.dense.detach(), NVFP4)
    assert not torch.equal(quantize(model.up.weight.dense.detach().bfloat16(), NVFP4).payload, of_fp32.payload)
    for name in ("embed_tokens.weight", "up.bias"):
        assert plain[name].dtype == torch.float32
        assert torch.equal(found[name], plain[name].bfloat16()), "rounded once"
    for files_ in (plain, found):
        assert torch.equal(files_["up.weight_packed"], of_fp32.payload), "of the values as they are"
        assert files_["up.weight_global_scale"].dtype == torch.float32
        assert files_["counts"].dtype == torch.int64
    with pytest.raises(ValueError, match=r"export_hf: dtype=torch.float8_e4m3fn is not one of torch.bfloat16, torch.f"):
        written(model, tmp_path / "no", dtype=torch.float8_e4m3fn)


# -- shards ------------------------------------------------------------------------------------------------------------


def sharded(model: Model, *, load: bool = True) -> Model:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if load:
        model.load_state_dict(
            {
                name: distribute_tensor(
                    values(dtype=torch.float32)[name], param.device_mesh, param.placements, src_data_rank=None
                )
                for name, param in model.named_parameters()
            }
        )
    return model


def _exported(name: str, path: str) -> None:
    model = sharded(built(RECIPES[name], torch.float32, storage="high_precision"))
    found = written(model, Path(path) / name)
    with unsharded(model):
        for fqn, param in model.named_parameters():
            used = local_of(param)
            assert isinstance(used, QuantizedTensor)
            module = fqn.removesuffix(".weight")
            packed = found.get(f"{module}.weight_packed", found.get(f"{module}.weight"))
            assert packed is not None
            if name != "int4":  # which packs codes in another order
                assert torch.equal(packed.view(torch.uint8), used.payload.view(torch.uint8)), fqn


@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_are_exported_as_one_process_exports(ranks: int, tmp_path: Path) -> None:
    there = agreed(value=str(tmp_path))
    run_ranks_each(ranks, RECIPES, _exported, there)
    for name, recipe in RECIPES.items():
        assert_same(files(f"{there}/{name}"), written(dense_storage(recipe), tmp_path / f"{name}-alone"))


def _exported_without_a_sync(name: str, path: str) -> None:
    model = sharded(built(RECIPES[name], torch.float32, storage="high_precision"))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # each shard has a scale of its own now
    written(model, Path(path) / "out")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("float8_tensor", "ranks 0 and 1 differ in the values of tensor-wide scales; call fsdp_hooks.sync_scales"),
        ("nvfp4", "train them together (qtensor.share_scales, and fsdp_hooks.sync_scales after the last write)"),
    ],
)
def test_shards_that_have_not_agreed_are_refused(name: str, words: str, tmp_path: Path) -> None:
    for text in run_ranks_catching(2, _exported_without_a_sync, name, agreed(value=str(tmp_path))):
        assert words in text
    assert not list(tmp_path.iterdir())


# -- rows that tensor parallelism cuts along K -------------------------------------------------------------------------


def cut_along_columns(storage: str) -> nn.Module:
    """FSDP over tensor parallelism on 2 x 2 ranks; each rank wrote its own columns, so scales of rows differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with quantized_model_init(RECIPES["float8_row"], storage=storage):
        model = nn.Sequential(*(nn.Linear(64, 6, bias=False) for _ in range(2)))
    for linear in model:
        parallelize_module(linear, mesh["tp"], RowwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    dense, wanted = values_of_columns(), (Shard(0), Shard(1))
    with torch.no_grad():
        for name, param in model.named_parameters():
            piece = distribute_tensor(dense[name], mesh, wanted, src_data_rank=None)
            local_of(param).copy_(local_of(piece))
    return model


def values_of_columns() -> dict[str, Tensor]:
    """The second half of the columns is larger in each row of one weight, in none of the other."""
    generator = torch.Generator().manual_seed(3)
    dense = {f"{number}.weight": torch.randn(6, 64, generator=generator) for number in range(2)}
    dense["0.weight"][:, 0], dense["0.weight"][:, -1] = 7.0, -7.0
    dense["1.weight"][:, -1] = 9.0
    return dense


def _columns_with_scales_of_their_own(storage: str, call: str, path: str) -> None:
    model = cut_along_columns(storage)
    WeightStream(model, config=CONFIG) if call == "WeightStream" else written(model, Path(path) / "out")


@pytest.mark.parametrize("storage", ["high_precision", "quantized"])
@pytest.mark.parametrize("call", ["export_hf", "WeightStream"])
def test_columns_that_have_not_agreed_on_the_scales_of_their_rows_are_refused(
    storage: str, call: str, tmp_path: Path
) -> None:
    words = (
        f"{call}: 1.weight: rank 0 and rank 1 hold different scales for the same rows, whose columns they share; "
        "call fsdp_hooks.sync_scales on the model first"
    )
    found = run_ranks_catching(4, _columns_with_scales_of_their_own, storage, call, agreed(value=str(tmp_path)))
    assert found == [f"ValueError: {words}"] * 4
    assert not list(tmp_path.iterdir())


def _columns_that_agree(path: str) -> None:
    model = cut_along_columns("high_precision")
    sync_scales(model)
    found = written(model, Path(path) / "out")
    streams = streamed(WeightStream(model, config=CONFIG, to="all"))
    assert_same(found, streams)
    with torch.no_grad():
        local_of(model.get_submodule("1").weight)[:1, :1].fill_(100.0 + dist.get_rank())  # behind the agreement
    with pytest.raises(ValueError, match=r"1.weight: rank 0 and rank 1 hold different scales"):
        WeightStream(model, config=CONFIG)


def test_columns_that_agree_are_exported_as_one_process_exports(tmp_path: Path) -> None:
    there = agreed(value=str(tmp_path))
    run_ranks(4, _columns_that_agree, there)
    one = {name: quantize(value, RECIPES["float8_row"]) for name, value in values_of_columns().items()}
    assert_same(files(f"{there}/out"), written(one, tmp_path / "alone"))
