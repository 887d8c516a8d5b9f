"""What transformers asks while it loads and saves a model with a `QTensorConfig`.

transformers' order:

    preprocess_model                  the model is on the meta device: which weights, or an error
    update_weight_conversions         the rules by which tensors of the files become weights
    postprocess_model                 all is loaded, initialised and tied
    get_state_dict_and_metadata       save_pretrained; config.json is written next
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.integrations import is_fsdp_enabled
from transformers.quantizers import HfQuantizer, register_quantizer

from dcp_adapters.hf.files.directory import INDEX, SINGLE
from dcp_adapters.hf.layouts.layout import KINDS, RECIPES, kind_of
from dcp_adapters.hf.models.architectures import architecture_of
from dcp_adapters.hf.models.file_names import FileNames, memory_modules
from dcp_adapters.hf.reading.handed_over import HandedOver
from dcp_adapters.hf.reading.schemes import weight_of
from dcp_adapters.plain.words import few_of
from dcp_adapters.streams.weight_stream import WeightStream
from dcp_adapters.transformers.config import METHOD, QTensorConfig
from dcp_adapters.transformers.conversion import Collect, NameInFiles, Quantize
from fsdp_hooks.wrappers import plain_parameters
from qtensor.model.built_model import choose_linears
from qtensor.model.loading import watch_loads
from qtensor.model.model_init import quantize_weight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

USUAL = "compressed-tensors"
IMPORT = 'take device_map="meta", shard the model, and load by import_hf(directory, model)'


@register_quantizer(METHOD)
class QTensorQuantizer(HfQuantizer):  # type: ignore[misc] # transformers has no types
    """What transformers asks while it loads and saves a model with a `QTensorConfig`."""

    requires_calibration = False
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: QTensorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._chosen: frozenset[str] = frozenset()
        self._held = HandedOver()
        if self.pre_quantized and quantization_config.recipe is not None:
            raise ValueError(
                'from_pretrained: its config.json says quant_method "qtensor", which only a model in memory has; '
                "save_pretrained and export_hf write a layout that engines read"
            )

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what would break tensors made of parts: files of accelerate's, and its broadcast of whole weights.

        Raises:
            ValueError: on all ranks alike, which have the same arguments and environment.
        """
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError('from_pretrained(device_map=...): quantized weights can not be offloaded to "disk"')
        if is_fsdp_enabled():
            raise ValueError(
                "from_pretrained: accelerate's cpu_ram_efficient_loading broadcasts rank 0's weights, which quantized "
                "ones do not allow; set FSDP_CPU_RAM_EFFICIENT_LOADING=false (fsdp_cpu_ram_efficient_loading "
                f"in accelerate's config), so that each rank reads the files, or {IMPORT}"
            )

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of an element, scales among them; `device_map="auto"` divides memory by it."""
        entry = self._held.weights.get(param_name)
        size: float = super().param_element_size(model, param_name, param)
        return size if entry is None else entry.nbytes / entry.numel

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes of all parts for an element of a large matrix that is quantized while it is read."""
        if self.quantization_config.recipe is None:
            return None
        shape = (4096, 4096)
        parts = (torch.Size(spec.shape(shape)).numel() * spec.dtype.itemsize for spec in specs_of(self._recipe))
        return sum(parts) / torch.Size(shape).numel()

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(f"from_pretrained(distributed_config=...): shards would be dense; instead {IMPORT}")
        directory = _directory_of(checkpoint_files)
        # transformers passes over what config.json says if it does not know the method: "modelopt".
        held = HandedOver() if directory is None else HandedOver.of(directory, model)
        # An index of another name may stand beside the usual one, and lead to other files (`variant=`).
        if not held.files <= {Path(file).name for file in checkpoint_files or ()}:
            held, directory = HandedOver(), None
        if directory is None:
            _refuse_codes(checkpoint_files)
        if held.weights and config.recipe is not None:
            raise ValueError(
                f"{directory} is quantized already ({held.layout}), and QTensorConfig({config.recipe}) is for a dense "
                "one; load it by from_pretrained(directory, config=quantized_config(directory))"
            )
        if config.recipe is None:
            self._take(held, directory)
            return
        exclude = config.exclude
        if exclude is None:
            output = model.get_output_embeddings()
            exclude = [name for name, module in model.named_modules() if module is output]
        chosen = choose_linears(
            model,
            config.recipe,
            include=config.include,
            exclude=exclude,
            tied=model.all_tied_weights_keys or (),
        )
        self._chosen = frozenset(chosen.linears)

    def _take(self, held: HandedOver, directory: Path | None) -> None:
        if directory is None:
            raise ValueError(
                f"from_pretrained: quantized weights are read from {SINGLE}, or from {INDEX} and its files, and these "
                "are others; load them by import_hf(directory, model)"
            )
        if not held.weights:
            raise ValueError(
                f"{directory} has no quantized weights; give from_pretrained a QTensorConfig with a recipe"
            )
        self._held, self._chosen, self.pre_quantized = held, frozenset(held.weights), True

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is quantized while it is read."""
        return not self.pre_quantized and param_name in self._chosen

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return None for parts of quantized weights, which keep their bytes."""
        if isinstance(converter, Collect):
            return None
        new: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return new

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the rules by which tensors of files become weights, ours first."""
        if not self._held.weights:
            return weight_conversions
        called = NameInFiles()
        rules = [one for one in weight_conversions if isinstance(one, WeightConverter)]
        return [called, Collect(self._held, called, rules), *weight_conversions]

    def get_quantize_ops(self) -> Quantize:
        """Return what quantizes a weight that has been read."""
        return Quantize(self._recipe)

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name in () if self.pre_quantized else self._chosen:
            module = model.get_submodule(name.rpartition(".")[0])
            # no file has it, so it was initialised
            if not isinstance(module.weight, QuantizedTensor):
                module.weight = nn.Parameter(quantize_weight(module.weight, self._recipe))
        lost = [name for name in self._held.weights if not isinstance(model.get_parameter(name), QuantizedTensor)]
        if lost:
            raise RuntimeError(
                f"from_pretrained: {few_of(lost)}: quantized in the files, and dense in the model that transformers "
                "has made of them; load by import_hf(directory, model)"
            )
        watch_loads(model.modules())
        return model

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` writes what `export_hf` does."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors that engines read; config.json, which is written next, says what they are.

        Raises:
            ValueError: the model is sharded; what `export_hf` refuses.
        """
        config = self.quantization_config
        if any(isinstance(param, DTensor) for param in model.parameters()):
            raise ValueError(
                "save_pretrained: the model is sharded; export_hf writes what engines read, and dcp.save with "
                "QuantizedSavePlanner what training goes on from"
            )
        said = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
        options: dict[str, Any] = {"layout": config.layout or self._held.layout or USUAL}
        # Scales of inputs and of the KV cache, which the directory had and the model has no place for.
        options |= {"fused_scales": config.fused_scales, "rest": dict(self._held.scales) or None}
        stream = WeightStream(model, config=said, no_dist=True, progress=False, **options)
        # views of one memory would be taken for tied weights
        tensors = {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}
        architecture = architecture_of(model)
        names = FileNames() if architecture is None else architecture.named({*map(weight_of, tensors)})
        asked = _names_to_revert(model, tensors, names)
        config.tell(stream.json["config.json"]["quantization_config"])
        return {asked[name]: tensor for name, tensor in tensors.items()}, _recipes_to_record(model, names)

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # transformers' save_pretrained leaves the name of a dtype in its config
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name in self._chosen:
            module, _, own = name.rpartition(".")
            weight: Any = model.get_parameter(name)
            dense = weight.dequantize(dtype or weight.dtype)
            setattr(model.get_submodule(module), own, nn.Parameter(dense, requires_grad=weight.requires_grad))
        return model

    @property
    def _recipe(self) -> Recipe:
        recipe: Recipe = self.quantization_config.recipe
        return recipe


