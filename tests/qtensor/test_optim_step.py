"""What a step of MasterWeightOptimizer makes: fp32 gradients a chunk at a time, and hardly any waiting."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, QuantizedTensor, quantize
from qtensor.optim import inner_step, masters
from qtensor.optim.inner_step import in_fp32
from qtensor.optim.masters import copy_many
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.qtensor.recipes_under_test import same_bytes
from tests.recipes import ROW

RECIPES = [recipe for name, recipe in ROW.items() if name != "float8_row"]


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Quantized ones of several sizes, and dense ones in bf16 and fp32."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(32 * n, 32, generator=generator).to(dtype) for n in (1, 3, 2, 1)]
    quantized = [
        nn.Parameter(quantize(values[0], RECIPES[0])),
        *(nn.Parameter(quantize(values[1], r)) for r in RECIPES),
    ]
    return [*quantized, nn.Parameter(values[2]), nn.Parameter(values[3].float())]


def backward(params: list[nn.Parameter], step: int, *, but: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number == but else grad


def state_of(optimizer: MasterWeightOptimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [value for index in sorted(state) for _, value in sorted(state[index].items()) if isinstance(value, Tensor)]


@pytest.mark.parametrize(
    "kind", sorted(inner_step.APART, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_steps_of_chunks_are_those_of_all_at_once(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in every state, with two groups and parameters without gradients."""
    found = []
    for chunk in (2**22, 1500):
        monkeypatch.setitem(inner_step.CHUNK, "cpu", chunk)
        params = parameters()
        optimizer = MasterWeightOptimizer(kind, [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}], lr=0.01)
        for step in range(3):
            backward(params, step, but=step)
            optimizer.step()
        found.append([*state_of(optimizer), *(param.detach() for param in params[-2:])])
    assert len(found[0]) >= 5 + 2  # masters, and the plain parameters
    assert all(same_bytes(one, other) for one, other in zip(*found, strict=True))


class Watching(torch.optim.SGD):
    """Notes what gradients there are in each of its steps."""

    seen: list[list[Tensor]]

    def step(self, closure: Any = None) -> Any:
        masters = [master for group in self.param_groups for master in group["params"]]
        self.seen = [*getattr(self, "seen", []), [master.grad for master in masters if master.grad is not None]]
        return super().step(closure)


@pytest.mark.parametrize("apart", [True, False])
def test_gradients_are_copied_to_fp32_a_chunk_at_a_time(*, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inner_step.CHUNK, "cpu", 4096)
    monkeypatch.setattr(inner_step, "APART", frozenset({Watching} if apart else ()))
    params = parameters()
    optimizer = MasterWeightOptimizer(Watching, params, lr=0.1)
    backward(params, 0)
    optimizer.step()
    inner = optimizer._inner
    assert isinstance(inner, Watching)
    sizes = [[grad.numel() for grad in grads] for grads in inner.seen]
    rest = [3072] * (len(RECIPES) - 1)
    chunks = [[1024, 3072], *([size] for size in rest), [2048, 1024]]
    assert sizes == (chunks if apart else [[1024, 3072, *rest, 2048, 1024]])
    assert all(len(group["params"]) == len(params) for group in inner.param_groups)
    assert all(state["master_weight"].grad is None for state in optimizer.state.values() if "master_weight" in state)


def test_a_step_that_raises_leaves_groups_and_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no step today")

    monkeypatch.setitem(inner_step.CHUNK, "cpu", 1)
    monkeypatch.setattr(inner_step, "APART", frozenset({Failing}))
    params = parameters()
    optimizer = MasterWeightOptimizer(Failing, params, lr=0.1)
    backward(params, 0)
    with pytest.raises(RuntimeError, match="no step today"):
        optimizer.step()
    masters = [master for group in optimizer._inner.param_groups for master in group["params"]]  # type: ignore[union-attr]
    assert len(masters) == len(params)
    assert all(master.grad is None for master in masters[:-1])  # the last is a parameter


def test_a_gradient_in_fp32_is_not_copied() -> None:
    params = parameters(torch.float32)
    optimizer = MasterWeightOptimizer(Watching, params, lr=0.1)
    backward(params, 0)
    optimizer.step()
    assert isinstance(optimizer._inner, Watching)
    assert all(grad is param.grad for grad, param in zip(optimizer._inner.seen[0], params, strict=True))


