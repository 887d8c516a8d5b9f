"""Where config.json says what, of models that are made of several: a vision model and a text model, say.

quantization_config                 at the top; if nothing is there, in the section of the text model, which is
                                    the order in which transformers and vLLM look
compression_config                  how older versions of llm-compressor called it; looked at last
dtype (in older files torch_dtype)  at the top, then in the section of the text model
"""

from collections.abc import Mapping
from typing import Any

QUANTIZATION = ("quantization_config", "compression_config")
DTYPE = ("dtype", "torch_dtype")
# Sections of the model that makes text, as transformers' get_text_config(decoder=True) knows them; of models in models.
TEXT = ("text_config", "decoder", "generator", "thinker_config", "language_config", "llm_config")


def said_of_quantization(config: Mapping[str, Any]) -> Any:
    """Return what config.json says of how weights are quantized; None if it says nothing."""
    said = [section.get(key) for key in QUANTIZATION for section in _text_sections(config)]
    # An empty object at the top may stand beside a full one in a section; alone it still says that there is something.
    return next((one for one in said if one), next((one for one in said if one is not None), None))


def said_of_dtype(config: Mapping[str, Any]) -> Any:
    """Return what config.json says of the dtype of weights; None if it says nothing."""
    return next((section[key] for section in _text_sections(config) for key in DTYPE if section.get(key)), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without what it says of quantization, in whatever section."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in QUANTIZATION
    }


def of_dtype(config: Mapping[str, Any], dtype: str, *, known: frozenset[str]) -> dict[str, Any]:
    """Return the config with this dtype of weights, at the top and in each section that says one.

    Args:
        config: of any model.
        dtype: "bfloat16".
        known: all names of dtypes that may be said; a key with another value means something else, and stays.
    """
    values = {key: value for key, value in config.items() if key not in DTYPE}
    return {**_sections_of_dtype(values, dtype, known), "dtype": dtype}


def _sections_of_dtype(config: Mapping[str, Any], dtype: str, known: frozenset[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values[key] = _sections_of_dtype(value, dtype, known)
        else:
            values[key] = dtype if key in DTYPE and value in known else value
    return values


def _text_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the config, and the sections of its text model, from the outermost on."""
    sections = [config]
    # The list grows while it is walked: sections in sections are found, too.
    for section in sections:
        sections += [section[name] for name in TEXT if isinstance(section.get(name), Mapping)]
    return sections
