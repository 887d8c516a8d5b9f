"""What does planning a save cost with parts and a manifest, against stock DCP on the dense tensors?"""

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from benchmarks.timing import medians
from dcp_adapters import QuantizedSavePlanner
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize

TENSORS = 1000


def run() -> dict[str, float]:
    """Ratios of medians of set_up_planner + create_local_plan + create_global_plan for 1000 weights."""

    def plan(planner_type: type[DefaultSavePlanner], state_dict: dict[str, torch.Tensor]) -> object:
        planner = planner_type()
        planner.set_up_planner(state_dict, is_coordinator=True)
        return planner.create_global_plan([planner.create_local_plan()])

    names = [f"model.layers.{i}.weight" for i in range(TENSORS)]
    dense = {name: torch.zeros(32, 32, dtype=torch.bfloat16) for name in names}
    recipes = {"float8_row": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
    contenders = {"dense": lambda: plan(DefaultSavePlanner, dense)}
    for label, recipe in recipes.items():
        state_dict = {name: quantize(value, recipe) for name, value in dense.items()}
        contenders[label] = lambda state_dict=state_dict: plan(QuantizedSavePlanner, state_dict)
    seconds = medians(contenders, repeats=7)
    return {name: round(value / seconds["dense"], 2) for name, value in seconds.items()}
