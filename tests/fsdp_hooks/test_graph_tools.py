"""What others do to graphs that gather quantized weights: AOTAutograd's exports, torchtitan's tracer, torch's buckets.

Where torch has no such names, it has nothing of that.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torch._dynamo.functional_export")

import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
    aot_export_module,
)
from torch._guards import tracing
from torch._inductor.fx_passes.bucketing import bucket_all_gather
from torch._inductor.pattern_matcher import stable_topological_sort

from qtensor import MXFP8BlockScaling
from tests.fsdp_hooks.cases import assert_same_bytes, batch, build
from tests.fsdp_hooks.simple_fsdp import GATHER, gathers_in, graph_that_counts, simple_fsdp
from tests.fsdp_hooks.test_graph_fsdp import (
    EVERY,
    HEAD,
    ROWS,
    assert_same_step,
    assert_sent,
    loss_of,
    mesh_of_all,
    models,
    train_once,
)
from tests.ranks import run_ranks, run_ranks_each

pytestmark = pytest.mark.full


# -- exports -----------------------------------------------------------------------------------------------------------


def jointly(model: Any, x: Tensor, *, captured: bool) -> tuple[fx.Graph, Tensor]:
    """The graph of forward and backward at once, and the output that its compiled form gives.

    Args:
        model: with quantized weights, whole or sharded.
        x: the input.
        captured: whether dynamo captures the model first, as trainers do, or AOTAutograd takes it as it is.
    """
    with contextlib.ExitStack() as stack:
        taken = model
        if captured:
            taken = dynamo_graph_capture_for_export(model)(x)
            stack.enter_context(tracing(taken.meta["tracing_context"]))
        joint = aot_export_joint_with_descriptors(stack, taken, (x,))
        run = aot_compile_joint_with_descriptors(joint)
    held = [*dict(taken.named_parameters()).values(), *dict(taken.named_buffers()).values()]
    return joint.graph_module.graph, run(*held, x)


def exports(name: str, *, captured: bool) -> None:
    sharded, reference = models(name)
    expected = train_once(reference)
    graph, output = jointly(sharded, batch(0), captured=captured)
    assert_sent(gathers_in(graph), name)
    loss_of(output).backward()
    assert_same_step(sharded, output, reference, expected)
    alone = build(EVERY[name], (ROWS[name],), head=HEAD)
    graph, output = jointly(alone, batch(0), captured=captured)
    loss_of(output).backward()
    assert_same_bytes(output.detach(), expected.detach(), "output of a whole model")
    for (fqn, param), other in zip(alone.named_parameters(), reference.parameters(), strict=True):
        assert_same_bytes(param.grad, other.grad, f"gradient of {fqn}")
    assert gathers_in(graph) == []


@pytest.mark.parametrize("captured", [False, True])
def test_the_joint_graph_of_a_rank_is_exported_and_exact(captured: bool) -> None:
    run_ranks_each(3, ("nvfp4", "float8_row"), exports, captured=captured)


def refuses() -> None:
    """Of these errors torch is the author, for any wrapper subclass, and for any DTensor."""
    net = build(MXFP8BlockScaling(), (32,))
    of_tuple = torch.nn.Sequential(net)
    of_tuple.forward = lambda x: (net(x),)
    with pytest.raises(RuntimeError, match="aot_export is not currently supported with traceable tensor subclass"):
        aot_export_module(of_tuple, (batch(0),), trace_joint=False)
    plain = simple_fsdp(torch.nn.Linear(64, 32, dtype=torch.bfloat16), mesh_of_all())
    for model in (plain, simple_fsdp(net, mesh_of_all())):
        with pytest.raises(RuntimeError, match=r"non-fx-graphable type .*DTensorSpec"):
            torch.export.export(model, (batch(0),))


def test_what_torch_does_not_export_is_refused_by_torch() -> None:
    run_ranks(1, refuses)


# -- torchtitan --------------------------------------------------------------------------------------------------------


def trains_in_torchtitan(name: str) -> None:
    from torchtitan.experiments.graph_trainer.fsdp_patterns import find_fsdp_unshard_output
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    _, reference = models(name)
    expected = train_once(reference)

    def made() -> Any:
        return data_parallel(build(EVERY[name], (ROWS[name],), head=HEAD), mesh_of_all(), "fully_shard")

    net = made()
    assert_same_step(net, train_once(net), reference, expected)

    net, graphs = made(), list[fx.Graph]()
    torch.compiler.reset()
    output = train_once(torch.compile(net, fullgraph=True, backend=graph_that_counts(graphs)))
    torch.compiler.reset()
    assert_same_step(net, output, reference, expected)
    assert_sent(gathers_in(graphs[0]), name)
    # each part is found like a parameter of its own
    gathered = {node.args[0] for node in graphs[0].nodes if node.target is GATHER}
    found = [node for node in graphs[0].find_nodes(op="placeholder") if _found(find_fsdp_unshard_output, node)]
    assert len(found) == len(gathered)

    net = made()

    def step(x: Tensor) -> list[Tensor]:
        y = net(x)
        return [y, *torch.autograd.grad(loss_of(y), list(net.parameters()))]

    traced = minimal_fx_tracer(step, module=net)(batch(0))
    output, *grads = run_traced(traced, module=net)(batch(0))
    for param, grad in zip(net.parameters(), grads, strict=True):
        param.grad = grad
    assert_same_step(net, output, reference, expected)
    assert_sent(gathers_in(traced.gm.graph), name)


def _found(find: Callable[[fx.Node], Any], node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and find(node) is not None


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None or not hasattr(dist.fsdp, "DataParallelMeshDims"),
    reason="torchtitan is not installed, or this torch is older than its imports",
)
def test_torchtitans_simple_fsdp_and_tracer_take_quantized_weights() -> None:
    run_ranks_each(3, ("nvfp4", "float8_row"), trains_in_torchtitan)


# -- buckets -----------------------------------------------------------------------------------------------------------


def gathers_in_buckets(name: str) -> None:
    """torch's pass puts the gathers of a dtype into one: here all payloads and scales, and all biases."""
    sharded, reference = models(name)
    counts = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        before = len(_gathers(module))
        bucket_all_gather(module)
        stable_topological_sort(module.graph)
        module.recompile()
        counts.append((before, len(_gathers(module))))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    output = train_once(torch.compile(sharded, fullgraph=True, backend=backend))
    torch.compiler.reset()
    assert_same_step(sharded, output, reference, train_once(reference))
    (before, after), _ = counts
    assert after < before


def _gathers(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if "all_gather_into_tensor" in str(node.target)]


def test_torch_puts_gathers_of_parts_into_buckets() -> None:
    run_ranks_each(3, ("nvfp4", "float8_row"), gathers_in_buckets)
