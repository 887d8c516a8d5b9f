"""Export, import, export: the same files, in every scheme of linears, in one process and over sharded models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import export_hf, import_hf
from dcp_adapters.hf.layouts.registry import LAYOUTS
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantized_model_init,
)
from tests.dcp_adapters.cases import alone, values
from tests.ranks import agreed, run_ranks

NVFP4 = NVFP4BlockScaling()
# what a checkpoint's tensors do not tell of a recipe is in the file; q and k share a global scale, being one tensor's
RECIPES = {
    "fp8_row": Float8CurrentScaling(),
    "fp8_row, powers of two": Float8CurrentScaling(power_of_two=True),
    "fp8_tensor": Float8CurrentScaling(granularity="tensor"),
    "fp8_delayed": Float8DelayedScaling(),
    "fp8_block": Float8BlockScaling(),
    "fp8_block, powers of two": Float8BlockScaling(power_of_two=True),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8, square": MXFP8BlockScaling(blocks="square"),
    "nvfp4": NVFP4,
    "nvfp4, square": NVFP4BlockScaling(blocks="square"),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp4, floor": MXFP4BlockScaling(scale_rounding="floor"),
    **{f"int4, {group}": Int4GroupScaling(group=group) for group in (32, 64, 128)},
    "int8_row": Int8RowScaling(),
}
CONFIG = {"model_type": "tiny", "tie_word_embeddings": False}
BETWEEN = "l.mlp.down_proj.input_scale"  # 0.7 is no fp32 number's reciprocal, and comes back as one that is
STATIC = ("fp8_tensor", "fp8_delayed", "nvfp4", "nvfp4, square")


def state_of(recipe: Any, *, static: bool) -> dict[str, Any]:
    both = quantize(values((128, 128), 1), recipe)
    state: dict[str, Any] = {"embed_tokens.weight": values((48, 128), 0)}
    for name, rows in (("q_proj", slice(0, 64)), ("k_proj", slice(64, 128))):
        state[f"l.self_attn.{name}.weight"] = both[rows].clone()
        state[f"l.self_attn.{name}.bias"] = values((64,), 2)
        if static:
            state[f"l.self_attn.{name}.input_scale"] = torch.reciprocal(2688 / torch.tensor(3.7))
    state["l.mlp.down_proj.weight"] = quantize(values((32, 128), 3), recipe)
    if static:
        state[BETWEEN] = torch.tensor(0.7)
        state |= {f"l.self_attn.{own}_scale": torch.tensor(0.25) for own in "kv"}
    return state


BLOCKS = ("fp8_block", "fp8_block, powers of two")
GROUPS = tuple(name for name in RECIPES if name.startswith(("mxfp4", "int4")))
ABSENT = {  # what a layout lacks: recipes without scales of inputs
    "compressed-tensors": (),
    "modelopt": ("fp8_tensor", "fp8_delayed", *BLOCKS, *GROUPS, "int8_row"),
    "fp8": (),
}
ALONE = {"fp8": BLOCKS, "mxfp4": ()}  # all that a layout has of linears
CASES = [
    (layout, name, static)
    for layout in LAYOUTS
    for name in ALONE.get(layout, RECIPES)
    for static in (True, False)
    if static <= (name in STATIC) and (static or name not in ABSENT[layout])
]


def same(a: Any, b: Any) -> bool:
    """Whether two tensors, quantized or not, have the same parts, bit for bit."""
    one, other = (x.parts() if hasattr(x, "recipe") else {"": x} for x in (a, b))
    return one.keys() == other.keys() and all(
        one[part].shape == other[part].shape
        and torch.equal(one[part].reshape(-1).view(torch.uint8), other[part].reshape(-1).view(torch.uint8))
        for part in one
        if part != "amax_history"  # no file has it: made anew from the scale
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize(("layout", "name", "static"), CASES)
def test_what_is_imported_is_exported_to_the_same_files(layout: str, name: str, static: bool, tmp_path: Path) -> None:
    state = state_of(RECIPES[name], static=static)
    export_hf(state, tmp_path / "a", layout=layout, config=CONFIG)
    imported = import_hf(tmp_path / "a")
    assert all(same(imported[entry], value) for entry, value in state.items() if entry != BETWEEN)
    assert {entry: value.recipe for entry, value in imported.items() if hasattr(value, "recipe")} == {
        entry: value.recipe for entry, value in state.items() if hasattr(value, "recipe")
    }
    export_hf({entry: imported[entry] for entry in state}, tmp_path / "b", layout=layout, config=CONFIG)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_blocks_and_packed_codes_come_back_from_one_directory(tmp_path: Path) -> None:
    state = state_of(RECIPES["fp8_block"], static=False)
    state["l.self_attn.o_proj.weight"] = quantize(values((160, 128), 4), RECIPES["mxfp4"])
    state["l.mlp.down_proj.weight"] = quantize(values((32, 128), 3), RECIPES["int4, 64"])
    export_hf(state, tmp_path / "a", config=CONFIG)
    told = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert told["format"] == "mixed-precision"
    assert [group["format"] for group in told["config_groups"].values()] == [
        "float-quantized",
        "pack-quantized",
        "mxfp4-pack-quantized",
    ]
    imported = import_hf(tmp_path / "a")
    assert all(same(imported[entry], value) for entry, value in state.items())
    export_hf({entry: imported[entry] for entry in state}, tmp_path / "b", config=CONFIG)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_a_layout_can_be_left_for_the_other_and_come_back(name: str, tmp_path: Path) -> None:
    state = state_of(RECIPES[name], static=True)
    export_hf(state, tmp_path / "a", layout="modelopt", config=CONFIG)
    export_hf(import_hf(tmp_path / "a"), tmp_path / "b", layout="compressed-tensors", config=CONFIG)
    export_hf(import_hf(tmp_path / "b"), tmp_path / "c", layout="modelopt", config=CONFIG)
    a, c = contents(tmp_path / "a"), contents(tmp_path / "c")
    first, last = (import_hf(tmp_path / directory) for directory in ("a", "c"))
    if name == "nvfp4":
        assert abs(int(first[BETWEEN].view(torch.int32)) - int(last[BETWEEN].view(torch.int32))) <= 1
        del first[BETWEEN], last[BETWEEN]
    else:
        assert a == c
    assert a["config.json"] == c["config.json"]
    assert all(same(last[entry], value) for entry, value in first.items())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(48, 128, dtype=torch.bfloat16)
        self.l = nn.ModuleDict()
        self.l["self_attn"] = nn.ModuleDict(
            {name: nn.Linear(128, 64, dtype=torch.bfloat16) for name in ("q_proj", "k_proj")}
        )
        self.l["mlp"] = nn.ModuleDict({"down_proj": nn.Linear(128, 32, bias=False, dtype=torch.bfloat16)})


def over_shards(directory: str, name: str, layout: str) -> None:
    with torch.device("meta"), quantized_model_init(RECIPES[name]):
        model = Model()
    fully_shard(model)
    imported = import_hf(f"{directory}/a", model, progress=False)
    export_hf(imported, f"{directory}/b", layout=layout, config=CONFIG)


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("nvfp4", "modelopt", 2),
        ("fp8_tensor", "compressed-tensors", 3),
        ("mxfp4", "compressed-tensors", 3),
        ("int4, 64", "compressed-tensors", 3),
    ],
)
def test_a_sharded_model_that_imports_exports_the_same_files(
    name: str, layout: str, ranks: int, tmp_path: Path
) -> None:
    there = Path(agreed(value=str(tmp_path)))
    with alone():
        state = state_of(RECIPES[name], static=name in STATIC)
        if there == tmp_path:
            export_hf(state, there / "a", layout=layout, config=CONFIG)
    run_ranks(ranks, over_shards, str(there), name, layout)
    a, b = contents(there / "a"), contents(there / "b")
    assert json.loads(a["config.json"]) == json.loads(b["config.json"])
    one, other = import_hf(there / "a"), import_hf(there / "b")  # in the order of the model there
    assert one.keys() == other.keys()
    assert all(same(other[entry], value) for entry, value in one.items())
