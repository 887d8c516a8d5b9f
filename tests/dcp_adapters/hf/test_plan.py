"""Which tensors an export writes where, and what it refuses, from names, formats and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_adapters.hf.exporting.plan import ExportPlan, Request, plan_export
from dcp_adapters.hf.files.engine_names import fused_sets, pieces_of
from dcp_adapters.hf.layouts.compressed_tensors import COMPRESSED_TENSORS
from dcp_adapters.hf.layouts.forms import reciprocal
from dcp_adapters.hf.layouts.fp8 import FP8
from dcp_adapters.hf.layouts.gpt_oss import GPT_OSS
from dcp_adapters.hf.layouts.layout import KINDS, Layout, Linears, Scheme, kind_of
from dcp_adapters.hf.layouts.modelopt import MODELOPT
from dcp_adapters.hf.layouts.registry import LAYOUTS, layout_named, register_layout
from dcp_adapters.hf.models.prefixes import weights_prefix
from dcp_adapters.records.entry import Entry
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

ROWS = Float8CurrentScaling()
TENSOR = Float8CurrentScaling(granularity="tensor")
BLOCKS = Float8BlockScaling()
MXFP8 = MXFP8BlockScaling()
NVFP4 = NVFP4BlockScaling()
PRODUCER = {"name": "qtensor", "version": "0"}
MODELOPT_S = {"name": "modelopt", "version": "0.47.0", "written_by": "qtensor 0"}  # engines look for that name


SCALE = Entry("", None, (), torch.float32)


def weight(recipe: Any = None, *shape: int) -> Entry:
    return Entry("", recipe, shape or (32, 64), torch.bfloat16)


def plan(records: dict[str, Entry], layout: Layout = COMPRESSED_TENSORS, **options: Any) -> ExportPlan:
    scales = options.pop("scales", {})
    scales = {name: scales.get(name, 1.0) for name in records}
    return plan_export(records, Request(layout, scales, PRODUCER, options.pop("max_shard_size", 10**9), **options))


def refused(records: dict[str, Entry], layout: Layout = COMPRESSED_TENSORS, **options: Any) -> str:
    try:
        plan(records, layout, **options)
    except ValueError as error:
        return str(error)
    pytest.fail("nothing was refused")


def written(made: ExportPlan) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        tensor.name: (tensor.dtype, tensor.shape)
        for file in made.files
        for output in file.outputs
        for tensor in output.written
    }


F8, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32


def packed(columns: int, group: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        "weight_packed": (torch.int32, (32, columns // 8)),
        "weight_scale": (torch.bfloat16, (32, columns // group)),
        "weight_shape": (torch.int64, (2,)),
    }


# recipe, with an input_scale -> name of the tensor behind the module: dtype and shape, of a weight [32, 64]
COMPRESSED = {
    ("fp8_tensor", False): (TENSOR, {"weight": (F8, (32, 64)), "weight_scale": (F32, (1,))}),
    ("fp8_tensor", True): (TENSOR, {"weight": (F8, (32, 64)), "weight_scale": (F32, (1,)), "input_scale": (F32, (1,))}),
    ("fp8_row", False): (ROWS, {"weight": (F8, (32, 64)), "weight_scale": (F32, (32, 1))}),
    ("fp8_row", True): (ROWS, {"weight": (F8, (32, 64)), "weight_scale": (F32, (32, 1)), "input_scale": (F32, (1,))}),
    ("fp8_block", False): (BLOCKS, {"weight": (F8, (32, 64)), "weight_scale": (F32, (1, 1))}),
    ("mxfp8", False): (MXFP8, {"weight": (F8, (32, 64)), "weight_scale": (U8, (32, 2))}),
    ("nvfp4", False): (
        NVFP4,
        {"weight_packed": (U8, (32, 32)), "weight_scale": (F8, (32, 4)), "weight_global_scale": (F32, (1,))},
    ),
    ("nvfp4", True): (
        NVFP4,
        {
            "weight_packed": (U8, (32, 32)),
            "weight_scale": (F8, (32, 4)),
            "weight_global_scale": (F32, (1,)),
            "input_global_scale": (F32, (1,)),
        },
    ),
    ("mxfp4", False): (MXFP4BlockScaling(), {"weight_packed": (U8, (32, 32)), "weight_scale": (U8, (32, 2))}),
    ("int4_32", False): (Int4GroupScaling(), packed(64, 32)),
    ("int4_64", False): (Int4GroupScaling(group=64), packed(64, 64)),
    ("int4_128", False): (Int4GroupScaling(group=128), packed(128, 128)),
    ("int8_row", False): (Int8RowScaling(), {"weight": (torch.int8, (32, 64)), "weight_scale": (F32, (32, 1))}),
}
OPT = {
    ("fp8_tensor", True): (TENSOR, {"weight": (F8, (32, 64)), "weight_scale": (F32, ()), "input_scale": (F32, ())}),
    ("fp8_row", False): (ROWS, {"weight": (F8, (32, 64)), "weight_scale": (F32, (32,))}),
    ("mxfp8", False): (MXFP8, {"weight": (F8, (32, 64)), "weight_scale": (U8, (32, 2))}),
    ("nvfp4", False): (
        NVFP4,
        {"weight": (U8, (32, 32)), "weight_scale": (F8, (32, 4)), "weight_scale_2": (F32, ())},
    ),
    ("nvfp4", True): (
        NVFP4,
        {
            "weight": (U8, (32, 32)),
            "weight_scale": (F8, (32, 4)),
            "weight_scale_2": (F32, ()),
            "input_scale": (F32, ()),
        },
    ),
}
BLOCK_FILES = {("fp8_block", False): (BLOCKS, {"weight": (F8, (32, 64)), "weight_scale_inv": (F32, (1, 1))})}
BY_LAYOUT = ((COMPRESSED_TENSORS, COMPRESSED), (MODELOPT, OPT), (FP8, BLOCK_FILES))
TABLES = [(layout, *row) for layout, table in BY_LAYOUT for row in table.items()]


@pytest.mark.parametrize(("layout", "scheme", "expected"), TABLES, ids=[f"{t[0].name}-{t[1]}" for t in TABLES])
def test_tensors_of_a_linear_are_those_of_the_layout(layout: Layout, scheme: Any, expected: Any) -> None:
    recipe, tensors = expected
    columns = 128 if scheme[0] == "int4_128" else 64
    records = {"a.weight": weight(recipe, 32, columns), "a.bias": weight(None, 32), "n.weight": weight(None, 64)}
    if scheme[1]:
        records["a.input_scale"] = SCALE
    found = written(plan(records, layout))
    assert found == {
        **{f"a.{name}": tensor for name, tensor in tensors.items()},
        "a.bias": (torch.bfloat16, (32,)),
        "n.weight": (torch.bfloat16, (64,)),
    }


def test_every_scheme_of_a_layout_is_tested() -> None:
    for layout, table in BY_LAYOUT:
        assert {Scheme.of(kind, calibrated=calibrated) for kind, calibrated in table} == set(layout.schemes)


def test_recipes_that_decode_alike_are_one_kind() -> None:
    assert {name: kind_of(recipe) for name, recipe in KINDS.items()} == {name: name for name in KINDS}
    assert kind_of(Float8DelayedScaling()) == "fp8_tensor"
    assert kind_of(NVFP4BlockScaling(blocks="square")) == "nvfp4"
    assert kind_of(Float8CurrentScaling(power_of_two=True)) == "fp8_row"
    assert kind_of(Float8CurrentScaling(element="e5m2")) is None
    assert kind_of(MXFP8BlockScaling(element="e5m2")) is None
    assert kind_of(Float8BlockScaling(power_of_two=True)) == "fp8_block"
    assert kind_of(Float8BlockScaling(element="e5m2")) is None
    assert kind_of(Float8BlockScaling(blocks="row")) is None


def test_global_scales_survive_being_stored_as_reciprocals() -> None:
    amax = torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 9 + 1e-4
    made = torch.reciprocal(2688 / amax)  # how a global scale comes about
    foreign = amax / 2688  # how others make theirs: some are no fp32 number's reciprocal
    for values, all_come_back in ((made, True), (foreign, False)):
        stored = torch.stack([reciprocal(value) for value in values])
        back = torch.reciprocal(stored)
        assert bool((back == values).all()) == all_come_back
        assert bool(((back.view(torch.int32) - values.view(torch.int32)).abs() <= 1).all())
        assert torch.equal(torch.stack([reciprocal(value) for value in back]), stored)  # written again: the same


def test_groups_and_ignored_modules_are_told() -> None:
    records = {
        "embed_tokens.weight": weight(None, 128, 64),
        "l.q_proj.weight": weight(ROWS),
        "l.k_proj.weight": weight(ROWS),
        "l.norm.weight": weight(None, 64),
        "lm_head.weight": weight(None, 128, 64),
    }
    config = plan(records).json["config.json"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "float-quantized")
    assert config["ignore"] == ["embed_tokens", "lm_head"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    mixed = plan({**records, "l.down_proj.weight": weight(NVFP4)}).json["config.json"]
    assert mixed["format"] == "mixed-precision"
    assert {group["format"]: group["targets"] for group in mixed["config_groups"].values()} == {
        "float-quantized": ["l.q_proj", "l.k_proj"],
        "nvfp4-pack-quantized": ["l.down_proj"],
    }


def test_modelopt_tells_one_algorithm_or_lists_them() -> None:
    both = plan({"a.weight": weight(NVFP4), "a.input_scale": SCALE, "h.weight": weight()}, MODELOPT)
    legacy = both.json["hf_quant_config.json"]
    assert legacy == {
        "producer": MODELOPT_S,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["h"],
        },
    }
    half = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert both.json["config.json"] == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["h"],
        "config_groups": {"group_0": {"weights": half, "input_activations": half, "targets": ["Linear"]}},
        "producer": MODELOPT_S,
    }
    mixed = plan({"a.weight": weight(NVFP4), "b.weight": weight(TENSOR), "b.input_scale": SCALE}, MODELOPT).json[
        "hf_quant_config.json"
    ]["quantization"]
    assert mixed["quant_algo"] == "MIXED_PRECISION"
    assert mixed["quantized_layers"] == {
        "a": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "b": {"quant_algo": "FP8"},
    }
    text = refused({"a.weight": weight(NVFP4), "b.weight": weight(MXFP8)}, MODELOPT)
    assert "b: engines read mxfp8 weights with dynamic inputs in the layout modelopt only where all linears" in text


def test_kv_cache_scales_are_written_where_the_layout_has_them() -> None:
    scale = SCALE
    records = {"l.self_attn.o_proj.weight": weight(ROWS)}
    for own in ("k_scale", "v_scale"):
        records[f"l.self_attn.{own[0]}_proj.{own}"] = scale
    made = plan(records)
    assert {"l.self_attn.k_scale", "l.self_attn.v_scale"} <= written(made).keys()
    assert made.json["config.json"]["kv_cache_scheme"]["num_bits"] == 8
    made = plan(records, MODELOPT)
    assert {"l.self_attn.k_proj.k_scale", "l.self_attn.v_proj.v_scale"} <= written(made).keys()
    assert made.json["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] == "FP8"
    del records["l.self_attn.v_proj.v_scale"]
    assert "l.self_attn has no v_scale beside its k_scale" in refused(records)
    records["l.self_attn.v_scale"] = scale  # the other way to name them
    assert "l.self_attn.v_scale is 0.0, which engines divide by" in refused(
        records, scales={"l.self_attn.v_scale": 0.0}
    )


def test_experts_are_linears_of_their_own() -> None:
    records = {
        "l.experts.gate_up_proj": weight(NVFP4, 2, 64, 32),
        "l.experts.down_proj": weight(None, 2, 32, 32),
        "l.experts.gate_up_proj.input_scale": SCALE,
    }
    found = written(plan(records))
    assert found["l.experts.1.up_proj.weight_packed"] == (U8, (32, 16))
    assert found["l.experts.0.gate_proj.input_global_scale"] == (F32, (1,))
    assert found["l.experts.1.down_proj.weight"] == (torch.bfloat16, (32, 32))
    assert plan(records).json["config.json"]["ignore"] == ["l.experts.0.down_proj", "l.experts.1.down_proj"]
    for expert in range(2):  # one each, as other tools write them
        records |= {f"l.experts.{expert}.{half}_proj.input_scale": SCALE for half in ("gate", "up")}
    own = {f"l.experts.1.{half}_proj.input_scale": 0.5 for half in ("gate", "up")}
    made = plan(records, scales=own)
    values = {t.name: t.value for f in made.files for o in f.outputs for t in o.written if t.part == "input_scale"}
    assert values == {
        f"l.experts.{expert}.{half}_proj.input_global_scale": scale
        for expert, scale in enumerate((1.0, 0.5))
        for half in ("gate", "up")
    }
    assert pieces_of("l.blocks.w", (2, 64, 32)) is None  # not known to be experts
    assert "l.blocks.w (2, 64, 32) is quantized, and engines know no such linear" in refused(
        {"l.blocks.w": weight(NVFP4, 2, 64, 32)}
    )


def test_fused_linears_share_their_global_scale_or_are_refused() -> None:
    assert fused_sets(["a.q_proj", "b", "a.v_proj", "c.q_proj"]) == [["a.q_proj", "a.v_proj"], ["b"], ["c.q_proj"]]
    assert fused_sets(["a.q_a_proj", "a.kv_a_proj_with_mqa"]) == [["a.q_a_proj", "a.kv_a_proj_with_mqa"]]
    records = {f"l.{name}_proj.weight": weight(NVFP4) for name in ("q", "k", "v", "o")}
    scales = {"l.q_proj.weight": 0.5, "l.k_proj.weight": 2.0, "l.v_proj.weight": 2.0, "l.o_proj.weight": 7.0}
    text = refused(records, scales=scales)
    assert "l.q_proj.weight 0.5, l.k_proj.weight 2, l.v_proj.weight 2. Calibrate them together" in text
    assert 'fused_scales="requantize" (--fused-scales requantize)' in text
    made = plan(records, scales=scales, requantize=True)
    assert made.requantized == ("l.q_proj.weight",)
    assert {o.source: o.scale for f in made.files for o in f.outputs if o.scale is not None} == {"l.q_proj.weight": 2.0}
    eights = {name: weight(TENSOR) for name in records}  # each has its own scale there
    assert plan(eights, scales=scales).requantized == ()


def test_fused_linears_have_one_format() -> None:
    records = {"l.gate_proj.weight": weight(ROWS), "l.up_proj.weight": weight(), "l.down_proj.weight": weight(ROWS)}
    text = refused(records)
    assert text == (
        "l.gate_proj: fp8_row weights with dynamic inputs, l.up_proj: not quantized: engines run these as one linear; "
        "give all of them the same format, or none"
    )


def test_fused_linears_get_the_largest_scale_of_their_one_input() -> None:
    records = {f"l.{name}_proj.weight": weight(TENSOR) for name in ("q", "k", "v")}
    records |= {f"l.{name}_proj.input_scale": SCALE for name in ("q", "k")}
    made = plan(records, scales={"l.q_proj.input_scale": 0.25, "l.k_proj.input_scale": 0.5})
    values = {t.name: t.value for f in made.files for o in f.outputs for t in o.written if t.part == "input_scale"}
    assert values == {f"l.{name}_proj.input_scale": 0.5 for name in ("q", "k", "v")}


REFUSALS: dict[str, tuple[dict[str, Entry], Layout, dict[str, Any], str]] = {
    "nothing quantized": ({"a.weight": weight()}, MODELOPT, {}, "nothing in the source is quantized: calibrate the"),
    "e5m2": (
        {"a.weight": weight(Float8CurrentScaling(element="e5m2"))},
        MODELOPT,
        {},
        'power_of_two=False): engines read element="e4m3" only; convert it first',
    ),
    "e5m2 in blocks": (
        {"a.weight": weight(Float8BlockScaling(element="e5m2"))},
        FP8,
        {},
        'power_of_two=False): engines read element="e4m3" only; convert it first',
    ),
    "blocks of one row": (
        {"a.weight": weight(Float8BlockScaling(blocks="row"))},
        FP8,
        {},
        "blocks='row', power_of_two=False): engines read blocks=\"square\" only; convert it first",
    ),
    "blocks in the layout of ModelOpt": (
        {"a.weight": weight(BLOCKS)},
        MODELOPT,
        {},
        "no fp8_block weights with dynamic inputs; it has such blocks for weights alone (FP8_PB_WO), use layout=",
    ),
    "inputs of blocks": (
        {"a.weight": weight(BLOCKS), "a.input_scale": SCALE},
        COMPRESSED_TENSORS,
        {},
        "no fp8_block weights with static inputs; its engines scale every 128 columns of an input anew: leave the",
    ),
    "rows in the layout of blocks": (
        {"a.weight": weight(ROWS)},
        FP8,
        {},
        "a: the layout fp8 has no fp8_row weights with dynamic inputs; it has fp8_block weights with dynamic inputs",
    ),
    "one scale in the layout of blocks": (
        {"a.weight": weight(TENSOR)},
        FP8,
        {},
        "the layout fp8 has no fp8_tensor weights with dynamic inputs; engines call such a scale by different names;",
    ),
    "a name that ends with an ignored one": (
        {"m.gate.weight": weight(BLOCKS), "gate.weight": weight()},
        FP8,
        {},
        "m.gate: engines that read the layout fp8 would take it for gate, which is not quantized, as its name ends",
    ),
    "MXFP4": (
        {"a.weight": weight(MXFP4BlockScaling())},
        MODELOPT,
        {},
        'a: the layout modelopt has no mxfp4 weights with unquantized inputs; use layout="compressed-tensors"',
    ),
    "INT4": (
        {"a.weight": weight(Int4GroupScaling())},
        MODELOPT,
        {},
        'a: the layout modelopt has no int4_32 weights with unquantized inputs; use layout="compressed-tensors"',
    ),
    "static MXFP4": (
        {"a.weight": weight(MXFP4BlockScaling()), "a.input_scale": SCALE},
        COMPRESSED_TENSORS,
        {},
        "a: the layout compressed-tensors has no mxfp4 weights with static inputs; it has fp8_tensor",
    ),
    "a linear in the layout of experts": (
        {"a.weight": weight(MXFP4BlockScaling())},
        GPT_OSS,
        {},
        "a.weight (32, 64) is quantized, and engines that read the layout mxfp4 know no such linear: they know",
    ),
    "other experts in the layout of experts": (
        {"m.experts.down_proj": weight(MXFP8, 2, 32, 64)},
        GPT_OSS,
        {},
        "m.experts.down_proj: the layout mxfp4 has no mxfp8 weights with dynamic inputs; it has mxfp4 weights with",
    ),
    "dense experts in the layout of experts": (
        {"m.experts.down_proj": weight(MXFP4BlockScaling(), 2, 32, 64), "n.experts.down_proj": weight(None, 2, 32, 64)},
        GPT_OSS,
        {},
        "n.experts.down_proj: rows of linears [E, N, K] that are not quantized, and dense experts of the layout mxfp4",
    ),
    "a KV cache in the layout of experts": (
        {"m.experts.down_proj": weight(MXFP4BlockScaling(), 2, 32, 64), "a.k_scale": SCALE, "a.v_scale": SCALE},
        GPT_OSS,
        {},
        "a: the layout mxfp4 has no scales of the KV cache; leave them out",
    ),
    "experts of gpt-oss": (
        {
            "m.experts.gate_up_proj": weight(MXFP4BlockScaling(), 2, 64, 32),
            "m.experts.gate_up_proj_bias": weight(None, 2, 64),
        },
        COMPRESSED_TENSORS,
        {},
        "m.experts.gate_up_proj: with biases beside them, these are experts as gpt-oss has them, whose rows of gate",
    ),
    "no static scale": (
        {"a.weight": weight(TENSOR)},
        MODELOPT,
        {},
        "fp8_tensor weights with dynamic inputs; its engines divide by the input_scale: calibrate one (inputs=",
    ),
    "static rows": (
        {"a.weight": weight(ROWS), "a.input_scale": SCALE},
        MODELOPT,
        {},
        "fp8_row weights with static inputs; its engines scale each token: leave the input scales out, or use",
    ),
    "static blocks": (
        {"a.weight": weight(MXFP8), "a.input_scale": SCALE},
        MODELOPT,
        {},
        "a: the layout modelopt has no mxfp8 weights with static inputs; it has fp8_tensor weights with static inputs;",
    ),
    "scale of zero": (
        {"a.weight": weight(NVFP4), "a.input_scale": SCALE},
        MODELOPT,
        {"scales": {"a.input_scale": 0.0}},
        "a: input_scale is 0.0, which engines divide by; calibrate it again, or leave it out",
    ),
    "orphan": (
        {"a.weight": weight(NVFP4), "b.weight": weight(), "b.input_scale": SCALE},
        MODELOPT,
        {},
        "b.input_scale: the weight beside it is not quantized; leave it out",
    ),
    "tied": (
        {"m.embed_tokens.weight": weight(), "lm_head.weight": weight(NVFP4)},
        MODELOPT,
        {"tied": True},
        "lm_head.weight is quantized, but the config ties it to the embedding (tie_word_embeddings)",
    ),
    "embedding": (
        {"m.embed_tokens.weight": weight(MXFP8), "a.weight": weight(MXFP8)},
        MODELOPT,
        {},
        "m.embed_tokens.weight: engines read no quantized embedding; convert it to a dense one",
    ),
    "turned experts": (
        {"m.experts.gate_up_proj": weight(MXFP8, 2, 64, 256), "m.experts.down_proj": weight(MXFP8, 2, 128, 64)},
        COMPRESSED_TENSORS,
        {},
        "m.experts.gate_up_proj, m.experts.down_proj: quantized along what engines have as rows: they know",
    ),
    "experts twice": (
        {"m.experts.down_proj": weight(NVFP4, 2, 32, 64), "m.experts.1.down_proj.weight": weight()},
        COMPRESSED_TENSORS,
        {},
        "m.experts.1.down_proj: the source has the linear twice, quantized and dense, under names that are one for",
    ),
    "ignored within": (
        {"m.mlp.gate.weight": weight(), "m.mlp.gate_proj.weight": weight(NVFP4), "m.mlp.up_proj.weight": weight(NVFP4)},
        MODELOPT,
        {},
        "m.mlp.gate_proj: engines that read the layout modelopt would take it for a part of m.mlp.gate, which is not",
    ),
    "root within": (
        {"weight": weight(), "a.weight": weight(NVFP4)},
        MODELOPT,
        {},
        "a: engines that read the layout modelopt would take it for a part of the model itself, which is not quantized",
    ),
    "two of a name": (
        {"a.weight": weight(ROWS), "a.weight_scale": weight(None, 4)},
        COMPRESSED_TENSORS,
        {},
        "a.weight_scale would hold both a.weight and a.weight_scale",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_can_not_be_exported_is_refused_by_name(case: str) -> None:
    records, layout, options, text = REFUSALS[case]
    assert text in refused(records, layout, **options)


def test_a_tied_projection_is_written_once() -> None:
    records = {
        "m.embed_tokens.weight": weight(None, 8, 4),
        "a.weight": weight(ROWS),
        "lm_head.weight": weight(None, 8, 4),
    }
    assert "lm_head.weight" in written(plan(records))
    made = plan(records, tied=True)
    assert "lm_head.weight" not in written(made)
    assert made.files[0].outputs[0].twin == "lm_head.weight"
    assert made.json["config.json"]["ignore"] == ["m.embed_tokens", "lm_head"]
    del records["lm_head.weight"]
    assert plan(records, tied=True).json["config.json"]["ignore"] == ["m.embed_tokens", "lm_head"]


def test_an_output_projection_that_the_source_has_as_embedding_alone_is_ignored() -> None:
    made = plan({"m.embed_tokens.weight": weight(None, 8, 4), "a.weight": weight(ROWS)})  # the config says nothing
    assert made.json["config.json"]["ignore"] == ["m.embed_tokens", "lm_head"]
    made = plan({"m.embed_tokens.weight": weight(None, 8, 4), "lm_head.weight": weight(ROWS)})
    assert made.json["config.json"]["ignore"] == ["m.embed_tokens"]


def test_dense_experts_that_are_transposed_stay_as_they_are() -> None:
    experts = {"m.experts.gate_up_proj": weight(None, 2, 64, 256), "m.experts.down_proj": weight(None, 2, 128, 64)}
    made = plan({"a.weight": weight(ROWS), **experts})
    assert {name: shape for name, (_, shape) in written(made).items() if "experts" in name} == {
        name: record.shape for name, record in experts.items()
    }
    ignored = made.json["config.json"]["ignore"]
    assert {"m.experts", "m.experts.1.gate_proj", "m.experts.0.down_proj"} <= set(ignored)
    assert ignored.count("m.experts") == 1


def test_a_model_that_is_one_linear_has_the_scale_of_its_inputs() -> None:
    made = plan({"weight": weight(NVFP4), "input_scale": SCALE}, scales={"input_scale": 0.5})
    assert set(written(made)) == {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"}
    assert made.json["config.json"]["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


def test_files_are_filled_in_order_up_to_a_size() -> None:
    records = {f"{number}.weight": weight(MXFP8) for number in range(5)}  # 2048 + 64 bytes each
    (one,) = plan(records).files
    assert one.name == "model.safetensors"
    files = plan(records, max_shard_size=2 * 2112).files
    assert [file.name for file in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [[output.source for output in file.outputs] for file in files] == [
        ["0.weight", "1.weight"],
        ["2.weight", "3.weight"],
        ["4.weight"],
    ]
    assert [len(file.outputs) for file in plan(records, max_shard_size=1).files] == [1] * 5  # a weight is never split


def test_a_third_layout_is_a_table() -> None:
    class Mine(Layout):
        def json(self, linears: Linears) -> dict[str, Any]:
            return {"config.json": {"quant_method": self.name, "modules": list(linears.schemes)}}

    scheme = Scheme("mxfp8", "dynamic")
    mine = Mine(name="mine", schemes={scheme: MODELOPT.schemes[scheme]})
    register_layout(mine)
    try:
        assert layout_named("mine") is mine
        assert plan({"a.weight": weight(MXFP8)}, mine).json == {
            "config.json": {"quant_method": "mine", "modules": ["a"]}
        }
        with pytest.raises(ValueError, match="the layout 'mine' is registered already"):
            register_layout(mine)
    finally:
        del LAYOUTS["mine"]
    with pytest.raises(ValueError, match=r"layout='mine' is not one of 'compressed-tensors', .*'fp8', .*'modelopt'"):
        layout_named("mine")


def test_the_subtree_of_the_weights_is_found() -> None:
    flat = {"a.weight": ("a.weight",), "b": ("b",)}
    assert weights_prefix(flat, {"a.weight"}) == ""
    nested = {"model.a": ("model", "a"), "model.b": ("model", "b"), "optim.a": ("optim", "a")}
    assert weights_prefix(nested, {"model.a", "model.b"}) == "model."
    deep = {"app.model.a": ("app", "model", "a"), "app.model.b": ("app", "model", "b"), "app.step": ("app", "step")}
    assert weights_prefix(deep, {"app.model.a", "app.model.b"}) == "app.model."
    assert weights_prefix(nested, set()) == ""
    parts = {f"model.{part}.weight": ("model", part, "weight") for part in ("encoder", "decoder")}
    with pytest.raises(ValueError, match=r"1 other weights are not \(model\.encoder\.weight, \.\.\.\); say by prefix="):
        weights_prefix(parts, {"model.decoder.weight"})  # half a model
    with pytest.raises(ValueError, match=r"quantized weights are under model and optim; say by prefix=\.\.\."):
        weights_prefix(nested, {"model.a", "optim.a"})


def test_the_subtree_of_dense_weights_is_found_by_their_names() -> None:
    nested = {"model.a": ("model", "a"), "model.b": ("model", "b"), "optim.a.m": ("optim", "a", "m"), "s": ("s",)}
    assert weights_prefix(nested, set(), like={"a", "c"}) == "model."
    assert weights_prefix({"a.weight": ("a.weight",)}, set(), like={"b"}) == ""
    flat_above = {"model.a": ("model.a",), "optim.lr": ("optim", "lr")}
    assert weights_prefix(flat_above, set(), like={"model.a"}) == ""
    assert weights_prefix({"model.a": ("model", "a"), "model.b": ("model", "b")}, set(), like={"c"}) == "model."
    compiled = {"model._orig_mod.a": ("model", "_orig_mod.a"), "optim.lr": ("optim", "lr")}
    assert weights_prefix(compiled, set(), like={"a"}) == "model."
    twice = {"model.a": ("model", "a"), "ema.a": ("ema", "a")}
    with pytest.raises(ValueError, match=r"^rest= \(--rest\) is nested, .* are under model and ema; give what holds"):
        weights_prefix(twice, set(), like={"a"})
    with pytest.raises(ValueError, match="names of the source's weights are under none of its keys; give what holds"):
        weights_prefix(nested, set(), like={"c"})
