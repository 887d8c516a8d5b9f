"""Which rank decides about which group of a stage, and in which rounds.

    round r    every rank takes part in reducing the statistics of the groups in it, each to its owner
               every rank decides about its own groups
               every rank gets the results of all

Every rank computes the same from shapes and the algorithm alone. The longest group goes first, to the rank that has the
least so far. A rank's groups in one round take no more memory together than the largest group of the stage, and no
longer than the longest: so a round that holds a large group on one rank may hold several small ones on another, and few
ranks wait.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from layerwise.algorithms.algorithm import CROSS, HESSIAN, Inputs, Linear
from layerwise.stages.stage import Method

_SHOWN = 5  # linears that one message names

Round = Sequence[Sequence[int]]  # for each rank the indices of its groups


def rounds_of(method: Method, groups: Sequence[tuple[int, Sequence[Linear]]]) -> list[Round]:
    """Return the rounds of some groups, each given as the tokens of its input and its linears."""
    costs, sizes = [], []
    for tokens, linears in groups:
        rows, columns = sum(len(one.weight) for one in linears), linears[0].weight.shape[1]
        matrices = len(method.algorithm.needs & {HESSIAN, CROSS}) if tokens else 0
        costs.append(method.algorithm.cost(rows, columns, tokens))
        # Bytes that a group takes on its owner: its weights in fp32, and matrices that are summed in fp64.
        sizes.append(4 * rows * columns + matrices * 8 * columns**2)
    shares = share_out(costs, method.ranks)
    return [list(turn) for turn in zip_longest(*(_pieces(own, sizes, costs) for own in shares), fillvalue=())]


def own_statistics(method: Method, turn: Round, total: Callable[[int, int], Inputs | None]) -> dict[int, Inputs | None]:
    """Return the statistics of the groups that this rank has in a round. Call it on all ranks alike.

    Args:
        method: has the ranks.
        turn: the round.
        total: (group, owner) -> its statistics on the owner; called on all ranks.
    """
    own: dict[int, Inputs | None] = {}
    for owner, indices in enumerate(turn):
        for index in indices:
            # A collective, so all ranks ask for all groups, in one order, whoever gets the total.
            found = total(index, owner)
            if owner == method.rank:
                own[index] = found
    return own


def share_out(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Share the indices out to the ranks, the longest first."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    # The index decides ties: without a word between them, all ranks must come to the same shares.
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


def _pieces(indices: Sequence[int], *amounts: Sequence[float]) -> Iterator[list[int]]:
    """Cut the indices into lists, in order; no list has more of an amount than the index that has most of it."""
    most = [max(amount, default=0) for amount in amounts]
    piece: list[int] = []
    held: list[float] = []
    for index in indices:
        own = [amount[index] for amount in amounts]
        more = [before + one for before, one in zip(held, own, strict=True)] if piece else own
        if any(one > limit for one, limit in zip(more, most, strict=True)):
            yield piece
            piece, more = [], own
        piece.append(index)
        held = more
    if piece:
        yield piece


@contextmanager
def naming(linears: Sequence[Linear]) -> Iterator[None]:
    """Inside, what is raised gets a note that names the linears."""
    try:
        yield
    except BaseException as error:
        more = f" and {len(linears) - _SHOWN} more" if len(linears) > _SHOWN else ""
        error.add_note(f"while calibrating {', '.join(linear.name for linear in linears[:_SHOWN])}{more}")
        raise
