"""docs/speed.md says what is so: its code runs; the step that warms caches takes every kernel of a real one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_hooks.kernels import compiled
from fsdp_hooks.kernels.compiled import Kernel
from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, QuantizedTensor, quantized_model_init, use_kernels
from tests.docs.pages import namespace, page
from tests.ranks import run_ranks

PAGE = page("speed.md")


def real_step() -> None:
    """A step of layers of other shapes, large enough for every kernel, and small ones that are stacked."""
    with quantized_model_init(NVFP4BlockScaling()):
        widths = (1024, 1024, 128, 512, 128, 512, 128)
        pairs = itertools.pairwise(widths)
        layers = nn.Sequential(*[nn.Linear(*pair, bias=False, dtype=torch.bfloat16) for pair in pairs])
    fully_shard(layers)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, layers.parameters())
    layers(torch.ones(2, 1024, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


def run_page() -> None:
    """All blocks; calls of compiled kernels are recorded, and run eagerly, since a compiler takes minutes."""
    called: set[str] = set()

    def recorded(kernel: Kernel, args: tuple[Any, ...], *_: Any) -> Any:
        called.add(kernel.eager.__name__)
        return kernel.eager(*args)

    names = namespace(weight=torch.ones(512, 512, dtype=torch.bfloat16))
    with pytest.MonkeyPatch.context() as patch, use_kernels("auto"):
        patch.setattr(Kernel, "_run", recorded)
        PAGE.run(names, only=[0])
        assert isinstance(names["q"], QuantizedTensor)
        assert use_kernels.mode == "eager"
        assert {name.partition("_")[0] for name in called} == {"encode"}
        called.clear()

        PAGE.run(names, only=[1])
        assert use_kernels.mode == "compiled"
        warmed = called.copy()
        called.clear()
        use_kernels("auto")
        patch.setattr(compiled, "COMPILED_FROM", 2**16)  # of a digest: words of 8 bytes, each of 16 elements
        real_step()
        assert {name.partition("_")[0] for name in called} == {"amax", "encode", "decode", "digest"}
        assert {name for name in called if "of_rows" in name}, "nothing was stacked"
        assert called <= warmed
        called.clear()

        PAGE.run(names, only=[2])
        assert {name.partition("_")[0] for name in called} == {"encode"}
        assert len(PAGE.python) == 3


def test_the_code_of_the_page_runs() -> None:
    run_ranks(1, run_page)
