"""Which master belongs to which tensor; and what cannot be compared is never called sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dcp_adapters.cli.main import main
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.masters import NAMELESS, NO_PARAMETER, NUMBERED, OTHER_DTYPE, OTHER_SHAPE, TWICE, Masters
from dcp_adapters.stored.verifying.verify import verify
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize, quantize_
from tests.dcp_adapters.cases import placed, save, values
from tests.dcp_adapters.test_deep import copied
from tests.ranks import run_ranks_catching

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MX = MXFP8BlockScaling()


# -- states as the documented calls give them, of models that stock torch has wrapped ---------------------------------


def compiled(net: nn.Sequential) -> nn.Module:
    """Block by block, as guides of torch say."""
    for number, block in enumerate(net):
        net[number] = torch.compile(block, backend="eager")
    return net


def checkpointed_and_compiled(net: nn.Sequential) -> nn.Module:
    for number, block in enumerate(net):
        net[number] = torch.compile(checkpoint_wrapper(block), backend="eager")
    return net


def within(net: nn.Sequential) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[no-any-return]


def stepped(wrap: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """What a training would save before, and after, a step of transformer layers."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 2, 64, 0.0, batch_first=True) for _ in range(2)]
    net: Any = nn.Sequential(*blocks).to(torch.bfloat16)
    quantize_(net, MX, include=("*.linear1", "*.linear2"))
    net = wrap(net)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.05)
    states = []
    for _ in range(2):
        for param in net.parameters():
            param.grad = torch.full(param.shape, 0.5, dtype=param.dtype)
        optimizer.step()
        optim = dcp_state.get_optimizer_state_dict(net, optimizer)
        states.append({"model": copied(net.state_dict()), "optim": copied(optim)})
    return states


@pytest.mark.parametrize("wrap", [compiled, checkpointed_and_compiled, within])
def test_a_mixture_of_two_steps_is_found_behind_wrappers(wrap: Any, tmp_path: Path) -> None:
    first, second = stepped(wrap)
    assert any("_orig_mod" in name for name in first["model"])
    save(second, tmp_path / "good", verify="deep")
    report = verify(tmp_path / "good", level="deep")
    masters = sum(name.endswith(("weight", "bias")) for name in first["model"])
    assert (report.findings, report.judged, report.masters) == ((), 4, masters)
    mixture = {"model": first["model"], "optim": second["optim"]}
    with pytest.raises(CheckpointException, match=r"linear1.weight: it is not what optim.state.* requantizes to"):
        save(mixture, tmp_path / "refused", verify="deep")
    save(mixture, tmp_path / "bad")
    assert verify(tmp_path / "bad").ok
    told = [finding.entry for finding in verify(tmp_path / "bad", level="deep").errors]
    assert sum(name.endswith((".linear1.weight", ".linear2.weight")) for name in told) == 4


# -- what is not matched -----------------------------------------------------------------------------------------------


def entry(name: str, recipe: Any = None, shape: tuple[int, ...] = (2, 32), dtype: Any = torch.float32) -> Entry:
    return Entry(name, recipe, shape, dtype if recipe is None else torch.bfloat16)


MATCHED = {
    "compiled weight": ("model.a._orig_mod.w", "optim.state.a.w.master_weight"),
    "compiled optimizer": ("model.a.w", "optim.state._orig_mod.a.w.master_weight"),
    "wrapped differently": (
        "model._fsdp_wrapped_module.a.w",
        "optim.state.a._checkpoint_wrapped_module.w.master_weight",
    ),
    "DDP's optimizer": ("a.w", "state.module.a.w.master_weight"),
    "DDP's model": ("model.module.a.w", "optim.state.a.w.master_weight"),
    "numbered modules": ("model.0.w", "optim.state.0.w.master_weight"),
}
LEFT = {
    "another name": (["model.a.w"], entry("optim.state.b.w.master_weight"), NAMELESS),
    "another prefix": (["model.a.w"], entry("optim.state.backbone.a.w.master_weight"), NAMELESS),
    "another shape": (["model.a.w"], entry("optim.state.a.w.master_weight", shape=(2, 64)), OTHER_SHAPE),
    "another dtype": (["model.a.w"], entry("optim.state.a.w.master_weight", dtype=torch.bfloat16), OTHER_DTYPE),
    "numbers": (["model.a.w"], entry("optim.state.0.master_weight"), NUMBERED),
    "another layout": (["model.a.w"], entry("optim.masters.a.w.master_weight"), NO_PARAMETER),
    "twice": (
        ["model.a._orig_mod.w", "model.a._checkpoint_wrapped_module.w"],
        entry("optim.state.a.w.master_weight"),
        TWICE,
    ),
    "no tensors": ([], entry("optim.state.a.w.master_weight"), NAMELESS),
}


