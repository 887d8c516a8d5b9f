"""A device may lack its number: "cuda" is the current GPU, whose tensors say "cuda:0"; both are one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_adapters.streams import link
from fsdp_hooks.devices import same_device, this_device
from fsdp_hooks.ranks.across_ranks import device_of
from qtensor import MXFP8BlockScaling, QuantizedTensor
from qtensor.ops import stochastic
from qtensor.spec.registry import specs_of

MXFP8 = MXFP8BlockScaling()
SPECS = specs_of(MXFP8)


def test_a_device_is_the_one_that_tensors_there_name() -> None:
    assert this_device("cpu") == this_device("cpu:0") == torch.device("cpu")
    with FakeTensorMode():  # a fake tensor has a device that need not be there
        assert this_device("cuda") == torch.device("cuda:0") == torch.ones(1, device="cuda").device
        assert this_device(torch.device("cuda:1")) == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("cpu", "cpu:0", True),
        ("meta", "meta:0", True),
        ("cuda", "cuda:0", True),
        ("cuda:1", "cuda:1", True),
        ("cuda", "cuda:1", False),
        ("cuda:0", "cuda:1", False),
        ("cpu", "cuda", False),
    ],
)
def test_devices_are_the_same_if_their_tensors_are_on_one(one: str, other: str, same: bool) -> None:
    with FakeTensorMode():
        assert same_device(torch.device(one), torch.device(other)) is same
        assert same_device(torch.device(other), torch.device(one)) is same


def test_a_generator_of_the_current_gpu_rounds_weights_there() -> None:
    """torch.Generator("cuda") says that it is on "cuda"; this build has none, so what says so stands in for it."""
    current, next_one = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cuda:1"))
    with FakeTensorMode():
        parts = {spec.name: torch.empty(spec.shape((64, 96)), dtype=spec.dtype, device="cuda") for spec in SPECS}
        q = QuantizedTensor.from_parts(parts, MXFP8, torch.bfloat16)
        assert q.device == torch.device("cuda:0")
        assert _generator_for(q, current) is current
        with pytest.raises(ValueError, match=r"generator is on cuda:1 and .* is on cuda:0; nothing was written"):
            _generator_for(q, next_one)


def _generator_for(q: Any, generator: Any) -> Any:
    token = stochastic._wish.set(generator)
    try:
        return stochastic.generator_for([q])
    finally:
        stochastic._wish.reset(token)


def test_a_group_of_cpus_reduces_on_the_cpu_whatever_gpu_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    assert device_of(None, torch.device("cuda:1")) == torch.device("cpu")
    group = SimpleNamespace(name=lambda: "nccl")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert link._device(group) == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    with FakeTensorMode():
        assert link._device(group) == torch.device("cuda:0")
