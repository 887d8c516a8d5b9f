"""Targets that cannot be written in place are refused before anything is written, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from dcp_adapters import SafeFileSystemReader, import_hf
from dcp_adapters.delta import apply as applying
from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.live import HeldVersion
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    LowRankUpdate,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    merge_,
    quantize,
)
from tests import ranks
from tests.dcp_adapters.cases import bits, load, save, values
from tests.dcp_adapters.delta.test_patch import between
from tests.ranks import run_ranks_catching

SHARE = "its elements share memory (strides (0, 1), as torch.Tensor.expand makes them); give it memory of its own"


def rows(value: float) -> Tensor:
    """[3, 4], all rows alike, as one row that is shown three times."""
    return torch.full((1, 4), value).expand(3, 4)


def old() -> dict[str, Tensor]:
    return {"a": values((4, 4), 0), "m": rows(1.0), "z": quantize(values((4, 32), 1), MXFP8BlockScaling())}


def new() -> dict[str, Tensor]:
    return {"a": values((4, 4), 5), "m": rows(2.0).clone(), "z": quantize(values((4, 32), 6), MXFP8BlockScaling())}


def delta() -> Any:
    return between({name: tensor.clone() for name, tensor in old().items()}, new())


def held(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: bits(value.dequantize() if name == "z" else value) for name, value in state.items()}


def unchanged(state: dict[str, Any], body: Callable[[], object]) -> None:
    before = held(state)
    try:
        body()
    finally:
        assert held(state) == before, "something was written"


def applied_to_expanded() -> None:
    target = old()
    if dist.get_rank() == 0:
        target["m"] = target["m"].clone()
    unchanged(target, lambda: apply_deltas(target, [delta()]))


def test_deltas_leave_a_target_with_an_expanded_tensor_as_it_was() -> None:
    errors = run_ranks_catching(2, applied_to_expanded)
    assert errors[1].startswith("ValueError: the target cannot be written in place, and is as it was:\n  m: " + SHARE)
    assert "rank 1: ValueError: the target cannot be written in place" in errors[0]
    target = old() | {"m": old()["m"].clone()}
    assert apply_deltas(target, [delta()]) == 1
    assert held(target) == held(new())


def test_an_expanded_tensor_that_does_not_change_is_no_obstacle() -> None:
    target = old()
    made = between({name: each.clone() for name, each in old().items()}, new() | {"m": rows(1.0).clone()})
    assert apply_deltas(target, [made]) == 1
    assert held(target) == held(new() | {"m": rows(1.0)})


def test_tensors_on_one_memory() -> None:
    """Tied ones and slices follow; those that would become different are refused."""
    fused = values((6, 4), 0)
    target = {"fused": fused, "q": fused[:2], "tied": fused.t(), "k": fused[2:, 1:3]}
    after = {name: each + 1 for name, each in target.items()}
    made = HeldVersion(target).since(after, 1)
    assert made is not None
    for name in ("q", "tied", "fused"):
        wrong = after | {name: after[name] * 2}
        torn = HeldVersion(target).since(wrong, 1)
        assert torn is not None
        with pytest.raises(ValueError, match=r"shares memory with .* and the deltas give them different bytes; the"):
            unchanged(target, lambda torn=torn: apply_deltas(target, [torn]))  # type: ignore[misc]
    assert apply_deltas(target, [made]) == 1
    assert held(target) == held(after)


def test_an_unwritable_tensor_on_memory_that_changes_is_refused_by_name() -> None:
    row = values((1, 4), 0)
    target = {"row": row, "shown": row.expand(3, 4)}
    before = {name: each.clone() for name, each in target.items()}
    made = HeldVersion(before).since(before | {"row": before["row"] + 1}, 1)
    assert made is not None
    with pytest.raises(ValueError, match=r"shown shares memory with others that change, and its elements share memory"):
        unchanged(target, lambda: apply_deltas(target, [made]))


def test_a_lazy_negative_is_refused_before_others_are_written() -> None:
    before = {"a": values((4, 4), 0), "m": values((3, 4), 1)}
    made = HeldVersion(before).since({name: each + 1 for name, each in before.items()}, 1)
    assert made is not None
    target = {"a": before["a"].clone(), "m": torch._neg_view(before["m"].neg())}
    with pytest.raises(ValueError, match=r"and is as it was:\n  m: it is a lazy negative or conjugate"):
        unchanged(target, lambda: apply_deltas(target, [made]))


def test_a_target_on_meta_says_so() -> None:
    target = old() | {"m": torch.zeros(3, 4, device="meta")}
    with pytest.raises(ValueError, match=r"m: on the meta device, without data; materialise it"):
        apply_deltas(target, [delta()])


def written_half_way() -> None:
    target, write = old() | {"m": old()["m"].clone()}, applying._write

    def fails(data: Tensor, *change: Tensor) -> None:
        if dist.get_rank() == 1 and data.shape == (3, 4):
            raise RuntimeError("device lost")
        write(data, *change)

    with mock.patch.object(applying, "_write", fails):
        apply_deltas(target, [delta()])


def test_an_error_while_memory_is_written_reaches_all_ranks() -> None:
    for error in run_ranks_catching(2, written_half_way):
        assert "apply_deltas: writing failed (RuntimeError: device lost)" in error
        assert "neither the version before nor the one after: give all ranks a full version" in error


# -- loads, imports, merges --------------------------------------------------------------------------------------------


def load_expanded(path: Path) -> None:
    target = {"a": torch.zeros(4, 4), "m": torch.zeros(3, 4)}
    if dist.get_rank() == 1:
        target["m"] = rows(0.0)
    unchanged(target, lambda: load(target, path))


def test_loads(tmp_path: Path) -> None:
    path = ranks.agreed(tmp_path) / "checkpoint"
    save({"a": values((4, 4), 0, torch.float32), "m": values((3, 4), 1, torch.float32)}, path)
    for error in run_ranks_catching(2, load_expanded, path):
        assert f"nothing has been loaded:\n  m: {SHARE}" in error
    with torch.inference_mode():
        q = quantize(values((4, 32), 1), MXFP8BlockScaling())
    save({"a": values((4, 4), 0), "w": quantize(values((4, 32), 0), MXFP8BlockScaling())}, path.parent / "quantized")
    with pytest.raises(BaseException, match=r"w.payload: it was made in inference mode"):
        load({"a": torch.zeros(4, 4), "w": q}, path.parent / "quantized")


@pytest.mark.parametrize("reader", [None, SafeFileSystemReader])
def test_tied_targets_need_equal_values(reader: Any, tmp_path: Path) -> None:
    """transformers' Llama with tied embeddings, from a checkpoint of one that was trained with two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 50, "num_hidden_layers": 1}
    trained, tied = (
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=tie)) for tie in (False, True)
    )
    for path, told in ((tmp_path / "apart", True), (tmp_path / "equal", False)):
        save(trained.state_dict(), path)
        where = None if reader is None else reader(path)
        if told:
            names = r"(lm_head|model.embed_tokens).weight shares memory with (lm_head|model.embed_tokens).weight in the"
            with pytest.raises(dcp.CheckpointException, match=f"{names} target, and the checkpoint has different"):
                load(tied.state_dict(), path, reader=where)
            with torch.no_grad():
                trained.lm_head.weight.copy_(trained.model.embed_tokens.weight)
        else:
            load(tied.state_dict(), path, reader=where)
            assert torch.equal(tied.lm_head.weight, trained.lm_head.weight)


