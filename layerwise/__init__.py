"""Layerwise calibration: quantize a model layer by layer, sharded, resumable on any number of ranks.

    calibrate         the call: plan -> run -> result, modules of running/
    search_formats    the call that chooses a recipe for each weight, by the same run through the layers
    rotate            the calls that rotate weights, before any of them is quantized, and inputs at run time

Folders; each imports only from those above it:

    algorithms/   decide how weights are quantized: pure mathematics
    formats/      which format each weight gets: a decision over plain records
    stages/       the layers, the weights to quantize in them, and the stages they are calibrated in
    weights/      how a stage gets its weights and gives them back, and whether somebody wrote into them
    statistics/   what reaches linears: watched, summed exactly, reduced over ranks
    inputs/       what layers are called with: recorded from the model, replayed batch by batch
    folding/      finds where column factors can go by probing, and folds them there
    rotating/     rotates weights so that blocks hold them better, if that can be shown to be exact
    report/       the error of each linear, measured and shown
    resume/       the identity of a run, and its state on disk
    running/      plans a run, checks that all ranks agree on it, and takes it through its stages
    command/      the command line, `python -m layerwise`; on top of `calibrate`

Words: docs/glossary.md.
"""

from layerwise.algorithms.algorithm import Algorithm, Decision, Group, Inputs, Linear, Smoothing
from layerwise.algorithms.awq import AWQ
from layerwise.algorithms.gptaq import GPTAQ
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.local_hessian import LocalHessian
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.qronos import Qronos
from layerwise.algorithms.smoothquant import SmoothQuant
from layerwise.calibrate import calibrate
from layerwise.formats.assignment import Assignment
from layerwise.formats.candidates import Candidate, LinearErrors, LinearGroup
from layerwise.report.report import LinearReport, Report
from layerwise.rotate import RotationReport, rotate_, rotate_inputs_
from layerwise.running.events import Event
from layerwise.running.kv_cache import KVCache
from layerwise.running.result import CalibrationResult
from layerwise.search_formats import search_formats

__all__ = [
    "AWQ",
    "GPTAQ",
    "GPTQ",
    "Algorithm",
    "Assignment",
    "CalibrationResult",
    "Candidate",
    "Decision",
    "Event",
    "Group",
    "Inputs",
    "KVCache",
    "Linear",
    "LinearErrors",
    "LinearGroup",
    "LinearReport",
    "LocalHessian",
    "Max",
    "Mse",
    "Qronos",
    "Report",
    "RotationReport",
    "SmoothQuant",
    "Smoothing",
    "calibrate",
    "rotate_",
    "rotate_inputs_",
    "search_formats",
]
