"""Modules of other libraries as ours: the same values, plain modules, and every use that a quantized model has.

The libraries run in a process of their own (peers.py); what is tested here are the models that were adopted there.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, adopt, export_hf, import_hf, release
from dcp_adapters.hf.layouts.layout import Scheme, kind_of
from dcp_adapters.hf.layouts.registry import layout_named
from dcp_adapters.stored.numeric_error import error_between
from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MasterWeightOptimizer,
    NF4BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantize_,
)
from tests.dcp_adapters.adopting.models import FOREIGN, LAYERS, dense, inputs, linears
from tests.dcp_adapters.adopting.refused import REFUSED
from tests.dcp_adapters.cases import assert_holds
from tests.ranks import run_ranks_each

every_source = pytest.mark.parametrize("name", FOREIGN)
of_torchao = pytest.mark.parametrize("name", [name for name in FOREIGN if name.startswith("torchao")])
# Theirs: a division and a product with the code; ours: a reciprocal and two products. Each rounds by at most 2^-24.
A_DIVISION = 5 * 2.0**-24


def adopted(peers: dict[str, Any], name: str) -> Any:
    return copy.deepcopy(peers["adopted"][name].model)


# -- values ------------------------------------------------------------------------------------------------------------


@every_source
def test_values_are_the_librarys(peers: dict[str, Any], name: str) -> None:
    record = peers["adopted"][name]
    assert [weight.name for weight in record.report.weights] == [f"{key}.weight" for key in LAYERS]
    for key, linear in linears(record.model).items():
        entry, expected = record.report[f"{key}.weight"], record.values[key]
        assert isinstance(linear.weight, QuantizedTensor)
        assert repr(entry.recipe).startswith(record.recipe)
        assert entry.recipe == linear.weight.recipe
        assert entry.library == name.split(maxsplit=1)[0].lower()
        assert torch.equal(linear.weight.dequantize(torch.float32).to(expected.dtype), expected)
        assert entry.exact
        assert entry.error is None
    assert record.report.exact
    assert str(record.report).count("\n") == len(LAYERS)


@every_source
def test_modules_become_plain_linears(peers: dict[str, Any], name: str) -> None:
    record = peers["adopted"][name]
    plain = dense(inner=record.model[0].out_features, out=record.model[2].out_features)
    quantize_(plain, NVFP4BlockScaling())
    for linear, other in zip(linears(record.model).values(), linears(plain).values(), strict=True):
        assert type(linear) is nn.Linear
        assert vars(linear).keys() == vars(other).keys()
        assert type(linear._parameters) is dict
        assert list(linear._parameters) == ["weight", "bias"]
        assert not linear._buffers
        assert not linear._modules
        assert (linear.weight.dtype, linear.weight.shape) == (torch.bfloat16, other.weight.shape)
    assert record.same, "biases, training modes and hooks are the same objects"
    assert record.model.state_dict().keys() == plain.state_dict().keys()
    assert record.model(inputs()).isfinite().all()
    for library in (b"torchao", b"modelopt", b"compressed_tensors", b"transformers", b"bitsandbytes"):
        assert library not in record.pickled, "a model that is unpickled needs none of them"


def test_a_division_by_the_global_scale_is_told_where_it_is_no_product(peers: dict[str, Any]) -> None:
    """compressed-tensors divides a block's scale by it: the reciprocal of 16001 is rounded, that of 2^14 is not."""
    record = peers["division"]
    assert not record.report.exact
    for key, linear in linears(record.model).items():
        entry = record.report[f"{key}.weight"]
        assert not entry.exact
        assert 0 < entry.error.relative < A_DIVISION
        assert "divides by its global scale" in entry.note
        assert torch.equal(linear.weight.payload, record.released[key])
        assert torch.equal(linear.weight.dequantize(), record.values[key])  # in bf16 nothing of it is left


