"""Models that cannot be adopted, each with what the error says; imported where the libraries may be, see peers.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.dcp_adapters.adopting.models import FOREIGN, IN, bitsandbytes_4bit, dense, inputs, linears, weights_of


def intx(**options: Any) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_

    model = dense()
    quantize_(model, IntxWeightOnlyConfig(**options))
    return model


def groups(size: int, dtype: Any = None) -> Any:
    from torchao.quantization import PerGroup

    return intx(weight_dtype=dtype or torch.int4, granularity=PerGroup(size))


def zero_points() -> Any:
    from torchao.quantization import MappingType, PerGroup

    return intx(weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC)


def fp32_scales() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    model = dense(dtype=torch.float32)
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    return model


def int4_tensors(zero: float, pre_scale: float | None = None) -> Any:
    """Int4Tensors made by hand: `from_hp` needs mslk, which runs on GPUs."""
    from torchao.quantization import Int4Tensor

    model = dense()
    for linear in linears(model).values():
        rows, columns = linear.weight.shape
        codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
        qdata = (codes[:, 1::2] << 4) | (codes[:, ::2] & 0xF)
        scale = torch.rand(columns // 32, rows, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        made = Int4Tensor(
            qdata,
            scale,
            torch.full_like(scale, zero),
            [1, 32],
            linear.weight.shape,
            act_pre_scale=None if pre_scale is None else torch.full((columns,), pre_scale),
        )
        linear.weight = nn.Parameter(made, requires_grad=False)
        linear.codes, linear.scales = codes, scale
    return model


def int8_tensors(kind: Any = None, **options: Any) -> Any:
    """Int8Tensors, or a class made of theirs; those of SmoothQuant with a factor of the inputs."""
    from torchao.quantization import Int8Tensor, PerRow

    model, kind = dense(), kind or Int8Tensor
    for linear in linears(model).values():
        made = Int8Tensor.from_hp(linear.weight.detach(), PerRow())
        given = {name: make(linear.in_features) for name, make in options.items()}
        made = kind(made.qdata, made.scale, made.block_size, made.dtype, **given)
        linear.weight = nn.Parameter(made, requires_grad=False)
    return model


def fake_quantized() -> Any:
    """A tensor of torchao that is no quantized one, and has only the `dequantize` of all tensors."""
    from torchao.quantization import Int4TilePackedTo4dTensor

    model = dense()
    made = Int4TilePackedTo4dTensor(*(torch.zeros(2, 2), torch.zeros(2, 2), [1, 32], torch.Size((160, IN))))
    model[0].weight = nn.Parameter(made, requires_grad=False)
    return model


def of_a_class_of_its_own() -> Any:
    """A class made of one that is known may decode in another way."""
    from torchao.quantization import Float8Tensor

    class Shifted(Float8Tensor):
        def dequantize(self, output_dtype: Any = None) -> Any:
            return super().dequantize(output_dtype) + 1

    model = FOREIGN["torchao Float8 row"]().model
    held = model[0].weight
    made = Shifted(held.qdata, held.scale, held.block_size, dtype=held.dtype)
    model[0].weight = nn.Parameter(made, requires_grad=False)
    return model


def fp8_of_other_blocks() -> Any:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    made: Any = FP8Linear(IN, 128, block_size=(64, 64))
    made.weight.data = torch.randn(128, IN).to(torch.float8_e4m3fn)
    made.weight_scale_inv.data = torch.rand(2, IN // 64)
    return nn.Sequential(made)


def linear_of_a_class_of_its_own() -> Any:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    class Doubling(FP8Linear):
        def forward(self, input: Any) -> Any:  # noqa: A002 - its base's
            return 2 * super().forward(input)

    return nn.Sequential(Doubling(128, 256, block_size=(128, 128)))


def grouped() -> Any:
    """A subclass of FP8Linear, which must not be taken for one."""
    from transformers.integrations.finegrained_fp8 import FP8GroupedLinear

    return nn.Sequential(FP8GroupedLinear(128, 256, 2, block_size=(128, 128)))


def fp8_experts() -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import FP8Experts

    return nn.Sequential(FP8Experts(Qwen3MoeConfig(hidden_size=128), block_size=(128, 128)))


def gpt_oss() -> Any:
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    config = GptOssConfig(hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    return nn.Sequential(Mxfp4GptOssExperts(config))


def frozen() -> Any:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config

    model = dense()
    scheme = weights_of(QuantizationScheme, num_bits=8, type="float", strategy="channel")
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    return model


def reordered() -> Any:
    model: Any = bitsandbytes_4bit("").model
    model[0].weight.quant_state.packing_format_for_cpu = True
    return model


def not_quantized() -> Any:
    import bitsandbytes as bnb

    model = dense()
    model[0] = bnb.nn.LinearNF4(256, 160)
    return model


def int8_of_compressed_tensors() -> Any:
    from compressed_tensors.compressors.base import compress_module
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config

    model = dense()
    scheme = weights_of(QuantizationScheme, num_bits=8, type="int", strategy="tensor")
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    for linear in linears(model).values():
        compress_module(linear)
    return model


def written_over() -> Any:
    """Decompressed, and then changed: codes under the kept scales do not give these values."""
    model: Any = FOREIGN["compressed-tensors FP8 dense"]().model
    model[0].weight.data.mul_(1.01)
    return model


def switched_off() -> Any:
    import modelopt.torch.quantization as mtq

    model = simulated()
    mtq.disable_quantizer(model, "*")
    return model


def of_another_version() -> Any:
    """An attribute that a later version may have called otherwise."""
    model: Any = FOREIGN["transformers FP8 blocks"]().model
    del model[2].block_size
    return model


def simulated() -> Any:
    import modelopt.torch.quantization as mtq

    model = dense()
    return mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda net: net(inputs()))


def modelopt(config: str) -> Any:
    import modelopt.torch.quantization as mtq

    model = mtq.quantize(dense(), getattr(mtq, config), lambda net: net(inputs()))
    mtq.compress(model)
    return model


def rotated() -> Any:
    model = modelopt("NVFP4_DEFAULT_CFG")
    model[0].weight_quantizer._rotate = True
    return model


def transposed_in_tiles() -> Any:
    """As below, and scales that tensor cores read: as many bytes as those of the weight that is not transposed."""
    from torchao.quantization import quantize_

    from tests.dcp_adapters.adopting.models import _mx

    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16))
    quantize_(model, _mx(torch.float8_e4m3fn))
    model[0].weight = nn.Parameter(model[0].weight.detach().t(), requires_grad=False)
    return model


def with_another_forward(name: str) -> Any:
    model: Any = FOREIGN[name]().model
    before = model[0].forward
    model[0].forward = lambda x: 2 * before(x)
    return model


def forward_before_modelopt() -> Any:
    import modelopt.torch.quantization as mtq

    model = dense()
    before = model[0].forward
    model[0].forward = lambda x: 2 * before(x)
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda net: net(inputs()))
    mtq.compress(model)
    return model


def transposed() -> Any:
    """A square weight whose tensor was transposed: its scales stand along the other dim."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    made = MXTensor.to_mx(model[0].weight.detach(), torch.float8_e4m3fn, 32)
    model[0].weight = nn.Parameter(made.t(), requires_grad=False)
    return model


