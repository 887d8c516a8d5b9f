"""The quantized weights of a stage, filled in linear by linear by the ranks that decided about them.

What travels are the parts and the quantizer of a linear, in one message for all that a rank has in a round. How many
bytes these are follows from shapes, so nothing has to be told first.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.formats.assignment import Formats, recipe_of
from layerwise.stages.targets import Target
from layerwise.weights.rounding import round_weight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, row_multiple, shared_amax, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

# Of one weight [N, K]: the name of a part, or QUANTIZER and the name of what fixed its scales -> the tensor.
Entries = dict[str, Tensor]
QUANTIZER = "quantizer."


def entries_of(
    name: str, weight: Tensor, decided: Tensor | None, quantizer: Mapping[str, Tensor], recipe: Recipe
) -> Entries:
    """Return a weight [N, K], or the values decided in its place, rounded under a quantizer.

    Raises:
        ValueError: the values or the quantizer do not fit the weight; names it.
    """
    expected = {key: kind for key, kind in _layout(weight.shape, recipe).items() if key.startswith(QUANTIZER)}
    found = {f"{QUANTIZER}{key}": (value.shape, value.dtype) for key, value in quantizer.items()}
    if found != expected:
        raise ValueError(
            f"{name}: its decision has a quantizer of {_words(found)}; expected {_words(expected)}, as "
            "Format.quantizer returns it for this weight"
        )
    if decided is not None and decided.shape != weight.shape:
        raise ValueError(
            f"{name}: its decision has a weight {tuple(decided.shape)}; expected {tuple(weight.shape)}, that of the "
            "linear"
        )
    parts = round_weight(weight if decided is None else decided, recipe, quantizer)
    return {**parts, **{f"{QUANTIZER}{key}": value for key, value in quantizer.items()}}


class Exchange:
    """Hands what each rank has rounded to all ranks, and joins it to the weights of all targets.

    Args:
        targets: held, so that their parameters are full.
        recipe: the format of all targets, or of each.
        group: the ranks; None for a single process.
    """

    def __init__(self, targets: Sequence[Target], recipe: Formats, group: dist.ProcessGroup | None) -> None:
        self._targets, self._recipe, self._group = targets, recipe, group
        self._places = {name: (target, n) for target in targets for n, name in enumerate(target.linears())}
        self._joined: dict[str, Entries] = {target.name: {} for target in targets}

    def take(self, names: Sequence[str], own: dict[str, Entries], owner: int) -> None:
        """Bring some linears to all ranks. Call it on all ranks alike.

        Args:
            names: those that `owner` has rounded.
            own: what this rank has rounded; what is taken is removed.
            owner: a rank of the group; 0 in a single process.
        """
        if self._group is None or not names:
            for name in names:
                self._put(name, own.pop(name))
            return
        # Both sides make these from shapes, so that one broadcast is enough, without one for its size.
        layouts = [_layout(self._places[name][0].shape[-2:], recipe_of(self._recipe, name)) for name in names]
        here = self._group.rank() == owner
        if here:
            message = torch.cat(
                [_bytes(own[name][key]) for name, kinds in zip(names, layouts, strict=True) for key in kinds]
            )
        else:
            count = sum(_nbytes(*kind) for kinds in layouts for kind in kinds.values())
            message = torch.empty(count, dtype=torch.uint8, device=self._targets[0].param.device)
        dist.broadcast(message, dist.get_global_rank(self._group, owner), group=self._group)
        start = 0
        for name, kinds in zip(names, layouts, strict=True):
            arrived: Entries = {}
            for key, (shape, dtype) in kinds.items():
                end = start + _nbytes(shape, dtype)
                # A copy, since a view of bytes as another dtype must be aligned to it.
                arrived[key] = message[start:end].clone().view(dtype).view(shape)
                start = end
            self._put(name, own.pop(name) if here else arrived)

    def assemble(self) -> tuple[dict[str, QuantizedTensor], dict[str, dict[str, Tensor]]]:
        """Return the quantized weight and the quantizer of each target; call it once all linears are there.

        Raises:
            ValueError: experts of one target came to different values of what they share.
        """
        weights, quantizers = {}, {}
        for target in self._targets:
            joined, recipe = self._joined.pop(target.name), recipe_of(self._recipe, target.name)
            if len(target.shape) == 3:
                shared = [key for key, (shape, _) in _layout(target.shape[-2:], recipe).items() if not shape]
                for key in reversed(shared):  # quantizers, of which parts are made, first
                    joined[key] = _common(target, key.removeprefix(QUANTIZER), joined[key])
            quantizers[target.name] = {
                key.removeprefix(QUANTIZER): value for key, value in joined.items() if key.startswith(QUANTIZER)
            }
            parts = {spec.name: joined[spec.name] for spec in specs_of(recipe)}
            weights[target.name] = QuantizedTensor.from_parts(parts, recipe, target.param.dtype)
        return weights, quantizers

    def _put(self, name: str, entries: Entries) -> None:
        target, expert = self._places[name]
        joined = self._joined[target.name]
        if len(target.shape) == 2:
            joined |= entries
            return
        for key, value in entries.items():
            if key not in joined:
                joined[key] = value.new_empty((target.experts, *value.shape))
            joined[key][expert].copy_(value)


def _common(target: Target, key: str, values: Tensor) -> Tensor:
    """Return what all experts have; `values` [E]."""
    # One tensor [E, N, K] has one such scale, and taking that of some expert would be silently wrong for the
    # others.
    if not bool((values == values[0]).all()):
        raise ValueError(
            f"{target.name}: its experts came to different values of {key}, of which one tensor "
            f'{tuple(target.shape)} has only one; use granularity="row", or the scales of Max()'
        )
    return values[0].clone()


@functools.cache
def _layout(shape: torch.Size, recipe: Recipe) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of every entry of a weight [N, K], in the order in which they travel."""
    # Only the number of rows changes with N, so a few rows show the layout of any weight.
    few = torch.zeros((row_multiple(recipe), shape[1]), dtype=torch.float32, device="cpu")
    quantizer = format_of(recipe).quantizer(few, recipe, shared_amax(few, recipe))
    kinds = {spec.name: (torch.Size(spec.shape(shape)), spec.dtype) for spec in specs_of(recipe)}
    for key, value in quantizer.items():
        own = torch.Size((shape[0], *value.shape[1:])) if value.ndim else value.shape
        kinds[f"{QUANTIZER}{key}"] = own, value.dtype
    return kinds


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _words(kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> str:
    words: Iterable[str] = (
        f"{key.removeprefix(QUANTIZER)} {str(dtype).removeprefix('torch.')} {list(shape)}"
        for key, (shape, dtype) in kinds.items()
    )
    return ", ".join(words) or "nothing"
