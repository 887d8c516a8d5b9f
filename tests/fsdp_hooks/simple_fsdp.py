"""FSDP without hooks: parameters that are gathered where a module reads them, so that a graph sees the gathers.

This is the idea of torchtitan's SimpleFSDP. Each parameter is a DTensor, sharded on dim 0, and a property of the
module's class takes its place:

    read       shard -> redistribute(Replicate) -> to_local: the whole parameter, by a functional all-gather
    backward   whole gradient, Partial -> Shard(0): a reduce-scatter, which sums over the ranks

`state_dict`, `parameters` and optimizers look into `module._parameters`, and so see the shards.

What the gathers send is counted in eager code by `Sent`, and in a graph by `graph_that_counts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qtensor import QuantizedTensor

C10D = torch.ops._c10d_functional
GATHER, WAIT = C10D.all_gather_into_tensor.default, C10D.wait_tensor.default
Gathers = list[tuple[torch.dtype, int]]  # of each gather the dtype and the bytes that this rank gives


def whole(shard: Any) -> Tensor:
    """The parameter behind a shard, differentiable; every rank has its own part of the gradient's sum."""
    mesh = shard.device_mesh
    gathered = shard.redistribute(placements=[Replicate()] * mesh.ndim)
    return gathered.to_local(grad_placements=[Partial()] * mesh.ndim)


def simple_fsdp(model: Any, mesh: Any) -> Any:
    """Shard every parameter of a model, the same on all ranks, over the last dim of a mesh, in place."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            shard = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shard, requires_grad=param.requires_grad))
        if own:
            module.__class__ = _gathering(type(module), tuple(own))
    return model


@functools.cache
def _gathering(kind: type, names: tuple[str, ...]) -> type:
    """A subclass whose parameters are whole where they are read."""
    return type(f"Gathering{kind.__name__}", (kind,), {name: property(_reader(name)) for name in names})


def _reader(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda module: whole(module._parameters[name])


class Sent(TorchDispatchMode):
    """The gathers of eager code, those of a quantized tensor's parts one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers: Gathers = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_of_parts = [kind for kind in types if issubclass(kind, QuantizedTensor)]
        if func.namespace == "_c10d_functional" and made_of_parts:
            with self:  # else the mode would not see what is done to the parts
                return made_of_parts[0].__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if func is GATHER:
            self.gathers.append((args[0].dtype, args[0].nbytes))
        return result


def gathers_in(graph: fx.Graph) -> Gathers:
    """The gathers of a graph, each waited for and by nothing but that used, which compilers' passes look for."""
    found = []
    for node in graph.nodes:
        if node.target is GATHER:
            assert [user.target for user in node.users] == [WAIT], node
            sent = node.args[0].meta["val"]
            found.append((sent.dtype, sent.nbytes))
        assert "all_gather" not in str(node.target) or node.target is GATHER, node
    return found


def graph_that_counts(graphs: list[fx.Graph]) -> Any:
    """The backend aot_eager, which adds the graphs of forward and backward to a list."""

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
