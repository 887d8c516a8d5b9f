"""States in host memory, in one process: the bytes of states on the device, whatever happens between steps."""

import contextlib
import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.allocations import OfAllocator
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    use_kernels,
)
from qtensor.numerics import tiles
from qtensor.optim import inner_step
from qtensor.optim.compressed.host import HostStates
from qtensor.optim.compressed.streaming import Act, Action, schedule
from tests.gpu_offline.ordering import HOST, Allocated, Entry, Freed, Ran, Recorded, Waited, faults_of
from tests.optimizer_states import FORMS, assert_same_model, assert_same_state, bytes_of, copied, get, put
from tests.qtensor.recipes_under_test import weight
from tests.qtensor.test_compressed_states import KINDS, Model, gradients, optimizer_of, preserved, train
from tests.sampling import pairwise, sampled

RECIPES: dict[str, Any] = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8_square": MXFP8BlockScaling(blocks="square"),
    "nvfp4": NVFP4BlockScaling(),
    "float8": Float8CurrentScaling(),
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "float8_block": Float8BlockScaling(),
    "float8_delayed": Float8DelayedScaling(),
}
OPTIONS = [
    {"masters": masters, "moments": moments, "rounding": rounding}
    for masters, moments, rounding in itertools.product(
        ("fp32", "remainder"), ("fp32", "bfloat16", "float8"), ("stochastic", "nearest")
    )
]
SMALL, HALF, WIDE = (
    {"masters": masters, "moments": moments}
    for masters, moments in (("remainder", "float8"), ("fp32", "float8"), ("fp32", "fp32"))
)
each_form = pytest.mark.parametrize("options", [SMALL, HALF, WIDE], ids=["small", "half", "wide"])


def pair(recipe: Any = None, name: str = "adamw", **options: Any) -> list[tuple[Model, MasterWeightOptimizer]]:
    """The same model twice, with states on the device and in host memory."""
    found = []
    for states in ("device", "host"):
        model = Model(recipe or RECIPES["mxfp8"])
        found.append((model, optimizer_of(model, name, states=states, **options)))
    return found


def assert_alike(pairs: list[tuple[Any, MasterWeightOptimizer]], what: str) -> None:
    (model, optimizer), (other, host) = pairs
    assert_same_model(other, bytes_of(model), what)
    assert_same_state(copied(host.state_dict()), copied(optimizer.state_dict()), what)


def train_both(pairs: list[tuple[Any, MasterWeightOptimizer]], step: int) -> None:
    for model, optimizer in pairs:
        train(model, optimizer, step)


# -- the bytes of resident states --------------------------------------------------------------------------------------

CASES = [
    case for case in pairwise(RECIPES, range(len(OPTIONS)), KINDS)
    if case[0] != "float8_delayed" or OPTIONS[case[1]]["masters"] == "fp32"
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "number", "name"), CASES)
def test_every_step_leaves_the_bytes_of_states_on_the_device(recipe: str, number: int, name: str) -> None:
    pairs = pair(RECIPES[recipe], name, **OPTIONS[number])
    for step in range(3):
        train_both(pairs, step)
        assert_alike(pairs, f"{OPTIONS[number]}, step {step}")


@each_form
@pytest.mark.parametrize("name", ["adamw", "nadam", "adagrad", "momentum"])
def test_so_do_steps_of_a_weight_at_a_time(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pair(RECIPES["nvfp4"], name, **options)
    for step in range(3):
        train(*pairs[0], step)
        with monkeypatch.context() as patch:
            patch.setitem(inner_step.CHUNK, "cpu", 1)
            train(*pairs[1], step)
        assert_alike(pairs, f"step {step}")


@each_form
def test_masters_of_preserved_initial_values_step_alike(options: dict[str, Any]) -> None:
    pairs = []
    for states in ("device", "host"):
        model = preserved()
        pairs.append((model, MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), states=states, **options)))
    for step, rate in enumerate((0.0, 0.01, 0.01)):
        for model, optimizer in pairs:
            optimizer.param_groups[0]["lr"] = rate
            train(model, optimizer, step)
        assert_alike(pairs, f"step {step}")


def test_options_of_groups_are_those_of_states_on_the_device() -> None:
    for options in (SMALL, WIDE):
        (_, optimizer), (_, host) = pair(**options)
        assert host.param_groups[0].keys() == optimizer.param_groups[0].keys()
        assert ("states_seed" in host.param_groups[0]) == (options is SMALL)


# -- between steps -----------------------------------------------------------------------------------------------------