@pytest.mark.parametrize("reader", [None, SafeFileSystemReader])
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(), Float8DelayedScaling()])
def test_tied_targets_of_a_conversion_need_equal_values(recipe: Any, reader: Any, tmp_path: Path) -> None:
    """Both are converted, from dense values or from another recipe, or one of them is read as it is."""
    one, other = (values((32, 64), seed) for seed in (0, 1))
    coded, recoded = (quantize(each, Float8CurrentScaling()) for each in (one, other))
    same, another = (quantize(each, recipe) for each in (one, other))
    cases = [(one, other, True), (one, one, False), (coded, recoded, True), (coded, coded, False), (one, another, True)]
    if not isinstance(recipe, Float8DelayedScaling):  # whose history a save keeps, and a conversion begins
        cases.append((one, same, False))
    for number, (a, b, told) in enumerate(cases):
        path = tmp_path / str(number)
        save({"a": a, "b": b}, path)
        tied, untied = (quantize(values((32, 64), 2), recipe) for _ in range(2))
        where = None if reader is None else reader(path)
        if told:
            with pytest.raises(dcp.CheckpointException, match=r"(a|b)\.\w+ shares memory with (a|b)\.\w+ in the"):
                load({"a": tied, "b": tied}, path, reader=where, on_mismatch="convert")
        else:
            load({"a": tied, "b": tied}, path, reader=where, on_mismatch="convert")
            load({"a": untied}, path, on_mismatch="convert", allow_partial_load=True)
            assert [bits(part) for part in tied.parts().values()] == [bits(part) for part in untied.parts().values()]


class WithMask(nn.Module):
    """A linear beside a buffer whose rows are one row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", rows(1.0))


def test_imports(tmp_path: Path) -> None:
    save_file(
        {name: each.clone() + 1 for name, each in WithMask().state_dict().items()}, tmp_path / "model.safetensors"
    )
    model = WithMask()
    with pytest.raises(ValueError, match=r"nothing has been loaded:\n  mask: its elements share memory"):
        unchanged(dict(model.state_dict()), lambda: import_hf(tmp_path, model, progress=False))


def test_merges() -> None:
    model = nn.Linear(4, 3, bias=False)
    other = nn.Parameter(rows(1.0), requires_grad=False)
    named = [("w", model.weight), ("m", other)]
    update = LowRankUpdate(a=torch.ones(1, 4), b=torch.ones(3, 1), scaling=1.0)
    with pytest.raises(ValueError, match=r"merge_: m: its elements share memory .* No weight was written"):
        unchanged(dict(named), lambda: merge_(named, {"w": update, "m": update}))
