"""Directories that tell engines to rotate inputs, read: into models that rotate alike, and by the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from dcp_adapters import digest, export_hf, import_hf, read_manifest
from dcp_adapters.__main__ import main
from dcp_adapters.hf.layouts.rotations import said_rotations, transform_config
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.records.rotations import rotations_in
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from layerwise import rotate_, rotate_inputs_
from layerwise.weights.on_disk import OnDisk
from qtensor import MXFP4BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize_
from qtensor.products.input_rotation import input_rotations
from tests.dcp_adapters.hf.exports import PROMPT, llama
from tests.ranks import run_ranks

BLOCK = 32
DOWN = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
RECIPES = [MXFP4BlockScaling(), NVFP4BlockScaling()]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def rotated(recipe: Any = None, block: int = BLOCK) -> Any:
    model: Any = llama()
    rotate_(model, {"input_ids": PROMPT, "use_cache": False}, where=(), online={"*down_proj": block})
    quantize_(model, recipe or MXFP4BlockScaling(), exclude=["lm_head"])
    return model


def built(recipe: Any, online: dict[str, int]) -> Any:
    """A model of other values."""
    model: Any = llama()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    quantize_(model, recipe, exclude=["lm_head"])
    rotate_inputs_(model, online)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(PROMPT, use_cache=False).logits
    return found


def file_bytes(path: Path) -> dict[str, bytes]:
    return {
        name: bytes(value.reshape(-1).view(torch.uint8).tolist())
        for name, value in load_file(path / "model.safetensors").items()
    }


def written(path: Path) -> Any:
    told = json.loads((path / "config.json").read_text())["quantization_config"]
    return told | {"ignore": sorted(told["ignore"])}  # in the order of the source


def exported(path: Path, recipe: Any = None) -> Path:
    return export_hf(rotated(recipe), path / "out", config=llama().config)


def edit(path: Path, change: Callable[[Any], object]) -> Path:
    """Change the group of transforms in config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"]["transform_config"])
    (path / "config.json").write_text(json.dumps(config))
    return path


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_that_rotates_alike_gets_the_same_bytes_and_logits(recipe: Any, tmp_path: Path) -> None:
    model, other = rotated(recipe), built(recipe, {"*down_proj": BLOCK})
    export_hf(model, tmp_path / "out")
    state = import_hf(tmp_path / "out", other)
    assert {name for name in state if "rotation" in name} == {f"{module}.input_rotation" for module in DOWN}
    assert digest(other) == digest(model) == digest(tmp_path / "out")
    assert torch.equal(logits(other), logits(model))
    assert input_rotations(other) == dict.fromkeys(DOWN, BLOCK)
    for number, source in enumerate((other, import_hf(tmp_path / "out"))):  # a state dict without a model says it, too
        again = export_hf(source, tmp_path / f"again {number}", config=model.config)
        assert file_bytes(again) == file_bytes(tmp_path / "out")
        assert written(again) == written(tmp_path / "out")


def test_a_dense_model_that_rotates_alike_gets_the_values(tmp_path: Path) -> None:
    other: Any = llama()
    rotate_inputs_(other, {"*down_proj": BLOCK})
    import_hf(exported(tmp_path), other, on_mismatch="convert")
    assert torch.equal(logits(other), logits(rotated()))


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    model = built(MXFP4BlockScaling(), {"*down_proj": BLOCK})
    for layer in model.model.layers:
        layer.mlp.to("meta")
    import_hf(exported(tmp_path), model)
    assert torch.equal(logits(model), logits(rotated()))


