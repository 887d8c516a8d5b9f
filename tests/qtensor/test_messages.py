"""Error messages: what was found, what was expected, what to do. The texts are part of the interface."""

# ruff: noqa: E501, ISC004 - a message is easier to read in long lines

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_hooks import sync_scales
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantize_,
    quantized_model_init,
)
from qtensor.ops.table import implements
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import register

MXFP8 = MXFP8BlockScaling()
MXFP8_TEXT = "MXFP8BlockScaling(element='e4m3', blocks='row', scale_rounding='up')"
DYNAMIC = Float8CurrentScaling(activations="dynamic")
W = f"a quantized weight of shape (64, 96) ({MXFP8_TEXT})"


def q(recipe: Any = MXFP8, *shape: int) -> QuantizedTensor:
    return quantize(torch.ones(shape or (64, 96), dtype=torch.bfloat16), recipe)


def text_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


RECIPE_MESSAGES = {
    "element": (
        lambda: Float8CurrentScaling(element="e3m4"),
        "Float8CurrentScaling: element='e3m4' is not one of 'e4m3', 'e5m2'",
    ),
    "granularity": (
        lambda: Float8CurrentScaling(granularity="block"),
        "Float8CurrentScaling: granularity='block' is not one of 'row', 'tensor'",
    ),
    "power_of_two": (
        lambda: Float8CurrentScaling(power_of_two=1),
        "Float8CurrentScaling: power_of_two=1 is not one of False, True",
    ),
    "mxfp8 element": (
        lambda: MXFP8BlockScaling(element="e2m1"),
        "MXFP8BlockScaling: element='e2m1' is not one of 'e4m3', 'e5m2'",
    ),
    "blocks": (
        lambda: MXFP8BlockScaling(blocks="column"),
        "MXFP8BlockScaling: blocks='column' is not one of 'row', 'square'",
    ),
    "rounding": (
        lambda: MXFP8BlockScaling(scale_rounding="even"),
        "MXFP8BlockScaling: scale_rounding='even' is not one of 'up', 'floor'",
    ),
    "nvfp4 blocks": (
        lambda: NVFP4BlockScaling(blocks=None),
        "NVFP4BlockScaling: blocks=None is not one of 'row', 'square'",
    ),
    "float8 blocks": (
        lambda: Float8BlockScaling(blocks="column"),
        "Float8BlockScaling: blocks='column' is not one of 'square', 'row'",
    ),
    "json": (
        lambda: Recipe.from_json({"type": "MXFP6BlockScaling"}),
        "unknown recipe type 'MXFP6BlockScaling'; this version knows Float8BlockScaling, Float8CurrentScaling, Float8DelayedScaling, Int4GroupScaling, Int8RowScaling, MXFP4BlockScaling, MXFP8BlockScaling, NF4BlockScaling, NVFP4BlockScaling",
    ),
}


@pytest.mark.parametrize(("call", "text"), RECIPE_MESSAGES.values(), ids=RECIPE_MESSAGES.keys())
def test_recipes_name_the_field_and_its_choices(call: Callable[[], Any], text: str) -> None:
    assert text_of(call, ValueError) == text


def test_recipes_take_keywords_only_and_are_frozen() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        MXFP8BlockScaling("e4m3")  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot assign to field 'element'"):
        MXFP8.element = "e5m2"  # type: ignore[misc]


SHAPE_MESSAGES = {
    "K": (
        (64, 40),
        MXFP8,
        f"tensor: shape (64, 40) has K=40, which is not a multiple of 32, as {MXFP8_TEXT} needs; leave this weight out "
        "(exclude=..., or build it outside of quantized_model_init), or "
        "choose a Float8 recipe",
    ),
    "nvfp4 K": (
        (64, 40),
        NVFP4BlockScaling(),
        "tensor: shape (64, 40) has K=40, which is not a multiple of 16, as NVFP4BlockScaling(blocks='row') needs; leave this weight "
        "out (exclude=..., or build it outside of quantized_model_init), or choose a Float8 recipe",
    ),
    "scalar": ((), MXFP8, "tensor: a 0-dim tensor can not be quantized; expected [.., K]"),
    "square": (
        (40, 32),
        NVFP4BlockScaling(blocks="square"),
        "tensor: shape (40, 32) needs its last two dims to be multiples of 16 for the square blocks of "
        "NVFP4BlockScaling(blocks='square'); use blocks=\"row\"",
    ),
    "square vector": (
        (32,),
        NVFP4BlockScaling(blocks="square"),
        "tensor: shape (32,) needs its last two dims to be multiples of 16 for the square blocks of "
        "NVFP4BlockScaling(blocks='square'); use blocks=\"row\"",
    ),
}