def test_a_step_does_not_care_for_the_default_device() -> None:
    """Numbers that begin on the host begin there."""
    found = []
    for context in (nullcontext(), torch.device("meta")):
        params = parameters()
        optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1)
        for step, but in enumerate([None, 1]):
            backward(params, step, but=but)
            with context:
                optimizer.step()
        found.append(state_of(optimizer))
    assert all(same_bytes(one, other) for one, other in zip(*found, strict=True))


class Waits(TorchDispatchMode):
    """Counts operations that hand values of tensors to the host, and calls of tolist()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        original = Tensor.tolist
        monkeypatch.setattr(Tensor, "tolist", lambda tensor: (self.found.append("tolist"), original(tensor))[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero"):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the digests; where masters were made from the bytes, or a gradient is missing, once more."""
    params = parameters()
    optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1, foreach=True)
    for step, (but, expected) in enumerate([(None, 2), (None, 1), (1, 2), (None, 1)]):
        backward(params, step, but=but)
        with Waits(monkeypatch) as waits:
            optimizer.step()
        assert waits.found == ["tolist"] * expected, step
        monkeypatch.undo()


class Copies(TorchDispatchMode):
    """Copies one by one, and the dtypes in each call that makes many."""

    def __init__(self) -> None:
        super().__init__()
        self.single: list[torch.dtype] = []
        self.many: list[list[set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.aten._foreach_copy_.default:
            self.many.append([{each.dtype for each in some} for some in args[:2]])
        if func is torch.ops.aten.copy_.default:
            self.single.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_copies_are_made_many_at_a_time_and_of_one_dtype(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies many tensors at once where they have one dtype, and one by one otherwise."""
    monkeypatch.setattr(masters, "BY_ROW", frozenset())
    single = []
    for n in (2, 6):
        params = [nn.Parameter(quantize(torch.randn(64, 32), recipe)) for _ in range(n)]
        params += [nn.Parameter(torch.randn(32, dtype=torch.bfloat16)) for _ in range(n)]
        optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1, foreach=True)
        for step in range(2):
            backward(params, step)
            with Copies() as copies:
                optimizer.step()
        assert [len(dtypes) for call in copies.many for dtypes in call] == [1] * 2 * len(copies.many)
        # gradients; each part of the quantized weights; the plain parameters
        assert len(copies.many) == 1 + len(quantize(torch.randn(32, 32), recipe).parts()) + 1
        single.append(len(copies.single))
    assert single[0] == single[1]


class NoLists(Tensor):
    """A class of another library that copies, and knows no lists of copies."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "foreach" in str(func):
            raise NotImplementedError(func)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def test_a_gradient_that_lies_elsewhere_keeps_its_placements() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        master = DTensor.from_local(torch.zeros(4, 32), mesh, [Shard(0)], run_check=False)
        for placement, shape in ((Shard(0), (4, 32)), (Replicate(), (8, 32)), (Shard(1), (8, 16))):
            values = torch.arange(shape[0] * shape[1], dtype=torch.bfloat16).view(shape)
            grad = DTensor.from_local(values, mesh, [placement], run_check=False)
            found: Any = in_fp32(grad, master, None)
            assert (found.shape, found.dtype, found.placements) == (master.shape, torch.float32, (placement,))
            assert torch.equal(found.to_local(), values.float())
    finally:
        dist.destroy_process_group()


def test_tensors_of_other_classes_are_copied_one_by_one() -> None:
    ours, theirs = torch.zeros(3), torch.zeros(3).as_subclass(NoLists)
    copy_many([(ours, torch.ones(3)), (theirs, torch.ones(3)), (torch.zeros(3), torch.ones(3).as_subclass(NoLists))])
    assert torch.equal(ours, torch.ones(3))
    assert torch.equal(theirs.as_subclass(Tensor), torch.ones(3))


def test_a_gradient_left_on_a_frozen_parameter_moves_nothing() -> None:
    params = parameters()
    optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1)
    backward(params, 0)
    optimizer.step()
    params[1].requires_grad_(False)
    before = [value.clone() for value in state_of(optimizer)]
    payload = params[1].payload.clone()
    backward(params, 1)
    optimizer.step()
    after = state_of(optimizer)
    assert torch.equal(before[1], after[1])  # the master of the second parameter
    assert same_bytes(params[1].payload, payload)
    assert not torch.equal(before[0], after[0])


class Whole(torch.optim.SGD):
    """One of which nobody knows that it treats each parameter on its own."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Whole])
@pytest.mark.parametrize("chunk", [1, 2**22])
@pytest.mark.parametrize("storage", ["plain", "high_precision"])
def test_a_gradient_left_on_a_frozen_parameter_in_fp32_moves_nothing(
    kind: type[torch.optim.Optimizer], chunk: int, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is its own master, where the inner optimizer would find the gradient; the gradient stays its own."""
    monkeypatch.setitem(inner_step.CHUNK, "cpu", chunk)

    def stored() -> nn.Parameter:
        x = torch.randn(4, 32)
        return nn.Parameter(x if storage == "plain" else HighPrecisionWeight(x, MXFP8BlockScaling()))

    params = [nn.Parameter(quantize(torch.randn(4, 32), MXFP8BlockScaling())), stored(), stored()]
    optimizer = MasterWeightOptimizer(kind, params, lr=0.1, weight_decay=0.1)
    for param in params:
        param.grad = torch.ones(4, 32)
    optimizer.step()
    params[1].requires_grad_(False)
    grad, before = params[1].grad, [param.detach().clone() for param in params]
    state = {name: value.clone() for name, value in optimizer.state[params[1]].items()}
    optimizer.step()
    assert params[1].grad is grad
    kept = [torch.equal(dense(param), dense(old)) for param, old in zip(params, before, strict=True)]
    assert kept == [False, True, False]
    assert all(torch.equal(optimizer.state[params[1]][name], value) for name, value in state.items())
    # nor does it where nothing steps, or where a step fails
    for param in (params[0], params[2]):
        param.grad = None
    optimizer.step()
    monkeypatch.setattr(optimizer._inner, "step", mock.Mock(side_effect=RuntimeError("no step today")))
    with pytest.raises(RuntimeError, match="no step today"):
        optimizer.step()
    assert params[1].grad is grad
    assert torch.equal(dense(params[1]), dense(before[1]))


def dense(param: Tensor) -> Tensor:
    return param.dequantize() if isinstance(param, QuantizedTensor) else getattr(param, "dense", param.detach())


def test_frozen_quantized_parameters_cost_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under adapters: they have no gradient ever, and no shard of theirs can have moved."""
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1, foreach=True)
    for expected in (2, 1):
        for number, param in enumerate(params[1:]):
            param.grad = torch.ones(param.shape, dtype=param.dtype) * (number + 1)
        with Waits(monkeypatch) as waits:
            optimizer.step()
        assert waits.found == ["tolist"] * expected
        monkeypatch.undo()


# -- digests of what was written last ----------------------------------------------------------------------------------


def changed(written: masters.LastWrites) -> list[Tensor]:
    return written.changed(written.look())


def test_notes_of_some_parameters_leave_those_of_others() -> None:
    params = parameters()
    written = masters.LastWrites()
    assert (changed(written), written.records()) == ([], {})
    written.note(params)
    before = written.records()
    with torch.no_grad():
        for number in (1, 2):
            params[number].copy_(torch.full(params[number].shape, 2.0, dtype=torch.bfloat16))
    assert list(map(id, changed(written))) == [id(params[1]), id(params[2])]
    written.note([params[2]])
    assert list(map(id, changed(written))) == [id(params[1])]
    written.forget([params[1], params[0]])
    assert changed(written) == []
    assert params[0] not in written and params[2] in written  # noqa: PT018
    kept = written.records()
    assert all(torch.equal(kept[param], before[param]) for param in params[3:])
    assert not torch.equal(kept[params[2]], before[params[2]])
    assert all(record.untyped_storage().nbytes() == 16 for record in kept.values())  # its own, not the table's
    assert changed(masters.LastWrites(kept)) == []
    written.forget(params)
    assert (changed(written), written.records()) == ([], {})


def test_a_write_of_others_is_known_before_a_master_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digests are asked for first, and read before the inner optimizer begins."""
    told: list[str] = []
    for place, name in ((masters.LastWrites, "look"), (masters.LastWrites, "changed"), (torch.optim.SGD, "step")):
        original = getattr(place, name)
        noting = lambda *args, original=original, name=name: (told.append(name), original(*args))[1]  # noqa: E731
        monkeypatch.setattr(place, name, noting)
    params = parameters()
    optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.0)
    backward(params, 0)
    optimizer.step()
    with torch.no_grad():
        params[1].copy_(torch.full(params[1].shape, 2.0, dtype=torch.bfloat16))
    del told[:]
    optimizer.step()
    assert told[:2] == ["look", "changed"]
    assert set(told[2:]) == {"step"}
    assert torch.equal(optimizer.state[params[1]]["master_weight"], params[1].dequantize(torch.float32))
