"""Recording and replaying a sharded model: as one process does it, with no collective that depends on batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_hooks import unsharded
from layerwise.inputs.recording.recorder import Recorder
from layerwise.inputs.replaying.hooks import call_without_fsdp
from layerwise.inputs.values.stand_ins import replace_forward
from layerwise.stages.layers import find_layers
from tests.fsdp_hooks.cases import Collectives
from tests.layerwise.inputs.parents import PARENTS
from tests.layerwise.inputs.replaying import assert_same, id_batches, plain
from tests.ranks import run_ranks_each


def _sharded(name: str, **options: Any) -> Any:
    model = PARENTS[name]().eval()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    with replace_forward(model, lambda *_, **__: None):
        model(None)  # finds its root while the layers are in their places
    return model


@torch.no_grad()
def _replay(model: Any, batches: list[Tensor]) -> tuple[list[Any], list[list[Any]]]:
    """What a driver does: hold the root's own group, and one layer at a time."""
    outs: list[list[Any]] = [[] for _ in batches]
    model.unshard()
    with Recorder(model, find_layers(model), batches) as recorder:
        for index, (_, layer) in enumerate(recorder.layers):
            needed = torch.tensor(float(recorder.needs_parent(index)))
            dist.all_reduce(needed, dist.ReduceOp.MAX)
            with Collectives() as comms:
                recorder.prepare(index)
            assert not comms.counts, comms.counts
            with unsharded(layer), Collectives() as comms:
                for batch in range(len(recorder)):
                    args, kwargs = recorder.inputs(index, batch)
                    out = call_without_fsdp(layer, args, kwargs)
                    recorder.put(index, batch, out)
                    outs[batch].append([out])
            assert not comms.counts, comms.counts
            recorder.free(index)
        with Collectives() as comms:
            results = [recorder.run_tail(batch) for batch in range(len(recorder))]
        assert not comms.counts, comms.counts
    model.reshard()
    return results, outs


def _like_one_process(name: str) -> None:
    expected, expected_outs = plain(PARENTS[name]().eval(), id_batches())
    model = _sharded(name)
    modules = dict(model.named_modules())
    for share in (id_batches()[dist.get_rank() :: 2], id_batches() if dist.get_rank() else []):
        mine = [any(torch.equal(batch, one) for one in share if one.shape == batch.shape) for batch in id_batches()]
        results, outs = _replay(model, share)
        assert_same(results, [one for one, is_mine in zip(expected, mine, strict=True) if is_mine], name)
        assert_same(outs, [one for one, is_mine in zip(expected_outs, mine, strict=True) if is_mine], name)
    assert dict(model.named_modules()) == modules
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_same(plain(model, id_batches())[0], expected, f"{name}, the model afterwards")


def test_a_sharded_model_is_replayed_like_one_process_with_uneven_batches_and_with_none() -> None:
    run_ranks_each(2, ["plain", "deepstack", "shares and adds"], _like_one_process)


def _in_mixed_precision(name: str) -> None:
    model = _sharded(name, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    expected, expected_outs = plain(model, id_batches())
    results, outs = _replay(model, id_batches())
    assert expected[0].dtype is torch.bfloat16
    assert_same(outs, expected_outs, name)
    assert_same(results, expected, name)


def test_inputs_are_cast_as_mixed_precision_would() -> None:
    run_ranks_each(2, ["plain"], _in_mixed_precision)


def test_a_stand_in_is_no_fsdp_module() -> None:
    from layerwise.inputs.values.stand_ins import StandIn

    stand_in = StandIn(nn.Linear(2, 2), lambda *_: None)
    assert not isinstance(stand_in, FSDPModule)
    assert stand_in.in_features == 2
    assert list(stand_in.parameters()) == []
    assert list(stand_in.children()) == []
