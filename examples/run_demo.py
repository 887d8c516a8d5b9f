"""The main job on a real model, on this machine: quantize, shard, train, checkpoint, resume elsewhere, bit for bit.

    python examples/run_demo.py --recipe mxfp8

Three launches of examples/finetune.py on CPU + gloo: the same run in bf16 and quantized on two ranks, then a resume of
the quantized one on a single rank from the checkpoint that was written while training went on. Ends with the two runs
side by side. All three multiply bf16 matrices alike: in bf16, or in fp32 where a probe finds that much faster
(examples/cpu_products.py). Each of them writes how far it is to log.txt in its directory, and without a terminal it
prints the same lines.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_products import Products, probe
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
ROWS = (
    ("bytes per parameter at rest, all", "bytes_per_param_all", "{:.3f}", 1),
    ("bytes per parameter at rest, linear weights", "bytes_per_param_linear", "{:.3f}", 1),
    ("MiB received per all-gather round, per rank", "gathered_bytes_per_round", "{:.1f}", MIB),
    ("MiB of weights on disk", "weight_bytes_on_disk", "{:.1f}", MIB),
    ("seconds async_save blocked training", "async_save_blocked_s", "{:.2f}", 1),
    ("held-out loss before", "loss_before", "{:.4f}", 1),
    ("held-out loss after", "loss_after", "{:.4f}", 1),
)


def launch(ranks: int, recipe: str, out: Path, *options: str) -> dict[str, Any]:
    """One torchrun of the fine-tuning example; returns its report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / "examples" / "finetune.py"), "--recipe", recipe, "--out", str(out), *options]
    # one thread a rank; quiet start-up of third-party packages, whose notices say nothing about this run
    quiet = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(command, check=True, env={**os.environ, **quiet})
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def main() -> None:
    """Run the three launches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("float8", "mxfp8", "nvfp4"), default="mxfp8")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--eval-blocks", type=int, default=4)
    parser.add_argument("--resumed-steps", type=int, default=3, help="steps after the checkpoint, on the single rank")
    parser.add_argument("--layers", type=int, help="only so many of the model's, to try things out")
    parser.add_argument("--products", choices=("bf16", "fp32"), help="of bf16 matrices; default: the faster by a probe")
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    args = parser.parse_args()
    products = Products(kind=args.products) if args.products else probe()
    alike = ["--seq-len", str(args.seq_len), "--eval-blocks", str(args.eval_blocks), "--products", products.kind]
    alike += ["--layers", str(args.layers)] if args.layers else []
    steps = ("--steps", str(args.steps), *alike)
    console = Console()
    shutil.rmtree(args.out, ignore_errors=True)

    console.print(f"Products of bf16 matrices: {products}.")
    console.print(f"[bold]1/3[/] SmolLM2-135M in bf16, 2 ranks, {args.steps} steps")
    bf16 = launch(2, "bf16", args.out / "bf16", *steps)
    console.print(f"[bold]2/3[/] the same in {args.recipe}")
    quantized = launch(2, args.recipe, args.out / args.recipe, *steps)
    console.print(
        f"[bold]3/3[/] resumed on 1 rank from {Path(quantized['checkpoint']).name}, saved while training went on"
    )
    resumed_steps = ("--steps", str(args.steps // 2 + args.resumed_steps), *alike)
    resumed = launch(1, args.recipe, args.out / "resumed", "--resume", quantized["checkpoint"], *resumed_steps)

    table = Table(
        title="SmolLM2-135M, AdamW on fp32 masters, 2 ranks, CPU + gloo",
        caption=f"products of bf16 matrices: {products}",
    )
    for column, justify in (("", "left"), ("bf16", "right"), (args.recipe, "right"), ("ratio", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for label, key, shape, unit in ROWS:
        values = [report[key] / unit for report in (bf16, quantized)]
        ratio = f"{values[1] / values[0]:.3f}" if "loss" not in key and "blocked" not in key else ""
        table.add_row(label, *(shape.format(value) for value in values), ratio)
    console.print(table)
    console.print(
        f"resumed on 1 rank: {resumed['compared_bytes'] / MIB:.1f} MiB of payloads, scales and other weights equal the "
        f"checkpoint's, byte for byte; held-out loss {resumed['loss_before']:.4f} -> {resumed['loss_after']:.4f}"
    )
    (args.out / "demo.json").write_text(
        json.dumps({"bf16": bf16, args.recipe: quantized, "resumed": resumed}, indent=2)
    )


if __name__ == "__main__":
    main()
