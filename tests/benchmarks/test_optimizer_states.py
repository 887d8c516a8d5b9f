"""The evidence for optimizer states: codes of moments, contenders, and runs that are kept; all of it in a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qtensor as qt
from benchmarks import moment_codes, optimizer_states, optimizer_states_report, small_training
from benchmarks import optimizer_contenders as contenders
from benchmarks.moment_codes import E4M3, E5M2, INT8, U4M4, UINT8, Grid, in_bf16, rounded
from benchmarks.optimizer_contenders import FULL, PLAIN, AdamWWithBf16Moments
from qtensor.states.draws import Positions, key_of, row_keys
from qtensor.states.moments import decode_moment, encode_moment

BASELINES = ["bf16 | masters fp32, moments fp32", "nvfp4 | masters fp32, moments fp32"]
PLAIN_BF16 = "bf16 | no masters, torch AdamW"


def noise_like(values: torch.Tensor) -> torch.Tensor:
    return torch.rand(values.shape, generator=torch.Generator().manual_seed(1))


def test_e4m3_in_blocks_has_the_values_of_mxfp8() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64) * torch.logspace(-30, 20, 64)[:, None]
    x[0, 0], x[1] = 448.0, 0.0
    wanted = qt.quantize(x, qt.MXFP8BlockScaling()).dequantize().float()
    assert torch.equal(rounded(x.reshape(-1), E4M3, None).view(64, 64), wanted)


@pytest.mark.parametrize(("grid", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_floats_are_rounded_as_torch_casts_them(grid: Grid, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 32) * torch.logspace(-6, 2, 512)[:, None]
    x[:, 0] = grid.largest  # every block has the scale 1
    assert torch.equal(rounded(x.reshape(-1), grid, None).view(512, 32), x.to(dtype).float())


@pytest.mark.parametrize("grid", [E4M3, E5M2, INT8, UINT8, U4M4])
def test_no_code_saturates_and_stochastic_rounding_has_the_right_mean(grid: Grid) -> None:
    torch.manual_seed(0)
    block = torch.rand(32) * 0.9
    block[0], block[1] = 1.0, 0.0
    many = block.repeat(20_000)
    found = rounded(many, grid, noise_like(many)).view(-1, 32)
    assert found.max() <= 1.01 * block.max()
    assert torch.all(found[:, 1] == 0)
    assert torch.allclose(found.mean(0), block, rtol=2e-3, atol=1e-4)
    nearest = rounded(block, grid, None)
    assert (nearest - block).abs().max() <= 1 / 16  # half a step of E5M2 below 1
    assert not torch.equal(nearest, block)


def test_positive_values_round_to_0_never() -> None:
    block = torch.tensor([1.0, 1e-12, 0.0] + 29 * [0.5])
    never = Grid(largest=448.0, mantissa=3, lowest=-6, never_zero=True)
    assert rounded(block, E4M3, None)[1] == 0
    for noise in (None, torch.zeros(32)):
        found = rounded(block, never, noise)
        assert found[1] == 2.0**-9 * 2.0**-8
        assert found[2] == 0
        assert torch.equal(found[3:], block[3:])


def test_bf16_is_rounded_in_the_mean_too() -> None:
    values = torch.full((100_000,), 1.001)
    found = in_bf16(values, noise_like(values))
    assert set(found.unique().tolist()) == {1.0, 1.0078125}
    assert found.mean().item() == pytest.approx(1.001, abs=1e-4)
    assert torch.equal(in_bf16(values, None), values.bfloat16().float())


def test_without_a_code_the_loop_is_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_training, "WARMUP", 2)
    plain = contenders.table()[f"fp32 | {PLAIN}"]
    theirs = optimizer_states.scratch(plain, 0, 4e-3, 3)["last"]
    ours = moment_codes.train("fp32 | none", 0, 3, 4e-3)["held_out"]
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_codes_of_moments_are_kept_and_only_missing_runs_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_codes, "EVERY", 2)
    path = tmp_path / "codes.json"
    asked: dict[str, Any] = {"steps": 4, "rate": 4e-3}
    said: list[str] = []
    moment_codes.answer(path, wanted=["fp32 | none"], seeds=[0], say=said.append, **asked)
    wanted = ["fp32 | none", "E4M3 of root | stochastic", "int8 | nearest", "bf16 | stochastic"]
    results = moment_codes.answer(path, wanted=wanted, seeds=[0], say=said.append, **asked)
    assert len(said) == len(wanted)
    assert list(json.loads(path.read_text())["runs"]) == wanted
    errors = {name: results["runs"][name]["0"] for name in wanted}
    assert errors["fp32 | none"]["m once"] == 0
    assert 0 < errors["bf16 | stochastic"]["m once"] < errors["int8 | nearest"]["m once"] < 0.05
    assert all(each["m carried"] >= each["m once"] for each in errors.values())
    assert "| int8 | nearest |" in moment_codes.markdown(results)
    with pytest.raises(ValueError, match="give another --out"):
        moment_codes.answer(path, wanted=[], seeds=[], say=said.append, **{**asked, "steps": 5})


def test_the_table_has_baselines_and_says_why_a_row_cannot_run() -> None:
    rows = contenders.table()
    assert all(row.baseline in rows and rows[row.baseline].weights == row.weights for row in rows.values())
    assert {f"{weights} | {FULL}" for weights in ("bf16", "mxfp8", "nvfp4")} <= set(rows)
    assert contenders.lacks_options(check_replicas="", fused_step="") is None
    assert contenders.lacks_options(fused_step="", nonsense="") == "MasterWeightOptimizer has no nonsense"
    assert contenders.lacks_package("no_such_package") == "the package no_such_package is not installed"
    known = contenders.unsupported([rows[BASELINES[0]], contenders.compressed("bf16", "remainder", "float8")])
    assert BASELINES[0] not in known


def test_updates_of_moments_in_8_bits_add_up_to_those_in_fp32() -> None:
    """The root is right in the mean, so its square is above it by the variance of rounding: a few percent."""
    torch.manual_seed(0)
    rows, columns, steps = 32, 128, 300
    sizes = torch.exp(1.5 * torch.randn(rows, columns)) * 1e-4
    means = 0.1 * sizes * torch.randn(rows, columns)
    way, wanted, m, v, m_8, v_8 = torch.zeros(6, rows, columns)
    first = torch.zeros(1, dtype=torch.int32)
    for step in range(1, steps + 1):
        gradient = means + sizes * torch.randn(rows, columns)
        for total, one, two in ((wanted, m, v), (way, m_8, v_8)):
            one.lerp_(gradient, 0.1)
            two.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            total.add_(one / (1 - 0.9**step) / ((two / (1 - 0.999**step)).sqrt() + 1e-8))
        for number, (moment, root) in enumerate(((m_8, False), (v_8, True))):
            at = Positions(row_keys(key_of(0, number, step), torch.arange(rows)), first)
            moment.copy_(decode_moment(encode_moment(moment, at, root=root), root=root))
    assert torch.all(v_8 > 0)
    assert (v_8 / v).mean().item() == pytest.approx(1.04, abs=0.02)
    assert ((way * wanted).sum() / wanted.square().sum()).item() == pytest.approx(1.008, abs=0.006)
    assert torch.cosine_similarity(way.flatten(), wanted.flatten(), 0) > 0.99


def root_of_right_square(root: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Up or down on the grid of E4M3, so that the mean of the squares is exact; for normal numbers alone."""
    mantissa, exponent = torch.frexp(root)
    low = torch.ldexp(torch.floor(mantissa * 16) / 16, exponent)
    high = low + torch.ldexp(torch.full_like(root, 1 / 16), exponent)
    up = noise < (root.square() - low.square()) / (high.square() - low.square())
    return torch.where(up, high, low)