def test_eight_bits_of_bitsandbytes_keep_their_codes(peers: dict[str, Any]) -> None:
    """Theirs: codes * SCB * fp32(1/127); ours: codes * fp32(SCB / 127). Each of the five roundings is 2^-24 at most."""
    record, codes = peers["eight bits"]
    for key, linear in linears(record.model).items():
        entry, expected = record.report[f"{key}.weight"], record.values[key]
        assert isinstance(entry.recipe, Int8RowScaling)
        assert not entry.exact
        assert entry.error.relative < 5 * 2.0**-24
        found = linear.weight.dequantize(torch.float32)
        assert ((found - expected).abs() <= 5 * 2.0**-24 * expected.abs()).all()
        assert "quantized its inputs" in entry.note
        assert type(linear) is nn.Linear
    assert torch.equal(record.model[0].weight.payload, codes)
    assert b"bitsandbytes" not in record.pickled


def test_blocks_that_run_on_over_rows_are_what_was_quantized(peers: dict[str, Any]) -> None:
    """Of normal numbers NF4 is off by a tenth; a decoder that takes blocks of rows is off by far more here."""
    model, report, weight = peers["uneven"]
    assert report["0.weight"].recipe == NF4BlockScaling(block=32)
    assert "run on over the ends of rows" in report["0.weight"].note
    found = model[0].weight.dequantize(torch.float32)
    assert error_between(found, weight).relative < 0.15
    assert ((found - weight).norm(dim=1) < 0.2 * weight.norm(dim=1)).all()


def test_arbitrary_bytes_decode_as_torchaos(peers: dict[str, Any]) -> None:
    assert len(peers["arbitrary"]) == 5
    assert all(same for _, same in peers["arbitrary"]), peers["arbitrary"]


def test_symmetric_int4_tensors_hold_the_formula_of_their_class(peers: dict[str, Any]) -> None:
    """value = qdata * scale, two's complement, the low nibble first: what mslk's pack_int4 writes."""
    model, report, values = peers["int4"]
    assert report.exact
    for key, linear in linears(model).items():
        assert torch.equal(linear.weight.dequantize(torch.float32), values[key])


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchao MXFP8", "torchao MXFP8 floor", "torchao MXFP4"])
def test_dynamic_inputs_have_torchaos_bytes(peers: dict[str, Any], name: str) -> None:
    """What `activations="dynamic"` makes of inputs is what torchao's linear makes of them."""
    recipe, x, values, scale = peers["inputs"][name]
    assert recipe.activations == "dynamic"
    assert {weight.note for weight in peers["adopted"][name].report.weights} == {""}
    ours = quantize(x, recipe.of_rows)
    assert torch.equal(ours.dequantize(torch.float32), values)
    assert torch.equal(ours.scale, scale)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (
            "torchao MXFP8 even",
            "torchao quantized its inputs by other formulas; here they stay as they are (scaling mode",
        ),
        ("transformers FP8 tensor", "transformers quantized its inputs; here they stay as they are"),
        ("compressed-tensors FP8 dynamic", "compressed-tensors quantized its inputs; here they stay as they are"),
        ("ModelOpt FP8", "ModelOpt quantized its inputs; here they stay as they are (calibrated amax "),
    ],
)
def test_inputs_that_others_quantize_are_noted(peers: dict[str, Any], name: str, note: str) -> None:
    report = peers["adopted"][name].report
    assert all(weight.note.startswith(note) for weight in report.weights)
    assert all(weight.recipe.activations is None for weight in report.weights)
    assert note in report.table()


def test_inputs_of_a_weight_that_no_source_knows_are_noted(peers: dict[str, Any]) -> None:
    quantized, plain = (weight.note for weight in peers["int8"].weights)
    assert quantized == f"{plain}; torchao quantized its inputs by other formulas; here they stay as they are"


# -- every use of a quantized model ------------------------------------------------------------------------------------


def _shard_train_save(case: tuple[Any, str]) -> None:
    model, path = case
    whole = {key: value.detach().clone() for key, value in model.state_dict().items()}
    for layer in (*linears(model).values(), model):
        fully_shard(layer)
    for key, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(_values(value.full_tensor()), _values(whole[key])), key
    dcp.save(model.state_dict(), checkpoint_id=path, planner=QuantizedSavePlanner())
    for param in model.parameters():
        param.requires_grad_()
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.5)
    model(inputs()).float().square().mean().backward()
    optimizer.step()
    model[0].reshard()
    assert not torch.equal(_values(model[0].weight.full_tensor()), _values(whole["0.weight"]))
    dcp.load(model.state_dict(), checkpoint_id=path, planner=QuantizedLoadPlanner())
    assert_holds(model.state_dict(), whole)


