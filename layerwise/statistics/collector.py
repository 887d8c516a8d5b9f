"""What reaches the linears of a layer: statistics of their inputs over all batches of all ranks.

    collector = Collector(targets, algorithm.needs)
    for batch in batches:                       # each rank its own, as many as it has
        with collector.batch():
            layer.forward(...)                  # computes what it always computes
    statistics = collector.agree(group)         # on all ranks; see statistics.py

Linears that take the same tensor in a batch form a group, and its statistics are computed once (`Watch` sees the
products; see there for what counts as one). Batches may group differently (a branch taken for some of them only): then
groups are split until the linears of each part were together in every batch, and the sums of a batch go to all parts.
So no statistic depends on the order of batches or on who ran them. Sums are exact for the same reason (`ExactSum`).

No collective happens inside a batch, so ranks may have any number of batches, or none. If the data of one rank is at
fault (values that are not finite, a weight used in a way that cannot be followed), that is noted until `agree`, which
raises it on all ranks alike.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.algorithms.algorithm import COLUMNS, CROSS, HESSIAN, LOCAL_HESSIAN
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.stages.experts import ExpertBlock
from layerwise.stages.targets import linear_names
from layerwise.statistics.accumulated import Accumulated, BatchStatistics, measure
from layerwise.statistics.every_token import EveryToken
from layerwise.statistics.lineage import Lineage
from layerwise.statistics.statistics import Names, Part, Statistics
from layerwise.statistics.unquantized_inputs import Partner, UnquantizedInputs, origin_of
from layerwise.statistics.watching import PRODUCTS_SEEN, Product, Watch, WeightsByStorage

SAMPLE_BATCHES = 4  # of which rows are kept
_SHOWN = 5  # linears that one message names


@dataclass(eq=False)
class _Seen:
    """One input in the current batch."""

    x: Tensor  # kept alive, so that no other tensor gets its id
    measured: BatchStatistics
    was: Tensor | None = None  # its values at that time, if torch counts no writes
    names: list[str] = field(default_factory=list)
    partner: Partner | None = None
    paired: bool = False  # whether its partner was looked for


@dataclass(eq=False)
class _Pairing:
    """What finds the partners of the current batch."""

    partners: UnquantizedInputs
    lineage: Lineage = field(default_factory=Lineage)
    uses: Counter[str] = field(default_factory=Counter)  # of each linear, so far

    def partner(self, product: Product, rows: Tensor, wanted: Collection[str]) -> Partner | None:
        """Return the one input that all linears of a product took in the unquantized model; None if there is none."""
        origin = origin_of(self.lineage, product)
        found = [self.partners.partner(name, self.uses[name], origin, rows) for name in wanted]
        self.uses.update(wanted)
        return found[0] if all(one is found[0] for one in found) else None


@dataclass(frozen=True)
class _Counts:
    """What ranks tell each other about one group of names."""

    tokens: int
    broken: int
    broken_batches: int
    overflowing: int  # batches whose products left the range of fp32
    unpaired: int


class Collector:
    """Statistics of the inputs of weights while a layer runs on batches.

    Args:
        targets: fqn -> the live weight, [N, K] or experts [E, N, K], plain and contiguous, or a transposed view of one.
        needs: COLUMNS, LOCAL_HESSIAN, HESSIAN, CROSS (with HESSIAN); the amax is always collected.
        only: names of the linears whose inputs' Hessian and CROSS are wanted, all by default. (Each is [K, K]; without
            memory for all of a layer's at once, replay the layer once for each part.)
        apart: fqn -> its kind; linears of different kinds form different groups, even if they take the same input.
        blocks: whose experts see every token. Experts form groups of their own, though their inputs are the same.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        needs: frozenset[str],
        *,
        only: Collection[str] | None = None,
        apart: Mapping[str, Hashable] | None = None,
        blocks: Sequence[ExpertBlock] = (),
    ) -> None:
        self._targets = WeightsByStorage(targets)
        self._needs = needs
        self._linears = {fqn: linear_names(fqn, weight.shape) for fqn, weight in targets.items()}
        places = {fqn: (weight.shape[-1], weight.device) for fqn, weight in targets.items()}
        self._places = {name: places[fqn] for fqn, names in self._linears.items() for name in names}  # K and device
        unknown = (needs - {COLUMNS, LOCAL_HESSIAN, HESSIAN, CROSS}) | (set(only or ()) - self._places.keys())
        if unknown:
            raise ValueError(f"no statistic and no linear of these targets: {', '.join(sorted(unknown))}")
        self._only = frozenset(self._places if only is None else only)
        self._kinds: dict[str, Hashable] = {
            name: kind for fqn, kind in (apart or {}).items() for name in self._linears[fqn]
        }
        self._blocks = blocks
        for expert in (expert for block in blocks for expert in block.experts):
            self._kinds |= {name: (self._kinds.get(name), expert.names) for name in expert.names}
        self._order = {name: index for index, name in enumerate(self._places)}
        self._accumulated: dict[Names, Accumulated] = {}
        self._samples: dict[str, list[Tensor]] = {}
        self._unfollowed: dict[str, str] = {}

    @contextmanager
    def batch(self, partners: UnquantizedInputs | None = None) -> Iterator[None]:
        """Inside, one batch runs, and is collected. A batch that raises leaves nothing behind.

        With CROSS, `partners` holds the inputs of the same batch in the unquantized model.

        Use `torch.no_grad()` rather than `torch.inference_mode()`: in the latter torch counts no writes, so each input
        is copied to see whether it is changed in place between two linears.
        """
        seen: dict[tuple[int, ...], _Seen] = {}
        pairing = None if partners is None else _Pairing(partners)
        every = EveryToken(self._blocks, lambda product: self._take(seen, product, pairing), partial(_settling, seen))
        with (
            Watch(self._targets, every.take) as watch,
            nullcontext() if pairing is None else pairing.lineage,
            every.hooks(),
        ):
            yield
        self._unfollowed |= watch.unfollowed
        for key in list(seen):
            one = seen.pop(key)  # so that what is made of the next is alone
            names = tuple(sorted(one.names, key=self._order.__getitem__))
            with torch.inference_mode(mode=False), torch.no_grad():
                self._accumulated.setdefault(names, Accumulated()).add(one.measured)
            for name in names:
                kept = self._samples.setdefault(name, [])
                if len(kept) < SAMPLE_BATCHES:
                    kept.append(one.measured.sample)

    def partners(self) -> UnquantizedInputs | None:
        """Return what is to hold the partners of each batch; None if no partners are needed."""
        return UnquantizedInputs(self._targets, self._only, self._blocks) if CROSS in self._needs else None

    def samples(self, name: str) -> Tensor | None:
        """Return up to 16 input rows of a linear from each of this rank's first 4 batches, [n, K]; None without any."""
        found = self._samples.get(name)
        return torch.cat(found) if found else None

    def agree(self, group: dist.ProcessGroup | None) -> Statistics:
        """Return the groups of all ranks together, with statistics over all batches; the collector is empty by then.

        Call it once, after the last batch, on all ranks of the group (None: a single process, no collectives).

        Raises:
            RuntimeError: on all ranks alike, if an input held values that are not finite, or if a weight was used
                in a way that cannot be followed.
        """
        reports, unfollowed = self._gather(group)
        self._check(reports, unfollowed)
        # They belong to the statistics from here on, which free a group's after its total.
        accumulated, self._accumulated = self._accumulated, {}
        parts = []
        for names, keys in partition(list(reports), list(self._order), self._kinds):
            needs = self._needs if not self._only.isdisjoint(names) else self._needs - {HESSIAN, CROSS}
            tokens = sum(reports[key].tokens for key in keys)
            unpaired = sum(reports[key].unpaired for key in keys)
            parts.append(Part(names, tuple(keys), tokens, needs, *self._places[names[0]], unpaired))
        reached = {name for part in parts for name in part.names}
        parts += [Part((name,), (), 0, frozenset(), *self._places[name]) for name in self._order if name not in reached]
        parts.sort(key=lambda part: self._order[part.names[0]])
        return Statistics(parts, accumulated, group)

    def _take(self, seen: dict[tuple[int, ...], _Seen], product: Product, pairing: _Pairing | None) -> None:
        if not product.rows.numel():
            return
        x = product.x
        key = _input_key(seen, product)
        # Statistics outlive the batch: no inference tensors, which could not be added to later.
        with torch.inference_mode(mode=False), torch.no_grad(), full_precision(x.device):
            rows = product.rows.detach().reshape(-1, product.rows.shape[-1])
            if key not in seen:
                seen[key] = _Seen(x, measure(rows, self._needs), x.clone() if x.is_inference() else None)
            one = seen[key]
            one.names += [name for name in product.names if name not in one.names]
            found = one.measured
            wanted = HESSIAN in self._needs and not found.broken and not self._only.isdisjoint(product.names)
            if wanted and found.rows is None and HESSIAN not in found.sums:
                found.take_hessian(rows)
            if wanted and pairing is not None:
                partner = pairing.partner(product, rows, self._only.intersection(product.names))
                # Linears that share an input here may have had different ones there; such an input
                # has no partner.
                if not one.paired or (one.partner is not partner and found.unpaired == 0):
                    found.take_cross(rows, None if one.paired or partner is None else partner.rows)
                one.partner, one.paired = partner, True

    def _gather(self, group: dist.ProcessGroup | None) -> tuple[dict[Names, _Counts], dict[str, str]]:
        own = {
            names: (
                one.tokens,
                one.broken,
                one.broken_batches,
                max((s.broken for s in one.sums.values()), default=0),
                one.unpaired,
            )
            for names, one in self._accumulated.items()
        }
        # Names and numbers, not tensors: ranks may have seen different groups, or none.
        everyone = [(own, self._unfollowed)]
        if group is not None:
            everyone = [everyone[0]] * group.size()
            dist.all_gather_object(everyone, (own, self._unfollowed), group=group)
        unfollowed: dict[str, str] = {}
        counts: dict[Names, list[int]] = {}
        for theirs, functions in everyone:
            unfollowed |= functions
            for names, values in theirs.items():
                counts[names] = [a + b for a, b in zip(counts.get(names, (0,) * len(values)), values, strict=True)]
        return {names: _Counts(*values) for names, values in counts.items()}, unfollowed

    def _check(self, reports: Mapping[Names, _Counts], unfollowed: Mapping[str, str]) -> None:
        """Raise if the data of some rank is at fault."""
        problems = []
        for names, report in sorted(reports.items(), key=lambda item: self._order[item[0][0]]):
            if report.broken:
                values = f"{_count(report.broken, 'value')} that {'is' if report.broken == 1 else 'are'} not finite"
                what = f"its input holds {values} in {_count(report.broken_batches, 'batch', 'es')}"
            elif report.overflowing:
                what = f"the squares of its input overflow fp32 in {_count(report.overflowing, 'batch', 'es')}"
            else:
                continue
            problems.append(f"{', '.join(names)}: {what}")
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise RuntimeError(
                f"{'; '.join(problems[:_SHOWN])}{more}. Look for an overflow in the layers before it (load the model "
                "in bfloat16 or float32), for broken weights, or for a batch that is masked as a whole"
            )
        reached = {name for names in reports for name in names}
        for fqn, function in unfollowed.items():
            if reached.isdisjoint(self._linears[fqn]):
                raise RuntimeError(
                    f"{fqn}: calibration can not see its inputs, for the layer uses it through {function}(); "
                    f"{PRODUCTS_SEEN}"
                )


