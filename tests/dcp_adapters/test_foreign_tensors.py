"""Tensors of other libraries' classes, and tensors without bytes: saved as stock saves them, or refused by name."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from dcp_adapters import QuantizedSavePlanner, QuantizedStager, SafeFileSystemReader, export_hf
from dcp_adapters.plain.plain_memory import memory_of
from dcp_adapters.records.checksums import CHECKSUMS, checksum_table, chunk_key, digest_of, rows_of
from dcp_adapters.stored.verifying.verify import verify
from qtensor import quantize
from qtensor.tensor.quantized_tensor import QuantizedTensor
from tests.dcp_adapters.cases import RECIPES, alone, bits, load, placed, save, values
from tests.ranks import run_ranks

aten = torch.ops.aten
READERS = (dcp.FileSystemReader, SafeFileSystemReader)


class Coded(Tensor):
    """int8 codes and one scale that look like fp32: a wrapper subclass, as other libraries have them."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def values(self) -> Tensor:
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func is aten.copy_.default:
            return first._take(args[1]) if isinstance(first, Coded) else first.copy_(args[1].values())
        if func in (aten.detach.default, aten.alias.default):
            return cls(first.codes, first.scale)
        if func is aten.clone.default:
            return cls(first.codes.clone(), first.scale.clone())
        if func is aten.slice.Tensor:
            return cls(func(first.codes, *args[1:]), first.scale)
        if func is aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func}")

    def _take(self, source: Tensor) -> Coded:
        plain = source.values() if isinstance(source, Coded) else source
        self.scale.copy_(plain.abs().max() / 127)
        self.codes.copy_((plain / self.scale).round())
        return self


def coded(seed: int) -> Coded:
    codes = torch.arange(48, dtype=torch.int8).reshape(8, 6) + seed
    codes[0, 0] = 127
    return Coded(codes, torch.tensor(0.5 + seed))


@pytest.fixture
def known() -> Iterator[None]:
    with torch.serialization.safe_globals([Coded]):
        yield


def state(seed: int) -> dict[str, Any]:
    return {"coded": coded(seed), "w": quantize(values((8, 64), seed), RECIPES["mxfp8"]), "b": values((5,), seed)}


def assert_equal(held: dict[str, Any], seed: int) -> None:
    right = state(seed)
    assert bits(held["coded"].codes) == bits(right["coded"].codes)
    assert bits(held["coded"].scale) == bits(right["coded"].scale)
    assert bits(held["w"].payload) == bits(right["w"].payload)
    assert bits(held["b"]) == bits(right["b"])


