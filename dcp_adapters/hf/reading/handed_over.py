"""Quantized weights made of tensors that somebody else reads from the files, as transformers' loader does.

    owners          each tensor of the files that is a part of a quantized weight -> the weight, by its name in memory
    weight(name)    the weight, once all of these tensors are there; its bytes are those of `import_hf`

What a directory holds is decided by the code of `import_hf` (as_checkpoint.py); only who opens the files differs.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dcp_adapters.hf.files.directory import read_directory
from dcp_adapters.hf.models.architectures import Architecture, architecture_of
from dcp_adapters.hf.reading.as_checkpoint import Presented
from dcp_adapters.hf.reading.passed_over import PassedOver, unexpected_patterns
from dcp_adapters.hf.reading.placed import Placed
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.hf.reading.schemes import code_names
from dcp_adapters.plain.words import few_of, in_lines
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import entry_of
from dcp_adapters.records.rotations import advise_rotating, is_marker
from qtensor.model.model_init import uses_linear

LOAD = "quantize_ a model by the directory's recipe, on the meta device, and load it by import_hf(directory, model)"


@dataclass(frozen=True)
class HandedOver:
    """The quantized weights of a directory, for a model on the meta device.

    Attributes:
        layout: its name; "" for a dense directory.
        weights: name in memory -> what it is.
        owners: name of a tensor in the files -> name in memory of the weight that it is a part of, or stands beside.
        scales: name in memory -> value, fp32 [], of the scales of inputs and of the KV cache.
        placed: key of a part -> where its bytes are.
        files: names of the files that all of it was read from.
    """

    layout: str = ""
    weights: Mapping[str, Entry] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    placed: Mapping[str, Placed] = field(default_factory=dict)
    files: frozenset[str] = frozenset()

    @staticmethod
    def of(path: str | os.PathLike[str], model: nn.Module) -> "HandedOver":
        """Read the headers of a directory.

        Args:
            path: the directory.
            model: whose names and dtypes the weights get; of transformers, before anything in it is tied or sharded.

        Raises:
            FileNotFoundError, ValueError: as `import_hf`; a weight that the model has no place for.
        """
        wanted = {name: entry_of(name, value) for name, value in model.state_dict().items()}
        passed_over = PassedOver((), unexpected_patterns(model))
        architecture = architecture_of(model)
        reader = HuggingFaceReader(path, wanted=wanted, passed_over=passed_over, architecture=architecture)
        made = reader.presented()
        problems = [*_problems(made, wanted, model)]
        # Of a dense directory transformers itself says what it does not read.
        if made.quantized:
            problems += _not_read(made, wanted, architecture)
        if problems:
            raise ValueError(f"{path} does not fit the model; nothing has been loaded:" + in_lines(sorted(problems)))
        scales = {name: reader.read(name)[""] for name in sorted(made.scales)}
        tensors = read_directory(path).tensors
        files = frozenset(tensor.file for tensor in tensors.values())
        return HandedOver(made.layout, made.quantized, _owners(made, tensors), scales, made.placed, files)

    def weight(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a quantized weight.

        Args:
            name: in memory.
            tensors: name in the files -> all that the weight owns there, whole and as they are, on one device.
        """
        entry = self.weights[name]
        return entry.tensor({part: _joined(self.placed[entry.key(part)], tensors) for part in entry.parts()})


def _joined(placed: Placed, tensors: Mapping[str, Tensor]) -> Tensor:
    pieces = [placed.piece(chunk, lambda held: tensors[held.name]).data for chunk in placed.chunks]
    if len(pieces) == 1:
        return pieces[0].contiguous()
    out = torch.empty(placed.shape, dtype=placed.dtype, device=pieces[0].device)
    for chunk, piece in zip(placed.chunks, pieces, strict=True):
        out[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
    return out


def _owners(made: Presented, tensors: Iterable[str]) -> dict[str, str]:
    """Map tensors of the files to weights; what belongs to no weight's module goes to the first weight."""
    parts = {name: [made.placed[key] for key in entry.part_keys()] for name, entry in made.quantized.items()}
    held = {chunk.held.tensor.name: name for name, own in parts.items() for one in own for chunk in one.chunks}
    modules = {tensor.rpartition(".")[0]: name for tensor, name in held.items()}
    names = code_names()
    # Shapes that are stored beside codes, and scales of inputs, which are no parts.
    for tensor in tensors:
        module, _, own = tensor.rpartition(".")
        if module in modules and own in names:
            held.setdefault(tensor, modules[module])
    for scale in made.scales if held else ():
        held.setdefault(made.placed[scale].chunks[0].held.tensor.name, next(iter(made.quantized)))
    return held


def _not_read(made: Presented, wanted: Mapping[str, Entry], architecture: Architecture | None) -> Iterator[str]:
    """Yield dense weights that transformers would initialise, as it does not know what the files call their tensors."""
    dense = {name: made.placed[name] for name in made.entries.keys() & wanted.keys() - made.quantized.keys()}
    held = {name: [chunk.held.tensor.name for chunk in placed.chunks] for name, placed in dense.items()}
    owners = {} if architecture is None else architecture.owners({one for own in held.values() for one in own})
    for name, tensors in held.items() if architecture is not None else ():
        lost = [one for one in tensors if owners.get(one) != name]
        if lost:
            yield f"{name}: transformers does not read it from {few_of(lost, 2)}; {LOAD}"


def _problems(made: Presented, wanted: Mapping[str, Entry], model: nn.Module) -> Iterator[str]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*tied.keys(), *tied.values()}
    modules = dict(model.named_modules())
    for name, entry in made.quantized.items():
        module, _, _ = name.rpartition(".")
        if name not in wanted:
            # Taken for dense, its codes would be values.
            yield f"{name}: only the directory has it, as {entry.kind}; the model has no such weight"
        elif wanted[name].shape != entry.shape:
            yield f"{name}: the directory has the shape {list(entry.shape)}, the model {list(wanted[name].shape)}"
        elif name in tied:
            yield f"{name}: it is {entry.kind}, and the model ties it to another one; untie them (tie_word_embeddings)"
        elif len(entry.shape) == 2 and not uses_linear(modules[module]):
            kind = type(modules[module]).__name__
            yield f"{name}: it is {entry.kind}, and quantized weights are those of linears, this one of {kind}; {LOAD}"
    for name, entry in made.entries.items():
        if is_marker(name):
            yield f"{name}: only the directory has it{advise_rotating(entry, wanted)}; then load it by import_hf"