def test_a_mean_of_squares_that_is_right_would_make_updates_longer_still() -> None:
    """1 / sqrt(v) is convex: what scatters around the right v divides by too little in the mean, more so than now."""
    torch.manual_seed(0)
    size, steps, found = 8192, 300, {}
    sizes = torch.exp(1.5 * torch.randn(size)) * 1e-4
    means = 0.1 * sizes * torch.randn(size)
    for right in ("root", "square"):
        way, wanted, m, v, kept = torch.zeros(5, size)
        for step in range(1, steps + 1):
            gradient = means + sizes * torch.randn(size)
            m.lerp_(gradient, 0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            root = (0.999 * kept.square() + 0.001 * gradient.square()).sqrt()
            for total, divisor in ((wanted, v.sqrt()), (way, root)):
                total.add_(m / (1 - 0.9**step) / (divisor / (1 - 0.999**step) ** 0.5 + 1e-8))
            noise = torch.rand(size)
            kept = rounded(root, E4M3, noise) if right == "root" else root_of_right_square(root, noise)
        found[right] = ((kept.square() / v).mean().item(), (torch.dot(way, wanted) / wanted.square().sum()).item())
    assert found["root"] == pytest.approx((1.036, 1.009), abs=0.006)
    assert found["square"] == pytest.approx((1.0, 1.024), abs=0.006)


def test_moments_are_bf16_values_after_each_step() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = AdamWWithBf16Moments([param], lr=0.1)
    param.grad = torch.linspace(0.1, 1, 8)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.state[param][name]
        assert moment.dtype == torch.float32
        assert torch.equal(moment, moment.bfloat16().float())
        assert moment.min() > 0


def test_a_code_for_each_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 32)
    for recipe in (qt.MXFP8BlockScaling(), qt.NVFP4BlockScaling()):
        quantized = qt.quantize(weight, recipe)
        before = optimizer_states.codes_of(quantized)
        changed = weight.clone()
        changed[3, 5] *= -1
        after = optimizer_states.codes_of(qt.quantize(changed, recipe))
        assert (before != after).nonzero().tolist() == [[3 * 32 + 5]]


