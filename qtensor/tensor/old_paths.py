"""Module paths that pickles of version 0.1 name, which hold no file any more.

A pickle names a class by the module that it stood in. Those modules moved into rooms; the old paths go on meaning what
they meant, so that files written before load. New pickles name the package alone (`qtensor.MXFP8BlockScaling`).
"""

import sys
from typing import Any

MOVED = {
    "qtensor.pickling": "qtensor.tensor.pickling",
    **{
        f"qtensor.{name}": f"qtensor.formats.{name}"
        for name in ("float8", "float8_blocks", "float8_delayed", "int4", "mxfp4", "mxfp8", "nvfp4")
    },
}


def keep_old_paths() -> None:
    """Let the old paths be found by `import`, as pickle looks them up; all of the modules are imported by now."""
    sys.modules.update({old: sys.modules[new] for old, new in MOVED.items()})


def before_rooms(named: list[Any]) -> list[tuple[Any, str]]:
    """Return what pickles name, with the names they had: as torch's safe globals take them."""
    return [
        (known, f"{old}.{name}")
        for known in named
        for name in [str(known.__name__)]
        for old, new in MOVED.items()
        if vars(sys.modules[new]).get(name) is known
    ]
