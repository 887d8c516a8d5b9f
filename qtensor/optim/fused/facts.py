"""The facts that decide how a parameter takes its step: all that can change between two steps, read anew in each.

What follows from them (tasks.py) takes many times as long as to read them. So it is kept, beside the facts it was made
of, and holds as long as those of today are equal. They are values and no tensors: nothing that is kept keeps memory
alive, and a tensor that took the place of another is known by what it is, not by who it is.

What stands here has to be whatever `output_of` and `task_of` read, but for two things that each step takes anew, so
that they are not kept at all: the gradient's address, and the count of steps.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import local_of
from qtensor.optim.fused.decision import Rule
from qtensor.optim.fused.table import ALIGNED
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor.spec.recipes import Recipe

PLAIN = frozenset({Tensor, nn.Parameter})
STEP = "step"  # the entry of a state that counts

STRIDED = torch.strided  # a name of a module takes longer

Facts = list[object]


class FactsReader:
    """Reads the facts of one step's parameters, which have few recipes: their parts' names are looked up once each."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Recipe, tuple[str, ...]]] = {}  # by the recipe's id; it lives as long as this

    def read(self, param: Tensor, master: Tensor, state: Mapping[str, Any], rule: Rule) -> tuple[Facts, int] | None:
        """Return the facts of a parameter, and where its local gradient begins.

        Args:
            param: has a gradient.
            master: of it.
            state: what the inner optimizer keeps of the master.
            rule: of its group.

        Returns:
            None: nothing is to be kept of it, since something has no address or no strides, or is no tensor.
        """
        # a thousand parameters in a step, so each is asked as little as can be
        shard, own, grad = param, master, param.grad
        placed: tuple[object, ...] = ()
        if type(master) not in PLAIN and isinstance(master, DTensor):
            own = local_of(master)
            if isinstance(param, DTensor) and isinstance(grad, DTensor):
                shard, placed = local_of(param), (param.device_mesh, param.placements, param.shape)
                placed += (grad.device_mesh, grad.placements, master.device_mesh, master.placements)
                grad = local_of(grad)
        if type(grad) not in PLAIN or grad.layout is not STRIDED or type(own) not in PLAIN:  # type: ignore[union-attr]
            return None
        assert grad is not None
        address = grad.data_ptr()
        # the zeros without memory have none; so have empty gradients
        facts: Facts = [rule, placed, not address, address % ALIGNED, grad.dtype, grad.device, grad.shape]
        facts += grad.is_contiguous(), grad.is_neg(), own.layout, *state
        facts += own.data_ptr(), own.dtype, own.device, own.shape, own.is_contiguous()
        for name, entry in state.items():
            value = entry
            if type(entry) not in PLAIN and type(value := local_of(entry)) not in PLAIN:
                return None
            if name == STEP and rule.counts:
                facts += type(value), value.dtype, value.ndim
            else:
                facts += value.data_ptr(), value.dtype, value.device, value.shape, value.is_contiguous()
        if master is not param:
            stored = self._stored_by(shard, facts)
            if stored is None:
                return None
            for each in stored:
                facts += each.data_ptr(), each.dtype, each.shape, each.is_contiguous()
        return facts, address

    def _stored_by(self, shard: Tensor, facts: list[object]) -> Sequence[Tensor] | None:
        """Return what a shard stores, and add what else is known of it; None: nobody knows what it is."""
        facts.append(type(shard))
        if isinstance(shard, QuantizedTensor):
            recipe = shard.recipe
            known = self._names.get(id(recipe))
            if known is None:
                known = self._names[id(recipe)] = recipe, tuple(spec.name for spec in specs_of(recipe))
            facts += recipe, shard._lens, shard._sharding.shards is None, shard._preserved.value is None, shard.shape
            return [getattr(shard, name) for name in known[1]]
        if type(shard) is HighPrecisionWeight:
            facts.append(shard.dtype)
            return (shard.dense,)
        if type(shard) not in PLAIN or shard.layout is not STRIDED:
            return None
        return (shard,)
