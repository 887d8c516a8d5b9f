"""transformers: the linears of its FP8 (DeepSeek's files and their kin), and the modules that stay with it.

    FP8Linear   weight E4M3 [N, K], weight_scale_inv fp32 or E8M0, of blocks or of all    weight * weight_scale_inv

Its inputs are quantized by kernels that only GPUs run, by 128 columns of a token and under scales of other formulas.
Weights of all experts are not taken: transformers multiplies by them with kernels of its own (FP8), or has them in the
order in which a GPU's kernels read them (gpt-oss).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.source import Marks, Source, qualified
from dcp_adapters.hf.layouts.forms import ONE_A_BLOCK
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling
from qtensor.tensor.quantized_tensor import QuantizedTensor

FP8 = "transformers.integrations.finegrained_fp8"
MXFP4 = "transformers.integrations.mxfp4"
INPUTS = "transformers quantized its inputs; here they stay as they are"
READ = "read its directory by dcp_adapters.import_hf"
STAYS = {
    f"{FP8}.FP8Experts": f"the weights of all experts, which its own kernels multiply by; {READ}",
    f"{FP8}.FP8GroupedLinear": f"a linear in groups, and quantized weights here belong to nn.Linear; {READ}",
    f"{FP8}.FP8Embedding": "an embedding, and quantized weights here belong to nn.Linear",
    f"{MXFP4}.Mxfp4GptOssExperts": (
        "its bytes are in the order in which a GPU's kernels read them, and the dense GptOssExperts multiplies by "
        "weights [E, K, N], where those here are rows of linears, [E, N, K]; load it dense by "
        f"Mxfp4Config(dequantize=True), or {READ}"
    ),
}


def take(module: nn.Module) -> Mapping[str, Outcome]:
    """Return what the weight of an FP8Linear becomes."""
    linear: Any = module
    if qualified(type(module)) not in LINEARS.classes:
        reason = f"a {type(module).__name__} is made of FP8Linear, and may compute in another way"
        return {"weight": Refused(reason=reason)}
    weight, scale, size = linear.weight, linear._parameters.get("weight_scale_inv"), linear.block_size
    if weight.dtype != torch.float8_e4m3fn or scale is None:
        return {"weight": Refused(reason=f"its weight is {weight.dtype}, where an FP8Linear has E4M3")}
    note = INPUTS
    if linear._parameters.get("activation_scale") is not None:
        note += f" (its calibrated scale of inputs, {float(linear.activation_scale):.9g}, is left out)"
    fp32 = scale.detach().to(torch.float32)
    if size is not None and tuple(size) != (BLOCK, BLOCK):
        near = Float8BlockScaling()

        def values() -> Tensor:
            rows, columns = weight.shape
            wide = fp32.repeat_interleave(size[0], 0)[:rows].repeat_interleave(size[1], 1)[:, :columns]
            dense: Tensor = weight.detach().float() * wide
            return dense.to(torch.bfloat16)

        reason = f"scales of blocks of {tuple(size)}, where Float8 here has those of {BLOCK} x {BLOCK}"
        return {"weight": Refused(reason=reason, values=values, nearest=near, note=note)}
    recipe: Float8CurrentScaling | Float8BlockScaling
    if size is None:
        recipe, part = Float8CurrentScaling(granularity="tensor"), fp32.reshape(())
    else:
        recipe = Float8BlockScaling(power_of_two=scale.dtype == torch.float8_e8m0fnu)
        part = ONE_A_BLOCK.read(fp32).repeat_interleave(ONE_A_BLOCK.rows, dim=0)[: weight.shape[0]].contiguous()
    bias = linear._parameters.get("bias")
    parts = {"payload": weight.detach(), "scale": part}
    dtype = torch.bfloat16 if bias is None else bias.dtype
    try:
        made = QuantizedTensor.from_parts(parts, recipe, dtype)
    except ValueError as error:
        return {"weight": Refused(reason=str(error))}
    return {"weight": Taken(weight=made, note=note, dtype_known=bias is not None)}


def stays(module: nn.Module) -> Mapping[str, Outcome]:
    """Refuse what belongs to no nn.Linear."""
    return {"weight": Refused(reason=STAYS[Marks.of(module).of_source(OTHERS) or ""])}


LINEARS = Source(
    library="transformers",
    classes=frozenset({f"{FP8}.FP8Linear"}),
    take=take,
    drops=(
        *("weight_scale_inv", "activation_scale"),
        *("has_bias", "block_size", "activation_scheme", "_hf_quantized_needs_local_tp", "_deepgemm_disabled"),
        "forward",  # that of its class, if it stands in the module
    ),
    becomes=lambda module: nn.Linear,
)
OTHERS = Source(library="transformers", classes=frozenset(STAYS), take=stays)
