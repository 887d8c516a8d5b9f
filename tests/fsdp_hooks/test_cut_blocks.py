"""Square blocks that a shard boundary cuts: the bytes are those of one process, whatever the sharding.

The reference is always the quantization of full values in one process; ranks hold rows that are no multiple of a block,
fewer rows than a block, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_adapters import expand
from fsdp_hooks import sync_scales, unsharded
from fsdp_hooks.scale_sync import scales_of
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, dtensor_like
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init
from qtensor.scales.cut_blocks import _cut_blocks, cut_blocks_of
from tests import recipes
from tests.fsdp_hooks.cases import Collectives, assert_same_bytes, exchanged, local
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import sampled

RECIPES = recipes.SQUARE
MESHES = {
    "2 ranks": (2,),
    "3 ranks": (3,),
    "4 ranks": (4,),
    "replicas": (2, 2),
}


class Net(nn.Module):
    """Weights of an odd number of blocks along N; `up` and `down` are those that tensor parallelism cuts."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.up = nn.Linear(256, 9 * block, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(512, 5 * block, bias=False, dtype=torch.bfloat16)
        self.small = nn.Linear(256, block, bias=False, dtype=torch.bfloat16)


def build(name: str, storage: str = "quantized", **init: Any) -> Net:
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage=storage, **init):
        return Net(recipes.facts(RECIPES[name]).block)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def full_values(seed: int, like: nn.Module) -> dict[str, Tensor]:
    """Dense fp32 values of every weight, the same on all ranks, with magnitudes that differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(param.shape, generator=generator) * torch.rand(param.shape[0], 1, generator=generator).exp2()
        for name, param in like.named_parameters()
    }


def piece(full: Any, like: Any) -> Any:
    """What this rank holds of `full`, cut as torch says that `like` is cut."""
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, like.device_mesh, like.placements)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != full.shape[dim]:
            full = full.narrow(dim, min(offset, full.shape[dim]), size)
    return full


def placed(full: Tensor, param: Any) -> Tensor:
    return dtensor_like(piece(full, param).contiguous(), param)


def assert_bytes_of(net: nn.Module, expected: dict[str, QuantizedTensor], what: str) -> None:
    """Every rank's parts are its pieces of those of one process."""
    parts = expand(dict(net.named_parameters()))
    for name, whole in expected.items():
        for part, tensor in whole.parts().items():
            found: Any = parts[f"{name}.{part}"]
            assert_same_bytes(found.to_local(), piece(tensor, found), f"{what}: {name}.{part}")


def tensor_parallel(net: Net, mesh: DeviceMesh) -> Net:
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    return fully_shard(net, mesh=mesh["dp"])


