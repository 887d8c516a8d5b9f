"""What does training through the quantization buy? SmolLM2-135M in NVFP4 after equal tokens: PTQ, QAT and QAD.

    python -m benchmarks.qat                                # written to benchmarks/results/, about 12 minutes
    python -m benchmarks.qat --steps 2 --layers 2 --seq-len 16 --eval-blocks 2 --out runs/qat    # to try it

    dense   nothing is quantized, trained on the text
    PTQ     that model, quantized at each evaluation: its training knows nothing of NVFP4
    QAT     NVFP4 in every forward, trained on the text (storage="high_precision")
    QAD     NVFP4 in every forward, trained to give the next-token probabilities of the dense model of step 0

Everything else is the same in all of them: initial weights, batches and their order, AdamW, one rank with gloo and
FSDP2. What surrounds the NVFP4 weights is fp32: a CPU without instructions for bf16 takes far longer for its products.

Two figures on held-out text: the next-token loss, and the KL divergence from the dense model of step 0. Training on the
text may lower the first and raise the second, so they ask different things: how well the text is predicted, and how
much of the original model is left.

At the end each quantized model is exported and read back, q, k and v under one global scale as engines want it.
"""

import argparse
import dataclasses
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from transformers import LlamaForCausalLM

import qtensor as qt
from benchmarks.machine import machine_and_versions
from dcp_adapters import export_hf, import_hf
from fsdp_hooks import sync_scales

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import finetune  # noqa: E402
import smollm2  # noqa: E402

RECIPE = qt.NVFP4BlockScaling()
COLOURS = {"dense": "black", "PTQ": "C3", "QAT": "C0", "QAD": "C2"}
Losses = dict[str, list[float]]  # "loss" and "kl", in nats, a value for each held-out block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs share. The learning rate is that of the loss curves; it was not tuned for any of these."""

    steps: int = 40
    batch: int = 2
    seq_len: int = 64
    lr: float = 3e-5
    warmup: int = 5
    seed: int = 0
    eval_every: int = 10
    eval_blocks: int = 12
    eval_seq_len: int = 64
    layers: int = 30  # of the model's 30, to try things out


def sharded_model(settings: Settings, storage: str | None = None) -> LlamaForCausalLM:
    """The model without its values, one FSDP group a layer; `storage` None: nothing is quantized."""
    config = smollm2.config()
    config.num_hidden_layers = settings.layers
    quantized = qt.quantized_model_init(RECIPE, storage=storage or "quantized", enabled=storage is not None)
    with torch.device("meta"), quantized:
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)  # one gather a step; the values are the same
    fully_shard(model, reshard_after_forward=False)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its table was on the meta device, too
    return model


def pretrained(settings: Settings, storage: str | None = None) -> LlamaForCausalLM:
    """The same with the pretrained weights."""
    model = sharded_model(settings, storage)
    finetune.load_pretrained(model)
    return model


