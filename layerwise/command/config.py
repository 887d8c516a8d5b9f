"""The config of a run: a section for what is calibrated, how, on what, and what is made of it.

Keys of `calibration` are arguments of `layerwise.calibrate`; options of `recipe` and `algorithm` are fields of the
recipe and of the algorithm. Nothing is looked at here but the config itself, and which of its paths are the same place;
checks.py asks whether it fits the files.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcp_adapters.gguf.plan import GGUF
from dcp_adapters.hf.exporting.config import shard_size
from dcp_adapters.hf.layouts.registry import LAYOUTS
from layerwise.algorithms.algorithm import Algorithm
from layerwise.command.keys import key
from layerwise.formats.candidates import COMPARE, Menu
from layerwise.inputs.values.stores import INPUTS_ON
from layerwise.running.kv_cache import GRANULARITIES, KVCache
from layerwise.stages.experts import EXPERT_INPUTS
from qtensor.spec.recipes import Recipe

DTYPES = ("auto", "bfloat16", "float16", "float32")
PLACES = ("device", "cpu", "disk")
FORMATS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".npy": "npy", ".safetensors": "safetensors"}
DATA_FORMATS = ("auto", *dict.fromkeys(FORMATS.values()))
PICTURES = (".png", ".svg", ".pdf")
REPORTS = (".json", ".txt", *PICTURES)


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """The model that is calibrated."""

    path: Path = key("the model's directory: config.json and safetensors, dense or quantized", example="path/to/model")
    dtype: str = key("of the weights in memory; auto: what config.json says", "auto", choices=DTYPES)
    device: str = key("where it computes: cpu, cuda, cuda:1; auto: an accelerator if there is one", "auto")
    weights_on: str = key(
        "where weights wait until their layer's turn. device, cpu: in memory there, each rank its shards; disk: in the "
        "model's files, read layer by layer, so that even one process can have a model larger than its memory",
        "device",
        choices=PLACES,
    )


@dataclass(frozen=True, kw_only=True)
class SearchKeys:
    """How a recipe is chosen for each weight, if there are several: arguments of `layerwise.search_formats`."""

    bits_per_weight: float = key("how many bits the weights may take on average, scales included", example="5.0")
    compare: str = key(
        "what is least: the errors of all linears in parts of their outputs (relative), or their energies (absolute)",
        "relative",
        choices=COMPARE,
    )
    assignment: Path | None = key("a JSON file for the choice, and the errors that it was made by", None)


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """What it is calibrated on. A run's bytes depend on these keys, and not on the number of ranks."""

    path: Path = key("a file: text, JSON lines, or token ids (.npy, .safetensors)", example="path/to/text.txt")
    format: str = key(
        "how it is read; auto: by its suffix (.txt, .md, .jsonl, .npy, .safetensors)", "auto", choices=DATA_FORMATS
    )
    field: str | None = key(
        "JSON lines: the field that has the text (null: text); safetensors: the tensor (null: the only one)", None
    )
    tokenizer: Path | None = key("the tokenizer's directory; null: the model's", None)
    samples: int = key("how many samples, chosen by the seed; the file must have as many", 128, least=1)
    sequence_length: int = key("tokens of a sample; token ids of two dims must have rows of this length", 2048, least=1)
    batch_size: int = key("samples that run through a layer at once; the last batch may have fewer", 1, least=1)
    seed: int = key("chooses the samples", 0, least=0)


@dataclass(frozen=True, kw_only=True)
class CalibrationKeys:
    """How it is calibrated: arguments of `layerwise.calibrate`."""

    layers: tuple[str, ...] | str | None = key(
        "the layers, as names or patterns; null: the largest list of modules; []: no layers, the whole model at once",
        None,
    )
    include: tuple[str, ...] = key("patterns of modules to quantize", ("*",))
    exclude: tuple[str, ...] = key("patterns of modules to leave out, such as lm_head", ())
    inputs: str = key("static: find a scale for each linear's input, too", "dynamic", choices=("dynamic", "static"))
    expert_inputs: str = key(
        "what experts are fitted to: the tokens that are routed to them, or all tokens of their block",
        "routed",
        choices=EXPERT_INPUTS,
    )
    kv_cache: str | None = key(
        "find scales for keys and values in an FP8 cache, one of each for an attention (tensor), or for each of its "
        "heads (head); null: none",
        None,
        choices=GRANULARITIES,
    )
    layer_inputs: str | None = key(
        "on the outputs of which layer before: unquantized or quantized; null: as the algorithm says",
        None,
        choices=("unquantized", "quantized"),
    )
    inputs_on: str = key("where inputs of layers wait", "device", choices=INPUTS_ON)
    checkpoint_dir: Path | None = key(
        "where finished layers are kept, on storage that all ranks share; with it, a second start goes on where the "
        "first was stopped",
        None,
        example="path/to/state",
    )
    save_every: int = key("after how many layers to save", 1, least=1)

    @property
    def cache(self) -> KVCache | None:
        """Return `kv_cache` as `layerwise.calibrate` takes it."""
        return None if self.kv_cache is None else KVCache(granularity=self.kv_cache)