def sharded(name: str, shape: tuple[int, ...], **init: Any) -> Net:
    net = build(name, **init)
    if shape == (2, 2, "tp"):
        return tensor_parallel(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    return fully_shard(net, mesh=mesh_of(shape))


# -- optimizer steps ---------------------------------------------------------------------------------------------------


def _steps(name: str, shape: tuple[int, ...]) -> None:
    reference, net = build(name), sharded(name, shape)
    optimizers = [
        MasterWeightOptimizer(torch.optim.AdamW, each.named_parameters(), lr=0.05) for each in (reference, net)
    ]
    for step in range(3):
        grads = full_values(step, reference)
        for param, (fqn, ours) in zip(reference.parameters(), net.named_parameters(), strict=True):
            param.grad = grads[fqn].bfloat16()
            ours.grad = placed(grads[fqn].bfloat16(), ours)
        with Collectives() as comms:
            for optimizer in optimizers:
                optimizer.step()
        assert comms.counts["allreduce_"] == (2 if shape[-1] == "tp" else 1), comms.counts
        expected: Any = {fqn: param.detach() for fqn, param in reference.named_parameters()}
        assert_bytes_of(net, expected, f"{name} on {shape}, step {step}")


ALL = [*MESHES.values(), (2, 2, "tp")]


def some_meshes(*kept: tuple[Any, ...]) -> Any:
    """All that a mesh changes is where blocks are cut: in `make test` each test has some of them, but not the same."""
    return sampled("shape", ALL, kept, ids=[*MESHES, "FSDP x TP"])


@some_meshes((3,), (2, 2, "tp"))
def test_steps_write_the_bytes_of_one_process(shape: Any) -> None:
    ranks = shape[0] if len(shape) == 1 else 4
    run_ranks_each(ranks, RECIPES, _steps, shape)


def _cuts_blocks(name: str, shape: Any) -> None:
    net = sharded(name, shape)
    cut = {fqn: cut_blocks_of(param, RECIPES[name]) for fqn, param in net.named_parameters()}
    assert cut["down.weight"] is not None
    assert cut["small.weight"] is not None


@pytest.mark.parametrize("shape", ALL, ids=[*MESHES, "FSDP x TP"])
def test_all_these_meshes_cut_blocks(shape: Any) -> None:
    run_ranks_each(shape[0] if len(shape) == 1 else 4, RECIPES, _cuts_blocks, shape)


# -- loads -------------------------------------------------------------------------------------------------------------


CASES = [(name, storage) for storage in ("quantized", "high_precision") for name in RECIPES]


def _loads(case: tuple[str, str], shape: tuple[int, ...], *, broken: bool = False) -> None:
    name, storage = case
    net = sharded(name, shape, storage=storage)
    full = {fqn: value.bfloat16() for fqn, value in full_values(7, net).items()}
    if broken:  # one element of a cut block
        block = recipes.facts(RECIPES[name]).block
        full["up.weight"][2 * block + 1, 5] = torch.inf
        full["up.weight"][-1, -1] = torch.nan
    net.load_state_dict({fqn: placed(full[fqn], param) for fqn, param in net.named_parameters()})
    expected = {fqn: quantize(value, RECIPES[name]) for fqn, value in full.items()}
    if storage == "quantized":
        assert_bytes_of(net, expected, f"{name} on {shape}")
        return
    for fqn, param in net.named_parameters():
        q = local(param).quantize()
        assert_parts_of_piece(q, expected[fqn], param, f"{name} on {shape}: {fqn}")


def assert_parts_of_piece(q: QuantizedTensor, whole: QuantizedTensor, param: Any, what: str) -> None:
    """A rank's quantized shard is its piece of the whole one."""
    sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    own = whole[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]]
    for part, tensor in own.parts().items():
        assert_same_bytes(q.parts()[part], tensor, f"{what}.{part}")


@some_meshes((4,), (2, 2))
def test_dense_loads_give_the_bytes_of_one_process(shape: Any) -> None:
    ranks = shape[0] if len(shape) == 1 else 4
    run_ranks_each(ranks, CASES, _loads, shape)


def test_an_element_that_is_not_finite_marks_its_block_on_all_ranks() -> None:
    run_ranks_each(4, CASES, _loads, (4,), broken=True)


# -- gathers of dense shards -------------------------------------------------------------------------------------------


def _dense_steps(name: str, shape: tuple[int, ...]) -> None:
    net = sharded(name, shape, storage="high_precision")
    with torch.no_grad():
        full = full_values(3, net)
        for fqn, param in net.named_parameters():
            param.copy_(placed(full[fqn].to(param.dtype), param))
    assert sync_scales(net) == (2 if shape[-1] == "tp" else 1)
    for fqn, param in net.named_parameters():
        expected = quantize(full[fqn].to(param.dtype), RECIPES[name])
        assert_parts_of_piece(local(param).quantize(), expected, param, f"{name} on {shape}: {fqn}")


@some_meshes((3,), (2, 2, "tp"))
def test_gathers_of_agreed_dense_shards_have_the_bytes_of_one_process(shape: Any) -> None:
    ranks = shape[0] if len(shape) == 1 else 4
    run_ranks_each(ranks, RECIPES, _dense_steps, shape)


# -- writes into gathered weights --------------------------------------------------------------------------------------


def _writes_back(name: str, shape: tuple[int, ...]) -> None:
    net = sharded(name, shape)
    full = {fqn: value.bfloat16() for fqn, value in full_values(9, net).items()}
    with torch.no_grad(), unsharded(net, writeback=True):
        for fqn, param in net.named_parameters():
            param.copy_(full[fqn])
    assert_bytes_of(net, {fqn: quantize(value, RECIPES[name]) for fqn, value in full.items()}, f"{name} on {shape}")


