"""Digests of directories and of received tensors are those of the model they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dcp_adapters import digest, export_hf, import_hf, tensor_digests
from dcp_adapters.cli.main import main
from dcp_adapters.digests.engine import unfuse
from dcp_adapters.records.weight_sums import DigestDifference, first_difference
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize, quantize_
from tests import weight_digests
from tests.dcp_adapters.cases import save, values
from tests.dcp_adapters.hf.exports import llama
from tests.dcp_adapters.hf.test_round_trip import BETWEEN, CASES, CONFIG, RECIPES, state_of


def received(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a stream of the same tensors would deliver."""
    tensors = {name: held for file in directory.glob("*.safetensors") for name, held in load_file(file).items()}
    return tensors, json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(("layout", "name", "static"), CASES)
def test_an_export_has_the_digest_of_its_state(layout: str, name: str, static: bool, tmp_path: Path) -> None:
    state = state_of(RECIPES[name], static=static)
    if static and layout == "compressed-tensors":
        del state[BETWEEN]  # has no reciprocal
    export_hf(state, tmp_path / "a", layout=layout, config=CONFIG)
    expected = weight_digests.values(state)
    assert tensor_digests(state) == expected
    assert tensor_digests(tmp_path / "a") == expected
    tensors, config = received(tmp_path / "a")
    assert tensor_digests(tensors, config=config) == expected
    assert digest(import_hf(tmp_path / "a")) == weight_digests.value(state)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_without_a_reciprocal_show_where_the_layout_stores_that(layout: str, tmp_path: Path) -> None:
    weight = quantize(values((32, 64), 0), NVFP4BlockScaling())
    weight.parts()["global_scale"].fill_(0.00348132895)  # no fp32 number has this one as its reciprocal
    state = {"l.down_proj.weight": weight, "norm.weight": values((64,), 1)}
    export_hf(state, tmp_path / "a", layout=layout, config=CONFIG)
    found = first_difference(tensor_digests(state), tensor_digests(tmp_path / "a"))
    assert found == (None if layout == "modelopt" else DigestDifference("l.down_proj.weight", "other"))


