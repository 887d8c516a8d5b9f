"""How large the error of a stage is: its linears on sample rows of their inputs, and its output on one batch.

    signal = |X W^T|^2      noise = |X (Q - W)^T|^2      SNR = 10 log10(signal / noise), energies summed over ranks

W are the weights that scales were decided for (after folding, before rounding), and X is the input that goes with them.
Each rank measures what it has. These are figures for a report; no decision depends on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import device_of
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.inputs.values.structure import flatten
from layerwise.report.report import LinearReport, decibels
from layerwise.stages.targets import Target
from layerwise.statistics.collector import Collector
from layerwise.statistics.statistics import Facts


@dataclass(frozen=True)
class StageFigures:
    """The figures of one stage: a record for each 2-D weight, and the SNR of its output; None if nobody had a batch."""

    records: tuple[LinearReport, ...] = ()
    output_snr: float | None = None


class Yardstick:
    """Measures one stage.

    Call `note` for each batch, `set_reference`, then, when the weights are quantized, `compare` for each batch and
    `make_figures`.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets
        self.rows: dict[str, Tensor] = {}  # name -> sample rows [r, K]
        self.products: dict[str, Tensor] = {}  # name -> rows times the weight, [r, N]
        self.amax: dict[str, Tensor] = {}
        self.output: list[Tensor] | None = None  # of the first batch
        self.energies = torch.zeros(2, dtype=torch.float64, device="cpu")  # of the output: signal, noise

    def note(self, batch: int, output: Any) -> None:
        """Remember the output of the first batch."""
        # One batch is enough for a figure, and all outputs would take as much memory as the inputs that wait.
        if batch == 0:
            self.output = [leaf.detach().clone() for leaf in _floating_leaves(output)]

    def set_reference(self, collector: Collector, factors: Mapping[str, Tensor]) -> None:
        """Take the present weights for the reference; `factors`: what inputs have been divided by since `note`."""
        for target in self.targets:
            for name, weight in target.matrices():
                self.amax[name] = weight.abs().amax()
                rows = collector.samples(name)
                if rows is not None:
                    # Sampled before smoothing, so not yet divided as the smoothed weight's inputs are.
                    self.rows[name] = rows / factors[name].to(rows.dtype) if name in factors else rows
                    # The product is kept, not a copy of the weight, which is about to be overwritten.
                    self.products[name] = _product(self.rows[name], weight)

    def compare(self, batch: int, output: Any) -> None:
        """Add up the error of the first batch's output, compared with the one remembered."""
        if batch == 0 and self.output is not None:
            for right, found in zip(self.output, _floating_leaves(output), strict=True):
                self.energies += _energies(right, found)
            self.output = None

    def make_figures(
        self,
        facts: Sequence[Facts],
        notes: Mapping[str, Mapping[str, Any]],
        layer: int | None,
        group: dist.ProcessGroup | None,
    ) -> StageFigures:
        """Return the figures of the present weights; one all-reduce."""
        names = [name for target in self.targets for name in target.linears()]
        energies = {name: torch.zeros(2, dtype=torch.float64, device="cpu") for name in names}
        for target in self.targets:
            for name, weight in target.matrices():
                if name in self.rows:
                    energies[name] = _energies(self.products[name], _product(self.rows[name], weight))
        # Energies are added over ranks, and not ratios: a rank without a batch adds zeros.
        together = torch.stack([self.energies, *energies.values()])  # [1 + linears, 2]
        if group is not None:
            together = together.to(device_of(group))
            dist.all_reduce(together, group=group)
        inputs = {name: one for one in facts for name in one.names}
        # No signal: no rank had rows for it, and nothing was measured.
        snr = [decibels(signal, noise) if signal else None for signal, noise in together.tolist()]
        records = []
        for name, own_snr in zip(names, snr[1:], strict=True):
            own = inputs[name]
            records.append(
                LinearReport(
                    layer=layer,
                    name=name,
                    tokens=own.tokens,
                    weight_amax=float(self.amax[name]),
                    input_amax=None if own.amax is None else float(own.amax),
                    snr_db=own_snr,
                    **{key: notes[name].get(key) for key in ("clip", "alpha", "warning")},
                )
            )
        return StageFigures(tuple(records), snr[0])


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    # TF32 would add an error of its own, which is not that of the weights.
    with full_precision(rows.device):
        return rows.float() @ weight.float().T


def _energies(right: Tensor, found: Tensor) -> Tensor:
    """Return fp64 [2] on the CPU: the energies of `right`, and of the difference between `found` and `right`."""
    signal, noise = right.double(), found.double() - right.double()
    return torch.stack([signal.square().sum(), noise.square().sum()]).cpu()


def _floating_leaves(output: Any) -> list[Tensor]:
    leaves, _ = flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
