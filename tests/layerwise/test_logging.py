"""What a run logs: nothing unless asked, then a line for the plan, each stage, each checkpoint and each warning."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from layerwise import AWQ, GPTQ, rotate_, search_formats
from layerwise.algorithms import gptq
from layerwise.running import events
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling
from tests.layerwise.rotating.decoders import BLOCK, decoder, ids
from tests.layerwise.small_runs import Case, batches, model_of, own, run, stopped
from tests.ranks import run_ranks

PACKAGE = logging.getLogger("layerwise")
CASE = Case(algorithm=GPTQ(smoothing=AWQ()))
STARVED = "no token reached it; rounded to nearest under scales from its values"


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """The lines from this level on, without their times."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname} {re.sub(r'[0-9]+[.][0-9] s', '- s', record.getMessage())}"
    )
    before = PACKAGE.level
    PACKAGE.addHandler(handler)
    PACKAGE.setLevel(level)
    try:
        yield lines
    finally:
        PACKAGE.removeHandler(handler)
        PACKAGE.setLevel(before)


def lines_of(case: Case, level: int = logging.INFO, **options: Any) -> list[str]:
    with logged(level) as lines:
        run(model_of(case), case, **options)
    return lines


# In bf16; under NVFP4 16 elements take 8 bytes and a scale of 1, a weight 4 bytes more.
LAYER = 3 * 32 * 32 + 2 * 64 * 32 + 96 * 32
HEAD = 48 * 32
DENSE = 2 * (3 * LAYER + HEAD)
QUANTIZED = (3 * LAYER + HEAD) // 16 * 9 + 19 * 4


def plan_line(case: Case, ranks: int = 1) -> str:
    return (
        "INFO calibrate: 3 layers and what is outside of them, 19 weights of "
        f"{DENSE} bytes, {QUANTIZED} when quantized; "
        f"{case.recipe}, {case.algorithm}, on outputs of quantized layers, {ranks} ranks"
    )


def test_nothing_is_shown_or_made_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unasked(*args: Any) -> str:
        raise AssertionError("made for a line that is off")

    for name in ("_place", "_describe_outcome", "_describe_bytes"):
        monkeypatch.setattr(events, name, unasked)
    assert lines_of(CASE, logging.WARNING) == []
    run(model_of(CASE), CASE)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    with pytest.raises(AssertionError, match="made for a line that is off"):
        lines_of(CASE)


def test_a_run_and_what_it_resumes(tmp_path: Path) -> None:
    first = lines_of(CASE, checkpoint_dir=tmp_path, save_every=2)
    stages = []
    for index, name in enumerate(["layers.0", "layers.1", "layers.2", "outside the layers"]):
        place = f"INFO calibrate: {name} ({index + 1} of 4)"
        if index < 3:
            stages.append(f"INFO calibrate: layers.{index}.spare.weight: {STARVED}")
        if index in (1, 3):
            stages.append(f"{place}: saved in layers-{index - 1:05}-{index:05}")
        linears, tokens = (6, 60) if index < 3 else (1, 60)
        stages.append(f"{place}: {linears} linears, up to {tokens} tokens, output SNR - dB, in - s")
    assert [re.sub(r"SNR [0-9.]+ dB", "SNR - dB", line) for line in first] == [
        plan_line(CASE),
        f"INFO calibrate: {tmp_path} has 0 of 4 stages",
        *stages,
        "INFO calibrate: all 4 stages are done, in - s",
    ]
    assert lines_of(CASE, checkpoint_dir=tmp_path) == [
        plan_line(CASE),
        f"INFO calibrate: {tmp_path} has 4 of 4 stages",
        "INFO calibrate: layers.0 (1 of 4): taken from the checkpoint, in - s",
        "INFO calibrate: layers.1 (2 of 4): taken from the checkpoint, in - s",
        "INFO calibrate: layers.2 (3 of 4): taken from the checkpoint, in - s",
        "INFO calibrate: outside the layers (4 of 4): taken from the checkpoint, in - s",
        "INFO calibrate: all 4 stages are done, in - s",
    ]