def of_shards(path: Path, before: bool) -> tuple[str, bytes]:
    model = built(NVFP4BlockScaling(), {"*down_proj": BLOCK} if before else {})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if not before:
        rotate_inputs_(model, {"*down_proj": BLOCK})
    import_hf(path / "out", model)
    export_hf(model, path / "again")
    return digest(model), bytes(logits(model).view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_shards(ranks: int, before: bool, tmp_path: Path) -> None:
    model = rotated(NVFP4BlockScaling())
    export_hf(model, tmp_path / "out")
    expected = digest(model), bytes(logits(model).view(torch.uint8).flatten().tolist())
    assert run_ranks(ranks, of_shards, tmp_path, before) == [expected] * ranks
    assert file_bytes(tmp_path / "again") == file_bytes(tmp_path / "out")


def test_transforms_that_are_the_same_in_other_words(tmp_path: Path) -> None:
    """Sylvester's matrix is symmetric, so its own inverse; what is not said is compared with what its parser takes."""
    path = exported(tmp_path)

    def change(transforms: Any) -> None:
        (group,) = transforms["config_groups"].values()
        for key in ("randomize", "requires_grad", "precision"):
            del group[key]
        group["apply"] = [{"targets": DOWN[0], "location": "input"}]
        other = {"targets": [DOWN[1]], "location": "input", "inverse": True, "ignore": []}
        transforms["config_groups"]["other"] = group | {"apply": [other]}

    model = built(MXFP4BlockScaling(), {"*down_proj": BLOCK})
    import_hf(edit(path, change), model)
    assert torch.equal(logits(model), logits(rotated()))


@pytest.mark.parametrize("said", [{}, {"config_groups": {}}, None])
def test_no_transforms_are_none(said: Any, tmp_path: Path) -> None:
    model: Any = llama()
    quantize_(model, MXFP4BlockScaling(), exclude=["lm_head"])
    path = export_hf(model, tmp_path / "out")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = said
    (path / "config.json").write_text(json.dumps(config))
    assert digest(path) == digest(model)


def test_what_an_engine_holds_has_the_digest_of_the_model(tmp_path: Path) -> None:
    path = exported(tmp_path)
    config = json.loads((path / "config.json").read_text())
    held = load_file(path / "model.safetensors")
    assert digest(held, config=config) == digest(rotated())
    del config["quantization_config"]["transform_config"]
    assert digest(held, config=config) != digest(rotated())


def test_a_config_of_another_model_directory_asks_for_no_buffers(tmp_path: Path) -> None:
    plain: Any = llama()
    quantize_(plain, MXFP4BlockScaling(), exclude=["lm_head"])
    out = export_hf(plain.state_dict(), tmp_path / "plain", config=exported(tmp_path))
    assert "transform_config" not in written(out)


# -- models that do not rotate alike -----------------------------------------------------------------------------------


UNLIKE = {
    "not at all": (
        {},
        (
            f"{DOWN[0]}.input_rotation: only the directory has it; the model has no such tensor, and "
            f"{DOWN[0]}.weight is for inputs that are rotated at run time in blocks of 32: call "
            f"layerwise.rotate_inputs_(model, {{'{DOWN[0]}': 32}}) first"
        ),
    ),
    "in other blocks": (
        {"*.0.*down_proj": 64, "*.1.*down_proj": BLOCK},
        (
            f"{DOWN[0]}.weight: the checkpoint has it for inputs that are rotated at run time in blocks of 32, the "
            "target for inputs that are rotated at run time in blocks of 64; layerwise.rotate_inputs_ gives a model "
            "that is built anew the rotations of its checkpoint"
        ),
    ),
    "others, too": (
        {"*down_proj": BLOCK, "*.0.*o_proj": BLOCK},
        (
            "model.layers.0.self_attn.o_proj.input_rotation: only the model has it, which rotates inputs, and "
            "model.layers.0.self_attn.o_proj.weight is for inputs as they are: import it into a model that does not "
            "rotate them, and call layerwise.rotate_ on that"
        ),
    ),
}


def refusals(path: Path, online: dict[str, int]) -> tuple[list[str], bool]:
    """What import_hf says, with and without conversion; and whether the model is as it was."""
    model = built(NVFP4BlockScaling(), online)
    if dist.is_initialized():
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    was, messages = digest(model), []
    for on_mismatch in ("raise", "convert"):
        with pytest.raises(ValueError, match="nothing has been loaded") as caught:
            import_hf(path, model, on_mismatch=on_mismatch)
        messages.append(str(caught.value).removeprefix("rank 0: "))
    return messages, digest(model) == was


@pytest.mark.parametrize("case", UNLIKE)
def test_a_model_that_rotates_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    online, expected = UNLIKE[case]
    path = exported(tmp_path, NVFP4BlockScaling())
    messages, untouched = refusals(path, online)
    assert all(expected in message.splitlines()[1].strip() for message in messages)
    assert untouched
    assert run_ranks(2, refusals, path, online) == [(messages, True)] * 2


# -- transforms that the library does not read -------------------------------------------------------------------------


def group(**changes: Any) -> dict[str, Any]:
    """The one group of an export, with changes; None takes a key away."""
    (found,) = transform_config({DOWN[0]: BLOCK})["config_groups"].values()
    return {"config_groups": {"R4": {key: value for key, value in (found | changes).items() if value is not None}}}


def apply(**changes: Any) -> dict[str, Any]:
    return group(apply=[{"targets": DOWN[:1], "location": "input", "inverse": False, "ignore": []} | changes])


UNREAD = {
    "signs": (group(type="random-hadamard"), "R4: type 'random-hadamard', expected 'hadamard'"),
    "any matrix": (group(type="random-matrix"), "R4: type 'random-matrix', expected 'hadamard'"),
    "no type": (group(type=None), "R4: type None, expected 'hadamard'"),
    "permuted": (group(randomize=True), "R4: randomize True, expected False"),
    "trained": (group(requires_grad=True), "R4: requires_grad True, expected False"),
    "in other precision": (
        group(precision="torch.bfloat16"),
        "R4: precision 'torch.bfloat16', expected 'torch.float32'",
    ),
    "whole rows": (group(head_dim=None), "R4: head_dim None, expected a power of two from 2 on"),
    "no size": (group(head_dim=24), "R4: head_dim 24, expected a power of two from 2 on"),
    "a size of floats": (group(head_dim=32.0), "R4: head_dim 32.0, expected a power of two from 2 on"),
    "does not divide": (group(head_dim=256), f"{DOWN[0]}: blocks of 256, which do not divide its 128 inputs"),
    "unknown key": (group(seed=3), "R4: 'seed', which is not known"),
    "weights": (apply(location="weight_input"), "R4: location 'weight_input', expected 'input'"),
    "outputs": (apply(location="output"), "R4: location 'output', expected 'input'"),
    "no location": (apply(location=None), "R4: location None, expected 'input'"),
    "a pattern": (
        apply(targets=["re:.*down_proj$"]),
        "'re:.*down_proj$', of which the directory has no weight [N, K]; expected a module's name",
    ),
    "a class": (
        apply(targets=["Linear"]),
        "'Linear', of which the directory has no weight [N, K]; expected a module's name",
    ),
    "a norm": (
        apply(targets=["model.norm"]),
        "'model.norm', of which the directory has no weight [N, K]; expected a module's name",
    ),
    "no names": (apply(targets=[3]), "R4: targets, expected a list of names"),
    "no targets": (apply(targets=None), "R4: targets, expected a list of names"),
    "ignored": (apply(ignore=["lm_head"]), "R4: targets that are ignored, expected none"),
    "no inverse": (apply(inverse="no"), "R4: inverse 'no', expected true or false"),
    "unknown key of apply": (apply(scale=2), "R4: 'scale', which is not known"),
    "twice": (
        {"config_groups": group()["config_groups"] | {"R5": group()["config_groups"]["R4"]}},
        f"R5: {DOWN[0]} is a target twice",
    ),
    "no object": ({"config_groups": {"R4": 3}}, "R4: expected an object with a list apply"),
    "apply is no list": (group(apply={}), "R4: expected an object with a list apply"),
    "apply of text": (group(apply=["input"]), "R4: apply has 'input', expected an object"),
    "no groups": ({"groups": {}}, "expected an object with config_groups, and nothing else"),
    "more than groups": ({"config_groups": {}, "seed": 3}, "expected an object with config_groups, and nothing else"),
    "text": ("hadamard", "expected an object with config_groups, and nothing else"),
}
UNREAD_START = (
    'out: the transform_config of config.json says what the library does not read. It reads type "hadamard" with '
    'head_dim and precision "torch.float32", at the location "input" of linears by their names. Weights with other '
    "transforms compute something else without them, so nothing has been loaded:\n  "
)


def told(path: Path) -> str:
    model = built(MXFP4BlockScaling(), {"*down_proj": BLOCK})
    was = digest(model)
    with pytest.raises(ValueError, match="transform_config") as caught:
        import_hf(path, model)
    assert digest(model) == was
    return str(caught.value).removeprefix("rank 0: ")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("rotated"))


