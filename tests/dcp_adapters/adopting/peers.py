"""Models of other libraries, adopted and released where these are: run as a script, for they warn and patch on import.

    python -m tests.dcp_adapters.adopting.peers OUT

OUT is a pickle of what the tests look at: {"adopted": {name: Record}, "refused": {case: (message, unchanged)}, ...}.
Models in it are adopted ones, so whoever reads it needs none of the libraries.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters import AdoptionReport, adopt, release
from qtensor import Float8CurrentScaling, Int4GroupScaling, QuantizedTensor
from tests.dcp_adapters.adopting.models import FOREIGN, IN, bitsandbytes_8bit, compressed, inputs, linears
from tests.dcp_adapters.adopting.refused import (
    REFUSED,
    fp8_of_other_blocks,
    int4_tensors,
    int8_tensors,
    switched_off,
    zero_points,
)

COMPRESSED = [name for name in FOREIGN if name.startswith("compressed-tensors") and not name.endswith("dense")]


@dataclass(frozen=True)
class Record:
    """What became of one model.

    model: adopted. values, recipe: of `Foreign`. output: of its forward before; None if it needs a GPU. same: whether
    biases, training modes and hooks are the objects that they were. pickled: the model's bytes. released: what
    `release` says of torchao's, by name.
    """

    model: Any
    report: AdoptionReport
    values: dict[str, Tensor]
    recipe: str
    output: Tensor | None
    same: bool
    pickled: bytes
    released: dict[str, Any] | None = None


def record(name: str) -> Record:
    foreign = FOREIGN[name]()
    model: Any = foreign.model
    output = _output(model)
    kept = [(linear.bias, linear.training, linear._forward_hooks) for linear in linears(model).values()]
    originals = {key: _bytes_of(linear._parameters.get("weight")) for key, linear in linears(model).items()}
    report = adopt(model)
    after = [(linear.bias, linear.training, linear._forward_hooks) for linear in linears(model).values()]
    same = all(
        one is other for left, right in zip(kept, after, strict=True) for one, other in zip(left, right, strict=True)
    )
    pickled = pickle.dumps(model)
    released = _released(pickle.loads(pickled), originals, output) if name.startswith("torchao") else None
    return Record(model, report, dict(foreign.values), foreign.recipe, output, same, pickled, released)


def _output(model: Any) -> Tensor | None:
    try:
        return model(inputs()).detach()  # type: ignore[no-any-return]
    except Exception:
        return None


def _bytes_of(weight: Any) -> dict[str, Any]:
    """The tensors of one of torchao's."""
    names = ("qdata", "scale", "per_tensor_scale", "zero_point")
    held = {name: found for name in names if (found := getattr(weight, name, None)) is not None}
    return {name: found.reshape(-1, *found.shape[-1:]).view(torch.uint8).clone() for name, found in held.items()}


def _released(model: Any, originals: dict[str, dict[str, Any]], output: Tensor | None) -> dict[str, Any]:
    before = {key: {k: v.clone() for k, v in linear.weight.parts().items()} for key, linear in linears(model).items()}
    recipes = [linear.weight.recipe for linear in linears(model).values()]
    try:
        names = release(model, "torchao")
    except ValueError as error:
        untouched = all(isinstance(linear.weight, QuantizedTensor) for linear in linears(model).values())
        return {"error": str(error), "untouched": untouched}
    tensors = {key: _bytes_of(linear.weight) for key, linear in linears(model).items()}
    again_output = _output(model)
    adopt(model)
    after = {key: linear.weight.parts() for key, linear in linears(model).items()}
    return {
        "names": names,
        "tensors": tensors,
        "originals": originals,
        "output": again_output,
        "before": output,
        "parts": (before, after),
        "recipes": (recipes, [linear.weight.recipe for linear in linears(model).values()]),
    }


def compressed_again(name: str) -> tuple[bool, bool]:
    """Whether a released model has the tensors that it had, and its output once both are decompressed."""
    from compressed_tensors.compressors.base import decompress_module

    model: Any = FOREIGN[name]().model
    first = copy.deepcopy(model)
    # calibrated scales of inputs are left out, as the report of adopt says
    before = {key: value.clone() for key, value in model.state_dict().items() if ".input_" not in key}
    adopt(model)
    release(model, "compressed-tensors")
    after = model.state_dict()
    same = before.keys() == after.keys() and all(torch.equal(after[key], value) for key, value in before.items())
    for net in (first, model):
        for linear in linears(net).values():
            linear.quantization_scheme.input_activations = None
            decompress_module(linear)
    return same, torch.equal(first(inputs()), model(inputs()))


def refusal(case: str) -> tuple[str, bool]:
    """The error's message, and whether every module has what it had."""
    model = REFUSED[case][0]()

    def state() -> Any:
        own = {key: (type(one), {k: id(v) for k, v in vars(one).items()}) for key, one in model.named_modules()}
        params = {key: id(param) for key, param in model.named_parameters(remove_duplicate=False)}
        return own, params, {key: id(buffer) for key, buffer in model.named_buffers()}

    before = state()
    try:
        adopt(model)
    except ValueError as error:
        return str(error), state() == before
    return "", False


def inputs_of_torchao(name: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The recipe of an adopted weight, and what torchao's linear makes of an input: its values and scales."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    model: Any = FOREIGN[name]().model
    kwargs = model[0].weight.act_quant_kwargs
    x = inputs() * torch.logspace(-6, 6, 7)[:, None].to(torch.bfloat16)
    made = MXTensor.to_mx(x, kwargs.elem_dtype, kwargs.block_size, kwargs.scaling_mode)
    recipe = adopt(model).weights[0].recipe
    return recipe, x, made.dequantize(torch.float32), made.scale.view(torch.uint8)


def arbitrary() -> list[tuple[str, bool]]:
    """torchao's tensors of random bytes, NaN and the ends of all scales among them: whether ours decode alike."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8Tensor
    from torchao.quantization.quantize_.common import KernelPreference

    generator = torch.Generator().manual_seed(11)

    def raw(*shape: int) -> Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    def mx(qdata: Tensor, element: Any) -> Tensor:
        scale = raw(64, 4).view(torch.float8_e8m0fnu)
        return MXTensor(qdata, scale, element, 32, torch.bfloat16, KernelPreference.EMULATED, None, False)  # type: ignore[no-any-return]

    wide = torch.tensor(0.37)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    weights: dict[str, Any] = {
        "MXFP8 e4m3": mx(raw(64, 128).view(e4m3), e4m3),
        "MXFP8 e5m2": mx(raw(64, 128).view(e5m2), e5m2),
        "MXFP4": mx(raw(64, 64), torch.float4_e2m1fn_x2),
        "NVFP4": NVFP4Tensor(raw(64, 64), raw(64, 8).view(e4m3), 16, torch.bfloat16, wide),
        "Float8": Float8Tensor(raw(64, 128).view(e4m3), torch.randn(64, 1), block_size=[1, 128], dtype=torch.bfloat16),
    }
    found = []
    for name, weight in weights.items():
        model = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
        model[0].weight = nn.Parameter(weight, requires_grad=False)
        expected = weight.dequantize(torch.float32)
        adopt(model)
        ours: Any = model[0].weight
        found.append((name, torch.equal(ours.dequantize(torch.float32).nan_to_num(1.5), expected.nan_to_num(1.5))))
    return found


def int4_by_hand() -> tuple[Any, AdoptionReport, dict[str, Tensor]]:
    model = int4_tensors(0.0)
    values = {
        key: (linear.codes.float().unflatten(-1, (-1, 32)) * linear.scales.t().float()[..., None]).flatten(-2)
        for key, linear in linears(model).items()
    }
    return model, adopt(model), values


def requantized() -> tuple[Any, AdoptionReport, dict[str, Tensor]]:
    """One layer that no recipe holds, beside one that NVFP4 does."""
    model, exact = zero_points(), FOREIGN["torchao NVFP4 two levels"]().model
    model[0] = exact[0]
    values = {key: linear.weight.dequantize() for key, linear in linears(model).items()}
    return model, adopt(model, requantize=Int4GroupScaling(group=32)), values


def int8_inputs() -> AdoptionReport:
    """Weights that no source knows by name, the first with inputs that are quantized, too."""
    from torchao.quantization import Int8Tensor, PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

    class OfLater(Int8Tensor):
        """A tensor that a later version of torchao has, say."""

        __module__ = "torchao.of_later"

    model = int8_tensors(OfLater)
    model[0].weight.act_quant_kwargs = QuantizeTensorToInt8Kwargs(granularity=PerRow())
    return adopt(model, requantize=Float8CurrentScaling())


def misfit() -> tuple[str, bool]:
    """A recipe for all refused weights, which one of them does not fit: 160 columns are no groups of 128."""
    model = zero_points()
    held = [linear.weight for linear in linears(model).values()]
    try:
        adopt(model, requantize=Int4GroupScaling(group=128))
    except ValueError as error:
        return str(error), all(a is b.weight for a, b in zip(held, linears(model).values(), strict=True))
    return "", False


def nothing() -> str:
    """The error for a model whose quantizers are switched off, which is dense."""
    model = switched_off()
    try:
        adopt(model)
    except ValueError as error:
        return str(error)
    return ""


def division() -> Record:
    """NVFP4 of compressed-tensors under a global scale whose reciprocal is rounded."""
    foreign = compressed("NVFP4A16", "NVFP4BlockScaling", wide=16001.0)
    model: Any = foreign.model
    codes = {key: linear.weight_packed.clone() for key, linear in linears(model).items()}
    return Record(model, adopt(model), dict(foreign.values), "", None, True, b"", codes)


def eight_bits() -> tuple[Record, Tensor]:
    """LLM.int8() of bitsandbytes, and the codes of its first weight."""
    foreign = bitsandbytes_8bit()
    model: Any = foreign.model
    codes = model[0].weight.detach().clone()
    report = adopt(model)
    return Record(model, report, dict(foreign.values), "", None, True, pickle.dumps(model)), codes


def uneven() -> tuple[Any, AdoptionReport, Tensor]:
    """Blocks of 64 in rows of 96: each second one runs on into the next row. And the weight that was quantized."""
    import bitsandbytes as bnb

    weight = torch.randn(64, 96) * torch.logspace(-2, 2, 64)[:, None]
    model: Any = nn.Sequential(bnb.nn.LinearNF4(96, 64, bias=False))
    model[0].weight = bnb.nn.Params4bit(weight, False, None, 64, False, "nf4", module=model[0])
    model.to("cpu")
    return model, adopt(model), weight


def tied() -> dict[str, Any]:
    model: Any = FOREIGN["torchao NVFP4 two levels"]().model
    model.again = nn.Linear(model[2].in_features, model[2].out_features, bias=False)
    model.again.weight = model[2].weight
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].eval()
    model.again.weight.requires_grad_()
    qdata = model[0].weight.qdata
    report = adopt(model)
    model[0](inputs())
    return {
        "names": [weight.name for weight in report.weights],
        "tied": model.again.weight is model[2].weight,
        "requires_grad": [model[0].weight.requires_grad, model[2].weight.requires_grad],
        "training": [model[0].training, model[2].training],
        "seen": seen,
        "shared": model[0].weight.payload.data_ptr() == qdata.data_ptr(),
    }


def dtypes() -> list[torch.dtype]:
    model: Any = FOREIGN["transformers FP8 blocks"]().model
    model.norm = nn.LayerNorm(128).to(torch.float16)
    model[0].bias = nn.Parameter(model[0].bias.detach().to(torch.float16))
    adopt(model)
    other: Any = FOREIGN["compressed-tensors FP8 dynamic"]().model
    for linear in linears(other).values():
        linear.weight_scale.data = linear.weight_scale.data.float()
    adopt(other)
    return [linear.weight.dtype for net in (model, other) for linear in linears(net).values()]


def marks() -> list[bool]:
    """Whether a model still says that it is quantized: first with one module left, then with none."""
    model: Any = FOREIGN["transformers FP8 blocks"]().model
    model.hf_quantizer = model.quantization_method = "fp8"
    model.config = SimpleNamespace(quantization_config={}, hidden_size=IN)
    said = []
    for names in (["0"], ["2"]):
        adopt(model, include=names)
        said += [hasattr(model, "hf_quantizer"), "quantization_config" in vars(model.config)]
    assert model.config.hidden_size == IN
    return said


def chosen() -> list[list[str]]:
    model: Any = FOREIGN["torchao MXFP8"]().model
    first = adopt(torch.compile(model), include=["*"], exclude=["2"])  # type: ignore[arg-type]
    return [[weight.name for weight in report.weights] for report in (first, adopt(model))]


def main(out: Path) -> None:
    dynamic = ("torchao MXFP8", "torchao MXFP8 floor", "torchao MXFP4")
    try:
        adopt(fp8_of_other_blocks(), requantize=Int4GroupScaling(group=32), include=["1"])
    except ValueError as error:
        pattern = str(error)
    found = {
        "adopted": {name: record(name) for name in FOREIGN},
        "compressed again": {name: compressed_again(name) for name in COMPRESSED},
        "refused": {case: refusal(case) for case in REFUSED},
        "inputs": {name: inputs_of_torchao(name) for name in dynamic},
        "arbitrary": arbitrary(),
        "int4": int4_by_hand(),
        "requantized": requantized(),
        "misfit": misfit(),
        "int8": int8_inputs(),
        "nothing": nothing(),
        "division": division(),
        "eight bits": eight_bits(),
        "uneven": uneven(),
        "tied": tied(),
        "chosen": chosen(),
        "dtypes": dtypes(),
        "marks": marks(),
        "pattern": pattern,
    }
    torch.save(found, out)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # What is pickled is named by this module, and not by __main__.
    importlib.import_module("tests.dcp_adapters.adopting.peers").main(Path(sys.argv[1]))
