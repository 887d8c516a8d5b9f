"""Weights that live in safetensors files: a stage of a model on the meta device is filled from them, and emptied again.

Outside of its stages the model stays on the meta device; its calibrated weights are only in the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.hf.models.architectures import architecture_of
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.rotations import blocks_in, has_weight, rotations_in, say_inputs, weight_beside
from fsdp_hooks.torch_private import cpu_by_default
from fsdp_hooks.wrappers import plain_modules
from layerwise.stages.caller import caller
from layerwise.stages.stage import Stage
from qtensor.products.input_rotation import input_rotations


class OnDisk:
    """Weights of a model on the meta device.

    The files are read as `import_hf` reads them: quantized weights in layouts that it knows are dequantized into the
    model's dtype, and anything else that may be quantization codes is refused.

    Args:
        path: a safetensors file, or a directory of them, with or without `model.safetensors.index.json`; tensors have
            the names of the model's state dict, or those that transformers gives them in files. `config.json` and
            `hf_quant_config.json` beside them are read, too.
        model: the model; its tensors that are not on the meta device are left alone.
        device: where a stage gets its tensors (None: CPU).

    Raises:
        FileNotFoundError: there are no safetensors files.
        ValueError: a parameter or buffer on the meta device is not in them, or has another shape there; tensors that
            are tied in the model differ; weights are quantized in a way that `import_hf` does not read, or are for
            inputs that the model rotates otherwise; the files are damaged or contradict each other.
    """

    def __init__(self, path: str | Path, model: nn.Module, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        names: dict[int, list[str]] = {}  # id of a tensor -> its names; tied tensors have several
        wanted: dict[str, Entry] = {}
        for fqn, module in plain_modules(model, adapters=True):
            for attribute, tensor in _meta_tensors(module):
                name = f"{fqn}.{attribute}".lstrip(".")
                names.setdefault(id(tensor), []).append(name)
                wanted[name] = Entry(name, None, tuple(tensor.shape), tensor.dtype)
        if not Path(path).is_file() and not any(Path(path).glob("*.safetensors")):
            raise FileNotFoundError(f"{caller()}: {path} holds no safetensors; expected the weights of the model there")
        self.files = HuggingFaceReader(path, wanted=wanted, only_wanted=True, architecture=architecture_of(model))
        self.names: dict[int, str] = {}
        self._check(names, wanted)
        self._check_rotations(wanted, input_rotations(model))

    def _check(self, names: Mapping[int, Sequence[str]], wanted: Mapping[str, Entry]) -> None:
        shapes = {name: self.files.shape_of(name) for name in wanted}
        path = self.files.path
        missing: list[str] = []
        for tensor, own in names.items():
            found = [name for name in own if shapes[name] is not None]
            missing += [] if found else own
            for name in found:
                if shapes[name] != wanted[name].shape:
                    raise ValueError(
                        f"{caller()}: {name} has shape {shapes[name]} in {path}, expected {wanted[name].shape}"
                    )
            # Files may hold a tied tensor once or under each name; different values would need two
            # parameters.
            for name in found[1:]:
                if not self.files.alike(found[0], name):
                    raise ValueError(
                        f"{caller()}: the model ties {name} to {found[0]}, and {path} has other values for "
                        "it; untie them"
                    )
            self.names[tensor] = found[0] if found else ""
        if missing:
            raise ValueError(
                f"{caller()}: {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''} of the model "
                f"{'are' if len(missing) > 1 else 'is'} on the meta device and not in {path}; build what "
                "the files do not hold (non-persistent buffers, say) on a real device"
            )

    def _check_rotations(self, wanted: Mapping[str, Entry], own: Mapping[str, int]) -> None:
        """Refuse weights that are for inputs that the model does not rotate, or the other way round."""
        entries = self.files.presented().entries
        for name, block in blocks_in(entries).items():
            if not has_weight(name, entries):
                raise ValueError(
                    f"{caller()}: {weight_beside(name)} in {self.files.path} is for {say_inputs(block)}, and the model "
                    "stacks it in one weight of experts, which can not rotate their inputs; build it with a linear an "
                    "expert"
                )
        held = rotations_in(entries)
        for module in sorted(held.keys() | own.keys()):
            on_disk, rotated = held.get(module, 0), own.get(module, 0)
            if f"{module}.weight".lstrip(".") in wanted and on_disk != rotated:
                raise ValueError(
                    f"{caller()}: {module}.weight in {self.files.path} is for {say_inputs(on_disk)}, and the model has "
                    f"{say_inputs(rotated)}; layerwise.rotate_inputs_ gives a model the rotations of its files"
                )

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of one tensor of the model, in its dtype, on the device."""
        with cpu_by_default():  # safetensors makes tensors on the default device
            values = self.files.values(self.names[id(tensor)])
        return values.to(self.device, tensor.dtype)

    @contextmanager
    def hold(self, stage: Stage) -> Iterator[None]:
        """Fill the stage; on exit the original Parameter objects, on the meta device, are back."""
        stood: list[tuple[dict[str, Any], str, Tensor]] = []
        filled: dict[int, Tensor] = {}
        try:
            for child in stage.everything():
                for attribute, tensor in list(_meta_tensors(child)):
                    if id(tensor) not in filled:
                        values = self.read(tensor)
                        is_param = isinstance(tensor, nn.Parameter)
                        filled[id(tensor)] = nn.Parameter(values, requires_grad=False) if is_param else values
                    registry: Any = child._parameters if attribute in child._parameters else child._buffers
                    stood.append((registry, attribute, tensor))
                    registry[attribute] = filled[id(tensor)]
            yield
        finally:
            for registry, attribute, tensor in stood:
                registry[attribute] = tensor


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for registry in (module._parameters, module._buffers):
        for attribute, tensor in registry.items():
            if tensor is not None and tensor.is_meta:
                yield attribute, tensor
