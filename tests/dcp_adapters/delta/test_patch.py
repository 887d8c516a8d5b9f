"""Deltas in memory: exact for every recipe and dtype, one file for one change, refused where anything is wrong."""

from __future__ import annotations

import base64
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.coding import codec
from dcp_adapters.delta.coding.changes import Changes
from dcp_adapters.delta.make import delta_between, layout_of, sum_state
from dcp_adapters.delta.patches import encoder
from dcp_adapters.delta.patches.encoder import Encoder
from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.patch_format import METADATA, delta_from_bytes, delta_to_bytes, open_delta, save_delta
from dcp_adapters.delta.stored_states import InMemory
from dcp_adapters.plain.durable import sync
from dcp_adapters.records.entry import parts_of
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.delta.states import copied, every_dtype, every_recipe, nudged, state
from tests.recipes import TABLE


def between(old: dict[str, Any], new: dict[str, Any], **options: Any) -> Delta:
    return delta_between(InMemory(old), InMemory(new), **options)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        parts, others = parts_of(found[name]), parts_of(tensor)
        for part in others:
            a, b = (side[part].reshape(-1).view(torch.uint8) for side in (parts, others))
            assert torch.equal(a, b), f"{name}.{part}"


def small(seed: int) -> dict[str, Any]:
    """Three dtypes, a few changes in each."""
    return {
        "w": quantize(nudged(seed, (32, 64)), MXFP8BlockScaling()),
        "norm": nudged(seed, (16,)).bfloat16(),
    }


def test_every_recipe_and_dtype_comes_back_bit_for_bit() -> None:
    old, new = state(0), state(1)
    target = copied(old)
    made = between(old, new)
    assert apply_deltas(target, [delta_from_bytes(delta_to_bytes(made))]) == 1
    assert_same(target, new)
    assert made.changed > 0
    assert len(made.layout.entries) == len(TABLE) + len(every_dtype(0))


def test_a_step_back_comes_back_bit_for_bit() -> None:
    old, new = every_recipe(0), every_recipe(1)
    target = copied(new)
    apply_deltas(target, [between(new, old)])
    assert_same(target, old)


def test_nothing_changed_is_a_delta_without_frames() -> None:
    made = between(small(0), small(0))
    assert (made.frames, made.changed, made.base) == ((), 0, made.result)
    target = small(0)
    assert apply_deltas(target, [delta_from_bytes(delta_to_bytes(made))]) == 0
    assert_same(target, small(0))


def test_the_file_depends_on_the_changes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = state(0), state(1)
    expected = delta_to_bytes(between(old, new))
    backwards = [dict(reversed(side.items())) for side in (old, new)]
    assert delta_to_bytes(between(*backwards)) == expected
    assert delta_to_bytes(delta_from_bytes(expected)) == expected
    monkeypatch.setattr("dcp_adapters.delta.coding.changes.PIECE", 1024)
    assert delta_to_bytes(between(old, new)) == expected


def test_many_frames_are_one_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codec, encoder):
        monkeypatch.setattr(module, "MOST_CHANGES", 50)
    old, new = every_dtype(0), every_dtype(1)
    made = between(old, new)
    assert len(made.frames) > 12
    assert max(frame.coded.count for frame in made.frames) == 50
    target = copied(old)
    apply_deltas(target, [delta_from_bytes(delta_to_bytes(made))])
    assert_same(target, new)


def test_changes_come_in_order() -> None:
    layout = layout_of(InMemory(small(0)))
    one = Changes(torch.tensor([4]), torch.tensor([1], dtype=torch.int8))
    made = Encoder(layout)
    made.add("w.payload", one)
    with pytest.raises(ValueError, match=r"w\.payload: changes at 4 after some at 4; expected ascending ones"):
        made.add("w.payload", one)
    with pytest.raises(ValueError, match="norm: its dtype was done before"):
        made.add("norm", Changes(one.positions, one.steps.to(torch.int16)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=6, max_size=6), min_size=2, max_size=5), st.data())
def test_a_chain_leads_from_each_of_its_states_to_the_last(versions: list[list[int]], data: st.DataObject) -> None:
    states = [{"a": torch.tensor(codes, dtype=torch.uint8), "b": torch.tensor(float(codes[0]))} for codes in versions]
    deltas = [between(old, new) for old, new in pairwise(states)]
    start = data.draw(st.integers(0, len(states) - 1))
    target = copied(states[start])
    apply_deltas(target, deltas)
    assert_same(target, states[-1])
    assert apply_deltas(target, deltas) == 0


