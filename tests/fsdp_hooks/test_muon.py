"""torch.optim.Muon under MasterWeightOptimizer: the bytes of one process, on every mesh and with every kind of states.

One process with states in fp32 runs torch's own Muon on whole fp32 matrices, so that is what all others are held to.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantized_model_init
from qtensor.optim.matrices import arithmetic
from tests.fsdp_hooks.cases import RECIPES, assert_same_bytes, exchanged, local, mesh_of
from tests.fsdp_hooks.test_compressed_states import STEPS, gradients, train
from tests.ranks import run_ranks_each
from tests.sampling import sampled

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
SMALL: dict[str, Any] = {"masters": "remainder", "moments": "float8"}
# (recipe, storage, options of the optimizer)
CASES: list[tuple[str | None, str, dict[str, Any]]] = [
    ("mxfp8", "quantized", {}),
    (None, "quantized", {"adjust_lr_fn": "match_rms_adamw"}),
    ("fp32", "quantized", {"nesterov": False}),
    ("nvfp4", "high_precision", {"ns_steps": 3, "momentum": 0.8, "weight_decay": 0.0}),
    ("mxfp8_square", "quantized", {"lr": torch.tensor(0.02)}),
    ("nvfp4", "quantized", SMALL),
    ("mxfp8", "quantized", {**SMALL, "states": "host"}),
    (None, "quantized", {"masters": "remainder", "moments": "bfloat16"}),
    ("float8_tensor", "quantized", {"moments": "float8", "rounding": "nearest"}),
    ("fp32", "quantized", {"moments": "float8", "states": "host"}),
    ("mxfp8", "quantized", {"masters": "remainder", "moments": "fp32"}),
]
KEPT = [CASES[number] for number in (0, 2, 5)]


class Matrices(nn.Sequential):
    """Wide and tall ones, of even, uneven and, from 4 ranks on, empty shards."""

    def __init__(self, dtype: torch.dtype, *, blocks: bool = False) -> None:
        wide, few = (64, 32) if blocks else (33, 3)
        shapes = {"tall": (64, 96), "wide": (96, wide), "few": (32, few), "last": (64, 32)}
        super().__init__(OrderedDict((name, nn.Linear(*own, bias=False, dtype=dtype)) for name, own in shapes.items()))


def built(name: str | None, storage: str = "quantized") -> nn.Module:
    torch.manual_seed(0)
    if name in (None, "fp32"):
        return Matrices(torch.float32 if name else torch.bfloat16)
    with quantized_model_init(RECIPES[name], storage=storage):
        return Matrices(torch.bfloat16, blocks=name.endswith("_square"))


def optimizer_of(model: nn.Module, **options: Any) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.Muon, model.named_parameters(), **(OPTIONS | options))


def whole(value: Any, param: Tensor) -> dict[str, Tensor]:
    """The parts of a whole tensor, of a shard that is placed as its parameter is."""
    own = local(value.detach())
    own = getattr(own, "dense", own)
    parts = own.parts() if isinstance(own, QuantizedTensor) else {"": own}
    found = {}
    for name, part in parts.items():
        plain = part.detach()
        if plain.dtype == torch.float16:  # remainders: numbers that stand for 16 bits
            plain = plain.view(torch.int16)
        plain = plain.view(torch.uint8) if plain.itemsize == 1 else plain
        if isinstance(param, DTensor) and plain.ndim:
            plain = joined(plain, param)
        found[name] = plain.clone()
    return found


def joined(piece: Tensor, param: DTensor) -> Tensor:
    """A whole tensor of its pieces, put where torch's DTensor says that they are."""
    at = (distribute_tensor(one, param.device_mesh, param.placements, src_data_rank=None) for one in places(param))
    held = [one for one in exchanged((piece, *(own.to_local() for own in at))) if one[0].numel()]
    wide = held[0][2].shape[1] // held[0][0].shape[1]  # elements of the tensor in one of the part
    full = torch.zeros(param.shape[0], param.shape[1] // wide, dtype=piece.dtype)
    for own, rows, columns in held:
        full[rows[:, :1], columns[:1, ::wide] // wide] = own
    return full


def places(param: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = param.shape
    return (
        torch.arange(rows).unsqueeze(1).expand(rows, columns).contiguous(),
        torch.arange(columns).unsqueeze(0).expand(rows, columns).contiguous(),
    )


def everything(model: nn.Module, optimizer: MasterWeightOptimizer) -> dict[str, Tensor]:
    """Weights and states as whole tensors, by name."""
    found = {}
    for fqn, param in model.named_parameters():
        for name, value in {"": param, **optimizer.state[param]}.items():
            for part, own in whole(value, param).items():
                found[f"{fqn}|{name}|{part}"] = own
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        assert_same_bytes(found[name], value, f"{what}: {name}")


def sharded(model: nn.Module, how: str) -> nn.Module:
    ranks = dist.get_world_size()
    if how == "fsdp":
        for child in model.children():
            fully_shard(child)
        return fully_shard(model)
    if how == "hsdp":
        return fully_shard(model, mesh=mesh_of(2, ranks // 2))
    plan = {"tall": ColwiseParallel(), "last": RowwiseParallel()}
    if how == "tp":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan, src_data_rank=None)
        for name in ("wide", "few"):  # replicated, and with them all are on one mesh
            linear = model.get_submodule(name)
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, src_data_rank=None))
        return model
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    return fully_shard(model, mesh=mesh["dp"])


def equals_one_process(case: tuple[str | None, str, dict[str, Any]], how: str = "fsdp") -> None:
    name, storage, options = case
    reference = built(name, storage)
    its = optimizer_of(reference, **options)
    model = sharded(built(name, storage), how)
    optimizer = optimizer_of(model, check_replicas=how == "hsdp", **options)
    for step in range(STEPS):
        train(reference, its, range(step, step + 1))
        train(model, optimizer, range(step, step + 1))
        assert_same(everything(model, optimizer), everything(reference, its), f"{case}, {how}, step {step}")


@sampled("ranks", [1, 2, 3, 4], [4])
def test_every_number_of_ranks_holds_what_one_process_holds(ranks: int) -> None:
    run_ranks_each(ranks, KEPT, equals_one_process)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_so_it_does_with_all_kinds_of_weights_states_and_options(ranks: int) -> None:
    run_ranks_each(ranks, [case for case in CASES if case not in KEPT], equals_one_process)


@pytest.mark.parametrize(("ranks", "how"), [(4, "hsdp"), (2, "tp"), (4, "tp and fsdp")])
def test_so_does_every_mesh(ranks: int, how: str) -> None:
    cases = [CASES[10], CASES[1], CASES[5]]
    if how == "tp":
        cases = [CASES[1], CASES[7]]
    run_ranks_each(ranks, cases, equals_one_process, how)


def groups_have_options_of_their_own(small: dict[str, Any]) -> None:
    """Matrices of all groups travel together; one group comes later, and a scheduler moves what the first two have."""
    found = []
    for cut in (False, True):
        model = sharded(built("mxfp8"), "fsdp") if cut else built("mxfp8")
        tall, wide, few, last = model.named_parameters()
        own = {"params": [wide, few], "lr": 0.3, "nesterov": False, "ns_steps": 2, "momentum": 0.5, "weight_decay": 0.0}
        optimizer = MasterWeightOptimizer(torch.optim.Muon, [{"params": [tall]}, own], lr=torch.tensor([0.02]), **small)
        train(model, optimizer, range(1))
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        optimizer.add_param_group({"params": [last], "lr": 0.1, "ns_steps": 1, "adjust_lr_fn": "match_rms_adamw"})
        train(model, optimizer, range(1, 3))
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0], f"{small}")


