"""MasterWeightOptimizer: any torch optimizer on fp32 masters, its result quantized back into the shards.

    step:   grad (q.dtype) -> fp32 -> inner.step() on the masters -> amax of each master shard
            -> one all-reduce for all tensor-wide scales of the model -> requantize every shard in place

A master is the shard in fp32, a DTensor where the parameter is one; parameters in fp32 are their own masters. The bytes
of a parameter are a function of its full master and the recipe alone (with delayed scaling, of its history, too), so
they are the same for every world size, and a step that moves no master moves no byte:

    bytes == quantize(master)                     once a step has written the parameter
    master == dequantize(bytes), still "fresh"    before, where the master was made from the bytes (quantizing again
                                                  could choose other codes for the same values, so a fresh parameter is
                                                  written only when some shard's master moved)

`param_groups` holds the parameters themselves (schedulers, clipping and torch.distributed.checkpoint.state_dict see an
ordinary optimizer); `state[p]` holds "master_weight" beside the inner optimizer's own entries.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.scale_sync import (
    SharesScales,
    groups_sharing,
    local_of,
    max_over_groups,
    shard_groups,
    sync_scales,
)
from qtensor.masters import digest_of, master_of, outside_writes, refill
from qtensor.tensor import QuantizedTensor

__all__ = ["MasterWeightOptimizer"]

MASTER = "master_weight"


class MasterWeightOptimizer(torch.optim.Optimizer):
    """An optimizer with fp32 master weights for quantized (and other low-precision) parameters.

    Building it is a collective where parameters have tensor-wide scales (they are agreed on first, see
    `fsdp_hooks.sync_scales`); so is `step`.

    Args:
        optimizer_cls: the optimizer that updates the masters, such as torch.optim.AdamW.
        params: parameters or parameter groups, as for any torch optimizer; DTensors after fully_shard.
        **optimizer_kwargs: passed to `optimizer_cls`.

    Raises:
        ValueError: a parameter is on the meta device.
    """

    def __init__(
        self, optimizer_cls: type[torch.optim.Optimizer], params: Iterable[Any], **optimizer_kwargs: Any
    ) -> None:
        self._inner: torch.optim.Optimizer | None = None
        self._masters: dict[Tensor, Tensor] = {}
        self._fresh: set[Tensor] = set()
        self._written: dict[Tensor, Tensor] = {}  # digests of what low-precision parameters held after our last write
        super().__init__(params, {})
        everything = [param for group in self.param_groups for param in group["params"]]
        _refuse_meta(everything)
        sync_scales(everything)
        self._inner = optimizer_cls([self._master_group(group) for group in self.param_groups], **optimizer_kwargs)
        self.defaults = self._inner.defaults
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; a collective where they have tensor-wide scales."""
        if self._inner is not None:
            given = param_group["params"]
            _refuse_meta([given] if isinstance(given, Tensor) else (given := list(given)))
            param_group = {**param_group, "params": given}
        super().add_param_group(param_group)
        if self._inner is not None:
            group = self.param_groups[-1]
            sync_scales(group["params"])
            self._inner.add_param_group(self._master_group(group))
            group.update(_options(self._inner.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters and requantize the parameters in place.

        Call it on all ranks; it makes one all-reduce a group of shards.
        A parameter that others wrote since the last step (a checkpoint loaded later, a copy_) keeps that value: its
        master starts anew from it.
        """
        assert self._inner is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_outside_writes()
        stepped = [param for param in self._masters if param.grad is not None]
        self._lend_grads(stepped)
        try:
            self._inner.step()
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                group.update(_options(inner))  # some optimizers keep state in their groups
        finally:
            for param in stepped:
                if self._masters[param] is not param:
                    self._masters[param].grad = None
        self._write_back(stepped)
        self._publish_state()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned.

        Masters keep fp32; the base class would cast them to the parameter's dtype.

        Raises:
            ValueError: groups or parameters differ, or a master weight is missing or has another shape; nothing has
                been loaded then.
        """
        assert self._inner is not None
        params = [param for group in self.param_groups for param in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = {
            param: state_dict["state"][index]
            for param, index in zip(params, ids, strict=False)
            if index in state_dict["state"]
        }
        self._check_masters(saved)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for param, master in self._masters.items():
            if master is not param:
                if param in saved:
                    with torch.no_grad():
                        master.copy_(saved[param][MASTER])
                else:  # saved before its first step, where the parameter decides
                    refill(master, param)
            self._start_anew(param)
        for param in saved:  # torch restores an optimizer before its model: until the next step loaded masters decide
            self._written.pop(param, None)
        position = {param: index for index, param in enumerate(params)}
        self._inner.load_state_dict(
            {
                "state": {
                    position[param]: {key: value for key, value in values.items() if key != MASTER}
                    for param, values in saved.items()
                },
                "param_groups": [
                    {
                        **_options(group),
                        "params": indices,
                    }
                    for group, indices in zip(self.param_groups, self._positions(), strict=True)
                ],
            }
        )
        if saved:
            self._publish_state()

    def _positions(self) -> list[list[int]]:
        """The parameter ids of each group, numbered as Optimizer.state_dict numbers them."""
        numbers = iter(range(len(self._masters)))
        return [[next(numbers) for _ in group["params"]] for group in self.param_groups]

    def _check_masters(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        for number, (param, values) in enumerate(saved.items()):
            if self._masters[param] is param:
                continue
            found = values.get(MASTER)
            if found is None or found.shape != param.shape:
                what = "no master weight" if found is None else f"a master weight of shape {tuple(found.shape)}"
                raise ValueError(
                    f"MasterWeightOptimizer.load_state_dict: state {number} holds {what}, expected one of shape "
                    f"{tuple(param.shape)}; was it saved by another optimizer?"
                )

    def _master_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group over masters."""
        for param in group["params"]:
            self._masters[param] = master_of(param)
            self._start_anew(param)
        options = _options(group)
        return {**options, "params": [self._masters[param] for param in group["params"]]}

    def _lend_grads(self, stepped: list[Tensor]) -> None:
        assert self._inner is not None
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_options(group))
        for param in stepped:
            master = self._masters[param]
            if master is not param:
                assert param.grad is not None
                master.grad = param.grad.to(master.dtype)

    def _start_anew(self, param: Tensor) -> None:
        """Take note of a parameter's bytes; a quantized one is fresh until a step moves its master."""
        if isinstance(local_of(param), QuantizedTensor):
            self._fresh.add(param)
        if self._masters[param] is not param:
            self._written[param] = digest_of(param)

    def _follow_outside_writes(self) -> None:
        """Give parameters that were written by others since (a load, a copy_) a new master."""
        for param in outside_writes(self._written):
            refill(self._masters[param], param)
            self._start_anew(param)

    def _write_back(self, stepped: list[Tensor]) -> None:
        """Masters -> parameters.

        The amaxes of shared scales, and whether a parameter moved on any rank, travel in one all-reduce. All trainable
        parameters that are gathered quantized take part in it every time, so that ranks never differ in what they
        reduce.
        """
        written: set[Tensor] = set()
        quantized: list[tuple[Tensor, Any, Tensor]] = []
        dense: list[tuple[Tensor, SharesScales]] = []  # storage="high_precision"
        for param, master in self._masters.items():
            local = local_of(param)
            if isinstance(local, QuantizedTensor):
                if param.requires_grad:
                    quantized.append((param, local, local_of(master)))
                continue
            if param.grad is not None and master is not param:
                local.copy_(local_of(master))
                written.add(param)
            if isinstance(local, SharesScales) and param.requires_grad:
                dense.append((param, local))
        if quantized or dense:
            amaxes, moved = self._agree(quantized, dense)
            move = [True] * len(quantized)
            if self._fresh or len(stepped) < len(self._masters):  # a host sync, rare once all have been written
                move = [bool(flag) for flag in moved.tolist()]
            for (param, local, master), amax, moves in zip(quantized, amaxes, move, strict=True):
                if moves:
                    local.write(master, amax, step=True)
                    self._fresh.discard(param)
                    written.add(param)
        for param, master in self._masters.items():
            if master is not param and (param in written or param not in self._written):
                self._written[param] = digest_of(param)

    def _agree(
        self, quantized: list[tuple[Tensor, Any, Tensor]], dense: list[tuple[Tensor, SharesScales]]
    ) -> tuple[list[Tensor | None], Tensor]:
        """Over all shards: the amaxes of shared scales (None where no other shard shares one), and who moved [n].

        Dense shards adopt theirs.
        """
        values: list[Tensor] = []
        groups: list[list[dist.ProcessGroup]] = []
        for param, local, master in quantized:
            sharing = groups_sharing(param)
            values += [local.shared_amax(master) if sharing else master.new_zeros(0), self._moved(param, local, master)]
            groups += [sharing, shard_groups(param)]
        claiming = [(shard, sharing) for param, shard in dense if (sharing := groups_sharing(param))]
        values += [shard.scale_claim() for shard, _ in claiming]
        groups += [sharing for _, sharing in claiming]
        agreed, _ = max_over_groups(values, groups)
        both = 2 * len(quantized)
        for (shard, _), claim in zip(claiming, agreed[both:], strict=True):
            shard.adopt_scale(claim)
        amaxes = [amax if sharing else None for amax, sharing in zip(agreed[:both:2], groups[:both:2], strict=True)]
        return amaxes, torch.cat(agreed[1:both:2]) if quantized else torch.zeros(0)

    def _moved(self, param: Tensor, local: QuantizedTensor, master: Tensor) -> Tensor:
        """fp32 [1]: whether this rank's master moved (1) or not (0)."""
        still = param.grad is None or (param in self._fresh and torch.equal(local.dequantize(torch.float32), master))
        return torch.zeros(1, device=master.device) if still else torch.ones(1, device=master.device)

    def _publish_state(self) -> None:
        """Fill `state` with what state_dict() must hold; references only."""
        assert self._inner is not None
        for param, master in self._masters.items():
            entries = self._inner.state.get(master)
            if entries is None and param.grad is None:
                continue
            self.state[param] = {**({} if master is param else {MASTER: master}), **(entries or {})}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _refuse_meta(params: Iterable[Tensor]) -> None:
    if any(param.is_meta for param in params):
        raise ValueError(
            "MasterWeightOptimizer: parameters are on the meta device; call to_empty() and load or initialise them "
            "first"
        )
