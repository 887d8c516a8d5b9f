"""What qtensor and fsdp_hooks log: nothing unless asked, and never in code that torch.compile traces."""

import functools
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_hooks import sync_scales, unsharded
from fsdp_hooks.kernels import compiled
from fsdp_hooks.kernels.compiled import Kernel
from fsdp_hooks.ranks import exchange
from qtensor import (
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize_,
    quantized_model_init,
    use_kernels,
)
from qtensor.model import log
from tests.ranks import run_ranks

PACKAGES = ("qtensor", "fsdp_hooks")


def net() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    model[2].weight = model[1].weight
    return model


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Those of our packages."""
    own = [record for record in caplog.records if record.name.partition(".")[0] in PACKAGES]
    return [(record.name, record.levelname, record.getMessage()) for record in own]


@pytest.fixture
def everything(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    for name in PACKAGES:
        caplog.set_level(logging.DEBUG, name)
    return caplog


def test_what_becomes_quantized_and_what_stays_dense(everything: pytest.LogCaptureFixture) -> None:
    quantize_(net(), MXFP8BlockScaling())
    name, recipe = "qtensor.model.log", MXFP8BlockScaling()
    told = f"quantize_: 1 weights as {recipe}, 8192 bytes before and {64 * 64 + 64 * 2} after; linears that stay dense"
    assert lines(everything) == [
        (name, "INFO", f"{told}: 2 tied"),
        (name, "DEBUG", "quantize_: 1 stays dense: tied"),
        (name, "DEBUG", "quantize_: 2 stays dense: tied"),
    ]


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_what_is_built_quantized(everything: pytest.LogCaptureFixture, storage: str) -> None:
    with quantized_model_init(MXFP8BlockScaling(), storage=storage):
        nn.Linear(64, 64, dtype=torch.bfloat16)
        kept = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16), nn.LayerNorm(32))
    assert len(kept) == 2
    ((name, level, text),) = lines(everything)
    assert (name, level) == ("qtensor.model.log", "INFO")
    assert text.startswith("quantized_model_init: 1 weights as ")  # the other is gone
    assert text.endswith(f"{64 * 32 * 2} bytes before and {64 * 32 + 2 * 32} after; linears that stay dense: none")


def test_who_wrote_between_two_steps(everything: pytest.LogCaptureFixture) -> None:
    model = net()
    quantize_(model, MXFP8BlockScaling())
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    everything.clear()
    optimizer.step()
    assert lines(everything) == []
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.step()
    assert [text for *_, text in lines(everything)] == [
        "1 parameters were written by others since the last step; their masters start anew"
    ]


def test_loads_of_dense_values(everything: pytest.LogCaptureFixture) -> None:
    dense, model = net(), net()
    quantize_(model, MXFP8BlockScaling())
    everything.clear()
    model.load_state_dict(dense.state_dict())
    assert [text for *_, text in lines(everything)] == [
        "load_state_dict: 1 dense values were quantized, the first for 0.weight"
    ]


def kernel(name: str, monkeypatch: pytest.MonkeyPatch, code: Callable[..., Any]) -> Kernel:
    """A kernel whose compiled code is `code`."""
    made = Kernel(lambda x: x + 1, name)
    monkeypatch.setattr(made, "compiled_for", lambda args: code)
    monkeypatch.setattr(Kernel, "works", True)
    return made


def test_what_was_compiled(everything: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    adds = kernel("adds", monkeypatch, lambda x: x + 1)
    with use_kernels("compiled"):
        for _ in range(2):
            assert adds(torch.ones(2)).tolist() == [2.0, 2.0]
    ((name, level, text),) = lines(everything)
    assert (name, level) == ("fsdp_hooks.kernels.compiled", "INFO")
    assert text == "adds: its first call, on cpu, took 0.0 s (compiled by torch.compile)"


def test_what_failed_to_compile(everything: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no such instruction")

    fallen = kernel("fallen", monkeypatch, fails)
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1)
    with use_kernels("auto"), pytest.warns(UserWarning, match="torch.compile failed on fallen"):
        fallen(torch.ones(2))
    (record,) = everything.records
    assert record.getMessage() == "fallen failed, so other code takes its place"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no such instruction"


def agree_and_unshard() -> None:
    found: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.name}: {record.getMessage()}")

    logger, keeps = logging.getLogger("fsdp_hooks"), Keeps()
    logger.addHandler(keeps)
    logger.setLevel(logging.DEBUG)
    try:
        model = net()
        quantize_(model, NVFP4BlockScaling())
        fully_shard(model)
        with patch.object(exchange, "FIRST", exchange.HEADER + 1):
            sync_scales(model)
        with unsharded(model):
            size = sum(part.nbytes for part in model[0].weight.parts().values()) + model[1].weight.nbytes
    finally:
        logger.removeHandler(keeps)
        logger.setLevel(logging.NOTSET)
    assert isinstance(model[0].weight.to_local(), QuantizedTensor)
    second = "values do not fit into the first all-reduce, so there is a second one"
    assert found == [
        f"fsdp_hooks.ranks.exchange: sync_scales: 4 {second}",
        "fsdp_hooks.scale_sync: sync_scales: 1 weights agreed on the scales they share, by 2 all-reduces",
        f"fsdp_hooks.unshard: unsharded: 2 parameters of 1 FSDP modules, {size} bytes",
    ]


def test_agreement_and_gathers() -> None:
    run_ranks(2, agree_and_unshard)


def test_nothing_is_counted_for_lines_that_are_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "qtensor")

    def unwanted(*args: Any) -> None:
        raise AssertionError("counted, though nobody reads it")

    with patch.object(log, "specs_of", unwanted):
        quantize_(net(), MXFP8BlockScaling())
        with quantized_model_init(MXFP8BlockScaling()):
            nn.Linear(64, 64, dtype=torch.bfloat16)
    assert lines(caplog) == []


@functools.cache
def quantized() -> nn.Module:
    model = net()
    quantize_(model, MXFP8BlockScaling())
    return model


def test_no_line_is_within_code_that_is_traced(everything: pytest.LogCaptureFixture) -> None:
    """A call of a logger would break the graph, which raises with fullgraph=True."""
    model, x = quantized(), torch.ones(4, 64, dtype=torch.bfloat16)
    everything.clear()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
    assert lines(everything) == []
