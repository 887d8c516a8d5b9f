"""Quantized weights under SimpleFSDP: gathers inside of one graph carry the bytes of the parts, and nothing is rounded.

The reference is one process that holds the whole model. Its output is that of every rank, bit for bit; a rank's
gradients are its gradients with that rank's batch, summed over the ranks by the same reduce-scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, fx
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.fsdp_hooks.cases import (
    RECIPES,
    SQUARE_RECIPES,
    K,
    assert_same_bytes,
    assert_same_snapshot,
    batch,
    bits,
    build,
    local,
    mesh_of,
    shard,
    snapshot,
)
from tests.fsdp_hooks.simple_fsdp import (
    C10D,
    GATHER,
    WAIT,
    Gathers,
    Sent,
    gathers_in,
    graph_that_counts,
    simple_fsdp,
    whole,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.recipes import STAND_INS, WITH_HISTORY, facts
from tests.sampling import halves, sampled

EVERY = RECIPES | WITH_HISTORY
ROWS = {name: 384 if name in SQUARE_RECIPES else 112 for name in EVERY}  # 3 ranks: 128 each; 38, 38 and 36
HEAD = 33  # 3 ranks: 11 each; 2 ranks: 17 and 16


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def models(name: str, *, storage: str = "quantized") -> tuple[Any, Any]:
    """A model under SimpleFSDP, and the same one whole."""
    sharded, reference = (build(EVERY[name], (ROWS[name],), head=_head(name), storage=storage) for _ in range(2))
    return simple_fsdp(sharded, mesh_of_all()), reference


def _head(name: str) -> int:
    return ROWS[name] if name in SQUARE_RECIPES else HEAD


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train_once(run: Callable[[Tensor], Tensor], number: int = 0, scale: float = 1.0) -> Tensor:
    output = run(batch(number))
    (loss_of(output) * scale).backward()
    return output


def assert_same_step(sharded: Any, output: Tensor, reference: Any, expected: Tensor) -> None:
    """The output of one process, and its gradients, reduced and scattered."""
    assert_same_bytes(output.detach(), expected.detach(), "output")
    mesh = mesh_of_all()
    for (fqn, param), other in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        summed = DTensor.from_local(other.grad, mesh, [Partial()]).redistribute(placements=[Shard(0)])
        assert type(local(param.grad)) is Tensor
        assert_same_bytes(local(param.grad), local(summed), f"gradient of {fqn}")


def to_send(name: str) -> tuple[int, int]:
    """Bytes that a rank gives to gathers of quantized weights, by the definition of the format, and of plain ones."""
    ranks, recipe = dist.get_world_size(), EVERY[name]
    quantized, plain = 0, 2 * 2 * -(-K // ranks)  # bf16 weight and bias of the norm
    for rows in (ROWS[name], _head(name)):
        padded = -(-rows // ranks)
        quantized += facts(recipe).stored_bytes(padded, K)
        plain += 2 * padded  # the bias
    if facts(recipe).history:
        quantized -= 2 * 4 * recipe.amax_history_len  # products do not need it
    return quantized, plain


def assert_sent(found: Gathers, name: str) -> None:
    """The parts, as bytes; bf16 for what is no quantized weight."""
    quantized, plain = to_send(name)
    assert {dtype for dtype, _ in found} == {torch.uint8, torch.bfloat16}
    assert sum(sent for dtype, sent in found if dtype == torch.uint8) == quantized
    assert sum(sent for dtype, sent in found if dtype == torch.bfloat16) == plain


# -- what travels ------------------------------------------------------------------------------------------------------


def gathers_the_parts(name: str) -> None:
    sharded, reference = models(name)
    for (fqn, param), other in zip(sharded.named_parameters(), reference.named_parameters(), strict=True):
        if isinstance(other[1], QuantizedTensor):
            found = whole(param)
            assert isinstance(found, QuantizedTensor), fqn
            for part, value in other[1].parts().items():
                assert_same_bytes(found.parts()[part], value, f"{fqn}.{part}")
    with Sent() as sent:
        output = sharded(batch(0))
    assert_sent(sent.gathers, name)
    loss_of(output).backward()
    assert_same_step(sharded, output, reference, train_once(reference))


@halves("names", EVERY, kept=STAND_INS)
@sampled("ranks", [2, 3], kept=[3])
def test_eager_gathers_send_the_parts_and_are_exact(ranks: int, names: tuple[str, ...]) -> None:
    run_ranks_each(ranks, names, gathers_the_parts)


def gathers_in_one_graph(name: str, storage: str = "quantized") -> None:
    sharded, reference = models(name, storage=storage)
    for model in (sharded, reference):
        sync_scales(model)
    graphs: list[fx.Graph] = []
    torch.compiler.reset()
    compiled = torch.compile(sharded, fullgraph=True, backend=graph_that_counts(graphs))
    for number in range(2):
        # the first step compiles forward and backward
        with torch.compiler.set_stance("default" if number == 0 else "fail_on_recompile"):
            output = train_once(compiled, number)
        assert_same_step(sharded, output, reference, train_once(reference, number))
        for model in (sharded, reference):
            model.zero_grad()
    torch.compiler.reset()
    forward, backward = graphs
    assert_sent(gathers_in(forward), name)
    assert gathers_in(backward) == []
    # what backward keeps of a weight are its bytes: nothing that was computed is as large as one and wider than a byte
    shapes = {tuple(param.shape) for param in sharded.parameters() if param.ndim == 2}
    (saved,) = forward.output_node().args
    made = [node.meta["val"] for node in saved if isinstance(node, fx.Node) and node.op != "placeholder"]
    assert [each for each in made if tuple(each.shape) in shapes and each.itemsize > 1] == []


@sampled(
    ("ranks", "name"),
    [(2 + number % 2, name) for number, name in enumerate(EVERY)],
    kept=[(2 + number % 2, name) for number, name in enumerate(EVERY) if name == "nvfp4"],
)
def test_one_graph_of_all_gathers_is_exact(ranks: int, name: str) -> None:
    """Fails in a graph that asks whether the shards agree on a scale, and where it decodes before it sends."""
    run_ranks(ranks, gathers_in_one_graph, name)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "name"), [(3, "nvfp4"), (2, "float8_tensor"), (3, "mxfp8_square")])
def test_dense_shards_are_quantized_in_front_of_the_gather(ranks: int, name: str) -> None:
    run_ranks(ranks, gathers_in_one_graph, name, "high_precision")


def replicates_too(name: str) -> None:
    """2 replicas of 2 shards: a gather within each, and gradients that are summed over both mesh dims."""
    mesh = mesh_of(2, 2)
    sharded, reference = (build(EVERY[name], (ROWS[name],), head=_head(name)) for _ in range(2))
    simple_fsdp(sharded, mesh)
    graphs: list[fx.Graph] = []
    torch.compiler.reset()
    output = train_once(torch.compile(sharded, fullgraph=True, backend=graph_that_counts(graphs)))
    torch.compiler.reset()
    assert_same_bytes(output.detach(), train_once(reference).detach(), "output")
    assert {dtype for dtype, _ in gathers_in(graphs[0])} == {torch.uint8, torch.bfloat16}
    for (fqn, param), other in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        summed = DTensor.from_local(other.grad, mesh, [Partial()] * 2).redistribute(placements=[Replicate(), Shard(0)])
        assert_same_bytes(local(param.grad), local(summed), f"gradient of {fqn}")


@pytest.mark.full
def test_replicas_gather_within_themselves() -> None:
    run_ranks(4, replicates_too, "nvfp4")


def inductor_as_one_process(name: str) -> None:
    """Inductor fuses, and so rounds less often than eager code; the same for a model that gathers nothing."""
    sharded, reference = models(name)
    torch.compiler.reset()
    outputs = [train_once(torch.compile(model, fullgraph=True)) for model in (sharded, reference)]
    torch.compiler.reset()
    assert_same_step(sharded, outputs[0], reference, outputs[1])


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "name"), [(2, "nvfp4"), (3, "float8_row")])
def test_inductor_compiles_the_gathers_too(ranks: int, name: str) -> None:
    run_ranks(ranks, inductor_as_one_process, name, timeout=280)


# -- training and checkpoints ------------------------------------------------------------------------------------------


def trains_as_fsdp2(name: str, path: Path, backend: str | None) -> None:
    """FSDP2 takes means over the ranks. Of two, a sum has no order, and half a loss has half the gradients, exactly."""
    graph, _ = models(name)
    hooks = shard(build(EVERY[name], (ROWS[name],), head=_head(name)))
    torch.compiler.reset()
    run = graph if backend is None else torch.compile(graph, fullgraph=True, backend=backend)
    optimizers = [MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2) for model in (graph, hooks)]
    before = snapshot(graph)
    for number in range(3):
        outputs = [train_once(model, number, scale) for model, scale in ((run, 0.5), (hooks, 1.0))]
        assert_same_bytes(outputs[0].detach(), outputs[1].detach(), f"output {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_snapshot(snapshot(graph), snapshot(hooks), f"step {number}")
    torch.compiler.reset()
    assert any(not torch.equal(bits(value), bits(before[fqn])) for fqn, value in snapshot(graph).items())
    for number, (source, kind) in enumerate(
        ((graph, shard), (hooks, functools.partial(simple_fsdp, mesh=mesh_of_all())))
    ):
        saved = path / f"{name}-{number}"
        dcp.save({"model": source.state_dict()}, checkpoint_id=saved, planner=QuantizedSavePlanner())
        target = kind(build(EVERY[name], (ROWS[name],), head=_head(name), seed=1))
        dcp.load({"model": target.state_dict()}, checkpoint_id=saved, planner=QuantizedLoadPlanner())
        assert_same_snapshot(snapshot(target), snapshot(source), f"loaded {number}")


def test_steps_and_checkpoints_are_those_of_fsdp2(shared_tmp_path: Path) -> None:
    run_ranks_each(2, ("float8_row", "nvfp4"), trains_as_fsdp2, shared_tmp_path, None)


@pytest.mark.full
def test_steps_and_checkpoints_of_a_graph_are_those_of_fsdp2(shared_tmp_path: Path) -> None:
    run_ranks_each(2, STAND_INS, trains_as_fsdp2, shared_tmp_path, "aot_eager")


# -- gathered again in backward ----------------------------------------------------------------------------------------

aten = torch.ops.aten
WRAP = C10D._wrap_tensor_autograd.default
# What a policy saves, and what of quantized weights is sent again in backward: in eager code, in a graph.
SAVED = {
    "nothing": ((), "all", "all"),
    "products": ((aten.mm.default, aten.addmm.default), "all", "head"),  # a graph needs no other weight in backward
    "gathers": ((GATHER, WAIT, WRAP), "none", "none"),
}


def _policy(saved: tuple[Any, ...], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.MUST_RECOMPUTE


def gathers_again(what: str, name: str, *, compiled: bool) -> None:
    saved, eagerly, in_a_graph = SAVED[what]
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, saved))
    sharded, reference = models(name)

    def run(x: Tensor) -> Tensor:
        return checkpoint(sharded, x, use_reentrant=False, context_fn=contexts)

    expected = train_once(reference)
    if compiled:
        graphs: list[fx.Graph] = []
        torch.compiler.reset()
        output = train_once(torch.compile(run, fullgraph=True, backend=graph_that_counts(graphs)))
        torch.compiler.reset()
        first, again = (gathers_in(graph) for graph in graphs)
    else:
        with Sent() as sent:
            output = run(batch(0))
            first = [*sent.gathers]
            loss_of(output).backward()
        again = sent.gathers[len(first) :]
    assert_same_step(sharded, output, reference, expected)
    assert_sent(first, name)
    head = facts(EVERY[name]).stored_bytes(-(-_head(name) // dist.get_world_size()), K)
    wanted = {"all": to_send(name)[0], "head": head, "none": 0}[in_a_graph if compiled else eagerly]
    assert sum(sent for dtype, sent in again if dtype == torch.uint8) == wanted


def test_checkpointing_sends_the_parts_once_more_or_keeps_them() -> None:
    run_ranks_each(3, SAVED, gathers_again, "nvfp4", compiled=False)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_checkpointing_in_a_graph_sends_the_parts_once_more_or_keeps_them() -> None:
    """Also where decoding writes in place, of which torch warns: MXFP8."""
    for ranks, name in ((2, "nvfp4"), (3, "mxfp8")):
        run_ranks_each(ranks, SAVED, gathers_again, name, compiled=True)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refuses_dense_gathers() -> None:
    """On every rank, whether its shard is padded (the last one) or not, before anything is sent."""
    sharded, reference = models("mxfp8", storage="high_precision")
    with Sent() as sent, pytest.raises(NotImplementedError, match=REFUSED):
        sharded(batch(0))
    assert sent.gathers == []
    with pytest.raises(NotImplementedError, match=REFUSED), torch.no_grad():
        whole(sharded.head._parameters["weight"])
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(sharded, options=options)
    for fqn, param in reference.named_parameters():
        dense = param.dense if isinstance(param, HighPrecisionWeight) else param
        shard_ = dict(sharded.named_parameters())[fqn]
        for found in (full[fqn], shard_.full_tensor()):
            assert not isinstance(found, HighPrecisionWeight | QuantizedTensor)
            assert_same_bytes(found, dense, fqn)

    # operations gather operands for themselves, and see dense values as they do of a weight that is whole
    head, dense = sharded.head._parameters["weight"].detach(), reference.head.weight.detach().dense
    assert_same_bytes(head[3].full_tensor(), dense[3], "a row")
    assert_same_bytes(head.std().full_tensor(), dense.std(), "a deviation")


REFUSED = (
    r"gathering a shard of a quantized weight of shape .* with storage='high_precision' by DTensor\.redistribute "
    r"would send dense values, .* compile the module that gathers"
)


def test_dense_shards_are_not_gathered_dense_for_a_product() -> None:
    run_ranks(3, refuses_dense_gathers)


def refuses_rows_of_stacks_in_a_graph() -> None:
    """Pieces of a stack are put together under one scale, and no graph can ask whether they have one."""
    stack = quantize(torch.ones(3, 32, K, dtype=torch.bfloat16), RECIPES["nvfp4"])
    shard_ = distribute_tensor(stack, mesh_of_all(), [Shard(1)], src_data_rank=None)
    assert_same_bytes(whole(shard_).dequantize(), stack.dequantize(), "eager")
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"in a graph: .* share .*global_scale.*; shard the weight along dim 0"):
        torch.compile(lambda w: whole(w).dequantize(), fullgraph=True, backend="eager")(shard_)
    torch.compiler.reset()


def test_rows_of_stacks_that_share_a_scale_are_refused_in_a_graph() -> None:
    run_ranks(2, refuses_rows_of_stacks_in_a_graph)


def refuses_other_collectives() -> None:
    q = quantize(torch.ones(8, K, dtype=torch.bfloat16), RECIPES["mxfp8"])
    group = dist.group.WORLD
    assert group is not None
    dense, name = [torch.empty(8, K, dtype=torch.bfloat16) for _ in range(2)], group.group_name
    # newer torch names it so, and warns of the old name
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    calls: dict[str, Callable[[], Any]] = {
        "one buffer": lambda: all_gather(torch.cat(dense), q),
        "all_gather": lambda: dist.all_gather(dense, q),
        "all_reduce": lambda: dist.all_reduce(q),
        "a coalesced gather": lambda: C10D.all_gather_into_tensor_coalesced([q], 2, name),
        "a gather into a buffer": lambda: C10D.all_gather_into_tensor_out(q, 2, name, out=torch.cat(dense)),
        "a functional sum": lambda: C10D.all_reduce(q, "sum", name),
        "reduce_scatter": lambda: C10D.reduce_scatter_tensor(q, "sum", 2, name),
        "all_to_all": lambda: C10D.all_to_all_single(q, [4, 4], [4, 4], name),
    }
    for what, call in calls.items():
        assert "is not defined for quantized tensors" in _error_of(call), what


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    return ""


def test_no_other_collective_takes_a_quantized_tensor() -> None:
    run_ranks(2, refuses_other_collectives)
