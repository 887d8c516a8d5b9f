"""Checkpoints of tensors on a GPU: the bytes are those of the CPU, whichever way they come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dcp_adapters import QuantizedStager
from dcp_adapters.save.steps import checksum_table
from qtensor import quantize
from tests.dcp_adapters.cases import EVERY, held, load, save, values
from tests.devices import every_device
from tests.recipes import STAND_INS
from tests.sampling import sampled

ROWS, COLUMNS = 128, 512
DENSE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def weight(kind: str, seed: int, device: str) -> Any:
    x = values((ROWS, COLUMNS), seed, torch.float32)
    return (x.to(DENSE[kind]) if kind in DENSE else quantize(x, EVERY[kind])).to(device)


def on_cpu(state: dict[str, Any]) -> Any:
    return held({name: value.cpu() for name, value in state.items()})


@every_device
@sampled("source", [*EVERY, *DENSE], [*STAND_INS, "bfloat16"])
def test_a_converting_load_gives_the_bytes_of_the_cpu(source: str, device: str, tmp_path: Path) -> None:
    """Into every kind of target; on the CPU it is the trip through the other device's code that is left out."""
    save({"w": weight(source, 0, "cpu")}, tmp_path)
    for target in [*EVERY, *DENSE]:
        expected, found = {"w": weight(target, 1, "cpu")}, {"w": weight(target, 1, device)}
        before = on_cpu(found)
        load(expected, tmp_path, on_mismatch="convert")
        load(found, tmp_path, on_mismatch="convert")
        assert found["w"].device.type == device
        assert on_cpu(found) == held(expected), target
        assert on_cpu(found) != before


@every_device
@pytest.mark.parametrize("room", [checksum_table.KEPT, 0])
def test_what_is_saved_from_a_device_is_what_it_held(device: str, room: int, tmp_path: Path) -> None:
    """With copies that wait for being written, and without; the load compares every checksum."""
    live = {name: weight(name, number, device) for number, name in enumerate(EVERY)}
    with patch.object(checksum_table, "KEPT", room):
        save(live, tmp_path)
    target = {name: weight(name, 77, device) for name in EVERY}
    assert on_cpu(target) != on_cpu(live)
    load(target, tmp_path, verify_checksums=True)
    assert on_cpu(target) == on_cpu(live)


@pytest.mark.gpu
def test_a_save_copies_each_tensor_from_the_gpu_once(tmp_path: Path) -> None:
    live = {name: weight(name, 0, "cuda") for name in EVERY}
    parts = sum(len(q.parts()) for q in live.values())
    copies = []
    original = torch.Tensor.cpu
    with patch.object(torch.Tensor, "cpu", lambda each: (copies.append(each.is_cuda), original(each))[1]):
        save(live, tmp_path)
    assert sum(copies) == parts


@every_device
@pytest.mark.parametrize("pin_memory", [None, False])
def test_a_snapshot_holds_what_queued_kernels_write(device: str, pin_memory: bool | None) -> None:
    """The kernels in front take tens of milliseconds, during which the CPU asks for the snapshot."""
    stager = QuantizedStager(max_snapshots=1, pin_memory=pin_memory, wait_timeout=0)
    live = {name: weight(name, 0, device) for name in EVERY}
    new = {name: weight(name, 1, device) for name in EVERY}
    expected, old = on_cpu(new), on_cpu(live)
    assert expected != old
    busy = torch.randn(64 if device == "cpu" else 8192, 64 if device == "cpu" else 8192, device=device)
    for _ in range(2):  # in memory that is new, and in memory that was used before
        for _ in range(8):
            busy = (busy @ busy).clamp(-1, 1)
        for name, q in live.items():
            q.copy_(new[name])
        staged = stager.stage(live)
        for name, q in live.items():
            q.copy_(weight(name, 2, device))
        assert held(staged) == expected
        del staged
    stager.close()
