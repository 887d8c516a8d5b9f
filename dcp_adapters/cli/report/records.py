"""What a report knows: plain records, which the page draws and `--json` prints."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dcp_adapters.stored.numeric_error import Error

FORMAT = "dcp_adapters.report/1"
Compared = Literal["no", "yes", "absent", "shape", "undecodable"]


@dataclass(frozen=True)
class ScaleHistogram:
    """The scales of one part of a tensor.

    part: of the tensor. stored_as: e4m3, e8m0, fp32, or the name of a dtype. counts: exponent e -> number of scales in
    [2^e, 2^(e+1)). zero, negative, not_finite: how many others there are.
    """

    part: str
    stored_as: str
    counts: Mapping[int, int]
    zero: int = 0
    negative: int = 0
    not_finite: int = 0

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts.values()) + self.zero + self.negative + self.not_finite

    def __add__(self, other: "ScaleHistogram") -> "ScaleHistogram":
        """Return the histogram of the scales of both."""
        return replace(
            self,
            counts=Counter(self.counts) + Counter(other.counts),
            zero=self.zero + other.zero,
            negative=self.negative + other.negative,
            not_finite=self.not_finite + other.not_finite,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data, exponents in ascending order."""
        return {
            "part": self.part,
            "stored_as": self.stored_as,
            "log2": {str(exponent): self.counts[exponent] for exponent in sorted(self.counts)},
            "zero": self.zero,
            "negative": self.negative,
            "not_finite": self.not_finite,
        }


@dataclass(frozen=True)
class Outlier:
    """A channel whose amax is far above the others of its tensor: `factor` times their median."""

    axis: Literal["row", "column"]
    index: int
    amax: float
    factor: float


@dataclass(frozen=True)
class Profile:
    """The amaxes of all rows or columns over their median, thinned: the largest of each bin."""

    axis: Literal["row", "column"]
    channels: int
    bins: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One tensor.

    Attributes:
        name, kind, dtype, shape, numel, nbytes: see entry.py. chunks: of the payload. entries: keys it is stored under.
        quantized: whether it is.
        compared: "yes"; "no", nothing to compare with; "absent" from the dense checkpoint; another "shape" there;
            "undecodable", of a dtype that torch does not convert, or complex on one side alone.
        error: of its values, those of the dense checkpoint being right; None if they were not compared.
        reference_bytes: what it takes in the dense checkpoint.
        scales: of each part that holds scales.
        at_largest: elements of the largest magnitude that the element type has; None for dense tensors and for element
            types that the report does not know.
        saturated: `at_largest` less one for each scale that has one: an upper bound of what was clipped.
        clipped: elements of the dense checkpoint beyond the largest value under their scale by more than half a step.
        nan_codes: codes of the payload that are NaN or infinite. not_finite: values that are.
        zero_rows: rows of zeros only; None below two dims and for what is not floating.
        outliers: the largest few; row_outliers, column_outliers: how many there are.
        profile: of the axis with the largest outlier.
        read_seconds, write_seconds: measured here (see measure.py).
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    chunks: int
    entries: int
    quantized: bool
    compared: Compared = "no"
    error: Error | None = None
    reference_bytes: int | None = None
    scales: tuple[ScaleHistogram, ...] = ()
    at_largest: int | None = None
    saturated: int | None = None
    clipped: int | None = None
    nan_codes: int = 0
    not_finite: int = 0
    zero_rows: int | None = None
    row_outliers: int = 0
    column_outliers: int = 0
    outliers: tuple[Outlier, ...] = ()
    profile: Profile | None = None
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    @property
    def snr_db(self) -> float | None:
        """None if it was not measured, is infinite or undefined."""
        return self.error.snr_db if self.error is not None else None

    @property
    def exact(self) -> bool:
        """Whether it was compared, and every value is equal."""
        return self.error is not None and self.error.exact

    @property
    def saturation(self) -> float:
        """The share of its elements that are saturated."""
        return (self.saturated or 0) / self.numel if self.numel else 0.0

    @property
    def bad_scales(self) -> int:
        """Scales that no weight has: NaN, infinite or negative."""
        return sum(scales.not_finite + scales.negative for scales in self.scales)

    @property
    def zero_scales(self) -> int:
        """Scales that make zeros of all that they scale."""
        return sum(scales.zero for scales in self.scales)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; None if something does not apply. Numbers that JSON does not have are None, too."""
        error = self.error

        def own(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        return {
            **own("name", "kind", "dtype"),
            "shape": list(self.shape),
            "parameters": self.numel,
            "bytes": self.nbytes,
            **own("chunks", "entries", "quantized", "compared", "reference_bytes"),
            "max_abs": error and (error.max_abs if math.isfinite(error.max_abs) else None),
            "relative": error and error.relative,
            "snr_db": self.snr_db,
            "not_finite_differences": error and error.not_finite,
            "scales": [scales.to_json() for scales in self.scales],
            **own("at_largest", "saturated", "clipped", "nan_codes", "not_finite", "zero_rows"),
            **own("row_outliers", "column_outliers"),
            "outliers": [asdict(found) for found in self.outliers],
            **own("read_seconds", "write_seconds"),
        }


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """All of a checkpoint.

    Attributes:
        path, against: the checkpoint, and the one that is right; None without one.
        tensors: in the order of their names.
        files: data file -> bytes of the entries in it.
        blobs, blob_bytes: entries that are no tensors.
        only_in_against: tensors that only the other checkpoint has.
        format_version: of the manifest, None without one.
        checksums: whether it holds some.
        world_size: at least so many ranks wrote it, None if file names do not tell.
    """

    path: str
    against: str | None
    tensors: Sequence[TensorReport]
    files: Mapping[str, int]
    blobs: int = 0
    blob_bytes: int = 0
    only_in_against: int = 0
    format_version: int | None = None
    checksums: bool = False
    world_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added under the same FORMAT."""
        return {
            "format": FORMAT,
            "checkpoint": self.path,
            "against": self.against,
            "format_version": self.format_version,
            "checksums": self.checksums,
            "world_size_at_least": self.world_size,
            "bytes_entries": self.blobs,
            "bytes_of_bytes_entries": self.blob_bytes,
            "only_in_against": self.only_in_against,
            "files": dict(self.files),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }
