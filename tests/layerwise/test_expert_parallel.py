"""Expert parallelism, alone and under FSDP2: ranks that share experts out come to the bytes of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_adapters import export_hf
from layerwise.stages.cuts import shares_out_experts
from layerwise.stages.tensor_parallel import peers
from qtensor import quantize, quantized_model_init
from tests.fsdp_hooks.cases import Collectives
from tests.layerwise.expert_parallel import ExpertParallel, GroupedExperts, Moe, Sharing, cut, meshes, moe
from tests.layerwise.models import (
    ALGORITHMS,
    RECIPES,
    assert_model_is_result,
    assert_same,
    batches,
    fingerprints,
    forward,
    outcome,
    own,
    reference,
    run,
    shard,
)
from tests.layerwise.test_tensor_parallel import Stop, hooks, stop
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves, sampled

NVFP4, MXFP8, ROW, INT4 = (RECIPES[name] for name in ("nvfp4", "mxfp8", "float8_row", "int4_32"))
METHODS: dict[str, tuple[str, Any]] = {
    "amaxes": ("Max", NVFP4),
    "searched": ("Mse", ROW),
    "blocks": ("LocalHessian", MXFP8),
    "folds": ("AWQ", ROW),
    "values": ("GPTQ", NVFP4),
    "groups": ("GPTQ", INT4),
}
# In `make test` one on 2 ranks, of expert parallelism alone, and on 4 one that folds and one that writes values.
FIRST_ON_RANKS = [(2, ("amaxes",)), (4, ("folds", "values"))]
ON_RANKS = [*FIRST_ON_RANKS, (2, ("values",)), (4, ("amaxes", "searched", "blocks", "groups"))]


def share() -> list[Tensor]:
    """Other batches on each rank, as many as it gets."""
    return batches()[dist.get_rank() :: dist.get_world_size()]


def calibrated(name: str) -> dict[str, Any]:
    algorithm, recipe = METHODS[name]
    model = cut(moe())
    whole = forward(model, batches()[0])
    before, hooked = fingerprints(model.state_dict(), own), hooks(model)
    placed = {key: (type(param), getattr(param, "placements", None)) for key, param in model.named_parameters()}
    result = run(model, share(), recipe, ALGORITHMS[algorithm])
    assert placed == {key: (type(p), getattr(p, "placements", None)) for key, p in model.named_parameters()}
    assert hooks(model) == hooked
    assert_model_is_result(model, result, before)
    other = cut(moe())
    with torch.no_grad():
        for param, value in zip(other.parameters(), model.parameters(), strict=True):
            own(param).copy_(own(value))
    assert torch.equal(forward(model, batches()[1]), forward(other, batches()[1]))
    assert not torch.equal(forward(model, batches()[0]), whole)
    tokens = {record.name: record.tokens for record in result.report.records}
    return {**outcome(model, result), "tokens": {key: str(value) for key, value in tokens.items()}}


@sampled(("world_size", "names"), ON_RANKS, FIRST_ON_RANKS)
def test_all_ranks_come_to_what_one_process_comes_to(world_size: int, names: tuple[str, ...]) -> None:
    for outcomes in run_ranks_each(world_size, names, calibrated):
        for name, found in zip(names, outcomes, strict=True):
            algorithm, recipe = METHODS[name]
            assert_same(found, reference(moe, recipe, ALGORITHMS[algorithm]), algorithm)


def stacked() -> Any:
    return moe(stacked=True)


def with_all_tokens(algorithm: str) -> dict[str, Any]:
    """Each expert sees every token, whoever has the expert, and whoever has the token."""
    model = cut(stacked(), Sharing)
    result = run(model, share(), NVFP4, ALGORITHMS[algorithm], expert_inputs="all", inputs="static")
    tokens = {record.name: str(record.tokens) for record in result.report.records}
    return {**outcome(model, result), "tokens": tokens}


@sampled("algorithm", ["LocalHessian", "GPTQ"], ["GPTQ"])
def test_all_tokens_come_to_all_experts_of_all_ranks(algorithm: str) -> None:
    everything = {str(sum(ids.numel() for ids in batches()))}
    for found in run_ranks(4, with_all_tokens, algorithm):
        expected = reference(stacked, NVFP4, ALGORITHMS[algorithm], expert_inputs="all", inputs="static")
        assert_same(found, expected, algorithm)
        assert {*found["tokens"].values()} == everything


def gathers(kind: str) -> int:
    """How often a parameter of experts is gathered; nothing else is a DTensor."""
    model = cut(moe(dense_first=kind == "behind a dense layer"))
    with Collectives() as seen:
        run(model, share(), NVFP4, ALGORITHMS["Max"])
    return sum(count for name, count in seen.counts.items() if name.startswith("all_gather"))


def test_layers_are_gathered_once_and_the_first_of_a_later_kind_twice() -> None:
    kinds = {"two layers of one kind": 2 * 3, "behind a dense layer": 2 * 3}  # three parameters a layer
    assert run_ranks_each(2, kinds, gathers) == [[*kinds.values()]] * 2


# -- other layouts -----------------------------------------------------------------------------------------------------


def along_rows(model: Any) -> Any:
    """As with more ranks than experts: FSDP cuts their rows."""
    return cut(model, shard_placement_fn=lambda param: Shard(1))


def left_alone(model: Any) -> Any:
    """FSDP shards all but the experts, of which two ranks have the same."""
    flat, own_mesh = meshes()
    for layer in model.layers:
        parallelize_module(layer.mlp, own_mesh["ep"], {"experts": Sharing()})
        fully_shard(layer, mesh=flat, ignored_params={*layer.mlp.experts.parameters()})
    experts = {param for layer in model.layers for param in layer.mlp.experts.parameters()}
    return fully_shard(model, mesh=flat, ignored_params=experts)


def left_alone_on_one_mesh(model: Any) -> Any:
    """FSDP shards all but the experts over the ranks that these are shared out over."""
    flat, _ = meshes()
    for layer in model.layers:
        parallelize_module(layer.mlp, flat, {"experts": Sharing()})
        fully_shard(layer, mesh=flat, ignored_params={*layer.mlp.experts.parameters()})
    experts = {param for layer in model.layers for param in layer.mlp.experts.parameters()}
    return fully_shard(model, mesh=flat, ignored_params=experts)


def replicated(model: Any) -> Any:
    """HSDP; what FSDP shards experts over is one rank wide."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "efsdp", "ep"))
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "dp"))
    for layer in model.layers:
        parallelize_module(layer.mlp, mesh["ep"], {"experts": ExpertParallel()})
        fully_shard(layer.mlp.experts, mesh=mesh["replicas", "efsdp"])
        fully_shard(layer, mesh=dense)
    return fully_shard(model, mesh=dense)


