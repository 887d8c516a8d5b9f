"""The package `gguf` of llama.cpp's authors, which the extra `gguf` installs; only exports of GGUF files need it."""

import importlib
from typing import Any

MISSING = 'GGUF files are read and written by the package gguf, which is not there; install "qtensor-fsdp[gguf]"'


def import_gguf() -> Any:
    """Return the module; raise ImportError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise ImportError(MISSING) from None
