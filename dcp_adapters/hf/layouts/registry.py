"""Which layouts there are, and which of them describes a directory; layout.py says what a layout is."""

from collections.abc import Mapping

from dcp_adapters.hf.files.config_sections import said_of_quantization
from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.layout import Claims, Layout
from dcp_adapters.plain.words import short

LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> None:
    """Make a layout known. Raises ValueError for a name that is taken."""
    if layout.name in LAYOUTS:
        raise ValueError(f"the layout {layout.name!r} is registered already")
    LAYOUTS[layout.name] = layout


def layout_named(name: str) -> Layout:
    """Return a layout by its name. Raises ValueError for an unknown one."""
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r} is not one of {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[name]


def layouts_of_models() -> dict[str, Layout]:
    """Map each `model_type` to the layout that is made for it, the only one that engines know of such models."""
    return {model: layout for layout in LAYOUTS.values() for model in layout.models}


def claims_of(directory: Directory) -> Claims | None:
    """Return what is said of the quantized linears; None if nothing in the directory is said to be quantized.

    Raises:
        ValueError: a quantization that the library does not have.
    """
    said = said_of_quantization(directory.config)
    # ModelOpt may say it in hf_quant_config.json alone.
    if said is None and directory.quantization is None:
        return None
    if said is not None and not isinstance(said, Mapping):
        raise ValueError(
            f"{directory.path}: the quantization_config of config.json is {short(said)}, expected an object"
        )
    layout = next((one for one in LAYOUTS.values() if one.describes(said)), None)
    said = said or {}
    if layout is None:
        method = short(said.get("quant_method"))
        raise ValueError(
            f"{directory.path}: its quant_method is {method}, which the library does not read; it reads "
            f"{', '.join(LAYOUTS)}, and dense directories. Dequantize it with the tool that wrote it"
        )
    return layout.claims(directory, said)
