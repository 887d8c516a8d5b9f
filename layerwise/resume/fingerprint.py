"""The fingerprint of a calibration run: it tells whether a run may continue from the checkpoint of an earlier one.

    weights     for each name in the state dict, 64 bits of its values  weights_digest
    data        64 bits of the multiset of batches, and their number    data_digest of every rank's hashes of batches
    recipe, algorithm, options                                          JSON, compared entry by entry
    threads, versions                                                   recorded; a difference only warns

The digests do not depend on how things are distributed. A weight has the same digest plain, as FSDP2 shards on any
number of ranks, and replicated by HSDP; the data has the same in any order of the batches, on any ranks. For

    digest(W) = sum over elements of mix(index in the global tensor, bits)   mod 2^64

every rank sums over the elements it holds, on their device, and one all-reduce adds up the sums of all weights. Bits
count, not values: -0.0 differs from 0.0, and NaNs with different bits differ.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from fsdp_hooks.ranks.across_ranks import on_all
from fsdp_hooks.release import VERSION

KINDS = {"batches": int, "recipe": dict, "algorithm": dict, "options": dict, "threads": int, "versions": dict}


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "qtensor": VERSION}


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything about a calibration run that decides the outcome.

    Attributes:
        weights: `weights_digest` of the model before the run.
        data, batches: `data_digest` of what it is calibrated on.
        recipe, algorithm: their to_json().
        options: whatever else decides the outcome, json-able; patterns resolved to names.
        threads: how many this process uses; the last bits of floating-point sums depend on it.
        versions: of torch and of this library.
    """

    weights: Mapping[str, int]
    data: int
    batches: int
    recipe: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)
    versions: Mapping[str, str] = field(default_factory=_versions)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; digests are 16 hexadecimal digits."""
        record = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        record["weights"] = {name: f"{value:016x}" for name, value in self.weights.items()}
        record["data"] = f"{self.data:016x}"
        # What is read from a file has lists for tuples, and texts for keys. So has this, and the two can be compared.
        return json.loads(json.dumps(record))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Fingerprint":
        """Make a fingerprint of what `to_json` wrote; raise ValueError, TypeError or KeyError for anything else."""
        values = {item.name: record[item.name] for item in dataclasses.fields(cls)}
        values["weights"] = {name: int(value, 16) for name, value in record["weights"].items()}
        values["data"] = int(record["data"], 16)
        wrong = [name for name, kind in KINDS.items() if type(values[name]) is not kind]
        if wrong:
            raise TypeError(f"{wrong[0]} is a {type(values[wrong[0]]).__name__}, expected a {KINDS[wrong[0]].__name__}")
        return cls(**values)

    def differences(self, other: "Fingerprint") -> list[str]:
        """Return, in words, why `other` cannot continue this run, one item for each difference; empty if it can."""
        before, now = self.to_json(), other.to_json()
        found = [f"other weights: {words}" for words in _weight_words(before["weights"], now["weights"])]
        if self.batches != other.batches:
            found.append(f"other data: {self.batches} batches, now {other.batches}")
        elif self.data != other.data:
            found.append(f"other data: as many batches ({self.batches}), but not the same ones")
        for title, kind in (
            ("another recipe", "recipe"),
            ("another algorithm", "algorithm"),
            ("other options", "options"),
        ):
            old, new = before[kind], now[kind]
            # Fields of different classes mean different things, so then only the classes are named.
            if old.get("type") != new.get("type"):
                old, new = {"type": old.get("type")}, {"type": new.get("type")}
            words = _entry_words(old, new)
            if words:
                found.append(f"{title}: {', '.join(words)}")
        return found

    def remarks(self, other: "Fingerprint") -> list[str]:
        """Return, in words, the differences that do not stop `other` from continuing; the thread count first."""
        found = []
        if self.threads != other.threads:
            found.append(
                f"it was calibrated with {self.threads} threads, now there are {other.threads}: statistics may differ "
                "in their last bits from those of an uninterrupted run (torch.set_num_threads, OMP_NUM_THREADS)"
            )
        for name in sorted({*self.versions, *other.versions}):
            before, now = self.versions.get(name), other.versions.get(name)
            if before != now:
                found.append(f"it was calibrated with {name} {before}, now it is {now}")
        return found


def data_digest(batch_hashes: Iterable[int], group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return (digest, count) of the multiset of all ranks' batches; their order and distribution do not matter.

    Call it on all ranks of the group. If ranks share batches (those of one tensor-parallel group), one of them passes
    its hashes, and the rest pass none.
    """
    own = list(batch_hashes)
    hashes = sorted(value for values in on_all(group, lambda: own) for value in values)
    text = b"".join(value.to_bytes(8, "big") for value in hashes)
    return xxhash.xxh3_64_intdigest(text), len(hashes)


def _weight_words(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    differing = [name for name in before if name in now and before[name] != now[name]]
    gone, new = [name for name in before if name not in now], [name for name in now if name not in before]
    return [
        f"{first_and_count(names)} {verb if len(names) == 1 else verbs}"
        for names, verb, verbs in (
            (differing, "differs", "differ"),
            (gone, "is missing now", "are missing now"),
            (new, "is new", "are new"),
        )
        if names
    ]


def first_and_count(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _entry_words(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what differs between two JSON objects, entry by entry."""
    words = []
    for name in dict.fromkeys([*before, *now]):
        if name not in now:
            words.append(f"{name} was {_short(before[name])}, now there is none")
        elif name not in before:
            words.append(f"{name} is {_short(now[name])}, there was none")
        elif before[name] != now[name]:
            words.append(f"{name} {_change_words(before[name], now[name])}")
    return words


def _change_words(before: Any, now: Any) -> str:
    if not (isinstance(before, list) and isinstance(now, list)):
        return f"was {_short(before)}, now {_short(now)}"
    gone, new = [item for item in before if item not in now], [item for item in now if item not in before]
    words = [f"without {first_and_count([*map(_short, gone)])}"] if gone else []
    words += [f"with {first_and_count([*map(_short, new)])}"] if new else []
    return f"now {', '.join(words)}" if words else "now in another order or number"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