def test_a_byte_of_a_received_tensor_shows(tmp_path: Path) -> None:
    state = state_of(RECIPES["nvfp4"], static=True)
    export_hf(state, tmp_path / "a", layout="modelopt", config=CONFIG)
    tensors, config = received(tmp_path / "a")
    before = tensor_digests(tensors, config=config)
    for name, tensor in tensors.items():
        flat = tensor.view(-1).view(torch.uint8)
        flat[len(flat) // 2] ^= 1
        after = tensor_digests(tensors, config=config)
        flat[len(flat) // 2] ^= 1
        assert [one for one in before if before[one] != after[one]], name
    assert tensor_digests(tensors, config=config) == before


def test_what_is_no_plain_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w is a MXFP8Tensor of torch.float32; with config=\.\.\., expected plain"):
        digest({"w": quantize(values((32, 64), 0, torch.float32), MXFP8BlockScaling())}, config={})
    with pytest.raises(ValueError, match=r"w is a str; with config"):
        digest({"w": "x"}, config={})


def test_codes_without_their_description_are_refused(tmp_path: Path) -> None:
    export_hf(state_of(RECIPES["mxfp8"], static=False), tmp_path / "a", config=CONFIG)
    tensors, _ = received(tmp_path / "a")
    with pytest.raises(ValueError, match="the received tensors"):
        digest(tensors, config={})


def test_tied_names_are_found_through_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(tied=True)
    quantize_(model, RECIPES["mxfp8"], exclude=("lm_head",))
    export_hf(model.state_dict(), tmp_path / "a", config=model.config)
    assert first_difference(tensor_digests(model), tensor_digests(tmp_path / "a")) is not None
    assert digest(tmp_path / "a", like=model) == digest(model)
    tensors, config = received(tmp_path / "a")
    assert digest(tensors, config=config, like=model) == digest(model)
    save(model.state_dict(), tmp_path / "c")
    for pair in (("a", "c"), ("c", "a")):
        assert main(["digest", *(f"{tmp_path}/{one}" for one in pair)]) == 0
        assert capsys.readouterr().out.count(digest(model)) == 2


class Experts(nn.Module):
    """Weights of all experts, as transformers has them."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        both = quantize(values((3, 128, 64), 1), recipe), quantize(values((3, 64, 64), 2), recipe)
        self.experts = nn.Module()
        self.experts.gate_up_proj, self.experts.down_proj = map(nn.Parameter, both)


def test_experts_are_put_together_as_the_model_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Experts(MXFP8BlockScaling())
    export_hf(model.state_dict(), tmp_path / "a", config=CONFIG)
    assert digest(tmp_path / "a", like=model) == digest(model) == digest(tmp_path / "a", like=model.state_dict())
    tensors, config = received(tmp_path / "a")
    assert digest(tensors, config=config, like=model) == digest(model)
    save(model.state_dict(), tmp_path / "c")
    assert main(["digest", f"{tmp_path}/a", f"{tmp_path}/c"]) == 0
    assert capsys.readouterr().out.count(digest(model)) == 2


# -- engines -----------------------------------------------------------------------------------------------------------


def joined(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """What vLLM makes of a file's tensors, written from its documentation: rows joined, equal single values kept."""
    held = dict(tensors)
    for layer in range(layers):
        for parent, fused, members in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            prefix = f"model.layers.{layer}.{parent}."
            for own in {name.rpartition(".")[2] for name in tensors if name.startswith(f"{prefix}{members[0]}.")}:
                pieces = [held.pop(f"{prefix}{member}.{own}") for member in members]
                held[f"{prefix}{fused}.{own}"] = pieces[0] if pieces[0].numel() == 1 else torch.cat(pieces)
    return held


@pytest.mark.parametrize(
    ("layout", "name"), [("modelopt", "nvfp4"), ("compressed-tensors", "fp8_row"), ("fp8", "fp8_block")]
)
def test_tensors_that_an_engine_joined_have_the_digest_of_the_model(layout: str, name: str, tmp_path: Path) -> None:
    model = llama()
    rows = {module: part.out_features for module, part in model.named_modules() if isinstance(part, nn.Linear)}
    quantize_(model, RECIPES[name], exclude=("lm_head",))
    export_hf(model.state_dict(), tmp_path / "a", layout=layout, config=model.config)
    tensors, config = received(tmp_path / "a")
    engine = joined(tensors, 2)
    assert engine.keys() != tensors.keys()
    turned = [one for one in engine if one.endswith("_proj.weight")]
    engine |= {one: engine[one].t().contiguous() for one in turned}
    found = unfuse(engine, rows, turned=turned)
    assert digest(found, config=config) == digest(model)


def test_what_is_joined_in_another_way_is_refused() -> None:
    rows = {"l.gate_proj": 4, "l.up_proj": 6}
    each = unfuse({"l.gate_up_proj.weight_scale": torch.tensor([1.0, 2.0])}, rows)
    assert {name: float(value) for name, value in each.items()} == {
        "l.gate_proj.weight_scale": 1.0,
        "l.up_proj.weight_scale": 2.0,
    }
    with pytest.raises(ValueError, match=r"l.gate_up_proj.weight: \(8, 10\) is cut neither by the rows \[4, 6\] of l"):
        unfuse({"l.gate_up_proj.weight": torch.zeros(8, 10)}, rows)
    with pytest.raises(ValueError, match=r"it joins linears of which rows= lacks l.q_proj, l.k_proj, l.v_proj"):
        unfuse({"l.qkv_proj.weight": torch.zeros(8, 10)}, rows)
    whole = {"l.gate_up_proj.weight": torch.zeros(10, 8)}
    assert unfuse(whole, {"l.gate_up_proj": 10}) == whole  # the model's own linear
