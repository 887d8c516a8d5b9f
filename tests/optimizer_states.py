"""One round trip of an optimizer's state, for one process and for ranks: saved, loaded, saved again, trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtensor import MasterWeightOptimizer, QuantizedTensor

INNER: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),  # has a state before its first step
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
UNSHARDED = {"adafactor": (torch.optim.Adafactor, {"lr": 0.01})}  # torch's own cannot step shards
FORMS = ("torch", "nested", "flattened")


def options_of(form: str) -> dcp_state.StateDictOptions:
    return dcp_state.StateDictOptions(flatten_optimizer_state_dict=form == "flattened")


def get(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state in one of the forms, copied."""
    if form == "torch":
        return copied(optimizer.state_dict())
    return copied(dcp_state.get_optimizer_state_dict(model, optimizer, options=options_of(form)))


def put(form: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if form == "torch":
        optimizer.load_state_dict(copied(state))
    else:
        dcp_state.set_optimizer_state_dict(model, optimizer, copied(state), options=options_of(form))


def copied(value: Any) -> Any:
    """Like copy.deepcopy, which some torch cannot do to DTensors."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested state; an empty dict or list is a leaf."""
    if isinstance(value, dict | list) and value:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from entries(one, f"{name}.{key}")
    else:
        yield name, value


def local(tensor: Tensor) -> Any:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all bytes on this rank, by name."""
    found = {}
    for name, param in model.named_parameters():
        shard = local(param.detach())
        for part, value in shard.parts().items() if isinstance(shard, QuantizedTensor) else [("", shard)]:
            found[f"{name}.{part}"] = value.clone().reshape(-1).view(torch.uint8)
    return found


def assert_same_model(found: nn.Module, expected: dict[str, Tensor], what: str) -> None:
    own = bytes_of(found)
    assert own.keys() == expected.keys(), what
    different = [name for name, value in expected.items() if not torch.equal(own[name], value)]
    assert not different, f"{what}: {different}"


def assert_same_state(found: Any, expected: Any, what: str) -> None:
    own, other = dict(entries(found)), dict(entries(expected))
    assert own.keys() == other.keys(), f"{what}: {sorted(own.keys() ^ other.keys())}"
    for name, value in other.items():
        if isinstance(value, Tensor):
            assert own[name].dtype == value.dtype, f"{what}: {name}"
            assert own[name].shape == value.shape, f"{what}: {name}"
            ours, theirs = (_plain_parts(one) for one in (own[name], value))
            assert ours.keys() == theirs.keys(), f"{what}: {name}"
            assert all(torch.equal(ours[part], theirs[part]) for part in theirs), f"{what}: {name}"
        else:
            assert own[name] == value, f"{what}: {name}"


def _plain_parts(value: Tensor) -> dict[str, Tensor]:
    """The tensors whose values an entry holds on this rank: parts as bytes."""
    own = local(value.detach())
    if own.dtype == torch.float16:  # words of remainders, some of which are NaN
        own = own.view(torch.int16)
    return (
        {name: part.view(torch.uint8) for name, part in own.parts().items()}
        if isinstance(own, QuantizedTensor)
        else {"": own}
    )


def masters_in(state: Any) -> int:
    return sum(name.endswith("master_weight") and isinstance(value, Tensor) for name, value in entries(state))


def round_trip(
    build: Callable[[], nn.Module], train: Callable[[nn.Module, Any, int], None], inner: Any, form: str, steps: int
) -> None:
    """Raise AssertionError unless a saved state comes back whole, twice, and training goes on to the same bytes."""
    kind, options = inner
    model = build()
    optimizer = MasterWeightOptimizer(kind, model.parameters(), **options)
    for step in range(steps):
        train(model, optimizer, step)
    weights = bytes_of(model)
    state = get(form, model, optimizer)
    assert_same_model(model, weights, "taking the state")
    low = sum(param.dtype != torch.float32 for param in model.parameters())
    assert masters_in(state) == (low if steps or form != "torch" or kind is torch.optim.Adagrad else masters_in(state))

    resumed, again = model, optimizer
    for generation in ("first", "second"):  # the second is loaded from what was loaded, without a step between
        other = build()
        other.load_state_dict(copied(resumed.state_dict()))
        fresh = MasterWeightOptimizer(kind, other.parameters(), **options)
        put(form, other, fresh, get(form, resumed, again))
        assert_same_model(other, weights, f"loading the {generation} time")
        assert_same_state(get(form, other, fresh), state, f"saved after loading the {generation} time")
        resumed, again = other, fresh
    for step in range(steps, steps + 2):
        train(model, optimizer, step)
        train(resumed, again, step)
    assert_same_model(resumed, bytes_of(model), "trained on")
    assert_same_state(get(form, resumed, again), get(form, model, optimizer), "saved after training on")
