"""`python -m dcp_adapters check`: what it says of directories that are as they should be, and of what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcp_adapters.cli.main import main
from dcp_adapters.hf.checking.misread import find_misread
from dcp_adapters.hf.layouts.layout import KINDS, Scheme
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, quantize
from tests.dcp_adapters.cases import save
from tests.dcp_adapters.hf.directories import dense_tensors, linear_names, quantized_directory, write
from tests.dcp_adapters.hf.exports import export

LINEARS = sorted(linear_names())  # k_proj, o_proj and q_proj of two layers
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def directory(path: Path, layout: str, scheme: Scheme, modules: list[str] = LINEARS) -> Path:
    return quantized_directory(path, layout, dict.fromkeys(modules, scheme))[0]


def changed(path: Path, change: Change) -> Path:
    """The directory with another quantization_config, or with other tensors."""
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(config["quantization_config"], tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def told(path: Path) -> list[tuple[str, str]]:
    """(severity, name) of each finding."""
    return [(found.severity, found.entry) for found in find_misread(str(path))]


def check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = main(["check", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return status, json.loads(out)


SOUND = [
    ("compressed-tensors", Scheme("fp8_row", "dynamic")),
    ("compressed-tensors", Scheme("mxfp8", "dynamic")),
    ("compressed-tensors", Scheme("mxfp4", "none")),
    ("compressed-tensors", Scheme("int4_32", "none")),
    ("modelopt", Scheme("fp8_row", "dynamic")),
    ("modelopt", Scheme("mxfp8", "dynamic")),
]


@pytest.mark.parametrize(("layout", "scheme"), SOUND, ids=str)
def test_what_was_exported_is_read_as_it_is(layout: str, scheme: Scheme, tmp_path: Path, capsys: Any) -> None:
    path = directory(tmp_path / "q", layout, scheme)
    dense = write(tmp_path / "dense", dense_tensors())
    status, found = check(capsys, path, "--against", dense)
    assert (status, found["findings"], found["layout"]) == (0, [], layout)
    assert [each["name"] for each in found["weights"]] == [f"{module}.weight" for module in LINEARS]
    for each in found["weights"]:
        assert each["other_scales"] == 0 < each["scales"]
        assert 0 < each["error"]["relative"] < 0.2
    assert "no errors (" in _text(capsys, path)


def _text(capsys: Any, *arguments: object) -> str:
    main(["check", *map(str, arguments)])
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_fused_nvfp4_weights_need_one_global_scale(layout: str, tmp_path: Path) -> None:
    path = directory(tmp_path, layout, Scheme("nvfp4", "none"))
    fused = [f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1)]
    assert told(path) == [("error", name) for name in fused]
    (first, _) = find_misread(str(path))
    assert "q_proj" in first.message
    assert "o_proj" not in first.message


def test_fused_scales_that_engines_round_again_are_a_warning(tmp_path: Path) -> None:
    path = directory(tmp_path, "compressed-tensors", Scheme("fp8_tensor", "dynamic"))
    assert told(path) == [("warning", f"model.layers.{layer}.self_attn.k_proj.weight") for layer in (0, 1)]


def test_a_calibrated_export_has_no_errors(tmp_path: Path, capsys: Any) -> None:
    """Of a model whose fused weights have one amax, as `export_hf` asks for."""
    made = export(tmp_path / "q", KINDS["nvfp4"], static=("_proj",))
    status, found = check(capsys, made.path)
    assert (status, [one for one in found["findings"] if one["severity"] == "error"]) == (0, [])


@pytest.mark.parametrize(
    ("layout", "name", "swallowed"),
    [
        ("compressed-tensors", "re:.*q_proj$", "q_proj"),
        ("compressed-tensors", LINEARS[0], LINEARS[0]),
        ("modelopt", "o_pro", "o_proj"),
        ("modelopt", "model.layers.1*", "layers.1"),
        ("fp8", "attn.k_proj", "k_proj"),
    ],
)
def test_names_that_a_list_swallows(layout: str, name: str, swallowed: str, tmp_path: Path) -> None:
    key = "modules_to_not_convert" if layout == "fp8" else "ignore"
    path = directory(tmp_path, layout, Scheme("fp8_block" if layout == "fp8" else "mxfp8", "dynamic"))
    before = told(path)
    path = changed(path, lambda said, _: said[key].append(name))
    expected = [("error", f"{module}.weight") for module in LINEARS if swallowed in module]
    assert [one for one in told(path) if one not in before] == expected
    assert all(repr(name) in found.message for found in find_misread(str(path))[: len(expected)])


def test_a_class_of_modules_says_nothing_of_names(tmp_path: Path) -> None:
    path = directory(tmp_path, "compressed-tensors", Scheme("mxfp8", "dynamic"))
    assert told(changed(path, lambda said, _: said["ignore"].append("Embedding"))) == []


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_dense_linear_among_quantized_ones_must_be_left_alone(layout: str, tmp_path: Path) -> None:
    path = directory(tmp_path, layout, Scheme("mxfp8", "dynamic"), LINEARS[:3])
    dense = [("error", f"{module}.weight") for module in LINEARS[3:]]
    assert sorted(told(path)) == sorted(dense)
    assert told(changed(path, lambda said, _: said["ignore"].extend(LINEARS[3:]))) == []


def test_a_group_that_names_its_modules_means_no_others(tmp_path: Path) -> None:
    path = directory(tmp_path, "compressed-tensors", Scheme("mxfp8", "dynamic"), LINEARS[:3])

    def name_them(said: dict[str, Any], _: dict[str, Tensor]) -> None:
        said["config_groups"]["group_0"]["targets"] = LINEARS[:3]

    assert told(changed(path, name_them)) == []


def test_joined_linears_have_one_scheme(tmp_path: Path) -> None:
    """k_proj is dense and left alone, q_proj is not: engines have one linear of both."""
    modules = [module for module in LINEARS if not module.endswith("k_proj")]
    path = directory(tmp_path, "compressed-tensors", Scheme("mxfp8", "dynamic"), modules)
    path = changed(path, lambda said, _: said["ignore"].append("re:.*k_proj"))
    assert told(path) == [("error", f"model.layers.{layer}.self_attn.q_proj") for layer in (0, 1)]


def test_input_scales_that_engines_cannot_use(tmp_path: Path) -> None:
    path = directory(tmp_path, "modelopt", Scheme("fp8_tensor", "static"))

    def zeroed(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{LINEARS[1]}.input_scale"].zero_()

    found = {one for one in told(changed(path, zeroed)) if one[0] == "error"}
    assert found == {("error", f"{LINEARS[1]}.input_scale")}


def test_input_scales_of_joined_linears_are_one(tmp_path: Path) -> None:
    """The helper gives each linear another."""
    path = directory(tmp_path, "modelopt", Scheme("fp8_tensor", "static"))
    messages = [found.message for found in find_misread(str(path)) if "input of these is one" in found.message]
    assert len(messages) == 2


def test_input_scales_are_there_for_all_or_none(tmp_path: Path) -> None:
    with_scales = dict.fromkeys(LINEARS[:3], Scheme("nvfp4", "static"))
    without = dict.fromkeys(LINEARS[3:], Scheme("nvfp4", "none"))
    path, _ = quantized_directory(tmp_path, "compressed-tensors", with_scales | without)
    lacking = [found for found in find_misread(str(path)) if "no input scale" in found.message]
    assert [(found.severity, found.entry) for found in lacking] == [("warning", LINEARS[3])]
    assert "3 other nvfp4 linears" in lacking[0].message


def test_cut_blocks(tmp_path: Path) -> None:
    path = directory(tmp_path, "fp8", Scheme("fp8_block", "dynamic"))
    (found,) = find_misread(str(path))
    assert (found.severity, found.entry) == ("warning", LINEARS[0])
    assert "128 x 128" in found.message


def test_values_that_are_not_those_of_the_dense_weight(tmp_path: Path, capsys: Any) -> None:
    path = directory(tmp_path / "q", "compressed-tensors", Scheme("mxfp8", "dynamic"))

    def swap(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        one, two = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
        tensors[one], tensors[two] = tensors[two], tensors[one]

    tensors = dense_tensors()
    del tensors[f"{LINEARS[0]}.weight"]
    tensors[f"{LINEARS[2]}.weight"] = tensors[f"{LINEARS[2]}.weight"][1:]
    dense = write(tmp_path / "dense", tensors)
    status, found = check(capsys, changed(path, swap), "--against", dense)
    assert status == 1
    messages = {one["name"]: one["message"] for one in found["findings"]}
    assert "has no tensor of this name" in messages[f"{LINEARS[0]}.weight"]
    assert "has a tensor of [63, 64]" in messages[f"{LINEARS[2]}.weight"]
    assert {name for name, message in messages.items() if "far from the dense" in message} == {
        f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)
    }
    assert len(messages) == 4


def test_scales_that_values_do_not_ask_for_are_told_and_are_no_fault(tmp_path: Path, capsys: Any) -> None:
    path = directory(tmp_path, "compressed-tensors", Scheme("fp8_row", "dynamic"))

    def doubled(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{LINEARS[1]}.weight_scale"][:5] *= 2
        codes = tensors[f"{LINEARS[1]}.weight"]
        codes[:5] = (codes[:5].float() / 2).to(codes.dtype)

    status, found = check(capsys, changed(path, doubled))
    others = {each["name"]: each["other_scales"] for each in found["weights"] if each["other_scales"]}
    assert (status, others) == (0, {f"{LINEARS[1]}.weight": 5})
    assert "5 of 96 others" in _text(capsys, path)


def test_a_checkpoint_is_checked_too(tmp_path: Path, capsys: Any) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    good, bad = quantize(values, MXFP8BlockScaling()), quantize(values, Float8CurrentScaling())
    bad.payload.view(torch.uint8)[3, 5] = 0x7F  # NaN
    save({"good": good, "bad": bad, "dense": values}, tmp_path / "saved")
    status, found = check(capsys, tmp_path / "saved")
    assert (status, found["layout"]) == (1, None)
    assert [one["name"] for one in found["findings"]] == ["bad"]
    status, found = check(capsys, tmp_path / "saved", "--match", "good")
    assert (status, [each["name"] for each in found["weights"]]) == (0, ["good"])
    assert main(["check", str(tmp_path / "saved"), "--match", "none"]) == 2


def test_where_nothing_is_quantized_it_says_so(tmp_path: Path, capsys: Any) -> None:
    status, found = check(capsys, write(tmp_path, dense_tensors()))
    assert (status, found["weights"], len(found["findings"])) == (0, [], 1)


@pytest.mark.parametrize("pattern", ["re:[", "re:(a+)+$", "re:a{1,99999999999}"])
def test_a_pattern_that_is_not_used_is_told_and_nothing_is_found(pattern: str, tmp_path: Path, capsys: Any) -> None:
    path = directory(tmp_path, "compressed-tensors", Scheme("mxfp8", "dynamic"))
    assert main(["check", str(changed(path, lambda said, _: said["ignore"].append(pattern)))]) == 2
    assert "`ignore` that is not used" in capsys.readouterr().err


def test_what_is_asked_for_alone_is_told(tmp_path: Path, capsys: Any) -> None:
    path = directory(tmp_path, "compressed-tensors", Scheme("mxfp8", "dynamic"))
    path = changed(path, lambda said, _: said["ignore"].append("re:model.layers.1.*"))
    status, found = check(capsys, path, "--match", "*layers.0*")
    assert (status, found["findings"], len(found["weights"])) == (0, [], 3)
    status, found = check(capsys, path, "--match", "*layers.1*")
    assert (status, len(found["findings"])) == (1, 3)


def test_moments_of_an_optimizer_are_no_weights(tmp_path: Path, capsys: Any) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    state = {"w": quantize(values, MXFP8BlockScaling()), "optim": {"w": {}}}
    state["optim"]["w"] = {"exp_avg": quantize(values, MXFP8BlockScaling())}
    save(state, tmp_path / "saved")
    save({"w": values}, tmp_path / "dense")
    status, found = check(capsys, tmp_path / "saved", "--against", tmp_path / "dense")
    assert (status, [each["name"] for each in found["weights"]], found["findings"]) == (0, ["w"], [])