@pytest.mark.parametrize("case", UNREAD)
def test_other_transforms_are_refused(case: str, directory: Path) -> None:
    said, expected = UNREAD[case]
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["transform_config"] = said
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="transform_config") as caught:
        import_hf(directory)
    message = str(caught.value)
    assert message.endswith(f"/{UNREAD_START}{expected}")
    assert told(directory) == message
    with pytest.raises(ValueError, match="transform_config"):
        digest(directory)
    (finding,) = verify_directory(directory).findings
    assert finding.message == message


def test_ranks_refuse_other_transforms_alike(tmp_path: Path) -> None:
    path = edit(exported(tmp_path), lambda transforms: transforms.update(group(type="random-hadamard")))
    assert run_ranks(2, told, path) == [told(path)] * 2


def test_all_that_is_not_read_is_told_at_once() -> None:
    rotated, problems = said_rotations(group(type="x", head_dim=3, apply=[{"targets": [], "location": "output"}]))
    assert (rotated, len(problems)) == ({}, 3)


def test_layouts_that_have_no_transforms(tmp_path: Path) -> None:
    model: Any = llama()
    quantize_(model, NVFP4BlockScaling(), exclude=["lm_head"])
    path = export_hf(model, tmp_path / "out", layout="modelopt")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = group()
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the quant_method modelopt has no transforms$"):
        import_hf(path)
    config["quantization_config"] = None  # as hf_quant_config.json says it all
    (path / "config.json").write_text(json.dumps(config))
    assert import_hf(path)


