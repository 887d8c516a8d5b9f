"""Linears without an adapter whose scale follows that of adapted ones, and who shares a scale with whom in a model.

`merge_` gives weights that share one scale (`share_scales`) the one that all of them ask for, once they are merged. So
a merge of q_proj may requantize k_proj, which nobody adapts, and its forwards must see that, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_hooks.ranks.scale_partners import Partners, check_complete
from fsdp_hooks.torch_private import local_of
from qtensor.merging.mergeable import Hooked, why_not_alone, why_not_linear
from qtensor.merging.merged_parts import seen_of, together
from qtensor.merging.through_merge import How, Keep, Merge, through_merge, why_unfit


class Switch(Protocol):
    """Whether forwards go through the merge."""

    on: bool

    def look(self, name: str) -> None:
        """Raise RuntimeError if a backward computes a forward again, and not as it was."""


class Member(Protocol):
    """One of the layers whose weights share a scale."""

    name: str

    def active(self) -> list[str]:
        """Return the names of the adapters that its forward would add."""

    def merging(self) -> Merge:
        """Return its weight and what would be merged into it, as they are at this moment."""


@dataclass(eq=False)
class Follower(Hooked):
    """A linear without an adapter.

    members: all whose weights share its scale, itself among them.
    """

    name: str
    linear: nn.Linear
    keep: Keep
    switch: Switch
    members: Sequence[Member] = field(default=())

    def active(self) -> list[str]:
        """Return no names."""
        return []

    def merging(self) -> Merge:
        """Return its weight."""
        return Merge(self.linear.weight, [], ())

    def hook(self) -> Iterator[RemovableHandle]:
        """Register the hook, before others that look at the output; behind it FSDP2 may reshard the linear."""
        yield self.linear.register_forward_hook(self.exchange, with_kwargs=True, prepend=True)

    def exchange(self, linear: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Tensor) -> Tensor | None:
        """Return the output under the scale of the merged weights; what was computed without them is left."""
        self.switch.look(self.name)
        if not self.switch.on or not any_active(self.members):
            return None
        shared = shared_of(self.name, self.members)
        x = args[0] if args else kwargs["input"]
        return through_merge(x, linear.weight, linear.bias, [], How((), self.keep), shared)


def any_active(members: Sequence[Member]) -> bool:
    """Return whether any forward of these would add an adapter."""
    return any(member.active() for member in members)


def shared_of(name: str, members: Sequence[Member]) -> Tensor | None:
    """Return what the weights of a group have together once they are merged; None if there is no group.

    Raises:
        RuntimeError: a weight, or a factor of its update, is not at hand while the layer `name` computes.
    """
    if not members:
        return None
    seen = []
    for member in members:
        weight, factors, scalings = member.merging()
        if any(isinstance(each, DTensor) for each in (weight, *factors)):
            raise RuntimeError(
                f"merge_aware: {name} shares one scale with {member.name}, which is not gathered while that computes; "
                f"let fully_shard take a module around {' and '.join(each.name for each in members)}"
            )
        if (why := why_unfit(weight)) is not None:
            raise RuntimeError(f"merge_aware: {name} shares one scale with {member.name}, whose weight {why}")
        seen.append(seen_of(weight, factors, scalings))
    return together(seen)


def join(
    model: nn.Module,
    names: Mapping[Tensor, Sequence[str]],
    bases: Mapping[int, Any],
    follower: Callable[[str, nn.Linear], Follower],
) -> tuple[list[Follower], list[str]]:
    """Tell adapted layers who shares the scales of their weights.

    Args:
        model: that has them.
        names: of its parameters.
        bases: id of a base layer -> the member for its adapted layer, which gets its `members`.
        follower: makes the member for a linear without an adapter, from its name.

    Returns:
        These, and what keeps partners from being merged together, in words; then no layer was told anything.
    """
    groups = [group for group in _partners_in(model).values() if any(id(module) in bases for _, _, module in group)]
    problems = [why for group in groups for why in _why_not_together(group, names, bases)]
    followers: list[Follower] = []
    for group in groups if not problems else ():
        members: list[Any] = [bases.get(id(module)) or follower(name, module) for name, _, module in group]
        for member in members:
            member.members = members
        followers += [member for member in members if isinstance(member, Follower)]
    return followers, problems


Group = list[tuple[str, Partners, Any]]  # the name of a module, whom its weight shares a scale with, the module


def _partners_in(model: nn.Module) -> dict[tuple[str, ...], Group]:
    """Return who shares a scale in a model; a module that stands in two places has the first of its names."""
    found: dict[tuple[str, ...], Group] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            own = getattr(local_of(param), "_partners", None)
            if own is not None:
                found.setdefault(own.names, []).append((name, own, module))
    return found


def _why_not_together(group: Group, names: Mapping[Tensor, Sequence[str]], bases: Mapping[int, Any]) -> Iterator[str]:
    """Yield what keeps the partners of adapted layers from being merged together, and what to do."""
    try:
        check_complete("merge_aware", [own for _, own, _ in group], "the parameters of this model")
    except ValueError as error:
        yield str(error).removeprefix("merge_aware: ")
    adapted = next(name for name, _, module in group if id(module) in bases)
    for name, _, module in group:
        if id(module) in bases:
            continue
        whose = f"{name}, which shares one scale with {adapted}"
        yield from (f"{whose}: {why}" for why in why_not_linear(module))
        if isinstance(module, nn.Linear):
            yield from (f"{whose}: {why}" for why in why_not_alone(names[module.weight]))