@sampled("shape", [(3,), (2, 2)], [(3,)], ids=["3 ranks", "replicas"])
def test_what_is_written_into_gathered_weights_has_the_bytes_of_one_process(shape: Any) -> None:
    run_ranks_each(shape[0] if len(shape) == 1 else 4, RECIPES, _writes_back, shape)


# -- sync_scales -------------------------------------------------------------------------------------------------------


def _syncs_initial_values(name: str, shape: tuple[int, ...]) -> None:
    """Shards initialised by hand, each by itself, become the quantization of the full initial value."""
    with torch.device("meta"):
        net = build(name, preserve_high_precision_init_val=True)
    net = fully_shard(net, mesh=mesh_of(shape))
    net.to_empty(device="cpu")
    full = {fqn: value.bfloat16() for fqn, value in full_values(5, net).items()}
    with torch.no_grad():
        for fqn, param in net.named_parameters():
            local(param).copy_(placed(full[fqn], param).to_local())
    assert sync_scales(net) == 1
    assert_bytes_of(net, {fqn: quantize(value, RECIPES[name]) for fqn, value in full.items()}, f"{name} on {shape}")
    before = {key: part.clone() for key, part in expand(dict(net.named_parameters())).items()}
    assert sync_scales(net) == 1
    for key, part in expand(dict(net.named_parameters())).items():
        assert_same_bytes(part.to_local(), before[key].to_local(), f"{name}: {key} of shards that agree")


def _syncs_values(name: str, shape: tuple[int, ...]) -> None:
    """Shards written by hand: all rows of a block get one scale, and what agrees already keeps its bytes."""
    net = sharded(name, shape)
    full = {fqn: value.bfloat16() for fqn, value in full_values(5, net).items()}
    with torch.no_grad():
        for fqn, param in net.named_parameters():
            local(param).copy_(placed(full[fqn], param).to_local())
    sync_scales(net)
    block = recipes.facts(RECIPES[name]).block
    parts: Any = expand(dict(net.named_parameters()))
    for fqn, dense in full.items():
        scale = torch.cat(exchanged(parts[f"{fqn}.scale"].to_local().contiguous().view(torch.uint8)))
        rows = scale.reshape(-1, block, scale.shape[-1])
        assert bool((rows == rows[:, :1]).all()), f"{name}: {fqn} has several scales in a block"
        # twice rounded: at most twice the error of the one-process quantization's coarsest step, plus that of the scale
        found = torch.cat(exchanged(local(net.get_parameter(fqn)).dequantize(torch.float32)))
        once = quantize(dense, RECIPES[name]).dequantize(torch.float32)
        bound = 3 * (once - dense.float()).abs().amax() + 1e-6
        assert float((found - dense.float()).abs().amax()) <= float(bound), f"{name}: {fqn}"
    before = {key: part.to_local().clone() for key, part in parts.items()}
    sync_scales(net)
    for key, part in expand(dict(net.named_parameters())).items():
        assert_same_bytes(part.to_local(), before[key], f"{name}: {key} of shards that agree")


@pytest.mark.parametrize("case", [_syncs_initial_values, _syncs_values], ids=["initial values", "values"])
@sampled("ranks", [2, 3, 4], [3])
def test_sync_scales_agrees_on_cut_blocks(ranks: int, case: Callable[..., None]) -> None:
    run_ranks_each(ranks, RECIPES, case, (ranks,))


# -- what is exchanged, and where blocks are cut -----------------------------------------------------------------------


