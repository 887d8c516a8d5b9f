"""compressed-tensors: modules with a `quantization_scheme`, compressed, or decompressed with their scales kept.

Which tensors a scheme has, and in which form, is what its layout of files says (hf/layouts/compressed_tensors.py): a
compressed module holds what the files hold. A decompressed one holds the values in the dtype of its scales; the codes
are found again under these scales, and must give the same values, or the module is refused.

Its decoder divides the scale of an NVFP4 block by `weight_global_scale`, and ours multiplies by the reciprocal. So both
may differ by one rounding of fp32, where the reciprocal is not exact; the report says for which weights they do.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.source import Source
from dcp_adapters.adopting.sources.compressed_modules import give
from dcp_adapters.adopting.sources.packing import int4_taken
from dcp_adapters.hf.layouts.compressed_tensors import SCHEMES, WEIGHTS
from dcp_adapters.hf.layouts.layout import KINDS, SchemeEntry, StoredAs
from qtensor.formats.float8_blocks import BLOCK
from qtensor.formats.int4 import Int4GroupScaling
from qtensor.spec.codecs.fp8 import ELEMENTS
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, format_of, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

SCHEME = "compressed_tensors.quantization.quant_scheme.QuantizationScheme"
INPUTS = "compressed-tensors quantized its inputs; here they stay as they are"
DIVIDES = "compressed-tensors divides by its global scale, and here it is a factor: fp32 values differ by a rounding"
COMPRESSED, DECOMPRESSED = "compressed", "decompressed"


def take(module: nn.Module) -> Mapping[str, Outcome]:
    """Return what the weight of a module becomes."""
    linear: Any = module
    scheme = linear.quantization_scheme
    if scheme.weights is None:
        return {}
    status = str(getattr(linear.quantization_status, "value", linear.quantization_status))
    if status not in (COMPRESSED, DECOMPRESSED):
        reason = f"its status is {status}: weights are dense, and quantized in each forward; call compress_module first"
        return {"weight": Refused(reason=reason)}
    note = INPUTS if scheme.input_activations is not None else ""
    if scheme.output_activations is not None:
        note = "; ".join(filter(None, (note, "its outputs were quantized; here they are not")))
    held = {**module._parameters, **module._buffers}
    found = next(((kind.kind, entry) for kind, entry in SCHEMES.items() if _is(scheme.weights, entry)), None)
    if found is None or held.get("weight_zero_point") is not None or held.get("weight_g_idx") is not None:
        said = ", ".join(f"{key} {getattr(scheme.weights, key)}" for key in WEIGHTS)
        return {"weight": Refused(reason=f"weights of {said}, which no recipe here holds", note=note)}
    kind, entry = found
    stored = tuple(one for one in entry.stored if one.part in {spec.name for spec in specs_of(KINDS[kind])})
    try:
        if status == COMPRESSED:
            return {"weight": _compressed(held, stored, KINDS[kind], note)}
        return {"weight": _decompressed(held, stored, KINDS[kind], note)}
    except (ValueError, KeyError) as error:  # tensors of another shape or dtype, or none of this name
        return {"weight": Refused(reason=f"its tensors are not those of {kind}: {error}")}


def _is(said: Any, entry: SchemeEntry) -> bool:
    """Return whether a scheme's weights are those of an entry of the layout."""
    ours = entry.config["weights"]
    same = all(_plain(getattr(said, key)) == ours.get(key) for key in ("num_bits", "type", "strategy", "symmetric"))
    sizes = said.group_size or None, list(said.block_structure) if said.block_structure else None
    return same and sizes == (ours.get("group_size"), ours.get("block_structure"))


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _read(held: Mapping[str, Any], one: StoredAs, rows: int) -> Tensor:
    """Return a part by the name and the form that it has."""
    part: Tensor = one.form.read(held[one.name].detach())
    return part.repeat_interleave(one.form.rows, dim=0)[:rows].contiguous() if one.form.rows > 1 else part


