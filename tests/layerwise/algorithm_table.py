"""The algorithms that tests share, with what is known of each: a new algorithm is one line here.

Tests that must hold for all of them loop over ALGORITHMS; where a case is slow, over MAIN. What only one algorithm
promises stands in a file of its own in algorithms/.
"""

from __future__ import annotations

import dataclasses

import pytest

from layerwise import AWQ, GPTAQ, GPTQ, Algorithm, LocalHessian, Max, Mse, Qronos, SmoothQuant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """One algorithm.

    quick: it, with options that keep a test short. alone: whose bytes it comes to without data. matrices: how many
    fp32 [K, K] it holds of an input; one more for the unquantized model's. onward: layers are calibrated by default on
    outputs of the quantized layer. main: it is run where a case is slow; the others take no statistics of their own.
    """

    quick: Algorithm
    alone: Algorithm
    matrices: int = 0
    onward: bool = False
    main: bool = True


TABLE = {
    "Max": Facts(quick=Max(), alone=Max()),
    "Mse": Facts(quick=Mse(), alone=Mse(), main=False),
    "LocalHessian": Facts(quick=LocalHessian(), alone=Mse(), main=False),
    "SmoothQuant": Facts(quick=SmoothQuant(), alone=Max()),
    "AWQ": Facts(quick=AWQ(alpha_step=0.25, clip_step=0.25), alone=Max(), matrices=1),
    "GPTQ": Facts(quick=GPTQ(), alone=Mse(), matrices=1, onward=True),
    "GPTAQ": Facts(quick=GPTAQ(), alone=Mse(), matrices=2, onward=True),
    "Qronos": Facts(quick=Qronos(), alone=Mse(), matrices=2, onward=True),
}
ALGORITHMS = {name: facts.quick for name, facts in TABLE.items()}
MAIN = {name: facts.quick for name, facts in TABLE.items() if facts.main}
PAIRED = {name: facts.quick for name, facts in TABLE.items() if facts.matrices == 2}  # they run two models in step

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=[*ALGORITHMS])
main_algorithms = pytest.mark.parametrize("algorithm", MAIN.values(), ids=[*MAIN])


def on_scales_of_max(algorithm: Algorithm) -> Algorithm:
    """The same, without a search for scales if it has one."""
    searches = "scales" in {field.name for field in dataclasses.fields(algorithm)}
    return dataclasses.replace(algorithm, scales=Max()) if searches else algorithm  # type: ignore[call-arg]
