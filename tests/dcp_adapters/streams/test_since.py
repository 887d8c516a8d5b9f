"""WeightStream.since: what changed since the last complete pass, as one process would find it in two exports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sync_rank import BytesAlive
from dcp_adapters import WeightStream, WeightStreamError, apply_deltas, delta_to_bytes, export_hf
from dcp_adapters.delta.make import delta_between
from dcp_adapters.delta.stored_states import InMemory, StoredFiles
from dcp_adapters.streams.buckets import TensorRecord
from dcp_adapters.streams.kept_tensors import KeptTensors, Pass
from qtensor import quantize_
from tests.dcp_adapters.cases import values
from tests.dcp_adapters.streams.cases import CONFIG, EXPORTED, Model, assert_same, dense, files, sharded, streamed
from tests.dcp_adapters.streams.test_transports import Ends, every_transport, in_thread, take
from tests.fsdp_hooks.cases import Collectives
from tests.ranks import run_ranks

NOT_FINITE = -1


def model_at(name: str, number: int) -> Model:
    """After some updates: two rows of a layer change in each, and the whole head in the second."""
    model = dense(name)
    with torch.no_grad():
        for update in range(number):
            model.layers[update].o_proj.weight[update : update + 2].neg_()
            model.layers[update].norm.bias[5] += 1
        if number >= 2:
            model.lm_head.weight.neg_()
        if number == NOT_FINITE:
            model.layers[1].o_proj.weight[5, 5] = float("nan")
    quantize_(model, EXPORTED[name], include=["layers.*"])
    return model


def at(name: str, number: int) -> dict[str, Any]:
    return dict(model_at(name, number).state_dict())


def kept(state: Mapping[str, Any], **options: Any) -> WeightStream:
    return WeightStream(state, config=CONFIG, bucket_bytes=3000, keep_last=True, **options)


def whole(name: str, number: int, layout: str = "compressed-tensors") -> dict[str, Tensor]:
    return streamed(WeightStream(at(name, number), config=CONFIG, layout=layout))


def in_one_process(old: Mapping[str, Tensor], new: Mapping[str, Tensor], base: int) -> bytes:
    return delta_to_bytes(delta_between(InMemory(old), InMemory(new), versions=(base, base + 1)))


def told(delta: Any) -> bytes:
    assert delta is not None
    return delta_to_bytes(delta)


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout"), [("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"), ("mxfp8", "compressed-tensors")]
)
def test_since_is_the_delta_between_two_exports(name: str, layout: str, tmp_path: Path) -> None:
    """And leads what a receiver holds to the stream's next version."""
    state = at(name, 0)
    stream = kept(state, layout=layout)
    held = streamed(stream)
    for number in range(3):
        export_hf(at(name, number), tmp_path / str(number), config=CONFIG, layout=layout)
    for number in (1, 2):
        state.update(at(name, number))
        delta = stream.since(number)
        assert delta is not None
        assert (delta.base_version, delta.version, stream.version) == (number, number + 1, number + 1)
        old, new = (tmp_path / str(each) for each in (number - 1, number))
        assert told(delta) == in_one_process(files(old), files(new), number)
        assert delta.frames == delta_between(StoredFiles(old), StoredFiles(new)).frames  # beside the config's entry
        assert 0 < delta.changed < sum(tensor.numel() for tensor in held.values())
        assert apply_deltas(held, [delta]) == 1
        assert_same(held, files(new))
    assert told(stream.since(3)) == in_one_process(held, held, 3)  # nothing changed
    assert_same(streamed(stream), held)
    assert stream.version == 5


def test_full_versions_in_between_are_kept_too() -> None:
    state = at("mxfp8", 0)
    stream = kept(state)
    for number in (0, 1):
        state.update(at("mxfp8", number))
        for bucket in stream:
            for tensor in bucket.values():
                tensor.zero_()  # what is handed out is the caller's
    state.update(at("mxfp8", 2))
    assert told(stream.since(2)) == in_one_process(whole("mxfp8", 1), whole("mxfp8", 2), 2)


def test_a_pass_that_was_left_changes_nothing() -> None:
    state = at("nvfp4", 0)
    stream = kept(state)
    streamed(stream)
    state.update(at("nvfp4", 1))
    assert len(list(itertools.islice(stream, len(stream.sizes) - 1))) > 3
    state.update(at("nvfp4", 2))
    assert stream.version == 1
    assert told(stream.since(1)) == in_one_process(whole("nvfp4", 0), whole("nvfp4", 2), 1)


def test_a_pass_that_another_one_overtook_is_refused() -> None:
    state = at("nvfp4", 0)
    stream = kept(state)
    slow = iter(stream)
    next(slow)
    streamed(stream)
    text = r"a pass that began after version 0 ended after version 1 was complete; .* end or leave one pass before"
    with pytest.raises(RuntimeError, match=text):
        list(slow)
    state.update(at("nvfp4", 1))
    assert told(stream.since(1)) == in_one_process(whole("nvfp4", 0), whole("nvfp4", 1), 1)