def _values(value: Any) -> Any:
    return value.dequantize(torch.float32) if isinstance(value, QuantizedTensor) else value


def test_it_shards_trains_saves_and_loads(peers: dict[str, Any], tmp_path: Path) -> None:
    """On two ranks, each source's model: the gathered values, a step, a checkpoint."""
    cases = [(adopted(peers, name), str(tmp_path / name.replace(" ", "-"))) for name in FOREIGN]
    run_ranks_each(2, cases, _shard_train_save)


@every_source
def test_adapters_train_on_it_and_the_bytes_stay(peers: dict[str, Any], name: str) -> None:
    peft = pytest.importorskip("peft")
    model = adopted(peers, name)
    before = {key: linear.weight.detach().clone() for key, linear in linears(model).items()}
    lora: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
    lora(inputs()).float().square().mean().backward()
    trained = {key for key, param in lora.named_parameters() if param.grad is not None}
    assert len(trained) == 2 * len(LAYERS)
    assert all("lora_" in key for key in trained)
    for key, weight in before.items():
        assert_holds({"w": lora.base_model.model.get_submodule(key).base_layer.weight}, {"w": weight})


@every_source
def test_it_is_exported_where_a_layout_has_it(peers: dict[str, Any], name: str, tmp_path: Path) -> None:
    model = adopted(peers, name)
    kind = kind_of(model[0].weight.recipe)
    if kind is None or Scheme.of(kind, calibrated=False) not in layout_named("compressed-tensors").schemes:
        assert name == "torchao Float8 1x128" or name.startswith("bitsandbytes NF4")  # no layout has these
        return
    config = {"model_type": "tiny", "architectures": ["Tiny"]}
    export_hf(model.state_dict(), tmp_path / "out", layout="compressed-tensors", config=config, progress=False)
    found = import_hf(tmp_path / "out")
    for key, value in model.state_dict().items():
        assert torch.equal(_values(found[key]), _values(value)), key


# -- what stays, what is shared, what is chosen ------------------------------------------------------------------------


def test_ties_hooks_and_modes_stay_and_bytes_are_shared(peers: dict[str, Any]) -> None:
    assert peers["tied"] == {
        "names": ["0.weight", "2.weight", "again.weight"],
        "tied": True,
        "requires_grad": [False, True],
        "training": [False, True],
        "seen": ["forward"],
        "shared": True,
    }


def test_patterns_choose_modules_by_plain_names(peers: dict[str, Any]) -> None:
    assert peers["chosen"] == [["0.weight"], ["2.weight"]]  # of a compiled model; later, of the rest
    assert peers["pattern"] == "adopt: include pattern '1' matches none of the quantized modules"


def test_weights_appear_in_the_dtype_of_the_model(peers: dict[str, Any]) -> None:
    """An FP8Linear without a bias does not say in which, nor do scales in fp32; the rest of the model does."""
    assert peers["dtypes"] == [torch.float16, torch.float16, torch.bfloat16, torch.bfloat16]


def test_the_model_says_no_longer_that_a_library_quantized_it(peers: dict[str, Any]) -> None:
    assert peers["marks"] == [True, True, False, False]


# -- what no recipe holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_module_and_changes_nothing(peers: dict[str, Any], case: str) -> None:
    message, unchanged = peers["refused"][case]
    assert "cannot be adopted, and nothing has been changed" in message
    assert re.search(REFUSED[case][1], message), message
    assert unchanged


def test_requantizing_is_measured_and_leaves_exact_weights_alone(peers: dict[str, Any]) -> None:
    model, report, values = peers["requantized"]
    first, second = report.weights
    assert (first.exact, first.recipe) == (True, NVFP4BlockScaling())
    assert torch.equal(model[0].weight.dequantize(), values["0"])
    assert (second.exact, second.recipe) == (False, Int4GroupScaling(group=32))
    assert second.note == "requantized: zero points, which INT4 here does not have"
    assert second.error == error_between(values["2"], model[2].weight)
    assert_holds({"w": model[2].weight}, {"w": quantize(values["2"], Int4GroupScaling(group=32))})


