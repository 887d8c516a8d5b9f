"""Layerwise calibration: quantize a model layer by layer, sharded, resumable on any number of ranks."""

from layerwise.algorithms.algorithm import Algorithm, Decision, Group, Inputs, Linear, Smoothing
from layerwise.algorithms.awq import AWQ
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.local_hessian import LocalHessian
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.smoothquant import SmoothQuant
from layerwise.calibrate import calibrate
from layerwise.events import Event
from layerwise.result import CalibrationResult

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
    "SmoothQuant",
    "Smoothing",
    "calibrate",
]