@pytest.mark.parametrize(("shape", "recipe", "text"), SHAPE_MESSAGES.values(), ids=SHAPE_MESSAGES.keys())
def test_shapes_that_do_not_fit_are_explained(shape: tuple[int, ...], recipe: Any, text: str) -> None:
    assert text_of(lambda: quantize(torch.ones(shape), recipe), ValueError) == text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8])
def test_codes_are_not_copied_into_a_weight_as_values(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64, bias=False).bfloat16()
    quantize_(model, MXFP8BlockScaling())
    before = {name: part.clone() for name, part in model.weight.parts().items()}
    text = f"got {dtype}: codes without their scale, not values; dequantize them first"
    with pytest.raises(TypeError, match=re.escape(f"weight {text}")):
        model.load_state_dict({"weight": torch.ones(64, 64).to(dtype)})
    with pytest.raises(TypeError, match=re.escape(text)), torch.no_grad():
        model.weight.copy_(torch.ones(64, 64).to(dtype))
    assert all(torch.equal(part, before[name]) for name, part in model.weight.parts().items())


def test_quantize_wants_a_dense_float_and_a_recipe() -> None:
    assert (
        text_of(lambda: quantize(q(), MXFP8), TypeError)
        == f"quantize expects a dense tensor, got {W}; call .dequantize() first"
    )
    for dtype in (torch.float64, torch.int64):
        text = f"quantize expects bfloat16, float16 or float32, got {dtype}"
        assert text_of(lambda dtype=dtype: quantize(torch.ones(64, 96, dtype=dtype), MXFP8), TypeError) == text
    known = (
        "Float8CurrentScaling, Float8BlockScaling, Float8DelayedScaling, Int4GroupScaling, Int8RowScaling, "
        "MXFP4BlockScaling, MXFP8BlockScaling, NF4BlockScaling, NVFP4BlockScaling"
    )
    assert (
        text_of(lambda: quantize(torch.ones(64, 96), "mxfp8"), TypeError)
        == f"expected a recipe ({known}), got str: 'mxfp8'"
    )


PART_PROBLEMS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda parts: parts.pop("scale"), "missing 'scale'"),
    "extra": (lambda parts: parts.update(zero=torch.ones(1)), "unexpected 'zero'"),
    "both": (lambda parts: parts.update(scales=parts.pop("scale")), "missing 'scale'; unexpected 'scales'"),
    "dtype": (
        lambda parts: parts.update(scale=parts["scale"].float()),
        "'scale' is torch.float32 (64, 3), expected torch.uint8 (64, 3)",
    ),
    "shape": (
        lambda parts: parts.update(scale=parts["scale"][:, :2]),
        "'scale' is torch.uint8 (64, 2), expected torch.uint8 (64, 3)",
    ),
    "payload dtype": (
        lambda parts: parts.update(payload=parts["payload"].view(torch.uint8)),
        "'payload' is torch.uint8 (64, 96), expected torch.float8_e4m3fn (64, 96)",
    ),
    "all of them": (
        lambda parts: parts.update(payload=parts["payload"].view(torch.uint8), scale=parts["scale"].t()),
        "'payload' is torch.uint8 (64, 96), expected torch.float8_e4m3fn (64, 96); 'scale' is torch.uint8 (3, 64), expected torch.uint8 "
        "(64, 3)",
    ),
    "device": (lambda parts: parts.update(scale=parts["scale"].to("meta")), "'scale' is on meta, the payload on cpu"),
    "K": (
        lambda parts: parts.update(payload=parts["payload"][:, :40]),
        f"tensor: shape (64, 40) has K=40, which is not a multiple of 32, as {MXFP8_TEXT} needs; leave this weight out "
        "(exclude=..., or build it outside of quantized_model_init), or "
        "choose a Float8 recipe",
    ),
    "scalar": (
        lambda parts: parts.update(payload=parts["payload"][0, 0]),
        "tensor: a 0-dim tensor can not be quantized; expected [.., K]",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), PART_PROBLEMS.values(), ids=PART_PROBLEMS.keys())
