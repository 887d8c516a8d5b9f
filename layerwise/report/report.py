"""What a calibration did to each linear, for people: a table, a JSON file, a picture of the error of every layer.

Nothing is measured here: measure.py gives one `LinearReport` for each quantized weight, in the order they were
quantized, and the error of each whole layer's output. Errors are ratios of powers in decibels, 10 log10(signal /
noise): 6 dB more is half the error. They compare outputs on the calibration data, so they say how well a layer was
fitted, and not how good the model is.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from dcp_adapters.plain.tables import table
from dcp_adapters.plain.words import short

VERSION = 1
_COLUMNS = ("layer", "linear", "tokens", "weight amax", "input amax", "SNR dB", "clip", "alpha", "warning")
_OPTIONAL = ("clip", "alpha", "warning")  # columns that are left out if no linear has a value
_FIELD_OF = {"SNR dB": "snr_db", "weight amax": "weight_amax", "input amax": "input_amax", "linear": "name"}


Record = TypeVar("Record", bound="LinearReport")
_AMOUNT = (int, float, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "layer": (int, type(None)),
    "name": (str,),
    "tokens": (int,),
    "weight_amax": (int, float),
    **dict.fromkeys(("input_amax", "snr_db", "clip", "alpha"), _AMOUNT),
    "warning": (str, type(None)),
}


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) of two sums of squares; infinite without noise, -infinite without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


@dataclass(frozen=True, kw_only=True)
class LinearReport:
    """What was decided about one weight, and how good its linear is with it.

    Attributes:
        layer: number of its layer; None for a linear outside of the layers, such as an lm_head.
        name: fqn of the parameter, with the number of the expert in brackets if it has several.
        tokens: rows of input it was calibrated on, over all ranks.
        weight_amax: largest |W| before quantization.
        input_amax: largest |input|; None if no token reached it.
        snr_db: signal to noise of its output on sample tokens, in dB; None if that was not measured.
        clip: mean ratio of its scales to those that clip nothing; None if the algorithm does not choose it.
        alpha: the exponent that its columns were smoothed with; None if they were not.
        warning: what a reader should know, in words.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = calibrate(model, [torch.randn(8, 64)], recipe=MXFP8BlockScaling(), layers=["0"]).report
        >>> [(record.name, record.tokens) for record in report.records]
        [('0.weight', 8)]
        ```
    """

    layer: int | None
    name: str
    tokens: int
    weight_amax: float
    input_amax: float | None = None
    snr_db: float | None = None
    clip: float | None = None
    alpha: float | None = None
    warning: str | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make a record of plain values; raise TypeError, ValueError or AttributeError if they are not a record's."""
        return _check(cls(**_restore_numbers(values)))

    @property
    def kind(self) -> str:
        """The name that linears of all layers share: of the module, without the number of an expert."""
        return re.sub(r"\[\d+\]$", "", self.name).removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is known about the error of a calibrated model.

    Attributes:
        records: one for each weight, in the order they were quantized.
        layer_errors: SNR in dB of the output of each whole layer, by its number.
        resumed: numbers of the layers that an earlier run had finished and this one took from its checkpoint.
        title: what was calibrated and how, as a heading.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = calibrate(model, [torch.randn(8, 64)], recipe=MXFP8BlockScaling(), layers=["0"]).report
        >>> print(report.table(worst=10))
        >>> report.save("report.json")
        ```
    """

    records: Sequence[LinearReport]
    layer_errors: Mapping[int, float] = field(default_factory=dict)
    resumed: Sequence[int] = ()
    title: str = ""

    def table(self, *, worst: int | None = None) -> str:
        """Return one line of text for each linear; with `worst`, only so many, the lowest SNR first."""
        records = list(self.records)
        if worst is not None:
            unmeasured = math.inf  # last
            key = [unmeasured if record.snr_db is None else record.snr_db for record in records]
            records = [records[index] for index in sorted(range(len(records)), key=key.__getitem__)[:worst]]
        noted = {column for column in _OPTIONAL if any(getattr(record, column) is not None for record in records)}
        shown = [column for column in _COLUMNS if column not in _OPTIONAL or column in noted]
        rows = [[_cell(getattr(record, _FIELD_OF.get(column, column))) for column in shown] for record in records]
        text = table(shown, rows, right=[column for column in shown if column not in ("linear", "warning")])
        if self.resumed:
            text += f"\nfrom the checkpoint of an earlier run: layers {_ranges(self.resumed)}"
        return f"{self.title}\n{text}" if self.title else text

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json`; infinite and undefined numbers become strings, since JSON has none."""
        return {
            "version": VERSION,
            "title": self.title,
            "resumed": list(self.resumed),
            "layer_errors": {str(layer): _to_json(value) for layer, value in self.layer_errors.items()},
            "records": [
                {key: _to_json(value) for key, value in dataclasses.asdict(record).items()} for record in self.records
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make the report that `to_json` wrote.

        Raises:
            ValueError: it is of another version, or not what this library wrote.
        """
        version = values.get("version")
        if version != VERSION:
            raise ValueError(
                f"a report of version {short(version)}; this library reads version {VERSION}. Give a file that "
                "Report.save wrote, or use a library version that knows it"
            )
        try:
            return cls(
                records=tuple(map(LinearReport.from_json, values["records"])),
                layer_errors={int(layer): float(value) for layer, value in values["layer_errors"].items()},
                resumed=tuple(map(int, values["resumed"])),
                title=str(values["title"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"a report that can not be read ({type(error).__name__}: {error}); give a file that Report.save wrote"
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write `to_json` to a file, and return its path."""
        path = Path(path)
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the report that `save` wrote; raise ValueError, with the path, if the file holds anything else."""
        try:
            values = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: it is no JSON: {error}; give a file that Report.save wrote") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: it holds a {type(values).__name__}; give a file that Report.save wrote")
        try:
            return cls.from_json(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def plot(self, path: str | Path) -> Path:
        """Draw the SNR of every layer, one line for each kind of linear, into a file, and return its path.

        Raises:
            ImportError: matplotlib is not installed; says which extra brings it.
            ValueError: no linear of a layer has an SNR.
        """
        from layerwise.report.figure import draw

        return draw(self, Path(path))


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _restore_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    # "inf" and "nan" are numbers that `_to_json` wrote as texts; names and warnings are texts.
    return {
        key: float(value) if isinstance(value, str) and key not in ("name", "warning") else value
        for key, value in record.items()
    }


def _check(record: Record) -> Record:
    """Return the record; raise TypeError if a field is of another type than it is written with."""
    for name, kinds in _TYPES.items():
        value = getattr(record, name)
        # To Python a bool is an int.
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name} is {short(value)}")
    return record


def _ranges(numbers: Sequence[int]) -> str:
    """Write consecutive numbers as ranges: "0-3, 7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
