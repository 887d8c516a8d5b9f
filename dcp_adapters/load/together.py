"""What the ranks of a load have together: each may hold different tensors, as stages of a pipeline and experts do.

A tensor of the checkpoint that one rank's target lacks may be another's. So each rank says with its plan in which
containers of its target it lacks some, and the coordinator, which sees what all ranks read, judges: a tensor of these
must be read by some rank. Nothing more is sent, or computed, where every rank has all.

A load that leaves out what only one side has (allow_partial_load=True) must find at least one tensor of one rank: it
would succeed and leave all as it was.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_adapters.load.compare import OWN, Container, LoadTarget, not_among, owners_in
from dcp_adapters.load.coverage import Parts
from dcp_adapters.plain.words import few_of, in_lines
from dcp_adapters.records.manifest import Manifest

SHOWN = 3  # names in a sentence
MISFIT = "the checkpoint does not fit the target; nothing has been loaded:"


class RankShare(NamedTuple):
    """What one rank says.

    lacks: the containers of its target in which it has not all tensors of the checkpoint. unread: tensors that it has
    without reading any of them, since its shard is empty. finds: whether the checkpoint has any of its tensors;
    sought: their names, if it has none.
    """

    lacks: frozenset[Container]
    unread: tuple[str, ...]
    finds: bool
    sought: tuple[str, ...]

    @staticmethod
    def of(target: LoadTarget, lacks: Mapping[str, Container], items: Sequence[ReadItem], parts: Parts) -> "RankShare":
        """Return the share of a rank that lacks these tensors, and reads `items` into `parts` (see coverage.py)."""
        # an empty shard reads nothing, but its rank has the tensor all the same
        unread = tuple(key if isinstance(key, str) else key.fqn for key, shape in parts.items() if 0 in shape)
        reads = any(item.type is not LoadItemType.BYTE_IO and item.storage_index.fqn not in OWN for item in items)
        finds = bool(reads or unread)
        return RankShare(frozenset(lacks.values()), unread, finds, () if finds else tuple(target.entries))


def refuse_lacking(
    shares: Sequence[RankShare], items: Sequence[Sequence[ReadItem]], metadata: Metadata, manifest: Manifest | None
) -> None:
    """Raise ValueError for tensors that no rank has; a pure function.

    Args:
        shares: of all ranks.
        items: what each of them reads.
        metadata: of the checkpoint.
        manifest: of the checkpoint.
    """
    containers = frozenset[Container]().union(*(share.lacks for share in shares))
    if not containers:
        return
    had = {item.storage_index.fqn for own in items for item in own}.union(*(share.unread for share in shares))
    owners = owners_in(manifest)
    lost = not_among(had | {owners[key] for key in had if key in owners}, containers, metadata, manifest)
    if lost:
        raise ValueError(MISFIT + "".join(f"\n  {only_stored(name)}" for name in lost))


def refuse_nothing(shares: Sequence[RankShare]) -> None:
    """Raise ValueError if the checkpoint has no tensor of any rank, though some have tensors."""
    sought = sorted({name for share in shares for name in share.sought})
    if sought and not any(share.finds for share in shares):
        raise ValueError(
            f"the checkpoint has none of the {len(sought)} tensors of the target ({few_of(sought, SHOWN)}); nothing "
            "has been loaded. Look whether names have a prefix more or less than in the checkpoint"
        )


def only_stored(name: str) -> str:
    """Return what is said of a tensor that no rank has."""
    return f"{name}: only the checkpoint has it; the target has no such tensor (allow_partial_load=True leaves it out)"


def misfit(problems: Sequence[str], lacks: Collection[str], ranks: int) -> ValueError:
    """Return the error of a rank whose own tensors do not fit; other ranks, if any, may have what it lacks."""
    if ranks == 1:
        return ValueError(MISFIT + "".join(f"\n  {each}" for each in sorted([*problems, *map(only_stored, lacks)])))
    elsewhere = [f"{name}: only the checkpoint has it, or another rank" for name in sorted(lacks)]
    own = "".join(f"\n  {problem}" for problem in problems)
    return ValueError(MISFIT + own + (in_lines(elsewhere) if elsewhere else ""))
