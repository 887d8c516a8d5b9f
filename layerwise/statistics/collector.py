"""What reaches the linears of a layer: statistics of their inputs over all batches of all ranks.

    collector = Collector(targets, algorithm.needs)
    for batch in batches:                       # each rank its own, as many as it has
        with collector.batch():
            layer.forward(...)                  # computes what it always computes
    groups = collector.reduce(group)            # on all ranks, the same result on each

Linears that take the same tensor in a batch form a group, and its statistics are computed once (`Watch` sees the
products; see there for what counts as one). Batches may group differently (a branch taken for some of them only): then
groups are split until the linears of each part were together in every batch, and the sums of a batch go to all parts.
So no statistic depends on the order of batches or on who ran them. Sums are exact for the same reason (`ExactSum`).

No collective happens inside a batch, so ranks may have any number of batches, or none. If the data of one rank is at
fault (values that are not finite, a weight used in a way that cannot be followed), that is noted until `reduce`, which
raises it on all ranks alike.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from layerwise.algorithms.algorithm import COLUMNS, HESSIAN, LOCAL_HESSIAN, SUB_BLOCK, Inputs
from layerwise.algorithms.arithmetic import full_precision
from layerwise.stages.targets import linear_names
from layerwise.statistics.exact_sum import ExactSum, totals
from layerwise.statistics.watching import Product, Watch, WeightsByStorage

SAMPLE_ROWS = 16  # kept of an input in each of the first batches
SAMPLE_BATCHES = 4
_SHOWN = 5  # linears that one message names

Names = tuple[str, ...]
Groups = Sequence[tuple[Names, Inputs | None]]  # linears that take one input, and its statistics


@dataclass(eq=False)
class _Seen:
    """One input in the current batch."""

    x: Tensor  # kept alive, so that no other tensor gets its id
    measured: "_Measured"
    was: Tensor | None = None  # its values at that time, where torch counts no writes
    names: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Measured:
    """Statistics of one input in one batch; `sums`: name of a statistic -> what is added up over batches."""

    tokens: int
    sample: Tensor
    broken: int = 0  # values that are not finite; then nothing below is set
    amax: Tensor | None = None  # fp32 [1], or with COLUMNS [1 + K]: that of the whole input, then of each column
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Accumulated:
    """Statistics of the inputs of one group of names over this rank's batches."""

    tokens: int = 0
    broken: int = 0
    broken_batches: int = 0
    amax: Tensor | None = None
    sums: dict[str, ExactSum] = field(default_factory=dict)

    def add(self, other: "_Measured | _Accumulated") -> None:
        """Add what was measured in one batch, or in the batches of another group."""
        self.tokens += other.tokens
        self.broken += other.broken
        batches = other.broken_batches if isinstance(other, _Accumulated) else int(other.broken > 0)
        self.broken_batches += batches
        if other.amax is not None:
            self.amax = other.amax if self.amax is None else torch.maximum(self.amax, other.amax)
        for what, value in other.sums.items():
            if what not in self.sums:
                self.sums[what] = ExactSum(value.shape, value.device)
            if isinstance(value, ExactSum):
                self.sums[what].merge(value)
            else:
                self.sums[what].add(value)


@dataclass(frozen=True)
class _Counts:
    """What ranks tell each other about one group of names."""

    tokens: int
    broken: int
    broken_batches: int
    overflowing: int  # batches whose products left the range of fp32


