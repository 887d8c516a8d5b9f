"""Many small weights as one, and a large one in pieces: a step takes so many rows at a time, [rows, K].

Expanding, stepping and compressing one small weight takes hundreds of tiny operations, so the rows of small ones that
are alike are stacked. What a large one is expanded to is many times its bytes, fresh memory and more than the caches
hold, so on a CPU its rows step in pieces. All of a step treats each element, or each block of a row, on its own, and
draws by a row's place in its own weight: so either way gives the bytes of the whole weight by itself.

    kind_of      what weights must have in common, or None: this one steps by itself
    stacks_of    weights -> lists of those that step together, those that are cut, and the others
    Stack        one such list, or some rows of a weight: parts, remainders and states, and the way back

A weight with one scale for all is not cut. A weight steps by itself if it is no plain matrix, has scales in common with
anything else, ends within a square block, or has states that are neither moments nor its count of steps.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import local_of
from qtensor.numerics import kernels
from qtensor.optim.batches import SMALL, STACK
from qtensor.optim.compressed.entries import is_kept_so, is_moment
from qtensor.optim.compressed.masters import dense_of
from qtensor.optim.masters import copy_many
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.lens import OWN
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import keeps_history, row_multiple, specs_of, tensor_wide
from qtensor.states.draws import Positions
from qtensor.states.kinds import CHUNK, CHUNK_ELSEWHERE
from qtensor.states.remainders import join, join_dense, rounded, split, split_dense
from qtensor.tensor.quantized_tensor import QuantizedTensor

STEP = "step"
PIECE = {"cpu": 2**20}  # elements that step at a time, of small weights or of a large one; elsewhere all of the large


def kind_of(param: Tensor, remainder: Tensor, state: Mapping[str, Any], how: str) -> Hashable | None:
    """Return what weights that step together have in common, besides their group; None: it steps by itself.

    Args:
        param: a weight with a gradient, whose master is a remainder.
        remainder: of its shard, int16.
        state: of the inner optimizer, as it is kept.
        how: what moments are to be kept in.
    """
    shard = local_of(param)
    # a first step makes the states, of each weight by itself
    if remainder.ndim != 2 or not remainder.numel() or not state:
        return None
    recipe: Recipe | None = None
    if isinstance(shard, QuantizedTensor):
        recipe = shard.recipe
        plain = shard._lens == OWN and shard._sharding.shards is None and shard._preserved.value is None
        if not plain or keeps_history(recipe) or len(remainder) % row_multiple(recipe):
            return None
    elif isinstance(shard, HighPrecisionWeight):
        return None
    entries: list[Hashable] = []
    for name, value in state.items():
        own = local_of(value) if isinstance(value, Tensor) else value
        if is_moment(name, value, param) and is_kept_so(name, value, how):
            entries.append(name)
        elif name == STEP and isinstance(own, Tensor) and not own.ndim and own.device.type == "cpu":
            entries.append((name, own.dtype, own.item()))
        else:
            return None
    return recipe, how, remainder.shape[1], remainder.device, tuple(entries)


def stacks_of(
    params: Iterable[Tensor], kinds: Mapping[Tensor, Hashable | None]
) -> tuple[list[list[Tensor]], list[tuple[Tensor, list[slice]]], list[Tensor]]:
    """Return lists of weights that step together, large ones with the rows that do, and the others."""
    alike: dict[Hashable, list[Tensor]] = {}
    cut, single = [], []
    for param in params:
        kind, shard = kinds.get(param), local_of(param)
        if kind is not None and shard.numel() < SMALL:
            alike.setdefault(kind, []).append(param)
        elif kind is not None and len(pieces := _pieces(shard)) > 1:
            cut.append((param, pieces))
        else:
            single.append(param)
    stacks = []
    for own in alike.values():
        device = local_of(own[0]).device.type
        most = min(STACK, PIECE.get(device, STACK), CHUNK.get(device, CHUNK_ELSEWHERE))
        size = max(1, most // max(local_of(param).numel() for param in own))
        stacks += [own[start : start + size] for start in range(0, len(own), size)]
    single += [stack[0] for stack in stacks if len(stack) == 1]
    return [stack for stack in stacks if len(stack) > 1], cut, single


def _pieces(shard: Tensor) -> list[slice]:
    """Return the rows of a shard that step at a time: whole squares, and all of them where they share a scale."""
    rows, columns = shard.shape
    recipe = shard.recipe if isinstance(shard, QuantizedTensor) else None
    if shard.device.type not in PIECE or (recipe is not None and tensor_wide(recipe)):
        return [slice(0, rows)]
    group = 1 if recipe is None else row_multiple(recipe)
    size = max(PIECE[shard.device.type] // columns // group, 1) * group
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class Stack:
    """Some weights of one kind, as one, or some rows of one.

    Attributes:
        shards: their shards.
        remainders: int16 [rows, K] of each, those rows.
        rows: how many rows each has here.
    """

    def __init__(self, params: Sequence[Tensor], remainders: Sequence[Tensor], own: slice = slice(None)) -> None:
        self.shards: list[Any] = [local_of(param) for param in params]
        self._own, self._counts = own, own.stop is None or own.stop == len(remainders[0])
        self.remainders = [remainder[own] for remainder in remainders]
        self.rows = [len(remainder) for remainder in self.remainders]
        first = self.shards[0]
        self._recipe = first.recipe if isinstance(first, QuantizedTensor) else None

    def masters(self) -> Tensor:
        """Return their masters, fp32 [rows of all, K], new."""
        words = _cat(self.remainders)
        if self._recipe is None:
            return join_dense(_cat([dense_of(shard)[self._own] for shard in self.shards]), words)
        parts = {}
        for spec in specs_of(self._recipe):
            own = [getattr(shard, spec.name) for shard in self.shards]
            parts[spec.name] = _cat([part[self._own] for part in own]) if spec.per_row else self._each_row(own)
        return join(parts, words, self._recipe)

    def states(self, each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return their states, as they are kept, of the stack."""
        found: dict[str, Any] = {}
        for name in each[0]:
            own: list[Any] = [local_of(state[name]) for state in each]
            if name == STEP:
                found[name] = own[0].clone()
            elif isinstance(own[0], QuantizedTensor):
                specs = specs_of(own[0].recipe)
                parts = {spec.name: _cat([getattr(one, spec.name)[self._own] for one in own]) for spec in specs}
                found[name] = QuantizedTensor.from_parts(parts, own[0].recipe, torch.float32)
            else:
                found[name] = torch.cat([one[self._own] for one in own])
        return found

    def keep_states(self, stacked: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> None:
        """Write what `compress` returned for the stack into the states that each weight keeps."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, value in stacked.items():
            own: list[Any] = [local_of(state[name]) for state in each]
            if name == STEP:
                # once: the next rows are to count from what it was
                pairs += [(one, value) for one in own] if self._counts else []
            elif isinstance(value, QuantizedTensor):
                for part, rows in value.parts().items():
                    pairs += self._cut(rows, [getattr(one, part)[self._own] for one in own])
            else:
                pairs += self._cut(value, [one[self._own] for one in own])
        copy_many(pairs)

    def write(self, masters: Tensor, at: Positions) -> None:
        """Write weights and remainders from masters that were stepped, fp32 [rows of all, K]."""
        pairs: list[tuple[Tensor, Tensor]] = []
        if self._recipe is None:
            weights, left = split_dense(masters, at)
            pairs += self._cut(weights, [dense_of(shard)[self._own] for shard in self.shards])
        else:
            masters = rounded(masters, self._recipe, at)
            parts, left = split(masters, self._recipe, self._amaxes(masters, self._recipe), None, at)
            for spec in specs_of(self._recipe):
                own, rows = [getattr(shard, spec.name) for shard in self.shards], parts[spec.name]
                if spec.per_row:
                    pairs += self._cut(rows, [part[self._own] for part in own])
                else:
                    pairs += [(one, piece[0, 0]) for one, piece in zip(own, rows.split(self.rows), strict=True)]
        copy_many([*pairs, *self._cut(left, self.remainders)])

    def _amaxes(self, masters: Tensor, recipe: Recipe) -> Tensor | None:
        """Return what decides the shared scales of each row, fp32 [rows, 1]; None for recipes without them."""
        if not kernels.shares_amax(recipe):
            return None
        amaxes = kernels.row_amaxes(masters, recipe)
        return self._each_row([own.amax() for own in amaxes.split(self.rows)]) if tensor_wide(recipe) else amaxes

    def _each_row(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return one number of each weight, [], for each of its rows, [rows, 1]."""
        rows = torch.tensor(self.rows, dtype=torch.int64, device=numbers[0].device)
        return torch.stack(list(numbers)).repeat_interleave(rows).unsqueeze(-1)

    def _cut(self, rows: Tensor, targets: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return (target, its rows of the stack), as bytes where an element is one: no lists of float8 are copied."""
        if rows.itemsize == 1:
            rows, targets = rows.view(torch.uint8), [target.view(torch.uint8) for target in targets]
        return list(zip(targets, rows.split(self.rows), strict=True))


def _cat(pieces: Sequence[Tensor]) -> Tensor:
    """Return pieces of rows as one tensor; bytes, which some devices cannot join as float8."""
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].itemsize > 1:
        return torch.cat(list(pieces))
    return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)
