"""Looks, before anything is changed, for what would go wrong when layers are run apart from their model.

check_alone   a layer computes on a batch what it computes where its model calls it
check_all     the model calls its layers in a way that can be recorded to the end
"""

from typing import Any

import torch
from torch import Tensor

from layerwise.inputs.replaying.replay import LayerOutput, LayerReplay
from layerwise.inputs.values.calls import is_value
from layerwise.inputs.values.stores import has_same_bits, is_ordinary
from layerwise.inputs.values.structure import flatten


def check_alone(replay: LayerReplay) -> None:
    """Compare what a layer computes on the first batch alone, and inside its model's forward.

    A layer also sees what no argument tells: attributes and buffers that the model writes, contexts that it enters.
    Here the layer is called with the recorded inputs, but at its place in a forward of the model, where it sees all of
    this. It is held already, so this costs two calls of it, and nothing is gathered.

    Raises:
        NotImplementedError: the outputs differ, and not just because of kernels that never add in the same order.
    """
    if not len(replay):
        return
    alone = replay.run_and_compare(0)
    inside = replay.recorder.run_in_place(replay.stage.index, 0, lambda: replay.run_and_compare(0))
    if inside is None or _is_same(alone, inside):
        return
    devices = {leaf.device for leaf in flatten(alone)[0] if isinstance(leaf, Tensor)} | {torch.device("cpu")}
    # They differ. Two more runs tell whether the layer alone repeats itself. The first one does not count: the model
    # has run since, and may have left something behind.
    again, before = replay.run_and_compare(0), _random_states(devices)
    if not _is_same(again, replay.run_and_compare(0)):
        if any(not torch.equal(one, other) for one, other in zip(before, _random_states(devices), strict=True)):
            raise _refusal(replay, "draws random numbers", "switch that off")
        # Some kernels of other devices add in an order that changes from call to call, which no user can mend.
        if devices != {torch.device("cpu")}:
            return
        raise _refusal(replay, "changes something of its own in each call, and computes otherwise then", "mend that")
    raise _refusal(
        replay,
        "computes something else when it is called alone on the arguments that the model gives it: it sees something "
        "that the model sets in its forward (a buffer, an attribute, a global, a context)",
        "pass that as an argument, or a tensor in one",
    )


def check_all(replay: LayerReplay, *, behind: bool) -> None:
    """Go through the calls of all layers on the first batch, as if each returned what the first one does.

    Args:
        replay: of the first layer, which is held.
        behind: what comes after the layers is needed, too.

    Raises:
        NotImplementedError: the model cannot be recorded; what a later layer would be refused for.
    """
    if not len(replay):
        return
    output = replay.run(0)
    try:
        replay.recorder.rehearse(output.returned, output.written, behind=behind)
    except NotImplementedError:
        raise
    # The layers may return something else than the first one, with which the model then fails; that proves nothing.
    except Exception:  # noqa: BLE001
        pass


def _refusal(replay: LayerReplay, what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(
        f"layer {replay.stage.name} {what}. A layer is run on one batch after the other, several times, so this would "
        f"give other results than the model; {instead}, or use layers=() for the whole model at once"
    )


def _is_same(one: LayerOutput, other: LayerOutput) -> bool:
    leaves, others = flatten(one)[0], flatten(other)[0]
    return len(leaves) == len(others) and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # Bits of a DTensor or a sparse tensor are not compared here, so such an output is let through.
        return not is_ordinary(one) or has_same_bits(one, other)
    return bool(one == other) if is_value(one) else type(one) is type(other)


def _random_states(devices: set[torch.device]) -> list[Tensor]:
    """Return the states of the default generators of some devices, in one order."""
    return [
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        for device in sorted(devices, key=str)
    ]
