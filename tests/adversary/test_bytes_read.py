"""The oracle and the changes of the attack "bytes": what counts as a clear error, and that changes change something."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.adversary.attack import Found
from tests.adversary.bytes_read.changes import as_text, changed_bytes, changed_json
from tests.adversary.bytes_read.delta_checkpoints import DeltaCheckpoints
from tests.adversary.bytes_read.outcomes import Canaries, Case, facts
from tests.adversary.bytes_read.programs import archive_of, changed_archive, changed_pickle, records_of
from tests.dcp_adapters import tampering

CLEAR = "/x/config.json: it is no JSON; get the directory again"


def raising(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize("error", [ValueError(CLEAR), FileNotFoundError(CLEAR), RuntimeError(CLEAR)])
def test_a_clear_error_is_a_refusal(error):
    assert Case(["flip"], ("/x/config.json",)).read("reader", raising(error), 1) == "refused"
    nested = CheckpointException("load", {0: (error, None)})
    assert Case(["flip"], ("/x/config.json",)).read("reader", raising(nested), 1) == "refused"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyError(CLEAR), "a bare KeyError"),
        (json.JSONDecodeError(CLEAR, "", 0), "a bare JSONDecodeError"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, CLEAR), "a bare UnicodeDecodeError"),
        (RecursionError(CLEAR), "a bare RecursionError"),
        (MemoryError(CLEAR), "a bare MemoryError"),
        (ValueError("it is no JSON; get the directory again"), "it names none of /x/config.json"),
        (ValueError("/x/config.json: it is no JSON"), "it does not say what to do"),
        (RuntimeError(f"{CLEAR}: DefaultCPUAllocator: no room"), "it is Python's or torch's"),
        (ValueError(CLEAR + "x" * 30000), "it has 300"),
        (CheckpointException("load", {0: (KeyError(CLEAR), None)}), "a bare KeyError"),
    ],
)
def test_any_other_error_is_found(error, why):
    with pytest.raises(Found, match=f"reader of a mutant .flip.: no clear error: .*{why}"):
        Case(["flip"], ("/x/config.json",)).read("reader", raising(error), 1)


def test_other_values_are_found_unless_nothing_could_tell():
    expected, other = facts({"w": torch.zeros(2)}), facts({"w": torch.tensor([0.0, -0.0])})
    assert Case([], ()).read("reader", lambda: expected, facts({"w": torch.zeros(2)})) == "equal"
    assert Case([], (), forged=True).read("reader", lambda: other, expected) == "forged"
    with pytest.raises(Found, match="other values, and nothing is said:\nw: "):
        Case([], ()).read("reader", lambda: other, expected)


def test_programs_that_ran_are_found(tmp_path):
    canaries = Canaries(tmp_path)
    canaries.check([])
    Path(canaries.path()).touch()
    with pytest.raises(Found, match=r"a program of a mutant ran \(REDUCE\) and left \['sentinel'\]"):
        canaries.check(["REDUCE"])
    canaries.check([])


def test_changes_are_those_of_their_seed_and_say_what_they_are(tmp_path):
    value = {"a": [1, 2.5, {"b": "text", "c": None}], "d": {"e": True, "f": [3, 4]}}
    metadata = (tampering.write(tmp_path / "c").path / ".metadata").read_bytes()
    archive = archive_of([("x/data.pkl", b"\x80\x02K\x01."), ("x/data/0", b"12345678")])
    assert dict(records_of(archive))["x/data/0"] == b"12345678"
    for make in (
        lambda rng, told: as_text(changed_json(rng, value, told)),
        lambda rng, told: changed_bytes(rng, metadata, told),
        lambda rng, told: changed_pickle(rng, metadata, told, "/nowhere"),
        lambda rng, told: changed_archive(rng, archive, told, "/nowhere"),
    ):
        found, told = [], []
        for seed in range(200):
            told.append([])
            found.append(make(Random(seed), told[-1]))
            assert make(Random(seed), []) == found[-1]
        assert all(told)
        assert len(set(found)) > 30


def test_mutants_of_a_delta_are_refused_or_say_nothing_else(tmp_path):
    """The first seeds, and those of what was found."""
    its = DeltaCheckpoints(tmp_path)
    ends = {seed: its.scenario(Random(seed)) for seed in (*range(12), 19, 112, 376, 487, 1886)}
    assert {"refused", "told", "equal"} <= set(ends.values())
