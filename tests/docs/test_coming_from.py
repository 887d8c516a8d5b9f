"""docs/coming_from/: our side of every pair runs, and the peers' where it can on a CPU, each library in a process.

A block belongs to whom the bold line above it names. The blocks of one library on one page run in order in one
namespace. Peers warn and change torch when they are imported, so they have a process of their own; what brings a model
over (BRING) runs there, too, before their side.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_adapters import export_hf
from qtensor import Float8Tensor, MXFP4BlockScaling, NVFP4Tensor, QuantizedTensor, quantize_
from tests.docs.pages import REPO, Block, Page, namespace, page
from tests.docs.small_models import Model, batch, fill
from tests.ranks import run_ranks

PAGES = {
    "TransformerEngine": page("coming_from/transformer_engine.md"),
    "torchao": page("coming_from/torchao.md"),
    "ModelOpt": page("coming_from/modelopt.md"),
}
MODULES = {"torchao": "torchao", "ModelOpt": "modelopt", "compressed_tensors": "compressed_tensors"}
BRING = "Bring a quantized model over"


def owner(on: Page, block: Block) -> str:
    """Whose code it is, or BRING."""
    above = "\n".join(on.text.splitlines()[: block.line])
    if re.findall(r"^## (.+)$", above, re.M)[-1] == BRING:
        return BRING
    return re.findall(r"^\*\*(\w+)\*\*$", above, re.M)[-1]  # type: ignore[no-any-return]


def numbers(on: Page, library: str) -> list[int]:
    """Which of a page's blocks are those of a library."""
    return [number for number, block in enumerate(on.python) if owner(on, block) == library]


def given(path: Path) -> dict[str, Any]:
    """What the page says is there."""
    batches = [batch() for _ in range(3)]
    names = {"build_model": Model, "init_weights": fill, "batches": batches, "x": batches[0], "path": path}
    return namespace(device="cpu", **names)


def ours(section: str, path: Path) -> None:
    names = PAGES[section].run(given(path), only=numbers(PAGES[section], "qtensor"))
    weights = [getattr(p, "to_local", lambda p=p: p)() for p in names.get("again", names["model"]).parameters()]
    kinds = {type(weight) for weight in weights if isinstance(weight, QuantizedTensor)}
    if section == "torchao":
        assert kinds == {NVFP4Tensor}
        assert torch.equal(names["again"](names["x"]), names["out"])
        assert len(names["result"].state_dict()) > 4, "weights, and norms that factors were folded into"
    if section == "ModelOpt":
        assert kinds == {Float8Tensor}
        assert torch.equal(names["out"], names["model"](names["x"]))
        saved = [name for name in names["result"].state_dict() if not name.endswith("input_scale")]
        assert len(saved) == 4
    if section == "TransformerEngine":
        assert len(kinds) == 1
        assert len(names["optimizer"].state_dict()["state"]) == len(weights)


@pytest.mark.parametrize("section", PAGES)
def test_our_side_runs(section: str, shared_tmp_path: Path) -> None:
    run_ranks(1, ours, section, shared_tmp_path)


def theirs(library: str, path: Path) -> None:
    """In a process of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    if library == "compressed_tensors":
        _what_the_page_says_of_compressed_tensors(path)
        dist.destroy_process_group()
        return
    on = PAGES[library]
    brought = on.run(given(path), only=numbers(on, BRING))
    assert brought["report"].exact
    if library == "torchao":
        assert torch.equal(brought["model"](brought["x"]), brought["before"])
        assert brought["names"] == [weight.name for weight in brought["report"].weights]
    else:
        weights = [param for param in brought["model"].parameters() if isinstance(param, QuantizedTensor)]
        assert len(weights) == len(brought["report"].weights)
        assert {weight.recipe.activations for weight in weights} == {"dynamic"}
        assert brought["model"](brought["x"]).isfinite().all()
    names = on.run(given(path), only=numbers(on, library))
    if library == "torchao":
        _what_the_page_says_of_torchao(names)
    else:
        _what_the_page_says_of_modelopt(names)
    dist.destroy_process_group()


def _what_the_page_says_of_torchao(names: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    assert torch.equal(names["again"](names["x"]), names["out"])
    assert "Int8Tensor" in type(names["model"].layers[0].mlp.up_proj.weight).__name__
    with pytest.raises(NotImplementedError):
        fully_shard(names["again"].layers[0])


def _what_the_page_says_of_compressed_tensors(path: Path) -> None:
    """A directory with the layout is loaded, adopted and run; its first forward would have decompressed it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    quantize_(ours, MXFP4BlockScaling(), exclude=["lm_head"])
    export_hf(ours.state_dict(), path / "out", layout="compressed-tensors", config=ours.config, progress=False)
    names = page("coming_from/compressed_tensors.md").run(namespace(directory=path / "out"))
    model, ids = names["model"], torch.tensor([[1, 5, 9, 2]])
    assert names["report"].exact
    assert len(names["report"].weights) == 7
    assert torch.equal(model(ids).logits, ours(ids).logits)
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    assert b"compressed_tensors" not in pickle.dumps(model.model.layers)
    assert not model._forward_pre_hooks


def _what_the_page_says_of_modelopt(names: dict[str, Any]) -> None:
    import modelopt.torch.quantization as mtq

    def weight_of(model: Any) -> torch.Tensor:
        return model.layers[0].mlp.up_proj.weight  # type: ignore[no-any-return]

    assert weight_of(names["model"]).dtype == torch.bfloat16
    assert weight_of(names["again"]).dtype == torch.float8_e4m3fn
    assert names["out"].shape == names["x"].shape
    text = PAGES["ModelOpt"].text
    known = text[text.index("| ModelOpt | here |") :]
    for preset in re.findall(r"`(\w+_CFG)`", known):
        assert hasattr(mtq, preset), preset
    algorithm = mtq.config.MaxCalibConfig(**names["config"]["algorithm"])
    assert algorithm.layerwise.checkpoint_dir


@pytest.mark.full
@pytest.mark.parametrize("library", MODULES)
def test_their_side_runs(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(MODULES[library]) is None:
        pytest.skip(f"{library} is not installed (make bench installs it)")
    env = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    env |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    code = "import sys, pathlib, tests.docs.test_coming_from as t; t.theirs(sys.argv[1], pathlib.Path(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, library, str(tmp_path)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_block_has_an_owner_and_a_counterpart() -> None:
    for section, on in PAGES.items():
        owners = [name for block in on.blocks if (name := owner(on, block)) != BRING]
        assert owners == [section, "qtensor"] * (len(owners) // 2), owners
        assert len(owners) >= 6
        for block in on.blocks:
            assert bool(block.not_run) == (owner(on, block) == "TransformerEngine")


def test_the_versions_on_the_page_are_those_that_are_tested() -> None:
    listed = dict(re.findall(r"^\| \[([\w-]+)\]\(.+ \| ([\d.]+) \|$", page("coming_from/README.md").text, re.M))
    assert set(listed) == {"torchao", "transformers", "compressed-tensors", "bitsandbytes", "ModelOpt"}
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (REPO / "constraints.txt").read_text(encoding="utf-8"), re.M))
    for name, version in listed.items():
        assert pinned[{"ModelOpt": "nvidia-modelopt"}.get(name, name)] == version
