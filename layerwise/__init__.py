"""Layerwise calibration: quantize a model layer by layer, sharded, resumable on any number of ranks.

    calibrate -> plan -> run -> stage -> outcome -> result    the way of a call, a module each

    algorithms/   what decides about weights: pure mathematics
    inputs/       what layers are called with: recorded from the model, replayed batch by batch
    statistics/   what reaches linears: watched, summed exactly, reduced over ranks
    folding/      where column factors can go: found by probing, and folded
    weights/      how a stage gets its weights and gives them back
    resume/       what a run is, and its state on disk
    report/       what became of each linear, in figures

Beside them: targets (which weights), guard (who wrote into them), events (what a callback is told), alike (ranks go on
together or raise together).
"""

from layerwise.algorithms.algorithm import Algorithm, Decision, Group, Inputs, Linear, Smoothing
from layerwise.algorithms.awq import AWQ
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.local_hessian import LocalHessian
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.smoothquant import SmoothQuant
from layerwise.calibrate import calibrate
from layerwise.report.report import Report
from layerwise.running.events import Event
from layerwise.running.result import CalibrationResult

__all__ = [
    "AWQ",
    "GPTQ",
    "Algorithm",
    "CalibrationResult",
    "Decision",
    "Event",
    "Group",
    "Inputs",
    "Linear",
    "LocalHessian",
    "Max",
    "Mse",
    "Report",
    "SmoothQuant",
    "Smoothing",
    "calibrate",
]
