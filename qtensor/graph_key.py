"""What tells compiled graphs apart in torch's cache on disk: a tensor of ours as their input, and our own code.

AOTAutograd looks a graph up by what dynamo saw of it, and there a quantized weight is one input, and F.linear(x, w) one
call. The parts, what is decoded, and which gradients there are come out behind that, when the call is traced through
this package. Whatever the trace depends on has to be in the key, or a process gets the graph of another weight: one of
other rows, one that is frozen (no gradient, and no error), or one that an older version of this package has traced.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fsdp_hooks
from fsdp_hooks.release import VERSION
from fsdp_hooks.torch_private import without_torch_function

HERE = (Path(__file__).parent, Path(fsdp_hooks.__file__).parent)  # the packages that a graph is traced through


def graph_key(tensor: Any) -> str:
    """The key of a wrapper subclass: its looks, what flattening it gives, the looks of all inside, and our code."""
    with torch.no_grad(), without_torch_function():
        names, context = tensor.__tensor_flatten__()
        inside = [(name, _looks(getattr(tensor, name))) for name in names]
        return repr((type(tensor).__qualname__, _looks(tensor), context, inside, code_digest(HERE)))


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return *layout, tensor.device, tensor.requires_grad


@functools.cache
def code_digest(packages: tuple[Path, ...]) -> str:
    """A digest of the source of packages; where it is not there as files, the version."""
    files = sorted((path.relative_to(root.parent), path) for root in packages for path in root.rglob("*.py"))
    if not files:
        return VERSION
    found = hashlib.sha256()
    for name, path in files:
        found.update(f"{name.as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