# -- what is refused, and that the target stays as it was --------------------------------------------------------------


def refused(target: dict[str, Any], deltas: list[Delta], message: str) -> None:
    before = copied(target)
    with pytest.raises(ValueError, match=message):
        apply_deltas(target, deltas)
    assert_same(target, before)


def test_another_base_a_gap_and_a_repeat_are_refused() -> None:
    states = [small(seed) for seed in range(4)]
    first, second, third = (between(states[n], states[n + 1], versions=(10 * n, 10 * n + 10)) for n in range(3))
    refused(
        states[0], [second], r"the target has digest [0-9a-f]{32}, and the delta \(to version 20\) applies to [0-9a-f]"
    )
    refused(states[0], [first, third], r"the delta \(to version 30\) starts from .* one in between is missing: get it")
    refused(states[0], [first, first], r"the delta \(to version 10\) is the delta \(to version 10\) once more")
    refused(states[0], [first, third, second], r"the delta \(to version 20\) leads there: put the deltas in the order")
    other = copied(states[0])
    other["norm"][3] = 7.0
    refused(other, [first], "it is another state, or its bytes have changed; take the base")


def test_other_tensors_are_refused_and_all_named() -> None:
    old = {"w": torch.zeros(2, 32), "b": torch.zeros(3), "q": quantize(nudged(0, (32, 64)), MXFP8BlockScaling())}
    new = {"w": torch.zeros(2, 16), "c": torch.zeros(3), "q": quantize(nudged(0, (32, 64)), NVFP4BlockScaling())}
    expected = (
        "a delta needs equal names, recipes, dtypes and shapes, and 4 entries differ:\n"
        "  b: the old state holds float32 [3], the new one no such tensor\n"
        "  c: the old state holds no such tensor, the new one float32 [3]\n"
        "  q: the old state holds mxfp8 as float32 [32, 64], the new one nvfp4 as float32 [32, 64]\n"
        "  w: the old state holds float32 [2, 32], the new one float32 [2, 16]\n"
        "Send or save the new state in full"
    )
    with pytest.raises(ValueError, match="entries differ") as caught:
        between(old, new)
    assert str(caught.value) == expected
    made = between(small(0), small(1))
    refused({**small(0), "more": torch.zeros(1)}, [made], "more: the delta holds no such tensor, the target float32")


def test_a_delta_that_does_not_lead_to_what_it_says_is_refused() -> None:
    made = between(small(0), small(1))
    lying = Delta(**{**vars(made), "result": "0" * 32})
    refused(small(0), [lying], "leads to digest [0-9a-f]{32}, and says 0{32}: it is damaged, or made by other code")


# -- damage to the file ------------------------------------------------------------------------------------------------


def opened_or_refused(data: bytes, old: dict[str, Any], new: dict[str, Any]) -> None:
    """A clear error before anything is written, or the right bytes."""
    target = copied(old)
    try:
        apply_deltas(target, [delta_from_bytes(data, "the file")])
    except ValueError:
        assert_same(target, old)
    else:
        assert_same(target, new)


def test_a_file_cut_off_anywhere_is_refused() -> None:
    data = delta_to_bytes(between(small(0), small(1)))
    for length in [*range(0, len(data), 37), *range(16), len(data) - 1]:
        with pytest.raises(ValueError, match="the file is damaged or no delta"):
            delta_from_bytes(data[:length], "the file")


def test_a_changed_byte_anywhere_is_refused_or_harmless() -> None:
    old, new = small(0), small(1)
    data = delta_to_bytes(between(old, new))
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        opened_or_refused(bytes(changed), old, new)


def rewritten(made: Delta, change: Any) -> bytes:
    """A file with another table, and checksums that fit it: what a careless or hostile writer makes."""
    from safetensors.torch import load, save

    from dcp_adapters.delta.coding.zstd import compress, decompress
    from dcp_adapters.delta.patches.patch import checksum
    from dcp_adapters.delta.patches.patch_format import _bytes, _json, _tensor

    data = delta_to_bytes(made)
    tensors = load(data)
    table = json.loads(decompress(_bytes(tensors["table"], "", ""), 2**20, ""))
    header = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][METADATA])[
        "header"
    ]
    change(table, header)
    tensors["table"] = _tensor(compress(json.dumps(table).encode(), 3))
    header["table"] = checksum(_bytes(tensors["table"], "", ""))
    return bytes(save(tensors, {METADATA: _json({"header": header, "checksum": checksum(_json(header).encode())})}))


