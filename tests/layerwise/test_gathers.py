"""Each layer is gathered once, and nothing is communicated for a batch, whoever has how many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from layerwise import AWQ, GPTQ, Event, calibrate
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize_
from tests.fsdp_hooks.cases import Collectives
from tests.layerwise.algorithm_table import MAIN
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves, sampled

DIM, LAYERS = 32, 4
RECIPE = NVFP4BlockScaling()
ALGORITHMS = {**MAIN, "one hessian at a time": GPTQ(hessians="one_at_a_time")}


class Block(nn.Module):
    """A norm and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 48)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def sharded(layers: int = LAYERS, *, embedding: bool = False, **options: Any) -> Net:
    """Every layer a group, and the root; the embedding too where it is asked for."""
    net = Net(layers)
    for layer in net.layers:
        fully_shard(layer, **options)
    if embedding:
        fully_shard(net.embed, **options)
    fully_shard(net, **options)
    return net


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 48, (2, 3 + index % 3), generator=generator) for index in range(count)]


_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


class Gathers:
    """FSDP2's all-gather of one group, counted."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name, self.counts = name, counts

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.counts[self.name] += 1
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


def counted(net: nn.Module) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, module in net.named_modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gathers(name, counts))  # type: ignore[arg-type]
    return counts


SHARDINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept after forward": {"reshard_after_forward": False},
    "root resharded": {"reshard_after_forward": True},
    "embedding of its own": {"embedding": True},
}


def _gathers(case: tuple[str, str, str]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Gathers of each group, by the end and by the third layer; then gathers that one forward of the model costs."""
    sharding, algorithm, data = case
    net = sharded(**SHARDINGS[sharding])
    counts = counted(net)
    own = batches(4)[: 4 if dist.get_rank() == 0 else 1]

    def loop(model: nn.Module) -> None:
        for ids in own:
            assert model(ids) is None

    midway: dict[str, int] = {}

    def note(event: Event) -> None:
        if (event.kind, event.index) == ("metrics", 2):
            midway.update(counts)

    calibrate(
        net,
        loop if data == "loop" else iter(own),
        recipe=RECIPE,
        algorithm=ALGORITHMS[algorithm],
        on_event=note,
        progress=False,
    )
    assert all(isinstance(param, DTensor) for param in net.parameters())
    by_end = dict(counts)
    counts.clear()
    with torch.no_grad():
        net(batches(1)[0])
    return by_end, midway, dict(counts)


CASES = [
    *(("default", algorithm, "list") for algorithm in MAIN),
    ("kept after forward", "Max", "list"),
    ("root resharded", "Max", "list"),
    ("embedding of its own", "Max", "loop"),
]


@halves("cases", CASES, [case for case in CASES if case[0] != "default" or case[1] == "GPTQ"])
def test_every_layer_is_gathered_once(cases: tuple[tuple[str, str, str], ...]) -> None:
    for rank in run_ranks_each(2, cases, _gathers):
        for case, (by_end, midway, forward) in zip(cases, rank, strict=True):
            layers = [f"layers.{index}" for index in range(LAYERS)]
            outside = ["", "embed"] if case[0].startswith("embedding") else [""]
            assert {name: by_end[name] for name in layers} == dict.fromkeys(layers, 1), case
            assert {name: midway[name] for name in layers[:3]} == dict.fromkeys(layers[:3], 1), case
            assert set(by_end) == {*layers, *outside}, case
            assert {name: by_end[name] for name in outside} == dict.fromkeys(outside, 1), case
            assert forward == dict.fromkeys([*layers, *outside], 1), (case, "all are sharded, and gathered again")


def _collectives(case: tuple[str, tuple[int, int]]) -> dict[str, int]:
    algorithm, counts = case
    net = sharded(2)
    # explicit prefetching, which a forward of the root would begin
    net.set_modules_to_forward_prefetch([net.layers[0]])
    net.layers[0].set_modules_to_forward_prefetch([net.layers[1]])
    data = batches(counts[dist.get_rank()])
    with Collectives() as collectives:
        calibrate(net, data, recipe=RECIPE, algorithm=ALGORITHMS[algorithm], progress=False)
    return dict(collectives.counts)


