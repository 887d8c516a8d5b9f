"""What docs/extending.md adds from outside lives as ours do: sharded, trained, saved, loaded, refused by name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import (
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    WeightStream,
    WeightStreamError,
    digest,
    export_hf,
    import_hf,
)
from dcp_adapters.cli.main import main
from dcp_adapters.hf.layouts.layout import KINDS, UNCALIBRATED, register_kind
from dcp_adapters.hf.layouts.registry import LAYOUTS
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.stored.verifying.verify import verify
from layerwise import Algorithm, Max
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantize, quantized_model_init
from qtensor.optim.compressed.masters import expand_master
from tests.dcp_adapters.cases import save
from tests.docs.pages import namespace, page
from tests.layerwise.small_runs import Case, bytes_of, found, model_of, run
from tests.qtensor.foreign import forget
from tests.ranks import run_ranks

FORMAT, LAYOUT, ALGORITHM, TRANSPORT = range(4)  # the blocks of the page
CONFIG = {"model_type": "tiny"}


@contextmanager
def extended(*blocks: int) -> Iterator[dict[str, Any]]:
    """What these blocks of the page define, known to the library inside."""
    names = page("extending.md").run(namespace(), only=blocks)
    try:
        yield names
    finally:
        if FORMAT in blocks:
            forget(names["Int8BlockScaling"])
        if LAYOUT in blocks:
            del LAYOUTS["int8-blocks"], KINDS["int8_block"], UNCALIBRATED["int8_block"]


def test_every_block_of_the_page_is_run() -> None:
    assert len(page("extending.md").python) == len(page("extending.md").blocks) == TRANSPORT + 1


def trained(recipe: Any, *, sharded: bool) -> nn.Module:
    torch.manual_seed(3)
    with quantized_model_init(recipe):
        model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32, bias=False))
    if sharded:
        fully_shard(model)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.linspace(-1, 1, 256).reshape(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _lives(folder: Path, world_size: int) -> str:
    with extended(FORMAT) as names:
        recipe = names["Int8BlockScaling"]()
        model = trained(recipe, sharded=world_size > 1)
        expected = digest(model)
        dcp.save(model.state_dict(), checkpoint_id=folder / f"{world_size}", planner=QuantizedSavePlanner())
        other = trained(recipe, sharded=world_size > 1)
        for p in other.parameters():
            p.detach().zero_()
        dcp.load(other.state_dict(), checkpoint_id=folder / f"{world_size}", planner=QuantizedLoadPlanner())
        assert digest(other) == expected
        with pytest.raises(ValueError, match="no layout has Int8BlockScaling yet; convert it first"):
            export_hf(model.state_dict(), folder / "exported")
        assert not (folder / "exported").exists()
        return expected


def test_a_format_from_outside_lives_as_ours_do(tmp_path: Path) -> None:
    one, two = run_ranks(1, _lives, tmp_path, 1), run_ranks(2, _lives, tmp_path, 2)
    assert {*one, *two} == {one[0]}  # the bytes of one process


def test_its_numbers_are_right(tmp_path: Path) -> None:
    with extended(FORMAT) as names:
        x = torch.randn(8, 64)
        q = quantize(x, names["Int8BlockScaling"]())
        step = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        assert ((q.dequantize() - x).unflatten(-1, (-1, 32)).abs() <= step / 2 * (1 + 2**-20)).all()
        x[3, 5] = torch.inf
        assert quantize(x, names["Int8BlockScaling"]()).dequantize().isnan().sum() == 32  # its block alone
        save({"w": q}, tmp_path / "saved")
        assert verify(tmp_path / "saved").findings == ()


def test_its_masters_may_be_remainders() -> None:
    with extended(FORMAT) as names:
        weight = nn.Parameter(
            quantize(torch.randn(32, 64) * torch.logspace(-9, 9, 32)[:, None], names["Int8BlockScaling"]())
        )
        optimizer = MasterWeightOptimizer(torch.optim.SGD, [weight], lr=0.1, masters="remainder")
        for _ in range(3):
            weight.grad = torch.randn(32, 64)
            optimizer.step()
            master = expand_master(weight, optimizer.state[weight]["master_remainder"])
            expected = quantize(master, weight.recipe).parts()
            assert all(torch.equal(part, expected[name]) for name, part in weight.detach().parts().items())


# -- a layout ----------------------------------------------------------------------------------------------------------


def _through_files(folder: Path, world_size: int) -> str:
    with extended(FORMAT, LAYOUT) as names:
        recipe = names["Int8BlockScaling"]()
        model = trained(recipe, sharded=world_size > 1)
        expected = digest(model)
        out = folder / f"{world_size}"
        export_hf(model.state_dict(), out, layout="int8-blocks", config=CONFIG, progress=False)
        other = trained(recipe, sharded=world_size > 1)
        for p in other.parameters():
            p.detach().zero_()
        import_hf(out, other, progress=False)
        assert digest(other) == expected
        for p in other.parameters():
            p.detach().zero_()
        reader, planner = HuggingFaceReader(out), QuantizedLoadPlanner()
        dcp.load(other.state_dict(), storage_reader=reader, planner=planner)
        assert digest(other) == expected
        return expected


def test_a_layout_from_outside_is_written_and_read(tmp_path: Path) -> None:
    one, two = run_ranks(1, _through_files, tmp_path, 1), run_ranks(2, _through_files, tmp_path, 2)
    assert {*one, *two} == {one[0]}
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "12"]
    assert files[0] == files[1]


def exported(names: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path]:
    """A state dict with a dense linear, and its directory."""
    state: dict[str, Any] = {"a.weight": quantize(torch.randn(32, 64), names["Int8BlockScaling"]())}
    state["b.weight"] = torch.randn(8, 64)
    return state, export_hf(state, folder, layout="int8-blocks", config=CONFIG, progress=False)


def test_its_directories_are_verified_and_its_json_is_compared(tmp_path: Path) -> None:
    with extended(FORMAT, LAYOUT) as names:
        state, out = exported(names, tmp_path / "out")
        report = verify_directory(out)
        assert (report.findings, report.tensors) == ((), 2)
        back = import_hf(out, progress=False)
        assert back["a.weight"].recipe == names["Int8BlockScaling"]()
        assert digest(back) == digest(state)
        assert main(["inspect", str(out)]) == main(["verify", str(out)]) == 0
        config = json.loads((out / "config.json").read_text())
        said = config["quantization_config"]
        assert said == {"quant_method": "int8-blocks", "block": 32, "ignore": ["b"]}
        for changed, told in (
            ({"ignore": ["a"]}, "int8_block weights with unquantized inputs, and config.json says that it is not"),
            ({"block": 64}, "config.json says blocks of 64, expected 32"),
            (
                {"quant_method": "other"},
                "its quant_method is 'other', .* it reads compressed-tensors, .*, int8-blocks,",
            ),
        ):
            (out / "config.json").write_text(json.dumps(config | {"quantization_config": said | changed}))
            with pytest.raises(ValueError, match=told):
                import_hf(out, progress=False)
            assert not verify_directory(out).ok


def test_it_refuses_what_it_does_not_have(tmp_path: Path) -> None:
    with extended(FORMAT, LAYOUT) as names:
        state = {"a.weight": quantize(torch.randn(32, 64), MXFP8BlockScaling())}
        told = "a: the layout int8-blocks has no mxfp8 weights with dynamic inputs; it has int8_block weights with"
        with pytest.raises(ValueError, match=re.escape(told)):
            export_hf(state, tmp_path / "out", layout="int8-blocks", config=CONFIG)
        mine = {"a.weight": quantize(torch.randn(32, 64), names["Int8BlockScaling"]())}
        with pytest.raises(ValueError, match="a: the layout compressed-tensors has no int8_block weights with unquant"):
            export_hf(mine, tmp_path / "out", config=CONFIG)
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match="the kind 'int8_block' is registered already"):
            register_kind("int8_block", MXFP8BlockScaling())
        with pytest.raises(ValueError, match="is of the kind 'mxfp8' already"):
            register_kind("mine", MXFP8BlockScaling(blocks="square"))


def test_forgotten_again_its_directories_are_refused(tmp_path: Path) -> None:
    with extended(FORMAT, LAYOUT) as names:
        _, out = exported(names, tmp_path / "out")
    with pytest.raises(ValueError, match="its quant_method is 'int8-blocks', which the library does not read"):
        import_hf(out, progress=False)


# -- an algorithm ------------------------------------------------------------------------------------------------------


def _calibrated(folder: Path) -> dict[str, Any]:
    with extended(FORMAT, ALGORITHM) as names:
        outcomes = {}
        for recipe in (NVFP4BlockScaling(), names["Int8BlockScaling"]()):
            case = Case(algorithm=names["Clipped"](keep=0.99), recipe=recipe)
            model, name = model_of(case), type(recipe).__name__
            outcomes[name] = found(run(model, case, checkpoint_dir=folder / name), model).same()
        return outcomes


def test_an_algorithm_from_outside_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    one, two = run_ranks(1, _calibrated, tmp_path / "1"), run_ranks(2, _calibrated, tmp_path / "2")
    assert one + two == [one[0]] * 3


def test_it_decides_what_is_rounded_and_says_what_it_cannot_take() -> None:
    with extended(ALGORITHM) as names:
        clipped: type[Algorithm] = names["Clipped"]
        results = {}
        for algorithm in (Max(), clipped(keep=1.0), clipped(keep=0.1)):  # type: ignore[call-arg]
            case = Case(algorithm=algorithm, recipe=MXFP8BlockScaling())
            result = run(model_of(case), case)
            results[repr(algorithm)] = {name: bytes_of(value) for name, value in result.state_dict().items()}
        same, whole, less = results.values()
        # With all magnitudes it is Max. In the other nine of ten are clipped: a scale is a power of two, which stays as
        # it is if few are, and torch's versions draw different weights.
        assert same == whole != less
        with pytest.raises(ValueError, match=r"Clipped: keep=0, expected a number above 0, at most 1"):
            clipped(keep=0)  # type: ignore[call-arg]


# -- a transport -------------------------------------------------------------------------------------------------------


@contextmanager
def sending(stream: WeightStream, sender: Any) -> Iterator[list[Exception]]:
    """A version on its way, in a thread of its own; what it raised, once the block is left."""
    raised: list[Exception] = []

    def send() -> None:
        try:
            stream.send(sender)
        except WeightStreamError as error:
            raised.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield raised
    thread.join(60)
    assert not thread.is_alive()


def received(receiver: Any) -> dict[str, torch.Tensor]:
    came: dict[str, torch.Tensor] = {}
    with receiver.receive() as weights:
        for tensors in weights:
            came |= tensors
    assert weights.came > 1
    return came


@contextmanager
def streaming() -> Iterator[tuple[nn.Module, WeightStream, Any, Any]]:
    """A model, its stream, and both ends of a mailbox."""
    with extended(FORMAT, LAYOUT, TRANSPORT) as names:
        model = trained(names["Int8BlockScaling"](), sharded=False)
        stream = WeightStream(model, layout="int8-blocks", config=CONFIG, bucket_bytes=1000)
        mailbox = names["Mailbox"](timeout=60)
        yield model, stream, names["MailboxSender"](mailbox), names["MailboxReceiver"](mailbox)


def test_a_transport_from_outside_brings_the_bytes_of_the_model() -> None:
    with streaming() as (model, stream, sender, receiver):
        for version in (1, 2):
            weights: dict[str, Any] = {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
            expected = {f"{name}.weight": p.parts()["payload"] for name, p in weights.items()}
            expected |= {f"{name}.weight_scale": p.parts()["scale"] for name, p in weights.items()}
            with sending(stream, sender) as raised:
                came = received(receiver)
            assert raised == []
            assert stream.version == receiver.version == version
            assert came.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in came.items())
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(3)


def test_a_version_that_fails_counts_for_nobody_and_the_next_one_comes() -> None:
    with streaming() as (_, stream, sender, receiver):
        with (
            sending(stream, sender) as raised,
            pytest.raises(WeightStreamError, match="had taken everything"),
            receiver.receive() as weights,
        ):
            next(iter(weights))
        assert "the receiver refused version 1: " in str(raised[0])
        assert (stream.version, receiver.version) == (0, 0)

        sender.begin(weights.announcement)
        sender.abort(RuntimeError("no more"))
        with pytest.raises(WeightStreamError, match="the sender gave up: no more"):
            received(receiver)

        sender.begin(weights.announcement)
        sender.bucket(next(iter(stream)))
        tensors, _ = sender.mailbox.there.queue[-1]
        next(iter(tensors.values())).view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(WeightStreamError, match="a bucket has other bytes than the sender's"):
            received(receiver)

        with sending(stream, sender) as raised:
            assert len(received(receiver)) == 4
        assert raised == []
        assert receiver.version == stream.version == 1
        sender.mailbox.timeout = 0.01
        with pytest.raises(WeightStreamError, match=r"nothing came within 0\.01 s; is the other side there"):
            received(receiver)
