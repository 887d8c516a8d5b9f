"""Which tensors `dtype=` leaves as they are: buffers, and what transformers keeps in fp32.

A router's correction bias is a buffer in fp32 that is added to scores which differ by less than bf16 can say: cast, it
sends tokens to other experts. So parameters alone are cast. Who knows what is one, in this order:

    a module         of itself
    an architecture  that config.json names and transformers has: it is built on the meta device, and asked
    nobody           what is in fp32 beside others in fewer bits stays; if all are in fp32, all are cast; it is told

A state dict, a checkpoint and a directory have names and values alone, so for them the second or the third decides.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KV_SCALES
from dcp_adapters.hf.models.architectures import architecture_said
from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from fsdp_hooks.wrappers import plain_buffers, plain_parameters

LASTING = "_keep_in_fp32_modules_strict"  # of transformers' classes: regular expressions, in fp32 whatever the model is
LASTING_FP16 = "_keep_in_fp32_modules"  # likewise, in a model in fp16


def lasting_patterns(model: nn.Module, attributes: Iterable[str] = (LASTING, LASTING_FP16)) -> list[re.Pattern[str]]:
    """Return patterns of names that transformers keeps in fp32, of the model and of all models in it."""
    found = {one for part in model.modules() for name in attributes for one in getattr(part, name, None) or ()}
    return [re.compile(one.replace("*", ".*")) for one in sorted(found)]  # as transformers reads them


@dataclass(frozen=True)
class Roles:
    """What a model says of its tensors.

    stay, cast: names of those that stay as they are, and of the others. patterns: of names that stay.
    """

    stay: frozenset[str]
    cast: frozenset[str]
    patterns: tuple[re.Pattern[str], ...] = ()

    @staticmethod
    def of(model: nn.Module, prefix: str = "") -> "Roles":
        """Ask a module; its names begin with `prefix`, which is cut off."""
        patterns = tuple(lasting_patterns(model))
        buffers = {name for name, _ in plain_buffers(model, remove_duplicate=False)}
        names = buffers | {name for name, _ in plain_parameters(model, remove_duplicate=False)}
        stay = {name for name in names if name in buffers or any(one.search(name) for one in patterns)}
        stay, cast = ({name.removeprefix(prefix) for name in those} for those in (stay, names - stay))
        return Roles(frozenset(stay), frozenset(cast), patterns)

    def stays(self, name: str) -> bool | None:
        """Return whether a tensor stays as it is; None if the model does not know it.

        Names in files may begin in another way than those in memory, so the last two words decide.
        """
        if name in self.stay or name in self.cast:
            return name in self.stay
        if any(one.search(name) for one in self.patterns):
            return True
        stay, cast = (_end(name) in ends for ends in self._ends)
        # Words that a buffer and a parameter share say nothing.
        return stay if stay != cast else None

    @functools.cached_property
    def _ends(self) -> tuple[set[str], set[str]]:
        return {*map(_end, self.stay)}, {*map(_end, self.cast)}


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def kept_names(  # noqa: PLR0913 - of one question
    entries: Mapping[str, Entry],
    own: Mapping[str, str],
    dtype: torch.dtype,
    *,
    sources: Iterable[Any],
    prefix: str | None,
    config: Mapping[str, Any],
) -> tuple[frozenset[str], str | None]:
    """Decide which tensors are not cast, and what to tell of tensors that nobody knows.

    Args:
        entries: of all sources together, by their names in the files.
        own: name of an entry -> its name in its source, by which models know it.
        dtype: that was asked for.
        sources: what the caller gave; modules among them say what their tensors are.
        prefix: that was cut off from the names of the first.
        config: the content of config.json.
    """
    modules = [(source, prefix if not number else None) for number, source in enumerate(sources)]
    known = [Roles.of(source, cut or "") for source, cut in modules if isinstance(source, nn.Module)]
    dense = [*_dense(entries)]
    names = [name for name in dense if entries[name].dtype != dtype]
    said = {name: _ask(known, own[name]) for name in names}
    # Building it takes time, so it is asked only if modules have left something open.
    described = architecture_said(config) if None in said.values() else None
    if described is not None:
        known.append(Roles.of(described.model))
        owners = described.owners(names)  # a linear of an expert belongs to the weight of all experts
        said = {name: _ask(known, own[name], owners.get(name)) for name in names}
    unknown = [name for name, stays in said.items() if stays is None]
    quantized = [name for name, entry in entries.items() if entry.recipe is not None]
    mixed = any(entries[name].dtype.itemsize <= 2 for name in (*dense, *quantized))
    # A checkpoint in which all is fp32 says nothing about any tensor; in a mixed one somebody has kept these in fp32.
    wide = [name for name in unknown if mixed and entries[name].dtype.itemsize > 2]
    kept = frozenset([name for name, stays in said.items() if stays] + wide)
    return kept, _warning_of(unknown, wide) if unknown else None


def _ask(known: Sequence[Roles], *names: str | None) -> bool | None:
    said = (roles.stays(name) for name in names if name is not None for roles in known)
    return next((stays for stays in said if stays is not None), None)


def _dense(entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield the dense tensors of floats that are no scales."""
    for name, entry in entries.items():
        scale = name.rpartition(".")[2] in (INPUT_SCALE, *KV_SCALES)
        if entry.recipe is None and entry.dtype.is_floating_point and not scale:
            yield name


def _warning_of(unknown: Sequence[str], wide: Sequence[str]) -> str:
    which = f"{len(unknown)} tensors ({few_of(unknown, 4)})" if len(unknown) > 1 else unknown[0]
    kept = f"those in fp32 beside others in fewer bits stay as they are ({few_of(wide, 4)})"
    return (
        f"nothing tells parameters, which are cast, from buffers, which are not, among {which}: "
        f"{kept if wide else 'all are cast'}; give the module itself, or a config= of an architecture that "
        "transformers knows"
    )
