"""States in host memory: masters and moments between steps; weights and gradients stay on the device.

    kept       CompressedStates.remainders    a master's remainder, or the fp32 master itself: in host memory, pinned
               CompressedStates.loaded        likewise
               the inner optimizer's state    likewise, but for numbers (`step`), which stay where they were made
    a step     for one chunk of weights at a time, copies on the device stand in these very places (see streaming.py)

So whoever computes on a chunk finds everything on the device, and whoever reads the state dict finds host memory: a
DTensor on the parameter's mesh whose local tensor is on the CPU, as FSDP2's CPU offload has them. On a machine without
an accelerator copies are made all the same, from memory that is not pinned.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import dtensor_like, local_of
from qtensor.optim.compressed.entries import on_device
from qtensor.optim.compressed.masters import as_sharded, first_master, stand_in
from qtensor.optim.compressed.states import CompressedStates
from qtensor.optim.compressed.storage import is_quantized
from qtensor.optim.compressed.streaming import Lanes, stream
from qtensor.states.kinds import MASTER
from qtensor.tensor.quantized_tensor import QuantizedTensor

CHUNK = 2**25  # elements; the first chunk's copies in and the last one's copies out are hidden behind nothing

State = MutableMapping[Tensor, Any]  # of the inner optimizer


@dataclass
class HostStates(CompressedStates):
    """The states of one optimizer, in host memory between its steps."""

    lanes: Lanes = field(default_factory=Lanes)
    chunk: int = CHUNK

    def hold(self, param: Tensor) -> Tensor | None:
        """Hold a parameter's master, unless the parameter is its own; see CompressedStates."""
        if super().hold(param) is not None:
            self.remainders[param] = self.home(self.remainders[param], param)
        elif is_quantized(param) or param.dtype != torch.float32:
            self.remainders[param] = self.home(first_master(param), param)
        else:
            return None
        return stand_in(param)

    def load(self, param: Tensor, master: Tensor | None, remainder: Tensor | None) -> None:
        """Take a master; see CompressedStates. One that is held in fp32 is loaded in place, or begins anew here."""
        if self.holds_fp32(param):
            self.remainders[param] = self.home(first_master(param), param)
            return
        before = self.remainders[param]
        super().load(param, master, remainder)
        if self.remainders[param] is not before:
            self.remainders[param] = self.home(self.remainders[param], param)
        if param in self.loaded:
            self.loaded[param] = self.home(self.loaded[param], param)

    def shown(self, param: Tensor, master: Tensor) -> dict[str, Tensor]:
        """Return the entries of a state dict that hold a master."""
        return {MASTER: self.remainders[param]} if self.holds_fp32(param) else super().shown(param, master)

    def home(self, value: Tensor, param: Tensor) -> Tensor:
        """Return a copy of a tensor of a parameter's shard in host memory; the copy has ended."""
        made = _room_for(value, param)
        _copy(value, made)
        return made

    def house(self, state: State, masters: Mapping[Tensor, Tensor]) -> None:
        """Bring home what was made elsewhere: by the inner optimizer before a step, by a copy or a pickle."""
        for param, key in masters.items():
            for held in (self.remainders, self.loaded):
                if param in held and not _is_home(held[param], param):
                    held[param] = self.home(held[param], param)
            for name, value in (state.get(key) or {}).items():
                if _is_kept(value) and not _is_home(value, param):
                    state[key][name] = self.home(value, param)

    def settle(self) -> None:
        """Wait for what is on its way home."""
        self.lanes.settle()

    def brought(
        self,
        chunks: Sequence[list[Tensor]],
        state: State,
        masters: Mapping[Tensor, Tensor],
        *,
        write: bool = True,
    ) -> Iterator[list[Tensor]]:
        """Yield each chunk of weights while what is kept of them is on their device.

        Args:
            chunks: the weights.
            state: of the inner optimizer.
            masters: parameter -> what it is called there.
            write: whether what was computed is copied back; otherwise nothing has happened.
        """
        return stream(chunks, lambda chunk: _Chunk(self, chunk, state, masters, write=write), self.lanes)


@dataclass
class _Moved:
    """What is kept of one weight: at home, and its copies on the device (tensors alone)."""

    param: Tensor
    key: Tensor
    master: Tensor | None
    loaded: Tensor | None
    state: dict[str, Any] | None
    copies: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return local_of(self.param).device


