"""Run steps that may fail or differ on some ranks only, so that all ranks go on or all raise.

    on_first         rank 0 of the group takes the step; the others get its value, or its error
    on_all           every rank takes the step; all get all values, or the error of the first rank that failed
    raise_together   a block without collectives that may raise on some ranks
    any_of           whether something holds on any rank
    check_same       whether all ranks have the same value

An error that only one rank sees (a full disk, a batch of its own) would leave the others in their next collective. What
they raise in its place has an `ElsewhereError` as its cause, which shows where the error was raised.
A group of None means the default group for `on_first` and `on_all` (this process alone if there is none), and ALONE
this process alone if there is one, too (`chosen_ranks`). For `raise_together`, `any_of` and `check_same` None means
this process alone, as for everything that reduces statistics.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_hooks.devices import this_device
from fsdp_hooks.torch_private import root_mesh

T = TypeVar("T")
CPU = torch.device("cpu")
KEPT = (ValueError, FileExistsError, FileNotFoundError, PermissionError, OSError, TypeError, ImportError)  # with types
LONGEST = 20_000  # characters of a traceback that travel, its last ones


class ElsewhereError(Exception):
    """The cause of an error that another rank has told of: its text is the traceback there."""


class Alone:
    """What is given as a group where no other rank takes part."""


ALONE = Alone()
Ranks = dist.ProcessGroup | Alone | None


@dataclass(frozen=True)
class _Failed:
    """An error on its way to the other ranks; `trace` is the text of its traceback."""

    kind: str
    text: str
    rank: int
    trace: str

    def error(self, own: BaseException | None, rank: int) -> Exception:
        """Return what a rank raises that has been told of it; `own`: what was raised there, if anything."""
        # only the name of the type travels: pickled classes of others may not load here
        kept: dict[str, type[Exception]] = {kind.__name__: kind for kind in KEPT}
        error = kept.get(self.kind, RuntimeError)(self.text)
        error.__cause__ = own if own is not None and rank == self.rank else elsewhere(self.rank, self.trace, own)
        return error


def chosen_ranks(caller: str, group: dist.ProcessGroup | None, *, no_dist: bool) -> Ranks:
    """Return the ranks that a caller's arguments `group` and `no_dist` name.

    Raises:
        ValueError: both are given, or this rank is not in the group.
    """
    if no_dist and group is not None:
        raise ValueError(f"{caller}: no_dist=True is for this process alone, and there is a group; give one of them")
    if group is not None and rank_of(group) < 0:
        raise ValueError(f"{caller}: this rank is not in the group that was given; call it on the ranks of the group")
    return ALONE if no_dist else group


def ranks_of(group: Ranks) -> int:
    """Return how many ranks there are; 1 without a process group."""
    if isinstance(group, Alone):
        return 1
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_of(group: Ranks) -> int:
    """Return this process's rank in the group; 0 without a process group."""
    if isinstance(group, Alone):
        return 0
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def global_ranks(group: Ranks) -> list[int]:
    """Return the global numbers of the ranks of a group, in its order."""
    if isinstance(group, Alone):
        return [rank_of(None)]
    return list(range(ranks_of(None))) if group is None else dist.get_process_group_ranks(group)


def device_of(group: dist.ProcessGroup | None, wanted: torch.device = CPU) -> torch.device:
    """Return a device on which the group can reduce: `wanted` if it can."""
    kinds = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return wanted if wanted.type in kinds else this_device(kinds[0])


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """Do dist.all_reduce in place, wherever the tensor is: offloaded weights can have a group of GPUs alone."""
    # a group of NCCL cannot reduce what was offloaded to the CPU
    there = tensor.to(device_of(group, tensor.device))
    dist.all_reduce(there, op=op, group=group)
    if there is not tensor:
        tensor.copy_(there)


def check_spanned(tensors: Iterable[Tensor], group: Ranks) -> None:
    """Raise ValueError if shards belong to ranks outside of the group, which would be waited for, or missing."""
    # a collective over a mesh waits for all of its ranks, also those outside of the group
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    missing = sorted({rank for mesh in meshes for rank in _ranks(mesh)} - set(global_ranks(group)))
    if missing:
        raise ValueError(
            f"weights are shards on ranks that do not take part ({', '.join(map(str, missing))}); call it on all ranks "
            "that hold them, with their group, or gather the weights first (full_tensor(), or DCP's "
            "get_model_state_dict with full_state_dict=True)"
        )


def is_first(group: Ranks) -> bool:
    """Return whether this is the rank that writes for all."""
    return rank_of(group) == 0


def is_counted(mesh: DeviceMesh, group: Ranks) -> bool:
    """Return whether the copy on this mesh is the one that counts, among those of the ranks of a group.

    Of weights that are sharded along some dims of a larger mesh, the ranks along the others have copies, each on a mesh
    of its own: what FSDP shards in a model with tensor parallelism. The one that has the group's first rank counts; so
    does a mesh that is no slice of one with that rank, if the group has others beside those of the weights.
    """
    first = global_ranks(group)[0]
    return first in _ranks(mesh) or first not in _ranks(root_mesh(mesh))


