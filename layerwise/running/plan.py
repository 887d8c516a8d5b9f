"""What a calibration is going to do, decided before anything runs: options, layers, targets, stages."""

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.words import few_of
from fsdp_hooks.unshard import reshard_all
from fsdp_hooks.wrappers import plain_buffers, plain_modules, plain_parameters, unmerged
from layerwise.algorithms.algorithm import CROSS, HESSIAN, Algorithm
from layerwise.formats.assignment import Formats, all_recipes, recipe_of
from layerwise.formats.candidates import Menu
from layerwise.inputs.replaying.hooks import check_groups
from layerwise.inputs.values.stores import INPUTS_ON
from layerwise.running.kv_cache import KVCache
from layerwise.stages.attentions import find_attentions
from layerwise.stages.caller import caller
from layerwise.stages.cuts import shares_out_experts
from layerwise.stages.experts import EXPERT_INPUTS, ExpertBlock, find_blocks
from layerwise.stages.layers import find_layers
from layerwise.stages.stage import Method, Stage
from layerwise.stages.targets import Target, find_targets
from layerwise.stages.tensor_parallel import is_tensor_parallel
from layerwise.weights.hold import Resident, Sharded, Weights
from layerwise.weights.on_disk import OnDisk
from layerwise.weights.shards import check_cuts
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.products.input_rotation import input_rotations
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import tensor_wide


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that say how `calibrate` works, not on what, checked.

    Raises:
        ValueError, TypeError: an argument is not one of the allowed values, or two do not fit together.
    """

    recipe: Formats
    algorithm: Algorithm
    inputs: str = "dynamic"
    layer_inputs: str | None = None
    inputs_on: str = "device"
    save_every: int = 1
    device: torch.device | None = None
    weights: str | Path | None = None
    kv_cache: KVCache | None = None
    expert_inputs: str = "routed"

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(
                f"{caller()}: algorithm is {self.algorithm!r}; expected an instance, such as Max() or GPTQ(). "
                "Algorithms that need the whole model at once (svdquant) are not layerwise"
            )
        if not isinstance(self.recipe, Formats):
            raise TypeError(
                f"{caller()}: expected a recipe, such as NVFP4BlockScaling(), got {self.recipe!r}; or give an "
                "Assignment"
            )
        if not isinstance(self.kv_cache, KVCache | None):
            raise TypeError(f"{caller()}: kv_cache is {self.kv_cache!r}; expected KVCache(), or None")
        for name, choices in (
            ("inputs", ("dynamic", "static")),
            ("expert_inputs", EXPERT_INPUTS),
            ("inputs_on", INPUTS_ON),
            ("layer_inputs", (None, "unquantized", "quantized")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{caller()}: {name}={getattr(self, name)!r} is not one of {', '.join(map(repr, choices))}"
                )
        if type(self.save_every) is not int or self.save_every < 1:
            raise ValueError(f"{caller()}: save_every={self.save_every!r} is not a positive number of layers")
        if self.paired and not self.quantized_onward:
            name = type(self.algorithm).__name__
            raise ValueError(
                f"{caller()}: {name} compares the inputs of the quantized model with those of the unquantized one, and "
                f'with layer_inputs="unquantized" they are the same; leave it out, or use GPTQ() instead of {name}()'
            )
        if self.paired and HESSIAN not in self.algorithm.needs:
            raise ValueError(
                f"{caller()}: {type(self.algorithm).__name__}.needs has CROSS without HESSIAN, beside which alone it "
                "is collected; name both"
            )
        if self.inputs != "static":
            return
        for recipe in all_recipes(self.recipe):
            if not isinstance(recipe, Float8CurrentScaling) and tensor_wide(recipe) is None:
                raise ValueError(
                    f'{caller()}: inputs="static" needs a tensor-wide scale, which {recipe} has none of: inputs are '
                    'scaled by block; use inputs="dynamic"'
                )

    @property
    def quantized_onward(self) -> bool:
        """Return whether a layer is calibrated on the outputs of the quantized layer before it."""
        return (self.layer_inputs or self.algorithm.layer_inputs) == "quantized"

    @property
    def paired(self) -> bool:
        """Return whether batches run through the layers of the unquantized model, too."""
        return CROSS in self.algorithm.needs


@dataclass(frozen=True, eq=False)
class CalibrationPlan:
    """The stages of a run and what brings in their weights.

    Attributes:
        model: all of it.
        stages: the layers in their order; then what is outside of them, if it has targets or there are no layers.
        outside: what is outside of the layers, whether it is a stage of the run or not.
        method: how each stage is calibrated.
        weights: brings the weights of a stage in.
        options: what the run was asked for.
        whole: the weights of some layer belong to a group outside of it, so the outside is held all the time.
        tensor_parallel: ranks cut weights between them beside FSDP.
        expert_parallel: ranks share experts out between them beside FSDP.
    """

    model: nn.Module
    stages: tuple[Stage, ...]
    outside: Stage
    method: Method
    weights: Weights
    options: Options
    whole: bool
    tensor_parallel: bool = False
    expert_parallel: bool = False

    def decides(self) -> dict[str, Any]:
        """Return what decides the outcome, apart from weights, data, recipe and algorithm; json-able."""
        kv_cache, rotated = self.options.kv_cache, input_rotations(self.model)
        return {
            "stages": [stage.name for stage in self.stages],
            "targets": [target.name for stage in self.stages for target in stage.targets],
            "inputs": self.options.inputs,
            "layer_inputs": "quantized" if self.options.quantized_onward else "unquantized",
            **({} if kv_cache is None else {"kv_cache": kv_cache.to_json()}),
            **({"input_rotations": rotated} if rotated else {}),
            **({} if self.options.expert_inputs == "routed" else {"expert_inputs": self.options.expert_inputs}),
        }

    def told(self, *, checkpoint: bool) -> dict[str, list[str]]:
        """Return what must be the same on all ranks, each item in words; `checkpoint`: there is a checkpoint_dir."""
        decides, options = self.decides(), self.options
        text = {"recipe": json.dumps(options.recipe.to_json()), "algorithm": json.dumps(options.algorithm.to_json())}
        text |= {"inputs": decides["inputs"], "layer_inputs": decides["layer_inputs"]}
        text |= {"kv_cache": json.dumps(decides.get("kv_cache")), "expert_inputs": options.expert_inputs}
        text |= {"input_rotations": json.dumps(decides.get("input_rotations"))}
        text |= {"save_every": str(options.save_every), "checkpoint_dir": "a checkpoint_dir" if checkpoint else "none"}
        named: list[tuple[str, Tensor]] = [*plain_parameters(self.model)]
        # A checkpoint holds digests of buffers, too, and reduces them by position.
        if checkpoint:
            named += plain_buffers(self.model)
        return {
            "the options": [f"{name}={value}" for name, value in text.items()],
            "the layers and their order": decides["stages"],
            "the weights to quantize and their order": decides["targets"],
            "the model's parameters and their order": [
                f"{name} {value.dtype} {list(value.shape)}{_describe_placement(value)}" for name, value in named
            ],
        }

    def named_weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers at rest, by fqn; those on disk are on the meta device."""
        reshard_all(self.model)
        return {**dict(plain_parameters(self.model)), **dict(plain_buffers(self.model))}


