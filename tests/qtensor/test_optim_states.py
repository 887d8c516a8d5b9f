"""MasterWeightOptimizer in one process: its state through every form of state dict, and copies of itself."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, QuantizedTensor, quantize, quantized_model_init
from tests.optimizer_states import (
    FORMS,
    INNER,
    UNSHARDED,
    assert_same_model,
    assert_same_state,
    bytes_of,
    copied,
    entries,
    get,
    masters_in,
    put,
    round_trip,
)
from tests.qtensor.recipes_under_test import all_recipes, weight

ALL = INNER | UNSHARDED
MXFP8 = MXFP8BlockScaling()


class Model(nn.Module):
    """Parameters of every kind: quantized, bf16 (with a -0.0, which must stay one) and fp32."""

    def __init__(self, recipe: Any = MXFP8) -> None:
        super().__init__()
        self.a = nn.Linear(96, 64, dtype=torch.bfloat16)
        self.a.weight = nn.Parameter(quantize(weight(64, 96), recipe))
        self.a.bias = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.bfloat16).index_fill(0, torch.tensor(5), -0.0))
        self.scale = nn.Parameter(torch.ones(32))


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module, name: str = "adamw") -> MasterWeightOptimizer:
    kind, options = ALL[name]
    return MasterWeightOptimizer(kind, model.parameters(), **options)


# -- state dicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_a_state_comes_back_whole_and_training_goes_on(name: str, form: str, steps: int) -> None:
    round_trip(Model, train, ALL[name], form, steps)


@all_recipes
def test_a_new_optimizer_tells_its_state_without_changing_a_byte(recipe: Any) -> None:
    """torch asks a new optimizer for its state by a step with lr=0."""
    for name in ALL:
        model = Model(recipe)
        before = bytes_of(model)
        assert masters_in(get("nested", model, optimizer_of(model, name))) == 2
        assert_same_model(model, before, name)


class _Stateless(torch.optim.SGD):
    """Takes nothing from a state dict but the groups."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


def test_masters_stay_in_the_state_where_the_inner_optimizer_keeps_none() -> None:
    model = Model()
    optimizer = MasterWeightOptimizer(_Stateless, model.parameters(), lr=0.1)
    train(model, optimizer, 0)
    saved = copied(optimizer.state_dict())
    optimizer.load_state_dict(copied(saved))
    assert_same_state(optimizer.state_dict(), saved, "saved after loading")
    assert masters_in(saved) == 2


def _partly_trained(name: str) -> tuple[Model, MasterWeightOptimizer]:
    """The bias takes no part in a step, and has no state then."""
    model = Model()
    optimizer = optimizer_of(model, name)
    model.a.bias.grad = None
    for param in (model.a.weight, model.scale):
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_that_a_flattened_state_does_not_name_has_none(name: str) -> None:
    """torch then hands on an empty dict for each of its entries."""
    model, optimizer = _partly_trained(name)
    state = get("flattened", model, optimizer)
    if name != "adagrad":  # whose state there is from the start
        assert not any("bias" in key for key in state if key.startswith("state."))
    resumed = Model()
    resumed.load_state_dict(model.state_dict())
    again = optimizer_of(resumed, name)
    put("flattened", resumed, again, state)
    assert_same_state(get("flattened", resumed, again), state, "saved after loading")
    for step in range(2):
        train(model, optimizer, step)
        train(resumed, again, step)
    assert_same_model(resumed, bytes_of(model), "trained on")


def test_a_flattened_state_that_torch_lost_is_refused() -> None:
    """It names no entry where the optimizer is new and gradients exist, and drops what the checkpoint holds."""
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    state = get("flattened", model, optimizer)
    resumed = Model()
    again = optimizer_of(resumed)
    for param in resumed.parameters():
        param.grad = torch.zeros(param.shape, dtype=param.dtype)
    with pytest.raises(ValueError, match=r"no master weight, expected one of shape \(64, 96\); its state is empty"):
        put("flattened", resumed, again, state)
    again.zero_grad()
    put("flattened", resumed, again, state)
    assert_same_state(get("flattened", resumed, again), state, "after zero_grad")


def test_a_look_at_the_state_of_a_parameter_leaves_no_trace_in_what_is_saved() -> None:
    model, optimizer = _partly_trained("adamw")
    expected = copied(optimizer.state_dict())
    assert optimizer.state[model.a.bias] == {}
    saved = copied(optimizer.state_dict())
    assert_same_state(saved, expected, "saved after a look")
    optimizer.load_state_dict(saved)