class Questions:
    """The held-out blocks [n, seq_len], and what the dense model of step 0 answers."""

    def __init__(self, blocks: Tensor, teacher: LlamaForCausalLM) -> None:
        self.blocks = blocks
        with torch.no_grad():  # each [4, seq_len, vocabulary]
            self.answers = [teacher(input_ids=batch).logits for batch in blocks.split(4)]

    @torch.no_grad()
    def asked(self, model: LlamaForCausalLM) -> Losses:
        """The model's next-token loss, and KL(teacher || model), of each block."""
        found: Losses = {"loss": [], "kl": []}
        for batch, answers in zip(self.blocks.split(4), self.answers, strict=True):
            mine = F.log_softmax(model(input_ids=batch).logits, dim=-1)
            found["loss"] += F.nll_loss(mine[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none").mean(1).tolist()
            found["kl"] += divergence(F.log_softmax(answers, dim=-1), mine).mean(1).tolist()
        return found


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) in nats of each token, from log-probabilities [.., vocabulary]."""
    return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)


def text_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Next-token loss on the text."""
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def distillation_loss(teacher: LlamaForCausalLM) -> Callable[[LlamaForCausalLM, Tensor], Tensor]:
    """A loss of (model, batch): the divergence from the teacher."""

    def loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
        with torch.no_grad():
            answers = F.log_softmax(teacher(input_ids=batch).logits, dim=-1)
        return divergence(answers, F.log_softmax(model(input_ids=batch).logits, dim=-1)).mean()

    return loss


def train(
    name: str,
    model: LlamaForCausalLM,
    loss_of: Callable[[LlamaForCausalLM, Tensor], Tensor],
    settings: Settings,
    evaluate: Callable[[int], None],
) -> float:
    """An ordinary loop; calls `evaluate(step)` before the first step and at times. Returns the seconds a step took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    rows = smollm2.token_blocks(smollm2.tokenizer(), settings.seq_len)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
    sync_scales(model)
    evaluate(0)
    seconds = 0.0
    for step in tqdm(range(settings.steps), desc=name, unit="step", mininterval=5):
        began = time.perf_counter()
        batch = rows[order[torch.arange(step * settings.batch, (step + 1) * settings.batch) % len(order)]]
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / settings.warmup)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        sync_scales(model)
        seconds += time.perf_counter() - began
        if (step + 1) % settings.eval_every == 0 or step + 1 == settings.steps:
            evaluate(step + 1)
    return seconds / settings.steps


def exported(quantized: LlamaForCausalLM, settings: Settings) -> LlamaForCausalLM:
    """What is read back of an export, q, k and v (gate and up) under one global scale."""
    with tempfile.TemporaryDirectory() as directory:
        path = export_hf(quantized, Path(directory) / "out", fused_scales="requantize", progress=False)
        return read_back(path, settings)


def read_back(path: Path, settings: Settings) -> LlamaForCausalLM:
    """The quantized model of a directory."""
    model = sharded_model(settings, "quantized")
    import_hf(path, model, progress=False)
    return model


def quantized_from(model: LlamaForCausalLM, settings: Settings) -> LlamaForCausalLM:
    """The bytes that quantizing a model's weights gives."""
    made = sharded_model(settings, "quantized")
    made.load_state_dict(model.state_dict())
    return made


def run(settings: Settings) -> dict[str, Any]:
    """All runs; every curve as {step: Losses}, and the seconds of a step."""
    teacher = pretrained(settings)
    held_out = smollm2.token_blocks(smollm2.tokenizer(), settings.eval_seq_len, split="heldout")
    questions = Questions(held_out[: settings.eval_blocks], teacher)
    curves: dict[str, dict[int, Losses]] = {name: {} for name in COLOURS}
    seconds, deployed = {}, {}

    model = pretrained(settings)

    def dense_and_quantized(step: int) -> None:
        curves["dense"][step] = questions.asked(model)
        curves["PTQ"][step] = questions.asked(quantized_from(model, settings))

    seconds["dense"] = train("dense", model, text_loss, settings, dense_and_quantized)
    deployed["PTQ"] = questions.asked(exported(quantized_from(model, settings), settings))
    for name, loss_of in (("QAT", text_loss), ("QAD", distillation_loss(teacher))):
        model = pretrained(settings, "high_precision")

        def through_the_quantization(step: int, name: str = name, model: LlamaForCausalLM = model) -> None:
            curves[name][step] = questions.asked(model)

        seconds[name] = train(name, model, loss_of, settings, through_the_quantization)
        deployed[name] = questions.asked(exported(quantized_from(model, settings), settings))
    return {"seconds_a_step": seconds, **summary(curves, deployed)}


def summary(curves: dict[str, dict[int, Losses]], deployed: dict[str, Losses]) -> dict[str, Any]:
    """Means over the held-out blocks, and differences from PTQ at the last step with their standard errors.

    The standard error is that of the mean difference over the blocks, pairwise. It says how much the choice of blocks
    matters, and nothing of the choice of data order.
    """
    last = max(curves["PTQ"])
    means = {name: {step: _means(losses) for step, losses in curve.items()} for name, curve in curves.items()}
    against = {
        name: {kind: _difference(curves[name][last][kind], curves["PTQ"][last][kind]) for kind in curves[name][last]}
        for name in ("QAT", "QAD")
    }
    exports = {name: _means(losses) for name, losses in deployed.items()}
    return {"curves": means, "minus_ptq": against, "exported": exports}


def _means(losses: Losses) -> dict[str, float]:
    return {kind: round(statistics.fmean(values), 5) for kind, values in losses.items()}


def _difference(mine: list[float], other: list[float]) -> dict[str, float]:
    gaps = [a - b for a, b in zip(mine, other, strict=True)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    return {"mean": round(statistics.fmean(gaps), 5), "standard_error": round(error, 5)}


def markdown(figures: dict[str, Any]) -> str:
    """A table of the two figures at each evaluation, and those of the exports."""
    curves = figures["curves"]
    steps = list(curves["PTQ"])
    lines = [f"| {' | '.join(['', *(f'step {step}' for step in steps), 'minus PTQ', 'exported'])} |"]
    lines += [f"|---|{'---:|' * (len(steps) + 2)}"]
    for kind, title in (("loss", "loss"), ("kl", "KL from the dense model of step 0")):
        for name, curve in curves.items():
            cells = [f"{curve[step][kind]:.4f}" for step in steps]
            gap = figures["minus_ptq"].get(name)
            cells.append(f"{gap[kind]['mean']:+.4f} ± {gap[kind]['standard_error']:.4f}" if gap else "")
            cells.append(f"{figures['exported'][name][kind]:.4f}" if name in figures["exported"] else "")
            lines.append(f"| {' | '.join([f'{name}, {title}', *cells])} |")
    return "\n".join(lines)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Both figures against the step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    titles = {"loss": "held-out loss", "kl": "KL from the dense model of step 0"}
    for each, (kind, title) in zip(axes, titles.items(), strict=True):
        for name, curve in figures["curves"].items():
            steps = [int(step) for step in curve]
            each.plot(steps, [at[kind] for at in curve.values()], marker=".", color=COLOURS[name], label=name)
        each.set(title=f"SmolLM2-135M in NVFP4, {title}", xlabel="optimizer step", ylabel="nats per token")
        each.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the results")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    about = {"command": "python -m benchmarks.qat", "settings": dataclasses.asdict(settings), **machine_and_versions()}
    began = time.perf_counter()
    figures = json.loads(json.dumps({**about, **run(settings)}))  # steps as they are read again: words
    figures["seconds"] = round(time.perf_counter() - began, 1)
    dist.destroy_process_group()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"{dt.date.today().isoformat()}-qat-smollm2-135m.json"
    out.write_text(json.dumps(figures, indent=2) + "\n")
    draw(figures, out.with_suffix(".png"))
    print(f"{markdown(figures)}\n\nwritten to {out} and .png")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
