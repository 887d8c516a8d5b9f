"""The history of a delayed scale that came from a file, which holds the scale alone.

A step makes its scale from earlier amaxes. So the history begins with the amax that gives this scale, and the first
step after an import continues with the imported scale. If several amaxes give it, a bf16 number is preferred, as
weights mostly are bf16.
"""

import torch
from torch import Tensor

from qtensor.formats.float8_delayed import FORMAT, Float8DelayedScaling

NEAR = (0, 1, -1, 2, -2)  # units in the last place


def history_of(scale: Tensor, recipe: Float8DelayedScaling) -> Tensor:
    """Return fp32 [amax_history_len]: an amax whose scale is `scale`, or next to it if no amax gives it; then zeros.

    Args:
        scale: fp32 [].
        recipe: the target's.
    """
    one = torch.ones((), dtype=torch.float32, device=scale.device)
    per_amax = FORMAT.grid(recipe, {"amax": one})[1]  # the scale of amax 1
    nearest = (scale.double() / per_amax.double()).float()
    candidates = [
        nearest.bfloat16().float(),
        *((nearest.view(torch.int32) + step).view(torch.float32) for step in NEAR),
    ]
    exact = (amax for amax in candidates if torch.equal(FORMAT.grid(recipe, {"amax": amax})[1], scale))
    amax = next(exact, nearest)
    return torch.nn.functional.pad(amax.reshape(1), (0, recipe.amax_history_len - 1))