def test_files_that_say_otherwise_than_the_config(tmp_path: Path) -> None:
    path = exported(tmp_path)
    file, name = path / "model.safetensors", f"{DOWN[0]}.input_rotation"
    save_file(load_file(file) | {name: torch.zeros(64, dtype=torch.uint8)}, file)
    with pytest.raises(ValueError, match=rf"{DOWN[0]}: blocks of 32, and {name} in model.safetensors is U8 \[64\]$"):
        import_hf(path)
    save_file(load_file(file) | {name: torch.zeros(32)}, file)
    with pytest.raises(ValueError, match=rf"{DOWN[0]}: blocks of 32, and {name} in model.safetensors is F32 \[32\]$"):
        import_hf(path)
    save_file(load_file(file) | {name: torch.zeros(32, dtype=torch.uint8)}, file)
    assert rotations_in(HuggingFaceReader(path).presented().entries) == dict.fromkeys(DOWN, BLOCK)


class Experts(torch.nn.Module):
    """Two experts, as linears or stacked."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        if stacked:
            self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 128, 64))
            self.down_proj = torch.nn.Parameter(torch.ones(2, 64, 64))
        for number in () if stacked else range(2):
            names = ("gate_proj", "up_proj", "down_proj")
            linears = {name: torch.nn.Linear(64, 64, bias=False) for name in names}
            self.add_module(str(number), torch.nn.ModuleDict(linears))


def test_stacked_experts_can_not_take_rotated_inputs(tmp_path: Path) -> None:
    source = torch.nn.ModuleDict({"experts": Experts(stacked=False)})
    rotate_inputs_(source, {"*down_proj": BLOCK})
    quantize_(source, MXFP4BlockScaling())
    path = export_hf(source, tmp_path / "out", config=None)
    target = torch.nn.ModuleDict({"experts": Experts(stacked=True)})
    which = "experts.0.down_proj.weight"
    told = f"nor {which}, which is for inputs that are rotated at run time in blocks of 32: build the model with that"
    with pytest.raises(ValueError, match=told):
        import_hf(path, target)
    with pytest.raises(ValueError, match=rf"{which} in .* is for inputs that are rotated .* stacks it in one weight"):
        OnDisk(path, target.to("meta"))


# -- commands ----------------------------------------------------------------------------------------------------------


def shown(capsys: Any, *arguments: object) -> tuple[int, Any]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_commands_read_it(tmp_path: Path, capsys: Any) -> None:
    path, model = exported(tmp_path), rotated()
    names = {f"{module}.input_rotation" for module in DOWN}
    code, found = shown(capsys, "inspect", path)
    assert names == {tensor["name"] for tensor in found["tensors"] if tensor["shape"] == [BLOCK]}
    assert (code, found["files"]) == (0, 1)
    code, found = shown(capsys, "verify", path)
    assert (code, found["findings"], found["checksums"]) == (0, [], len(load_file(path / "model.safetensors")))
    assert shown(capsys, "verify", path, "--deep")[0] == 0
    assert main(["convert", str(path), str(tmp_path / "checkpoint"), "--to", "nvfp4", "--include", "*o_proj*"]) == 0
    stored = StoredCheckpoint(tmp_path / "checkpoint")
    assert rotations_in(stored.entries) == dict.fromkeys(DOWN, BLOCK)
    capsys.readouterr()
    code, found = shown(capsys, "diff", path, tmp_path / "checkpoint")
    assert {one["name"].split(".")[-2] for one in found["differences"]} == {"o_proj"}
    code, found = shown(capsys, "report", path)
    assert code == 0
    assert main(["digest", str(path)]) == 0
    assert digest(model) in capsys.readouterr().out
    assert set(read_manifest(HuggingFaceReader(path)).tensors) == {f"{name}.weight" for name in projections(model)}


def projections(model: Any) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(getattr(one, "weight", None), QuantizedTensor)]


def test_diff_tells_of_other_rotations(tmp_path: Path, capsys: Any) -> None:
    path = exported(tmp_path)
    other = export_hf(rotated(block=64), tmp_path / "other", config=llama().config)
    code, found = shown(capsys, "diff", path, other)
    kinds = {one["name"]: one["kind"] for one in found["differences"]}
    assert kinds[f"{DOWN[0]}.input_rotation"] == "shape"
    assert code == 1


def test_deltas(tmp_path: Path, capsys: Any) -> None:
    """Made where both sides say the same; other rotations are refused, whatever the bytes."""
    path, delta, out = exported(tmp_path), tmp_path / "delta", tmp_path / "patched"
    model = rotated()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    new = export_hf(model, tmp_path / "new", config=llama().config)
    assert main(["delta", str(path), str(new), str(delta)]) == 0
    assert main(["apply", str(path), str(delta), str(out)]) == 0
    assert digest(out) == digest(model)
    other = export_hf(rotated(block=64), tmp_path / "other", config=llama().config)
    capsys.readouterr()
    assert main(["delta", str(path), str(other), str(tmp_path / "refused")]) == 2
    assert "say other things of their quantization" in capsys.readouterr().err