@pytest.mark.parametrize("case", MATCHED)
def test_names_that_differ_by_wrappers_meet(case: str) -> None:
    tensor, master = MATCHED[case]
    found = Masters.among({tensor: entry(tensor, MX), master: entry(master)})
    assert (found.beside, found.left) == ({tensor: [master]}, {})


@pytest.mark.parametrize("case", LEFT)
def test_a_master_without_a_tensor_is_told_with_the_reason(case: str) -> None:
    tensors, master, why = LEFT[case]
    found = Masters.among({name: entry(name, MX) for name in tensors} | {master.name: master})
    assert (found.beside, found.left) == ({}, {master.name: why})


def state(*masters: str) -> dict[str, Any]:
    """A weight, and states of an optimizer; the master of it fits."""
    w = quantize(values((2, 32), 0), MX)
    return {
        "model": {"w": w},
        "optim": {"state": {name: {"master_weight": w.dequantize(torch.float32)} for name in masters}},
    }


def test_a_subset_is_compared_and_the_rest_is_counted(tmp_path: Path) -> None:
    some = state("w", "v", "u")
    with pytest.warns(UserWarning, match=r"optim.state.v.* 2 of 3 masters were not compared: no tensor"):
        save(some, tmp_path, verify="deep")
    report = verify(tmp_path, level="deep")
    assert (report.ok, report.masters) == (True, 1)
    (finding,) = report.findings
    assert (finding.severity, finding.message) == ("warning", f"2 of 3 masters were not compared: {NAMELESS}")
    assert finding.entry == "optim.state.v.master_weight, optim.state.u.master_weight"


@pytest.mark.parametrize("numbered", [False, True])
def test_nothing_compared_is_an_error(numbered: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of numbered states, as optimizer.state_dict() has them, and of an optimizer that is saved alone."""
    none = state(*(("0", "1") if numbered else ("x.w", "y.w")))
    why = NUMBERED if numbered else NAMELESS
    for number, each in enumerate((none, {"optim": none["optim"]})):
        with pytest.raises(CheckpointException, match=r"no master can be compared .* nothing has been written"):
            save(each, tmp_path / f"refused-{number}", verify="deep")
        save(each, path := tmp_path / str(number))
        report = verify(path, level="deep")
        assert report.masters == 0
        (finding,) = report.errors
        assert finding.message.startswith(f"2 of 2 masters were not compared: {why}; none could be compared")
        assert main(["verify", str(path)]) == 0
        assert main(["verify", str(path), "--deep"]) == 1
        assert "2 of 2 masters were not compared" in capsys.readouterr().out


def test_a_checkpoint_without_anything_to_judge_says_so(tmp_path: Path) -> None:
    save({"w": values((2, 4), 0)}, tmp_path)
    (finding,) = verify(tmp_path, level="deep").findings
    assert finding.severity == "warning"
    assert (
        finding.message == "nothing is quantized here, and no masters are kept: there was nothing to judge beyond bytes"
    )


def save_masters_elsewhere(path: Path) -> None:
    mesh, one = init_device_mesh("cpu", (2,)), state("w")
    w, master = one["model"]["w"], one["optim"]["state"]["w"]["master_weight"]
    one["model"]["w"] = placed(w, mesh, Shard(0))
    one["optim"]["state"]["w"]["master_weight"] = placed(master, mesh, Replicate())
    save(one, path, verify="deep")


def test_masters_that_lie_elsewhere_are_not_called_compared(tmp_path: Path) -> None:
    for error in run_ranks_catching(2, save_masters_elsewhere, tmp_path / "c"):
        assert "1 of 1 masters were not compared: they are placed otherwise than their weights" in error
        assert "verify --deep" in error
    assert not (tmp_path / "c" / ".metadata").exists()
