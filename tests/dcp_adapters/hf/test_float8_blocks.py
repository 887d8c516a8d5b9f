"""Float8 in blocks of 128 x 128 in Hugging Face directories: files have a scale a block, memory one a row of it.

What is read is written by hand here, with scales that no quantizer makes: each block has another one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import export_hf, import_hf
from dcp_adapters.cli.main import main
from dcp_adapters.hf.files.directory import FileTensor
from dcp_adapters.hf.reading.placed import Slice
from dcp_adapters.hf.reading.reader import OpenFiles
from dcp_adapters.hf.reading.stored_directory import StoredDirectory
from fsdp_hooks import sync_scales
from qtensor import Float8BlockScaling, Float8CurrentScaling, QuantizedTensor, quantize, quantize_
from tests.dcp_adapters.cases import alone, assert_holds, bits, local_of, save, values
from tests.dcp_adapters.hf.directories import meta_model, write
from tests.ranks import agreed, run_ranks

BLOCKS = Float8BlockScaling()
POWERS = Float8BlockScaling(power_of_two=True)
DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
SHAPES = {"l.o": (576, 320), "l.down": (192, 128), "l.small": (100, 5), "l.one": (1, 300), "l.even": (256, 128)}
CONFIG = {"model_type": "tiny", "tie_word_embeddings": False}
FILE_NAMES = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}


def compressed(**weights: Any) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "block", "block_structure": [128, 128], "dynamic": False, **weights},
        "input_activations": {**eight, "strategy": "group", "group_size": 128, "dynamic": True},
        "output_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


SAYS = {"fp8": DEEPSEEK, "compressed-tensors": compressed()}


def stored(shape: tuple[int, int], seed: int, *, powers: bool = False) -> tuple[Tensor, Tensor]:
    """A weight and the scales of its blocks, as files hold them."""
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = values(grid, 100 + seed, torch.float32).abs() + 1e-3
    # clamped: torch before 2.13 makes NaN of what E4M3 does not reach
    weight = values(shape, seed).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, torch.exp2(scale.log2().round()) if powers else scale


def in_memory(weight: Tensor, scale: Tensor, recipe: Any = BLOCKS) -> Any:
    """The same, with a scale for each row."""
    rows = torch.arange(weight.shape[0]) // 128
    return QuantizedTensor.from_parts({"payload": weight, "scale": scale[rows]}, recipe, torch.bfloat16)


def directory(path: Path, layout: str = "fp8", *, powers: bool = False, **more: Any) -> tuple[Path, dict[str, Any]]:
    """A directory of weights in blocks, and what it holds, as a state dict."""
    tensors: dict[str, Tensor] = {"embed.weight": values((19, 64), 500)}
    state: dict[str, Any] = dict(tensors)
    for seed, (module, shape) in enumerate(SHAPES.items()):
        weight, scale = stored(shape, seed, powers=powers)
        tensors |= {f"{module}.weight": weight, f"{module}.{FILE_NAMES[layout]}": scale}
        state[f"{module}.weight"] = in_memory(weight, scale, POWERS if powers and more.get("scale_fmt") else BLOCKS)
    return write(path, tensors, {"quantization_config": {**SAYS[layout], **more}}, files=2), state


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        import_hf(path)
    return str(caught.value)


# -- into a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SAYS)
def test_a_directory_keeps_its_bytes_and_decodes_to_weight_times_scale(layout: str, tmp_path: Path) -> None:
    path, state = directory(tmp_path, layout)
    found: dict[str, Any] = import_hf(path)
    assert_holds(found, state)
    files = tensors_of(path)
    for module, (rows, columns) in SHAPES.items():
        weight, scale = files[f"{module}.weight"].float(), files[f"{module}.{FILE_NAMES[layout]}"]
        whole = torch.kron(scale, torch.ones(128, 128))[:rows, :columns]
        assert found[f"{module}.weight"].recipe == BLOCKS
        assert torch.equal(found[f"{module}.weight"].dequantize(torch.float32), weight * whole), module


def _imports(path: str, full: dict[str, Any]) -> Counter[str]:
    """Import into shards; how many elements of each tensor of the files were read."""
    taken: Counter[str] = Counter()
    stock = OpenFiles.piece

    class Counting:
        def __init__(self, piece: Any, name: str) -> None:
            self.piece, self.name = piece, name

        def __getitem__(self, index: Any) -> Tensor:
            found: Tensor = self.piece[index]
            taken[self.name] += found.numel()
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFiles, "piece", lambda self, tensor: Counting(stock(self, tensor), tensor.name))
        assert_holds(import_hf(path, fully_shard(meta_model(full, dict.fromkeys(SHAPES, BLOCKS)))), full)
    return taken


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", SAYS)
def test_shards_read_their_rows_and_the_blocks_these_cut(layout: str, ranks: int, tmp_path: Path) -> None:
    path, state = directory(tmp_path, layout)
    rows = 576 // ranks
    for rank, taken in enumerate(run_ranks(ranks, _imports, str(path), state)):
        assert taken["l.o.weight"] == rows * 320
        first, last = rank * rows // 128, -(-(rank + 1) * rows // 128)
        assert taken[f"l.o.{FILE_NAMES[layout]}"] == (last - first) * 3


@pytest.mark.parametrize("lead", [0, 1])
def test_any_box_of_the_rows_is_read_from_the_blocks_it_lies_in(lead: int) -> None:
    scale = stored((576, 320), 1)[1]
    whole = in_memory(*stored((576, 320), 1)).scale
    held = Slice(FileTensor("w", "f", "F32", tuple(scale.shape)), lambda rows: rows, lead=lead, rows=128)
    for first, last in ((0, 576), (0, 1), (127, 129), (128, 256), (300, 301), (511, 576), (575, 576), (200, 200)):
        for left, right in ((0, 3), (1, 2), (2, 3)):
            found = held.take(scale, (*(0,) * lead, first, left), (*(1,) * lead, last - first, right - left))
            assert found.shape == (*(1,) * lead, last - first, right - left)
            assert torch.equal(found.reshape(last - first, right - left), whole[first:last, left:right])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_scales_that_are_powers_of_two_may_be_stored_in_fewer_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    path, state = directory(tmp_path / "fp32", powers=True, scale_fmt="ue8m0")
    tensors = {name: value.to(dtype) if "scale" in name else value for name, value in tensors_of(path).items()}
    path = write(tmp_path / "typed", tensors, {"quantization_config": {**DEEPSEEK, "scale_fmt": "ue8m0"}})
    found: dict[str, Any] = import_hf(path)
    assert_holds(found, state)
    assert {found[f"{module}.weight"].recipe for module in SHAPES} == {POWERS}


def test_sizes_of_blocks_may_be_one_text(tmp_path: Path) -> None:
    path, state = directory(tmp_path, "compressed-tensors", **compressed(block_structure="128x128"))
    assert_holds(import_hf(path), state)


WHOLE = {
    "as transformers names it": ({"weight_scale_inv": 0.5}, "dynamic"),
    "as vLLM names it": ({"weight_scale": 0.5}, "dynamic"),
    "static, as transformers names it": ({"weight_scale_inv": 0.5, "activation_scale": 0.25}, "static"),
    "static, as vLLM names it": ({"weight_scale": 0.5, "input_scale": 0.25}, "static"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_one_scale_for_the_weight_is_float8_with_one_scale(case: str, tmp_path: Path) -> None:
    scales, inputs = WHOLE[case]
    weight = values((72, 40), 1).to(torch.float8_e4m3fn)
    said = {"quant_method": "fp8", "activation_scheme": inputs, "weight_block_size": None}
    tensors = {"a.weight": weight, **{f"a.{name}": torch.tensor(value) for name, value in scales.items()}}
    found: dict[str, Any] = import_hf(write(tmp_path, tensors, {"quantization_config": said}))
    assert found["a.weight"].recipe == Float8CurrentScaling(granularity="tensor")
    assert torch.equal(found["a.weight"].dequantize(torch.float32), weight.float() * 0.5)
    assert {name: float(value) for name, value in found.items() if name.endswith("scale")} == (
        {"a.input_scale": 0.25} if inputs == "static" else {}
    )


def block(*shape: int, name: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"a.weight": values((256, 128), 1).to(torch.float8_e4m3fn), f"a.{name}": torch.ones(shape).to(dtype)}


REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "smaller blocks": (
        block(4, 2),
        {**DEEPSEEK, "weight_block_size": [64, 64]},
        "config.json says weight_block_size [64, 64], which the library does not read; expected [128, 128]",
    ),
    "rows of 32": (block(256, 4), {**DEEPSEEK, "weight_block_size": [1, 32]}, "weight_block_size [1, 32], which"),
    "another grid": (
        block(4, 2),
        DEEPSEEK,
        "weight_scale_inv F32 [4, 2]: FP8 in blocks (quant_method fp8) (the JSON says weight_block_size [128, 128])",
    ),
    "no size": (
        block(2, 1),
        {**DEEPSEEK, "weight_block_size": None},
        "fp8_block weights with dynamic inputs, and config.json says weight_block_size None, expected [128, 128]",
    ),
    "a size for one scale": (
        block(),
        DEEPSEEK,
        "fp8_tensor weights with dynamic inputs, and config.json says weight_block_size [128, 128], expected None",
    ),
    "e5m2": (block(2, 1), {**DEEPSEEK, "fmt": "e5m2"}, "says fmt 'e5m2', which the library does not read; expected"),
    "static inputs": (
        block(2, 1),
        {**DEEPSEEK, "activation_scheme": "static"},
        "fp8_block weights with dynamic inputs, and config.json says activation_scheme 'static', expected 'dynamic'",
    ),
    "no inputs": (block(2, 1), {"quant_method": "fp8"}, "says activation_scheme None, which the library does not read"),
    "other scales": (block(2, 1), {**DEEPSEEK, "scale_fmt": "e4m3"}, "says scale_fmt 'e4m3', which the library"),
    "left alone": (
        block(2, 1),
        {**DEEPSEEK, "modules_to_not_convert": ["lm_head", "a"]},
        "fp8_block weights with dynamic inputs, and config.json says that it is left alone",
    ),
    "left alone by another key": (block(2, 1), {**DEEPSEEK, "ignored_layers": ["a"]}, "says that it is left alone"),
    "bytes as scales": (block(2, 1, dtype=torch.uint8), DEEPSEEK, "weight_scale_inv U8 [2, 1]: FP8 in blocks"),
    "8 bits in the other layout": (
        block(2, 1, name="weight_scale", dtype=torch.float8_e8m0fnu),
        compressed(),
        "weight_scale F8_E8M0 [2, 1]",
    ),
    "other blocks in the other layout": (
        block(2, 1, name="weight_scale"),
        compressed(block_structure=[64, 64]),
        "fp8_block weights with dynamic inputs, and config.json says weights with block_structure [64, 64]",
    ),
    "no blocks in the other layout": (
        block(2, 1, name="weight_scale"),
        compressed(block_structure=None),
        "config.json says weights with block_structure None",
    ),
    "rows in the other layout": (
        block(2, 1, name="weight_scale"),
        compressed(strategy="channel", block_structure=None),
        "config.json says weights of strategy 'channel', expected 'block'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_in_these_blocks_is_refused(case: str, tmp_path: Path) -> None:
    tensors, said, expected = REFUSED[case]
    assert expected in refusal(write(tmp_path, tensors, {"quantization_config": said}))


def test_a_weight_of_one_row_is_what_the_json_says(tmp_path: Path) -> None:
    """A scale [1, 1] may be that of a row and that of a block."""
    tensors = {"a.weight": values((1, 64), 1).to(torch.float8_e4m3fn), "a.weight_scale": torch.full((1, 1), 0.5)}
    for told, recipe in ((compressed(), BLOCKS), (ROW, Float8CurrentScaling())):
        found: Any = import_hf(write(tmp_path, tensors, {"quantization_config": told}))["a.weight"]
        assert found.recipe == recipe


ROW = compressed(strategy="channel", block_structure=None)


# -- experts -----------------------------------------------------------------------------------------------------------

EXPERTS, INNER, K = 3, 192, 320  # gate and up have two blocks of rows each, the second one of 64 rows


class Experts(nn.Module):
    def __init__(self, recipe: Any) -> None:
        super().__init__()
        for name, shape in (("gate_up_proj", (EXPERTS, 2 * INNER, K)), ("down_proj", (EXPERTS, K, INNER))):
            weight: Any = quantize(torch.zeros(shape, dtype=torch.bfloat16), recipe)
            setattr(self, name, nn.Parameter(weight))


def with_experts() -> Any:
    net: Any = nn.Module()
    net.mlp = nn.Module()
    net.mlp.experts = Experts(BLOCKS)
    return net


def expert_directory(path: Path) -> tuple[Path, dict[str, Any]]:
    """A linear an expert in the files; in the model the weights of all experts."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[Any]] = {"gate_up_proj": [], "down_proj": []}
    for e in range(EXPERTS):
        own = {}
        for seed, (name, shape) in enumerate(
            {"gate_proj": (INNER, K), "up_proj": (INNER, K), "down_proj": (K, INNER)}.items()
        ):
            weight, scale = stored(shape, 3 * e + seed)
            module = f"mlp.experts.{e}.{name}"
            tensors |= {f"{module}.weight": weight, f"{module}.weight_scale_inv": scale}
            own[name] = in_memory(weight, scale).parts()
        gate, up = own["gate_proj"], own["up_proj"]
        parts["gate_up_proj"].append({part: torch.cat([gate[part], up[part]]) for part in gate})
        parts["down_proj"].append(own["down_proj"])
    full = {
        f"mlp.experts.{name}": QuantizedTensor.from_parts(
            {part: torch.stack([each[part] for each in those]) for part in those[0]}, BLOCKS, torch.bfloat16
        )
        for name, those in parts.items()
    }
    return write(path, tensors, {"quantization_config": DEEPSEEK}, files=2), full