def test_from_parts_names_every_problem(spoil: Callable[[dict[str, Any]], Any], text: str) -> None:
    parts = q().parts()
    spoil(parts)
    found = text_of(lambda: QuantizedTensor.from_parts(parts, MXFP8, torch.bfloat16), ValueError)
    assert found == f"these are no parts of {MXFP8_TEXT}: {text}"


def test_from_parts_names_a_wrong_appearance_dtype_and_another_recipes_parts() -> None:
    found = text_of(lambda: QuantizedTensor.from_parts(q().parts(), MXFP8, torch.float64), ValueError)
    assert (
        found
        == f"these are no parts of {MXFP8_TEXT}: the appearance dtype torch.float64 is not one of bfloat16, float16, float32"
    )
    found = text_of(lambda: QuantizedTensor.from_parts(q().parts(), NVFP4BlockScaling(), torch.bfloat16), ValueError)
    assert found == "these are no parts of NVFP4BlockScaling(blocks='row'): missing 'global_scale'"


OPERATIONS: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "unknown op": (
        NotImplementedError,
        lambda: q() + q(),
        "aten.add.Tensor is not defined for quantized tensors (got MXFP8Tensor); call .dequantize() on them first if a dense result is "
        "what you want",
    ),
    "dtype": (
        TypeError,
        lambda: q().double(),
        f"{W} can appear as bfloat16, float16 or float32, not torch.float64; call .dequantize(torch.float64)",
    ),
    "new dtype": (
        TypeError,
        lambda: q().new_empty((32, 96), dtype=torch.int8),
        "a MXFP8Tensor can appear as bfloat16, float16 or float32, not torch.int8",
    ),
    "new K": (
        ValueError,
        lambda: q().new_empty((64, 40)),
        f"new tensor: shape (64, 40) has K=40, which is not a multiple of 32, as {MXFP8_TEXT} needs; leave this weight out "
        "(exclude=..., or build it outside of quantized_model_init), or "
        "choose a Float8 recipe",
    ),
    "columns": (
        ValueError,
        lambda: q()[:, 8:40],
        f"cutting {W} at columns 8:40: cuts along K must be multiples of 32. If FSDP2 asks for it: it cannot cut K of quantized weights; shard on dim 0",
    ),
    "step": (NotImplementedError, lambda: q()[::2], f"slicing {W} with step 2; only step 1 is defined"),
    "select": (
        NotImplementedError,
        lambda: q()[:, 1],
        f"select along dim 1 of {W}; only dim 0 of 2-D and up is defined",
    ),
    "flat": (NotImplementedError, lambda: q().view(-1)[:32], f"cutting a reshaped view of {W}; view it back first"),
    "row": (
        NotImplementedError,
        lambda: q(Float8CurrentScaling(), 64)[:32],
        "cutting a quantized weight of shape (64,) (Float8CurrentScaling(element='e4m3', granularity='row', power_of_two=False)): its one "
        "row has one scale",
    ),
    "partial write": (
        RuntimeError,
        lambda: q(NVFP4BlockScaling())[:32].fill_(9.0),
        "writing into some rows of a quantized weight of shape (32, 96) (NVFP4BlockScaling(blocks='row')) would change its global_scale, "
        "which the other rows share; write the whole tensor, or use a recipe whose scales belong to rows",
    ),
    "storage": (
        RuntimeError,
        lambda: q().untyped_storage(),
        f"{W} has no single storage to write, share or compare; use .parts(), and save it by dcp.save with "
        "planner=QuantizedSavePlanner() (or expand the state dict first)",
    ),
    "tolist": (
        NotImplementedError,
        lambda: q().tolist(),
        "tolist, numpy and DLPack are not defined for quantized tensors; call .dequantize() first",
    ),
    "linear input": (
        TypeError,
        lambda: nn.functional.linear(q(), torch.ones(64, 96)),
        f"F.linear: the input is {W}; call .dequantize() on it",
    ),
    "stacked, dynamic": (
        NotImplementedError,
        lambda: torch.bmm(torch.ones(2, 4, 64), q(DYNAMIC, 2, 64, 96)),
        f'bmm of an input of shape (2, 4, 64) with a quantized weight of shape (2, 64, 96) ({DYNAMIC}): activations="dynamic" is '
        "defined for F.grouped_mm(x, w.transpose(-2, -1), offs=ends) with x [T, K], and torch.bmm(x, w.transpose(-2, -1)) with x "
        "[E, T, K], w a stack [E, N, K]; loop over the experts with F.linear, or call .dequantize()",
    ),
    "shard dim": (
        NotImplementedError,
        lambda: q().new_zeros((64, 48)),
        f"new_zeros((64, 48)) of {W} changes more than the rows. FSDP2 asks for this if shard_placement_fn cuts K, which it cannot do with "
        "quantized weights; shard on dim 0, or stacks [E, N, K] on dim 1, too (tensor parallelism may cut K)",
    ),
    "crop": (
        NotImplementedError,
        lambda: q().as_strided((64, 48), (96, 1)),
        f"as_strided of {W} to size (64, 48), stride (96, 1): only its first rows are defined",
    ),
    "data": (
        NotImplementedError,
        lambda: setattr(q(), "data", torch.ones(64, 96, dtype=torch.bfloat16)),
        f"assigning .data of {W} is not defined; call .copy_(value) on it under torch.no_grad() (it requantizes in place, and copies the "
        "bytes where the recipes agree), or assign a new nn.Parameter to the module",
    ),
    "deepcopy": (
        RuntimeError,
        lambda: __import__("copy").deepcopy(nn.Parameter(q()).view(-1)),
        "only quantized tensors that are leaves of the autograd graph can be deep-copied; detach() first",
    ),
}


