"""A step of Muon on matrices, whatever piece of them this rank holds.

    agree    one all-reduce: all ranks of a matrix have a gradient for it, or none of them; has anybody failed
    for each bucket of matrices (plan.py), those of one grid of ranks after those of another:
             updates of pieces -> the owners' whole matrices -> orthogonal -> pieces (exchange.py)

A rank that fails in between goes on to the end of the exchanges, with NaN for what it cannot compute, since others wait
for it there; all that it needs for this is memory for what is sent and what comes. It raises behind them, and so do all
others where they agree on the step (step_agreement.py): nothing quantized has been written then.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.scale_sync import MEETING, max_over_groups
from fsdp_hooks.torch_private import dtensor_around, local_of
from fsdp_hooks.versions import count_writes
from qtensor.optim.masters import bytes_of, gradient_of
from qtensor.optim.matrices.arithmetic import MOMENTUM, advance, check_arithmetic, move, orthogonalized
from qtensor.optim.matrices.exchange import gather, nan_of, put_together, scatter
from qtensor.optim.matrices.pieces import Cut, Grid, cut_of, grid_of, is_here, pieces_of
from qtensor.optim.matrices.plan import Bucket, Matrix, plan
from qtensor.states.kinds import CHUNK, CHUNK_ELSEWHERE

if TYPE_CHECKING:
    from fsdp_hooks.ranks.exchange import Label

WHAT = "MasterWeightOptimizer.step"
T = TypeVar("T")


class Optimized(NamedTuple):
    """What a step needs to know of the optimizer.

    Attributes:
        inner: torch's Muon, of the masters.
        labels: parameter -> what ranks tell it apart by.
        groups: parameter -> the number of its group.
        meeting: the groups of ranks that take part in each step, in one order on all ranks.
        own: parameter -> those of them that agree about it.
    """

    inner: torch.optim.Optimizer
    labels: Mapping[Tensor, str]
    groups: Mapping[Tensor, int]
    meeting: Sequence[dist.ProcessGroup]
    own: Mapping[Tensor, Sequence[dist.ProcessGroup]]


class MatrixStep:
    """One step: `step`, or `agree` and `orthogonalize`.

    Args:
        optimized: what the optimizer holds.
        stepped: the parameters that have gradients here.

    Attributes:
        params: sharded parameters that step, in one order on all ranks; after `agree`.
    """

    def __init__(self, optimized: Optimized, stepped: Sequence[Tensor]) -> None:
        self._inner, self._groups = optimized.inner, optimized.groups
        self._optimized, self._stepped = optimized, stepped
        self._failure: Exception | None = None
        self.params: list[DTensor] = []
        self._buckets: list[tuple[list[DTensor], Bucket, Grid]] = []

    def agree(self) -> None:
        """Find out which matrices step; a collective. Whatever may fail on one rank comes before, or by `attempt`.

        Raises:
            RuntimeError: on all ranks of a group, if they do not list the same parameters or one of them failed before.
        """
        for group in self._inner.param_groups:
            check_arithmetic(group)  # as its options are by now
        _, labels, _, meeting, own = self._optimized
        sharded: list[DTensor] = [param for param in labels if isinstance(param, DTensor) and is_here(param)]
        sharded.sort(key=lambda param: labels[param])  # equal ones stay as they are listed, on all ranks alike
        grids = {param: grid_of(param) for param in sharded}
        here = {id(param) for param in self._stepped}
        stepping = _agree([(param, labels[param], own[param], id(param) in here) for param in sharded], meeting)
        if torn := [param for param, (some, all_) in stepping.items() if some and not all_]:
            self._failure = RuntimeError(
                f"{WHAT}: {labels[torn[0]]} has a gradient on some ranks and none on others"
                f"{f', as have {len(torn) - 1} more' * (len(torn) > 1)}; Muon takes the whole matrix: give it a "
                "gradient on all ranks, zeros where a rank has none, or on no rank"
            )
        self.params = [param for param in sharded if stepping[param][1]]
        self._buckets = list(self._plan({param: grids[param] for param in self.params}))

    def _plan(self, grids: Mapping[DTensor, Grid]) -> Iterator[tuple[list[DTensor], Bucket, Grid]]:
        """Yield the parameters of each bucket, its plan and its grid."""
        for grid in dict.fromkeys(grids.values()):
            own = [param for param in grids if grids[param] == grid]
            most = CHUNK.get(local_of(own[0]).device.type, CHUNK_ELSEWHERE)
            for bucket in _plan_of(tuple(cut_of(param, grid) for param in own), grid.sizes, grid.here, most):
                yield own[bucket.first : bucket.first + len(bucket.matrices)], bucket, grid

    def step(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Step masters in fp32, and their momentum in the inner optimizer's state; a collective.

        Raises:
            Exception: whatever failed on this rank. Masters have moved then.
        """
        self.agree()
        # a collective for one that is placed otherwise: in one order
        grads = {param: gradient_of(param) for param in self.params}
        for params, bucket, grid in self._buckets:
            updates: dict[Tensor, Tensor] = {}
            own: dict[Tensor, Tensor] = {param: grads.pop(param) for param in params}
            self.attempt(functools.partial(self._advance, own, masters, updates))
            found = self._exchange(params, updates, bucket, grid)
            self.attempt(functools.partial(self._apply, params, masters, found))
        self._raise_failure()

    def _advance(
        self,
        grads: Mapping[Tensor, Tensor],
        masters: Mapping[Tensor, Tensor],
        updates: MutableMapping[Tensor, Tensor],
    ) -> None:
        for param, grad in grads.items():
            momentum = self._momentum(masters[param], param)
            updates[param] = advance(momentum, grad.to(torch.float32), self._options(param))

    def _apply(self, params: Sequence[Tensor], masters: Mapping[Tensor, Tensor], found: Sequence[Tensor]) -> None:
        for param, orthogonal in zip(params, found, strict=True):
            (shard,) = bytes_of(local_of(masters[param]))
            move(shard.detach(), orthogonal, param.shape, self._options(param))
        count_writes(param for param in params if masters[param] is param)

    def orthogonalize(self, updates: MutableMapping[Tensor, Tensor]) -> None:
        """Exchange each update, bf16, for its piece of the orthogonal matrix; a collective.

        Args:
            updates: parameter -> the update of its piece, of all `params`; one may be missing where `attempt` has
                kept an error.

        Raises:
            Exception: whatever failed on this rank.
        """
        for params, bucket, grid in self._buckets:
            own: dict[Tensor, Tensor] = {param: updates.pop(param) for param in params if param in updates}
            updates.update(zip(params, self._exchange(params, own, bucket, grid), strict=True))
        self._raise_failure()

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return what some work returns; None if it fails, or any did before: the error is raised at the end."""
        if self._failure is not None:
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - raised at the end
            self._failure = error
            return None

    def _raise_failure(self) -> None:
        """Raise what failed; others hear of it where they agree on the step."""
        if self._failure is not None:
            raise self._failure

    def _exchange(
        self, params: Sequence[Tensor], updates: MutableMapping[Tensor, Tensor], bucket: Bucket, grid: Grid
    ) -> list[Tensor]:
        groups, device = grid.groups, local_of(params[0]).device
        own = [updates.pop(param) if param in updates else nan_of(local_of(param).shape, device) for param in params]
        held = gather(bucket, own, groups)
        del own
        wholes = {}
        for number in bucket.owned:
            made = self.attempt(functools.partial(put_together, bucket, number, held))
            if made is not None:
                wholes[number] = made
        held.clear()  # a failure may have left pieces
        for number in list(wholes):
            whole = wholes.pop(number)
            made = self.attempt(functools.partial(orthogonalized, whole, self._options(params[number])))
            if made is not None:
                wholes[number] = made
        return scatter(bucket, wholes, groups, device)

    def _options(self, param: Tensor) -> Mapping[str, Any]:
        return self._inner.param_groups[self._groups[param]]

    def _momentum(self, master: Tensor, param: Tensor) -> Tensor:
        """Return the momentum of a parameter's piece, which is made in its first step as torch's Muon makes it."""
        assert isinstance(param, DTensor)
        state, shard = self._inner.state[master], local_of(param)
        held = state.get(MOMENTUM)
        if held is None:
            made = torch.zeros(shard.shape, dtype=torch.float32, device=shard.device)
            held = state[MOMENTUM] = dtensor_around(made, param.device_mesh, param.placements, param.shape)
        placed = (held.device_mesh, held.placements) if isinstance(held, DTensor) else None
        if placed != (param.device_mesh, param.placements):
            raise ValueError(
                f"{WHAT}: {MOMENTUM} of a parameter of shape {tuple(param.shape)} is not placed as the parameter is, "
                f"{param.placements}; load it by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        return local_of(held)


@functools.lru_cache(maxsize=64)
def _plan_of(cuts: tuple[Cut, ...], sizes: tuple[int, ...], here: tuple[int, ...], most: int) -> tuple[Bucket, ...]:
    """Return `plan`, kept for the next steps: thousands of ranks have many pieces."""
    return plan(tuple(Matrix(cut.shape, pieces_of(cut)) for cut in cuts), sizes, here, most)


def _agree(
    matrices: Sequence[tuple[Tensor, str, Sequence[dist.ProcessGroup], bool]], meeting: Sequence[dist.ProcessGroup]
) -> dict[Tensor, tuple[bool, bool]]:
    """Return of each parameter whether some and whether all ranks of its groups have a gradient; a collective.

    It takes place in the groups, and in the order, in which ranks agree on the step later: a rank that failed before it
    tells them so in either.
    """
    if not matrices and not meeting:
        return {}
    device = local_of(matrices[0][0]).device if matrices else torch.device("cpu")
    # maxima: of having one, and of having none
    found = [(0.0, 0.0), *((float(has), float(not has)) for *_, has in matrices)]
    flags = torch.tensor(found, dtype=torch.float32, device="cpu")
    labels: list[Label] = [MEETING, *((f"matrix {label}",) for _, label, _, _ in matrices)]
    groups = [list(meeting), *(own for _, _, own, _ in matrices)]
    reduced, _ = max_over_groups(WHAT, labels, list(flags.to(device).unbind()), groups)
    agreed = torch.stack(reduced[1:]).tolist() if matrices else []
    return {one[0]: (bool(some), not lacking) for one, (some, lacking) in zip(matrices, agreed, strict=True)}
