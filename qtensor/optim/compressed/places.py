"""Where the rows of a shard are in the whole tensor, seen as [rows, K]: draws are counted by it (states/draws.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import local_of
from qtensor.scales.cut_blocks import cuts_along, piece_of
from qtensor.states.draws import Positions, key_of, row_keys


def pieces_of_shard(param: Tensor) -> list[tuple[int, int]]:
    """Return (first, length) along each dim of a parameter's shard."""
    place = param.device_mesh.get_coordinate() if isinstance(param, DTensor) else None
    if not isinstance(param, DTensor) or place is None:
        return [(0, size) for size in local_of(param).shape]
    mesh, ndim = tuple(param.device_mesh.shape), param.ndim
    cuts = [cuts_along(dim, ndim, mesh, param.placements) for dim in range(ndim)]
    return [piece_of(param.shape[dim], [(mesh[axis], place[axis]) for axis in cuts[dim]]) for dim in range(ndim)]


class Places:
    """The places of the shards of an optimizer, found once each."""

    def __init__(self) -> None:
        self._known: dict[Tensor, tuple[Tensor, Tensor, int]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_known": {}}  # found anew

    def of(self, param: Tensor, seed: int, stream: Sequence[int | str]) -> Positions:
        """Return the positions of a parameter's rows, with keys of a seed and a stream."""
        rows, first, _ = self._find(param)
        return Positions(row_keys(key_of(seed, *stream), rows), first)

    def stacked(self, params: Sequence[Tensor], seed: int, streams: Sequence[Sequence[int | str]]) -> Positions:
        """Return the positions of all rows of some parameters, one after the other; of the same first column."""
        places = [self._find(param) for param in params]
        words = torch.tensor([key_of(seed, *stream) for stream in streams], dtype=torch.int32, device="cpu")
        counts = torch.tensor([len(place[0]) for place in places], dtype=torch.int64, device="cpu")
        rows, first = torch.cat([place[0] for place in places]), places[0][1]
        keys = words.repeat_interleave(counts, dim=0).to(rows.device)
        return Positions(row_keys(keys.unbind(1), rows), first)

    def column(self, param: Tensor) -> int:
        """Return the first column of a parameter's shard."""
        return self._find(param)[2]

    def nearest(self, param: Tensor) -> Positions:
        """Return positions that draw nothing."""
        first = self._find(param)[1]
        return Positions(first, first)

    def _find(self, param: Tensor) -> tuple[Tensor, Tensor, int]:
        device = local_of(param).device
        known = self._known.get(param)
        if known is None or known[0].device != device:
            known = self._known[param] = _rows(param, device)
        return known


def _rows(param: Tensor, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return int64 [rows of the shard], their numbers in the whole tensor, and the first column, int32 [1] and int."""
    *leading, (column, _) = pieces_of_shard(param) or [(0, 1)]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, (first, length) in zip(param.shape, leading, strict=False):
        own = torch.arange(first, first + length, dtype=torch.int64, device=device)
        rows = (rows.unsqueeze(-1) * size + own).flatten()
    return rows, torch.full((1,), column, dtype=torch.int32, device=device), column
