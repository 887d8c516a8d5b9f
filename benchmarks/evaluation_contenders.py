"""Who is compared by benchmarks/evaluation.py: formats, algorithms of layerwise, and those of other libraries.

All calibrate the same model on the same tokens, and quantize every linear but the output projection. The others run in
a process of their own (benchmarks/evaluation_peers.py), llm-compressor with a Python of its own.
"""

import copy
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qtensor as qt
from layerwise import AWQ, GPTAQ, GPTQ, Algorithm, LocalHessian, Max, Mse, Qronos, SmoothQuant, calibrate
from qtensor.spec.recipes import Recipe

BATCH = 8  # rows

# INT4 has no engine that quantizes inputs to 4 bits, so it is judged with weights alone.
FORMATS: dict[str, Recipe] = {
    "NVFP4": qt.NVFP4BlockScaling(activations="dynamic"),
    "MXFP4": qt.MXFP4BlockScaling(activations="dynamic"),
    "INT4 g32": qt.Int4GroupScaling(group=32),
    "MXFP8": qt.MXFP8BlockScaling(activations="dynamic"),
    "Float8 row": qt.Float8CurrentScaling(granularity="row", activations="dynamic"),
}
FOUR_BITS = ("NVFP4", "MXFP4", "INT4 g32")

OURS: dict[str, Algorithm] = {
    "Max": Max(),
    "Mse": Mse(),
    "LocalHessian": LocalHessian(),
    "AWQ": AWQ(),
    "GPTQ old defaults": GPTQ(damping=0.01, act_order=False, scales=Max()),
    "GPTQ": GPTQ(),
    "GPTAQ": GPTAQ(),
    "GPTAQ in full": GPTAQ(alpha=1.0),
    "Qronos": Qronos(),
    "Qronos in full": Qronos(alpha=1.0),
    "Qronos local Hessian, descent": Qronos(scales=LocalHessian(), descent=1),
    "Qronos local Hessian, descent 4": Qronos(scales=LocalHessian(), descent=4),
    "GPTQ descent": GPTQ(descent=1),
    "GPTQ local Hessian": GPTQ(scales=LocalHessian()),
    "GPTQ SmoothQuant": GPTQ(smoothing=SmoothQuant()),
    "GPTQ AWQ": GPTQ(smoothing=AWQ()),
}
OF_EIGHT_BITS = ("Max", "Mse", "GPTQ")
OVER_SIZES = ("AWQ", "GPTQ old defaults", "GPTQ")  # in NVFP4, on each number of tokens

# (library, format) -> its algorithms. ModelOpt's kernels for NVFP4 and MXFP4 need a GPU, so it is asked for INT4 only.
PEERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("ModelOpt", "INT4 g32"): ("gptq", "mse", "awq_full"),
    ("llm-compressor", "NVFP4"): ("GPTQ", "GPTQ nvfp4_expanded_mse", "memoryless_mse"),
    ("llm-compressor", "MXFP4"): ("GPTQ",),
    ("llm-compressor", "INT4 g32"): ("GPTQ", "GPTQ memoryless_mse"),
}


class NotRunError(Exception):
    """A contender that cannot run here, and why."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A format, an algorithm (of a library where it is not ours), and how many tokens it calibrates on."""

    format: str
    algorithm: str
    tokens: int

    @property
    def name(self) -> str:
        """As in the table and on the command line."""
        return f"{self.format} | {self.algorithm} | {self.tokens}"

    @property
    def library(self) -> str | None:
        """Whose algorithm it is, None for ours."""
        first, _, rest = self.algorithm.partition(": ")
        return first if rest else None


def table(sizes: tuple[int, ...]) -> list[Contender]:
    """All contenders; every one on the middle size, and some in NVFP4 on the others."""
    middle = sizes[len(sizes) // 2]
    rows = [Contender("NVFP4", name, size) for size in sizes for name in OVER_SIZES if size != middle]
    for name in FORMATS:
        ours = OURS if name in FOUR_BITS else OF_EIGHT_BITS
        rows += [Contender(name, algorithm, middle) for algorithm in ours]
        for (library, of), algorithms in PEERS.items():
            rows += [Contender(name, f"{library}: {each}", middle) for each in algorithms if of == name]
    return rows


def calibrated(contender: Contender, dense: nn.Module, rows: Tensor, peers_python: Path | None) -> nn.Module:
    """A copy of the model with the weights that the contender's stored bytes decode to.

    Args:
        contender: see the class.
        dense: the model.
        rows: token ids [n, seq_len], from which the first `contender.tokens` are taken.
        peers_python: the Python in whose environment llm-compressor is.

    Raises:
        NotRunError: it cannot run here.
        ValueError: there are fewer tokens than wanted.
    """
    if rows.numel() < contender.tokens:
        raise ValueError(f"{contender.name}: the text has {rows.numel()} tokens, fewer than {contender.tokens}")
    taken = rows[: -(-contender.tokens // rows.shape[1])]
    model = copy.deepcopy(dense)
    if contender.library is not None:
        return _by_peer(contender, model, taken, peers_python)
    calibrate(
        model,
        [{"input_ids": ids, "use_cache": False, "logits_to_keep": 1} for ids in taken.split(BATCH)],
        recipe=FORMATS[contender.format].stored,
        algorithm=OURS[contender.algorithm],
        exclude=("lm_head",),
        progress=False,
    )
    return model


def _by_peer(contender: Contender, model: Any, rows: Tensor, peers_python: Path | None) -> nn.Module:
    """The model with the weights that the peer's process leaves in a file."""
    python = Path(sys.executable) if contender.library == "ModelOpt" else peers_python
    if python is None or not python.exists():
        raise NotRunError("llm-compressor needs an environment of its own; name its Python by --peers-python")
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        model.save_pretrained(where / "dense")
        save_file({"ids": rows.contiguous()}, where / "ids.safetensors")
        task = dataclasses.asdict(contender) | {"library": contender.library, "threads": torch.get_num_threads()}
        (where / "task.json").write_text(json.dumps(task), encoding="utf-8")
        command = [str(python), "-m", "benchmarks.evaluation_peers", str(where)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
        if done.returncode:
            raise NotRunError(f"{contender.name}: {done.stderr.strip().splitlines()[-1:]}")
        left = load_file(where / "weights.safetensors")
    with torch.no_grad():
        for name, weight in left.items():
            model.get_parameter(name).copy_(weight)
    return model


def quantizing_inputs(model: nn.Module, names: list[str], recipe: Recipe) -> list[Any]:
    """Makes these linears round their inputs as recipe.activations="dynamic" does; `remove()` what it returns.

    Each row (token) is rounded by itself; NVFP4 has one global scale a row.
    """
    from qtensor.numerics import kernels
    from qtensor.products.dynamic import quantize_rows

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        flat = inputs[0].flatten(0, -2)  # [tokens, K]
        values = kernels.decode(quantize_rows(flat, recipe), recipe.of_rows, torch.float32)
        return (values.view_as(inputs[0]), *inputs[1:])

    return [model.get_submodule(name).register_forward_pre_hook(rounded) for name in names]
