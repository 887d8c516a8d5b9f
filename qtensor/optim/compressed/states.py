"""What an optimizer keeps of masters and moments between steps, in less than fp32 or in host memory (host.py).

A step on them is step.py's; state dicts show them (`shown`) and bring them back (`load`).
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.wrappers import plain_name
from qtensor.optim.compressed.masters import new_remainder, recipe_mark, say_initial_value, stand_in
from qtensor.optim.compressed.places import Places
from qtensor.optim.compressed.storage import Storage
from qtensor.states.kinds import CHUNK_ELSEWHERE, MARK, MASTER, REMAINDER

SEED, COUNT = "states_seed", "states_step"  # options of a group, by which draws are counted


@dataclass
class CompressedStates:
    """The compressed states of one optimizer.

    Attributes:
        storage: what they are kept in.
        remainders: parameter -> its master's remainder (see `WORD`), sharded as it is; in host memory (host.py) also
            masters in fp32.
        loaded: parameter -> fp32 master that was loaded and that no step has compressed yet.
        streams: parameter -> what names its draws, the same on every mesh.
        chunk: how many elements are expanded at a time, elsewhere than on a CPU.
    """

    storage: Storage
    remainders: dict[Tensor, Tensor] = field(default_factory=dict)
    loaded: dict[Tensor, Tensor] = field(default_factory=dict)
    streams: dict[Tensor, str] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    chunk: int = CHUNK_ELSEWHERE

    def begin_group(self, group: dict[str, Any], number: int) -> None:
        """Give a group of the optimizer the options that its draws are counted by."""
        if self.storage.compresses:
            group.setdefault(SEED, 0)
            group.setdefault(COUNT, 0)
        names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
        # a wrapper around the model does not change what is trained
        self.streams |= dict(zip(group["params"], map(plain_name, names), strict=True))

    @staticmethod
    def counters_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the options of each group that draws are counted by."""
        return [{name: group[name] for name in (SEED, COUNT) if name in group} for group in groups]

    def hold(self, param: Tensor) -> Tensor | None:
        """Hold a parameter's master as a remainder, if it is to be one.

        Returns:
            what stands for it in the inner optimizer's groups; None: it is kept in fp32.
        """
        if not self.storage.has_remainder(param):
            return None
        self.remainders[param] = new_remainder(param)
        return stand_in(param)

    def holds_fp32(self, param: Tensor) -> bool:
        """Return whether a parameter's master is held here in fp32."""
        return param in self.remainders and self.remainders[param].dtype == torch.float32

    def home(self, value: Tensor, param: Tensor) -> Tensor:
        """Return a tensor of a parameter's shard where states are kept."""
        return value

    def settle(self) -> None:
        """Wait for what is on its way there."""

    def house(self, state: MutableMapping[Tensor, Any], masters: Mapping[Tensor, Tensor]) -> None:
        """Bring what was made or copied elsewhere there; see `HostStates`."""

    def brought(
        self,
        chunks: Sequence[list[Tensor]],
        state: MutableMapping[Tensor, Any],
        masters: Mapping[Tensor, Tensor],
        *,
        write: bool = True,
    ) -> Iterator[list[Tensor]]:
        """Yield each chunk of weights while what is kept of them is on their device; see `HostStates`."""
        yield from chunks

    def forget(self, param: Tensor) -> bool:
        """Take what a weight's bytes say for its master, since others wrote them; False: it is not held here."""
        if param not in self.remainders:
            return False
        self.load(param, None, None)
        return True

    def load(self, param: Tensor, master: Tensor | None, remainder: Tensor | None) -> None:
        """Take a master that was saved in fp32, or as a remainder; None: what the weight's bytes say.

        One in fp32 is kept as it is until the next step: the weight that it belongs to may be loaded later.
        """
        self.loaded.pop(param, None)
        # what torch loads in place is this very remainder: no zeros before it is read
        if remainder is not None and master is None:
            self.remainders[param].copy_(remainder)
            return
        # a new one: a state dict that is being read into may hold the other, with what was read
        self.remainders[param] = new_remainder(param)
        if master is not None:
            self.loaded[param] = torch.zeros_like(param, dtype=torch.float32).detach().copy_(master)

    def shown(self, param: Tensor, master: Tensor) -> dict[str, Tensor]:
        """Return the entries of a state dict that hold a master."""
        if param not in self.remainders:
            return {} if master is param else {MASTER: master}
        if param in self.loaded:
            return {MASTER: self.loaded[param]}
        say_initial_value(param, self.remainders[param])
        return {REMAINDER: self.remainders[param], MARK: recipe_mark(param)}