def test_groups_may_be_added_by_name_and_a_set_is_torchs_own_error() -> None:
    model, more = Model(), nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.named_parameters(), lr=0.1)
    optimizer.add_param_group({"params": more.named_parameters()})
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(2))}})


# -- copies ------------------------------------------------------------------------------------------------------------


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": _pickled}
all_copies = pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES.keys())


@all_recipes
@all_copies
def test_a_model_and_its_optimizer_copied_together_stay_tied(recipe: Any, copy_of: Callable[[Any], Any]) -> None:
    for steps in (0, 2):
        model = Model(recipe)
        optimizer = optimizer_of(model)
        for step in range(steps):
            train(model, optimizer, step)
        before, state = bytes_of(model), copied(optimizer.state_dict())
        twin, its = copy_of((model, optimizer))
        assert all(a is b for a, b in zip(its.param_groups[0]["params"], twin.parameters(), strict=True))
        for step in range(2, 4):
            train(twin, its, step)
        assert_same_model(model, before, "the original, while its copy is trained")
        assert_same_state(optimizer.state_dict(), state, "the original's state")
        for step in range(2, 4):
            train(model, optimizer, step)
        assert_same_model(twin, bytes_of(model), "the copy")
        assert_same_state(its.state_dict(), optimizer.state_dict(), "the copy's state")


@pytest.mark.parametrize("name", ALL)
@all_copies
def test_an_optimizer_copied_alone_has_parameters_of_its_own(name: str, copy_of: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = optimizer_of(model, name)
    train(model, optimizer, 0)
    before = bytes_of(model)
    alone = copy_of(optimizer)
    own = nn.ParameterList(alone.param_groups[0]["params"])
    assert not {id(param) for param in own} & {id(param) for param in model.parameters()}
    train(own, alone, 1)
    assert_same_model(model, before, "the original")
    train(model, optimizer, 1)
    for param, expected in zip(own, model.parameters(), strict=True):
        assert_same_model(nn.ParameterList([param]), bytes_of(nn.ParameterList([expected])), "the copy's parameters")


@all_copies
def test_a_copy_knows_what_others_wrote_before_and_after_it(copy_of: Callable[[Any], Any]) -> None:
    for late in (False, True):
        model = Model()
        optimizer = optimizer_of(model)
        train(model, optimizer, 0)
        twin, its = (model, optimizer) if not late else copy_of((model, optimizer))
        with torch.no_grad():
            twin.a.weight.fill_(0.5)
        if not late:
            twin, its = copy_of((model, optimizer))
        its.param_groups[0]["lr"] = 0.0
        train(twin, its, 1)
        assert torch.equal(twin.a.weight.dequantize(), torch.full((64, 96), 0.5, dtype=torch.bfloat16))


@all_copies
def test_a_copy_takes_along_a_master_made_from_a_preserved_value(copy_of: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        model = nn.Linear(64, 32, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.01)
    twin, its = copy_of((model, optimizer))
    for one, its_own in ((model, optimizer), (twin, its)):
        train(one, its_own, 0)
    assert_same_model(twin, bytes_of(model), "the copy")
    assert_same_state(its.state_dict(), optimizer.state_dict(), "the copy's state")


def test_a_copy_has_all_that_the_optimizer_itself_keeps() -> None:
    """An attribute that is added to it must be copied, too."""
    model = Model()
    optimizer = optimizer_of(model)
    own = vars(optimizer).keys() - vars(torch.optim.AdamW(model.parameters())).keys()
    assert "_masters" in own
    assert own <= vars(copy.deepcopy(optimizer)).keys()


def test_a_pickled_optimizer_does_not_grow_by_the_square_of_its_parameters() -> None:
    """What is noted for each parameter is a row of one table, which must not be pickled with each of them."""

    def size(count: int) -> int:
        params = [nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(count)]
        return len(pickle.dumps(MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1)))

    assert size(400) < 4.5 * size(100)


def _quantized(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if isinstance(param, QuantizedTensor)]


def test_a_copied_optimizer_takes_more_groups_and_loads() -> None:
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    twin, its = copy.deepcopy((model, optimizer))
    its.load_state_dict(copied(optimizer.state_dict()))
    more = nn.Linear(8, 8, dtype=torch.bfloat16)
    its.add_param_group({"params": list(more.parameters())})
    train(nn.ModuleList([twin, more]), its, 1)
    assert len(optimizer.param_groups) == 1
    assert len(_quantized(twin)) == 1
    assert dict(entries(dcp_state.get_optimizer_state_dict(nn.ModuleList([twin, more]), its)))
