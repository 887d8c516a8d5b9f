"""Digests of bytes, computed on their device: they tell whether anybody wrote, without a copy to compare with.

A tensor's bytes are read as 64-bit words in blocks, filled up with zeros: 1024 words a block for a large tensor, else
64. The words of a group of tensors are mixed and added up in two levels, with wrap-around:

    block  = sum over its words w, numbered j                   mix(w * odd(j))
    digest = sum over the blocks of all tensors, numbered b     mix(block * odd(b))        + the tensors' sizes

    mix(x)   x ^= x >>> 32;  x *= odd constant;  x ^= x >>> 32                one-to-one
    odd(i)   (i * 2^64 / golden ratio) | 1                                    unrelated for every place

Every step is one-to-one in each word, so a change of one word (or one element) is always detected. Any other accidental
change is missed with a chance of about 2^-32: a change of several words, of all signs in a column, or of the order of
blocks. (Sign bits stay the highest bits in the product and would cancel in pairs, hence the mix, whose low halves
depend on all bits. Blocks that change places are detected because every place has a weight of its own.) The same bytes
in the same shapes have the same digest on every rank, eager and compiled, because integer sums do not depend on order.

Large tensors are read once, in place, in wide blocks, since a vectorised loop has a cost at the end of each block.
Small ones of one shape and dtype are stacked, which copies them, so that a thousand of them take a dozen operations
instead of ten thousand.

On an NVIDIA GPU one launch reads all tensors, of whatever shapes and dtypes (digest_triton.py), under the rules of
`use_kernels`. What is written here stays the definition, and takes its place where that can not run, or where its first
digests on a device are not those of the CPU.
"""

import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.kernels.compiled import BY_HAND_ON, COMPILED_FROM, VARIABLE, Kernel, use_kernels
from fsdp_hooks.kernels.probes import first_difference, where
from fsdp_hooks.lazy_bits import resolve
from fsdp_hooks.torch_private import is_tracing, is_watched

LOG = logging.getLogger(__name__)

NARROW, WIDE = 64, 1024  # words in a block
LARGE = 2**18  # bytes; smaller tensors are stacked
STACK = 2**24  # bytes that are stacked at a time, so that no second copy of a large model is needed
EAGER = 2**20  # words that eager code mixes at a time; compiled code needs no temporaries
# Signed 64-bit numbers; all are odd, so that multiplying by them loses nothing. Other digests use them, too.
GOLDEN = -7046029254386353131  # 2^64 / golden ratio
MIX = -7723592293110705685  # a constant of splitmix64, the one it multiplies by last
MIX_FIRST = -4658895280553007687  # the one before
LOW = 2**32 - 1
ENOUGH = COMPILED_FROM  # bytes of all tensors, from which one launch is worth its compilation
BY_HAND = "fsdp_hooks.kernels.digest_triton"
# first and last byte of what a launch proves itself with: narrow and wide blocks, wherever they begin and end
PROBED = ((0, 5), (8, 1032), (3, 703), (16, 16 + LARGE), (8, 8 + LARGE + 8205), (9, 9 + LARGE + 13), (24, 24))
PLAIN = {Tensor, nn.Parameter}  # other classes are somebody's way of watching or faking tensors


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return int64 []: the digest of the bytes of one or more tensors, in this order."""
    return digests([list(tensors)])[0]


def digests(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return int64 [groups]: the digest of each group of tensors. There is at least one, and a group is on one device.

    Where the groups are on several devices, all digests come to that of the first.
    """
    devices = list(dict.fromkeys([group[0].device for group in groups if group]))
    if len(devices) > 1:
        there = [group[0].device if group else None for group in groups]
        none = torch.zeros((), dtype=torch.int64, device=devices[0])
        found: dict[int, Tensor] = {}
        for device in devices:
            own = [number for number, place in enumerate(there) if place == device]
            read = digests([groups[number] for number in own]).to(devices[0])
            found |= dict(zip(own, read.unbind(), strict=True))
        return torch.stack([found.get(number, none) for number in range(len(groups))])
    device = devices[0]
    if device.type in BY_HAND_ON and (launched := _by_one_launch(groups, device)) is not None:
        return launched
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    # autocast refuses to stack float8
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        return _digests(groups, device)


_launch_failed: set[str] = set()  # names of what a launch raised in this process
_proven: set[torch.device] = set()  # where a launch made the digests of the definition
_refused: set[torch.device] = set()  # where it made others