@sampled("algorithm", ALGORITHMS, ["Max", "AWQ", "GPTQ"])
def test_no_batch_costs_a_collective(algorithm: str) -> None:
    cases = [(algorithm, counts) for counts in ((1, 1), (0, 5))]
    for rank in run_ranks_each(2, cases, _collectives):
        assert rank[0]["_allgather_base_"] >= 2 + 1
        assert rank[0] == rank[1]


def expanded(value: Any) -> dict[str, Any]:
    """The parts of a quantized tensor as this rank has them."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.parts() if isinstance(local, QuantizedTensor) else {"": local.detach()}


# -- a result in a checkpoint ------------------------------------------------------------------------------------------


def _save(directory: str) -> None:
    net = sharded()
    data = batches(3)[dist.get_rank() :]
    result = calibrate(net, data, recipe=MXFP8BlockScaling(), algorithm=AWQ(), progress=False)
    dcp.save(result.state_dict(), checkpoint_id=directory, planner=QuantizedSavePlanner())


def _load(directory: str) -> dict[str, Any]:
    """A quantized model, sharded over these ranks, with what the checkpoint has."""
    net = Net()
    quantize_(net, MXFP8BlockScaling())
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    state = net.state_dict()
    wanted = set(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)
    state = {
        name: value
        for name, value in state.items()
        if name in wanted or any(entry.startswith(f"{name}.") for entry in wanted)
    }
    dcp.load(state, checkpoint_id=directory, planner=QuantizedLoadPlanner())
    own = {name: expanded(value) for name, value in state.items()}
    return {f"{name}:{part}": of_all_ranks(tensor) for name, parts in own.items() for part, tensor in parts.items()}


def of_all_ranks(tensor: Tensor) -> tuple[torch.dtype, Any]:
    """The bytes of all rows; of what has no rows, those of one rank."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, bits(tensor))
    return tensor.dtype, np.concatenate(rows) if tensor.ndim else rows[0]


def bits(tensor: Tensor) -> Any:
    return tensor.detach().reshape(tensor.shape or (1,)).contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_saved_result_is_loaded_into_a_quantized_model_on_another_number_of_ranks(
    ranks: int, shared_tmp_path: Path
) -> None:
    run_ranks(2, _save, str(shared_tmp_path))
    loaded = run_ranks(ranks, _load, str(shared_tmp_path))[0]
    net = Net()
    # One process with all batches that both ranks had comes to the same.
    data = [*batches(3), *batches(3)[1:]]
    result = calibrate(net, data, recipe=MXFP8BlockScaling(), algorithm=AWQ(), progress=False).state_dict()
    expected = {f"{name}:{part}": tensor for name, value in result.items() for part, tensor in expanded(value).items()}
    assert any(name.startswith("layers.0.norm.weight") for name in expected), "factors went into it"
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        dtype, found = loaded[name]
        assert dtype == tensor.dtype, name
        np.testing.assert_array_equal(found, bits(tensor), err_msg=name)


# -- which ranks take part ---------------------------------------------------------------------------------------------


def _with_own_data(kind: str) -> dict[str, float | None]:
    """The largest input of each linear, where the second rank has no data."""
    net, ids = sharded(2), batches(2)

    def loop(model: nn.Module) -> None:
        for one in ids:
            model(one)

    first = loop if kind == "loop" else ids
    result = calibrate(net, first if dist.get_rank() == 0 else None, recipe=RECIPE, progress=False)
    return {record.name: record.input_amax for record in result.report.records}


def test_a_rank_without_data_needs_no_loop() -> None:
    (lists, loops), others = run_ranks_each(2, ["list", "loop"], _with_own_data)
    assert lists == loops
    assert others == [lists, loops]
    assert None not in lists.values()


def _with_part_of_the_ranks() -> str:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with pytest.raises(ValueError, match="calibrate: ") as refused:
        calibrate(sharded(2), batches(1), recipe=RECIPE, process_group=alone, progress=False)
    return str(refused.value)


def test_a_group_without_all_ranks_that_hold_the_model_is_refused() -> None:
    text = "calibrate: embed.weight is sharded over ranks that are not in process_group: [{}]; give the group of all"
    for rank, found in enumerate(run_ranks(2, _with_part_of_the_ranks)):
        assert found.startswith(text.format(1 - rank))