@pytest.mark.parametrize("weights", ["bf16", "mxfp8", "nvfp4"])
def test_masters_kept_as_remainders_begin_and_go_as_those_in_fp32(weights: contenders.Weights) -> None:
    rows, masters = contenders.table(), {}
    for name in (f"{weights} | {FULL}", contenders.compressed(weights, "remainder", "fp32").name):
        model = optimizer_states.model_for(rows[name], 0)
        optimizer = optimizer_states.optimizer_for(rows[name], model, 1e-4)
        for _ in optimizer_states.steps_of(model, optimizer, 0, [1e-4] * 2, name):
            pass
        assert all(qt.high_precision_init_val(param) is None for param in model.parameters())
        masters[name] = torch.cat([contenders.master_of(optimizer, param).reshape(-1) for param in model.parameters()])
    theirs, ours = masters.values()
    # a lattice of 16 to 18 bits of mantissa; without values from before quantizing they would be 3 % apart
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_what_survives_of_an_update() -> None:
    codes = torch.arange(4)
    baseline = {"way": torch.tensor([3.0, 0.0, 4.0, 0.0]), "before": codes, "after": codes + 1}
    assert optimizer_states.compared(baseline, baseline) == {
        "cosine": 1.0,
        "projection": 1.0,
        "codes_differ": 0.0,
        "codes_moved": 1.0,
    }
    other = {"way": torch.tensor([3.0, 4.0, 0.0, 0.0]), "before": codes, "after": torch.tensor([1, 1, 2, 3])}
    found = optimizer_states.compared(other, baseline)
    assert found == pytest.approx({"cosine": 0.36, "projection": 0.36, "codes_differ": 0.75, "codes_moved": 0.25})
    still = {**other, "way": torch.zeros(4)}
    assert optimizer_states.compared(still, baseline)["projection"] == 0


