"""Tensor parallelism, alone and under FSDP2: ranks that cut layers in any way come to the bytes of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dcp_adapters import export_hf
from fsdp_hooks.torch_private import hook_tables
from layerwise.stages.cuts import shares_out_experts
from layerwise.stages.tensor_parallel import peers
from qtensor import quantized_model_init
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
    toy,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled

if TYPE_CHECKING:
    from layerwise import Event

NVFP4, MXFP8, ROW = RECIPES["nvfp4"], RECIPES["mxfp8"], RECIPES["float8_row"]
METHODS: dict[str, tuple[str, Any]] = {
    "amaxes": ("Max", NVFP4),
    "searched": ("Mse", ROW),
    "folds": ("AWQ", ROW),
    "values": ("GPTQ", NVFP4),
}
MESHES = {2: (1, 2), 4: (2, 2)}  # FSDP x tensor parallelism; with 1 of FSDP, tensor parallelism alone


def two_layers() -> Any:
    """K of a rank is a multiple of NVFP4's blocks, and not of MXFP8's."""
    return toy(layers=2)


def styles() -> dict[str, Any]:
    """Also those that cut no weight: they register hooks all the same, and make Replicate() parameters."""
    columns = dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj"))
    inputs = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    return {
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel() for name in ("attn.o_proj", "mlp.down_proj")},
        "attn": inputs,
    }


def cut(model: Any, shape: tuple[int, int], plan: Any = styles) -> Any:
    """A model cut over a mesh; each rank cuts its own pieces."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan(), src_data_rank=None)
    if shape[0] > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def mesh_of() -> tuple[int, int]:
    return MESHES[dist.get_world_size()]