@pytest.mark.usefixtures("known")
def test_they_are_saved_and_loaded_as_stock_does_beside_quantized_weights(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    save(state(0), ours)
    with alone():
        dcp.save({"coded": coded(0)}, checkpoint_id=stock)
    assert archive(ours) == archive(stock)
    for verified in (False, True):
        load(target := state(1), ours, verify_checksums=verified)
        assert_equal(target, 0)
    alone_again = {"coded": coded(1)}
    with alone():
        dcp.load(alone_again, checkpoint_id=ours)
    assert bits(alone_again["coded"].codes) == bits(coded(0).codes)
    load(dense := {"coded": torch.zeros(8, 6)}, ours, verify_checksums=True, allow_partial_load=True)
    assert torch.equal(dense["coded"], coded(0).values())


def archive(path: Path, entry: str = "coded") -> bytes:
    info = place(path, entry)
    return (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


def place(path: Path, entry: str) -> Any:
    stored = pickle.loads((path / ".metadata").read_bytes()).storage_data
    return next(info for index, info in stored.items() if index.fqn == entry)


def test_their_row_is_the_digest_of_their_archive_and_verify_compares_it(tmp_path: Path) -> None:
    save(state(0), tmp_path)
    table = torch.load(pathless(archive(tmp_path, CHECKSUMS)), weights_only=True)
    index = MetadataIndex("coded", (0, 0))
    rows = dict(rows_of(table))
    assert rows[chunk_key(index, archive=True)] == digest_of(pathless(archive(tmp_path)))
    assert chunk_key(index) not in rows
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert [found.entry for found in report.findings if "another library's class" in found.message] == [
        "coded at (0, 0)"
    ]
    info = place(tmp_path, "coded")
    file = tmp_path / info.relative_path
    data = bytearray(file.read_bytes())
    data[info.offset + info.length // 2] ^= 1
    file.write_bytes(data)
    (error,) = verify(tmp_path).errors
    assert error.entry == "coded at (0, 0)"
    assert "its bytes have changed" in error.message


def pathless(data: bytes) -> Any:
    import io

    return io.BytesIO(data)


def test_the_safe_reader_refuses_the_stored_class_by_name(tmp_path: Path) -> None:
    large = Coded(torch.ones(2, 2, dtype=torch.int8), torch.tensor(0.5))
    save({"coded": large, "b": values((5,), 0)}, tmp_path)
    target = {"coded": coded(1), "b": values((5,), 1)}
    with pytest.raises(BaseException, match=r"coded at \(0, 0\): refused at byte \d+: it holds the global torch"):
        load({"coded": Coded(torch.ones(2, 2, dtype=torch.int8), torch.tensor(9.0)), "b": target["b"]}, tmp_path,
             reader=SafeFileSystemReader(tmp_path))  # fmt: skip
    assert torch.equal(target["b"], values((5,), 1))


@pytest.mark.parametrize("reader", READERS)
def test_a_plain_tensor_is_loaded_into_one_of_them(reader: Any, tmp_path: Path) -> None:
    """As copy_ says, through a tensor of its own: there is no memory to read into."""
    save({"x": coded(0).values()}, tmp_path)
    target = {"x": coded(1)}
    load(target, tmp_path, reader=reader(tmp_path), verify_checksums=True)
    assert torch.equal(target["x"].values(), coded(0).values())


def stage_and_save(path: Path) -> None:
    stager = QuantizedStager()
    group = dist.new_group(backend="gloo")
    live = state(0)
    with torch.serialization.safe_globals([Coded]):
        saved = dcp.async_save(
            live, checkpoint_id=path, planner=QuantizedSavePlanner(), async_stager=stager, process_group=group
        )
        live["coded"].codes.zero_()
        live["coded"].scale.zero_()
        saved.result()
        load(target := state(1), path, verify_checksums=True)
    assert_equal(target, 0)
    stager.close()


def test_they_are_staged_as_copies_of_their_tensors(shared_tmp_path: Path) -> None:
    run_ranks(1, stage_and_save, shared_tmp_path)
    staged = QuantizedStager().stage({"coded": (live := coded(0))})["coded"]
    assert type(staged) is Coded
    assert staged.codes.data_ptr() != live.codes.data_ptr()


def test_they_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"coded\.weight is a Coded, of which an export knows no bytes"):
        export_hf({"coded.weight": coded(0)}, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


# -- tensors without bytes, or with other ones than their values -----------------------------------------------------


def freed() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT = {
    "meta": (lambda: torch.empty(3, device="meta"), "on the meta device, without data; materialise it"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a torch.sparse_coo tensor, which has no storage; save its to_dense"),
    "freed": (freed, "its storage was freed, as FSDP does with gathered weights; take the state dict"),
    "quantized meta": (
        lambda: quantize(torch.empty(8, 64, device="meta"), RECIPES["mxfp8"]),
        "on the meta device, without data; materialise it",
    ),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_what_has_no_bytes_is_refused_before_an_older_checkpoint_is_removed(kind: str, tmp_path: Path) -> None:
    make, text = WITHOUT[kind]
    save({"x": torch.ones(3)}, tmp_path)
    with pytest.raises(BaseException, match=re.escape(f"x: {text}")):
        save({"x": make()}, tmp_path)
    load(held := {"x": torch.zeros(3)}, tmp_path)
    assert torch.equal(held["x"], torch.ones(3))


def whole(value: Tensor) -> Tensor:
    return torch.zeros(value.shape, dtype=value.dtype)


VIEWS = {
    "conjugate": (lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(), whole),
    "negative": (lambda: torch._neg_view(torch.tensor([1.0, -2.0])), whole),
    "transposed": (lambda: torch.arange(12.0).reshape(3, 4).t(), whole),
    "every other": (lambda: torch.arange(12.0)[::2], whole),
    "expanded": (lambda: torch.ones(1).expand(5), whole),
    "torch's quantized": (
        lambda: torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.quint8),
        lambda _: torch.quantize_per_tensor(torch.zeros(6), 0.5, 1, torch.quint8),
    ),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning", "ignore:TypedStorage is deprecated")
def test_values_behind_a_view_are_those_that_are_digested_and_loaded(kind: str, tmp_path: Path) -> None:
    make, room = VIEWS[kind]
    save({"x": make()}, tmp_path)
    for reader in READERS[: 1 if kind == "torch's quantized" else 2]:
        target = {"x": room(make())}
        load(target, tmp_path, reader=reader(tmp_path), verify_checksums=True)
        assert torch.equal(target["x"], make())
    assert verify(tmp_path).ok


def test_the_memory_of_what_has_none_is_not_given_out() -> None:
    conj = torch.tensor([1 + 2j]).conj()
    for tensor in (
        coded(0),
        freed(),
        torch.empty(3, device="meta"),
        torch.ones(4)[::2],
        conj,
        torch.eye(2).to_sparse(),
    ):
        with pytest.raises(ValueError, match=r"has no contiguous bytes in memory|without memory: its storage was"):
            memory_of(tensor)
    assert bytes(memory_of(torch.ones(2, dtype=torch.uint8))) == b"\x01\x01"
    assert checksum_table([]).shape == (0, 16)


# -- DTensors inside ---------------------------------------------------------------------------------------------------


def quantize_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (1,))
    dense = placed(values((8, 64), 0), mesh, Replicate())
    with pytest.raises(TypeError, match=r"got a DTensor \(8, 64\) .*distribute_tensor\(quantize\(full, recipe\), mesh"):
        quantize(dense, RECIPES["mxfp8"])
    parts = {name: placed(part, mesh, Replicate()) for name, part in quantize(values((8, 64), 0), RECIPES["mxfp8"]).parts().items()}  # fmt: skip  # noqa: E501
    with pytest.raises(ValueError, match="is a DTensor; a DTensor goes around a quantized tensor"):
        QuantizedTensor.from_parts(parts, RECIPES["mxfp8"], torch.bfloat16)


def test_a_dtensor_is_not_quantized_into_its_parts() -> None:
    run_ranks(1, quantize_a_dtensor)
