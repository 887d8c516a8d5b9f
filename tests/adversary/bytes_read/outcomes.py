"""What a reader may do with a mutant, judged without the library: errors by kind and words, values by their bytes.

A clear error is of a kind that the readers document, and no other that is derived from it: json's and Unicode's errors
are ValueErrors, too, and say nothing of the file. It names what is wrong by a path, a tensor or a stream's version, and
says what to do, or at least that nothing has been loaded.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dcp_adapters import WeightStreamError
from dcp_adapters.stored.checkpoint import CheckpointUnusable
from qtensor import QuantizedTensor
from tests.adversary.attack import Found

KINDS = (ValueError, EOFError, FileNotFoundError, OSError, RuntimeError, CheckpointUnusable, WeightStreamError)
WAYS_OUT = re.compile(
    r"\b(use|takes?|get|give|load|export|send|save|update|start|make|run|receive|build|let|remove|put|dequantize|choose|"
    r"download|rename|import|expected|needs|does not read|does not fit)\b",
    re.IGNORECASE,
)
# What Python and torch say where nobody has looked before.
BARE = re.compile(r"DefaultCPUAllocator|not enough memory|can't allocate|INTERNAL ASSERT")
TOUCHED = "of the target"


@dataclass
class Case:
    """One mutant on its way: what was changed, and what its errors may call it.

    forged: other values are no finding: checksums were made to fit, or nothing is there that could tell.
    """

    told: list[str]
    names: tuple[str, ...]
    forged: bool = False

    def read(self, reader: str, read: Callable[[], Any], expected: Any) -> str:
        """`refused`, `equal` or `forged`; anything else is found."""
        try:
            found = read()
        except BaseException as error:
            self.check_clear(reader, error)
            return "refused"
        if found == expected:
            return "equal"
        if self.forged:
            return "forged"
        raise self.found(reader, f"other values, and nothing is said:\n{difference(found, expected)}")

    def check_clear(self, reader: str, error: BaseException) -> None:
        """Raise where this is no clear error."""
        if isinstance(error, KeyboardInterrupt | Found):
            raise error
        if isinstance(error, CheckpointException):
            for cause, _ in error.failures.values():
                self.check_clear(reader, cause)
            return
        text = str(error)
        reasons = []
        if type(error) not in KINDS:
            reasons.append(f"a bare {type(error).__name__}")
        if not any(name in text for name in self.names):
            reasons.append(f"it names none of {', '.join(self.names)}")
        if not WAYS_OUT.search(text):
            reasons.append("it does not say what to do")
        if BARE.search(text):
            reasons.append("it is Python's or torch's, not ours")
        if len(text) > 20000:
            reasons.append(f"it has {len(text)} characters")
        if reasons:
            where = "".join(traceback.format_exception(error))[-3500:]
            raise self.found(reader, f"no clear error: {'; '.join(reasons)}\n{where}")

    def found(self, reader: str, what: str) -> Found:
        """A finding."""
        return Found(f"{reader} of a mutant ({'; '.join(self.told)[:1500]}): {what}")


def facts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> dtype, shape and bytes of plain tensors, of a quantized one for each part; other values as they are."""
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, QuantizedTensor):
            found |= {f"{name}.{part}": _facts(tensor) for part, tensor in value.parts().items()}
        else:
            found[name] = _facts(value) if isinstance(value, Tensor) else value
    return found


def _facts(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def difference(found: Any, expected: Any) -> str:
    """Where two values differ, in short."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [
            name
            for name in dict.fromkeys([*expected, *found])
            if name not in found or name not in expected or found[name] != expected[name]
        ]
        return "; ".join(
            f"{name}: {found.get(name)!r:.200}, expected {expected.get(name)!r:.200}" for name in names[:4]
        )
    return f"{found!r:.500}, expected {expected!r:.500}"


class Canaries:
    """A directory in which programs of mutants would leave a file, and one beside the data that no name may lead to."""

    def __init__(self, root: Path) -> None:
        self.root = root / "canaries"
        self.root.mkdir()

    def path(self) -> str:
        """Where a program would leave its file."""
        return str(self.root / "sentinel")

    def check(self, told: list[str]) -> None:
        """Raise where a program ran."""
        left = sorted(path.name for path in self.root.iterdir())
        if left:
            for path in self.root.iterdir():
                path.rmdir() if path.is_dir() else path.unlink()
            raise Found(f"a program of a mutant ran ({'; '.join(told)}) and left {left}")
