"""What says of a whole model that a library quantized it; it goes with the last module of that library.

With it, transformers would save and convert the model by the library's rules, and ModelOpt would save quantizers that
are no longer there.
"""

from torch import nn

MARKS = ("hf_quantizer", "quantization_method", "is_quantized", "_modelopt_state", "_modelopt_state_version")
CONFIG = "quantization_config"  # of a model's config


def forget_libraries(model: nn.Module) -> None:
    """Take these marks from a model and all modules in it."""
    for module in model.modules():
        for name in MARKS:
            if name in vars(module):
                delattr(module, name)
        config = vars(module).get("config")
        if CONFIG in getattr(config, "__dict__", {}):
            delattr(config, CONFIG)