def _ranks(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def on_first(group: Ranks, step: Callable[[], T]) -> T:
    """Return what `step` returns on rank 0, handed to all ranks; the value must be picklable.

    Raises:
        Exception: what `step` raised on rank 0, with the same text on all ranks and as the first type of KEPT that it
            is of (so a NotADirectoryError is an OSError); a RuntimeError if it is of none.
    """
    outcome: Any = None
    raised: Exception | None = None
    if is_first(group):
        try:
            outcome = step()
        except Exception as error:  # noqa: BLE001 - handed to all ranks, which raise it
            outcome, raised = _failed(error, 0), error
    if not isinstance(group, Alone) and ranks_of(group) > 1:
        held = [outcome]
        source = global_ranks(group)[0]
        dist.broadcast_object_list(held, src=source, group=group)
        outcome = held[0]
    if isinstance(outcome, _Failed):
        raise outcome.error(raised, rank_of(group))
    return outcome  # type: ignore[no-any-return]


def on_all(group: Ranks, step: Callable[[], T]) -> list[T]:
    """Return what `step` returns on each rank, in rank order, handed to all ranks; the values must be picklable.

    Raises:
        Exception: what `step` raised on the first rank that failed, in the types of `on_first`; the text begins with
            that rank if the group has several.
    """
    raised: Exception | None = None
    rank = rank_of(group)
    try:
        own: Any = step()
    except Exception as error:  # noqa: BLE001 - handed to all ranks, which raise it
        raised = error
        own = _failed(error, rank, f"rank {rank}: " if ranks_of(group) > 1 else "")
    outcomes = [own]
    if not isinstance(group, Alone) and ranks_of(group) > 1:
        outcomes = [None] * ranks_of(group)
        dist.all_gather_object(outcomes, own, group=group)
    for outcome in outcomes:
        if isinstance(outcome, _Failed):
            raise outcome.error(raised, rank)
    return outcomes


@contextmanager
def raise_together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise on all ranks if the block, work of their own without collectives, raises on some.

    A rank that failed raises its own error (interrupts included); the others raise a RuntimeError with the text of the
    first rank that failed, and its notes.
    """
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        if group is None:
            raise
        failed = error
    if group is None:
        return
    # one small all-reduce if all went well; texts are gathered only after an error
    if not any_of(group, failed is not None):
        return
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, None if failed is None else _describe(failed), group=group)
    if failed is not None:
        raise failed
    rank, (text, trace) = next((rank, told) for rank, told in enumerate(outcomes) if told is not None)
    raise RuntimeError(f"rank {rank}: {text}") from elsewhere(rank, trace)


def any_of(group: dist.ProcessGroup | None, holds: bool) -> bool:  # noqa: FBT001 - a value, not an option
    """Return whether `holds` is true on any rank of the group; with group None, on this one."""
    if group is None:
        return holds
    found = torch.tensor(int(holds), dtype=torch.int64, device=device_of(group))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found)


def check_same(group: dist.ProcessGroup | None, value: Tensor, message: str) -> None:
    """Raise RuntimeError(message) on all ranks if they hold different values, int64 [], such as digests."""
    if group is None:
        return
    # the maxima are opposite only if all ranks hold the same value
    both = torch.stack([value, -value]).to(device_of(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if int(both[0]) != -int(both[1]):
        raise RuntimeError(message)


def elsewhere(rank: int, trace: str, before: BaseException | None = None) -> ElsewhereError:
    """Return the cause of what is raised for an error of another rank; `before`: what this rank had raised itself."""
    found = ElsewhereError(f"on rank {rank}:\n{trace}")
    found.__cause__ = before
    return found


def trace_of(error: BaseException) -> str:
    """Return the text of an error's traceback, with those of its causes."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= LONGEST else f"[..]{text[-LONGEST:]}"


def _describe(error: BaseException) -> tuple[str, str]:
    """Return an error in words, and its traceback."""
    notes = [str(note) for note in getattr(error, "__notes__", None) or ()]
    return f"{type(error).__name__}: {_text(error)}" + (f" ({'; '.join(notes)})" if notes else ""), trace_of(error)


def _failed(error: Exception, rank: int, where: str = "") -> _Failed:
    kind = next((kind.__name__ for kind in KEPT if isinstance(error, kind)), None)
    text = where + (_text(error) if kind else f"{type(error).__name__}: {_text(error)}")
    return _Failed(kind or "RuntimeError", text, rank, trace_of(error))


def _text(error: BaseException) -> str:
    """Return the text of an error. Some classes fail to make theirs, and the other ranks must be told all the same."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever a class of somebody else's raises
        return "(its class has no text for it)"
