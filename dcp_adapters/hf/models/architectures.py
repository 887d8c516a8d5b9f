"""The architecture that a config names, on the meta device, and how transformers reads files into it.

Transformers renames weights while it loads, and puts weights of experts together; `save_pretrained` does the reverse.
Its own rules decide here, the ones that it uses itself (transformers.conversion_mapping, core_model_loading):

    named(tensors)    which tensor of the model each tensor of a directory becomes, by their names
    written()         the names of the files that transformers itself would write
    reads(tensors)    what transformers would miss, not know, or find twice

Transformers is imported if a config names a model of its, and only if it is installed. Without it, with another
version's rules, or for a model that it does not know, there is no architecture; then names are compared as they are.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcp_adapters.hf.models.file_names import FileNames, joined_names
from fsdp_hooks.wrappers import unwrap

LIBRARY = "transformers"
RULES = ("dot_natural_key", "rename_source_key", "revert_weight_conversion", "WeightConverter", "WeightRenaming")
# Buffers that models compute and old files have; transformers leaves these out if a model has such a buffer.
COMPUTED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
LOADED_BY = "_weight_conversions"  # holds the rules that a model was loaded by, for transformers' save_pretrained
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Read:
    """What transformers would do with a directory's tensors.

    missing: tensors of the model that nothing gives a value. unexpected: tensors of the directory that it does not
    know. twice: a tensor of the model -> the tensors of the directory that would each be it. unlike: a tensor of
    the model -> in words, why what the directory has for it does not fit.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    twice: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unlike: Mapping[str, str] = field(default_factory=dict)


