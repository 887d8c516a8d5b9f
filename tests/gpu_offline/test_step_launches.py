"""What a step of MasterWeightOptimizer launches on a GPU, on tensors of the CPU that are taken for those of a GPU.

Kernels written by hand are noted and not run, so that digests are those of nothing: no weight is written by others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_hooks.kernels import digest
from qtensor import MasterWeightOptimizer, quantize
from qtensor.optim import batches, inner_step, masters
from tests.gpu_offline.recipes import RECIPES

MOST = 22  # of a step, for a model of one dtype; in docs/speed.md
DIGESTS = Counter({"clone": 2, "digest_triton._add_digests": 2, "eq": 1})  # what others wrote, what the step wrote


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """The launches inside: of kernels written by hand, and of torch's operations."""
    from tests.gpu_offline.emitted import Launching
    from tests.gpu_offline.measured import Launch, _Operations, on_gpu
    from tests.gpu_offline.written import launches_go_to

    found: list[Launch] = []

    def note(kernel: Any, args: tuple[Any, ...]) -> None:
        found.append(Launch(kernel.name, 0))

    as_on_gpu = {
        "BY_HAND_ON": frozenset({"cpu"}),
        "_stream_to_launch_on": mock.Mock(return_value=0),
        "_proven": {torch.device("cpu")},
    }
    with (
        on_gpu(Launching(note)),
        launches_go_to(note),
        mock.patch.multiple(digest, is_watched=mock.Mock(return_value=False), **as_on_gpu),
        mock.patch.object(masters, "BY_ROW", frozenset()),
        mock.patch.object(inner_step, "CHUNK", {}),
        _Operations(found),
    ):
        yield found


def step_of(name: str, count: int) -> Counter[str]:
    """The launches of a step behind the first ones, in which every weight is written."""
    params = [nn.Parameter(quantize(torch.randn(64, 64, dtype=torch.bfloat16), RECIPES[name])) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(64, 64, dtype=torch.bfloat16)
    with counted() as found:
        optimizer = MasterWeightOptimizer(torch.optim.RMSprop, params, lr=0.1, foreach=True)
        for _ in range(2):
            optimizer.step()
        optimizer._fresh.clear()  # their bytes were never made, so none can be told to have moved
        del found[:]
        optimizer.step()
        return Counter(launch.name for launch in found if not launch.name.startswith("_record_function"))


@pytest.mark.parametrize("name", ["mxfp8_row", "nvfp4_row", "float8_row", "float8_tensor"])
def test_a_step_of_many_small_weights_launches_what_one_of_a_few_does(name: str) -> None:
    few, many = step_of(name, 4), step_of(name, 200)
    assert few == many
    assert few.total() <= MOST
    assert few >= DIGESTS
    assert few["digest_triton._add_digests"] == DIGESTS["digest_triton._add_digests"]


def test_digests_of_large_weights_take_one_launch_too() -> None:
    with mock.patch.object(batches, "SMALL", 0):
        few, many = step_of("mxfp8_row", 2), step_of("mxfp8_row", 20)
    assert {launch: many[launch] for launch in DIGESTS} == dict(DIGESTS)
    assert many.total() - few.total() <= 18 * 3  # each more is encoded, and its two parts are copied
