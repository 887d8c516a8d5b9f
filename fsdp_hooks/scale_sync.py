"""Agreement on shared scales: all shards that share a scale hold the same value, by one fused all-reduce a group.

Shards must agree over each mesh dim whose cut leaves one scale to several shards; which ones a cut leaves, the shard
itself tells (`SharedScales.shared_along`). Replicas hold equal bytes already. The values of all weights are laid end to
end and reduced together, once for each distinct process group: 1 all-reduce for FSDP and HSDP, up to 2 for FSDP x TP,
and a second one for a group whose values do not fit into the first (some thousands). The groups are read from the
DTensor at the moment of use and stored nowhere. Values are matched by what they belong to, not by the order in which a
rank lists them; see exchange.py. Weights that share one scale with others (scale_partners.py) settle that behind it.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AllGatherHooks
from fsdp_hooks.ranks.across_ranks import all_reduce
from fsdp_hooks.ranks.exchange import Label, RanksDifferError, channel_of, in_order, reduce_max, tell_failure
from fsdp_hooks.ranks.scale_partners import Partners, check_complete, pool
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.versions import count_writes
from fsdp_hooks.writable import unwritable

LOG = logging.getLogger(__name__)
MEETING: Label = ("",)  # the label of a value without a weight; it sorts before all others


class SharedScales(Protocol):
    """The scales of one shard, which it may share with others; the methods are called in this order."""

    @property
    def partners(self) -> Partners | None:
        """The weights with which it shares its tensor-wide scale; None for one that has it alone."""

    @property
    def pooled(self) -> int:
        """How many values in front of a claim stand for the tensor-wide scale."""

    def may_share(self) -> bool:
        """Return whether some way to cut the weight leaves pieces with a scale in common."""

    def shared_along(self, dim: int) -> bool:
        """Return whether the shards have a scale in common over the mesh dims that cut them along tensor dim `dim`."""

    def kind(self) -> str:
        """Return how the shard is quantized; ranks compare this to prove that they mean the same weight."""

    def claim(self) -> Tensor:
        """Return fp32 [n], what this shard claims. The maximum over all is agreed on, so n is the same for all."""

    def adopt(self, agreed: Tensor) -> None:
        """Re-encode under the agreed values (fp32 [n]); keep the bytes if they fit already."""


@functools.singledispatch
def scales_of_shard(shard: object, param: Tensor) -> SharedScales | None:
    """Return `scales_of` by the class of the local tensor (`scales_of_shard.register`)."""
    return None


def scales_of(param: Tensor) -> SharedScales | None:
    """Return the scales of a parameter's shard; None for one that is not quantized."""
    return scales_of_shard(local_of(param), param)


