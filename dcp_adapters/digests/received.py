"""Tensors in memory under the names of a Hugging Face directory: what an engine holds, or a stream delivered.

They are read as the files of a directory are, by the JSON that describes them (config.json), so what cannot be read is
refused in the same words, and codes are never taken for values.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dcp_adapters.hf.files.directory import Directory, FileTensor
from dcp_adapters.hf.layouts.rotations import said_tensor
from dcp_adapters.hf.models.architectures import Architecture
from dcp_adapters.hf.models.wanted_names import wanted_names
from dcp_adapters.hf.reading.as_checkpoint import presented, renamed
from dcp_adapters.hf.reading.schemes import DTYPES, contents_of, weight_of
from dcp_adapters.plain.plain_memory import is_plain
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.source import Source
from fsdp_hooks.kernels.byte_sums import TensorPiece

WORDS = {dtype: word for word, dtype in DTYPES.items()}
PLACE = Path("the received tensors")


class ReceivedSource(Source):
    """Tensors in memory, on any device, as logical tensors.

    Args:
        tensors: by their names in the files that an export would write.
        config: the content of config.json, with its quantization_config; {} if nothing is quantized.
        wanted: as of StoredDirectory.
        architecture: as of StoredDirectory.

    Raises:
        ValueError: a value is no plain tensor; or as for a directory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        config: Mapping[str, Any],
        wanted: Mapping[str, Entry] | None = None,
        architecture: Architecture | None = None,
    ) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not is_plain(tensor) or tensor.dtype not in WORDS:
                dtype = f" of {tensor.dtype}" if isinstance(tensor, Tensor) else ""
                raise ValueError(
                    f"{name} is a {type(tensor).__name__}{dtype}; with config=..., expected plain tensors under "
                    "the names of an export's files"
                )
        names = wanted_names({*map(weight_of, tensors)}, wanted or {}, architecture, config)
        self._tensors, wanted = tensors, {names.file_name(name): want for name, want in (wanted or {}).items()}
        # Told as the header of a file would tell them, so that all below is the code that reads files.
        held = {
            name: FileTensor(name, "", WORDS[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        directory = Directory(PLACE, held, config)
        # Integers are values (counts of tokens, say) only if the model has such a tensor; otherwise they may be codes.
        counts = {name for name, want in wanted.items() if not want.dtype.is_floating_point}
        made = presented(directory, contents_of(directory, counts), wanted, self._tensor_of)
        self._made = renamed(made, names.memory_name) if names.in_files else made
        self.entries = self._made.entries

    def parts(self, name: str) -> dict[str, Tensor]:
        """Raise: a digest takes tensors piece by piece."""
        raise NotImplementedError

    def pieces(self, name: str, part: str) -> Iterator[TensorPiece]:
        """Yield the pieces of a part, on the tensors' device."""
        placed = self._made.placed[self.entries[name].key(part)]
        return (placed.piece(chunk, self._tensor_of) for chunk in placed.chunks)

    def _tensor_of(self, tensor: FileTensor) -> Tensor:
        value: Tensor = said_tensor(tensor) if tensor.is_said else self._tensors[tensor.name]
        return value
