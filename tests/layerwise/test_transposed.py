"""Weights that are stored transposed: Conv1D [K, N] and experts [E, K, N]. Blocks lie along K all the same.

The result is [N, K] and [E, N, K], the linears that engines and products know; the model keeps its own layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import Mxfp4Config

from dcp_adapters import export_hf
from layerwise import GPTQ, Algorithm, LocalHessian, Max, Mse, calibrate
from qtensor import Float8CurrentScaling, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.layerwise.algorithm_table import ALGORITHMS
from tests.layerwise.families import batches_for, family
from tests.layerwise.models import fingerprints
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each

if TYPE_CHECKING:
    from layerwise import CalibrationResult, Event

NVFP4, MXFP8, MXFP4, ROW = NVFP4BlockScaling(), MXFP8BlockScaling(), MXFP4BlockScaling(), Float8CurrentScaling()


def run(model: nn.Module, data: Any, recipe: Any, algorithm: Algorithm, **options: Any) -> CalibrationResult:
    return calibrate(model, data, recipe=recipe, algorithm=algorithm, progress=False, **options)


# -- one linear, the other way round -----------------------------------------------------------------------------------


class Single(nn.Module):
    """A linear behind a norm; all of the model, so that both ways to store it see the same inputs."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = Conv1D(96, 64) if turned else nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def single(*, turned: bool) -> Single:
    model, generator = Single(turned=turned), torch.Generator().manual_seed(3)
    with torch.no_grad():
        rows = torch.randn(96, 64, generator=generator)
        model.linear.weight.copy_(rows.T if turned else rows)
        model.linear.bias.copy_(torch.randn(96, generator=generator))
        model.norm.weight.copy_(1 + torch.rand(64, generator=generator))
        model.norm.weight[::16] *= 8
    return model


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 7 + index, 64, generator=generator) for index in range(4)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_conv1d_gets_what_a_linear_gets(name: str) -> None:
    found, expected = single(turned=True), single(turned=False)
    options: dict[str, Any] = {"layers": (), "inputs": "static"}
    results = [run(model, inputs(), NVFP4, ALGORITHMS[name], **options) for model in (found, expected)]
    ours, its = (fingerprints(result.state_dict()) for result in results)
    assert ours == its
    assert torch.equal(found.linear.weight, expected.linear.weight.T)
    assert torch.equal(found.norm.weight, expected.norm.weight)
    folded = [record.alpha is not None for record in results[0].report.records]
    assert folded == [name in ("AWQ", "SmoothQuant")]


class Experts(nn.Module):
    """Experts that multiply by [E, K, N] in one of the ways that models have, or by [E, N, K]."""

    def __init__(self, way: str, *, turned: bool) -> None:
        super().__init__()
        self.way, self.is_transposed = way, turned
        weight = torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(7))
        self.up_proj = nn.Parameter(weight.mT.contiguous() if turned else weight)

    def forward(self, x: Tensor) -> Tensor:  # [3, T, 64]
        return WAYS[self.way](x, self.up_proj if self.is_transposed else self.up_proj.mT)


