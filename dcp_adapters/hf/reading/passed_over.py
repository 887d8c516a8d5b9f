"""What an import passes over: tensors of the files that it is told to ignore, or that the model itself does without.

    ignore=                                 globs over the names in the files; also the parts of a quantized weight go
                                            that way, by the name of the weight
    _keys_to_ignore_on_load_unexpected      of a model of transformers: regular expressions, for names that it does not
                                            have, such as the layers that predict several tokens

They are passed over before anything is made of them, so they may be quantized in ways that the library does not read.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dcp_adapters.hf.files.engine_names import pieces_of
from dcp_adapters.hf.reading.schemes import code_names, weight_of
from dcp_adapters.records.entry import Entry
from qtensor.spec.selection import matches, unmatched

UNEXPECTED = "_keys_to_ignore_on_load_unexpected"


def unexpected_patterns(model: nn.Module) -> tuple[re.Pattern[str], ...]:
    """Return what a model, and each model in it, says that it does without."""
    found = {one for part in model.modules() for one in getattr(part, UNEXPECTED, None) or ()}
    return tuple(re.compile(one) for one in sorted(found))


@dataclass(frozen=True)
class PassedOver:
    """Which tensors of files are passed over.

    ignore: globs. unexpected: of a model.
    """

    ignore: Sequence[str] = ()
    unexpected: Sequence[re.Pattern[str]] = ()

    def asked(self, names: Iterable[str]) -> list[str]:
        """Return the names that `ignore` means, in their order."""
        return [name for name in names if self.ignore and any(matches(one, self.ignore) for one in _names_of(name))]

    def idle(self, ignored: Iterable[str]) -> list[str]:
        """Return the globs that mean none of the tensors which `asked` has found."""
        return unmatched(self.ignore, [one for name in ignored for one in _names_of(name)])

    def by_model(self, names: Iterable[str], wanted: Mapping[str, Entry]) -> list[str]:
        """Return names that the model does without, in their order; `wanted`: what it has, by names in the files."""
        if not self.unexpected:
            return []
        modules = {name.rpartition(".")[0] for name in wanted}
        modules |= {piece.module for name, want in wanted.items() for piece in pieces_of(name, want.shape) or ()}
        return [
            name
            for name in names
            # A pattern may be too wide for this model: what it has is loaded, whatever the pattern says.
            if any(one.search(name) for one in self.unexpected) and not _is_wanted(name, wanted, modules)
        ]


def _names_of(name: str) -> tuple[str, ...]:
    """Return the names that a tensor of a file goes by: its own, and that of the quantized weight it is a part of."""
    return tuple(dict.fromkeys((name, weight_of(name))))


def _is_wanted(name: str, wanted: Mapping[str, Entry], modules: Collection[str]) -> bool:
    """Return whether the model has the tensor, or the weight that it is a part of."""
    if name in wanted or weight_of(name) in wanted:
        return True
    module, _, own = name.rpartition(".")
    return module in modules and own in code_names()
