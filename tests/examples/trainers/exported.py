"""What the tests of the recipes that end with an export ask of it: its weights."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dcp_adapters import import_hf
from qtensor import QuantizedTensor, quantize
from tests.dcp_adapters.hf.exports import layers_of, members
from tests.qtensor.recipes_under_test import same_parts


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """The plain tensors of a checkpoint of `model`, read by stock DCP."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    with warnings.catch_warnings():  # DCP warns that it works in a single process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=checkpoint)
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def weights_as_trained(out: Path, recipe: Any) -> dict[str, bool]:
    """Whether each quantized weight of OUT/exported has the bytes of quantizing that of OUT/trained.

    What engines run as one linear must have those of one weight, with the rows of all.
    """
    dense, found = stored(out / "trained"), import_hf(out / "exported", progress=False)
    assert all(value.dtype == torch.float32 for value in dense.values())
    quantized = {name: value for name, value in found.items() if isinstance(value, QuantizedTensor)}
    same = {}
    for layer in layers_of([name.removesuffix(".weight") for name in quantized]):
        names = [f"{module}.weight" for module in members(layer)]
        as_one = quantize(torch.cat([dense[name] for name in names]), recipe.stored)
        rows = as_one.split([dense[name].shape[0] for name in names])
        same |= {name: same_parts(quantized[name], own) for name, own in zip(names, rows, strict=True)}
    assert same.keys() == quantized.keys()
    return same
