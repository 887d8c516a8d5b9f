"""States shown in another form than they are kept in, so that a checkpoint of that form finds room in a state dict.

    master      kept as a remainder, shown in fp32       exactly what it is
                kept in fp32, shown as a remainder       zeros: room for what is loaded; the master itself does not fit
    moments     of either kind                           what they are, rounded to the nearest where that form has less

`load_state_dict` takes what was loaded into them (entries.converted_states, master_states.load_masters), in any form.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import dtensor_around
from qtensor.optim.compressed.entries import converted, is_moment, on_device
from qtensor.optim.compressed.masters import expand_master, new_remainder, recipe_mark
from qtensor.optim.compressed.states import COUNT, SEED
from qtensor.optim.compressed.storage import Storage
from qtensor.states.kinds import MARK, MASTER, OF_MASTERS, REMAINDER

if TYPE_CHECKING:
    from qtensor.optim.compressed.states import CompressedStates


@torch.no_grad()
def show_as(
    state: MutableMapping[Tensor, dict[str, Any]], expected: Storage, states: "CompressedStates | None"
) -> None:
    """Exchange the entries of `state` for those of the expected form; kept tensors are left as they are.

    Args:
        state: parameter -> its entries, as they are kept.
        expected: the form.
        states: what says how they are kept; None: in fp32.
    """
    for param, entries in state.items():
        masters = {name: entries[name] for name in OF_MASTERS if name in entries}
        others = {name: one for name, one in entries.items() if name not in masters and not is_moment(name, one, param)}
        state[param] = {
            **_master_as(param, masters, expected, states),
            **converted(entries, param, expected.moment_of(param), keep=True, home=states.home if states else None),
            **others,
        }


def _master_as(
    param: Tensor, masters: Mapping[str, Tensor], expected: Storage, states: "CompressedStates | None"
) -> Mapping[str, Tensor]:
    if not masters or expected.has_remainder(param) == (REMAINDER in masters):
        return masters
    if REMAINDER not in masters:
        room = new_remainder(param)
        return {REMAINDER: room if states is None else states.home(room, param), MARK: recipe_mark(param)}
    assert states is not None
    master = expand_master(param, on_device(states.remainders[param], param))
    if isinstance(param, DTensor):
        master = dtensor_around(master, param.device_mesh, param.placements, param.shape)
    return {MASTER: states.home(master, param)}


def hide_counters(groups: Iterable[dict[str, Any]], expected: Storage) -> None:
    """Take these options out of the groups if checkpoints of the expected form have none."""
    if not expected.compresses:
        for group in groups:
            group.pop(SEED, None)
            group.pop(COUNT, None)


def restore_counters(groups: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
    """Give groups these options again, where nothing was loaded."""
    for group, options in zip(groups, before, strict=True):
        for name, value in options.items():
            group.setdefault(name, value)
