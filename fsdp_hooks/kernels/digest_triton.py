"""Digests of many tensors of one NVIDIA GPU by one launch: what digest.py defines, written by hand in Triton.

    table, int64:   [address, bytes, first program, first block, group] of each tensor,
                    the number of a tensor for each program,
                    the sizes that each group begins with

A program finds its tensor in the table, reads TILE words of it, once, and adds its share to the digest of the group.
Sums of integers do not depend on the order, so atomic additions give the same value every time, and the definition's.
Nothing is stacked or copied: a tensor may begin at any byte and end within a word. Addresses and blocks are counted
in 64 bits.

The table is made on the host, and travels from pinned memory without a wait. It is a function of nothing but the
addresses, the sizes and the groups, and is kept under these very numbers. So a tensor that moved, grew or went to
another group gets a table of its own, and one that is kept can not be stale: whoever finds it has just read the same
addresses from the tensors of today. It holds no tensor, and reads no memory by itself. Streams keep tables apart, since
nothing orders the transfer on one stream before a launch on another.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsdp_hooks.kernels import digest as definition

NARROW, WIDE = tl.constexpr(definition.NARROW), tl.constexpr(definition.WIDE)
LARGE = tl.constexpr(definition.LARGE)
GOLDEN, MIX = tl.constexpr(definition.GOLDEN), tl.constexpr(definition.MIX)
LOW = tl.constexpr(definition.LOW)
TILE = 8192  # words of a program: whole blocks of either width
TURN = 2048  # of them, those that it holds at a time
WARPS = 4
FACTS = tl.constexpr(5)  # numbers of a tensor in the table
KEPT = 16  # tables: those of a few optimizers, and of the modules that are gathered by hand


class Table(NamedTuple):
    """The tensors of one device, as a launch reads them; `numbers` is on the device."""

    numbers: Tensor
    tensors: int
    programs: int


Places = tuple[tuple[tuple[int, int], ...], ...]  # of each group: address and bytes of its tensors
_tables: OrderedDict[tuple[torch.device, int, Places], Table] = OrderedDict()
_lock = threading.Lock()


def digests(places: Places, device: torch.device, stream: int) -> Tensor:
    """Return int64 [groups], as `digest.digests` does.

    Args:
        places: of each group, where the bytes of its tensors are. That memory is in use until the launch is asked for.
        device: where it is.
        stream: the number of the stream that is current there.
    """
    table = table_of(places, device, stream)
    found = table.numbers[-len(places) :].clone()
    if table.programs:
        launch(table, found)
    return found


def table_of(places: Places, device: torch.device, stream: int) -> Table:
    """Return the table of these places, which is made once for each stream and kept while it is among the last ones."""
    key = device, stream, places
    with _lock:  # other threads may drop it between two questions
        table = _tables.get(key)
        if table is None:
            table = _tables[key] = make_table(places, device)
            while len(_tables) > KEPT:
                _tables.popitem(last=False)
        else:
            _tables.move_to_end(key)
        return table


def make_table(places: Places, device: torch.device) -> Table:
    """Return the table of these places."""
    facts: list[int] = []
    tensors: list[Tensor] = []
    sizes = []
    programs = number = 0
    for group, tensors_of_group in enumerate(places):
        first = size = 0
        for place, (address, nbytes) in enumerate(tensors_of_group):
            facts += (address, nbytes, programs, first, group)
            count = -(-nbytes // (8 * TILE))
            tensors.append(torch.full((count,), number, dtype=torch.int64, device="cpu"))
            words = definition.NARROW if nbytes < definition.LARGE else definition.WIDE
            first += -(-nbytes // (8 * words))
            size += (2 * place + 1) * nbytes
            programs, number = programs + count, number + 1
        sizes.append(size)
    told = [torch.tensor(facts, dtype=torch.int64, device="cpu"), *tensors]
    numbers = torch.cat([*told, torch.tensor(sizes, dtype=torch.int64, device="cpu")])
    if device.type == "cuda":
        # from pinned memory, which torch gives to nobody else before the copy has ended
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    return Table(numbers, number, programs)


def launch(table: Table, found: Tensor) -> None:
    """Add the digests to `found`, int64 [groups]."""
    # Triton launches on the current device, whatever the device of its arguments
    with torch.cuda.device(found.device):
        _add_digests[(table.programs,)](table.numbers, found, table.tensors, TILE=TILE, TURN=TURN, num_warps=WARPS)


@triton.jit(do_not_specialize=["tensors"])  # one program for all tables
def _add_digests(
    table: tl.tensor, found: tl.tensor, tensors: tl.tensor, TILE: tl.constexpr, TURN: tl.constexpr
) -> None:
    """Add the share of each program's words to the digest of their group."""
    program = tl.program_id(0)
    number = tl.load(table + tensors * FACTS + program)
    facts = table + number * FACTS
    address, nbytes, first_program = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2)
    first_block, group = tl.load(facts + 3), tl.load(facts + 4)
    start = (program - first_program) * TILE  # of the tensor's words
    stop = tl.minimum(start + TILE, (nbytes + 7) // 8)
    if nbytes < LARGE:
        share = _share(address, nbytes, start, stop, first_block, TURN // 4, NARROW)  # needs more registers
    else:
        share = _share(address, nbytes, start, stop, first_block, TURN, WIDE)
    tl.atomic_add(found + group, share, sem="relaxed")


@triton.jit
def _share(
    address: tl.tensor,
    nbytes: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first_block: tl.tensor,
    TURN: tl.constexpr,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """Return what the words from `start` to `stop` add to a digest, in blocks of WORDS words, TURN words at a time."""
    block = tl.arange(0, TURN // WORDS)
    word = tl.arange(0, WORDS)
    lanes = block[:, None] * WORDS + word[None, :]
    weights = _odd(word + 1)[None, :]
    shares = tl.zeros([TURN // WORDS], dtype=tl.int64)
    for turn in range((stop - start + TURN - 1) // TURN):
        begin = start + turn * TURN
        # words are loaded whole where they begin at multiples of 8 bytes and end within the tensor
        if (address % 8 == 0) & ((nbytes % 8 == 0) | ((begin + TURN) * 8 <= nbytes)):
            at = begin + lanes
            words = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=at < stop, other=0)
        else:
            words = _words_of_bytes(address, nbytes, begin + lanes)
        sums = tl.sum(_mix(words * weights), 1)
        shares += _mix(sums * _odd(begin // WORDS + first_block + block + 1))
    return tl.sum(shares, 0)


@triton.jit
def _words_of_bytes(address: tl.tensor, nbytes: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the words at these places, put together from single bytes, of which zeros fill up the last word."""
    words = tl.zeros_like(at)
    for number in range(8):
        byte = at * 8 + number
        value = tl.load(address.to(tl.pointer_type(tl.uint8)) + byte, mask=byte < nbytes, other=0)
        words |= value.to(tl.int64) << (8 * number)
    return words


@triton.jit
def _odd(place: tl.tensor) -> tl.tensor:
    return (place.to(tl.int64) * GOLDEN) | 1


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ ((x >> 32) & LOW)) * MIX
    return x ^ ((x >> 32) & LOW)
