"""transformers' `from_pretrained` with quantized weights: import this module, and it knows `QTensorConfig`.

    from_pretrained(dir, quantization_config=QTensorConfig(recipe))
        model on the meta device  ->  which weights (as `quantize_` chooses them)
        each tensor that is read  ->  quantized on the device it is for, and the dense one is dropped

    save_pretrained(out)  ->  the tensors of `export_hf`, and in config.json what engines are told of them

transformers calls the two classes here through its public registration. A directory that is quantized already belongs
to whoever its config.json names, so transformers refuses this configuration for it; `import_hf` reads such directories.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dcp_adapters.hf.layouts.layout import Scheme, kind_of
from dcp_adapters.hf.layouts.registry import layout_named
from dcp_adapters.streams.weight_stream import WeightStream
from qtensor.model.built_model import choose_linears
from qtensor.model.loading import watch_loads
from qtensor.model.model_init import quantize_weight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import registered, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

METHOD = "qtensor"
USUAL = "compressed-tensors"
FUSED_SCALES = ("raise", "requantize")
IMPORT = "quantize_ a model on the meta device, shard it, and load by import_hf(directory, model)"


@register_quantization_config(METHOD)
class QTensorConfig(QuantizationConfigMixin):  # type: ignore[misc] # transformers has no types
    """How `from_pretrained` quantizes the linear weights of a dense directory while it reads them.

    The weights get the bytes that `quantize_` gives to the model that `from_pretrained` loads without this.

    Args:
        recipe: how to quantize; or its JSON.
        include: globs over module fqns, as of `quantize_`.
        exclude: globs over the fqns of modules to leave out; None: the output embedding, which transformers' own
            quantizers leave out, too.
        layout: what `save_pretrained` writes: "compressed-tensors", "modelopt" or "fp8", as of `export_hf`, which must
            have such weights; None: "compressed-tensors", if it has, and otherwise `save_pretrained` is refused.
        fused_scales: "raise" or "requantize", as of `export_hf`: whether `save_pretrained` may round weights again that
            engines run as one and whose global scales (NVFP4) differ, as they do in a model that was loaded so.

    Raises:
        ValueError: the recipe's format or the layout is not known, or the layout has no such weights.
        TypeError: a text instead of a list of patterns.

    Example:
        ```python
        >>> config = QTensorConfig(MXFP8BlockScaling())
        >>> model = AutoModelForCausalLM.from_pretrained("dense", quantization_config=config)  # doctest: +SKIP
        ```
    """

    def __init__(  # noqa: PLR0913, PLR0917 - options of one configuration, which transformers makes by name
        self,
        recipe: Recipe | Mapping[str, Any],
        include: Iterable[str] = ("*",),
        exclude: Iterable[str] | None = None,
        layout: str | None = None,
        fused_scales: str = "raise",
        quant_method: str = METHOD,
    ) -> None:
        for name, value in (("include", include), ("exclude", exclude)):
            if isinstance(value, str):
                raise TypeError(f"QTensorConfig({name}={value!r}): expected a list of patterns")
        self.quant_method = quant_method
        self.recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_json(dict(recipe))
        registered(self.recipe)
        self.include, self.exclude = tuple(include), None if exclude is None else tuple(exclude)
        if fused_scales not in FUSED_SCALES:
            raise ValueError(f"QTensorConfig(fused_scales={fused_scales!r}): expected one of {', '.join(FUSED_SCALES)}")
        self.fused_scales, self.layout = fused_scales, layout
        if layout is not None:
            kind, its = kind_of(self.recipe), layout_named(layout)
            if kind is None:
                raise ValueError(f"QTensorConfig({self.recipe}, layout={layout!r}): engines have no such weights")
            its.entry(Scheme.of(kind, calibrated=False), "QTensorConfig")
        self._told: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json says: of weights that have been written what engines are told, else what is asked."""
        if self._told is not None:
            return dict(self._told)
        exclude = None if self.exclude is None else list(self.exclude)
        asked = {"recipe": self.recipe.to_json(), "include": list(self.include), "exclude": exclude}
        return {
            "quant_method": self.quant_method,
            **asked,
            "layout": self.layout,
            "fused_scales": self.fused_scales,
        }

    def tell(self, quantization: Mapping[str, Any]) -> None:
        """Have config.json say what engines are told of weights that are about to be written."""
        self._told = dict(quantization)


class _Quantize(ConversionOps):  # type: ignore[misc] # likewise
    """Quantizes the weights that transformers has read."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def convert(self, input_dict: Mapping[str, Any], **_: Any) -> dict[str, Tensor]:
        """Return the same names with quantized weights; a weight may come as a list of one."""
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: quantize_weight(value, self._recipe) for name, value in found.items()}


@register_quantizer(METHOD)
class QTensorQuantizer(HfQuantizer):  # type: ignore[misc] # likewise
    """What transformers asks while it loads and saves a model with a `QTensorConfig`."""

    requires_calibration = False
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: QTensorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._chosen: frozenset[str] = frozenset()
        if self.pre_quantized:
            raise ValueError(
                'from_pretrained: its config.json says quant_method "qtensor", which only a model in memory has; '
                "save_pretrained and export_hf write a layout that engines read"
            )

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse weights on the disk: accelerate writes and reads tensors of one piece there."""
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError('from_pretrained(device_map=...): quantized weights can not be offloaded to "disk"')

    @property
    def quantized_element_size(self) -> float:
        """Bytes of all parts for an element of a large matrix."""
        shape = (4096, 4096)
        parts = (torch.Size(spec.shape(shape)).numel() * spec.dtype.itemsize for spec in specs_of(self._recipe))
        return sum(parts) / torch.Size(shape).numel()

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(f"from_pretrained(distributed_config=...): shards would be dense; instead {IMPORT}")
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

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is one of the chosen weights."""
        return param_name in self._chosen

    def get_quantize_ops(self) -> _Quantize:
        """Return what quantizes a weight that has been read."""
        return _Quantize(self._recipe)

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name in self._chosen:
            module = model.get_submodule(name.rpartition(".")[0])
            # no file has it, so it was initialised
            if not isinstance(module.weight, QuantizedTensor):
                module.weight = nn.Parameter(quantize_weight(module.weight, self._recipe))
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
        options = {"layout": config.layout or USUAL, "fused_scales": config.fused_scales}
        stream = WeightStream(model, config=said, no_dist=True, progress=False, **options)
        # views of one memory would be taken for tied weights
        tensors = {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}
        config.tell(stream.json["config.json"]["quantization_config"])
        return tensors, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # transformers' save_pretrained leaves the name of a dtype in its config
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name in self._chosen:
            module = model.get_submodule(name.rpartition(".")[0])
            weight: Any = module.weight
            dense = weight.dequantize(dtype or weight.dtype)
            module.weight = nn.Parameter(dense, requires_grad=weight.requires_grad)
        return model

    @property
    def _recipe(self) -> Recipe:
        recipe: Recipe = self.quantization_config.recipe
        return recipe
