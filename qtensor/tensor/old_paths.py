"""The names that pickles use: of the package alone, and, in files of version 0.1, of modules that moved.

A pickle names a class or a function by the module that it stands in. Modules move, so what stands in pickles of
tensors, models and optimizers says that it belongs to the package (`qtensor.MXFP8BlockScaling`), which has it as an
attribute; and the old paths go on meaning what they meant.
"""

import sys
from types import ModuleType
from typing import Any

# old path -> where what it had stands now
MOVED = {
    "qtensor.pickling": "qtensor.tensor.pickling",
    "qtensor.high_precision": "qtensor.scales.high_precision",
    "qtensor.loading": "qtensor.model.loading",
    "qtensor.input_rotation": "qtensor.products.input_rotation",
    "fsdp_hooks.partners": "fsdp_hooks.ranks.scale_partners",
    **{
        f"qtensor.{name}": f"qtensor.formats.{name}"
        for name in ("float8", "float8_blocks", "float8_delayed", "int4", "mxfp4", "mxfp8", "nvfp4")
    },
}
OPTIMIZER = "qtensor.optim"  # a module once, the folder of that module now


def name_by_package(package: ModuleType, *named: Any) -> None:
    """Let pickles name these classes and functions by `package`, and find them there."""
    for each in named:
        each.__module__ = package.__name__
        vars(package)[each.__name__] = each


def keep_old_paths(optimizer: type) -> None:
    """Let the old paths be found by `import`, as pickle looks them up; all of the modules are imported by now."""
    sys.modules.update({old: sys.modules[new] for old, new in MOVED.items()})
    vars(sys.modules[OPTIMIZER])[optimizer.__name__] = optimizer


def before_rooms(named: list[Any]) -> list[tuple[Any, str]]:
    """Return what pickles name, with the names they had: as torch's safe globals take them."""
    return [
        (known, f"{old}.{name}")
        for known in named
        for name in [str(known.__name__)]
        for old, new in MOVED.items()
        if vars(sys.modules[new]).get(name) is known
    ]
