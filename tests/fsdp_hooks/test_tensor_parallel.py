"""Tensor parallelism through torch's own parallelize_module, alone and under FSDP2, equals one process.

The reference is the same model, unsharded, with its own optimizer, given the gradients that the ranks produced. After
every step all parts, put together over both mesh dims, are those of the reference bit for bit, and so are the operands
that each rank multiplies with. Outputs of column-parallel layers are bitwise the reference's columns; a row-parallel
layer adds the products of its pieces of K, so its outputs get a bound derived from that sum.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dcp_adapters import expand
from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    STAND_INS,
    TENSOR_WIDE,
    Collectives,
    assert_same_bytes,
    exchanged,
    local,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import facts
from tests.sampling import halves, sampled

WIDTH, HIDDEN, HEAD, TOKENS = 64, 256, 192, 5  # tensor parallelism cuts between blocks; FSDP cuts those of 128
PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
MESHES = [(1, 2), (2, 2)]  # TP alone, FSDP x TP
STORAGES = ("quantized", "high_precision")
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


class MLP(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=dtype)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """MLPs, and a head that tensor parallelism leaves alone (FSDP shards it over its own mesh dim only)."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, HEAD, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mesh_2d(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def make(recipe: Any, storage: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(seed)
    with quantized_model_init(recipe, storage=storage):
        return Net(dtype)


def distribute(net: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """Tensor-parallel blocks; FSDP around each of them and the root, where the mesh has a dim for it."""
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {name: style() for name, style in PLAN.items()}, **options)
    if mesh["dp"].size() > 1:
        for block in net.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    return net


def built(name: str, mesh: DeviceMesh, storage: str, how: str, dtype: torch.dtype) -> tuple[Net, Net]:
    """The distributed model and its reference."""
    reference = make(RECIPES[name], storage, dtype=dtype)
    if how == "scattered":  # rank 0 of the TP group decides, as is torch's default
        net = copy.deepcopy(reference)
        net.blocks = make(RECIPES[name], storage, seed=mesh["tp"].get_local_rank(), dtype=dtype).blocks
        distribute(net, mesh)
    elif how == "cut":  # every rank cuts its own
        net = distribute(copy.deepcopy(reference), mesh, src_data_rank=None)
    else:
        with torch.device("meta"), quantized_model_init(RECIPES[name], storage=storage):
            net = Net(dtype)
        distribute(net, mesh)
        assert all(param.is_meta for param in net.parameters())
        net.to_empty(device="cpu")
        _fill(net, reference)
    return net, reference


@torch.no_grad()
def _fill(net: Net, reference: Net) -> None:
    """Every parameter from its full value: TP cuts first, then FSDP cuts what that left."""
    for param, full in zip(net.parameters(), reference.parameters(), strict=True):
        piece = full.dense.detach() if isinstance(full, HighPrecisionWeight) else full.detach()
        for dim in reversed(range(param.device_mesh.ndim if isinstance(param, DTensor) else 0)):
            mesh, along = param.device_mesh, getattr(param.placements[dim], "dim", None)
            if along is not None:
                piece = piece.chunk(mesh.size(dim), along)[mesh.get_local_rank(dim)]
        local(param).copy_(piece)


