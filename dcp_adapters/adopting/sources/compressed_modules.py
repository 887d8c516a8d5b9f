"""Weights of ours as compressed modules of compressed-tensors: what `release` gives back.

The tensors are those of the layout of files, and inputs are not quantized: as they are here.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.adopting.outcome import Given
from dcp_adapters.hf.layouts.compressed_tensors import SCHEMES
from dcp_adapters.hf.layouts.layout import SHAPE, UNCALIBRATED, Scheme, kind_of
from qtensor.spec.registry import APPEARANCE_DTYPES
from qtensor.tensor.quantized_tensor import QuantizedTensor

EXPORT = "write a directory by export_hf instead"


def give(weight: QuantizedTensor) -> Given:
    """Return what `compress_module` would leave of an nn.Linear with the bytes of a weight [N, K].

    Raises:
        ValueError: compressed-tensors has no such scheme, or its dtype does not hold the scales.
    """
    if weight.recipe.activations is not None:
        raise ValueError(f"compressed-tensors quantizes inputs by other formulas than {weight.recipe} does; {EXPORT}")
    kind = kind_of(weight.recipe)
    entry = None if kind is None else SCHEMES.get(Scheme(kind, UNCALIBRATED[kind]))
    if entry is None:
        raise ValueError(f"compressed-tensors has no scheme for {weight.recipe}; {EXPORT}")
    parts = {**weight.parts(), SHAPE: torch.tensor(weight.shape, dtype=torch.int64, device="cpu")}
    tensors = {one.name: _kept(one.form.write(parts[one.part]), weight.dtype, one.part) for one in entry.stored}
    library: Any = importlib.import_module("compressed_tensors.quantization")
    scheme = library.QuantizationScheme(
        targets=["Linear"],
        weights=library.QuantizationArgs(**entry.config["weights"]),
        format=entry.config["format"],
    )
    status = library.QuantizationStatus.COMPRESSED
    attributes = {"quantization_scheme": scheme, "quantization_status": status}
    return Given(tensors=tensors, attributes=attributes, finish=library.set_forward_quantized)


def _kept(tensor: Tensor, dtype: torch.dtype, part: str) -> Tensor:
    """Return a tensor as modules hold it: scales of Float8 are in the weight's dtype, which decoded weights get."""
    if part != "scale" or tensor.dtype not in APPEARANCE_DTYPES:
        return tensor.contiguous()
    kept = tensor.to(dtype)
    if not torch.equal(kept.float().nan_to_num(), tensor.float().nan_to_num()):
        raise ValueError(f"scales in {tensor.dtype} with more digits than {dtype} holds; {EXPORT}")
    return kept.contiguous()
