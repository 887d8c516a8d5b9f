"""Compressed states under HSDP, tensor and expert parallelism with FSDP: saved on one mesh, trained on on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, QuantizedStager
from dcp_adapters.stored.verifying.verify import verify
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantized_model_init
from tests.fsdp_hooks import expert_meshes
from tests.fsdp_hooks.cases import RECIPES, local
from tests.fsdp_hooks.expert_meshes import ALONE, Layout
from tests.fsdp_hooks.test_compressed_states import SMALL, train
from tests.ranks import own_group, run_ranks
from tests.sampling import sampled

STEPS, MORE = 2, 2
HSDP, TP, FSDP, ONE = "replicas of 2 shards", "tensor parallel", "4 shards", "1 process"
RANKS = {HSDP: 4, TP: 4, FSDP: 4, ONE: 1}
FORMS: list[dict[str, Any]] = [{}, {"moments": "bfloat16"}]
Held = dict[str, Tensor]


class Case(NamedTuple):
    name: str | None
    form: dict[str, Any]
    path: Path
    way: str


class MLP(nn.Module):
    """Weights cut by columns and by rows, and, of any recipe, vectors in bf16, of uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(66, dtype=torch.bfloat16)
        self.head = nn.Linear(64, 33, dtype=torch.bfloat16)


def built(name: str | None, mesh: str | Layout) -> nn.Module:
    if isinstance(mesh, Layout):
        assert name is not None
        return expert_meshes.built(name, mesh)
    torch.manual_seed(0)
    if name is None:
        model = MLP()
    else:
        with quantized_model_init(RECIPES[name]):
            model = MLP()
    if mesh == HSDP:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif mesh == TP:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, both["tp"], plan, src_data_rank=None)
        fully_shard(model, mesh=both["dp"])
    elif mesh == FSDP:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


def optimizer_of(model: nn.Module, mesh: str | Layout, form: dict[str, Any]) -> MasterWeightOptimizer:
    options = SMALL | {"lr": 0.01} | form
    return MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), check_replicas=mesh == HSDP, **options)


def whole(model: nn.Module, optimizer: MasterWeightOptimizer) -> Held:
    """What weights and states are, whole; of quantized ones each value, and the master that it stands for."""
    found: Held = {}
    for fqn, param in model.named_parameters():
        for name, value in {"": param, **optimizer.state[param]}.items():
            found[f"{fqn}|{name}"] = _full(value)
    with optimizer.expecting_states(masters="fp32", moments="fp32"):
        for fqn, param in model.named_parameters():
            found |= {f"{fqn}|exact {name}": _full(value) for name, value in optimizer.state[param].items()}
    return found


def _full(value: Tensor) -> Tensor:
    own = local(value.detach())
    own = own.dequantize(torch.float32) if isinstance(own, QuantizedTensor) else own
    if isinstance(value, DTensor):
        own = DTensor.from_local(
            own, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        ).full_tensor()
    # words of remainders may look like NaN
    return (own.view(torch.int16) if own.dtype == torch.float16 else own).clone()


