"""The parameters that a rotation has written, noted at their modules, so that a result can bring them along.

Files of the model before the rotation have different values of them, which do not fit the rotated weights.
The note is an attribute of the module, which stays where parameters are replaced (sharding), moved or copied.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from fsdp_hooks.wrappers import plain_modules, plain_parameters

ATTRIBUTE = "rotated_parameters"


def note_written(model: nn.Module, names: Iterable[str]) -> None:
    """Note parameters of a model, given by their plain fqns."""
    modules = dict(plain_modules(model, remove_duplicate=False))
    for name in names:
        fqn, _, attribute = name.rpartition(".")
        module = modules[fqn]
        setattr(module, ATTRIBUTE, frozenset({*getattr(module, ATTRIBUTE, ()), attribute}))


def find_written(model: nn.Module) -> dict[str, Tensor]:
    """Find all parameters that rotations have written, by plain fqn, but for those on meta, which have no values."""
    # By the parameters' identity, since `plain_parameters` names a tied one once, and the note may be at another name.
    noted = {
        id(module._parameters.get(attribute))
        for module in model.modules()
        for attribute in getattr(module, ATTRIBUTE, ())
    }
    return {name: param for name, param in plain_parameters(model) if id(param) in noted and not param.is_meta}
