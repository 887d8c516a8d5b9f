"""The model's own description beside its weights: config.json, and what an engine needs to make text of it.

It is taken from a directory, a file, a dict or a config object, and exported unchanged, except for what says how the
weights are stored.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcp_adapters.hf.files.config_sections import of_dtype, said_of_dtype, without_quantization
from dcp_adapters.hf.files.directory import read_directory
from dcp_adapters.hf.reading.schemes import contents_of, is_quantized
from dcp_adapters.plain.words import short
from fsdp_hooks.wrappers import plain_modules, unwrap

CONFIG, GENERATION = "config.json", "generation_config.json"
# What tools that quantize leave beside the weights, which are others after an export.
OF_QUANTIZATION = ("hf_quant_config.json", "quant_config.json", "quantize_config.json", "recipe.yaml")
# What may be in a directory and is not the model's description: weights, their index, a DCP checkpoint, a card of the
# dense model.
LEFT = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", "*.onnx", "*.h5", "*.msgpack"),
    *(".metadata", "*.distcp", "README*"),
)
DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class ModelConfig:
    """A model's description.

    values: of config.json. others: file name -> JSON, for files that are made. files: those to copy. weights: names of
    the tensors beside it, if it is a directory with weights.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    weights: frozenset[str] = frozenset()

    @property
    def tied(self) -> bool:
        """Return whether the output projection is the embedding."""
        text = self.values.get("text_config")
        nested = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
        return bool(self.values.get("tie_word_embeddings", nested))

    @property
    def model_types(self) -> set[str]:
        """Return the types of the model, and of the text model inside it if there is one."""
        text = self.values.get("text_config")
        found = (self.values.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None)
        return {one for one in found if isinstance(one, str)}

    def of_dtype(self, dtype: str) -> "ModelConfig":
        """Return the same, saying that the weights have this dtype, in all its sections."""
        return replace(self, values=of_dtype(self.values, dtype, known=DTYPES))

    def write(self, directory: Path, made: Mapping[str, Any], dtype: str) -> None:
        """Copy the files and write the JSON; `made` by a layout, `dtype` of the weights if the config names none."""
        for file in self.files:
            shutil.copyfile(file, directory / file.name)
        for name, content in self.json(made, dtype).items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n")

    def json(self, made: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Map file names to the content of the files of JSON that are made; arguments as of `write`."""
        config = {**self.values, "quantization_config": made[CONFIG]}
        if not said_of_dtype(config):
            config["dtype"] = dtype
        return {**self.others, **made, CONFIG: config}


def described_model(source: Any, prefix: str | None) -> Any:
    """Return the model that describes itself: the one below wrappers, or inside of a module that only holds it.

    That is the module at the prefix, or the only one inside; a source that is no module is given back.
    """
    if not isinstance(source, nn.Module):
        return source
    model = unwrap(source)
    if hasattr(getattr(model, "config", None), "to_dict"):
        return model
    if prefix:
        inside = dict(plain_modules(model, remove_duplicate=False))
        return inside.get(prefix.removesuffix("."), model)
    children = list(model.children())
    # A module with parameters of its own is a model, and no mere holder of one.
    alone = len(children) == 1 and not any(True for _ in model.parameters(recurse=False))
    return described_model(children[0], None) if alone else model


def model_config(config: Any, source: Any, prefix: str | None = None) -> ModelConfig:
    """Return the description that was given, or that a transformers model has.

    Args:
        config: the path of a directory or of a config.json, a dict, an object with `to_dict()`, or None.
        source: what is exported; a module's `config` and `generation_config` are taken if `config` is None.
        prefix: of the weights in it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: config.json is no JSON object.
        TypeError: something else was given.
    """
    if config is None:
        return _of_module(described_model(source, prefix)) if isinstance(source, nn.Module) else ModelConfig()
    if isinstance(config, str | os.PathLike):
        return _of_path(Path(config))
    return ModelConfig(without_quantization(_as_dict(config)))


def shard_size(text: int | str) -> int:
    """Return bytes, from a number or one with a unit ("5GB", "500MiB"). Raises ValueError for anything else."""
    size = 0
    if isinstance(text, int):
        size = 0 if isinstance(text, bool) else text
    elif isinstance(text, str):
        unit = next((unit for unit in sorted(UNITS, key=len, reverse=True) if text.upper().endswith(unit)), "")
        try:
            size = int(float(text[: len(text) - len(unit)]) * UNITS.get(unit, 1))
        except (ValueError, OverflowError):
            size = 0
    if size <= 0:
        raise ValueError(f'max_shard_size={short(text)}: expected bytes, or a text like "5GB" or "500MiB"')
    return size


def _of_path(path: Path) -> ModelConfig:
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; config= takes a model's directory or its config.json")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}; give another config=") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}, expected an object; give another config=")
    if not path.is_dir():
        return ModelConfig(without_quantization(values))
    kept = tuple(
        found
        for found in sorted(path.iterdir())
        if found.is_file() and found.name not in (CONFIG, *OF_QUANTIZATION) and not any(map(found.match, LEFT))
    )
    return ModelConfig(without_quantization(values), files=kept, weights=_weight_names(path))


def _weight_names(path: Path) -> frozenset[str]:
    """Return the model's tensors in a directory, quantized ones by the weight's name; none if they are not known."""
    try:
        directory = read_directory(path)
    except FileNotFoundError:
        return frozenset()
    if not is_quantized(directory):
        return frozenset(directory.tensors)
    try:
        contents = contents_of(directory)
    except ValueError:  # by another scheme; what its tensors are is not known
        return frozenset()
    dense = {name for name, tensor in contents.dense.items() if not tensor.is_said}
    return frozenset(dense | {linear.weight for linear in contents.linears.values()})


def _of_module(model: nn.Module) -> ModelConfig:
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return ModelConfig()
    values = without_quantization(_as_dict(config))
    own = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))  # fully_shard makes another
    of_library = own.__module__.partition(".")[0] == "transformers"  # another class may have been made from its config
    values["architectures"] = [own.__name__] if of_library else values.get("architectures") or [own.__name__]
    generation = getattr(model, "generation_config", None)
    return ModelConfig(values, {GENERATION: _as_dict(generation)} if hasattr(generation, "to_dict") else {})


def _as_dict(config: Any) -> dict[str, Any]:
    """Return what a config holds as a dict; of a config object only what is not its default, as it is saved."""
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_diff_dict", None) or getattr(config, "to_dict", None)
    if to_dict is None:
        raise TypeError(f"config= is a {type(config).__name__}, expected a path, a dict or an object with to_dict()")
    values: dict[str, Any] = json.loads(json.dumps(to_dict(), default=_text))
    return values


def _text(value: Any) -> str:
    """Return a dtype as config.json writes it."""
    return str(value).removeprefix("torch.")
