"""`python -m layerwise CONFIG.yaml`."""

import sys

import layerwise
from layerwise.command.main import main

ALGORITHMS = {
    name: kind
    for name, kind in ((name, getattr(layerwise, name)) for name in layerwise.__all__)
    if isinstance(kind, type) and issubclass(kind, layerwise.Algorithm) and kind is not layerwise.Algorithm
}

if __name__ == "__main__":
    sys.exit(main(algorithms=ALGORITHMS))