# what multiplies x [3, T, 64] with w [3, 64, 48]
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": torch.bmm,
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros_like(x[..., :48]), x, w),
    "matmul": torch.matmul,
    "one by one": lambda x, w: torch.stack([x[expert] @ w[expert] for expert in range(3)]),
    "linear": lambda x, w: torch.stack([F.linear(x[expert], w[expert].T) for expert in range(3)]),
    "halves": lambda x, w: torch.cat([x @ w[..., :16], x @ w[..., 16:]], dim=-1),
    "grouped": lambda x, w: F.grouped_mm(x.reshape(-1, 64), w, offs=torch.arange(1, 4, dtype=torch.int32) * x.shape[1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_experts_get_what_upright_ones_get(way: str) -> None:
    for recipe, algorithm in ((NVFP4, GPTQ()), (MXFP8, LocalHessian()), (ROW, Mse())):
        results = []
        for turned in (True, False):
            model = nn.Sequential(OrderedDict(experts=Experts(way, turned=turned))).bfloat16()
            data = [batch.bfloat16() for batch in inputs()]
            results.append(run(model, data, recipe, algorithm, layers=()))
        found, expected = (fingerprints(result.state_dict()) for result in results)
        assert found == expected
        assert {record.tokens for record in results[0].report.records} == {7 + 8 + 9 + 10}
        assert not results[0].starved


class Halved(Max):
    """Writes into the weight that it sees, although it says that it writes none."""

    def decide(self, group: Any, recipe: Any) -> Any:
        group.linears[0].weight.mul_(0.5)
        return super().decide(group, recipe)


def test_a_write_into_the_weight_that_an_algorithm_sees_is_detected() -> None:
    model = single(turned=True)
    before = model.linear.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"linear\.weight.*changed while Halved calibrated"):
        run(model, inputs(), NVFP4, Halved(), layers=())
    assert torch.equal(model.linear.weight, before)


# -- models of transformers --------------------------------------------------------------------------------------------


def outcome(model: nn.Module, result: CalibrationResult) -> dict[str, dict[str, str]]:
    return {"result": fingerprints(result.state_dict()), "model": fingerprints(model.state_dict())}


def assert_holds(model: nn.Module, result: CalibrationResult) -> None:
    """Weights of the model are the values of the result, turned."""
    entries = result.state_dict()
    assert entries
    for name, entry in entries.items():
        weight: Any = model.get_parameter(name).detach()
        values, turned = entry.dequantize(weight.dtype), type(model.get_submodule(name.rpartition(".")[0])).__name__
        assert torch.equal(weight, values.mT if turned in ("Conv1D", "GptOssExperts") else values), name


CASES: dict[str, tuple[Any, Algorithm]] = {"gpt2": (NVFP4, GPTQ()), "gpt-oss": (MXFP4, Mse())}


def in_one_process(name: str) -> dict[str, dict[str, str]]:
    recipe, algorithm = CASES[name]
    model = family(name)
    result = run(model, batches_for(name), recipe, algorithm)
    assert_holds(model, result)
    return outcome(model, result)


def sharded(name: str) -> nn.Module:
    model: Any = family(name)
    for layer in model.transformer.h if name == "gpt2" else model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def stop(event: Event) -> None:
    if (event.kind, event.index) == ("write", 1):
        raise InterruptedError


def stopped_and_resumed(name: str, path: Path) -> list[dict[str, dict[str, str]]]:
    recipe, algorithm = CASES[name]
    data = batches_for(name)[dist.get_rank() :: dist.get_world_size()]
    options: dict[str, Any] = {"checkpoint_dir": path / name}
    with pytest.raises(InterruptedError):
        run(sharded(name), data, recipe, algorithm, on_event=stop, **options)
    model = sharded(name)
    result = run(model, data, recipe, algorithm, **options)
    assert result.report.resumed == (0,)
    placed = {name: entry.placements for name, entry in result.state_dict().items()}
    expected = {"gpt2": (Shard(1),), "gpt-oss": (Shard(0),)}[name]
    assert {where for key, where in placed.items() if ".mlp." in key} == {expected}
    return [outcome(model, result)]


def test_two_ranks_stopped_and_resumed_come_to_the_bytes_of_one_process(shared_tmp_path: Path) -> None:
    """One saves weights, of which ranks have columns; the other scales, from which each rank rounds its experts."""
    expected = [in_one_process(name) for name in CASES]
    for outcomes in run_ranks_each(2, CASES, stopped_and_resumed, shared_tmp_path):
        assert [found for (found,) in outcomes] == expected


def along_rows(way: str) -> str:
    model: Any = family("gpt2")
    if way == "dim 0":
        for layer in model.transformer.h:
            fully_shard(layer)
    else:
        for layer in model.transformer.h:
            fully_shard(layer, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None)
    result = run(model, batches_for("gpt2")[dist.get_rank() :: 4], NVFP4, GPTQ())
    entry = result.state_dict()["transformer.h.0.attn.c_attn.weight"]
    assert isinstance(entry, DTensor)
    assert entry.placements == (Shard(0),)
    return str(outcome(model, result))


def test_ranks_that_cut_blocks_are_refused_and_may_cut_the_other_dim() -> None:
    for error in run_ranks_catching(4, along_rows, "dim 0"):
        assert error.startswith("ValueError: transformer.h.0.attn.c_attn.weight is placed (Shard(dim=0),)"), error
        assert (
            "8 columns of K = 32 on a rank, which cuts blocks of 16; shard it with fully_shard(shard_placement_fn="
            in error
        )
    expected = str(in_one_process("gpt2"))
    assert run_ranks(4, along_rows, "dim 1") == [expected] * 4


@pytest.mark.parametrize("name", CASES)
def test_weights_on_disk(tmp_path: Path, name: str) -> None:
    recipe, algorithm = CASES[name]
    model = family(name)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    for key, buffer in model.named_buffers():
        assert not key or buffer is not None
    empty = family(name)
    for module in empty.modules():
        for key, param in module._parameters.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(param.to("meta"), requires_grad=False)
    found = run(empty, batches_for(name), recipe, algorithm, weights=tmp_path, checkpoint_dir=tmp_path / "run")
    expected = run(model, batches_for(name), recipe, algorithm)
    assert fingerprints(found.state_dict()) == fingerprints(expected.state_dict())
    again = run(empty, batches_for(name), recipe, algorithm, weights=tmp_path, checkpoint_dir=tmp_path / "run")
    assert fingerprints(again.state_dict()) == fingerprints(expected.state_dict())


# -- exports -----------------------------------------------------------------------------------------------------------


def test_transformers_loads_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    model: Any = family("gpt-oss").to(torch.bfloat16)
    result = run(model, batches_for("gpt-oss"), MXFP4, GPTQ(), include=["*.experts"])
    state = {**model.state_dict(), **result.state_dict()}
    export_hf(state, tmp_path / "out", layout="mxfp4", config=model.config, progress=False)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "local_files_only": True}
    client = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=Mxfp4Config(dequantize=True), **options
    )
    for name, value in client.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_layouts_refuse_a_quantized_conv1d_by_name(tmp_path: Path) -> None:
    model: Any = family("gpt2")
    result = run(model, batches_for("gpt2"), NVFP4, Max(), exclude=["lm_head"])
    with pytest.raises(
        ValueError, match=r"transformer\.h\.0\.attn\.c_attn\.weight: quantized \[N, K\], .* of gpt2 have"
    ):
        export_hf({**model.state_dict(), **result.state_dict()}, tmp_path / "out", config=model.config, progress=False)
    assert not (tmp_path / "out").exists()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_quantized_along_the_output_is_refused_by_name() -> None:
    model = nn.ModuleDict({"experts": Experts("bmm", turned=True)})
    along_rows = quantize(model["experts"].up_proj.detach().repeat(1, 1, 2), MXFP8)
    model["experts"].up_proj = nn.Parameter(along_rows, requires_grad=False)
    with pytest.raises(ValueError, match=r"experts\.up_proj \(3, 64, 96\) is stored transposed and quantized"):
        run(model, None, MXFP8, Max(), layers=())