def beside_tensor_parallelism(model: Any) -> Any:
    """Experts are shared out over all ranks; pairs of these cut attentions between them, and get the same batches."""
    mesh, ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))
    for layer in model.layers:
        columns = {f"attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(layer, mesh["tp"], {**columns, "attn.o_proj": RowwiseParallel()}, src_data_rank=None)
        parallelize_module(layer.mlp, ep, {"experts": Sharing()})
    return model


def cut_experts(model: Any) -> Any:
    """Experts are shared out over one dim of a mesh, and each is cut over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    for layer in model.layers:
        for name, param in list(layer.mlp.experts.named_parameters()):
            places = (Shard(0), Shard(2 if name == "w2" else 1))
            value = distribute_tensor(param.detach(), mesh, places, src_data_rank=None)
            setattr(layer.mlp.experts, name, nn.Parameter(value))
    return model


LAYOUTS: dict[str, Any] = {
    "along rows": along_rows,
    "left alone": left_alone,
    "left alone on one mesh": left_alone_on_one_mesh,
    "replicated": replicated,
    "beside tensor parallelism": beside_tensor_parallelism,
    "cut experts": cut_experts,
}
IN_PAIRS = ("beside tensor parallelism", "cut experts")


def laid_out(name: str) -> dict[str, Any]:
    model, rank = LAYOUTS[name](moe()), dist.get_rank()
    assert peers(model) == ((rank // 2 * 2, rank // 2 * 2 + 1) if name in IN_PAIRS else ())
    assert shares_out_experts(model)
    result = run(model, batches()[rank // 2 :: 2] if name in IN_PAIRS else share(), NVFP4, ALGORITHMS["GPTQ"])
    tokens = {record.name: str(record.tokens) for record in result.report.records if "experts" not in record.name}
    return {**outcome(model, result), "tokens": tokens}


@pytest.mark.full
def test_any_layout_comes_to_what_one_process_comes_to() -> None:
    everything = {str(sum(ids.numel() for ids in batches()))}
    for outcomes in run_ranks_each(4, LAYOUTS, laid_out):
        for name, found in zip(LAYOUTS, outcomes, strict=True):
            assert_same(found, reference(moe, NVFP4, ALGORITHMS["GPTQ"]), name)
            assert {*found["tokens"].values()} == everything, name


class WithBias(nn.Module):
    """Experts whose biases [E, N] are cut with them, and a linear beside them."""

    def __init__(self, mesh: Any, place: Any) -> None:
        super().__init__()
        weights = {"weight": torch.ones(4, 32, 64), "bias": torch.ones(4, 32)}
        for name, values in weights.items():
            setattr(self, name, nn.Parameter(distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)))
        self.gate = nn.Linear(64, 4, bias=False)
        gate = distribute_tensor(self.gate.weight.detach(), mesh, [place], src_data_rank=None)
        self.gate.weight = nn.Parameter(gate)


def together() -> list[tuple[bool, tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2,))
    models = [WithBias(mesh, place) for place in (Replicate(), Shard(0))]
    return [(shares_out_experts(model), peers(model)) for model in models]


def test_a_dim_that_cuts_other_weights_than_experts_too_is_one_of_tensor_parallelism() -> None:
    assert run_ranks(2, together) == [[(True, ()), (True, (0, 1))]] * 2


def stored(kind: str) -> dict[str, dict[str, str]]:
    """Experts that are quantized at rest, too; of the last kind, FSDP cuts their rows."""
    storage = "quantized" if kind == "along rows" else kind
    with quantized_model_init(NVFP4, storage=storage):
        model = moe()
    model.load_state_dict(moe().state_dict())
    for layer in model.layers if storage == "quantized" else ():
        for name, param in list(layer.mlp.experts.named_parameters()):
            setattr(layer.mlp.experts, name, nn.Parameter(quantize(param.detach(), NVFP4), requires_grad=False))
    ranks = dist.is_initialized()
    if ranks:
        model = along_rows(model) if kind == "along rows" else cut(model)
    return outcome(model, run(model, share() if ranks else batches(), NVFP4, ALGORITHMS["GPTQ"]))


@pytest.mark.full
def test_stored_weights_come_to_what_one_process_comes_to() -> None:
    storages = ("quantized", "high_precision", "along rows")
    for outcomes in run_ranks_each(4, storages, stored):
        for storage, found in zip(storages, outcomes, strict=True):
            assert_same(found, stored(storage), storage)


# -- checkpoints and exports -------------------------------------------------------------------------------------------


def begun(name: str, path: Path) -> None:
    algorithm, recipe = METHODS[name]
    with pytest.raises(Stop):
        run(cut(moe()), share(), recipe, ALGORITHMS[algorithm], checkpoint_dir=path / name, on_event=stop)


def finished(name: str, path: Path) -> tuple[tuple[int, ...], dict[str, dict[str, str]]]:
    algorithm, recipe = METHODS[name]
    model = moe()
    model = shard(model) if dist.get_world_size() == 3 else cut(model)
    result = run(model, share(), recipe, ALGORITHMS[algorithm], checkpoint_dir=path / name)
    return tuple(result.report.resumed), outcome(model, result)


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(4, 3), (2, 4)])
def test_a_run_goes_on_on_another_mesh(shared_tmp_path: Path, first: int, second: int) -> None:
    """From FSDP x expert parallelism to FSDP alone, and so on: scales alone are saved for one, weights for one."""
    names = ("searched", "values")
    run_ranks_each(first, names, begun, shared_tmp_path)
    for outcomes in run_ranks_each(second, names, finished, shared_tmp_path):
        for name, (resumed, found) in zip(names, outcomes, strict=True):
            algorithm, recipe = METHODS[name]
            assert resumed == (0,)
            assert_same(found, reference(moe, recipe, ALGORITHMS[algorithm]), name)


def exported(path: Path) -> None:
    ranks = dist.is_initialized()
    model = cut(moe()) if ranks else moe()
    result = run(model, share() if ranks else batches(), NVFP4, ALGORITHMS["GPTQ"], inputs="static")
    export_hf({**model.state_dict(), **result.state_dict()}, path, layout="compressed-tensors", progress=False)


def test_an_export_has_the_bytes_of_one_process(shared_tmp_path: Path) -> None:
    run_ranks(4, exported, shared_tmp_path / "ranks")
    exported(shared_tmp_path / "one")
    ranks, one = (
        {file.name: file.read_bytes() for file in (shared_tmp_path / kind).iterdir()} for kind in ("ranks", "one")
    )
    assert ranks == one


# -- what is refused ---------------------------------------------------------------------------------------------------


class SendThemselves(GroupedExperts):
    """Their forward communicates, where that of others leaves it to hooks."""

    sends = True

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.sends:
            dist.all_reduce(counts.clone())
        return super().forward(rows, counts)


def communicating(case: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Only the first rank has a batch. What is refused, and what comes of the same model once it is mended."""
    model = moe(dense_first=case == "behind a dense layer")
    experts = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, Moe)]
    experts[-1].__class__ = SendThemselves
    if case == "where nothing tells":
        experts[0].__class__, experts[0].sends = SendThemselves, False
    model = cut(model, Sharing)
    before, data = fingerprints(model.state_dict(), own), batches()[:1] if dist.get_rank() == 0 else []
    with pytest.raises((NotImplementedError, RuntimeError)) as caught:
        run(model, data, NVFP4, ALGORITHMS["GPTQ"])
    changed = [name for name, value in fingerprints(model.state_dict(), own).items() if value != before[name]]
    assert all(name.startswith("layers.0.") for name in changed), changed  # a finished layer keeps its result
    assert bool(changed) == (case == "where nothing tells")
    experts[-1].sends = False
    return str(caught.value), outcome(model, run(model, data, NVFP4, ALGORITHMS["GPTQ"]))