@pytest.mark.parametrize(
    ("passes", "keep", "why"),
    [
        (1, False, "the stream keeps none: make it with keep_last=True"),
        (0, True, "no version is complete yet"),
        (2, True, "the stream keeps version 2"),
    ],
)
def test_another_version_than_the_kept_one_is_refused(passes: int, keep: bool, why: str) -> None:
    stream = WeightStream(at("mxfp8", 0), config=CONFIG, keep_last=keep)
    for _ in range(passes):
        streamed(stream)
    for step in (stream.since, lambda version: stream.send_since(None, version)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text below
            step(1)
        assert str(caught.value) == (
            f"WeightStream: a delta since version 1 was asked for, and {why}; send the full version, by send() or "
            "iteration"
        )
    assert stream.version == passes


def test_what_is_staged_takes_no_more_than_the_tensors() -> None:
    """All of one tensor changes, and one element of the other."""
    old = {name: values((64, 128), seed) for seed, name in enumerate(("all", "few"))}
    new = {"all": -old["all"], "few": old["few"].clone()}
    new["few"][3, 7] += 1
    last = KeptTensors([TensorRecord(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in old.items()])
    first, staged = Pass(last), []
    for name, tensor in old.items():
        first.take(name, tensor)
    first.complete()
    with BytesAlive() as alive:
        taken = Pass(last)
        for name, tensor in new.items():
            taken.take(name, tensor)
            staged.append(sum(alive.alive.values()))
    assert staged[0] == old["all"].nbytes
    assert staged[1] - staged[0] == 8 + old["few"].itemsize  # a position and a step
    assert told(taken.delta()) == in_one_process(old, new, 1)


# -- shards ------------------------------------------------------------------------------------------------------------


def _on_shards(to: str) -> dict[str, Any]:
    """The deltas of two ranks, and what was refused before, between and after them."""
    state = dict(sharded(model_at("nvfp4", 0)).state_dict())
    stream, found = kept(state, to=to), {}

    def refused(what: str, version: int, sender: Any = None) -> None:
        with Collectives() as comms, pytest.raises(ValueError) as caught:  # noqa: PT011 - compared by the test
            stream.since(version) if sender is None else stream.send_since(sender or None, version)
        found[what] = str(caught.value), comms.counts["gather_"] + comms.counts["_allgather_base_"]

    for bucket in stream:
        del bucket
    refused("other", 1 + dist.get_rank())
    if to == "first":
        refused("useless", 1, sender=[object()] if dist.get_rank() else False)
    state.update(sharded(model_at("nvfp4", NOT_FINITE)).state_dict())
    refused("not finite", 1)
    for number in (1, 2):
        state.update(sharded(model_at("nvfp4", number)).state_dict())
        delta = stream.since(number)
        found[f"to {number}"] = None if delta is None else delta_to_bytes(delta)
    return found | {"version": stream.version}


@pytest.mark.parametrize("to", ["first", "all"])
def test_shards_give_the_delta_of_one_process(to: str) -> None:
    """On ranks that receive; and refusals are the same on all ranks, and leave the kept version."""
    ranks = run_ranks(2, _on_shards, to)
    for rank, found in enumerate(ranks):
        text, gathers = found["other"]
        assert text.startswith("WeightStream: a delta since version 2 was asked for, and the stream keeps version 1; ")
        assert gathers == 0
        assert "layers.1.o_proj.weight holds NaN" in found["not finite"][0]
        if to == "first":
            text, gathers = found["useless"]
            assert text.startswith("WeightStream: rank 1 has a sender, and receives nothing; give it to rank 0, or ")
            assert gathers == 0
        for number in (1, 2):
            expected = in_one_process(whole("nvfp4", number - 1), whole("nvfp4", number), number)
            assert found[f"to {number}"] == (expected if to == "all" or rank == 0 else None)
        assert found["version"] == 3


# -- on their way ------------------------------------------------------------------------------------------------------


def apply_from(receiver: Any, held: dict[str, Tensor]) -> tuple[int | None, int]:
    with receiver.receive() as weights:
        assert apply_deltas(held, [weights.delta()]) == 1
    return weights.base, weights.version


@every_transport
def test_a_delta_arrives_whole_or_not_at_all(kind: str, tmp_path: Path) -> None:
    state = at("nvfp4", 0)
    stream = kept(state)
    with ExitStack() as opened:
        sender, receiver = Ends(tmp_path, opened)(kind)
        with in_thread(lambda: stream.send(sender)):
            held = take(receiver)
        state.update(at("nvfp4", 1))
        with in_thread(lambda: stream.send_since(sender, 1)) as sent:
            assert apply_from(receiver, held) == (1, 2)
        assert (sent, receiver.version, stream.version) == ([None], 2, 2)
        assert_same(held, whole("nvfp4", 1))

        state.update(at("nvfp4", 2))
        others = whole("nvfp4", 0)  # of another version
        with in_thread(lambda: stream.send_since(sender, 2)) as sent, pytest.raises(ValueError, match="another state"):
            apply_from(receiver, others)
        assert isinstance(sent[0], WeightStreamError)
        assert_same(others, whole("nvfp4", 0))
        why = "version 3 of the weights: it comes as a delta since version 2; take delta.. instead of iterating"
        with in_thread(lambda: stream.send_since(sender, 2)) as sent, pytest.raises(WeightStreamError, match=why):
            take(receiver)
        assert isinstance(sent[0], WeightStreamError)
        assert (receiver.version, stream.version) == (2, 2)

        with in_thread(lambda: stream.send_since(sender, 2)) as sent:  # and both go on
            assert apply_from(receiver, held) == (2, 3)
        assert_same(held, whole("nvfp4", 2))
        why = "version 4 of the weights: all of its tensors come, and no delta; iterate instead of taking delta"
        with in_thread(lambda: stream.send(sender)), pytest.raises(WeightStreamError, match=why):
            apply_from(receiver, held)
        assert (receiver.version, stream.version) == (3, 3)
