"""What says of a whole model that a library quantized it: it goes with the last module of that library.

With it, transformers would save and convert the model by the library's rules, ModelOpt would save quantizers that are
no longer there, and a hook of compressed-tensors would look for modules to decompress in the first forward.
"""

from torch import nn

MARKS = ("hf_quantizer", "quantization_method", "is_quantized", "_modelopt_state", "_modelopt_state_version")
HOOK = "ct_decompress_hook"  # the handle of a forward pre-hook
CONFIG = "quantization_config"  # of a model's config


def forget_libraries(model: nn.Module) -> None:
    """Take these marks from a model and all modules in it."""
    for module in model.modules():
        for name in MARKS:
            if name in vars(module):
                delattr(module, name)
        if HOOK in vars(module):
            vars(module)[HOOK].remove()
            delattr(module, HOOK)
        config = vars(module).get("config")
        if CONFIG in getattr(config, "__dict__", {}):
            delattr(config, CONFIG)