@pytest.fixture
def few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of a few steps, with their tensors in a folder of their own; the file for their figures."""
    few = {"RUNS": tmp_path, "EVERY": 2, "RATES": (2e-3, 4e-3), "SEEDS": (0,), "SMALL_STEPS": 3}
    for name, value in few.items():
        monkeypatch.setattr(optimizer_states, name, value)
    monkeypatch.setattr(small_training, "HELD_OUT", 16)
    return tmp_path / "states.json"


def test_runs_are_kept_and_not_made_again(few_steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--steps", "4", "--seeds", "0", "--rates", "1", "--out", str(few_steps)]
    optimizer_states.main([*common, "--questions", "rates", "scratch", "--only", BASELINES[0]])
    first = json.loads(few_steps.read_text())
    assert list(first["rates"]) == ["0.002", "0.004"]
    assert list(first["scratch"]) == BASELINES[:1]
    capsys.readouterr()
    optimizer_states.main([*common, "--only", *BASELINES, PLAIN_BF16])
    said = capsys.readouterr().out
    assert f"scratch / {BASELINES[0]}" not in said
    assert said.count("CPU seconds") == 5  # two curves and three answers to small-rate
    results = json.loads(few_steps.read_text())
    assert results["scratch"][BASELINES[0]] == first["scratch"][BASELINES[0]]
    small = results["small-rate"]
    assert small[BASELINES[0]]["cosine"] == small[BASELINES[1]]["cosine"] == 1
    # bf16 weights keep next to nothing of such steps, masters all of it
    assert small[PLAIN_BF16]["projection"] < 0.2
    assert small[PLAIN_BF16]["codes_differ"] > 0
    table = few_steps.with_suffix(".md").read_text()
    assert "| bf16 | no masters, torch AdamW | 4 |" in table
    assert few_steps.with_suffix(".png").stat().st_size > 1000
    with pytest.raises(ValueError, match="give another --out"):
        optimizer_states.main(["--steps", "5", "--out", str(few_steps)])


def test_differences_are_taken_seed_by_seed() -> None:
    def runs(**last: float | None) -> dict[str, Any]:
        return {seed: {"last": loss, "held_out": {"2": loss}} for seed, loss in last.items()}

    name = contenders.compressed("bf16", "remainder", "float8").name
    scratch = {
        # seed 2 of the baseline and seed 3 of the other have no partner
        BASELINES[0]: {"1": runs(s0=1.0, s1=3.0, s2=9.0), "3": runs(s0=2.0, s1=None)},
        name: {"1": runs(s0=1.1, s1=3.3, s3=7.0), "3": runs(s0=1.8, s1=4.0)},
    }
    shown = optimizer_states_report.markdown({"settings": {"steps": 2}, "scratch": scratch})
    wanted = "4.06 | 3.8000 (3) | 5.9000 | +0.1000, +0.3000 | +0.2000 ± 0.1000 | 2.9000 (2) | 2.2000 | -0.2000 |  |"
    assert wanted in shown
    assert "| 12 | 4.3333 (3) | 8.0000 |  |  | 1 of 2 diverged |  |  |  |" in shown
    # +0.1, +0.3 and -0.2: a standard deviation of 0.2517, over the root of 3
    assert '| masters="remainder", moments="float8" | 3 | 2 | +0.0667 ± 0.1453 |' in shown


def test_curves_are_compared_at_the_steps_that_all_have() -> None:
    def run(**held_out: float) -> dict[str, Any]:
        found = {step.removeprefix("at"): loss for step, loss in held_out.items()}
        return {"steps": 9, "step_seconds": 1.0, "first_step_seconds": 2.0, "held_out": found}

    name = contenders.compressed("bf16", "remainder", "float8").name
    runs = {BASELINES[0]: run(at25=3.5, at50=2.5, at100=1.5), name: run(at25=3.25, at50=2.25)}
    shown = optimizer_states_report.markdown({"settings": {"steps": 2}, "finetune": runs})
    assert "| weights | states | step 25 | step 50 |\n" in shown
    assert '| masters="remainder", moments="float8" | 3.2500 | 2.2500 |' in shown
    assert "1.5" not in shown.partition("Held-out")[2]


def test_a_rate_that_is_given_is_not_looked_for(few_steps: Path) -> None:
    asked = ["--steps", "4", "--seeds", "0", "--rates", "1", "--rate", "1e-3", "--out", str(few_steps)]
    optimizer_states.main([*asked, "--questions", "scratch", "--only", BASELINES[0]])
    results = json.loads(few_steps.read_text())
    assert "rates" not in results
    assert results["settings"]["rate"] == 1e-3
    assert list(results["scratch"][BASELINES[0]]) == ["1"]


def test_no_run_is_started_when_time_is_up(few_steps: Path) -> None:
    optimizer_states.main(["--steps", "4", "--minutes", "0", "--out", str(few_steps)])
    assert "scratch" not in json.loads(few_steps.read_text())


def test_what_cannot_be_asked_is_listed_and_the_next_is_asked(tmp_path: Path) -> None:
    asking = optimizer_states.Asking(tmp_path / "states.json", {}, 1.0, "command")

    def refuse() -> None:
        raise NotImplementedError("a master is kept otherwise")

    assert asking.fill(["small-rate", "one"], refuse) is None
    assert asking.fill(["small-rate", "two"], lambda: 2) == 2
    assert asking.results["not_run"] == {"small-rate / one": "a master is kept otherwise"}
    assert asking.results["small-rate"] == {"two": 2}