def assert_same(found: Held, expected: Held, what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, f"{what}: {different}"


def state_of(model: nn.Module, optimizer: Any, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": states}


def save(mesh: str | Layout, case: Case) -> tuple[Held, Held]:
    """Returns what there is when it is saved, and when it has been trained on."""
    name, form, path, way = case
    model = built(name, mesh)
    optimizer = optimizer_of(model, mesh, form)
    train(model, optimizer, range(STEPS))
    saved = whole(model, optimizer)
    state = state_of(model, optimizer, flat=way == "flattened")
    planner = QuantizedSavePlanner(verify="deep")
    if way != "in the background":
        dcp.save(state, checkpoint_id=path, planner=planner)
        train(model, optimizer, range(STEPS, STEPS + MORE))
        return saved, whole(model, optimizer)
    stager = QuantizedStager()
    with own_group(backend="gloo") as upload:
        future: Any = dcp.async_save(
            state, checkpoint_id=path, planner=planner, async_stager=stager, process_group=upload
        )
        train(model, optimizer, range(STEPS, STEPS + MORE))  # into the same memory, meanwhile
        future.result()
    stager.close()
    return saved, whole(model, optimizer)


def go_on(mesh: str | Layout, case: Case, expected: tuple[Held, Held]) -> None:
    name, form, path, way = case
    model = built(name, mesh)
    optimizer = optimizer_of(model, mesh, form)
    train(model, optimizer, range(7, 8))
    flat = way == "flattened"
    state = state_of(model, optimizer, flat=flat)
    dcp.load(state, checkpoint_id=path, planner=QuantizedLoadPlanner())
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    assert_same(whole(model, optimizer), expected[0], f"{name} on {mesh}, loaded")
    train(model, optimizer, range(STEPS, STEPS + MORE))
    assert_same(whole(model, optimizer), expected[1], f"{name} on {mesh}, trained on")


def save_each(mesh: str | Layout, cases: list[Case]) -> list[tuple[Held, Held]]:
    return [save(mesh, case) for case in cases]


def go_on_each(mesh: str | Layout, cases: list[Case], expected: list[tuple[Held, Held]]) -> None:
    for case, own in zip(cases, expected, strict=True):
        go_on(mesh, case, own)


WAYS = ("nested", "in the background", "flattened")
PAIRS = [(HSDP, FSDP), (FSDP, HSDP), (HSDP, ONE), (TP, FSDP), (FSDP, TP), (TP, ONE), (ONE, TP), (HSDP, TP), (TP, HSDP)]
KINDS = ["mxfp8", "nvfp4", None]


@sampled("pair", PAIRS, [(HSDP, TP), (TP, FSDP), (HSDP, ONE)], ids=[f"{a} to {b}" for a, b in PAIRS])
def test_training_goes_on_bit_for_bit_on_another_mesh(pair: tuple[str, str], shared_tmp_path: Path) -> None:
    before, after = pair
    cases = []
    for place, name in enumerate(KINDS, start=PAIRS.index(pair)):
        cases.append(Case(name, FORMS[place % len(FORMS)], shared_tmp_path / str(name), WAYS[place % len(WAYS)]))
    goes_on(before, RANKS[before], after, RANKS[after], cases)


def goes_on(before: Any, ranks: int, after: Any, ranks_after: int, cases: list[Case]) -> None:
    found, *others = run_ranks(ranks, save_each, before, cases)
    for other in others:
        for own, its in zip(found, other, strict=True):
            for ours, theirs in zip(own, its, strict=True):
                assert_same(theirs, ours, "ranks of one save")
    for case in cases:
        assert verify(case.path, level="deep").findings == ()
    run_ranks(ranks_after, go_on_each, after, cases, found)


# 5 experts: 3 and 2 on the two ranks of a group, 2, 2, 1 and none on four. With dim=1 each rank has half of their rows.
ROWS, TWICE, SHARED, FLAT, HALVES = Layout(2, 2, 1), Layout(2, 2, 0), Layout(4), Layout(1, 3), Layout(1, 2, 1)
WIDE = Layout(2, 4, 1)
WAYS_OF_EXPERTS = [(ROWS, SHARED), (SHARED, ALONE), (ALONE, ROWS), (ROWS, FLAT), (FLAT, TWICE), (TWICE, HALVES)]
WAYS_OF_EXPERTS += [(HALVES, SHARED), (WIDE, ROWS), (ROWS, WIDE)]
EXPERT_FORMS: list[dict[str, Any]] = [{"masters": "fp32", "moments": "fp32"}, *FORMS]


@sampled(
    "pair",
    WAYS_OF_EXPERTS,
    [(ROWS, SHARED), (TWICE, HALVES)],
    ids=[f"{before.where} to {after.where}" for before, after in WAYS_OF_EXPERTS],
)
def test_experts_go_on_bit_for_bit_on_other_meshes(pair: tuple[Layout, Layout], shared_tmp_path: Path) -> None:
    """Masters in fp32 and as remainders, moments in fp32, bf16 and float8; square blocks that shards cut."""
    before, after = pair
    cases = []
    for place, name in enumerate(["nvfp4", "mxfp8_square", "float8_tensor"], start=WAYS_OF_EXPERTS.index(pair)):
        form, way = EXPERT_FORMS[place % len(EXPERT_FORMS)], WAYS[place % len(WAYS)]
        cases.append(Case(name, form, shared_tmp_path / name, way))
    goes_on(before, before.ranks, after, after.ranks, cases)
