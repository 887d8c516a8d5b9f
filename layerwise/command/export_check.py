"""Can the result be written as the config asks? The export is planned before a weight is read.

Names, shapes and formats are those that the result will have. Scales are all 1: what fuses shares one scale then, as it
does after a calibration. A search may choose many ways, so several choices are planned in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dcp_adapters.gguf.like import open_like, read_like
from dcp_adapters.gguf.plan import GGUF, tensors_of
from dcp_adapters.hf.exporting.config import model_config, shard_size
from dcp_adapters.hf.exporting.expected import UNKNOWN, check_outputs, expected_of
from dcp_adapters.hf.exporting.plan import Request, plan_export
from dcp_adapters.hf.exporting.prepare import check_names
from dcp_adapters.hf.layouts.registry import layout_named
from dcp_adapters.records.entry import Entry
from layerwise.command.config import Config
from layerwise.command.yaml_text import ConfigError
from layerwise.stages.attentions import find_attentions
from layerwise.stages.targets import Target
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import tensor_wide


def check_export(config: Config, model: nn.Module, targets: Sequence[Target], *, dense: bool) -> None:
    """Refuse what the layout cannot hold, by planning the export: names, formats and shapes are known by now.

    Args:
        config: of the run.
        model: on the meta device.
        targets: the weights that will be quantized.
        dense: whether the model's directory is dense.

    Raises:
        ConfigError: the model's files cannot be read in the way that the config asks for.
        ValueError: what the export would refuse.
    """
    output = config.output
    if output.path is None:
        return
    # What is not calibrated is copied from the model's files, and an export takes dense ones only.
    if config.model.weights_on == "disk" and not dense:
        raise ConfigError(
            "model.weights_on: the model's files are quantized, so what is not calibrated must be loaded; "
            "say device or cpu, not disk"
        )
    described = model_config(config.model.path, None)
    for choice in _choices(config, targets):
        entries, scales = _entries(config, model, targets, choice)
        expected = UNKNOWN
        if output.like is None:
            layout, tied, told = layout_named(output.layout), described.tied, None
            # The export writes names of files, which may differ from those in memory; it is planned under the same
            # names.
            expected = expected_of(described, model, layout)
            named = expected.named(entries)
            entries = {named[name]: replace(entry, name=named[name]) for name, entry in entries.items()}
            scales = {named[name]: value for name, value in scales.items()}
            check_names(entries, described, layout, expected)
        else:
            told = read_like(output.like, open_like(output.like))
            layout, tied = GGUF, told.tied
        producer = {"name": "qtensor", "version": ""}
        size = shard_size(output.max_shard_size)
        request = Request(layout, scales, producer, size, tied, names=expected.names, asks=expected.asks)
        # The rest of the model comes from its directory (rest=), so nothing may be missing in the plan.
        plan = plan_export(entries, request)
        check_outputs(plan, expected, tied=tied, rest=True)
        if told is not None:
            tensors_of([made for file in plan.files for made in file.outputs], told)


def _choices(config: Config, targets: Sequence[Target]) -> list[dict[str, Recipe | None]]:
    """Return the recipe of each weight; for a search several choices: each recipe for all weights, and all mixed.

    Modules side by side, which engines may run as one, have one recipe.
    """
    if isinstance(config.recipe, Recipe):
        return [dict.fromkeys((target.name for target in targets), config.recipe)]
    recipes = config.recipe.recipes
    parents = list(dict.fromkeys(target.module_name.rpartition(".")[0] for target in targets))
    mixed = {
        target.name: recipes[parents.index(target.module_name.rpartition(".")[0]) % len(recipes)] for target in targets
    }
    # A choice of null alone quantizes nothing, and no budget leads to it.
    alike: list[dict[str, Recipe | None]] = [{**mixed, **dict.fromkeys(mixed, one)} for one in recipes if one]
    return [*alike, mixed]


def _entries(
    config: Config, model: nn.Module, targets: Sequence[Target], choice: Mapping[str, Recipe | None]
) -> tuple[dict[str, Entry], dict[str, float]]:
    """Return the entries of the export, and its tensor-wide scales: 1 for all, as fused linears share one."""
    quantized = {name: recipe.stored for name, recipe in choice.items() if recipe is not None}
    shapes = {target.name: target.shape for target in targets}  # of linears: a model may have these transposed
    entries = {
        name: Entry(name, quantized.get(name), tuple(shapes.get(name, value.shape)), value.dtype)
        for name, value in model.state_dict().items()
    }
    scaled = [name for name, recipe in quantized.items() if tensor_wide(recipe) is not None]
    if config.calibration.inputs == "static":
        for target in (target for target in targets if target.name in quantized):
            name = f"{target.module_name if len(target.shape) == 2 else target.name}.input_scale"
            entries[name] = Entry(name, None, (), torch.float32)
            scaled.append(name)
    if config.calibration.kv_cache is not None:
        # The number of heads shows in a forward only. Two stand for it: a layout has scales of any number or of none.
        shape = (2,) if config.calibration.kv_cache == "head" else ()
        for attention in find_attentions(model):
            for name in (f"{attention}.k_scale", f"{attention}.v_scale"):
                entries[name] = Entry(name, None, shape, torch.float32)
                scaled.append(name)
    return entries, dict.fromkeys(scaled, 1.0)