@pytest.mark.parametrize(("kind", "call", "text"), OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operations_say_what_they_cannot_do_and_what_to_do(
    kind: type[Exception], call: Callable[[], Any], text: str
) -> None:
    assert text_of(call, kind) == text


def test_resharding_to_a_smaller_mesh_is_refused_by_its_name() -> None:
    whole = q()
    whole.new_zeros((32, 96))  # what fully_shard does on two ranks
    text = text_of(lambda: whole.split(16), NotImplementedError)
    assert text == (
        f"{W} was sharded into 32 rows a rank and is now cut into 16: FSDP2's reshard_after_forward=<int> is not supported for "
        "quantized weights; use True or False"
    )


def test_models_without_bytes_are_refused() -> None:
    with torch.device("meta"), quantized_model_init(NVFP4BlockScaling()):
        model = nn.Linear(64, 64)
    assert text_of(lambda: sync_scales(model), ValueError) == (
        "sync_scales: the parameters are on the meta device; call to_empty() and initialise or load them first"
    )
    assert text_of(lambda: MasterWeightOptimizer(torch.optim.AdamW, model.parameters()), ValueError) == (
        "MasterWeightOptimizer: parameters are on the meta device; call to_empty() and load or initialise them first"
    )


def test_a_second_registration_or_handler_is_refused() -> None:
    assert (
        text_of(lambda: register(MXFP8BlockScaling, None, object), ValueError)
        == "MXFP8BlockScaling is registered already"
    )
    overload = torch.ops.aten.detach.default
    assert (
        text_of(lambda: implements(overload)(lambda: None), ValueError)
        == "aten.detach.default has a handler already: alias"
    )
