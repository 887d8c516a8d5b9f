"""States of a MasterWeightOptimizer on their way back from a state dict: whose they are, and whether masters are there.

torch knows three ways to say that a parameter has no state: it is not named; its state is empty; or, in what
`set_optimizer_state_dict(flatten_optimizer_state_dict=True)` makes of a checkpoint that does not name it, each entry of
its state is an empty dict. The first and the third say it of that parameter. The second torch also says of parameters
that do have a state in the checkpoint, where the optimizer was new and gradients existed: what was saved is lost then,
and a low-precision parameter without its master is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MASTER", "check_masters", "saved_states"]

MASTER = "master_weight"


def saved_states(params: Sequence[Tensor], state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter that has one, by the order of the parameters in all groups."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    states = state_dict["state"]
    return {
        param: states[index]
        for param, index in zip(params, ids, strict=False)
        if index in states and not _hollow(states[index])
    }


def check_masters(masters: Mapping[Tensor, Tensor], saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Raise ValueError where a saved state lacks the master that its parameter needs, or has one of another shape."""
    for number, (param, values) in enumerate(saved.items()):
        if masters[param] is param:
            continue
        found = values.get(MASTER)
        if isinstance(found, Tensor) and found.shape == param.shape:
            continue
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


def _hollow(state: Any) -> bool:
    return bool(state) and all(isinstance(value, dict) and not value for value in state.values())
