"""Layerwise calibration: quantize a model layer by layer, sharded, resumable on any number of ranks.

    calibrate    the call: plan -> run -> result, modules of running/

Folders, each of which knows those above it only:

    algorithms/   what decides about weights: pure mathematics
    stages/       what of a model is calibrated together: layers, weights to quantize, stages
    weights/      how a stage gets its weights and gives them back, and whether somebody wrote into them
    statistics/   what reaches linears: watched, summed exactly, reduced over ranks
    inputs/       what layers are called with: recorded from the model, replayed batch by batch
    folding/      where column factors can go: found by probing, and folded
    report/       what became of each linear, in figures
    resume/       what a run is, and its state on disk
    running/      a run: planned, agreed on by all ranks, taken through its stages
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