def _compressed(held: Mapping[str, Any], stored: tuple[StoredAs, ...], recipe: Recipe, note: str) -> Outcome:
    rows = held[stored[0].name].shape[0]
    parts = {one.part: _read(held, one, rows) for one in stored}
    dtype, known = _dtype(held)
    if isinstance(recipe, Int4GroupScaling):
        columns = int(held["weight_shape"][-1])
        if parts["payload"].shape[-1] * 2 != columns:
            raise ValueError(f"{columns} columns, and codes for {parts['payload'].shape[-1] * 2}")
        return int4_taken(
            lambda: parts["payload"], parts["scale"], recipe.group, dtype, lambda reason: Refused(reason=reason), note
        )
    scale = parts["scale"]
    parts["scale"] = scale.float() if scale.dtype in APPEARANCE_DTYPES else scale  # kept in the dtype of the model
    weight = QuantizedTensor.from_parts(parts, recipe, dtype)
    if "global_scale" not in parts:
        return Taken(weight=weight, note=note, dtype_known=known)
    divided = scale.float() / held["weight_global_scale"].detach().float()  # [N, K / 16]
    exact = torch.equal(divided, scale.float() * parts["global_scale"])
    ones = {**parts, "scale": torch.ones_like(scale), "global_scale": torch.ones_like(parts["global_scale"])}

    def values() -> Tensor:
        codes = QuantizedTensor.from_parts(ones, recipe, dtype).dequantize(torch.float32)
        wide: Tensor = divided.repeat_interleave(codes.shape[-1] // divided.shape[-1], dim=-1)
        return codes * wide

    note = note if exact else "; ".join(filter(None, (note, DIVIDES)))
    return Taken(weight=weight, values=values, exact=exact, note=note, dtype_known=known)


def _decompressed(held: Mapping[str, Any], stored: tuple[StoredAs, ...], recipe: Recipe, note: str) -> Outcome:
    weight = held["weight"].detach()
    scales = {
        one.part: _as_part(_read(held, one, weight.shape[0]), recipe, one.part)
        for one in stored
        if one.part != "payload"
    }
    x, dtype = weight.float(), specs_of(recipe)[0].dtype
    if dtype in {element for element, _ in ELEMENTS.values()} and scales["scale"].is_floating_point():
        # The formula of Float8, blocks included, under scales that are given.
        wide = scales["scale"]
        if wide.ndim and wide.shape[-1] > 1:
            wide = wide.repeat_interleave(BLOCK, dim=-1)[:, : x.shape[-1]]
        parts = {"payload": (x / wide).to(dtype), **scales}
    else:
        parts = format_of(recipe).encode_with(x, recipe, scales)
    made = QuantizedTensor.from_parts({name: parts[name] for name in parts}, recipe, weight.dtype)
    if not torch.equal(made.dequantize(), weight):
        reason = "its dense weight is not what codes under its scales give; compress it, or drop its scales"
        return Refused(reason=reason, values=lambda: weight, nearest=recipe, note=note)
    return Taken(weight=made, note=note)


def _as_part(scale: Tensor, recipe: Recipe, name: str) -> Tensor:
    """Return a scale in its part's dtype; raise ValueError if that does not hold it."""
    spec = next(spec for spec in specs_of(recipe) if spec.name == name)
    if scale.dtype == spec.dtype:
        return scale
    # decompressed MX scales are powers of two in bf16; as parts they are codes of E8M0
    codes = spec.dtype == torch.uint8
    made = scale.float().to(torch.float8_e8m0fnu).view(torch.uint8) if codes else scale.to(spec.dtype)
    back = made.view(torch.float8_e8m0fnu).float() if codes else made.float()
    if not torch.equal(back, scale.float()):
        raise ValueError(f"{name} in {scale.dtype}, which {spec.dtype} does not hold")
    return made


def _dtype(held: Mapping[str, Any]) -> tuple[torch.dtype, bool]:
    """Return the dtype that the weight appears in, and whether any tensor says it.

    Scales in fp32 do not: files have them beside models in bf16.
    """
    scale, bias = held.get("weight_scale"), held.get("bias")
    said = [scale] if scale is not None and scale.dtype != torch.float32 else []
    known = next((one.dtype for one in (*said, bias) if one is not None and one.dtype in APPEARANCE_DTYPES), None)
    return known or torch.bfloat16, known is not None


_DROPS = (
    "weight_packed",
    *(
        f"{base}_{suffix}"
        for base in ("weight", "input", "output")
        for suffix in ("scale", "zero_point", "global_scale", "shape", "g_idx")
    ),
    *("quantization_scheme", "quantization_status", "quantization_enabled", "forward"),
)
MODULES = Source(library="compressed-tensors", classes=frozenset({SCHEME}), take=take, drops=_DROPS, give=give)
