"""States of a MasterWeightOptimizer: what `state` shows of masters, and what a state dict brings back.

torch says in three ways that a parameter has no state:

    missing   the state dict does not name the parameter
    empty     its state is an empty dict
    hollow    each entry of its state is an empty dict: `set_optimizer_state_dict(flatten_optimizer_state_dict=True)`
              makes this of a checkpoint that does not name the parameter

Missing and hollow can be trusted. Empty cannot: torch also hands it on for parameters whose state is in the checkpoint,
if the optimizer was new and gradients existed. The saved state is lost then, so an empty state of a low-precision
parameter, which needs its master, is refused.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import local_of
from qtensor.optim.masters import refill
from qtensor.states.kinds import MASTER, OF_MASTERS, REMAINDER, ROOT, WORD
from qtensor.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor.optim.compressed.states import CompressedStates


def saved_states(params: Sequence[Tensor], state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Return the saved state of each parameter that has one, by the order of the parameters in all groups."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    states = state_dict["state"]
    return {
        param: states[index]
        for param, index in zip(params, ids, strict=False)
        if index in states and not _hollow(states[index])
    }


def check_masters(masters: Mapping[Tensor, Tensor], saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Raise ValueError if a saved state lacks the master that its parameter needs, or has one that does not fit."""
    for number, (param, values) in enumerate(saved.items()):
        # a parameter in fp32 is its own master, which state dicts do not name
        if masters[param] is param:
            continue
        found = values.get(MASTER, values.get(REMAINDER))
        if MASTER not in values and isinstance(found, Tensor) and found.dtype != WORD:
            raise ValueError(
                f"MasterWeightOptimizer.load_state_dict: the {REMAINDER} of state {number} is {found.dtype}, expected "
                f"{WORD}; something has cast it, and its bits are lost: load it as it was saved"
            )
        if isinstance(found, Tensor) and found.shape == param.shape:
            why = _uncopied(found, masters[param])
            if why is None and MASTER not in values:
                from qtensor.optim.compressed.masters import mark_problem

                why = mark_problem(param, values)
            if why is None:
                continue
            what = "master weight" if MASTER in values else REMAINDER
            raise ValueError(f"MasterWeightOptimizer.load_state_dict: the {what} of state {number} {why}")
        what = f"a master weight of shape {tuple(found.shape)}" if isinstance(found, Tensor) else "no master weight"
        cause = "was it saved by another optimizer?"
        if not values:
            cause = (
                "its state is empty, which torch's set_optimizer_state_dict hands on from a flattened state dict where "
                "gradients exist before the first step; call optimizer.zero_grad() first"
            )
        raise ValueError(
            f"MasterWeightOptimizer.load_state_dict: state {number} holds {what}, expected one of shape "
            f"{tuple(param.shape)}; {cause}"
        )


@torch.no_grad()
def load_masters(
    masters: Mapping[Tensor, Tensor],
    saved: Mapping[Tensor, Mapping[str, Any]],
    states: "CompressedStates | None" = None,
) -> dict[Tensor, Tensor]:
    """Set all masters to what was saved; a master without a saved state starts anew from its parameter.

    Returns:
        the remainders that were saved of masters that are kept in fp32; they need the bytes of the weight, which may be
        loaded later.
    """
    remainders: dict[Tensor, Tensor] = {}
    for param, master in masters.items():
        if master is param:
            continue
        values, held = saved.get(param, {}), master
        if states is not None and param in states.remainders:
            if not states.holds_fp32(param):
                states.load(param, values.get(MASTER), values.get(REMAINDER))
                continue
            held = states.remainders[param]
        if MASTER in values:
            held.copy_(values[MASTER])
        else:
            refill(held, param)
            if REMAINDER in values:
                remainders[param] = values[REMAINDER].clone()
    return remainders


def has_compressed(saved: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Return whether some saved state has entries of compressed states (see compressed/entries.py)."""
    return any(
        name.endswith(ROOT) or (isinstance(value, Tensor) and is_compressed(value))
        for values in saved.values()
        for name, value in values.items()
    )


def is_compressed(value: Tensor) -> bool:
    """Return whether a tensor of a state is kept in less than fp32."""
    return isinstance(local_of(value), QuantizedTensor) or value.dtype == torch.bfloat16


def for_inner(groups: Sequence[dict[str, Any]], saved: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict that the inner optimizer loads: saved states without masters, the groups' options."""
    states: dict[int, dict[str, Any]] = {}
    numbered = []
    number = 0  # torch counts the parameters of all groups
    for group in groups:
        first = number
        for number, param in enumerate(group["params"], start=first):
            if param in saved:
                states[number] = {key: value for key, value in saved[param].items() if key not in OF_MASTERS}
        number = first + len(group["params"])
        numbered.append({**options_of(group), "params": list(range(first, number))})
    return {"state": states, "param_groups": numbered}


def forget_looks(state: MutableMapping[Tensor, Any], masters: Mapping[Tensor, Tensor]) -> None:
    """Drop the empty states that merely reading `state[p]` creates (torch reads it so, too)."""
    for param, master in masters.items():
        if master is not param and not state.get(param, True):
            del state[param]
    if not any(state.values()):
        state.clear()


def publish(
    state: MutableMapping[Tensor, Any],
    masters: Mapping[Tensor, Tensor],
    inner: Mapping[Tensor, Any],
    params: Iterable[Tensor],
    shown: Callable[[Tensor, Tensor], Mapping[str, Tensor]] | None = None,
) -> None:
    """Fill `state` with what state_dict() must hold; references only.

    `shown` tells what stands for a master, where that is not the master itself.

    That is the masters and inner states of `params` and of all parameters for which the inner optimizer has a state.
    """
    named = set(params)
    for param, master in masters.items():
        entries = inner.get(master)
        if entries is not None or param in named:
            own = shown(param, master) if shown is not None else {} if master is param else {MASTER: master}
            state[param] = {**own, **(entries or {})}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def names_of(group: Mapping[str, Any], number: int) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) of a group; parameters given without names are named after the group's number."""
    names = group.get("param_names") or [f"group {number}"] * len(group["params"])
    return list(zip(names, group["params"], strict=True))


def _uncopied(found: Tensor, master: Tensor) -> str | None:
    """Return why torch could not copy a saved master into one of its shape; None if it can."""
    if found.is_meta or found.layout is not torch.strided:
        return "has no values to copy (it is on the meta device, or sparse); load it into memory first"
    if isinstance(found, DTensor) != isinstance(master, DTensor):
        kinds = ["sharded" if isinstance(each, DTensor) else "no DTensor" for each in (found, master)]
        return (
            f"is {kinds[0]}, the parameter is {kinds[1]}; torch.distributed.checkpoint.state_dict."
            "set_optimizer_state_dict distributes it"
        )
    if isinstance(found, DTensor) and isinstance(master, DTensor) and found.device_mesh != master.device_mesh:
        return (
            f"is on {found.device_mesh}, the parameter on {master.device_mesh}; distribute it on the parameter's mesh"
        )
    return None


def _hollow(state: Any) -> bool:
    return bool(state) and all(isinstance(value, dict) and not value for value in state.values())
