"""What a verification found: plain records for people and programs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        severity: "error", or "warning" for what does not make the checkpoint wrong.
        file: path inside of the checkpoint, "" if no file is at fault.
        entry: the tensor, with the chunk's offset if one chunk is at fault; "" if no tensor is.
        message: what was found and what was expected.
    """

    severity: Literal["error", "warning"]
    file: str
    entry: str
    message: str

    def __str__(self) -> str:
        """Return one line for people."""
        return ": ".join(part for part in (self.severity, self.file, self.entry, self.message) if part)


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found, and how much it looked at.

    Attributes:
        checkpoint: the directory.
        findings: in the order of the checks.
        tensors: tensors that the metadata names.
        chunks, bytes: chunks that could be read, and the bytes they take in their files.
        checksums: chunks whose checksum was compared and agreed.
        judged, masters: quantized tensors whose meaning was looked at, and masters that were compared; 0 unless asked.
    """

    checkpoint: str
    findings: tuple[Finding, ...]
    tensors: int = 0
    chunks: int = 0
    bytes: int = 0
    checksums: int = 0
    judged: int = 0
    masters: int = 0

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the checkpoint wrong."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the checkpoint (there may be warnings)."""
        return not self.errors
