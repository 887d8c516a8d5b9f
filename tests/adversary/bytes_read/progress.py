"""The files of an interrupted calibration: its records, with digests that fit or not, and the windows they name."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import xxhash

from layerwise.report.report import LinearReport, Report
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint
from qtensor import MXFP8BlockScaling, quantize
from tests.adversary.bytes_read.changes import as_text, changed_bytes, changed_json
from tests.adversary.bytes_read.outcomes import Case, facts
from tests.dcp_adapters.cases import values

RUN = Fingerprint(weights={"w": 1, "v": 2}, data=3, batches=4, recipe={"type": "R"}, algorithm={"type": "Max"})
RECORDS = ("progress.json", "progress.backup.json")


def layers(number: int) -> dict[str, Any]:
    """What a window holds."""
    return {"w": quantize(values((32, 64), number), MXFP8BlockScaling()), "v": values((5,), number)}


class Progresses:
    """A calibration of two windows, the second of two layers."""

    def __init__(self, root: Path) -> None:
        self.path = root / "calibration"
        checkpoint = CalibrationCheckpoint(self.path)
        assert checkpoint.open(RUN) is None
        checkpoint.save_window(0, 0, layers(0), {"layer": 0}, names=["model.layers.0"])
        checkpoint.save_window(1, 2, layers(1), {"layer": 1}, names=["model.layers.1", "model.layers.2"])
        self.original = root / "original"
        self.path.rename(self.original)
        (root / "outside").mkdir()
        self.expected = self._undamaged()

    def scenario(self, rng: Random) -> str:
        """One mutant; a run starts from it."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.original, self.path)
        case = Case([], (str(self.path), "checkpoint_dir"))
        kinds: dict[str, Callable[[Random, Case], None]] = {
            "bytes": self._bytes,
            "a record": self._record,
            "a record whose digest fits": self._forged,
            "a window": self._window,
        }
        kind = rng.choices(list(kinds), (1, 2, 4, 2))[0]
        case.told.append(kind)
        kinds[kind](rng, case)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            word = case.read("CalibrationCheckpoint", self._resumed, self.expected)
        said = [str(each.message) for each in heard if "checkpoint_dir" in str(each.message)]
        if word == "forged" and said:
            return "told"
        if word == "forged" and "fits" not in kind:
            raise case.found("CalibrationCheckpoint", "another outcome, and nothing is said")
        return word

    def _undamaged(self) -> Any:
        shutil.copytree(self.original, self.path)
        return self._resumed()

    def _resumed(self) -> Any:
        """What a run finds, and what its windows hold."""
        checkpoint = CalibrationCheckpoint(self.path)
        found = checkpoint.open(RUN)
        if found is None:
            return None
        held = []
        for window in found.windows:
            state = {"w": quantize(torch.zeros(32, 64), MXFP8BlockScaling()), "v": torch.zeros(5, dtype=torch.bfloat16)}
            checkpoint.load_window(window, state)
            held.append((window.first, window.last, window.names, window.extra, facts(state)))
        checkpoint.save_window(found.next_layer, found.next_layer, layers(5)) if not found.finished else None
        return found.finished, held

    # -- mutants -------------------------------------------------------------------------------------------------------

    def _bytes(self, rng: Random, case: Case) -> None:
        case.forged = True
        for name in RECORDS[: rng.choice((1, 2))]:
            self._put(name, changed_bytes(rng, (self.path / name).read_bytes(), case.told))

    def _record(self, rng: Random, case: Case) -> None:
        case.forged = True
        changed = as_text(changed_json(rng, json.loads((self.path / RECORDS[0]).read_bytes()), case.told))
        for name in RECORDS[: rng.choice((1, 2))]:
            self._put(name, changed.encode(errors="surrogatepass"))

    def _forged(self, rng: Random, case: Case) -> None:
        case.forged = True
        held = json.loads((self.path / RECORDS[0]).read_bytes())
        text = as_text(changed_json(rng, held["progress"], case.told))
        try:
            record = json.loads(text)
            digest = _digest(record)
        except (ValueError, RecursionError):
            digest = held["digest"]
        for name in RECORDS[: rng.choice((1, 2))]:
            self._put(
                name, f'{{"version": 1, "digest": "{digest}", "progress": {text}}}'.encode(errors="surrogatepass")
            )

    def _window(self, rng: Random, case: Case) -> None:
        case.forged = True
        path = rng.choice(sorted(self.path.glob("layers-*/*")))
        case.told.append(f"{path.parent.name}/{path.name}")
        if rng.random() < 0.2:
            path.unlink()
        else:
            path.write_bytes(changed_bytes(rng, path.read_bytes(), case.told))

    def _put(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)


class Reports:
    """What a calibration says of itself, as a file."""

    def __init__(self, root: Path) -> None:
        self.path = root / "report.json"
        records = [
            LinearReport(layer=0, name="model.layers.0.o_proj.weight", tokens=9, weight_amax=1.5, snr_db=math.inf),
            LinearReport(layer=None, name="lm_head.weight", tokens=0, weight_amax=0.5, warning="no tokens", clip=0.9),
        ]
        Report(records=records, layer_errors={0: 30.5}, resumed=(0,), title="of a model").save(self.path)
        self.original = self.path.read_bytes()

    def scenario(self, rng: Random) -> str:
        """One mutant, read and shown."""
        case = Case([], (str(self.path),), forged=True)  # nothing protects it
        if rng.random() < 0.3:
            data = changed_bytes(rng, self.original, case.told)
        else:
            data = as_text(changed_json(rng, json.loads(self.original), case.told)).encode(errors="surrogatepass")
        self.path.write_bytes(data)

        def read() -> Any:
            report = Report.load(self.path)
            return report.table(), report.table(worst=1), json.dumps(report.to_json())

        return case.read("Report.load", read, None)


def _digest(record: Any) -> str:
    """As the format has it."""
    text = json.dumps([1, record], sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_64_hexdigest(text.encode()))
