"""The source that vLLM's weight transfer takes, against the interface as vLLM documents it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_adapters import WeightStream, vllm_source
from tests.dcp_adapters.streams.cases import CONFIG, assert_same, quantized, sharded, streamed
from tests.ranks import run_ranks

SEAM = "vllm.distributed.weight_transfer.base"


@dataclass(frozen=True)
class ParamMeta:
    """As vLLM has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    """As vLLM has it."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Any: ...

    def held_names(self) -> Any:
        return None


def seam(monkeypatch: pytest.MonkeyPatch, **has: Any) -> None:
    for depth in range(1, 5):
        name = ".".join(SEAM.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in has.items():
        setattr(sys.modules[SEAM], name, value)


def test_a_source_says_and_hands_out_what_the_stream_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seam(monkeypatch, WeightSource=WeightSource, ParamMeta=ParamMeta)
    stream = WeightStream(quantized("mxfp8"), config=CONFIG, bucket_bytes=3000)
    source = vllm_source(stream)
    assert isinstance(source, WeightSource)
    assert source.held_names() is None
    for version in (1, 2):  # a fresh pass each time
        pairs = list(source)
        assert [name for name, _ in pairs] == [each.name for each in source.metadata()]
        assert stream.version == version
    assert_same(dict(pairs), streamed(stream))
    numbers = [name.split(".")[1] for name, _ in pairs if name.startswith("layers.")]
    assert numbers == sorted(numbers)  # all names of a layer one after the other


def test_a_vllm_without_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seam(monkeypatch)
    with pytest.raises(ImportError, match=r"has no WeightSource; vllm_source needs vLLM 0\.28 or newer"):
        vllm_source(WeightStream(quantized("mxfp8"), config=CONFIG))


def _helps() -> None:
    with pytest.MonkeyPatch.context() as patch:
        seam(patch, WeightSource=WeightSource, ParamMeta=ParamMeta)
        stream = WeightStream(sharded(quantized("mxfp8")), config=CONFIG)
        source = vllm_source(stream)
        pairs = list(source)
        assert [name for name, _ in pairs] == [each.name for each in source.metadata()]
        assert all((tensor is None) == (dist.get_rank() == 1) for _, tensor in pairs)
        assert source.held_names() == (None if dist.get_rank() == 0 else frozenset())


def test_a_rank_that_helps_has_no_tensor_under_any_name() -> None:
    run_ranks(2, _helps)