@dataclass(frozen=True, kw_only=True)
class OutputKeys:
    """What is made of the result. Nothing that exists is overwritten."""

    path: Path | None = key("a directory that engines load (layout gguf: a file)", None, example="path/to/output")
    layout: str = key("how it is written", "compressed-tensors", choices=sorted([*LAYOUTS, GGUF.name]))
    like: Path | None = key("for layout gguf: a GGUF file of the same model, in any type", None)
    max_shard_size: int | str = key("the size of a file, at most, as bytes or as a text", "5GB")
    checkpoint: Path | None = key("a DCP checkpoint of the whole model, to train on or to convert", None)
    report: tuple[Path, ...] = key(
        f"files for the error of every linear, each in the format of its suffix ({', '.join(REPORTS)})", ()
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All of it. `data` is None if nothing is fitted to data, `search` if there is one recipe for all weights."""

    model: ModelKeys
    recipe: Recipe | Menu
    algorithm: Algorithm
    data: DataKeys | None
    calibration: CalibrationKeys
    output: OutputKeys
    search: SearchKeys | None = None

    @property
    def search_dir(self) -> Path | None:
        """Return where a search keeps what it has measured."""
        directory = self.calibration.checkpoint_dir
        return None if directory is None else directory / "search"

    def outputs(self) -> dict[str, Path]:
        """Map keys to the paths of everything that is to be written."""
        named = {"output.path": self.output.path, "output.checkpoint": self.output.checkpoint}
        named |= {f"output.report[{number}]": path for number, path in enumerate(self.output.report)}
        named["recipe.assignment"] = None if self.search is None else self.search.assignment
        return {name: path for name, path in named.items() if path is not None}


def problems_of(config: Config) -> list[str]:
    """Return what does not go together, of keys that are right by themselves; each problem begins with its key."""
    return [*_device_problems(config.model.device), *_output_problems(config), *_data_problems(config)]


def _device_problems(device: str) -> list[str]:
    try:
        # torch.device knows the meta device, on which nothing can be computed.
        known = device == "auto" or torch.device(device).type != "meta"
    except RuntimeError:
        known = False
    return [] if known else [f"model.device: expected auto, or a device such as cpu or cuda:1, got {device!r}"]


def _output_problems(config: Config) -> list[str]:
    output, problems = config.output, []
    paths = list(config.outputs().values())
    try:
        shard_size(output.max_shard_size)
    except ValueError as error:
        problems.append(f"output.max_shard_size: {str(error).partition(': ')[2]}")
    if output.path is None and output.checkpoint is None:
        problems.append("output: expected a path, a checkpoint, or both; without one the result would be lost")
    if (output.layout == GGUF.name) != (output.like is not None):
        problems.append(f"output.like: it goes with layout {GGUF.name}, a file that is made like another of the model")
    problems += [
        f"output.report[{number}]: expected a name that ends in one of {', '.join(REPORTS)}, got {str(path)!r}"
        for number, path in enumerate(output.report)
        if path.suffix not in REPORTS
    ]
    if config.data is None or config.calibration.layers == ():
        problems += [
            f"output.report[{number}]: {path} would be empty: a picture shows errors of layers on data, and needs both"
            for number, path in enumerate(output.report)
            if path.suffix in PICTURES
        ]
    # Paths are compared resolved: a link or ".." may name the model's directory in other words.
    state, model = config.calibration.checkpoint_dir, config.model.path.resolve()
    if state is not None and state.resolve() == model:
        problems.append(
            "calibration.checkpoint_dir: it is the model's directory, which stays as it is; name another one"
        )
    for named, path in config.outputs().items():
        if path.resolve().parent == model:
            problems.append(
                f"{named}: it would lie among the model's files, which stay as they are; name another directory"
            )
        # The checkpoint_dir is made first. An output around it would exist by then, and be refused as taken.
        if state is not None and state.resolve().is_relative_to(path.resolve()):
            problems.append(f"{named}: {path} would hold the checkpoint_dir, so it could not be free; name another one")
    places = [path.resolve() for path in paths]
    # The second write would be refused after the whole run, or overwrite the first.
    twice = {place: path for place, path in zip(places, paths, strict=True) if places.count(place) > 1}
    problems += [f"output: {path} is named twice" for path in twice.values()]
    if config.model.weights_on == "disk" and output.checkpoint is not None:
        problems.append(
            "output.checkpoint: it holds the whole model, which weights_on: disk never loads; leave one out"
        )
    return problems


def _data_problems(config: Config) -> list[str]:
    data = config.data
    if data is None:
        why = f"{type(config.algorithm).__name__} fits weights to data" if config.algorithm.needs else ""
        if config.calibration.inputs == "static":
            why = "inputs: static takes scales from data"
        if config.calibration.expert_inputs == "all":
            why = "expert_inputs: all sends the tokens of data to all experts"
        if config.calibration.kv_cache is not None:
            why = "kv_cache takes scales from data"
        return [f"data: missing; {why}"] if why else []
    kind = data_format(data)
    if kind is None:
        return [
            f"data.format: the suffix of {data.path.name!r} tells none; expected one of {', '.join(DATA_FORMATS[1:])}"
        ]
    problems = []
    if kind in ("text", "npy") and data.field is not None:
        problems.append(f"data.field: a file of the format {kind} has no fields; leave it out")
    if kind in ("npy", "safetensors") and data.tokenizer is not None:
        problems.append(f"data.tokenizer: a file of the format {kind} holds token ids already; leave it out")
    return problems


def data_format(data: DataKeys) -> str | None:
    """Return how the file is read; None if its suffix does not tell."""
    return FORMATS.get(data.path.suffix) if data.format == "auto" else data.format


def plain(config: Config) -> dict[str, Any]:
    """Return the config as JSON, every key with its value; a run is recognised by it."""
    sections = {name: getattr(config, name) for name in ("model", "data", "calibration", "output")}
    told = {name: None if held is None else _plain_section(held) for name, held in sections.items()}
    search = {} if config.search is None else {"search": _plain_section(config.search)}
    return {**told, **search, "recipe": config.recipe.to_json(), "algorithm": config.algorithm.to_json()}


def _plain_section(section: Any) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in vars(section).items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(each) for each in value]
    # A run is the same from whatever directory it is started.
    return str(value.absolute()) if isinstance(value, Path) else value