class Architecture:
    """A model of transformers on the meta device.

    Attributes:
        model: it.
        shapes: name in memory -> shape, of all that its state dict has.
        tied: name -> the name of the tensor that it is tied to.
        spare: names that files need not have: of tied tensors, and of those that transformers does not miss.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._rules: Any = importlib.import_module(f"{LIBRARY}.core_model_loading")
        self._state = dict(model.state_dict())
        self.shapes = {name: tuple(value.shape) for name, value in self._state.items()}
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        ignored = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
        self.spare = {name for name in self.shapes if name in self.tied or _fits(name, ignored)}

    @property
    def class_name(self) -> str:
        """Return the name of the model's class."""
        return type(self.model).__name__

    def written(self) -> dict[str, tuple[int, ...]]:
        """Map names in the files to shapes, as `save_pretrained` would write the model."""
        # `save_pretrained` writes a tied tensor once, under the name that the others are tied to.
        state = {name: value for name, value in self._state.items() if name not in self.tied}
        reverted = self._rules.revert_weight_conversion(self.model, state)
        return {name: tuple(value.shape) for name, value in reverted.items()}

    def named(self, tensors: Iterable[str]) -> FileNames:
        """Return the names in memory and in a directory of these tensors; tensors that the model lacks are left out."""
        found: dict[str, list[tuple[str, Any, str | None]]] = {}
        for name, own, converter, pattern in self._rename(tensors):
            if own in self.shapes:
                found.setdefault(own, []).append((name, converter, pattern))
        in_files: dict[str, str] = {}
        whole: set[str] = set()
        otherwise: dict[str, tuple[str, ...]] = {}
        for own, those in found.items():
            names = [name for name, _, _ in those]
            converter = those[0][1]
            if converter is None:
                in_files[own] = names[0]
                whole.add(names[0])
                continue
            targets = [own.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
            # Names of other operations, and of those with several results, are not followed; an export refuses them.
            joined = self._join(names, converter)
            if joined is not None and len(targets) == 1:
                in_files[own] = joined
            else:
                otherwise |= dict.fromkeys((one for one in targets if one in self.shapes), tuple(names))
        in_files |= {name: name for name in self.spare if name not in in_files and name not in otherwise}
        return FileNames(in_files, frozenset(whole), otherwise)

    def owners(self, tensors: Iterable[str]) -> dict[str, str]:
        """Map names in a directory to the tensor of the model that each becomes, or becomes a part of."""
        return {name: own for name, own, _, _ in self._rename(tensors) if own in self.shapes}

    def reads(self, tensors: Shapes) -> Read:
        """Return what transformers would do with tensors of these names and shapes, each taken for a dense weight."""
        given: dict[str, list[str]] = {}
        merged: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        unexpected: list[str] = []
        for name, own, converter, pattern in self._rename(tensors):
            if own not in self.shapes:
                unexpected.append(name)
            elif converter is None:
                given.setdefault(own, []).append(name)
            else:
                merged.setdefault(own, (converter, {}))[1].setdefault(str(pattern), []).append(name)
        twice = {own: tuple(names) for own, names in given.items() if len(names) > 1}
        unlike = {
            own: f"{names[0]} is {list(tensors[names[0]])}, and the model has {list(self.shapes[own])}"
            for own, names in given.items()
            if tuple(tensors[names[0]]) != self.shapes[own]
        }
        made = set(given)
        for own, (converter, sources) in merged.items():
            names = tuple(name for those in sources.values() for name in those)
            if own in given:
                twice[own] = (*given[own], *names)
            targets, problem = self._merge(own, converter, sources, tensors)
            made |= {own, *targets}
            if problem is not None:
                unlike[own] = f"{names[0]}, ... ({len(names)}): {problem}"
        return Read(tuple(self._missing(made)), tuple(self._unknown(unexpected)), twice, unlike)

    # -- transformers' rules -------------------------------------------------------------------------------------------

    def _rename(self, tensors: Iterable[str]) -> Iterable[tuple[str, str, Any, str | None]]:
        """Yield (name, name in memory, converter, its pattern that fits), as transformers finds them when it loads."""
        rules, meta, prefix = self._rules, self._state, self.model.base_model_prefix
        mapping = importlib.import_module(f"{LIBRARY}.conversion_mapping").get_model_conversion_mapping(self.model)
        renamings = [one for one in mapping if isinstance(one, rules.WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, rules.WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        for name in sorted(tensors, key=rules.dot_natural_key):
            own, pattern = rules.rename_source_key(name, renamings, converters, prefix, meta)
            if own not in meta and name in meta:  # it should not have been renamed
                own, pattern = rules.rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=meta)
            yield name, own, of_pattern[pattern] if pattern is not None else None, pattern

    def _join(self, names: Sequence[str], converter: Any) -> str | None:
        """Return the name of the weight that joins these linears of experts; None if another operation joins them."""
        kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
        if kinds not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            return None
        leaves = [pattern.removesuffix(".weight").rpartition("*.")[2] for pattern in converter.source_patterns]
        return joined_names(names, leaves)

    def _merge(
        self, own: str, converter: Any, sources: Mapping[str, Sequence[str]], tensors: Shapes
    ) -> tuple[list[str], str | None]:
        """Return what a converter makes of these tensors, and say why that does not fit; None if it fits."""
        # It collects the tensors that it is given, and the model's rules are shared.
        converter = deepcopy(converter)
        for pattern, names in sources.items():
            for name in names:
                shape = tuple(tensors[name])
                converter.add_tensor(own, name, pattern, torch.empty(shape, dtype=torch.float32, device="meta"))
        try:
            # On the meta device: only shapes are computed.
            made = converter.convert(own, model=self.model, config=self.model.config)
        except Exception as error:  # noqa: BLE001 - whatever an operation of transformers raises
            return [], f"they cannot be put together: {str(error).splitlines()[0]}"
        shapes = {name: tuple((value[0] if isinstance(value, list) else value).shape) for name, value in made.items()}
        other = [f"{name} {list(shape)}" for name, shape in shapes.items() if self.shapes.get(name) != shape]
        return list(shapes), f"they would be {other[0]}, and the model has {list(self.shapes[own])}" if other else None

    def _missing(self, made: set[str]) -> list[str]:
        there = made | {name for name, to in self.tied.items() if to in made}
        # One of two tied tensors is enough; loading gives its values to the other.
        there |= {to for name, to in self.tied.items() if name in made}
        return [name for name in self.shapes if name not in there | (self.spare - self.tied.keys())]

    def _unknown(self, names: Sequence[str]) -> list[str]:
        buffers = [name for name, _ in self.model.named_buffers()]
        ignored = list(getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ())
        ignored += [pattern for end, pattern in COMPUTED.items() if any(name.endswith(end) for name in buffers)]
        return [name for name in names if not _fits(name, ignored)]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


# -- which one ---------------------------------------------------------------------------------------------------------


def architecture_of(model: Any) -> Architecture | None:
    """Return the architecture of a live model of transformers; None for any other model."""
    if LIBRARY not in sys.modules:  # no such model can be there
        return None
    library = _library()
    model = unwrap(model) if isinstance(model, nn.Module) else model
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    own: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))  # FSDP makes another
    return _on_meta(lambda: _build_alike(own, model))


