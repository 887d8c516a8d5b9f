"""A gather copies each payload byte once into the buffer of the collective and once out of it, and both are FSDP2's.

What the hooks write themselves is counted at every operation: nothing, but what each case here names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

from benchmarks.gather_copies import ALL_GATHER, COPY_IN, COPY_OUT, Written, gather_writes, pad_shards
from fsdp_hooks import sync_scales
from qtensor import Float8DelayedScaling
from qtensor.spec.registry import specs_of
from tests.fsdp_hooks.cases import RECIPES, SQUARE, K, Net, batch, build, local, shard
from tests.ranks import run_ranks, run_ranks_each

FORMATS = ("float8_row", "float8_tensor", "mxfp8", "nvfp4", "mxfp8_square", "nvfp4_square")
UNEVEN = 33  # rows: on 2 ranks 17 and 16


def _net(recipe: Any, rows: int, **options: Any) -> tuple[Net, Any]:
    """A model, and its one block: an FSDP group whose shards have their padding, and which was never gathered."""
    net = shard(build(recipe, (rows,), head=96), **options)
    pad_shards(net, net.norm)
    return net, net.blocks[0]


def _sizes(block: Any) -> tuple[int, int]:
    """Bytes of a group's padded shard in all, weight and bias, and of one row of the weight."""
    ranks = dist.get_world_size()
    weight, bias = block.linear.weight, block.linear.bias
    rows = -(-weight.shape[0] // ranks)
    total, row = -(-bias.shape[0] // ranks) * bias.element_size(), 0
    for spec in specs_of(local(weight).recipe):
        shape = torch.Size(spec.shape((rows, K)))
        size = shape.numel() * spec.dtype.itemsize
        total += size if spec.gathered else 0
        row += size // rows if len(shape) else 0
    return total, row


def _assert_only_fsdps_own(counter: Written, shard_bytes: int, what: str) -> None:
    ranks = dist.get_world_size()
    assert counter.sent == {ALL_GATHER: shard_bytes}, (what, counter.sent)
    assert counter.written == {COPY_IN: shard_bytes, COPY_OUT: ranks * shard_bytes}, (what, counter.written)


def _copies_nothing(name: str, rows: int | None = None) -> None:
    net, block = _net(RECIPES[name], rows or (SQUARE[0] if "square" in name else 112))
    expected = _sizes(block)[0]
    _assert_only_fsdps_own(gather_writes(block), expected, f"{name}, first gather")
    _assert_only_fsdps_own(gather_writes(block), expected, f"{name}, refill")
    net(batch(0)).float().square().mean().backward()
    _assert_only_fsdps_own(gather_writes(block), expected, f"{name}, after a backward")


def test_the_hooks_copy_no_byte_of_even_shards() -> None:
    run_ranks_each(2, FORMATS, _copies_nothing)


def test_the_hooks_copy_no_byte_of_uneven_and_empty_shards() -> None:
    run_ranks_each(2, [name for name in FORMATS if "square" not in name], _copies_nothing, rows=UNEVEN)
    run_ranks_each(3, ["nvfp4"], _copies_nothing, rows=4)  # 2, 2 and no rows


def _copies_nothing_of_offloaded(name: str) -> None:
    _, block = _net(RECIPES[name], UNEVEN, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for when in ("first gather", "refill"):
        _assert_only_fsdps_own(gather_writes(block), _sizes(block)[0], f"{name} offloaded, {when}")


def test_the_hooks_copy_no_byte_of_offloaded_shards() -> None:
    run_ranks_each(2, ["float8_row", "nvfp4"], _copies_nothing_of_offloaded)


def _pads_what_was_moved(name: str) -> None:
    _, block = _net(RECIPES[name], UNEVEN)
    shard_, (_, row) = local(block.linear.weight), _sizes(block)
    moved = torch.ops.aten._to_copy.default(shard_, device="cpu")
    with Written() as counter:
        inputs, rows = moved.fsdp_pre_all_gather(None)
    missing = rows - shard_.shape[0]
    assert missing == dist.get_rank(), (rows, shard_.shape)
    assert counter.by_hooks() == ({"aten.copy_": 16 * row, "aten.zero_": row} if missing else {}), counter.by_hooks()
    for given, part in zip(inputs, moved.parts().values(), strict=True):
        if part.ndim:
            assert torch.equal(given[: part.shape[0]], part.view(torch.uint8))
            assert not given[part.shape[0] :].any(), "padding sends what was in memory"


def test_a_short_shard_that_was_moved_is_written_once_for_its_padding() -> None:
    """As when an offloaded shard goes to a GPU for its gather: all ranks must send as many rows, and a move takes the
    rows of the tensor along, not the padding behind them.
    """
    run_ranks_each(2, ["float8_row", "mxfp8", "nvfp4"], _pads_what_was_moved)


def _copies_what_one_rank_does_not_get_back(recipe: Any) -> None:
    _, block = _net(recipe, 112)
    total, _ = _sizes(block)
    missing = sum(part.nbytes for name, part in local(block.linear.weight).parts().items() if name != "payload")
    for when in ("first gather", "refill"):
        written = gather_writes(block).written
        first = {"aten.copy_": total - missing, "aten._to_copy": missing}  # FSDP's own: the payload, the bias
        assert written == (first if when == "first gather" else {"aten.copy_": total}), (when, written)


def test_on_one_rank_the_hooks_copy_the_scales_only() -> None:
    """FSDP hands back the first input alone, the payload."""
    run_ranks_each(1, [RECIPES["mxfp8"], RECIPES["nvfp4"]], _copies_what_one_rank_does_not_get_back)


def _copies_the_history(length: int) -> None:
    _, block = _net(Float8DelayedScaling(amax_history_len=length), 112)
    for _ in range(2):
        counter = gather_writes(block)
        assert sum(counter.by_hooks().values()) == 4 * length, counter.by_hooks()


def test_a_history_is_copied_from_the_shard_and_not_sent() -> None:
    run_ranks(2, _copies_the_history, 16)


def _copies_nothing_once_quantized(name: str) -> None:
    """Dense shards: what they are quantized into is handed over as it is."""
    net = shard(build(RECIPES[name], (112,), head=96, storage="high_precision"))
    sync_scales(net)
    pad_shards(net, net.norm)
    block: Any = net.blocks[0]
    shard_: Any = local(block.linear.weight)
    with Written() as quantizing:
        shard_.quantize()
    for _ in range(2):
        counter = gather_writes(block)
        assert counter.by_hooks() == quantizing.by_hooks(), (counter.by_hooks(), quantizing.by_hooks())
        assert counter.written[COPY_IN] == counter.sent[ALL_GATHER]


def test_what_a_dense_shard_is_quantized_into_is_not_copied() -> None:
    run_ranks_each(2, ["float8_row", "mxfp8", "nvfp4"], _copies_nothing_once_quantized)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x.clone(), {"aten.clone": 40}),
        (lambda x: x.view(2, 5).t().contiguous(), {"aten.clone": 40}),
        (lambda x: x.to(torch.bfloat16), {"aten._to_copy": 20}),
        (lambda x: x.copy_(torch.empty(10)), {"aten.copy_": 40}),
        (lambda x: torch.cat([x, x]), {"aten.cat": 80}),
        (lambda x: x.view(torch.uint8)[:4].reshape(2, 2).as_strided((1,), (1,)), {}),
        (lambda x: x.new_empty(3), {}),
    ],
)
def test_the_counter_sees_what_is_written(call: Any, expected: dict[str, int]) -> None:
    x: Tensor = torch.ones(10)
    with Written() as counter:
        call(x)
    assert counter.by_hooks() == expected