def sync_scales(model_or_params: torch.nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> int:
    """Make every shared scale agreed, by re-encoding the shards whose scale differs onto the largest one.

    Square blocks that a shard boundary cuts are agreed on, too: their pieces get the scale of their largest value. The
    bytes are not those of one process then, since values that each shard rounded by itself are rounded again.
    Weights that share one scale with others (`qtensor.share_scales`) agree with these, too, also in a single process.
    Call it on all ranks, after writing to shards by hand (an init function, `copy_` of a dense shard), and with
    storage="high_precision" after every optimizer step. Shards that hold the largest scale, or agree already, keep
    their bytes. A shard that holds only zeros never decides a scale. A weight that still has its high-precision initial
    value is re-encoded from that, and has the bytes of one process.

    Args:
        model_or_params: a module, or parameters (DTensors or plain; of those that are not quantized, or share no scale
            with other shards, only the groups that cut them take part). The parameters of a module, and pairs of a name
            and a parameter, are matched by name; parameters alone by shape, dtype, recipe and placements. Where these
            are all equal, the order decides, and must be the same on all ranks.

    Returns:
        The number of all-reduces: one for each distinct group with anything to agree on (two if its values do not
        fit into one message, which holds some thousands), 0 in a single process. Not counted is the one of 16 KiB in
        each other group that cuts parameters, which proves that no rank of it has anything to agree on.

    Raises:
        ValueError: parameters that can share scales are on the meta device, or are gathered, or cannot be written in
            place; a weight is there without another whose scale it shares.
        RuntimeError: on all ranks of a group, if they have different weights, or one of them failed; nothing has
            been written.

    Example:
        ```python
        >>> with quantized_model_init(NVFP4BlockScaling()):
        ...     model = fully_shard(nn.Linear(64, 64))
        >>> with torch.no_grad():
        ...     model.weight.to_local().copy_(torch.randn(64, 64))  # each shard chooses a scale of its own
        >>> sync_scales(model)  # now all have one; a single rank has nobody to ask
        0
        ```
    """
    if isinstance(model_or_params, torch.nn.Module):
        named = parameters_at_rest(model_or_params)
    else:
        named = [one if isinstance(one, tuple) else ("", one) for one in model_or_params]
    # a rank whose parameters share nothing still takes part, so that no other waits for it
    meeting = meeting_of([label_of(*pair) for pair in named], cuts_of([param for _, param in named]))
    return agree_on_scales("sync_scales", named, meeting)


def agree_on_scales(what: str, named: Iterable[tuple[str, Tensor]], meeting: Sequence[dist.ProcessGroup]) -> int:
    """Do `sync_scales` for (name, parameter), where "" stands for no name; `what` is the operation, for errors.

    meeting: groups that take part in any case (`meeting_of`), so that no rank waits for one whose parameters share no
    scale.
    """
    named = [(name, param) for name, param in named if _can_share(param)]
    # what is written into a gathered weight is lost at the next reshard
    if any(is_gathered(param) for _, param in named):
        raise ValueError(
            f"{what}: the parameters are those gathered for a forward, not the shards; call reshard() on their FSDP "
            "modules, and take model.parameters() anew"
        )
    shared = [(name, param, over) for name, param in named if (over := groups_sharing(param)) or partners_of(param)]
    if any(param.is_meta for _, param in named):
        tell_sharing(named, meeting)  # on other ranks they may be elsewhere
        raise ValueError(
            f"{what}: the parameters are on the meta device; call to_empty() and initialise or load them first"
        )
    labels: list[Label] = [*((label_of(name, param),) for name, param, _ in shared), MEETING]
    groups = [*(own for _, _, own in shared), list(meeting)]
    with torch.no_grad():
        shards = [local_of(param) for _, param, _ in shared]
        held: list[Any] = [scales_of(param) for _, param, _ in shared]
        partners = [scales.partners for scales in held]
        try:
            check_complete(what, partners)
            _refuse_unwritable(what, shared)
            claims = [scales.claim() for scales in held]
        except Exception:
            tell_groups(labels, groups, shards[0].device)
            raise
        met = torch.zeros(1, dtype=torch.float32, device=shards[0].device if shards else "cpu")
        (*agreed, _), collectives = max_over_groups(what, labels, [*claims, met], groups)
        agreed = pool([one and one.names for one in partners], [scales.pooled for scales in held], agreed)
        for scales, claim in zip(held, agreed, strict=True):
            scales.adopt(claim)
        # dense shards (storage="high_precision") keep their values
        encoded = [isinstance(shard, AllGatherHooks) for shard in shards]
        count_writes(param for (_, param, _), yes in zip(shared, encoded, strict=True) if yes)
    LOG.debug("%s: %d weights agreed on the scales they share, by %d all-reduces", what, len(shared), collectives)
    return collectives - len(set(meeting).difference(*(own for _, _, own in shared)))


def parameters_at_rest(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) of a module, after resharding what a forward without backward left gathered.

    A parameter with several names gets the least of them, since which one comes first may differ between ranks.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    names: dict[Tensor, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names[param] = min(name, names.get(param, name))
    return [(name, param) for param, name in names.items()]


def label_of(name: str, param: Tensor) -> str:
    """Return what must be equal on all ranks for a parameter, in words."""
    scales = scales_of(param)
    placements = param.placements if isinstance(param, DTensor) else None
    text = _describe(param.shape, param.dtype, placements, "dense" if scales is None else scales.kind())
    return f"{name}: {text}" if name else text


@functools.lru_cache(maxsize=4096)
def _describe(shape: torch.Size, dtype: torch.dtype, placements: tuple[Any, ...] | None, kind: str) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} {kind}, placed {placements}"


def is_gathered(param: Tensor) -> bool:
    """Return whether a parameter is what was gathered for a forward, not the shard."""
    local = local_of(param)
    return isinstance(local, AllGatherHooks) and local._sharding.shards is not None


def _refuse_unwritable(what: str, shared: Iterable[tuple[str, Tensor, object]]) -> None:
    """Raise ValueError if a shard that may be encoded anew cannot be written in place."""
    shards = {name or label_of(name, param): local_of(param) for name, param, _ in shared}
    parts = {
        f"{name}.{part}": tensor
        for name, shard in shards.items()
        if isinstance(shard, AllGatherHooks)
        for part, tensor in shard.parts().items()
    }
    problems = [f"{name}: {why}" for name, why in unwritable(parts).items()]
    if problems:
        raise ValueError(f"{what}: {'; '.join(problems)}. No quantized weight was written")


def _can_share(param: Tensor) -> bool:
    scales = scales_of(param)
    return scales is not None and scales.may_share()


def max_over_groups(
    what: str, labels: Sequence[Label], values: Sequence[Tensor], groups: Sequence[Sequence[dist.ProcessGroup]]
) -> tuple[list[Tensor], int]:
    """Return the elementwise maximum of each tensor over the groups that belong to it.

    Args:
        what: the operation, for errors.
        labels: what each tensor belongs to, see exchange.py; tensors of different ranks are matched by them.
        values: fp32, 1-D, on any devices.
        groups: for each tensor, the groups it is reduced over, none or more.

    Returns:
        The maxima (the tensors themselves if there is no group), and the number of all-reduces it took.

    Raises:
        RuntimeError: ranks of a group have different labels, or one of them failed (`tell_groups`). It is raised on
            all ranks of that group, and of the groups in which these ranks take part afterwards.
    """
    result, count = list(values), 0
    members: dict[dist.ProcessGroup, list[int]] = {}
    for index, own in enumerate(groups):
        for group in own:
            members.setdefault(group, []).append(index)
    trouble: RanksDifferError | None = None
    for group in in_order(labels, groups):
        indices = members[group]
        # ranks of this group do not know yet that another group found a difference
        if trouble is not None:
            tell_failure(channel_of(group), result[0].device)
            continue
        try:
            own_labels, own_values = [labels[index] for index in indices], [result[index] for index in indices]
            pieces, calls = reduce_max(what, own_labels, own_values, channel_of(group))
        except RanksDifferError as error:
            trouble = error
            continue
        count += calls
        for index, piece in zip(indices, pieces, strict=True):
            result[index] = piece
    if trouble is not None:
        raise trouble
    return result, count


def sum_over_groups(
    labels: Sequence[Label], values: Sequence[Tensor], groups: Sequence[Sequence[dist.ProcessGroup]]
) -> list[Tensor]:
    """Return the elementwise sum of each tensor (1-D, one dtype, any devices) over the groups that belong to it.

    One all-reduce for each distinct group. It proves nothing about the ranks: call it behind a `max_over_groups` with
    the same labels and groups.
    """
    result = list(values)
    # sums need one order of values on all ranks, as maxima do
    for group in in_order(labels, groups):
        own = sorted((index for index, over in enumerate(groups) if group in over), key=lambda index: labels[index])
        total = torch.cat([result[index].to(result[own[0]].device) for index in own])
        all_reduce(total, dist.ReduceOp.SUM, group)
        for index, piece in zip(own, total.split([result[index].numel() for index in own]), strict=True):
            result[index] = piece.to(result[index].device)
    return result


def tell_groups(labels: Sequence[Label], groups: Sequence[Sequence[dist.ProcessGroup]], device: torch.device) -> None:
    """Take the place of `max_over_groups` on a rank that failed: the others raise instead of waiting for it."""
    for group in in_order(labels, groups):
        tell_failure(channel_of(group), device)


def tell_sharing(named: Iterable[tuple[str, Tensor]], meeting: Sequence[dist.ProcessGroup]) -> None:
    """Take the place of `agree_on_scales` on a rank that failed: the others raise instead of waiting for it."""
    shared = [(name, param, over) for name, param in named if (over := groups_sharing(param))]
    labels, groups = [(label_of(name, param),) for name, param, _ in shared], [over for _, _, over in shared]
    shards = [local_of(param) for _, param, _ in shared]
    device = next((shard.device for shard in shards if not shard.is_meta), torch.device("cpu"))
    # a group that cannot reduce there takes a copy
    tell_groups([*labels, MEETING], [*groups, list(meeting)], device)


def meeting_of(
    labels: Sequence[str], cuts: Sequence[Sequence[tuple[int, dist.ProcessGroup]]]
) -> list[dist.ProcessGroup]:
    """Return all groups that cut parameters, in one order on all ranks; a value under MEETING is reduced over them.

    So no rank waits for one that has nothing to say about the parameters of a group.

    Args:
        labels: `label_of` each parameter.
        cuts: `cuts_of` the parameters.
    """
    least: dict[tuple[dist.ProcessGroup, ...], Label] = {}
    for label, cut in zip(labels, cuts, strict=True):
        over = tuple(group for _, group in cut)
        least[over] = min((label,), least.get(over, (label,)))
    return in_order(list(least.values()), list(least))


def groups_sharing(param: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups over which the shards of a parameter share a scale; empty for one that has no such scale."""
    scales = scales_of(param)
    return [] if scales is None else groups_of(param, scales.shared_along)


def partners_of(param: Tensor) -> Partners | None:
    """Return the weights with which a parameter shares its tensor-wide scale; None for one that has it alone."""
    scales = scales_of(param)
    return None if scales is None else scales.partners


def groups_of(param: Tensor, shared_along: Callable[[int], bool]) -> list[dist.ProcessGroup]:
    """Return the groups over which a parameter is cut along one of certain dims."""
    return [group for dim, group in cuts_of([param])[0] if shared_along(dim)]


def cuts_of(params: Sequence[Tensor]) -> list[list[tuple[int, dist.ProcessGroup]]]:
    """Return for each parameter (tensor dim, group) of every mesh dim that shards it over more than one rank.

    Parameters of the same layout get the same list.
    """
    known: dict[Any, list[tuple[int, dist.ProcessGroup]]] = {}
    found = []
    for param in params:
        layout = (param.device_mesh, param.placements, param.ndim) if isinstance(param, DTensor) else None
        if layout not in known:
            known[layout] = _cuts(param)
        found.append(known[layout])
    return found


def _cuts(param: Tensor) -> list[tuple[int, dist.ProcessGroup]]:
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:  # this rank is outside of it
        return []
    return [
        (placement.dim % param.ndim, mesh.get_group(number))
        for number, placement in enumerate(param.placements)
        # FSDP over TP on the same dim is a strided placement, which answers False to is_shard()
        if hasattr(placement, "dim") and mesh.size(number) > 1
    ]