def _by_one_launch(groups: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor | None:
    """Return the digests of tensors of one GPU, read by one launch; None where the definition runs instead."""
    mode = use_kernels.mode
    if (
        mode == "eager"
        or (mode == "auto" and (_launch_failed or device in _refused))
        or not _has_triton()
        or is_tracing()
        or is_watched()
    ):
        return None
    copies: list[Tensor] = []  # live until the launch has been asked for
    places = []
    total = 0
    # a thousand tensors in a step, so each is asked as little as can be
    for group in groups:
        own = []
        for given in group:
            if type(given) not in PLAIN or given.device != device:
                return None
            tensor, address = given, given.data_ptr()
            if not address or not given.is_contiguous() or given.is_neg() or given.is_conj():
                tensor = resolve(given.detach()).contiguous()
                copies.append(tensor)
                address = tensor.data_ptr()
            nbytes = tensor.nbytes
            own.append((address, nbytes))
            total += nbytes
        places.append(tuple(own))
    few = total < ENOUGH and BY_HAND not in sys.modules  # once it is compiled, for the first large ones, it serves all
    if (mode == "auto" and few) or (stream := _stream_to_launch_on(device)) is None:
        return None
    try:
        by_hand = importlib.import_module(BY_HAND)
        if device not in _proven and not _is_right(by_hand, device):
            return None
        return by_hand.digests(tuple(places), device, stream)  # type: ignore[no-any-return]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if mode == "compiled":
            raise
        LOG.info("digests by one launch failed, so torch's operations take its place", exc_info=error)
        _launch_failed.add(type(error).__name__)
        warnings.warn(
            f"Digests by one launch failed ({type(error).__name__}), so torch's operations make them from here on: the "
            f"same values, dozens of launches. {VARIABLE}=compiled shows the error, {VARIABLE}=eager silences this.",
            stacklevel=4,
        )
        return None


def _is_right(by_hand: Any, device: torch.device) -> bool:
    """Return whether a launch makes the definition's digests on a device, tried there once."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = max(behind for _, behind in PROBED)
    data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8, device="cpu")
    there = data.to(device)
    pieces = [PROBED[:3], PROBED[3:], *((piece,) for piece in PROBED)]
    places = tuple(tuple((there.data_ptr() + first, behind - first) for first, behind in group) for group in pieces)
    table = by_hand.make_table(places, device)
    found = table.numbers[-len(places) :].clone()
    by_hand.launch(table, found)
    groups = [[data[first:behind] for first, behind in group] for group in pieces]
    difference = first_difference(found, _digests(groups, data.device, plain=True), any_nan=False)
    if difference is None:
        _proven.add(device)
        return True
    place, text = difference
    wrong = (
        f"The kernel written by hand for digests computes other ones than the definition on {where(device)}: of the "
        f"bytes that it is tried with, the digest of group {place} {text}"
    )
    if use_kernels.mode == "compiled":
        raise RuntimeError(
            f"{wrong}. Other versions of Triton or of the driver may be right; {VARIABLE}=auto runs torch's operations "
            "in its place. Please report this text."
        )
    _refused.add(device)
    warnings.warn(
        f"{wrong}. So torch's operations make them on this device: the right values, dozens of launches. Other "
        "versions of Triton or of the driver may be right. Please report this text.",
        stacklevel=5,
    )
    return False


def _stream_to_launch_on(device: torch.device) -> int | None:
    """Return the number of a GPU's current stream; None while a graph is captured there.

    Each replay of a graph would read the table, which nobody would keep for it.
    """
    with torch.cuda.device(device):
        return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream().cuda_stream


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is there, and CUDA is not another name for ROCm."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def _digests(groups: Sequence[Sequence[Tensor]], device: torch.device, *, plain: bool = False) -> Tensor:
    """Return the digests by torch's operations; `plain`: as they stand, compiled by nobody."""
    # groups of tensors of the same kinds
    alike: dict[tuple[tuple[torch.dtype, torch.Size], ...], list[int]] = {}
    for number, group in enumerate(groups):
        alike.setdefault(tuple((tensor.dtype, tensor.shape) for tensor in group), []).append(number)
    kinds: dict[tuple[torch.dtype, torch.Size], _AlikeTensors] = {}
    sizes = [0] * len(groups)
    for keys, numbers in alike.items():
        first = size = 0
        for place, key in enumerate(keys):
            tensors = [groups[number][place] for number in numbers]
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _AlikeTensors(tensors[0])
            kind.tensors += tensors
            kind.owners += numbers
            kind.firsts += [first] * len(numbers)
            first += kind.blocks
            size += (2 * place + 1) * kind.nbytes
        for number in numbers:
            sizes[number] = size
    # made on the host, whatever the default device; non_blocking, so that host and device do not wait for each other
    result = torch.tensor(sizes, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    weights = _odd(torch.arange(1, WIDE + 1, dtype=torch.int64, device=device))
    for kind in kinds.values():
        if kind.nbytes:
            told = torch.tensor([kind.owners, kind.firsts], dtype=torch.int64, device="cpu")
            owners, firsts = told.to(device, non_blocking=True)
            places = torch.arange(1, kind.blocks + 1, dtype=torch.int64, device=device) + firsts[:, None]
            sums = torch.cat([sum_ for blocks in kind.read() for sum_ in _sums(blocks, weights, plain=plain)])
            result.index_add_(0, owners, _mix(sums.view(-1, kind.blocks) * _odd(places)).sum(1))
    return result


class _AlikeTensors:
    """Tensors of one shape and dtype, the group of each, and the number of its first block in that group."""

    def __init__(self, like: Tensor) -> None:
        self.nbytes = like.nbytes
        self.words = NARROW if self.nbytes < LARGE else WIDE  # of a block
        self.blocks = -(-self.nbytes // (8 * self.words))  # of one tensor
        self.tensors: list[Tensor] = []
        self.owners: list[int] = []
        self.firsts: list[int] = []

    def read(self) -> Iterator[Tensor]:
        """Yield the blocks of all tensors in order, as pieces int64 [n, words]."""
        if self.nbytes < LARGE:
            at_once = max(1, STACK // self.nbytes)
            for start in range(0, len(self.tensors), at_once):
                some = torch.stack(self.tensors[start : start + at_once])
                # a stack of tensors in channels_last is no contiguous one
                yield self._blocks(some.reshape(len(some), -1).view(torch.uint8))
            return
        whole = self.nbytes - self.nbytes % (8 * self.words)
        for tensor in self.tensors:
            data = resolve(tensor).reshape(-1).view(torch.uint8)
            # a view as 64-bit words must begin at a multiple of 8 bytes
            aligned = data if data.storage_offset() % 8 == 0 else data.clone()
            yield aligned[:whole].view(torch.int64).view(-1, self.words)
            if whole < self.nbytes:
                yield self._blocks(data[None, whole:])

    def _blocks(self, data: Tensor) -> Tensor:
        """Return the blocks int64 [n, words] of contiguous uint8 [tensors, bytes], filled up with zeros."""
        missing = -data.shape[1] % (8 * self.words)
        if missing:
            data = torch.cat([data, data.new_zeros(len(data), missing)], dim=1)
        return data.view(torch.int64).view(-1, self.words)


def _odd(place: Tensor) -> Tensor:
    """Return the weight of a place, an odd number."""
    return (place * GOLDEN) | 1


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of each number, in place; the shifts are logical, so that x and ~x have different results."""
    x.bitwise_xor_((x >> 32).bitwise_and_(LOW)).mul_(MIX)
    return x.bitwise_xor_((x >> 32).bitwise_and_(LOW))


def _sums(blocks: Tensor, weights: Tensor, *, plain: bool) -> Iterator[Tensor]:
    """Yield the sum of each block, for one piece of the blocks at a time."""
    words = blocks.shape[1]
    kernel = _narrow_sums if words == NARROW else _wide_sums
    # compiled code needs no temporaries, so it takes all blocks at once
    if not plain and kernel.compiles(blocks):
        yield kernel(blocks, weights[:words])
        return
    for piece in blocks.split(EAGER // words):
        yield kernel.eager(piece, weights[:words])


# The width is a constant and weights are loaded from memory, so that the compiled loops are vectorised.


def _sum_narrow(blocks: Tensor, weights: Tensor) -> Tensor:
    assert blocks.shape[1] == 64
    return _mix(blocks * weights).sum(1)


def _sum_wide(blocks: Tensor, weights: Tensor) -> Tensor:
    assert blocks.shape[1] == 1024
    return _mix(blocks * weights).sum(1)


_narrow_sums = Kernel(_sum_narrow, "digest_narrow_blocks")
_wide_sums = Kernel(_sum_wide, "digest_wide_blocks")