def tokens(step: int, mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same batch on the ranks of a TP group, another for every step and replica."""
    generator = torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank())
    return torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)


# -- comparisons -------------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a part; float8 travels as bytes, since gloo knows none."""
    if not isinstance(tensor, DTensor) or tensor.dtype.itemsize > 1:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    data, shape, stride = tensor.to_local().view(torch.uint8), tensor.shape, tensor.stride()
    as_bytes = DTensor.from_local(
        data, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return as_bytes.full_tensor().view(tensor.dtype)


def assert_reference_bytes(net: nn.Module, reference: nn.Module, what: str) -> None:
    """All parts (or dense values), put together over the mesh, are the reference's."""
    mine, its = expand(dict(net.named_parameters())), expand(dict(reference.named_parameters()))
    assert mine.keys() == its.keys()
    for fqn, expected in its.items():
        assert_same_bytes(whole(mine[fqn]), expected.detach(), f"{what}: {fqn}")


def _quantized(param: Tensor) -> QuantizedTensor | None:
    """What a rank multiplies with; None for a parameter that is not quantized."""
    q = local(param)
    if isinstance(q, HighPrecisionWeight):
        return q.quantize()
    return q.detach() if isinstance(q, QuantizedTensor) else None


def assert_reference_operands(net: Net, reference: Net, mesh: DeviceMesh, what: str) -> None:
    """Each rank's operand is its piece of the reference's quantized weight: its rows (up) or its columns (down)."""
    rank, ranks = mesh["tp"].get_local_rank(), mesh["tp"].size()
    with unsharded(net):
        for (fqn, param), full in zip(net.named_parameters(), reference.parameters(), strict=True):
            found, expected = _quantized(param), _quantized(full)
            if found is None or expected is None:
                assert found is expected is None, fqn
                continue
            if ".up." in fqn or ".down." in fqn:
                expected = expected.chunk(ranks, 0 if ".up." in fqn else 1)[rank]
            for part, tensor in found.parts().items():
                wanted = expected.parts()[part]
                wanted = wanted.expand(tensor.shape) if wanted.ndim == 0 else wanted
                assert_same_bytes(tensor, wanted, f"{what}: {fqn}.{part}")


def bound(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """How far a sum over two pieces of K may lie from the sum over K: 3 roundings to the dtype and the fp32 sums.

    Each product is rounded once to the output's dtype, and so is their sum; so was the reference. The sums in fp32 over
    K terms are off by K half steps at most. All are relative to the sum of magnitudes.
    """
    magnitudes = F.linear(x.double().abs(), w.double().abs(), None if bias is None else bias.double().abs())
    return magnitudes * (4 * HALF_STEP[x.dtype] + 2 * (w.shape[-1] + 2) * HALF_STEP[torch.float32])


def _full_columns(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The input of a row-parallel layer, of which every rank holds some columns."""
    x = x.to_local() if isinstance(x, DTensor) else x
    return torch.cat(exchanged(x.detach(), mesh.get_group("tp")), dim=-1)


def watch_outputs(net: nn.Module, reference: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> list[str]:
    """Compare what each tensor-parallel layer computes with the reference's layer; returns the names it has seen."""
    seen: list[str] = []
    rank, ranks = mesh["tp"].get_local_rank(), mesh["tp"].size()

    def hook(fqn: str, its: Any) -> Callable[..., None]:
        def compare(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            out = (out.to_local() if isinstance(out, DTensor) else out).detach()
            with torch.no_grad():
                if fqn.endswith("up"):
                    x = args[0].full_tensor() if isinstance(args[0], DTensor) else args[0]
                    assert_same_bytes(out, its(x.detach()).chunk(ranks, -1)[rank].contiguous(), fqn)
                else:
                    x = _full_columns(args[0], mesh)
                    expected, allowed = its(x), bound(x, _quantized(its.weight).dequantize(), its.bias)
                    if sequence:
                        expected, allowed = (each.chunk(ranks, 1)[rank] for each in (expected, allowed))
                    assert out.shape == expected.shape
                    assert ((out.double() - expected.double()).abs() <= allowed).all(), fqn
            seen.append(fqn)

        return compare

    for fqn, its in reference.named_modules():
        if fqn.endswith((".up", ".down")):
            net.get_submodule(fqn).register_forward_hook(hook(fqn, its))
    return seen


def lend_gradients(net: nn.Module, reference: nn.Module, mesh: DeviceMesh) -> None:
    """Give the reference the gradients of the ranks, put together."""
    for (fqn, param), its in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        assert param.grad is not None, fqn
        assert type(local(param.grad)) is Tensor, fqn
        its[1].grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()


# -- training ----------------------------------------------------------------------------------------------------------


def optimizer_of(net: nn.Module) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.02, weight_decay=0.1)


def expected_collectives(name: str, dp: int, tp: int) -> int:
    """Groups with a scale to agree on: tensor-wide ones over both dims, Float8 rows where TP cuts K."""
    if name in TENSOR_WIDE:
        return (dp > 1) + (tp > 1)
    if facts(RECIPES[name]).rows == 128:  # FSDP cuts the rows of blocks, some of which tensor parallelism cuts, too
        return (1 + (tp > 1)) * (dp > 1)
    return int(name == "float8_row" and tp > 1)


def train(net: Any, reference: Any, mesh: DeviceMesh, name: str, x_of: Callable[[int], Tensor]) -> None:
    groups = sum(size > 1 for size in mesh.shape)
    agreements = expected_collectives(name, *mesh.shape)
    assert sync_scales(net) == agreements
    assert_reference_bytes(net, reference, "before the first step")
    optimizer, its_optimizer = optimizer_of(net), optimizer_of(reference)
    for step in range(2):
        net(x_of(step)).float().square().mean().backward()
        lend_gradients(net, reference, mesh)
        before = {fqn: tensor.clone() for fqn, tensor in expand(dict(reference.named_parameters())).items()}
        with Collectives() as comms:
            optimizer.step()
        assert comms.counts.pop("allreduce_", 0) == groups, (step, comms.counts)
        assert not comms.counts, comms.counts
        its_optimizer.step()
        moved = [fqn for fqn, now in expand(dict(reference.named_parameters())).items() if _moved(now, before[fqn])]
        assert moved, "nothing was trained"
        assert_reference_bytes(net, reference, f"step {step}")
        optimizer.zero_grad()


def _moved(now: Tensor, before: Tensor) -> bool:
    return not torch.equal(now.detach().reshape(-1).view(torch.uint8), before.detach().reshape(-1).view(torch.uint8))


def _trains(name: str, shape: tuple[int, int], storage: str, how: str, dtype: torch.dtype) -> None:
    mesh = mesh_2d(*shape)
    net, reference = built(name, mesh, storage, how, dtype)
    seen = watch_outputs(net, reference, mesh)
    train(net, reference, mesh, name, lambda step: tokens(step, mesh, dtype))
    assert_reference_operands(net, reference, mesh, "after training")
    assert seen == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"] * 2


# Each format meets both storages and both meshes, in `make test` one of each. What is agreed on depends on mesh and
# trait: those of the stand-ins, and blocks of 128, which FSDP cuts, are on both dims.
NAMES = {
    (2, "quantized"): (("float8_block_square", *STAND_INS), ("float8_tensor", "int4_32", *HANDS[2])),
    (2, "high_precision"): (("float8_tensor", "int4_32"), ("float8_block_square", *STAND_INS)),
    (1, "quantized"): (("mxfp8", "mxfp4"), ("float8_block_square", "float8_tensor", "int4_32", *STAND_INS)),
    (1, "high_precision"): (("nvfp4_square",), ("mxfp8", "mxfp4")),
}


@pytest.mark.parametrize("share", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_training_equals_one_process(dp: int, tp: int, storage: str, share: int) -> None:
    """Scattered from rank 0, torch's default."""
    run_ranks_each(dp * tp, NAMES[dp, storage][share], _trains, (dp, tp), storage, "scattered", torch.bfloat16)


# Every way on every mesh with each storage and each format, once; in `make test` each two of them meet.
DISTRIBUTED = (
    ("cut", "quantized", "float8_row"),
    ("meta", "high_precision", "float8_row"),
    ("cut", "high_precision", "nvfp4"),
    ("meta", "quantized", "nvfp4"),
)


def _trains_distributed_so(case: tuple[str, str, str], shape: tuple[int, int]) -> None:
    how, storage, name = case
    _trains(name, shape, storage, how, torch.float32)


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ((2, 2), DISTRIBUTED[:2]),
        ((1, 2), DISTRIBUTED[2:]),
        pytest.param((2, 2), DISTRIBUTED[2:], marks=pytest.mark.full),
        pytest.param((1, 2), DISTRIBUTED[:2], marks=pytest.mark.full),
    ],
)
def test_training_equals_one_process_however_it_was_distributed(shape: tuple[int, int], cases: Any) -> None:
    run_ranks_each(shape[0] * shape[1], cases, _trains_distributed_so, shape)


class Sequence(nn.Module):
    """A norm on pieces of the sequence, then an MLP that gathers them and hands pieces back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, HIDDEN), "down": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.mlp["down"](torch.tanh(self.mlp["up"](self.norm(x))))  # FSDP warns of outputs that are views


def _trains_on_pieces_of_the_sequence(case: tuple[str, str], dp: int) -> None:
    name, storage = case
    mesh = mesh_2d(dp, 2)
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage=storage):
        net: Any = Sequence()
    reference = copy.deepcopy(net)
    plan = {
        "": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),)),
        "norm": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(net, mesh["tp"], plan)
    if dp > 1:
        fully_shard(net, mesh=mesh["dp"])
    seen = watch_outputs(net, reference, mesh, sequence=True)

    def piece(step: int) -> Tensor:  # [2, 8, K] -> [2, 4, K]
        generator = torch.Generator().manual_seed(step)
        full = torch.randn(2, 8, WIDTH, generator=generator)
        return full.chunk(2, 1)[mesh["tp"].get_local_rank()].contiguous()

    train(net, reference, mesh, name, piece)
    assert seen == ["mlp.up", "mlp.down"] * 2


ON_PIECES = [(name, storage) for storage in STORAGES for name in ("mxfp8", "nvfp4_square")]


@halves("cases", ON_PIECES, [("mxfp8", "quantized"), ("nvfp4_square", "high_precision")])
@pytest.mark.parametrize("dp", [1, 2])
def test_sequence_parallelism_equals_one_process(dp: int, cases: tuple[tuple[str, str], ...]) -> None:
    run_ranks_each(2 * dp, cases, _trains_on_pieces_of_the_sequence, dp)


# -- scales ------------------------------------------------------------------------------------------------------------


def _rows_cut_along_k_share_their_scales(dp: int) -> None:
    mesh = mesh_2d(dp, 2)
    net = distribute(make(RECIPES["float8_row"], "quantized"), mesh)
    up, down = local(net.blocks[0].up.weight), local(net.blocks[0].down.weight)
    rank, group = mesh["tp"].get_local_rank(), mesh.get_group("tp")
    if rank == 1:  # some rows only, so that either rank decides some scales
        with torch.no_grad():
            for q in (up, down):
                factors = torch.linspace(0.1, 10.0, q.shape[0]).unsqueeze(1)
                q.copy_(q.dequantize() * factors)
    held = {name: part.clone() for name, part in up.parts().items()}
    values, scales = down.dequantize(torch.float32), exchanged(down.scale.clone(), group)
    payload = down.payload.clone()
    largest = torch.maximum(*scales)
    assert (scales[0] < scales[1]).any()
    assert (scales[1] < scales[0]).any()
    with Collectives() as comms:
        assert sync_scales(net) == 1
    assert comms.counts == {"allreduce_": dp}, "with FSDP, one to prove that no rank shares anything over its dim"
    assert_same_bytes(down.scale, largest, "agreed scales")
    keeps = (scales[rank] == largest).squeeze(1)
    assert keeps.any()
    assert_same_bytes(down.payload[keeps], payload[keeps], "rows that had the agreed scale")
    nearest = (values / largest).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_same_bytes(down.payload[~keeps], nearest[~keeps], "rows that got another scale")
    for name, part in up.parts().items():
        assert_same_bytes(part, held[name], f"rows that are whole: {name}")


@pytest.mark.parametrize("dp", [1, 2])
def test_float8_rows_cut_along_k_agree_on_their_scales(dp: int) -> None:
    run_ranks(2 * dp, _rows_cut_along_k_share_their_scales, dp)


def _disagreeing_pieces_agree(name: str, dp: int) -> None:
    """Every rank writes other magnitudes; sync_scales, or building the optimizer, makes the scales one."""
    mesh = mesh_2d(dp, 2)
    for agree in (sync_scales, optimizer_of):
        net = distribute(make(RECIPES[name], "quantized"), mesh)
        with torch.no_grad():
            for param in net.blocks.parameters():
                q = local(param)
                if isinstance(q, QuantizedTensor):
                    q.copy_(q.dequantize() * 3.0 ** dist.get_rank())
        weights = [local(param) for param in net.blocks.parameters() if isinstance(local(param), QuantizedTensor)]
        before = [max(exchanged(getattr(q, tensor_wide(q.recipe)).item())) for q in weights]
        with Collectives() as comms:
            result = agree(net)
        expected = expected_collectives(name, dp, 2)
        assert comms.counts == {"allreduce_": expected}
        assert result == expected or agree is optimizer_of
        for q, largest in zip(weights, before, strict=True):
            assert set(exchanged(getattr(q, tensor_wide(q.recipe)).item())) == {largest}


@pytest.mark.parametrize("dp", [1, 2])
def test_tensor_wide_scales_agree_over_both_mesh_dims(dp: int) -> None:
    run_ranks_each(2 * dp, TENSOR_WIDE, _disagreeing_pieces_agree, dp)


# -- full tensors ------------------------------------------------------------------------------------------------------


def _puts_weights_together(name: str, dp: int) -> None:
    mesh = mesh_2d(dp, 2)
    for storage in STORAGES:
        net, reference = built(name, mesh, storage, "cut", torch.bfloat16)
        for layer in PLAN:
            full, whole_ = (getattr(model.blocks[0], layer).weight for model in (net, reference))
            full = full.full_tensor()
            assert not isinstance(full, DTensor)
            for fqn, expected in expand({layer: whole_}).items():
                found = expand({layer: full})[fqn].detach()
                assert_same_bytes(found, expected.detach(), f"{storage}, {layer}: {fqn}")


@halves("names", RECIPES, ("float8_block_square", *STAND_INS))
@sampled("dp", [1, 2], [2])
def test_full_tensor_has_the_bytes_from_before(dp: int, names: tuple[str, ...]) -> None:
    run_ranks_each(2 * dp, names, _puts_weights_together, dp)


def _takes_distributed_weights(name: str, dp: int) -> None:
    """As the guide fills shards: `param.copy_(distribute_tensor(quantize(full), mesh, placements))`."""
    mesh = mesh_2d(dp, 2)
    net, reference = built(name, mesh, "quantized", "cut", torch.bfloat16)
    other = make(RECIPES[name], "quantized", seed=5)
    for fqn, param in reference.named_parameters():
        if fqn.endswith(("up.weight", "down.weight")):
            mine, its = net.get_parameter(fqn), other.get_parameter(fqn).detach()
            with torch.no_grad():
                param.copy_(its)
                mine.copy_(distribute_tensor(its, mine.device_mesh, mine.placements, src_data_rank=None))
    assert_reference_bytes(net, reference, name)


@halves("names", RECIPES, ("float8_block_square", *STAND_INS))
@sampled("dp", [1, 2], [2])
def test_pieces_are_filled_by_distribute_tensor(dp: int, names: tuple[str, ...]) -> None:
    run_ranks_each(2 * dp, names, _takes_distributed_weights, dp)


# -- what is saved for backward ----------------------------------------------------------------------------------------


def _saves_no_dense_weight(case: tuple[str, str], dp: int) -> None:
    name, storage = case
    mesh = mesh_2d(dp, 2)
    net = distribute(make(RECIPES[name], storage), mesh)
    sync_scales(net)
    weights = {
        HIDDEN * WIDTH,
        HIDDEN * WIDTH // 2,
        HEAD * WIDTH,
    }  # whole, a piece, the head
    assert not weights & {TOKENS * n for n in (WIDTH, HIDDEN, HIDDEN // 2, HEAD)}
    dense: list[Tensor] = []
    quantized: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        plain = local(saved)
        (quantized if isinstance(plain, QuantizedTensor) else dense).append(plain)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = net(tokens(0, mesh))
    assert len(quantized) >= 4  # of every layer but the first, whose input needs no gradient
    found = [tuple(t.shape) for t in dense if t.numel() in weights and t.is_floating_point() and t.dtype.itemsize > 1]
    assert not found, f"dense weights kept for backward: {found}"
    out.float().sum().backward()


@sampled(("dp", "tp"), MESHES, [(2, 2)])
def test_backward_keeps_no_dense_weight(dp: int, tp: int) -> None:
    cases = [(name, storage) for storage in STORAGES for name in ("float8_row", "nvfp4")]
    run_ranks_each(dp * tp, cases, _saves_no_dense_weight, dp)


# -- quantized inputs --------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A linear layer whose output is no view, of which FSDP would warn."""

    def __init__(self, columns: int, rows: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return 1 * self.linear(x)


def _quantizes_its_inputs(name: str, dp: int) -> None:
    """Column-parallel: the columns of one process. Row-parallel: each rank quantizes its piece of every token."""
    from qtensor.products.dynamic import product

    recipe = dataclasses.replace(RECIPES[name], activations="dynamic")
    mesh = mesh_2d(dp, 2)
    rank = mesh["tp"].get_local_rank()
    torch.manual_seed(0)
    with quantized_model_init(recipe):
        net: Any = nn.ModuleDict({"up": Layer(WIDTH, HIDDEN, bias=True), "down": Layer(HIDDEN, WIDTH, bias=False)})
    reference = copy.deepcopy(net)
    parallelize_module(net, mesh["tp"], {f"{name}.linear": style() for name, style in PLAN.items()})
    if dp > 1:
        for layer in net.values():
            fully_shard(layer, mesh=mesh["dp"])
    wide, piece = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(2, TOKENS, HIDDEN // 2).bfloat16()[rank]
    hidden = net["up"](wide)
    assert_same_bytes(hidden.detach(), reference["up"](wide).detach().chunk(2, -1)[rank].contiguous(), "columns")
    columns = reference["down"].linear.weight.detach().chunk(2, 1)[rank]
    expected = sum(exchanged(product(piece, columns), mesh.get_group("tp")))
    piece.requires_grad_()
    out = net["down"](piece)
    assert_same_bytes(out.detach(), expected, "sums of pieces")
    (hidden.float().sum() + out.float().sum()).backward()
    for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert param.grad.shape == its.shape, fqn
    assert_same_bytes(piece.grad, torch.ones_like(out) @ columns.dequantize(), "gradient of the input")


@halves("names", RECIPES, ("float8_block_square", *STAND_INS))
@sampled("dp", [1, 2], [2])
def test_a_quantized_input_is_that_of_each_ranks_piece(dp: int, names: tuple[str, ...]) -> None:
    run_ranks_each(2 * dp, names, _quantizes_its_inputs, dp)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _cuts_a_block(name: str, columns: int, storage: str, how: str) -> None:
    mesh = mesh_2d(1, 2)
    with torch.device("meta" if how == "meta" else "cpu"), quantized_model_init(RECIPES[name], storage=storage):
        net = nn.ModuleDict({"down": nn.Linear(columns, 64, dtype=torch.bfloat16)})
    options = {"src_data_rank": None} if how == "cut" else {}
    with Collectives() as comms:
        try:
            parallelize_module(net, mesh["tp"], {"down": RowwiseParallel()}, **options)
        finally:
            assert not comms.counts, comms.counts


CUT_BLOCKS = [("mxfp8", 96, 32), ("nvfp4", 80, 16), ("mxfp8_square", 96, 32)]


@pytest.mark.parametrize("how", ["scattered", "cut", "meta"])
@pytest.mark.parametrize(("name", "columns", "multiple"), CUT_BLOCKS)
def test_cutting_k_inside_a_block_is_refused(name: str, columns: int, multiple: int, how: str) -> None:
    messages = run_ranks_catching(2, _cuts_a_block, name, columns, "quantized", how)
    assert len(set(messages)) == 1, messages
    for words in ("ValueError", f"(64, {columns})", f"columns 0:{columns // 2}", f"multiples of {multiple}"):
        assert words in messages[0], messages[0]


@pytest.mark.parametrize("how", ["scattered", "cut", "meta"])
@pytest.mark.parametrize(("name", "columns", "multiple"), CUT_BLOCKS)
def test_cutting_k_inside_a_block_of_what_is_gathered_is_refused(
    name: str, columns: int, multiple: int, how: str
) -> None:
    messages = run_ranks_catching(2, _cuts_a_block, name, columns, "high_precision", how)
    assert len(set(messages)) == 1, messages
    for words in ("ValueError", f"(64, {columns})", f"K={columns // 2}", f"not a multiple of {multiple}"):
        assert words in messages[0], messages[0]


# -- unsharded ---------------------------------------------------------------------------------------------------------


def _writes_gathered_pieces(name: str) -> None:
    """Under FSDP x TP a gathered weight is this rank's piece of the TP mesh; its rows go back to where they were."""
    mesh = mesh_2d(2, 2)
    net, reference = built(name, mesh, "quantized", "cut", torch.bfloat16)
    with torch.no_grad():
        with unsharded(net, writeback=True):
            for param in net.parameters():
                piece = local(param)
                piece.copy_((piece.dequantize() if isinstance(piece, QuantizedTensor) else piece) * 2)
        for param in reference.parameters():
            param.copy_((param.dequantize() if isinstance(param, QuantizedTensor) else param.detach().clone()) * 2)
    assert_reference_bytes(net, reference, name)


def test_unsharded_writes_back_under_tensor_parallelism() -> None:
    run_ranks_each(4, ("mxfp8", "mxfp8_square"), _writes_gathered_pieces)
