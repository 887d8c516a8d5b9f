"""The statistics of a stage's inputs over all ranks: facts that every rank has, and totals that one rank has at a time.

    facts    names, tokens and amaxes of every group: small, and the same on all ranks
    total    the sums of one group, reduced to the rank that decides about it; every rank takes part

What ranks have collected stays where it is until somebody asks for a total. So beside it there is only one group's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.algorithms.algorithm import COLUMNS, CROSS, HESSIAN, LOCAL_HESSIAN, SUB_BLOCK, Inputs
from layerwise.statistics.accumulated import Accumulated
from layerwise.statistics.exact_sum import ExactSum, totals

Names = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Names that took the same input in every batch of every rank.

    Attributes:
        names: in the order of the targets.
        keys: the groups of single batches that they were in.
        tokens: rows of the input, over all ranks; 0 if none came.
        needs: which statistics are there.
        columns: K.
        device: of the statistics.
        unpaired: rows without a partner, over all ranks.
    """

    names: Names
    keys: tuple[Names, ...]
    tokens: int
    needs: frozenset[str]
    columns: int
    device: torch.device
    unpaired: int = 0


@dataclass(frozen=True, eq=False)
class Facts:
    """What every rank knows of the input of a group.

    Attributes:
        names: the linears that take it.
        tokens: its rows over all batches of all ranks.
        amax: fp32 [], its largest magnitude; None if there are no tokens.
        column_amax: fp32 [K], that of each column; None if it was not asked for, or there are no tokens.
    """

    names: Names
    tokens: int
    amax: Tensor | None = None
    column_amax: Tensor | None = None


class Statistics:
    """All groups of a stage, those without tokens, too, in the order of the targets.

    Args:
        parts: the groups, the same on all ranks.
        accumulated: what this rank has collected; it is used up.
        group: the ranks; None for a single process.

    Attributes:
        facts: one for each group.
    """

    def __init__(
        self, parts: Sequence[Part], accumulated: dict[Names, Accumulated], group: dist.ProcessGroup | None
    ) -> None:
        self._parts, self._accumulated, self._group = parts, accumulated, group
        # If groups were split, the sums of one batch belong to several; they are freed after the last.
        self._uses = Counter(key for part in parts for key in part.keys)
        with torch.inference_mode(mode=False), torch.no_grad():
            self.facts = self._facts()

    def total(self, index: int, owner: int, *, keep: bool = False) -> Inputs | None:
        """Return the statistics of one group over all batches of all ranks, on rank `owner`; None on the others.

        Call it on all ranks alike, once for each group; more often with `keep`. None also if there are no tokens.

        Args:
            index: of the group.
            owner: its rank in the group; 0 in a single process.
            keep: it will be asked for again.

        Raises:
            RuntimeError: on all ranks alike, for more batches than a sum can hold.
        """
        part, facts = self._parts[index], self.facts[index]
        if not part.tokens:
            return None
        with torch.inference_mode(mode=False), torch.no_grad():
            own = self._take(part, keep=keep)
            empty = {what: ExactSum(shape, part.device) for what, shape in _shapes(part).items()}
            sums = {what: own.sums.get(what, none) for what, none in empty.items()}
            factors = [(2 if what in (HESSIAN, CROSS) else 1) / part.tokens for what in sums]
            found = totals(list(sums.values()), self._group, factors, owner=owner)
            if found is None:
                return None
            by_name = dict(zip(sums, found, strict=True))
            assert facts.amax is not None
            return Inputs(
                part.tokens,
                facts.amax.clone(),
                column_amax=None if facts.column_amax is None else facts.column_amax.clone(),
                column_mean=by_name.get(COLUMNS),
                local_hessian=by_name.get(LOCAL_HESSIAN),
                hessian=by_name.get(HESSIAN),
                cross=by_name.get(CROSS),
                unpaired=part.unpaired,
            )

    def _facts(self) -> list[Facts]:
        """Return the amaxes over all ranks, by one all-reduce."""
        reached = [part for part in self._parts if part.tokens]
        amaxes: list[Tensor] = []
        for part in reached:
            width = 1 + part.columns * (COLUMNS in part.needs)
            # For a rank without tokens of this group: no magnitude is smaller.
            own = [torch.zeros(width, dtype=torch.float32, device=part.device)]
            own += [one.amax for key in part.keys if (one := self._accumulated.get(key)) and one.amax is not None]
            amaxes.append(torch.stack(own).amax(dim=0))
        if amaxes:
            message = torch.cat(amaxes)
            if self._group is not None:
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
            amaxes = list(message.split([own.numel() for own in amaxes]))
        # Clones, so that no group keeps the memory of the whole message.
        found = {
            part.names: Facts(
                part.names,
                part.tokens,
                amax[0].clone(),
                amax[1:].clone() if COLUMNS in part.needs else None,
            )
            for part, amax in zip(reached, amaxes, strict=True)
        }
        return [found.get(part.names) or Facts(part.names, 0) for part in self._parts]

    def _take(self, part: Part, *, keep: bool) -> Accumulated:
        """Take what this rank has for a group. What other groups will ask for stays as it is."""
        shared = {key for key in part.keys if keep or self._uses[key] > 1}
        if not keep:
            self._uses.subtract(part.keys)
        present = [key for key in part.keys if key in self._accumulated]
        if len(present) == 1 and present[0] not in shared:
            taken = self._accumulated.pop(present[0])
        else:
            # A merge into new sums, since other groups still need these as they are.
            taken = Accumulated()
            for key in present:
                taken.add(self._accumulated[key] if key in shared else self._accumulated.pop(key))
        if HESSIAN in part.needs:
            taken.multiply()
        return taken


def _shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """Return the shape of each sum, in one order on all ranks."""
    k = part.columns
    # Ranks reduce sums by position, and a rank without tokens has none to take the order from.
    shapes = {COLUMNS: (k,), HESSIAN: (k, k), CROSS: (k, k), LOCAL_HESSIAN: (-(-k // SUB_BLOCK), SUB_BLOCK, SUB_BLOCK)}
    return {what: shape for what, shape in shapes.items() if what in part.needs}
