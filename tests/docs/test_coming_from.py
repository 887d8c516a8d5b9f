"""docs/coming_from.md: our side of every pair runs, and the peers' where it can on a CPU, each library in a process.

A block belongs to whom the bold line above it names. The blocks of one library in one section run in order in one
namespace. Peers warn and change torch when they are imported, so they have a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qtensor import Float8Tensor, NVFP4Tensor, QuantizedTensor
from tests.docs.pages import REPO, Block, namespace, page
from tests.docs.small_models import Model, batch, fill
from tests.ranks import run_ranks

PAGE = page("coming_from.md")
SECTIONS = ("TransformerEngine", "torchao", "ModelOpt")
MODULES = {"torchao": "torchao", "ModelOpt": "modelopt"}


def owner(block: Block) -> tuple[str, str]:
    """The section it stands in, and whose code it is."""
    above = "\n".join(PAGE.text.splitlines()[: block.line])
    sections = re.findall(r"^## (.+)$", above, re.M)
    return sections[-1], re.findall(r"^\*\*(\w+)\*\*$", above, re.M)[-1]


def numbers(section: str, library: str) -> list[int]:
    """Which of the page's blocks are those of a library in a section."""
    return [number for number, block in enumerate(PAGE.python) if owner(block) == (section, library)]


def given(path: Path) -> dict[str, Any]:
    """What the page says is there."""
    batches = [batch() for _ in range(3)]
    names = {"build_model": Model, "init_weights": fill, "batches": batches, "x": batches[0], "path": path}
    return namespace(device="cpu", **names)


def ours(section: str, path: Path) -> None:
    names = PAGE.run(given(path), only=numbers(section, "qtensor"))
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


@pytest.mark.parametrize("section", SECTIONS)
def test_our_side_runs(section: str, shared_tmp_path: Path) -> None:
    run_ranks(1, ours, section, shared_tmp_path)


def theirs(library: str, path: Path) -> None:
    """In a process of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    names = PAGE.run(given(path), only=numbers(library, library))
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


def _what_the_page_says_of_modelopt(names: dict[str, Any]) -> None:
    import modelopt.torch.quantization as mtq

    def weight_of(model: Any) -> torch.Tensor:
        return model.layers[0].mlp.up_proj.weight  # type: ignore[no-any-return]

    assert weight_of(names["model"]).dtype == torch.bfloat16
    assert weight_of(names["again"]).dtype == torch.float8_e4m3fn
    assert names["out"].shape == names["x"].shape
    known = PAGE.text[PAGE.text.index("| ModelOpt | here |") :]
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
    for section in SECTIONS:
        owners = [owner(block)[1] for block in PAGE.blocks if owner(block)[0] == section]
        assert owners == [section, "qtensor"] * (len(owners) // 2), owners
        assert len(owners) >= 6
    for block in PAGE.blocks:
        assert bool(block.not_run) == (owner(block)[1] == "TransformerEngine")