def test_a_run_that_fails_is_not_said_to_be_done(tmp_path: Path) -> None:
    with logged(logging.INFO) as lines:
        stopped(model_of(Case()), Case(), tmp_path)
    assert [line for line in lines if "done" in line] == []
    assert lines[-1] == "INFO calibrate: layers.0 (1 of 4): saved in layers-00000-00000"


def test_details() -> None:
    lines = lines_of(Case(algorithm=AWQ()), logging.DEBUG)
    held = 2 * (LAYER + 4 * 32)  # two biases and two norms beside the weights
    weights = f"6 weights of {2 * LAYER} bytes, {LAYER // 16 * 9 + 6 * 4} when quantized"
    assert [line for line in lines if line.startswith("DEBUG")][:12] == [
        *(f"DEBUG calibrate: layers.{index}: parameters of {held} bytes, {weights}" for index in range(3)),
        "DEBUG calibrate: the model: parameters of 6208 bytes, 1 weights of 3072 bytes, 868 when quantized",
        "DEBUG calibrate: this rank has 5 batches",
        "DEBUG calibrate: the model runs up to layers.0, to record its inputs",
        "DEBUG calibrate: layers.0 (1 of 4): layer_start, after - s",
        "DEBUG calibrate: layers.0 (1 of 4): capture, after - s",
        "DEBUG calibrate: layers.0 (1 of 4): calibrate, after - s",
        "DEBUG layers.0: factors for 4 of 5 inputs can be folded",
        "DEBUG calibrate: layers.0 (1 of 4): write, after - s",
        "DEBUG calibrate: layers.0 (1 of 4): metrics, after - s",
    ]


def test_passes_that_are_made_again() -> None:
    lines = lines_of(Case(algorithm=GPTQ(hessians="one_at_a_time")), logging.DEBUG)
    again = [line for line in lines if "run once more" in line and line.startswith("DEBUG layers.0:")]
    first = ["q_proj", "o_proj", "up_proj", "down_proj"]
    assert sorted(again) == sorted(
        f"DEBUG layers.0: its batches run once more, for the Hessian of layers.0.{name}.weight" for name in first
    )


def test_damping_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    factorise = gptq._inverse_factor
    monkeypatch.setattr(gptq, "_inverse_factor", lambda h, damping: None if damping < 0.05 else factorise(h, damping))
    raised = "the Hessian was not positive definite: damping raised from 0.01 to 0.1"
    names = ", ".join(f"layers.1.{name}.weight" for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    assert f"INFO calibrate: {names}: {raised}" in lines_of(Case(algorithm=GPTQ(damping=0.01)))


def lines_of_a_rank() -> list[str]:
    return lines_of(CASE, logging.DEBUG, data=own() if dist.get_rank() else batches()[:1])


def test_one_rank_logs_what_all_would() -> None:
    first, second = run_ranks(2, lines_of_a_rank)
    assert second == ["DEBUG calibrate: this rank has 2 batches"]
    assert first[0] == plan_line(CASE, ranks=2)
    assert "DEBUG calibrate: this rank has 1 batches" in first
    assert sum("taken from" in line or "output SNR" in line for line in first) == 4


def test_a_search() -> None:
    with logged(logging.INFO) as lines:
        found = search_formats(
            model_of(),
            batches(),
            recipes=[NVFP4BlockScaling(), MXFP8BlockScaling(), None],
            bits_per_weight=6,
            progress=False,
        )
    assert lines[0] == (
        f"INFO search_formats: 3 layers and what is outside of them, 19 weights of {DENSE} bytes; 3 recipes, "
        "Measuring(algorithm=Max(), recipes=3), on outputs of unquantized layers, 1 ranks"
    )
    assert "INFO search_formats: layers.0 (1 of 4): 6 linears, up to 60 tokens, in - s" in lines
    assert lines[-1] == f"INFO search_formats: {found.bits_per_weight:.3f} bits per weight: {found}"


def test_a_rotation() -> None:
    with logged(logging.INFO) as lines:
        report = rotate_(decoder(), ids(), block=BLOCK)
    written = (
        f"INFO rotate_: {len(report.changed)} parameters written, 0 linears get rotated inputs; outputs differ by "
    )
    assert [line.startswith(written) for line in lines] == [True]
