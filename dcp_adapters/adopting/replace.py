"""How a module gets its new weight: it stays the same object, so parents, hooks and a tied bias stay."""

from collections.abc import Mapping

from torch import nn

from dcp_adapters.adopting.source import Source


def replace_weights(module: nn.Module, source: Source, params: Mapping[str, nn.Parameter]) -> None:
    """Give a module its parameters, and take away what belonged to the library."""
    # First: classes of libraries have setters of their own. fully_shard sets a module's class likewise.
    if source.becomes is not None:
        module.__class__ = source.becomes(module)
    # A library may have put a dict of its own here, which looks at what is assigned.
    vars(module)["_parameters"] = dict(module._parameters)
    for name in source.drops:
        if name in vars(module) or any(name in held for held in (module._parameters, module._buffers, module._modules)):
            delattr(module, name)
    hooks = vars(module)["_load_state_dict_pre_hooks"]
    for key in [key for key, hook in hooks.items() if _is_of(hook, source)]:
        del hooks[key]
    # A linear's weight comes before its bias, in state dicts and for optimizers.
    others = {name: value for name, value in module._parameters.items() if name not in params}
    for name in tuple(module._parameters):
        delattr(module, name)
    for name, param in {**params, **others}.items():
        module.register_parameter(name, param)


def _is_of(hook: object, source: Source) -> bool:
    """Return whether a hook on loading state dicts is the library's own."""
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(f"{source.library.replace('-', '_')}.")