def test_a_recipe_that_one_weight_does_not_fit_changes_none(peers: dict[str, Any]) -> None:
    message, unchanged = peers["misfit"]
    assert message.startswith("adopt: 1 weights cannot be adopted, and nothing has been changed")
    assert "2 (torchao IntxUnpackedToInt8Tensor): zero points" in message
    assert "the weight: shape (96, 160) has K=160, which is not a multiple of 128" in message
    assert unchanged


def test_the_refusal_tells_the_error_of_requantizing(peers: dict[str, Any]) -> None:
    _, report, _ = peers["requantized"]
    most, relative, snr = report.weights[1].error.cells()
    assert (
        "2 (torchao IntxUnpackedToInt8Tensor): zero points, which INT4 here does not have; requantize="
        f"Int4GroupScaling(group=32) would make an error of {most} at most, {relative} of the weight's norm "
        f"(SNR {snr} dB)"
    ) in peers["refused"]["zero points"][0]


def test_a_model_without_such_modules_is_refused(peers: dict[str, Any]) -> None:
    assert peers["nothing"].startswith("adopt: the quantizers of all these modules are switched off")
    with pytest.raises(
        ValueError, match="no quantized modules of torchao, transformers, compressed-tensors, bitsandbytes"
    ):
        adopt(dense())
    with pytest.raises(TypeError, match="include is a list of patterns, got '0'"):
        adopt(dense(), include="0")
    with pytest.raises(TypeError, match="expected a recipe"):
        adopt(dense(), requantize="int4")  # type: ignore[arg-type]


# -- and back ----------------------------------------------------------------------------------------------------------


@of_torchao
def test_a_released_model_is_torchaos_again(peers: dict[str, Any], name: str) -> None:
    found = peers["adopted"][name].released
    if name == "torchao MXFP8 even":  # its inputs stay as they are here, and torchao has no such product
        assert "0: torchao multiplies MX weights by quantized inputs alone, and MXFP8BlockScaling" in found["error"]
        assert found["untouched"]
        return
    assert found["names"] == [f"{key}.weight" for key in LAYERS]
    assert found["before"] is not None
    assert torch.equal(found["output"], found["before"])
    before, after = found["parts"]
    for key in LAYERS:
        for part, value in before[key].items():
            assert torch.equal(_raw(after[key][part]), _raw(value))
        if name in ("torchao INT4 256", "torchao NVFP4 one level", "torchao INT8 tensor"):
            continue  # in two groups of 128 with the same scales; with a global scale of 1; a row each
        assert found["tensors"][key].keys() == found["originals"][key].keys()
        assert all(torch.equal(found["tensors"][key][part], value) for part, value in found["originals"][key].items())
    assert found["recipes"][0] == found["recipes"][1]


def _raw(part: Any) -> Any:
    return part.reshape(-1).view(torch.uint8)


def test_modules_of_compressed_tensors_are_compressed_again(peers: dict[str, Any]) -> None:
    """Their tensors, by name and value, and the output when both are decompressed, inputs left as they are."""
    assert len(peers["compressed again"]) == 8
    assert set(peers["compressed again"].values()) == {(True, True)}, peers["compressed again"]


def test_what_cannot_be_released_is_refused() -> None:
    model = dense()
    with pytest.raises(
        ValueError, match="no way back to 'modelopt', only to torchao, compressed-tensors; write a directory"
    ):
        release(model, "modelopt")
    pytest.importorskip("torchao")
    pytest.importorskip("compressed_tensors")
    quantize_(model, NVFP4BlockScaling(activations="dynamic"))
    with pytest.raises(ValueError, match="torchao quantizes the inputs of such weights by other formulas"):
        release(model, "torchao")
    assert all(isinstance(linear.weight, QuantizedTensor) for linear in linears(model).values())
    with pytest.raises(ValueError, match="compressed-tensors quantizes inputs by other formulas"):
        release(model, "compressed-tensors")
    quantize_(other := dense(), Float8CurrentScaling())
    with pytest.raises(ValueError, match=r"0: scales in torch\.float32 with more digits than torch\.bfloat16 holds"):
        release(other, "compressed-tensors")
    with pytest.raises(ValueError, match=r"release: pattern '1' matches no nn\.Linear with a quantized weight"):
        release(model, "torchao", exclude=["1"])