def behind_a_dense_layer() -> Any:
    return moe(dense_first=True)


COMMUNICATING = {"behind a dense layer": behind_a_dense_layer, "behind others": moe, "where nothing tells": None}


@halves("names", COMMUNICATING, ["behind a dense layer", "where nothing tells"])
def test_a_forward_that_communicates_is_refused_by_name(names: tuple[str, ...]) -> None:
    """Before anything is changed, unless its layer is made like others; also where ranks have no batch."""
    for outcomes in run_ranks_each(4, names, communicating):
        for name, (message, found) in zip(names, outcomes, strict=True):
            build = COMMUNICATING[name]
            assert "experts are shared out over ranks (expert parallelism)" in message
            assert "the forward of layers.1 calls a collective, c10d.allreduce_" in message
            if build is not None:
                assert_same(found, reference(build, NVFP4, ALGORITHMS["GPTQ"], 1), name)


def with_plain_parts(_: str) -> tuple[str, bool]:
    """Experts shared out as plain tensors: nothing but their values says that ranks have others."""
    model, style = moe(experts=4), ExpertParallel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        experts = layer.mlp.experts
        for name, param in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(param.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()))
        experts.register_forward_pre_hook(lambda module, inputs: style.dispatch(module, inputs, mesh))
        experts.register_forward_hook(lambda module, inputs, output: style.combine(module, output, mesh))
    before, data = fingerprints(model.state_dict(), own), share()[:1]
    with pytest.raises(RuntimeError) as caught:
        run(model, data, NVFP4, ALGORITHMS["GPTQ"])
    return str(caught.value), fingerprints(model.state_dict(), own) == before


def test_experts_shared_out_as_plain_tensors_are_refused_by_name() -> None:
    for ((message, kept),) in run_ranks_each(2, ("plain",), with_plain_parts):
        assert message.startswith("calibrate: the weights of layers.0 differ between ranks: layers.0.mlp.experts.w1 of")
        assert "Parameters of which each rank has a part are DTensors, which say so" in message
        assert kept