@each_form
def test_frozen_weights_added_groups_and_outside_writes(options: dict[str, Any]) -> None:
    pairs = pair(**options)
    train_both(pairs, 0)
    for model, optimizer in pairs:
        gradients(model, 1)
        model.a.weight.requires_grad_(False)
        model.b.grad = None
        optimizer.step()
        model.a.weight.requires_grad_(True)
    assert_alike(pairs, "frozen")
    both = []
    for model, optimizer in pairs:
        more = Model(RECIPES["float8"])
        named = [(f"more.{name}", param) for name, param in more.named_parameters()]
        optimizer.add_param_group({"params": named, "lr": 0.02})
        both.append((nn.ModuleList([model, more]), optimizer))
    train_both(both, 2)
    assert_alike(both, "added")
    for model, _ in both:
        with torch.no_grad():
            model[0].a.weight.copy_(weight(64, 96, seed=9))
            model[1].b.copy_(weight(6, 64, seed=9))
    if options is SMALL:
        assert_alike(both, "written")
    train_both(both, 3)
    assert_alike(both, "trained on")


@each_form
def test_a_state_dict_goes_on_counting_from_the_memory_that_it_holds(options: dict[str, Any]) -> None:
    (model, optimizer) = pair(**options)[1]
    train(model, optimizer, 0)
    held = optimizer.state_dict()["state"]
    train(model, optimizer, 1)
    for number, own in optimizer.state_dict()["state"].items():
        for name, value in own.items():
            if name != "master_recipe":  # a new one each time
                assert (
                    held[number][name] is value
                    or value.untyped_storage().data_ptr() == held[number][name].untyped_storage().data_ptr()
                ), name


@each_form
def test_shards_without_elements_step(options: dict[str, Any]) -> None:
    empty = [nn.Parameter(torch.empty(0, dtype=torch.bfloat16)), nn.Parameter(torch.empty(0, 64, dtype=torch.bfloat16))]
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, empty, states="host", **options)
    for _ in range(2):
        for param in empty:
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert optimizer.state[empty[1]]["exp_avg"].shape == (0, 64)


def test_parameters_that_are_one_number_step_alike() -> None:
    pairs = []
    for states in ("device", "host"):
        model = nn.ParameterList([torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.25)])
        pairs.append((model, MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01, states=states)))
    for step in range(3):
        train_both(pairs, step)
        assert_alike(pairs, f"step {step}")


# -- state dicts and copies --------------------------------------------------------------------------------------------


@each_form
@sampled(
    ("name", "form", "ways"),
    [
        (name, form, ways)
        for name in KINDS
        for form in FORMS
        for ways in itertools.product(("device", "host"), repeat=2)
    ],
    pairwise(("adamw", "momentum", "adagrad", "adam", "asgd"), FORMS, [("device", "host"), ("host", "device")]),
)
def test_either_place_loads_what_the_other_saved(
    name: str, form: str, ways: tuple[str, str], options: dict[str, Any]
) -> None:
    made = [Model() for _ in ways]
    model, other = made
    optimizer, loader = (
        optimizer_of(one, name, states=states, **options) for one, states in zip(made, ways, strict=True)
    )
    for step in range(2):
        train(model, optimizer, step)
    state = get(form, model, optimizer)
    train(other, loader, 7)
    other.load_state_dict(copied(model.state_dict()))
    put(form, other, loader, state)
    assert_same_state(get(form, other, loader), state, "loaded")
    for step in range(2, 4):
        train(model, optimizer, step)
        train(other, loader, step)
    assert_same_model(other, bytes_of(model), "trained on")
    assert_same_state(get(form, other, loader), get(form, model, optimizer), "trained on")


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.permutations([0, 1, 2], 2)))
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("expecting", [False, True])
def test_states_of_another_form_are_converted_as_on_the_device(
    saved: int, loaded: int, first: str, *, expecting: bool
) -> None:
    forms = [SMALL, HALF, WIDE]
    source = Model()
    optimizer = optimizer_of(source, **forms[saved])
    for step in range(2):
        train(source, optimizer, step)
    pairs = pair(**forms[loaded])
    for model, its in pairs:
        train(model, its, 7)
        for part in (first, {"model": "optimizer", "optimizer": "model"}[first]):
            if part == "model":
                model.load_state_dict(copied(source.state_dict()))
            elif expecting:
                _load_into(its, copied(optimizer.state_dict()), forms[saved])
            else:
                its.load_state_dict(copied(optimizer.state_dict()))
    assert_alike(pairs, "loaded")
    for step in range(2, 4):
        train_both(pairs, step)
        assert_alike(pairs, f"step {step}")


