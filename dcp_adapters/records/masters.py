"""Which tensor does a master belong to? Told from names, shapes and dtypes alone.

`P.state.F.master_weight`, or `.master_remainder`, belongs to the tensor named F, or whose name ends in `.F`. If several
do (a moving average beside the model, say), one of them must fit. If none does, names are compared without what
wrappers of modules put into them: an optimizer's states and a state dict may have been taken inside and outside of
torch.compile, say.

A master for which no tensor is found is told with the reason, and so are optimizer states under numbers instead of
names (`optimizer.state_dict()` as it is): a comparison that leaves them out has proved nothing of them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from fsdp_hooks.wrappers import plain_name
from qtensor.states.kinds import MASTER, REMAINDER, WORD

STATE = "state"  # what stands before a parameter's name in an optimizer's state
SHOWN = 3  # names in a sentence

NUMBERED = (
    "they are kept under numbers instead of names; save what "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns"
)
NO_PARAMETER = f"no part of their names is {STATE!r}, so whose they are is not known"
NAMELESS = "no tensor of low precision has the name that their state has, or ends in it"
TWICE = "several tensors have the name of their state once the names of wrappers are left out"
OTHER_SHAPE = "the tensor of their name has another shape"
OTHER_DTYPE = f"they are neither fp32 masters nor {WORD} remainders"


@dataclass(frozen=True)
class Masters:
    """Which masters there are.

    beside: tensor -> the masters it may belong to. left: master -> why no tensor is compared with it.
    """

    beside: Mapping[str, list[str]]
    left: Mapping[str, str]

    @staticmethod
    def among(entries: Mapping[str, Entry], also: Collection[str] = ()) -> "Masters":
        """Find the masters among tensors, and the tensors that they may belong to.

        Args:
            entries: the tensors, by name.
            also: names of tensors that had masters, whatever they are now.
        """
        masters = {name: _owners(name) for name, entry in entries.items() if _is_master(name, entry)}
        lows = {
            name: entry.shape
            for name, entry in entries.items()
            if name in also or entry.recipe is not None or entry.dtype in (torch.bfloat16, torch.float16)
        }
        beside: dict[str, list[str]] = {}
        left: dict[str, str] = {}
        names = _Names(lows, {owner for owners in masters.values() for owner in owners})
        for master, owners in masters.items():
            found, why = names.of(entries[master], owners)
            for name in found:
                beside.setdefault(name, []).append(master)
            if not found:
                left[master] = why
        return Masters(beside, left)


def explain_left_out(left: Mapping[str, str], total: int) -> list[tuple[str, str]]:
    """Explain why masters are left out: for each reason some of them, and a sentence with their number."""
    by_reason: dict[str, list[str]] = {}
    for master, why in left.items():
        by_reason.setdefault(why, []).append(master)
    return [
        (few_of(masters, SHOWN), f"{len(masters)} of {total} masters were not compared: {why}")
        for why, masters in by_reason.items()
    ]


class _Names:
    """The tensors that masters may belong to, by what their names end in.

    Args:
        lows: tensor -> shape.
        owners: what their names may end in.
    """

    def __init__(self, lows: Mapping[str, tuple[int, ...]], owners: Collection[str]) -> None:
        self.lows = lows
        forms: list[Callable[[str], str]] = [str, plain_name, _without_data_parallel]
        self.forms = [(form, _by_ends(lows, {form(owner) for owner in owners}, form)) for form in forms]

    def of(self, master: Entry, owners: list[str]) -> tuple[list[str], str]:
        """Return the tensors beside a master, or none and why."""
        if master.dtype != (WORD if is_remainder(master.name) else torch.float32):
            return [], OTHER_DTYPE
        if not owners:
            return [], NO_PARAMETER
        named = False
        for form, ends in self.forms:
            for owner in owners:
                candidates = ends.get(form(owner), [])
                found = [name for name in candidates if self.lows[name] == master.shape]
                # `a._orig_mod.w` beside `a.w`: which of them the optimizer had can not be known from names.
                if len({form(name) for name in found}) < len(found):
                    return [], TWICE
                if found:
                    return found, ""
                named = named or bool(candidates)
        # Only a name that nothing has is taken for a number: a parameter may be called "0" (nn.ParameterList).
        if owners[-1].isdecimal():
            return [], NUMBERED
        return [], OTHER_SHAPE if named else NAMELESS


def is_remainder(master: str) -> bool:
    """Return whether a master of this name is kept as what its weight's bytes do not say."""
    return master.endswith(f".{REMAINDER}")


def _is_master(name: str, entry: Entry) -> bool:
    return entry.recipe is None and (name.endswith(f".{MASTER}") or is_remainder(name))


def _owners(master: str) -> list[str]:
    """List what the parameter of a master may be called, the longest name first."""
    path = master.removesuffix(f".{MASTER}").removesuffix(f".{REMAINDER}").split(".")
    return [".".join(path[place + 1 :]) for place, name in enumerate(path) if name == STATE and place + 1 < len(path)]


def _without_data_parallel(name: str) -> str:
    """Drop the names of wrappers, and DistributedDataParallel's prefix, which a module of that name has, too."""
    return plain_name(name).removeprefix("module.")


def _by_ends(names: Iterable[str], owners: Collection[str], form: Callable[[str], str]) -> dict[str, list[str]]:
    """Return owner -> the names that are it in this form, or end in it behind a dot."""
    found: dict[str, list[str]] = {}
    for name in names:
        rest = form(name)
        while rest:
            if rest in owners:
                found.setdefault(rest, []).append(name)
            rest = rest.partition(".")[2]
    return found
