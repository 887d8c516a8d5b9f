"""What cannot be written in place, told before anything is written: by kinds of memory, and who lies on whose."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_hooks import sync_scales
from fsdp_hooks.writable import meeting, unwritable
from qtensor import NVFP4BlockScaling, QuantizedTensor, quantize
from tests.ranks import run_ranks_catching


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


REFUSED = {
    "expanded": (torch.zeros(1, 4).expand(3, 4), "its elements share memory (strides (0, 1)"),
    "overlapping": (torch.zeros(9).as_strided((4, 4), (1, 1)), "its elements share memory (strides (1, 1)"),
    "meta": (torch.zeros(3, device="meta"), "it is on the meta device"),
    "inference": (inference(), "it was made in inference mode"),
}
TAKEN = {
    "plain": torch.zeros(3, 4),
    "transposed": torch.zeros(3, 4).t(),
    "columns": torch.zeros(3, 4)[:, 1:3],
    "every other row": torch.zeros(6, 4)[::2],
    "one row expanded by one": torch.zeros(1, 4).expand(1, 4),
    "nothing expanded": torch.zeros(1, 0).expand(3, 0),
    "scalar": torch.zeros(()),
    "leaf": torch.zeros(3, requires_grad=True),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_torch_would_refuse_when_it_is_written(kind: str) -> None:
    tensor, why = REFUSED[kind]
    found = unwritable({"fine": torch.zeros(2), "w": tensor})
    assert list(found) == ["w"]
    assert found["w"].startswith(why)


def test_what_can_be_written() -> None:
    assert unwritable(TAKEN) == {}
    with torch.inference_mode():
        assert unwritable({"w": REFUSED["inference"][0]}) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how memory is mapped")
def test_a_file_mapped_for_reading(tmp_path: Path) -> None:
    np.arange(5000, dtype=np.float32).tofile(tmp_path / "values")
    mapped = {mode: np.memmap(tmp_path / "values", np.float32, mode) for mode in ("r", "c", "r+")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {mode: torch.from_numpy(array) for mode, array in mapped.items()}
    tensors["a piece"] = tensors["r"][4000:4010]
    assert unwritable(tensors) == dict.fromkeys(
        ("r", "a piece"), "its memory can only be read (a file mapped for reading, say); clone it"
    )
    torch.save({"w": tensors["c"].clone()}, tmp_path / "w.pt")
    assert unwritable(torch.load(tmp_path / "w.pt", mmap=True)) == {}, "torch maps copy on write"


def test_who_lies_on_whose_memory() -> None:
    fused = torch.zeros(6, 4)
    around = np.zeros(8, dtype=np.float32)
    tensors = {
        "fused": fused,
        "q": fused[:2],
        "k": fused[2:4],
        "alone": torch.zeros(6, 4),
        "tied": fused.t(),
        "numpy": torch.from_numpy(around),
        "numpy again": torch.from_numpy(around)[4:],
        "empty": fused[:0],
        "meta": torch.zeros(3, device="meta"),
    }
    assert sorted(map(sorted, meeting(tensors))) == [["fused", "k", "q", "tied"], ["numpy", "numpy again"]]
    assert list(meeting({"q": fused[:2], "k": fused[2:4]})) == [], "side by side"


def synced() -> None:
    mesh = init_device_mesh("cpu", (2,))
    names = ("first", "second")
    whole = {name: quantize(torch.ones(4, 32) * (seed + 1), NVFP4BlockScaling()) for seed, name in enumerate(names)}
    own = {name: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for name, each in whole.items()}
    for each in own.values():
        each.to_local().copy_(torch.full((2, 32), 1.0 + dist.get_rank()))
    if dist.get_rank() == 1:
        q: Any = quantize(torch.ones(2, 32) * 3, NVFP4BlockScaling())
        shown = {**q.parts(), "payload": q.payload[:1].expand(2, 16)}
        again = QuantizedTensor.from_parts(shown, q.recipe, q.dtype)
        own["second"] = DTensor.from_local(again, mesh, [Shard(0)], run_check=False)
    before = {name: {part: each.clone() for part, each in parts_of(value).items()} for name, value in own.items()}
    try:
        sync_scales(own.items())
    finally:
        for name, parts in before.items():
            assert all(torch.equal(each, parts_of(own[name])[part]) for part, each in parts.items())


def parts_of(value: Tensor) -> dict[str, Tensor]:
    return {part: each.reshape(-1).view(torch.uint8) for part, each in value.to_local().parts().items()}


def test_scales_are_not_agreed_on_where_a_shard_cannot_take_them() -> None:
    errors = run_ranks_catching(2, synced)
    assert errors[1].startswith("ValueError: sync_scales: second.payload: its elements share memory")
    assert "No quantized weight was written" in errors[1]
    assert "sync_scales" in errors[0]
    assert "AssertionError" not in "".join(errors)