class Collector:
    """Statistics of the inputs of weights while a layer runs on batches.

    Args:
        targets: fqn -> the live weight, [N, K] or experts [E, N, K], plain and contiguous.
        needs: COLUMNS, LOCAL_HESSIAN, HESSIAN; the amax is always collected.
        only: names of the linears whose inputs' Hessian is wanted, all by default. (A Hessian is [K, K]; without memory
            for all of a layer's Hessians at once, replay the layer once for each part.)
    """

    def __init__(
        self, targets: Mapping[str, Tensor], needs: frozenset[str], *, only: Collection[str] | None = None
    ) -> None:
        self._targets = WeightsByStorage(targets)
        self._needs = needs
        self._linears = {fqn: linear_names(fqn, weight.shape) for fqn, weight in targets.items()}
        places = {fqn: (weight.shape[-1], weight.device) for fqn, weight in targets.items()}
        self._places = {name: places[fqn] for fqn, names in self._linears.items() for name in names}  # K and device
        unknown = (needs - {COLUMNS, LOCAL_HESSIAN, HESSIAN}) | (set(only or ()) - self._places.keys())
        if unknown:
            raise ValueError(f"no statistic and no linear of these targets: {', '.join(sorted(unknown))}")
        self._only = frozenset(self._places if only is None else only)
        self._order = {name: index for index, name in enumerate(self._places)}
        self._accumulated: dict[Names, _Accumulated] = {}
        self._samples: dict[str, list[Tensor]] = {}
        self._unfollowed: dict[str, str] = {}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context manager around the forward of one batch. A batch that raises leaves nothing behind.

        Use `torch.no_grad()` rather than `torch.inference_mode()`: in the latter torch counts no writes, so each input
        is copied to see whether it is changed in place between two linears.
        """
        seen: dict[tuple[int, ...], _Seen] = {}
        with Watch(self._targets, lambda product: self._take(seen, product)) as watch:
            yield
        self._unfollowed |= watch.unfollowed
        for one in seen.values():
            names = tuple(sorted(one.names, key=self._order.__getitem__))
            self._accumulated.setdefault(names, _Accumulated()).add(one.measured)
            for name in names:
                kept = self._samples.setdefault(name, [])
                if len(kept) < SAMPLE_BATCHES:
                    kept.append(one.measured.sample)

    def samples(self, name: str) -> Tensor | None:
        """[n, K]: up to 16 rows of a linear's input from each of this rank's first 4 batches; None without any."""
        found = self._samples.get(name)
        return torch.cat(found) if found else None

    def reduce(self, group: dist.ProcessGroup | None) -> list[tuple[Names, Inputs | None]]:
        """The groups in the order of the targets, each with the statistics over all batches of all ranks.

        Call it once, after the last batch, on all ranks of the group (None: a single process, no collectives). A name
        that no token reached is a group of its own, with None.

        Raises:
            RuntimeError: on all ranks alike, where an input held values that are not finite, or where a weight was used
                in a way that cannot be followed.
        """
        reports, unfollowed = self._gather(group)
        self._check(reports, unfollowed)
        parts = partition(list(reports), list(self._order))
        taken = [self._merged(names, keys) for names, keys in parts]
        self._accumulated.clear()
        with torch.inference_mode(mode=False), torch.no_grad():
            names = [names for names, _ in parts]
            tokens = [sum(reports[key].tokens for key in keys) for _, keys in parts]
            inputs = dict(zip(names, self._inputs(names, taken, tokens, group), strict=True))
        starved = self._order.keys() - {name for names in inputs for name in names}
        groups = [*inputs.items(), *(((name,), None) for name in starved)]
        return sorted(groups, key=lambda item: self._order[item[0][0]])

    def _take(self, seen: dict[tuple[int, ...], _Seen], product: Product) -> None:
        if not product.rows.numel():
            return
        x = product.x
        key = _input_key(seen, product)
        # Statistics outlive the batch: no inference tensors, which could not be added to later.
        with torch.inference_mode(mode=False), torch.no_grad(), full_precision(x.device):
            if key not in seen:
                rows = product.rows.detach().reshape(-1, product.rows.shape[-1])
                seen[key] = _Seen(x, _measure(rows, self._needs), x.clone() if x.is_inference() else None)
            one = seen[key]
            one.names += [name for name in product.names if name not in one.names]
            sums = one.measured.sums
            wanted = HESSIAN in self._needs and not one.measured.broken and not self._only.isdisjoint(product.names)
            if wanted and HESSIAN not in sums:
                wide = _fp32_rows(product.rows)
                sums[HESSIAN] = wide.t() @ wide

    def _gather(self, group: dist.ProcessGroup | None) -> tuple[dict[Names, _Counts], dict[str, str]]:
        own = {
            names: (one.tokens, one.broken, one.broken_batches, max((s.broken for s in one.sums.values()), default=0))
            for names, one in self._accumulated.items()
        }
        everyone = [(own, self._unfollowed)]
        if group is not None:
            everyone = [everyone[0]] * group.size()
            dist.all_gather_object(everyone, (own, self._unfollowed), group=group)
        unfollowed: dict[str, str] = {}
        counts: dict[Names, list[int]] = {}
        for theirs, functions in everyone:
            unfollowed |= functions
            for names, values in theirs.items():
                counts[names] = [a + b for a, b in zip(counts.get(names, (0, 0, 0, 0)), values, strict=True)]
        return {names: _Counts(*values) for names, values in counts.items()}, unfollowed

    def _check(self, reports: Mapping[Names, _Counts], unfollowed: Mapping[str, str]) -> None:
        """Raise where the data of some rank is at fault."""
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
                    f"{fqn}: calibration can not see its inputs, for the layer uses it through {function}(); expected "
                    "F.linear(x, w), x @ w.T, torch.bmm(x, w.mT) or F.grouped_mm(x, w.mT). For experts of "
                    'a transformers model, model.set_experts_implementation("eager") helps; else exclude it'
                )

    def _merged(self, names: Names, keys: Sequence[Names]) -> _Accumulated:
        """What this rank has for a group; sums that only other ranks have are present, but empty."""
        if len(keys) == 1 and keys[0] in self._accumulated:
            merged = self._accumulated.pop(keys[0])
        else:
            merged = _Accumulated()
            for key in keys:
                if key in self._accumulated:
                    merged.add(self._accumulated[key])
        wanted = self._needs if not self._only.isdisjoint(names) else self._needs - {HESSIAN}
        k, device = self._places[names[0]]
        shapes = {COLUMNS: (k,), LOCAL_HESSIAN: (-(-k // SUB_BLOCK), SUB_BLOCK, SUB_BLOCK), HESSIAN: (k, k)}
        # in one order on all ranks, and without Hessians that nobody asked for
        empty = {what: ExactSum(shapes[what], device) for what in sorted(wanted)}
        merged.sums = {what: merged.sums.get(what, none) for what, none in empty.items()}
        return merged

    def _inputs(
        self,
        groups: Sequence[Names],
        taken: Sequence[_Accumulated],
        tokens: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> list[Inputs]:
        """The amaxes of all ranks, by one all-reduce, and the totals over all ranks, divided by the tokens."""
        amaxes: list[Tensor] = []
        for names, one in zip(groups, taken, strict=True):
            k, device = self._places[names[0]]
            none = torch.zeros(1 + k * (COLUMNS in self._needs), dtype=torch.float32, device=device)
            amaxes.append(none if one.amax is None else one.amax)
        if amaxes:
            message = torch.cat(amaxes)
            if group is not None:
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
            amaxes = list(message.split([own.numel() for own in amaxes]))
        sums = [value for one in taken for value in one.sums.values()]
        factors = [
            (2 if what == HESSIAN else 1) / count for one, count in zip(taken, tokens, strict=True) for what in one.sums
        ]
        results = iter(totals(sums, group, factors))
        inputs = []
        for one, amax, count in zip(taken, amaxes, tokens, strict=True):
            found = {what: next(results) for what in one.sums}
            inputs.append(
                Inputs(
                    count,
                    amax[0].clone(),
                    column_amax=amax[1:].clone() if COLUMNS in found else None,
                    column_mean=found.get(COLUMNS),
                    local_hessian=found.get(LOCAL_HESSIAN),
                    hessian=found.get(HESSIAN),
                )
            )
        return inputs


def partition(keys: Sequence[Names], names: Sequence[str]) -> list[tuple[Names, list[Names]]]:
    """Split groups that overlap: names that are in exactly the same `keys` form one group, returned with these keys.

    The result depends on the set of keys alone, so every rank comes to the same groups. Names in no key are left out.
    """
    groups: dict[tuple[Names, ...], list[str]] = {}
    ordered = sorted(keys)
    for name in names:
        fate = tuple(key for key in ordered if name in key)
        if fate:
            groups.setdefault(fate, []).append(name)
    return [(tuple(members), list(fate)) for fate, members in groups.items()]


def _input_key(seen: Mapping[tuple[int, ...], _Seen], product: Product) -> tuple[int, ...]:
    """Identifies the input that a product takes: an object in its present state."""
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


def _fp32_rows(rows: Tensor) -> Tensor:
    """Detached, fp32 [tokens, K]."""
    wide = rows.detach().reshape(-1, rows.shape[-1]).float()
    # Kernels may add in another order where the memory does not start at a multiple of a vector's width.
    return wide if wide.data_ptr() % 64 == 0 else wide.clone()


def _measure(rows: Tensor, needs: Collection[str]) -> _Measured:
    """All statistics of rows [tokens, K] except the Hessian."""
    tokens = rows.shape[0]
    count = min(tokens, SAMPLE_ROWS)
    measured = _Measured(tokens, rows[[index * tokens // count for index in range(count)]])
    if COLUMNS in needs:
        magnitudes = _fp32_rows(rows).abs()
        amax = magnitudes.amax(dim=0)
    else:  # one pass without a copy; NaN and infinities show in it
        amax = torch.stack(torch.aminmax(rows.detach())).float().abs().amax().reshape(1)
    if not torch.isfinite(amax).all():
        measured.broken = int((~torch.isfinite(rows)).sum())
        return measured
    measured.amax = torch.cat([amax.amax().reshape(1), amax]) if COLUMNS in needs else amax
    if COLUMNS in needs:
        measured.sums[COLUMNS] = magnitudes.sum(dim=0)
    if LOCAL_HESSIAN in needs:
        wide = _fp32_rows(rows)
        blocks = F.pad(wide, (0, -wide.shape[1] % SUB_BLOCK)).view(tokens, -1, SUB_BLOCK).transpose(0, 1)
        measured.sums[LOCAL_HESSIAN] = torch.bmm(blocks.transpose(1, 2), blocks)  # of [blocks, tokens, 16]
    return measured