def share() -> list[Tensor]:
    """The same batches on the ranks of a group of tensor parallelism."""
    replicas, group = mesh_of()
    return batches()[dist.get_rank() // group :: replicas]


def hooks(model: Any) -> list[list[int]]:
    return [[*table] for module in model.modules() for table in hook_tables(module).values()]


def calibrated(name: str) -> dict[str, Any]:
    algorithm, recipe = METHODS[name]
    model = cut(two_layers(), mesh_of())
    assert not shares_out_experts(model)
    forward(model, batches()[0])
    before, hooked = fingerprints(model.state_dict(), own), hooks(model)
    placed = {key: (type(param), getattr(param, "placements", None)) for key, param in model.named_parameters()}
    result = run(model, share(), recipe, ALGORITHMS[algorithm])
    assert placed == {key: (type(p), getattr(p, "placements", None)) for key, p in model.named_parameters()}
    assert hooks(model) == hooked
    assert_model_is_result(model, result, before)
    other = cut(two_layers(), mesh_of())
    with torch.no_grad():
        for param, value in zip(other.parameters(), model.parameters(), strict=True):
            own(param).copy_(own(value))
    assert torch.equal(forward(model, batches()[1]), forward(other, batches()[1]))
    tokens = {record.name: record.tokens for record in result.report.records}
    return {**outcome(model, result), "tokens": {key: str(value) for key, value in tokens.items()}}


# Each method once in `make test`: those that write values on 4 ranks, where FSDP shards what is cut, too.
FIRST_ON_RANKS = [(2, ("amaxes", "searched")), (4, ("folds", "values"))]
ON_RANKS = [*FIRST_ON_RANKS, (2, ("folds", "values")), (4, ("amaxes", "searched"))]


@sampled(("world_size", "names"), ON_RANKS, FIRST_ON_RANKS)
def test_all_ranks_come_to_what_one_process_comes_to(world_size: int, names: tuple[str, ...]) -> None:
    everything = {str(sum(ids.numel() for ids in batches()))}  # each token once, whoever has it
    for outcomes in run_ranks_each(world_size, names, calibrated):
        for name, found in zip(names, outcomes, strict=True):
            algorithm, recipe = METHODS[name]
            assert_same(found, reference(two_layers, recipe, ALGORITHMS[algorithm]), algorithm)
            assert {*found["tokens"].values()} == everything


def from_a_loop(kind: str) -> dict[str, Any]:
    """Where the whole model is gathered before it is asked who cuts it."""
    model = cut(two_layers(), (1, 2))
    if kind == "root":
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"])

    def loop(called: nn.Module) -> None:
        for ids in batches():
            called(ids)

    result = run(model, loop, NVFP4, ALGORITHMS["GPTQ"], **({"layers": ()} if kind == "at once" else {}))
    tokens = {record.name: str(record.tokens) for record in result.report.records}
    return {**outcome(model, result), "tokens": tokens}


def test_batches_of_a_loop_run_once_in_a_group() -> None:
    everything = {str(sum(ids.numel() for ids in batches()))}
    for outcomes in run_ranks_each(2, ["layers", "root", "at once"], from_a_loop):
        for found in outcomes:
            assert {*found["tokens"].values()} == everything
        assert_same(outcomes[1], outcomes[0], "FSDP around the root alone")


def crossing() -> tuple[int, ...]:
    """Weights that different dims of one mesh cut."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, placements in zip(model, ((Shard(0), Replicate()), (Replicate(), Shard(0))), strict=True):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements, src_data_rank=None))
    return peers(model)


def test_ranks_of_one_group_name_the_same_peers() -> None:
    assert run_ranks(4, crossing) == [(0, 1, 2, 3)] * 4


def stored(storage: str) -> dict[str, dict[str, str]]:
    with quantized_model_init(NVFP4, storage=storage):
        model = two_layers()
    model.load_state_dict(two_layers().state_dict())
    model = cut(model, mesh_of(), lambda: {name: one for name, one in styles().items() if name != "attn"})
    return outcome(model, run(model, share(), NVFP4, ALGORITHMS["GPTQ"]))


def stored_in_one_process(storage: str) -> dict[str, dict[str, str]]:
    with quantized_model_init(NVFP4, storage=storage):
        model = two_layers()
    model.load_state_dict(two_layers().state_dict())
    return outcome(model, run(model, batches(), NVFP4, ALGORITHMS["GPTQ"]))


@sampled("storage", ("quantized", "high_precision"), ("quantized",))
def test_stored_weights_come_to_what_one_process_comes_to(storage: str) -> None:
    for found in run_ranks(4, stored, storage):
        assert_same(found, stored_in_one_process(storage), storage)


# -- checkpoints and exports -------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop(event: Event) -> None:
    if (event.kind, event.index) == ("write", 1):
        raise Stop


def begun(name: str, path: Path) -> None:
    algorithm, recipe = METHODS[name]
    with pytest.raises(Stop):
        run(
            cut(two_layers(), mesh_of()),
            share(),
            recipe,
            ALGORITHMS[algorithm],
            checkpoint_dir=path / name,
            on_event=stop,
        )


def finished(name: str, path: Path) -> tuple[tuple[int, ...], dict[str, dict[str, str]]]:
    algorithm, recipe = METHODS[name]
    model = cut(two_layers(), mesh_of()) if dist.get_world_size() in MESHES else shard(two_layers())
    data = share() if dist.get_world_size() in MESHES else batches()[dist.get_rank() :: dist.get_world_size()]
    result = run(model, data, recipe, ALGORITHMS[algorithm], checkpoint_dir=path / name)
    return tuple(result.report.resumed), outcome(model, result)


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(4, 3), (4, 2), (2, 4)])
def test_a_run_goes_on_on_another_mesh(shared_tmp_path: Path, first: int, second: int) -> None:
    """From FSDP x tensor parallelism to FSDP on 3 ranks, and so on: scales alone are saved for one, weights for one."""
    names = ("searched", "values")
    run_ranks_each(first, names, begun, shared_tmp_path)
    for outcomes in run_ranks_each(second, names, finished, shared_tmp_path):
        for name, (resumed, found) in zip(names, outcomes, strict=True):
            algorithm, recipe = METHODS[name]
            assert resumed == (0,)
            assert_same(found, reference(two_layers, recipe, ALGORITHMS[algorithm]), name)


def exported(path: Path) -> None:
    ranks = dist.is_initialized()
    model = cut(two_layers(), mesh_of()) if ranks else two_layers()
    result = run(model, share() if ranks else batches(), NVFP4, ALGORITHMS["GPTQ"], inputs="static")
    export_hf({**model.state_dict(), **result.state_dict()}, path, layout="modelopt", progress=False)


def test_an_export_has_the_bytes_of_one_process(shared_tmp_path: Path) -> None:
    run_ranks(4, exported, shared_tmp_path / "ranks")
    exported(shared_tmp_path / "one")
    ranks, one = (
        {file.name: file.read_bytes() for file in (shared_tmp_path / kind).iterdir()} for kind in ("ranks", "one")
    )
    assert ranks == one


# -- what is refused ---------------------------------------------------------------------------------------------------


def with_other_batches(kind: str) -> str:
    model = cut(two_layers(), mesh_of())
    before = fingerprints(model.state_dict(), own)
    data, rank = share(), dist.get_rank()
    if rank == dist.get_world_size() - 1:
        data = data[:-1] if kind == "fewer" else [data[0], data[1].flip(-1), *data[2:]]
    with pytest.raises(ValueError, match="must get the same batches") as caught:
        run(model, data, NVFP4, ALGORITHMS["GPTQ"])
    assert fingerprints(model.state_dict(), own) == before
    return str(caught.value)


def test_other_batches_in_a_group_are_refused_by_name_on_all_ranks() -> None:
    words = {
        "fewer": "rank 3 has 1 batches in the place of the 2 of rank 2",
        "other": "rank 3 has another batch 1 than that of rank 2",
    }
    for found in run_ranks_each(4, words, with_other_batches):
        for message, expected in zip(found, words.values(), strict=True):
            assert "ranks 2, 3 cut weights between them (tensor parallelism)" in message
            assert expected in message


def cut_inside_blocks() -> None:
    run(cut(two_layers(), mesh_of()), share(), MXFP8, ALGORITHMS["Max"])


def test_blocks_cut_by_ranks_are_refused_by_name() -> None:
    for error in run_ranks_catching(2, cut_inside_blocks):
        assert re.match(
            r"ValueError: layers\.0\.mlp\.down_proj\.weight is placed \(Shard\(dim=1\),\) on a mesh of \(2,\): 48 "
            r"columns of K = 96 on a rank, which cuts blocks of 32; exclude it, or take another recipe",
            error,
        ), error


def cut_otherwise() -> None:
    kind = ColwiseParallel if dist.get_rank() else RowwiseParallel
    run(cut(two_layers(), mesh_of(), lambda: {"mlp.up_proj": kind()}), share(), NVFP4, ALGORITHMS["Max"])


def test_ranks_that_cut_otherwise_are_refused_by_name() -> None:
    for error in run_ranks_catching(2, cut_otherwise):
        assert "the ranks disagree on the model's parameters" in error, error
        assert "layers.0.mlp.up_proj.weight" in error
        assert "Shard(dim=0)" in error
        assert "Shard(dim=1)" in error


def failing() -> None:
    model = cut(two_layers(), mesh_of())
    hooked, before = hooks(model), fingerprints(model.state_dict(), own)
    with pytest.raises(Stop):
        run(model, share(), NVFP4, ALGORITHMS["GPTQ"], on_event=stop_first)
    assert hooks(model) == hooked
    assert fingerprints(model.state_dict(), own) == before
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert torch.isfinite(forward(model, batches()[0])).all()


def stop_first(event: Event) -> None:
    if (event.kind, event.index) == ("write", 0):
        raise Stop


def test_an_error_leaves_the_pieces_as_they_were() -> None:
    run_ranks(4, failing)


def of_sequences() -> dict[str, Any]:
    """Gains are parameters of the mesh, Replicate()."""
    return {"attn_norm": SequenceParallel(use_local_output=True), "mlp.up_proj": ColwiseParallel()}


def with_replicas() -> dict[str, dict[str, str]]:
    model = cut(two_layers(), mesh_of(), of_sequences)
    assert isinstance(model.layers[0].attn_norm.weight, DTensor)
    return outcome(model, run(model, share(), ROW, ALGORITHMS["AWQ"]))


def test_gains_that_ranks_have_alike_are_folded_into() -> None:
    for found in run_ranks(2, with_replicas):
        assert_same(found, reference(two_layers, ROW, ALGORITHMS["AWQ"]), "AWQ")
