"""Launches of the fused step's kernels; the first one imports Triton."""

import torch
from torch import Tensor

from qtensor.numerics.triton_kernels.launching import ELEMENTS, launch
from qtensor.optim.fused import kernel
from qtensor.optim.fused.decision import TILE, Output
from qtensor.optim.fused.tasks import Kind


def step(kind: Kind, table: Tensor, owner: Tensor, amax: Tensor) -> None:
    """Do the tasks of a kind; `owner` int32 [programs]: the row of each; `amax`: int32 bits of fp32, a slot each."""
    output = kind.output
    grads = {"GRADS": ELEMENTS[kind.grads], "ALIGNED_GRADS": kind.aligned}
    programs, given = owner.numel(), (table, table.view(torch.float32), owner)
    if output.long:
        deep = 1 if output.square == 1 else TILE // output.lanes
        launch(
            kernel.step_long,
            programs,
            *given,
            RULE=kind.rule.name,
            MULTIPLE=output.multiple,
            SQUARE=output.square,
            DEEP=deep,
            WIDE=TILE // deep,
            OPTIONS=int(output.options),
            num_warps=output.warps,
            **grads,
        )
        return
    launch(
        kernel.step,
        programs,
        *given,
        amax,
        RULE=kind.rule.name,
        FORMAT=output.format,
        ELEMENT=ELEMENTS.get(output.element, ELEMENTS[torch.float32]),
        LANES=output.lanes,
        MULTIPLE=output.multiple,
        SQUARE=output.square,
        TILE=output.tile,
        OPTIONS=int(output.options),
        num_warps=output.warps,
        **grads,
    )


def encode_under(output: Output, table: Tensor, owner: Tensor, amax: Tensor) -> None:
    """Write the parts of shards under `amax`, fp32, a slot each."""
    launch(
        kernel.encode_under,
        owner.numel(),
        *(table, owner, amax),
        FORMAT=output.format,
        LANES=output.lanes,
        MULTIPLE=output.multiple,
        SQUARE=output.square,
        TILE=output.tile,
        OPTIONS=int(output.options),
        num_warps=output.warps,
    )