def make_plan(  # noqa: PLR0913 - keyword-only
    model: nn.Module,
    options: Options,
    *,
    layers: Any,
    include: Sequence[str],
    exclude: Sequence[str],
    group: dist.ProcessGroup | None,
    watched: bool,
) -> CalibrationPlan:
    """Return the plan of a run; raises as `find_layers`, `find_targets` and `OnDisk` do, alike on all ranks."""
    # What a forward has left gathered under a quantizing gather would be taken for quantized storage.
    reshard_all(model)
    _check_spanned(model, group)
    _warn_of_adapters(model)
    named = [] if isinstance(layers, list | tuple) and not layers else find_layers(model, layers)
    check_groups(named)
    targets = find_targets(model, options.recipe, include, exclude)
    for target in targets:
        check_cuts(target, None if isinstance(options.recipe, Menu) else recipe_of(options.recipe, target.name))
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    # A module in two layers would be quantized with the first of them, and then once more with the second.
    in_layers = Counter(id(child) for _, layer in named for child in layer.modules())
    for target in targets:
        if in_layers[id(target.owner)] > 1:
            raise ValueError(
                f"{caller()}: {target.name} belongs to {in_layers[id(target.owner)]} layers at once; it can have one "
                "set of scales only: exclude it, or give the layers modules of their own"
            )
    attentions = {} if options.kv_cache is None else find_attentions(model)
    _check_attentions(attentions, in_layers)
    blocks = [] if options.expert_inputs == "routed" else find_blocks(model, targets)
    stages: list[Stage] = []
    inside: set[int] = set()
    for index, (fqn, layer) in enumerate(named):
        owners = {id(child) for child in layer.modules()}
        inside |= owners
        own = tuple(target for target in targets if id(target.owner) in owners)
        caching = {name: module for name, module in attentions.items() if id(module) in owners}
        shared = _modules_shared(fqn, layer, uses, in_layers)
        recipes, sharing = _recipes(own, options.recipe), _blocks_of(blocks, own, owners)
        stages.append(Stage(index, fqn, layer, (), own, shared, caching, recipes, sharing))
    rest = tuple(target for target in targets if id(target.owner) not in inside)
    caching = {name: module for name, module in attentions.items() if id(module) not in inside}
    without, everything = tuple(layer for _, layer in named), {id(module) for module in model.modules()}
    recipes, sharing = _recipes(rest, options.recipe), _blocks_of(blocks, rest, everything - inside)
    outside = Stage(len(stages), "", model, without, rest, attentions=caching, recipes=recipes, blocks=sharing)
    if rest or caching or not stages:
        stages.append(outside)
    method = Method(options.algorithm, options.recipe, options.quantized_onward, group, watched)
    grouped = any(isinstance(module, FSDPModule) for module in model.modules())
    # Weights of a layer without `fully_shard` of its own are in the root's group: FSDP gathers them with what is
    # outside.
    whole = grouped and not all(isinstance(layer, FSDPModule) for layer in outside.without)
    weights = _weights_of(model, options)
    cut, shared_out = is_tensor_parallel(model), shares_out_experts(model)
    return CalibrationPlan(model, tuple(stages), outside, method, weights, options, whole, cut, shared_out)


