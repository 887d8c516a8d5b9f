"""What a run promises beyond its layers: the order of a result, what is part of its fingerprint, where it can run."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from layerwise import GPTQ, Max, SmoothQuant
from layerwise.resume.checkpoints import CalibrationCheckpoint
from qtensor import Float8CurrentScaling
from tests.layerwise.small_runs import Case, Model, batches, bytes_of, found, model_of, run
from tests.ranks import run_ranks, run_ranks_catching

SMOOTH = Case(algorithm=SmoothQuant())


def names_of_a_result() -> list[str]:
    return list(run(model_of(SMOOTH), SMOOTH).state_dict())


def test_a_result_has_one_order_on_all_ranks() -> None:
    """Whoever gathers it entry by entry does the same collectives: the model's order, folded norms behind linears."""
    expected = names_of_a_result()
    assert run_ranks(2, names_of_a_result) == [expected] * 2
    model_order = list(dict(model_of(SMOOTH).named_parameters()))
    norms = [name for name in expected if "norm" in name and name.startswith("layers.0.")]
    assert norms == [name for name in model_order if name in norms] != []


def test_values_in_files_are_as_aligned_as_those_in_memory(tmp_path: Path) -> None:
    """Products depend on alignment in their last bits, and files put tensors anywhere."""
    state = {name: value.contiguous() for name, value in model_of(Case(dtype=torch.float32)).state_dict().items()}
    for length in (1, 3, 7):
        save_file(state, tmp_path / "model.safetensors", metadata={"note": "x" * length})
        with torch.device("meta"):
            model = Model()
        case = Case(algorithm=GPTQ(), dtype=torch.float32)
        read = run(model, case, weights=tmp_path / "model.safetensors").state_dict()
        held = run(model_of(case), case).state_dict()
        assert {name: bytes_of(value) for name, value in read.items()} == {n: bytes_of(v) for n, v in held.items()}


def test_a_run_whose_last_record_was_lost_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # as a kill behind the last window leaves it
        patched.setattr(CalibrationCheckpoint, "mark_finished", lambda self, weights: None)
        first = model_of()
        expected = found(run(first, checkpoint_dir=tmp_path), first).same()
    model = model_of()
    assert found(run(model, checkpoint_dir=tmp_path), model).same() == expected
    assert found(run(model, checkpoint_dir=tmp_path), model).same() == expected, "the finished model is known, too"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Something that a model could depend on."""

    what: random.Random


class Asked(Model):
    def forward(self, ids: torch.Tensor, wanted: Any = None) -> torch.Tensor:
        return super().forward(ids)


def test_data_that_can_not_be_compared_are_refused_with_a_checkpoint_only(tmp_path: Path) -> None:
    data = [{"ids": batches()[0], "wanted": random.Random(0)}]
    message = r"batch 0 holds .*wanted.* \(Random\): whether another run has the same data can not be told"
    with pytest.raises(TypeError, match=message):
        run(Asked(), data=data, checkpoint_dir=tmp_path)
    run(Asked(), data=data)


def test_a_buffer_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    def with_buffer(value: float) -> nn.Module:
        model = model_of()
        model.layers[0].register_buffer("offset", torch.tensor([value]))
        return model

    run(with_buffer(1.0), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"other weights: layers\.0\.offset differs"):
        run(with_buffer(2.0), checkpoint_dir=tmp_path)


class Differs(Max):
    """Would decide by itself on each rank."""

    def decide(self, group: Any, recipe: Any) -> Any:
        decisions = super().decide(group, recipe)
        for decision in decisions:
            decision.quantizer["amax"].mul_(1 + dist.get_rank())
        return decisions


def decided_apart() -> dict[str, str]:
    result = run(model_of(), Case(algorithm=Differs(), recipe=Float8CurrentScaling()))
    scales = {name: entry.to_local().scale for name, entry in result.state_dict().items()}
    return {name: bytes_of(scale.contiguous()) for name, scale in scales.items() if "spare" in name}


def test_one_rank_decides_for_all() -> None:
    """Whatever ranks would come to by themselves, the rows of one weight on all ranks are from one decision."""
    plain = run(model_of(), Case(recipe=Float8CurrentScaling())).state_dict()
    for rank, scales in enumerate(run_ranks(2, decided_apart)):
        for name, scale in scales.items():
            own = plain[name].scale.chunk(2)[rank]
            assert scale in (bytes_of(own.clone()), bytes_of(own * 2)), name


def begun_apart(name: str) -> None:
    def prepare(model: Any) -> None:
        model.layers[0].get_parameter(name).view(-1)[3] += dist.get_rank()

    run(model_of(shard=False, prepare=prepare))


def test_ranks_that_hold_different_weights_are_refused() -> None:
    for name in ("spare.weight", "norm1.weight"):
        message = (
            f"RuntimeError: calibrate: the weights of layers.0 differ between ranks: layers.0.{name} of rank 1 is not "
            "that of rank 0. So what one rank decides about them"
        )
        assert all(error.startswith(message) for error in run_ranks_catching(2, begun_apart, name))


def in_mixed_precision(*excluded: str) -> list[str]:
    case = Case(dtype=torch.float32)
    model = model_of(case, shard=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model)
    return list(run(model, case, exclude=excluded).state_dict())


def test_layers_without_a_target_get_inputs_in_the_dtype_they_are_gathered_in() -> None:
    for names in run_ranks(2, in_mixed_precision, "layers.0.*", "lm_head"):
        assert not any(name.startswith("layers.0.") for name in names)
        assert len(names) == 6 * 2


def test_it_runs_where_inference_mode_is_on() -> None:
    case = Case(algorithm=GPTQ())
    expected = found(run(model := model_of(), case), model)
    again = model_of()
    with torch.inference_mode():
        result = run(again, case)
    assert {name: bytes_of(value) for name, value in result.state_dict().items()} == expected.result


def test_another_version_of_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model_of(), checkpoint_dir=tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(UserWarning, match=r"it was calibrated with torch .*, now it is 2\.99\.0"):
        run(model_of(), checkpoint_dir=tmp_path)
