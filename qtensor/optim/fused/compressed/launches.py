"""Launches of the kernels; the first one imports Triton."""

import torch
from torch import Tensor

from qtensor.numerics.triton_kernels.launching import ELEMENTS, launch
from qtensor.optim.fused.compressed import kernel
from qtensor.optim.fused.compressed.decision import TILE, TURNS
from qtensor.optim.fused.compressed.tasks import Kind

LEFT_OVER = 1024  # programs, at most, of the launch for tiles that are left over


def step(kind: Kind, table: Tensor, owner: Tensor) -> None:
    """Do the tasks of a kind; `owner` int32 [programs]: the row of each."""
    form, programs = kind.form, owner.numel()
    given = table, table.view(torch.float32), table.view(torch.int32), owner
    constants = {
        "WEIGHT": form.weight,
        "DRAWN": form.drawn,
        "GRADS": ELEMENTS[kind.grads],
        "ALIGNED_GRADS": kind.aligned,
        "TILE": TILE,
        "WIDTH": form.width,
        "TURNS": TURNS,
    }
    if not form.usual:
        constants |= {"MOMENTS": form.moments, "MULTIPLE": form.multiple}
        launch(kernel.step, programs, *given, **constants, num_warps=1)
        return
    left_over = torch.empty(1 + 2 * TURNS * programs, dtype=torch.int32, device=table.device)
    left_over[:1].zero_()
    launch(kernel.step_usual, programs, *given, left_over, **constants, num_warps=1)
    launch(kernel.step_left, min(programs, LEFT_OVER), *given, left_over, **constants, num_warps=1)