class _Chunk:
    """The way of some weights' states to the device and back; a `streaming.Visit`."""

    def __init__(
        self,
        states: HostStates,
        params: Sequence[Tensor],
        state: State,
        masters: Mapping[Tensor, Tensor],
        *,
        write: bool,
    ) -> None:
        self._states, self._state, self._writes = states, state, write
        self._guests = [
            _Moved(param, key := masters[param], states.remainders.get(param), states.loaded.get(param), state.get(key))
            for param in params
        ]
        self.devices: Sequence[torch.device] = list(dict.fromkeys(guest.device for guest in self._guests))

    def bring(self) -> None:
        """Make the copies; see `streaming.Visit`."""
        for guest in self._guests:
            own = {f".{name}": value for name, value in (guest.state or {}).items() if _is_kept(value)}
            own |= {"master": guest.master} if guest.master is not None else {}
            own |= {"loaded": guest.loaded} if guest.loaded is not None else {}
            with self._states.lanes.aside(guest.device):
                guest.copies = {name: on_device(value, guest.param, copy=True) for name, value in own.items()}

    def arrive(self) -> None:
        """Put them where states are looked up."""
        for guest in self._guests:
            if guest.master is not None:
                self._states.remainders[guest.param] = guest.copies["master"]
            if guest.loaded is not None:
                self._states.loaded[guest.param] = guest.copies["loaded"]
            if guest.state is not None:
                copies = {name: guest.copies.get(f".{name}", value) for name, value in guest.state.items()}
                self._state[guest.key] = copies

    def give_back(self) -> None:
        """Copy back, if that is asked for."""
        if not self._writes:
            self.abandon()
            return
        for guest in self._guests:
            now = self._state.get(guest.key)
            with self._states.lanes.aside(guest.device):
                if guest.master is not None:
                    _copy(self._states.remainders[guest.param], guest.master, non_blocking=True)
                if now is not None:
                    before = guest.state or {}
                    guest.state = {name: self._sent(guest, name, one, before.get(name)) for name, one in now.items()}
            # a step that wrote the weight has taken what was loaded
            if guest.param not in self._states.loaded:
                guest.loaded = None
        self.abandon()

    def abandon(self) -> None:
        """Put what is at home back in its place."""
        for guest in self._guests:
            for held, home in ((self._states.remainders, guest.master), (self._states.loaded, guest.loaded)):
                if home is not None:
                    held[guest.param] = home
            if guest.state is not None:
                self._state[guest.key] = guest.state
            else:
                self._state.pop(guest.key, None)
            guest.copies = {}

    def _sent(self, guest: _Moved, name: str, value: Any, home: Any) -> Any:
        """Return host memory that a value of the new state is on its way to; numbers stay where they are."""
        if not _is_kept(value):
            return value
        if value is not guest.copies.get(f".{name}"):
            for part in _parts(value):
                self._states.lanes.lend(part, guest.device)
        target = home if _is_alike(home, value) else _room_for(value, guest.param)
        _copy(value, target, non_blocking=True)
        return target


def _parts(value: Tensor) -> list[Tensor]:
    local = local_of(value).detach()
    return list(local.parts().values()) if isinstance(local, QuantizedTensor) else [local]


def _copy(source: Tensor, target: Tensor, *, non_blocking: bool = False) -> None:
    for part, room in zip(_parts(source), _parts(target), strict=True):
        room.copy_(part, non_blocking=non_blocking)


def _room_for(value: Tensor, param: Tensor) -> Tensor:
    """Return uninitialised host memory for a tensor of a parameter's shard, pinned if the parameter is on a device."""
    local = local_of(value)
    pin = local_of(param).device.type != "cpu"
    if isinstance(local, QuantizedTensor):
        parts = {name: _empty(part, pin=pin) for name, part in local.parts().items()}
        room: Tensor = QuantizedTensor.from_parts(parts, local.recipe, local.dtype)
    else:
        room = _empty(local, pin=pin)
    return dtensor_like(room, value) if isinstance(value, DTensor) else as_sharded(room, param)


def _empty(like: Tensor, *, pin: bool) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)


def _is_kept(value: object) -> bool:
    """Return whether an entry of a state is kept at home: all but numbers, which `step` and its like are."""
    return isinstance(value, Tensor) and value.ndim > 0


def _is_home(value: Tensor, param: Tensor) -> bool:
    pinned = local_of(param).device.type != "cpu"
    return all(part.device.type == "cpu" and (part.is_pinned() or not pinned) for part in _parts(value))


def _is_alike(home: object, value: Tensor) -> bool:
    if not isinstance(home, Tensor):
        return False
    own, other = local_of(home), local_of(value)
    recipes = [one.recipe if isinstance(one, QuantizedTensor) else None for one in (own, other)]
    return (own.dtype, own.shape, type(home)) == (other.dtype, other.shape, type(value)) and recipes[0] == recipes[1]