def _experts(path: str, out: str, full: dict[str, Any]) -> None:
    net = with_experts()
    if dist.is_initialized():
        fully_shard(net)
    found = import_hf(path, net)
    assert_holds(found, full)
    export_hf(found, out, layout="fp8", config=CONFIG, progress=False)


def test_linears_of_experts_fill_the_weight_of_all_and_come_out_again(tmp_path: Path) -> None:
    path, full = expert_directory(tmp_path / "in")
    _experts(str(path), str(tmp_path / "0"), full)
    for ranks in (2, 3):
        run_ranks(ranks, _experts, str(path), str(tmp_path / str(ranks)), full)
    expected = tensors_of(path)
    for out in ("0", "2", "3"):
        assert_holds(tensors_of(tmp_path / out), expected)


def test_blocks_that_reach_from_gate_into_up_are_refused(tmp_path: Path) -> None:
    weights = {f"mlp.experts.{name}": values((2, rows, 128), 1) for name, rows in (("gate_up_proj", 384),)}
    weights["mlp.experts.down_proj"] = values((2, 128, 192), 2)
    state = {name: quantize(value, BLOCKS) for name, value in weights.items()}
    expected = (
        "mlp.experts.0.up_proj.weight_scale_inv: rows 0 to 127 are one block with different scales; they begin inside "
        "of a block of the weight of all experts: quantize each linear of an expert by itself, or convert the weight "
        "to scales of rows"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        export_hf(state, tmp_path / "out", layout="fp8", config=CONFIG)
    assert list(tmp_path.iterdir()) == []


# -- out of a model ----------------------------------------------------------------------------------------------------


def dense_model() -> nn.Module:
    net: Any = nn.Module()
    net.l = nn.Module()
    for seed, (module, (rows, columns)) in enumerate(SHAPES.items()):
        linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        linear.weight.data.copy_(values((rows, columns), 10 + seed))
        setattr(net.l, module.removeprefix("l."), linear)
    net.lm_head = nn.Linear(64, 19, bias=False, dtype=torch.bfloat16)
    net.lm_head.weight.data.copy_(values((19, 64), 30))
    return net


def model(recipe: Any = BLOCKS) -> Any:
    net = dense_model()
    quantize_(net, recipe, exclude=["lm_head"])
    return net


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("layout", SAYS)
def test_a_file_has_one_scale_a_block(layout: str, tmp_path: Path) -> None:
    net = model()
    found = tensors_of(export_hf(net, tmp_path / "out", layout=layout, config=CONFIG))
    names = {f"{module}.{name}" for module in SHAPES for name in ("weight", FILE_NAMES[layout])}
    assert found.keys() == names | {"lm_head.weight"}
    for module, (rows, columns) in SHAPES.items():
        q: Any = net.get_parameter(f"{module}.weight").detach()
        weight, scale = found[f"{module}.weight"], found[f"{module}.{FILE_NAMES[layout]}"]
        assert (scale.dtype, scale.shape) == (torch.float32, (-(-rows // 128), -(-columns // 128)))
        assert bits(weight) == bits(q.payload)
        whole = torch.kron(scale, torch.ones(128, 128))[:rows, :columns]
        assert torch.equal(q.dequantize(torch.float32), weight.float() * whole)


def test_the_json_is_that_of_deepseek(tmp_path: Path) -> None:
    said = {**DEEPSEEK, "modules_to_not_convert": ["lm_head"]}
    for name, net, more in (("plain", model(), {}), ("powers", model(POWERS), {"scale_fmt": "ue8m0"})):
        path = export_hf(net, tmp_path / name, layout="fp8", config=CONFIG)
        assert json.loads((path / "config.json").read_text())["quantization_config"] == said | more


def test_powers_of_two_are_announced_where_all_are(tmp_path: Path) -> None:
    net = dense_model()
    quantize_(net, POWERS, include=["l.o"])
    quantize_(net, BLOCKS, include=["l.down", "l.even"])
    path = export_hf(net, tmp_path / "out", layout="fp8", config=CONFIG)
    assert "scale_fmt" not in json.loads((path / "config.json").read_text())["quantization_config"]
    found: dict[str, Any] = import_hf(path)
    assert (found["l.o.weight"].recipe, found["l.down.weight"].recipe) == (POWERS, BLOCKS)


def test_scales_of_the_kv_cache_go_along(tmp_path: Path) -> None:
    weight = quantize(values((128, 256), 1), BLOCKS)
    scales = {f"l.self_attn.{own}_scale": torch.tensor(0.25 * number) for number, own in enumerate("kv", start=1)}
    state = {"l.self_attn.q_proj.weight": weight, **scales}
    path = export_hf(state, tmp_path / "out", layout="fp8", config=CONFIG)
    assert {name: tensors_of(path)[name].shape for name in scales} == dict.fromkeys(scales, ())
    assert_holds(import_hf(path), state)


def _exports(path: str, layout: str) -> None:
    export_hf(fully_shard(model()), path, layout=layout, config=CONFIG, progress=False, max_shard_size=100_000)


def _imports_and_exports(path: str, out: str, layout: str) -> None:
    with torch.device("meta"):
        net = model()
    found = import_hf(path, fully_shard(net), progress=False)
    export_hf(found, out, layout=layout, config=CONFIG, progress=False, max_shard_size=100_000)


@pytest.mark.parametrize("layout", SAYS)
def test_any_number_of_ranks_writes_the_same_files_and_reads_them(layout: str, tmp_path: Path) -> None:
    there = Path(agreed(value=str(tmp_path)))
    with alone():
        if there == tmp_path:
            export_hf(model(), there / "0", layout=layout, config=CONFIG, max_shard_size=100_000)
    for ranks in (1, 2, 3):
        run_ranks(ranks, _exports, str(there / str(ranks)), layout)
        assert contents(there / str(ranks)) == contents(there / "0")
        run_ranks(ranks, _imports_and_exports, str(there / "0"), str(there / f"again {ranks}"), layout)
        assert contents(there / f"again {ranks}") == contents(there / "0")


def _apart(path: str) -> str:
    """Shards of 288 rows that cut block 2; the second one is written by hand, and then agreed with the first."""
    net = fully_shard(model())
    if dist.get_rank() == 1:
        local_of(net.l.o.weight).scale.mul_(2)
    try:
        export_hf(net, path, layout="fp8", config=CONFIG, progress=False)
    except ValueError as error:
        told = str(error)
    else:
        told = "nothing was refused"
    sync_scales(net)
    export_hf(net, path, layout="fp8", config=CONFIG, progress=False)
    return told


def test_shards_that_were_written_apart_are_refused_until_they_agree(tmp_path: Path) -> None:
    there = Path(agreed(value=str(tmp_path))) / "out"
    for told in run_ranks(2, _apart, str(there)):
        assert told.removeprefix("rank 0: ") == (
            "l.o.weight_scale_inv: rows 256 to 383 are one block with different scales; shards that cut the block were "
            "written apart: call fsdp_hooks.sync_scales on the model first, or quantize the weight again"
        )
    before: Any = model().l.o.weight.detach()
    apart = before.dequantize(torch.float32)
    apart[288:] *= 2
    expected = before.scale[::128].clone()
    expected[3:] *= 2  # blocks that the second shard has alone keep their bytes
    expected[2] = quantize(apart, BLOCKS).scale[256]
    assert torch.equal(tensors_of(there)["l.o.weight_scale_inv"], expected)


# -- the commands ------------------------------------------------------------------------------------------------------


def test_the_commands_read_it(tmp_path: Path, capsys: Any) -> None:
    path, state = directory(tmp_path / "in")
    assert main(["inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"{path}: Hugging Face directory, layout fp8, files: 2" in told
    held = StoredDirectory(path)
    sizes = {file.name: sum(one.nbytes for one in load_file(file).values()) for file in path.glob("*.safetensors")}
    assert held.file_bytes() == sizes
    assert main(["verify", str(path)]) == 0
    assert main(["report", str(path), "--output", str(tmp_path / "page.html")]) == 0
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "float8-row"]) == 0
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "rows")]) == 0
    assert main(["diff", str(path), str(path)]) == 0
    found: Any = import_hf(tmp_path / "rows")["l.o.weight"]
    expected: Any = quantize(state["l.o.weight"].dequantize(torch.float32), Float8CurrentScaling())
    assert bits(found.payload) == bits(expected.payload)
    tensors = tensors_of(path)
    tensors["l.o.weight"].view(torch.uint8)[3, 5] = 0x7F
    tensors["l.o.weight_scale_inv"][1, 1] = float("nan")
    write(path, tensors, {"quantization_config": DEEPSEEK}, files=2)
    capsys.readouterr()
    assert main(["verify", str(path)]) == 1
    told = capsys.readouterr().out
    assert "l.o.weight.payload" in told
    assert "l.o.weight.scale" in told


def test_the_export_command_writes_it_from_a_checkpoint(tmp_path: Path) -> None:
    path, state = directory(tmp_path / "in")
    save(state, tmp_path / "dcp")
    assert main(["export", str(tmp_path / "dcp"), str(tmp_path / "out"), "--layout", "fp8"]) == 0
    assert_holds(tensors_of(tmp_path / "out"), tensors_of(path))
    assert_holds(import_hf(tmp_path / "out"), state)