def test_groups_have_options_of_their_own() -> None:
    run_ranks_each(2, [{}, SMALL], groups_have_options_of_their_own)


def test_one_process_is_torchs_muon_on_fp32() -> None:
    """With a master for each weight, the master; and steps that are split, as those on compressed states are, too."""
    for options in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, {"moments": "float8"}):
        model, plain = built(None), built(None).float()
        known = {key: value for key, value in options.items() if key != "moments"}
        theirs = torch.optim.Muon(plain.parameters(), **(OPTIONS | known))
        optimizer = optimizer_of(model, **options)
        for step in range(1 if "moments" in options else STEPS):
            gradients(model, step)
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.grad = param.grad.float()
            optimizer.step()
            theirs.step()
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(optimizer.state[param]["master_weight"], other), (options, step)


def test_zeros_keep_their_signs() -> None:
    """Of a matrix with rows and columns of zeros, on weights of -0.0."""
    for shape in ((6, 32), (64, 32)):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        grad[:, ::3] = 0.0
        grad[::2] = -0.0
        found = []
        for split in (True, False):
            param = nn.Parameter(torch.full(shape, -0.0))
            options: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.0}
            if split:
                optimizer: Any = MasterWeightOptimizer(torch.optim.Muon, [param], moments="float8", **options)
            else:
                optimizer = torch.optim.Muon([param], **options)
            param.grad = grad.clone()
            optimizer.step()
            found.append(param.detach())
        assert (found[1] == 0).any()
        assert_same_bytes(found[0], found[1], f"{shape}")


def test_a_group_with_options_that_torch_computes_otherwise_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = built("mxfp8"), built("mxfp8")
    optimizer = MasterWeightOptimizer(torch.optim.Muon, few.named_parameters(), **OPTIONS, moments="bfloat16")
    # as if this torch had another momentum that is not Nesterov's
    monkeypatch.setattr(arithmetic, "_same_bytes", lambda options: dict(options)["nesterov"])
    before = optimizer.state_dict()
    with pytest.raises(NotImplementedError, match="computes a step"):
        optimizer.add_param_group({"params": [("more", more.tall.weight)], "nesterov": False})
    assert len(optimizer.param_groups) == 1
    assert more.tall.weight not in optimizer.state
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    optimizer.add_param_group({"params": [("more", more.tall.weight)]})
    for param in (*few.parameters(), more.tall.weight):
        param.grad = torch.ones_like(param, dtype=torch.bfloat16)
    optimizer.step()
