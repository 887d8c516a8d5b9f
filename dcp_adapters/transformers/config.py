"""What is asked of `from_pretrained` and `save_pretrained`: a recipe for a dense directory, or a quantized one."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from dcp_adapters.hf.layouts.layout import Scheme, kind_of
from dcp_adapters.hf.layouts.registry import layout_named
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import registered

METHOD = "qtensor"
FUSED_SCALES = ("raise", "requantize")


@register_quantization_config(METHOD)
class QTensorConfig(QuantizationConfigMixin):  # type: ignore[misc] # transformers has no types
    """How `from_pretrained` quantizes the linear weights of a dense directory while it reads them.

    The weights get the bytes that `quantize_` gives to the model that `from_pretrained` loads without this.

    Args:
        recipe: how to quantize; or its JSON. None: the directory's weights are quantized, and stay as they are; see
            `quantized_config`.
        include: globs over module fqns, as of `quantize_`.
        exclude: globs over the fqns of modules to leave out; None: the output embedding, which transformers' own
            quantizers leave out, too.
        layout: what `save_pretrained` writes: "compressed-tensors", "modelopt" or "fp8", as of `export_hf`, which must
            have such weights; None: that of the directory, or "compressed-tensors" for a dense one. What it can not
            write, `save_pretrained` refuses.
        fused_scales: "raise" or "requantize", as of `export_hf`: whether `save_pretrained` may round weights again that
            engines run as one and whose global scales (NVFP4) differ, as they do in a model that was loaded so.

    Raises:
        ValueError: the recipe's format or the layout is not known, or the layout has no such weights; patterns without
            a recipe.
        TypeError: a text instead of a list of patterns.

    Example:
        ```python
        >>> config = QTensorConfig(MXFP8BlockScaling())
        >>> model = AutoModelForCausalLM.from_pretrained("dense", quantization_config=config)
        ```
    """

    def __init__(  # noqa: PLR0913, PLR0917 - options of one configuration, which transformers makes by name
        self,
        recipe: Recipe | Mapping[str, Any] | None,
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
        self.recipe = Recipe.from_json(dict(recipe)) if isinstance(recipe, Mapping) else recipe
        if self.recipe is not None:
            registered(self.recipe)
        elif tuple(include) != ("*",) or exclude is not None:
            raise ValueError(
                "QTensorConfig(None): include= and exclude= say what a recipe quantizes, and there is none; leave them "
                "out, since the files say which weights are quantized"
            )
        self.include, self.exclude = tuple(include), None if exclude is None else tuple(exclude)
        if fused_scales not in FUSED_SCALES:
            raise ValueError(f"QTensorConfig(fused_scales={fused_scales!r}): expected one of {', '.join(FUSED_SCALES)}")
        self.fused_scales, self.layout = fused_scales, layout
        if layout is not None:
            layout_named(layout)
        if layout is not None and self.recipe is not None:
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
        recipe = None if self.recipe is None else self.recipe.to_json()
        asked = {"recipe": recipe, "include": list(self.include), "exclude": exclude}
        return {
            "quant_method": self.quant_method,
            **asked,
            "layout": self.layout,
            "fused_scales": self.fused_scales,
        }

    def tell(self, quantization: Mapping[str, Any]) -> None:
        """Have config.json say what engines are told of weights that are about to be written."""
        self._told = dict(quantization)


def quantized_config(
    directory: str | os.PathLike[str], *, layout: str | None = None, fused_scales: str = "raise", **options: Any
) -> PreTrainedConfig:
    """Return the configuration of a quantized directory, by which `from_pretrained` loads its bytes as they are.

    transformers takes the library that config.json names to read quantized weights, and its own configuration has
    precedence over what is passed; so the whole configuration is given to it.

    Args:
        directory: in a layout that `import_hf` reads; a path or a name on the Hub.
        layout: as of `QTensorConfig`.
        fused_scales: likewise.
        options: of `AutoConfig.from_pretrained`.

    Returns:
        What its config.json says, with a `QTensorConfig(None)` in place of its `quantization_config`; its dtype is bf16
        if none is said.

    Raises:
        ValueError: the directory is dense, or its config.json does not say that it is quantized.

    Example:
        ```python
        >>> config = quantized_config("quantized")
        >>> model = AutoModelForCausalLM.from_pretrained("quantized", config=config)
        ```
    """
    config = AutoConfig.from_pretrained(directory, **options)
    places = [one for one in (config, config.get_text_config(decoder=True)) if hasattr(one, "quantization_config")]
    if all(one.quantization_config is None for one in places):
        raise ValueError(
            f"quantized_config: config.json of {directory} has no quantization_config: load a dense directory by "
            "from_pretrained(quantization_config=QTensorConfig(recipe)), any other one by import_hf"
        )
    for one in places:
        one.quantization_config = None
    # transformers would take the dtype of some tensor in the files, which may be that of scales.
    if config.dtype is None:
        config.dtype = torch.bfloat16
    # As JSON: transformers makes configurations of objects only where it made the objects itself.
    config.quantization_config = QTensorConfig(None, layout=layout, fused_scales=fused_scales).to_dict()
    return config