def _warn_of_adapters(model: nn.Module) -> None:
    adapted = unmerged(model)
    if adapted:
        warnings.warn(
            f"{few_of(adapted)}: adapters of peft are not merged into these, so the result holds the weights "
            "below the adapters, calibrated on what reaches them with the adapters; merge them first "
            "(merge_and_unload()) if they are to be in it",
            stacklevel=4,  # the caller of `calibrate`
        )


def _describe_placement(value: Tensor) -> str:
    """Return how a parameter is cut over a mesh, in words."""
    return f" on {tuple(value.device_mesh.shape)} {value.placements}" if isinstance(value, DTensor) else ""


def _recipes(targets: Sequence[Target], recipe: Formats) -> tuple[Recipe, ...]:
    return () if isinstance(recipe, Menu) else tuple(recipe_of(recipe, target.name) for target in targets)


def _blocks_of(
    blocks: Sequence[ExpertBlock], targets: Sequence[Target], modules: AbstractSet[int]
) -> tuple[ExpertBlock, ...]:
    """Return the blocks with experts among some targets; check that the modules hold what gets their tokens."""
    names = {name for target in targets for name in target.linears()}
    own = [block for block in blocks if any(not names.isdisjoint(expert.names) for expert in block.experts)]
    for block in own:
        if id(block.module) not in modules:
            raise ValueError(
                f'{caller()}: expert_inputs="all": the experts of {block.name} are in another layer than the module '
                "that is called with their tokens; name layers= that hold both, or leave expert_inputs out"
            )
    return tuple(own)


def _check_attentions(attentions: Mapping[str, nn.Module], in_layers: Mapping[int, int]) -> None:
    """Refuse attentions that would have several sets of scales."""
    for fqn, module in attentions.items():
        if in_layers[id(module)] > 1:
            raise ValueError(
                f"{caller()}: kv_cache: {fqn} belongs to {in_layers[id(module)]} layers at once; it can have one set "
                "of scales only: leave kv_cache out, or give the layers modules of their own"
            )


def _check_spanned(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError if ranks hold shards but are not in the group: they would decide differently, or hang."""
    # Gathers run over the mesh, statistics over the group: a rank in one only would be waited for forever.
    own = {0} if group is None else set(dist.get_process_group_ranks(group))
    meshes: dict[Any, str] = {}
    for name, param in plain_parameters(model):
        if isinstance(param, DTensor):
            meshes.setdefault(param.device_mesh, name)
    for mesh, name in meshes.items():
        missing = sorted({*mesh.mesh.flatten().tolist()} - own)
        if missing:
            raise ValueError(
                f"{caller()}: {name} is sharded over ranks that are not in process_group: {missing}; give the group of "
                "all ranks that hold the model"
            )


def _modules_shared(
    fqn: str, layer: nn.Module, uses: Mapping[int, int], in_layers: Mapping[int, int]
) -> frozenset[str]:
    """Return the fqns of the layer's modules with parameters that are also registered outside of it."""
    inside = Counter(id(param) for module in layer.modules() for param in module._parameters.values())
    return frozenset(
        f"{fqn}.{name}".rstrip(".")
        for name, module in plain_modules(layer)
        for param in module._parameters.values()
        if param is not None and (uses[id(param)] > inside[id(param)] or in_layers[id(module)] > 1)
    )


def _weights_of(model: nn.Module, options: Options) -> Weights:
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    sharded = sharded or any(isinstance(param, DTensor) for param in model.parameters())
    on_meta = [name for name, param in plain_parameters(model) if param.is_meta]
    if sharded:
        if options.weights is not None or options.device is not None:
            raise ValueError(
                f"{caller()}: weights= and device= are for models without FSDP and tensor parallelism; a sharded model "
                "has its weights, on the device of its mesh"
            )
        if on_meta:
            raise ValueError(
                f"{caller()}: {on_meta[0]} is on the meta device; call to_empty() and load the weights first"
            )
        return Sharded(model)
    if options.weights is not None:
        return OnDisk(options.weights, model, options.device)
    if on_meta:
        raise ValueError(
            f"{caller()}: {on_meta[0]} is on the meta device; say where its values are: "
            "weights=<directory of safetensors>, or load them"
        )
    return Resident(options.device)