def _load_into(optimizer: MasterWeightOptimizer, saved: dict[str, Any], form: dict[str, Any]) -> None:
    """As torch.distributed.checkpoint reads: into the tensors of a state dict."""
    with optimizer.expecting_states(**form):
        room = optimizer.state_dict()
        for number, own in room["state"].items():
            assert own.keys() == saved["state"][number].keys()
            for name, value in own.items():
                value.copy_(saved["state"][number][name])
        for group, its in zip(room["param_groups"], saved["param_groups"], strict=True):
            group.update(its)
        optimizer.load_state_dict(room)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@each_form
@pytest.mark.parametrize("copy_of", [copy.deepcopy, _pickled])
def test_a_copy_keeps_its_states_in_host_memory_and_goes_on_alike(
    copy_of: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    for steps in (0, 2):
        model, optimizer = pair(**options)[1]
        for step in range(steps):
            train(model, optimizer, step)
        twin, its = copy_of((model, optimizer))
        assert isinstance(its._states, HostStates)
        assert its._states.lanes is not optimizer._states.lanes  # type: ignore[union-attr]
        for step in range(2, 4):
            train(model, optimizer, step)
            train(twin, its, step)
        assert_same_model(twin, bytes_of(model), "the copy")
        assert_same_state(copied(its.state_dict()), copied(optimizer.state_dict()), "the copy's state")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_an_error_behind_the_agreement_leaves_host_memory_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair(**SMALL)[1]
    for step in range(2):
        train(model, optimizer, step)
    states = copied(optimizer.state_dict())
    held = {param: own["master_remainder"] for param, own in optimizer.state.items() if "master_remainder" in own}

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    gradients(model, 5)
    with monkeypatch.context() as patch:
        patch.setattr("qtensor.optim.compressed.step.write_master", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert optimizer._states is not None
    assert all(optimizer._states.remainders[param] is own for param, own in held.items())
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank when all had agreed to it"):
        optimizer.step()
    optimizer.load_state_dict(states)
    optimizer.step()


class _Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "error", "why"),
    [
        (torch.optim.AdamW, {"states": "cpu"}, ValueError, r"states='cpu'\): expected one of 'device', 'host'"),
        (
            torch.optim.AdamW, {"states": "host", "fused_step": True}, ValueError,
            r"fused_step=True, states='host'.*leave fused_step out, or use states=\"device\"",
        ),
        (_Own, {"states": "host"}, NotImplementedError, r"_Own, .*states='host'.*leave these arguments out"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(kind: Any, options: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        MasterWeightOptimizer(kind, [nn.Parameter(torch.ones(2))], **options)


def test_states_on_the_device_import_nothing_of_it() -> None:
    code = """
import sys, torch, qtensor
param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
param.grad = torch.ones_like(param)
optimizer = qtensor.MasterWeightOptimizer(torch.optim.AdamW, [param], states="device")
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert not [name for name in sys.modules if name.startswith("qtensor.optim.compressed")]
qtensor.MasterWeightOptimizer(torch.optim.AdamW, [param], masters="remainder")
assert not [name for name in sys.modules if name.endswith((".host", ".streaming"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the schedule ------------------------------------------------------------------------------------------------------

COMPUTE, SIDE = 0, 1
NONE: frozenset[int] = frozenset()


def as_log(actions: list[Action], *, writes: bool) -> list[Entry]:
    """What the actions ask of streams and memory: of each chunk, host memory `chunk` and a buffer."""
    log: list[Entry] = [Allocated(chunk, HOST, f"host {chunk}") for _, chunk in actions if _ is Act.COMPUTE]
    for act, chunk in actions:
        buffer, own = frozenset({100 + chunk}), frozenset({chunk})
        if act is Act.BRING:
            log += [Allocated(100 + chunk, SIDE, f"buffer {chunk}"), Ran(SIDE, "copy in", own, buffer)]
            log.append(Recorded(200 + chunk, SIDE))
        elif act is Act.AWAIT_COPIES:
            log.append(Waited(COMPUTE, 200 + chunk))
        elif act is Act.COMPUTE:
            log.append(Ran(COMPUTE, "compute", buffer, buffer))
        elif act is Act.AWAIT_COMPUTE:
            log += [Recorded(300 + chunk, COMPUTE), Waited(SIDE, 300 + chunk)]
        else:
            log += [*([Ran(SIDE, "copy out", buffer, own)] if writes else []), Freed(100 + chunk)]
    return log


@pytest.mark.parametrize("chunks", range(6))
def test_a_schedule_takes_each_chunk_there_and_back_with_two_at_a_time(chunks: int) -> None:
    actions = schedule(chunks)
    for chunk in range(chunks):
        assert [act for act, number in actions if number == chunk] == list(Act)
    live = list(itertools.accumulate({Act.BRING: 1, Act.RETURN: -1}.get(act, 0) for act, _ in actions))
    assert max(live, default=0) == min(chunks, 2)
    computes = [place for place, (act, _) in enumerate(actions) if act is Act.COMPUTE]
    for place, chunk in zip(computes, range(1, chunks), strict=False):
        assert Action(Act.BRING, chunk) in actions[:place]  # under way while the one before is computed on


@pytest.mark.parametrize("writes", [True, False])
def test_a_schedule_is_ordered_and_without_any_of_its_waits_it_is_not(*, writes: bool) -> None:
    actions = schedule(5)
    assert faults_of(as_log(actions, writes=writes)) == []
    waits = [each for each in actions if each.act in (Act.AWAIT_COPIES, Act.AWAIT_COMPUTE)]
    if not writes:  # behind the last buffers nobody asks for memory here
        waits = [each for each in waits if each.act is Act.AWAIT_COPIES or each.chunk < 3]
    for wait in waits:
        assert faults_of(as_log([each for each in actions if each is not wait], writes=writes)) != [], wait


# -- memory ------------------------------------------------------------------------------------------------------------

SIDE_LENGTH = 256
ELEMENTS = SIDE_LENGTH**2


def beyond_rest(weights: int) -> int:
    """Bytes that a step takes beyond what is there between steps, with states as they are."""
    params = []
    for _ in range(weights):
        params.append(nn.Parameter(quantize(torch.randn(SIDE_LENGTH, SIDE_LENGTH), RECIPES["mxfp8"])))
        params[-1].grad = torch.ones(SIDE_LENGTH, SIDE_LENGTH)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, states="host")
    for _ in range(2):
        optimizer.step()
    with OfAllocator() as meter:
        optimizer.step()
        meter.mark("step")
    return meter.peak["step"]


def test_a_step_holds_two_chunks_of_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inner_step.CHUNK, "cpu", ELEMENTS)
    monkeypatch.setitem(tiles.CHUNK, "cpu", ELEMENTS // 16)
    with use_kernels("eager"):
        one, two, six = (beyond_rest(weights) for weights in (1, 2, 6))
    kept = 12 * ELEMENTS  # master and moments of a chunk, in fp32
    assert kept < two - one < kept + ELEMENTS  # the second chunk arrives meanwhile
    assert abs(six - two) < ELEMENTS


def test_a_chunk_is_abandoned_where_its_iterator_is_closed() -> None:
    model, optimizer = pair(**SMALL)[1]
    train(model, optimizer, 0)
    states, inner, weights = optimizer._states, optimizer._inner, [model.a.weight]
    assert states is not None
    assert inner is not None
    key, home = optimizer._masters[model.a.weight], states.remainders[model.a.weight]
    own = inner.state[key]
    with contextlib.closing(states.brought([weights], inner.state, optimizer._masters)) as brought:  # type: ignore[type-var]
        assert next(brought) == weights
        assert states.remainders[model.a.weight] is not home
        assert inner.state[key] is not own
        assert inner.state[key]["step"] is own["step"]
        assert isinstance(inner.state[key]["exp_avg"], QuantizedTensor)
        states.remainders[model.a.weight].fill_(7)
    assert states.remainders[model.a.weight] is home
    assert inner.state[key] is own
    assert not (home == 7).any()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_form
def test_a_gpu_leaves_the_same_bytes_and_pinned_states(options: dict[str, Any]) -> None:
    found = []
    for states in ("device", "host"):
        model = Model(RECIPES["mxfp8"]).to("cuda")
        optimizer = optimizer_of(model, states=states, foreach=True, fused_step=False, **options)
        if isinstance(optimizer._states, HostStates):
            optimizer._states.chunk = 1
        for step in range(4):
            gradients(twin := Model(), step)
            for param, its in zip(model.parameters(), twin.parameters(), strict=True):
                param.grad = None if its.grad is None else its.grad.to("cuda")
            optimizer.step()
        if states == "host":
            kept = [value for own in optimizer.state.values() for value in own.values() if value.ndim]
            parts = [part for one in kept for part in (one.parts().values() if hasattr(one, "parts") else [one])]
            assert all(part.device.type == "cpu" and part.is_pinned() for part in parts)
        found.append(({name: value.cpu() for name, value in bytes_of(model).items()}, copied(optimizer.state_dict())))
    (own, state), (other, host) = found
    assert all(torch.equal(other[name], value) for name, value in own.items())
    at_home = {number: {name: value.cpu() for name, value in entry.items()} for number, entry in state["state"].items()}
    assert_same_state(host["state"], at_home, "states")