def partition(
    keys: Sequence[Names], names: Sequence[str], kinds: Mapping[str, Hashable] | None = None
) -> list[tuple[Names, list[Names]]]:
    """Split groups that overlap: names of one kind that are in exactly the same `keys` form one group, with these keys.

    The result depends on the set of keys alone, so every rank comes to the same groups. Names in no key are left out.
    """
    groups: dict[tuple[Hashable, tuple[Names, ...]], list[str]] = {}
    # Ranks have met the groups in different orders.
    ordered = sorted(keys)
    for name in names:
        fate = tuple(key for key in ordered if name in key)
        if fate:
            groups.setdefault(((kinds or {}).get(name), fate), []).append(name)
    return [(tuple(members), list(fate)) for (_, fate), members in groups.items()]


@contextmanager
def _settling(seen: dict[tuple[int, ...], _Seen], tokens: Tensor) -> Iterator[None]:
    """Inside, inputs come that nothing outside takes, but for `tokens`: afterwards they are measured, and freed."""
    before = {*seen}
    yield
    for key in [key for key, one in seen.items() if key not in before and one.x is not tokens]:
        one = seen.pop(key)
        one.x, one.was, one.partner = tokens, None, None
        seen[-1, id(one)] = one  # the next tensor may get the id of the one that is freed


def _input_key(seen: Mapping[tuple[int, ...], _Seen], product: Product) -> tuple[int, ...]:
    """Identify the input that a product takes: an object in its present state."""
    x = product.x
    if not x.is_inference():
        return id(x), x._version, *product.part
    count = 0
    while (known := seen.get((id(x), count, *product.part))) is not None:
        if known.was is not None and torch.equal(known.was, x):
            break
        count += 1
    return id(x), count, *product.part


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