def _directory_of(files: Sequence[str] | None) -> Path | None:
    """Return the directory of these files; None if `import_hf` would read others there."""
    paths = [Path(file) for file in files or ()]
    directories = {path.parent for path in paths}
    if len(directories) != 1 or any(path.suffix != ".safetensors" for path in paths):
        return None
    directory = directories.pop()
    one, several = (directory / SINGLE).exists(), (directory / INDEX).exists()
    return directory if one != several and (several or paths == [directory / SINGLE]) else None


def _refuse_codes(files: Sequence[str] | None) -> None:
    """Raise ValueError if files that are not compared with config.json hold FP8, which would be read as values."""
    for file in (one for one in files or () if one.endswith(".safetensors")):
        with safe_open(file, "pt") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 - no dict
        name = next((name for name, dtype in dtypes.items() if dtype.startswith(("F8", "F6", "F4"))), None)
        if name is not None:
            raise ValueError(
                f"from_pretrained: {name} in {file} is {dtypes[name]}, quantized by somebody else; such weights are "
                f"read from {SINGLE}, or from {INDEX} and its files, by quantized_config or import_hf"
            )


def _recipes_to_record(model: nn.Module, names: FileNames) -> dict[str, str]:
    """Return what the header says of recipes that the tensors in it do not show, as those of exports do."""
    held: dict[str, Any] = {name: param.detach() for name, param in plain_parameters(model)}
    recipes = {name: value.recipe.stored for name, value in held.items() if isinstance(value, QuantizedTensor)}
    recorded = {names.file_name(name): one for name, one in recipes.items() if one != KINDS.get(str(kind_of(one)))}
    return {RECIPES: json.dumps({name: one.to_json() for name, one in recorded.items()})} if recorded else {}


def _names_to_revert(model: Any, tensors: Iterable[str], names: FileNames) -> dict[str, str]:
    """Map names in the files to those out of which save_pretrained makes them, by the rules the model was loaded by.

    Raises:
        ValueError: there are none.
    """
    asked = {name: name for name in tensors}
    others = memory_modules(names, {weight_of(name).removesuffix(".weight") for name in asked})
    made = _reverted(model, asked.values())
    for name in asked:
        module, _, own = name.rpartition(".")
        if made.get(name) != name:
            asked[name] = f"{others.get(module, module)}.{own}".lstrip(".")
    made = _reverted(model, asked.values())
    lost = [name for name, its in asked.items() if made.get(its) != name]
    if lost:
        raise ValueError(f"save_pretrained: {few_of(lost, 2)} would get another name in the files; use export_hf")
    return asked


def _reverted(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Map names to those that transformers itself gives them in files; what it makes something else of is left out."""
    asked = {name: torch.empty(0, dtype=torch.float32, device="meta") for name in names}
    found = {id(tensor): name for name, tensor in revert_weight_conversion(model, asked).items()}
    return {name: found[id(tensor)] for name, tensor in asked.items() if id(tensor) in found}
