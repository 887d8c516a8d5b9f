"""Adapters merged into a quantized base: the bytes of one process, and a check that sees what was not merged."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled

pytest.importorskip("transformers")

import torch
import torch.distributed.checkpoint as dcp

from examples.trainers import qlora_merge, qlora_peft
from qtensor import merge_aware
from tests.examples.trainers.checkpoints import hold_the_same, quantized_in
from tests.ranks import run_ranks


@contextmanager
def _old_names() -> Iterator[None]:
    """peft asks transformers for an attribute by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _train(argv: list[str]) -> list[float]:
    with _old_names():
        return qlora_peft.main(argv)


def _merge(argv: list[str]) -> float:
    with _old_names():
        return qlora_merge.main(argv)


def _deviations(form: str, out: Path) -> list[float]:
    """After the merge, and with the base as it was before."""
    with _old_names():
        model = qlora_merge.adapted_model(out / "base", form)
    dcp.load({"adapters": qlora_merge.adapters_of(model)}, checkpoint_id=out / "step-6")
    held = {name: param.detach().clone() for name, param in model.named_parameters()}
    seen = qlora_merge.seen_by(model)
    report = qlora_merge.merge(model)
    merged = qlora_merge.deviation(model, seen, report)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(held[name])
    assert all(line.survived > 0.9 for line in report.weights)
    assert len(report.weights) == 2 * 7
    return [merged, qlora_merge.deviation(model, seen, report)]


@sampled("form", ["float8", "mxfp4"], ["mxfp4"])
def test_merged_layers_are_base_and_adapter_and_the_bytes_those_of_one_process(
    form: str, shared_tmp_path: Path
) -> None:
    out = shared_tmp_path / "trained"
    run_ranks(2, _train, ["--out", str(out), "--format", form])
    argv = ["--base", str(out / "base"), "--adapters", str(out / "step-6"), "--format", form]
    for ranks in (1, 2):
        shares = run_ranks(ranks, _merge, [*argv, "--out", str(shared_tmp_path / f"merged-{ranks}")])
        assert all(0 < share < 1 for share in shares)
    assert hold_the_same(shared_tmp_path / "merged-1", shared_tmp_path / "merged-2")
    assert len(quantized_in(shared_tmp_path / "merged-2")) == 2 * 7 + 1
    for merged, before in run_ranks(2, _deviations, form, out):
        assert merged < 1 < before


def _loss(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=qlora_peft.TOKENS, labels=qlora_peft.TOKENS).loss  # type: ignore[no-any-return]


def _merged_as_trained(form: str, base: Path, out: Path) -> None:
    with _old_names():
        model = qlora_merge.adapted_model(base, form)
    dcp.load({"adapters": qlora_merge.adapters_of(model)}, checkpoint_id=out / "step-4")
    beside = _loss(model)
    with merge_aware(model):
        trained = _loss(model)
    qlora_merge.merge(model)
    with model.disable_adapter():
        assert torch.equal(_loss(model), trained)
    assert not torch.equal(beside, trained)


def test_steps_through_the_merge_train_the_model_that_is_merged(shared_tmp_path: Path) -> None:
    out, argv = shared_tmp_path / "plain", ["--format", "mxfp4", "--steps", "4"]
    plain = run_ranks(2, _train, [*argv, "--out", str(out)])
    argv += ["--base", str(out / "base"), "--out", str(shared_tmp_path / "through")]
    through = run_ranks(2, _train, [*argv, "--through-merge", "2"])
    for one, other in zip(plain, through, strict=True):
        assert one[:2] == other[:2]
        assert one[2] != other[2]
    run_ranks(2, _merged_as_trained, "mxfp4", out / "base", shared_tmp_path / "through")