def set_frame(number: int, value: Any) -> Any:
    def change(table: dict[str, Any], _: Any) -> None:
        table["frames"][0][number] = value

    return change


def set_entry(record: Any) -> Any:
    def change(table: dict[str, Any], _: Any) -> None:
        table["entries"]["w"] = record

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_frame(0, 9), "the file is damaged: a frame of run 9 of 3"),
        (set_frame(0, -1), "its table is malformed: TypeError: -1 is no count"),
        (set_frame(1, 5), "frame 0 is damaged: it begins at 5, the one before at -1"),
        (set_frame(2, 2**60), "frame 0 is damaged: 1152921504606846976 changes from 0 on in 16 units"),
        (set_frame(3, 60), "with a shift of 60"),
        (set_frame(4, [2**62] * 4), "frame 0 is damaged|expected 18446744073709551616"),
        (set_frame(4, "many"), "its table is malformed: TypeError: 'm' is no count"),
        (set_frame(5, "0" * 16), "frame.000000 has checksum [0-9a-f]{16}, expected 0{16}; get it again"),
        (set_entry([0, "bfloat16", [2**60, 2**60]]), "w: the file holds mxfp8 as bfloat16|damaged: .* units"),
        (set_entry([7, "bfloat16", [32, 64]]), "its table is malformed: IndexError"),
        (set_entry([0, "Tensor", [32, 64]]), "its table is malformed: KeyError: 'Tensor'"),
        (set_entry([0, "float32", []]), "its table is malformed: IndexError"),
        (lambda table, _: table.pop("frames"), "its table is malformed: KeyError: 'frames'"),
        (set_entry([0, "bfloat16"]), "its table is malformed: ValueError: not enough values .*; get it again"),
        (lambda table, _: table["recipes"][0].update(type="x"), "its table is malformed: ValueError: unknown recipe"),
        (lambda table, _: table.update(changed_blobs=[["x", 5, ""]]), "'x' is no entry of bytes of its state"),
        (lambda _, header: header.update(format_version=2), "format_version 2; this library reads version 1"),
        (lambda _, header: header.update(base=None), "its header is malformed: digests and versions are missing"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    old = small(0)
    data = rewritten(between(old, small(1)), change)
    with pytest.raises(ValueError, match=message):
        apply_deltas(old, [delta_from_bytes(data, "the file")])
    assert_same(old, small(0))


def test_versions_are_for_people_and_may_be_left_out() -> None:
    old, new = small(0), small(1)

    def forget(_: Any, header: dict[str, Any]) -> None:
        del header["version"], header["base_version"]

    found = delta_from_bytes(rewritten(between(old, new), forget))
    assert (found.base_version, found.version) == (None, None)
    assert apply_deltas(old, [found]) == 1
    assert_same(old, new)


def test_files_are_written_once_and_read_lazily(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = between(small(0), small(1))
    path = save_delta(made, tmp_path / "delta")
    assert path.read_bytes() == delta_to_bytes(made)
    found = open_delta(path)
    assert (found.base, found.result, found.frames) == (made.base, made.result, made.frames)
    found.check()
    with pytest.raises(FileExistsError, match="delta exists already; choose another name, nothing is overwritten"):
        save_delta(made, path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory; create it first"):
        save_delta(made, tmp_path / "nowhere" / "delta")
    with pytest.raises(FileNotFoundError, match="none: no such file"):
        open_delta(tmp_path / "none")
    (tmp_path / "text").write_text("no safetensors")
    with pytest.raises(ValueError, match="text is damaged or no delta"):
        open_delta(tmp_path / "text")
    monkeypatch.setattr("dcp_adapters.delta.patches.patch_format.sync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_delta(made, tmp_path / "other")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["delta", "text"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_another_makes_meanwhile_stays(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system has no hard links, too: there a rename would replace it."""
    if not links:
        monkeypatch.setattr(os, "link", unsupported)

    def meanwhile(file: Path) -> None:
        sync(file)
        (tmp_path / "delta").write_text("another's")

    monkeypatch.setattr("dcp_adapters.delta.patches.patch_format.sync", meanwhile)
    with pytest.raises(FileExistsError, match="delta was made by another while this one was written; nothing is"):
        save_delta(between(small(0), small(1)), tmp_path / "delta")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("delta", "another's")]


def unsupported(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_of_writers_of_one_name_one_gets_it_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", unsupported)
    replaced = Path.replace

    def late(file: Path, final: Path) -> Path:
        """Another writer comes before the name leads to the first one's bytes."""
        monkeypatch.setattr(Path, "replace", replaced)
        with pytest.raises(FileExistsError, match=r"delta exists already|delta was made by another"):
            save_delta(between(small(1), small(0)), final)
        return replaced(file, final)

    monkeypatch.setattr(Path, "replace", late)
    made = between(small(0), small(1))
    assert save_delta(made, tmp_path / "delta").read_bytes() == delta_to_bytes(made)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_delta(made, tmp_path / "other")
    assert [file.name for file in tmp_path.iterdir()] == ["delta"]


def test_a_file_system_without_links_takes_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", unsupported)
    made = between(small(0), small(1))
    assert save_delta(made, tmp_path / "delta").read_bytes() == delta_to_bytes(made)
    assert [file.name for file in tmp_path.iterdir()] == ["delta"]


def fail(*_: Any) -> None:
    raise OSError("disk full")


# Two bytes of an NVFP4 weight and a bfloat16 element change.
GOLDEN = (
    "yAEAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJxdGVuc29yLmRlbHRhIjoie1wiY2hlY2tzdW1cIjpcIjhjYzc1YmJhOWM5MDZhZWJc"
    "IixcImhlYWRlclwiOntcImJhc2VcIjpcIjIwMjdiZjk3NWM4OTQ0NGRhZjU3MGY3ZTNmMjg3MjQ0XCIsXCJiYXNlX3ZlcnNpb25c"
    "Ijo0LFwiZm9ybWF0X3ZlcnNpb25cIjoxLFwicmVzdWx0XCI6XCI2N2JhOGE4ZWU0MzYwM2VlNzY0NGU5ZTFhMDUyOGMzN1wiLFwi"
    "dGFibGVcIjpcIjA0OWQ0NGRhYzVlMWExYjJcIixcInZlcnNpb25cIjo1fX0ifSwiZnJhbWUuMDAwMDAwIjp7ImR0eXBlIjoiVTgi"
    "LCJzaGFwZSI6WzM5XSwiZGF0YV9vZmZzZXRzIjpbMCwzOV19LCJmcmFtZS4wMDAwMDEiOnsiZHR5cGUiOiJVOCIsInNoYXBlIjpb"
    "MzFdLCJkYXRhX29mZnNldHMiOlszOSw3MF19LCJ0YWJsZSI6eyJkdHlwZSI6IlU4Iiwic2hhcGUiOlsxODRdLCJkYXRhX29mZnNl"
    "dHMiOls3MCwyNTRdfX0otS/9IAABAAAotS/9IAEJAAABKLUv/SABCQAAgCi1L/0gAQkAAAAotS/9IAABAAAotS/9IAIRAAADCyi1"
    "L/0gAhEAAAIfKLUv/SDyfQUA8sskGVB3Dtv97Iqqr7auipTjvDLOPJ/hY8zM9BqhDR9dU+U8yyEoCJOcHmcf976HaaffqCebHqy9"
    "rb1hAMaMgrxXwDOY922lbAl07KC2PQQEOWciFkNQZGjGt42yjdqxZceOFVuOlt+htVM2ELxjpffe1gK1PyXnYFW+76rqrkp/D9Jv"
    "eNK4CzcQji5Het620m8Xq+7BCQD5xCD/bMDQHk05R0fFCfaBYeZspcXzDg=="
)


def test_a_file_of_this_format_version_stays_readable() -> None:
    found = delta_from_bytes(base64.b64decode(GOLDEN))
    assert found.layout == StateLayout.of(InMemory(golden(0)).entries.values())
    target = golden(0)
    assert apply_deltas(target, [found]) == 1
    assert_same(target, golden(1))
    assert (found.base_version, found.version) == (4, 5)
    assert found.result == sum_state(InMemory(golden(1))).digest


def golden(number: int) -> dict[str, Any]:
    """States that follow from integers alone."""
    w = quantize(torch.arange(-16.0, 16.0).view(2, 16), NVFP4BlockScaling())
    w.payload[0, 3] ^= number
    w.payload[1, 7] ^= 16 * number
    return {"w": w, "b": torch.tensor([1.0, 2.0 + number], dtype=torch.bfloat16)}
