"""Devices that may lack a number: torch.device("cuda") is the current GPU, whose tensors say "cuda:0".

Tensors always name their device in full; devices that callers give, torch.Generator("cuda") and the name of a backend
do not, and `==` takes "cuda" and "cuda:0" for two devices, as it does "cpu" and "cpu:0".
"""

import torch

WITHOUT_NUMBER = ("cpu", "meta")


def this_device(device: torch.device | str) -> torch.device:
    """Return the device as its tensors name it: "cuda" is the current one, "cuda:0" say; "cpu:0" is the CPU."""
    found = torch.empty(0, dtype=torch.uint8, device=device).device
    # a fake tensor says "cpu:0"
    return torch.device(found.type) if found.type in WITHOUT_NUMBER else found


def same_device(one: torch.device, other: torch.device) -> bool:
    """Return whether tensors made on both are on one device."""
    return one == other or (one.type == other.type and this_device(one) == this_device(other))
