"""Groups of tokens, and groups in whole blocks.

    ends     [E]  int32: group e holds the tokens ends[e - 1] .. ends[e], as torch's grouped_mm has its `offs`
    owner    [T]  the group of each token; E behind the last end

Products along tokens (dw) need groups of whole blocks, with zeros behind the tokens of each:

    tokens   aaaaabb|ddd??         3 groups and an empty one, ? behind the last end
    places   aaaaa...|bb......|........|ddd.....|........      multiple = 8; what is left over holds zeros

Nothing here asks the device how many tokens a group has: shapes depend on T and E alone. A group without tokens gets a
block of zeros, since the grouped kernels of CUTLASS refuse a sum of no terms.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing


class Places(NamedTuple):
    """Where tokens stand in groups of whole blocks.

    Attributes:
        ends: [E] int32, of the groups in whole blocks.
        source: [W] int64, the token at each place; any where there is none.
        holds: [W] bool, whether there is one.
        owner: [W] int64, the group of each place, E behind the last.
    """

    ends: Tensor
    source: Tensor
    holds: Tensor
    owner: Tensor


def check_ends(ends: Tensor, experts: int, tokens: int, device: torch.device) -> None:
    """Raise for ends that are none of so many groups; their values are read on a CPU only, where nothing waits for it.

    Raises:
        TypeError: not int32.
        ValueError: another shape or device; values that fall, or lie outside of 0 .. tokens.
    """
    if ends.dtype != torch.int32:
        raise TypeError(f"offs of grouped tokens are {ends.dtype}, expected torch.int32")
    if ends.ndim != 1 or ends.shape[0] != experts or ends.device != device:
        raise ValueError(
            f"offs of grouped tokens have shape {tuple(ends.shape)} on {ends.device}; expected one end for each of "
            f"{experts} experts, [{experts}], on {device}"
        )
    if type(ends) is not Tensor or ends.device.type != "cpu" or is_tracing() or not experts:
        return
    list(groups(ends, tokens))


def groups(ends: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield the groups that have tokens; this asks the device for their ends.

    Raises:
        ValueError: ends that fall, or lie outside of 0 .. tokens.
    """
    listed = ends.tolist()
    if listed != sorted(listed) or (listed and (listed[0] < 0 or listed[-1] > tokens)):
        raise ValueError(f"offs of grouped tokens are {listed}; expected ends that never fall, from 0 to {tokens}")
    for expert, (start, end) in enumerate(itertools.pairwise([0, *listed])):
        if end > start:
            yield expert, slice(start, end)


def owners(ends: Tensor, tokens: int) -> Tensor:
    """Return the group of each token, [T] int64: that of the first end behind it, E if there is none."""
    return torch.searchsorted(ends, torch.arange(tokens, dtype=torch.int32, device=ends.device), right=True)


def places(ends: Tensor, tokens: int, multiple: int, *, least: int = 1) -> Places:
    """Return where tokens stand if each group is filled up with zeros to a multiple, `least` of these or more."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    room = ((sizes + (multiple - 1)) // multiple).clamp(min=least) * multiple
    wide = torch.cumsum(room, 0, dtype=torch.int32)
    experts = ends.shape[0]
    width = (tokens + experts * multiple + multiple - 1) // multiple * multiple  # [W] holds them, whoever has tokens
    place = torch.arange(width, dtype=torch.int32, device=ends.device)
    owner = torch.searchsorted(wide, place, right=True)  # [W]
    group = owner.clamp(max=experts - 1)
    within = place - (wide - room)[group]
    holds = (owner < experts) & (within < sizes[group])
    source = torch.where(holds, (ends - sizes)[group] + within, 0).to(torch.int64)
    return Places(wide, source, holds, owner)


def spread(x: Tensor, at: Places) -> Tensor:
    """Return x [T, C] at its places, [W, C], zeros elsewhere."""
    if is_tracing():  # where the number of tokens may be no number
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))
    elif not x.shape[0]:
        return x.new_zeros((at.source.shape[0], x.shape[1]))
    return torch.where(at.holds.unsqueeze(1), x.index_select(0, at.source), 0)