def embedding() -> Any:
    model = FOREIGN["torchao Float8 row"]().model
    model.embedding = nn.Embedding(160, IN)
    model.embedding.weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    return model


def tied() -> Any:
    model = FOREIGN["transformers FP8 blocks"]().model
    model.holder = nn.Module()
    model.holder.table = model[0].weight
    return model


def meta() -> Any:
    model: Any = FOREIGN["transformers FP8 blocks"]().model
    return model.to("meta")


def offloaded() -> Any:
    model: Any = FOREIGN["torchao Float8 row"]().model
    model[0]._hf_hook = SimpleNamespace()
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "zero points": (zero_points, r"0 \(torchao IntxUnpackedToInt8Tensor\): zero points, which INT4 here does not have"),
    "zero points of Int4Tensor": (lambda: int4_tensors(0.5), "zero points"),
    "scaled inputs": (lambda: int4_tensors(0.0, 2.0), "inputs are multiplied by act_pre_scale"),
    "scaled inputs of Int8Tensor": (
        lambda: int8_tensors(act_pre_scale=lambda size: torch.full((size,), 2.0)),
        r"inputs are multiplied by act_pre_scale, which an nn.Linear here does not do\n",
    ),
    "no decoder": (fake_quantized, r"known to hold it; if it simulates quantization, convert it first \(torchao.quan"),
    "scales of fp32": (fp32_scales, "scales in torch.float32 with more digits than bf16 holds"),
    "groups of 16": (
        lambda: groups(16),
        "groups of 16, where INT4 here has 32, 64, 128",
    ),
    "5 bits": (lambda: groups(32, torch.int5), "torch.int5, where whole numbers"),
    "other blocks of FP8": (fp8_of_other_blocks, r"scales of blocks of \(64, 64\)"),
    "a class of its own": (of_a_class_of_its_own, "no recipe here is known to hold it; .* would make an error of"),
    "a linear of its own": (linear_of_a_class_of_its_own, "a Doubling is made of FP8Linear"),
    "grouped": (grouped, r"0 \(transformers FP8GroupedLinear\): a linear in groups"),
    "FP8 experts": (fp8_experts, r"0 \(transformers FP8Experts\): the weights of all experts"),
    "gpt-oss": (gpt_oss, r"0 \(transformers Mxfp4GptOssExperts\): its bytes are in the order in which a GPU's kernels"),
    "frozen": (
        frozen,
        "its status is initialized: weights are dense, and quantized in each forward; call compress_module",
    ),
    "int8 of compressed-tensors": (int8_of_compressed_tensors, "weights of num_bits 8, type int, strategy tensor"),
    "FP4 of bitsandbytes": (
        lambda: bitsandbytes_4bit("", kind="fp4").model,
        r"0 \(bitsandbytes Linear4bit\): elements of the table fp4, where those of 4 bits here are NF4, E2M1 and INT4",
    ),
    "bitsandbytes, in the order of a kernel": (
        reordered,
        "its bytes are in the order in which a CPU's kernel reads them",
    ),
    "bitsandbytes, not quantized": (not_quantized, "its weight is not quantized yet; move it to a device first"),
    "written over": (written_over, "its dense weight is not what codes under its scales give"),
    "another version": (of_another_version, r"2 \(transformers FP8Linear\): it lacks what this version reads"),
    "simulated": (simulated, "its weight is dense, and quantized in each forward; call mtq.compress"),
    "INT4 of ModelOpt": (lambda: modelopt("INT4_BLOCKWISE_WEIGHT_ONLY_CFG"), "values that are divided by their scales"),
    "AWQ of ModelOpt": (lambda: modelopt("INT4_AWQ_CFG"), "its inputs are multiplied by a pre_quant_scale"),
    "INT8 of ModelOpt": (lambda: modelopt("INT8_DEFAULT_CFG"), "a INT8QTensor"),
    "rotated": (rotated, "it rotates or shifts what it quantizes"),
    "transposed": (transposed, "'scale' is torch.uint8 .*, expected torch.uint8"),
    "transposed in tiles": (transposed_in_tiles, r"'scale' is torch.uint8 \(16, 32\), expected torch.uint8 \(128, 4\)"),
    **{
        f"another forward, {name}": (partial(with_another_forward, name), "its forward was replaced on this one module")
        for name in ("compressed-tensors FP8", "transformers FP8 tensor", "ModelOpt FP8")
    },
    "a forward that ModelOpt calls": (forward_before_modelopt, "its forward was replaced before ModelOpt took it"),
    "an embedding": (embedding, r"embedding \(torchao Float8Tensor\): its module is of the class Embedding"),
    "tied": (tied, "its tensors are tied to holder, which is not adopted"),
    "meta": (meta, "its tensors are on the meta device, or offloaded"),
    "offloaded": (offloaded, "accelerate moves its tensors around each forward"),
}
