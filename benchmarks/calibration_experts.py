"""The peak of memory while a layer of many experts is calibrated, in units of the layer's bytes.

    python -m benchmarks.calibration_experts [OUT.json]

The layer has 256 experts in bf16, in a list of modules (gate, up and down) or in two parameters [E, N, K], and every
token goes to two experts. What is counted are storages of tensors, at every operation, beside the model itself; the
layer counts, since one process calibrates a copy of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.live_storages import LiveStorages
from layerwise import AWQ, GPTQ, LocalHessian, Max, calibrate
from qtensor import NVFP4BlockScaling

EXPERTS, WIDE, HIDDEN = 256, 96, 64  # WIDE: inside an expert
TOKENS = 1024  # in a batch
ALGORITHMS: dict[str, Any] = {
    "Max": Max(),
    "LocalHessian": LocalHessian(),
    "AWQ": AWQ(alpha_step=0.5, clip_step=0.25),
    "GPTQ": GPTQ(),
}


class Expert(nn.Module):
    """Gate, up and down."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Listed(nn.Module):
    """A norm, and experts in a list; a token's place says which two it goes to."""

    def __init__(self, experts: int, hidden: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.experts = nn.ModuleList(Expert(hidden, wide) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        hidden, out = self.norm(x), torch.zeros_like(x)
        for number in range(len(self.experts)):
            places = _places(number, len(self.experts), x)
            if len(places):
                out.index_add_(0, places, self.experts[number](hidden[places]))
        return x + out


class Experts(nn.Module):
    """Two parameters [E, N, K]."""

    def __init__(self, experts: int, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * wide, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, wide))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


class Stacked(nn.Module):
    """The same with experts in two parameters."""

    def __init__(self, experts: int, hidden: int, wide: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(hidden), Experts(experts, hidden, wide)

    def forward(self, x: Tensor) -> Tensor:
        hidden, out = self.norm(x), torch.zeros_like(x)
        for number in range(len(self.experts.down_proj)):
            places = _places(number, len(self.experts.down_proj), x)
            if len(places):
                out.index_add_(0, places, self.experts(hidden[places], number))
        return x + out


def _places(expert: int, experts: int, x: Tensor) -> Tensor:
    """The tokens that go to an expert: two in `experts` that follow each other."""
    both = torch.arange(len(x), device=x.device)
    return both[(both % experts == expert) | ((both + 1) % experts == expert)]


KINDS = {"list": Listed, "one parameter": Stacked}


def model_of(kind: str, *, experts: int = EXPERTS, hidden: int = HIDDEN, wide: int = WIDE) -> nn.Sequential:
    """One layer, bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(KINDS[kind](experts, hidden, wide)).to(torch.bfloat16)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.normal_(std=param.shape[-1] ** -0.5)
    return model


def peak(kind: str, algorithm: Any, *, tokens: int = TOKENS, batches: int = 1, **sizes: int) -> tuple[int, int]:
    """Bytes at the peak, no more than a hundredth of the layer too few, and bytes of the layer."""
    model = model_of(kind, **sizes)
    hidden = model[0].norm.weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(tokens, hidden, generator=generator).bfloat16() for _ in range(batches)]
    layer = sum(param.nbytes for param in model.parameters())
    with LiveStorages(except_for=[*model.parameters(), *data], grain=layer // 100) as live:
        calibrate(model, data, recipe=NVFP4BlockScaling(), algorithm=algorithm, layers=["0"], progress=False)
    return live.peak, layer


def main(out: str = "") -> None:
    """Print a table; write the figures."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        for name, algorithm in ALGORITHMS.items():
            most, layer = peak(kind, algorithm)
            found.setdefault(kind, {})[name] = round(most / layer, 2)
            print(f"experts in {kind:14} {name:12} {most / layer:6.2f} of {layer / 2**20:.1f} MiB", flush=True)
    if out:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