def _exchanges_cut_blocks_alone(name: str) -> None:
    recipe, known = RECIPES[name], recipes.facts(RECIPES[name])
    mesh = mesh_of((3,))
    for rows, columns in ((384, 256), (480, 128), (128, 128)):
        param = distribute_tensor(quantize(torch.randn(rows, columns), recipe), mesh, [Shard(0)], src_data_rank=None)
        size = -(-rows // 3)
        wanted = {edge // known.block for edge in (size, 2 * size) if edge % known.block and edge < rows}
        cut = cut_blocks_of(param, recipe)
        if not wanted:
            assert cut is None
            continue
        assert cut is not None
        assert cut.size(2) == 2 * len(wanted) * -(-columns // known.block), (name, rows, columns)
        dense = distribute_tensor(torch.randn(rows, columns), mesh, [Shard(0)], src_data_rank=None)
        claim = cut.claim(local(dense), recipe)
        assert claim.numel() == cut.size(2)


def test_only_facts_of_cut_blocks_are_exchanged() -> None:
    run_ranks_each(3, RECIPES, _exchanges_cut_blocks_alone)


def _whole_blocks_need_no_agreement() -> None:
    for name, recipe in RECIPES.items():
        rows = 2 * recipes.facts(recipe).block
        param = distribute_tensor(quantize(torch.ones(rows, 128), recipe), mesh_of((2,)), [Shard(0)])
        assert cut_blocks_of(param, recipe) is None
        scales = scales_of(param)
        assert scales is not None
        assert scales.shared_along(0) == (recipes.facts(recipe).tensor_wide is not None), name


def test_shards_of_whole_blocks_agree_on_nothing() -> None:
    run_ranks(2, _whole_blocks_need_no_agreement)


def _some_rows_of_an_agreed_shard(name: str) -> None:
    """They are a weight of their own, whose blocks begin with its first row."""
    net = sharded(name, (2,), storage="high_precision")
    sync_scales(net)
    shard = local(net.up.weight)
    part = shard[:8]
    assert part.agreement is shard.agreement
    for found, expected in zip(
        part.quantize().parts().values(), quantize(part.dense, RECIPES[name]).parts().values(), strict=True
    ):
        assert_same_bytes(found, expected, name)


def test_some_rows_of_an_agreed_shard_are_quantized_by_themselves() -> None:
    recipes_of_8_rows = [name for name in RECIPES if recipes.facts(RECIPES[name]).ragged]
    assert recipes_of_8_rows
    run_ranks_each(2, recipes_of_8_rows, _some_rows_of_an_agreed_shard)


def test_runs_of_rows_are_refused() -> None:
    """FSDP over TP cuts what TP left; a strided placement of another factor leaves a rank several runs of rows."""
    after_tp, scattered = (_StridedShard(0, split_factor=factor) for factor in (2, 3))
    assert _cut_blocks((96, 64), (2, 2), (0, 0), (after_tp, Shard(0)), 32, wide=False) is not None
    with pytest.raises(NotImplementedError, match="a rank's rows are several runs; redistribute it to"):
        _cut_blocks((96, 64), (2, 2), (0, 0), (scattered, Shard(0)), 32, wide=False)


def _places_agree_with_torch() -> None:
    recipe = RECIPES["mxfp8_square"]
    one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts: list[tuple[DeviceMesh, list[Any]]] = [
        (one, [Shard(0)]),
        (two, [Shard(0), Shard(1)]),
        (two, [Shard(1), Shard(0)]),
        (two, [Replicate(), Shard(0)]),
        (two, [Shard(0), Shard(0)]),
    ]
    seen = 0
    for shape in ((96, 128), (32, 64), (160, 64), (224, 256)):
        for mesh, placements in layouts:
            param = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
            cut = cut_blocks_of(param, recipe)
            if cut is None:
                continue
            sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
            assert cut.rows == sizes[0], (shape, placements)
            if sizes[0]:
                assert cut.start == offsets[0], (shape, placements)
            seen += 1
        net = fully_shard(
            parallelize_module(
                nn.Linear(shape[1], shape[0], bias=False), two["tp"], ColwiseParallel(), src_data_rank=None
            ),
            mesh=two["dp"],
        )
        param = net.weight
        if (cut := cut_blocks_of(param, recipe)) is not None:
            sizes, offsets = compute_local_shape_and_global_offset(shape, param.device_mesh, param.placements)
            assert (cut.rows, cut.start) == (sizes[0], offsets[0]), (shape, param.placements)
            seen += 1
    assert seen >= 10, seen


def test_places_of_shards_are_those_of_torch() -> None:
    run_ranks(4, _places_agree_with_torch)
