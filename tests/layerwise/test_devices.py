"""`calibrate(device="cuda")` means the current GPU, whose tensors say "cuda:0": what is there is not copied."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layerwise.calibrate import this_device


def test_a_device_is_the_one_that_tensors_there_name() -> None:
    assert this_device("cpu") == torch.device("cpu")
    with FakeTensorMode():  # a fake tensor has a device that need not be there
        assert this_device("cuda") == torch.device("cuda:0") == torch.ones(1, device="cuda").device
        assert this_device(torch.device("cuda:1")) == torch.device("cuda:1")
