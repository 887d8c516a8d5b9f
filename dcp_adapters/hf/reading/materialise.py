"""Memory for what a model has on the meta device, in place: nothing else is touched, and ties stay.

`nn.Module.to_empty` gives everything new memory, even what is filled already, and unties a parameter that two modules
share. Here each tensor on the meta device is swapped with one that has memory, once, and keeps its identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_hooks.wrappers import PlainNames, plain_buffers, plain_state_dict


@dataclass(frozen=True)
class Live:
    """The tensors of a model.

    state: state-dict name, as the plain model has it if modules are compiled -> the parameter or buffer itself.
    names: for each tensor its names, several if it is tied. lost: buffers on the meta device that no state dict has.
    adapters: those on the meta device.
    """

    state: Mapping[str, Tensor]
    names: list[list[str]]
    lost: list[str]
    adapters: list[str]

    @staticmethod
    def of(model: nn.Module) -> "Live":
        """Collect the tensors of a model, without adapters and without what is no tensor (extra state of modules)."""
        state = {
            name: value
            for name, value in plain_state_dict(model, keep_vars=True, adapters=False).items()
            if isinstance(value, Tensor)
        }
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            names.setdefault(id(value), []).append(name)
        adapters = PlainNames(model).is_adapter
        empty = [name for name, param in model.named_parameters() if param.is_meta and adapters(name)]
        buffers = [name for name, buffer in plain_buffers(model) if buffer.is_meta and id(buffer) not in names]
        return Live(state, list(names.values()), buffers, empty)

    def problems(self) -> list[str]:
        """Say what is on the meta device and can be filled by no file."""
        empty = [
            f"{name}: an adapter on the meta device, of which the model's files have no values; add adapters after the "
            "import, or load them first"
            for name in self.adapters
        ]
        return empty + [
            f"{name}: a buffer on the meta device that is in no state dict, so no file has its values; build it "
            'outside of torch.device("meta"), or make it anew before the import (model.rotary_emb = '
            "type(model.rotary_emb)(config=model.config), say)"
            for name in self.lost
        ]


@torch.no_grad()
def materialise(model: nn.Module, live: Live, device: torch.device | str | None) -> None:
    """Give every tensor on the meta device memory, without values.

    Args:
        model: whose tensors they are.
        live: its tensors.
        device: where the memory is; None: for a sharded tensor the device of its mesh, for others the CPU.
    """
    on_meta = [live.state[own[0]] for own in live.names if live.state[own[0]].is_meta]
    # All of them before the first is swapped: if memory runs out, the model is as it was.
    made = [_with_memory(tensor, device) for tensor in on_meta]
    for tensor, new in zip(on_meta, made, strict=True):
        # Swapped and not replaced: optimizers, ties and FSDP refer to the Parameter objects.
        torch.utils.swap_tensors(tensor, new)
    if on_meta and any(isinstance(module, FSDPModule) for module in model.modules()):
        model.load_state_dict({}, strict=False)  # FSDP looks at its shards anew after a load


def _with_memory(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    if device is None:
        device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
    new = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new