def _build_alike(own: Any, model: Any) -> Any:
    """Build another model of the class, with the config of this one and the rules that it was loaded by."""
    built = own(deepcopy(model.config))
    # A model that was loaded from files of an older version is saved under their names.
    if LOADED_BY in vars(model):
        setattr(built, LOADED_BY, deepcopy(getattr(model, LOADED_BY)))
    return built


def architecture_said(config: Mapping[str, Any], *, quantized_as: str | None = None) -> Architecture | None:
    """Return the architecture that a config.json names; None if transformers is not installed, or does not know it.

    Args:
        config: the content of a config.json. If it names no class, the one for text, or for images and text, is taken.
        quantized_as: the `quant_method` for which transformers changes modules before it reads the weights.
    """
    kind, named = config.get("model_type"), config.get("architectures")
    library = _library() if isinstance(kind, str) else None
    if library is None:
        return None
    values = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    own = getattr(library, named[0], None) if isinstance(named, list) and named and isinstance(named[0], str) else None
    if named and not (isinstance(own, type) and issubclass(own, library.PreTrainedModel)):
        return None  # code of the directory's own, which is never run
    try:
        made = library.AutoConfig.for_model(**values)
    except Exception:  # noqa: BLE001 - of a type that it does not know, or of values that it does not take
        return None
    autos = (library.AutoModelForCausalLM, library.AutoModelForImageTextToText)
    ways = [lambda: own(made)] if own is not None else [lambda auto=auto: auto.from_config(made) for auto in autos]
    return next((built for way in ways if (built := _on_meta(way, quantized_as)) is not None), None)


def _library() -> Any:
    """Return transformers, if it has the rules that are needed; None if it is not there, or has different ones."""
    if LIBRARY not in sys.modules and importlib.util.find_spec(LIBRARY) is None:
        return None
    try:
        library = importlib.import_module(LIBRARY)
        rules = importlib.import_module(f"{LIBRARY}.core_model_loading")
        importlib.import_module(f"{LIBRARY}.conversion_mapping").get_model_conversion_mapping  # noqa: B018
    except (ImportError, AttributeError):
        return None
    return library if all(hasattr(rules, name) for name in RULES) else None


def _on_meta(build: Any, quantized_as: str | None = None) -> Architecture | None:
    """Return what `build` makes on the meta device; None if that fails."""
    # What a class of transformers raises for a config is not known; then names are compared as they are.
    with suppress(Exception), torch.device("meta"):
        model = build()
        if quantized_as is not None:
            _change_modules(model, quantized_as)
        return Architecture(model)
    return None


def _change_modules(model: nn.Module, quantized_as: str) -> None:
    """Replace the modules that transformers replaces before it reads quantized weights: by linears of experts, say."""
    base = importlib.import_module(f"{LIBRARY}.quantizers.base")
    known: Mapping[str, Any] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    for name, module in list(model.named_modules()):
        change = known.get(type(module).__name__, {})
        if quantized_as in [getattr(one, "value", one) for one in change.get("quantization_methods", ())]:
            config: Any = model.config
            model.set_submodule(name, change["module_name"](config.get_text_config()))
