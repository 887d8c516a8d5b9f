"""What tells compiled graphs apart in torch's cache on disk: a tensor of ours as their input, and our own code.

AOTAutograd looks a graph up by what dynamo saw of it, and there a quantized weight is one input, and F.linear(x, w) one
call. The parts, what is decoded, and which gradients there are come out behind that, when the call is traced through
this package. Whatever the trace depends on has to be in the key, or a process gets the graph of another weight: one of
other rows, one that is frozen (no gradient, and no error), or one that an older version of this package has traced.

torch asks `_stable_hash_for_caching` of the outermost tensor, and a wrapper need not ask what it wraps: DTensor does
not. So the keys reach torch by a second way, which no wrapper is on. A trace begins by flattening its inputs down to
plain tensors, ours among them, whatever is around them. Then `KeyTag` takes the place of
`torch.compiler.config.cache_key_tag`, which torch pickles into the key of every graph, and is pickled as the user's own
tag together with the keys of all tensors of ours in the trace. To whoever reads the tag it is what the user has set.
"""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fsdp_hooks
from fsdp_hooks.release import VERSION
from fsdp_hooks.torch_private import is_tracing, traced_inputs, without_torch_function

HERE = (Path(__file__).parents[1], Path(fsdp_hooks.__file__).parent)  # the packages that a graph is traced through


class Keyed:
    """Mixin: a wrapper subclass of Tensor that has a key of its own, alone and inside of other wrappers.

    Its `__tensor_flatten__` calls `KeyTag.put()`.
    """

    def _stable_hash_for_caching(self) -> str:
        return graph_key(self)


class KeyTag(str):
    """The user's `torch.compiler.config.cache_key_tag`, which is pickled with the keys of our tensors in the trace."""

    __slots__ = ()

    @staticmethod
    def put() -> None:
        """Take the place of what is set, within a trace, unless that has been done."""
        if is_tracing():
            config = torch.compiler.config
            # this tag is the one thing that torch pickles into the key of every graph
            if type(config.cache_key_tag) is not KeyTag:
                config.cache_key_tag = KeyTag(config.cache_key_tag)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        found = sorted({key for source, tensor in traced_inputs() for key in _keys_within(tensor, source)})
        return _as_set, (str(self), *found)


def _as_set(tag: str, *keys: str) -> str:
    """Return what unpickling a KeyTag gives, and so what a copy of it is."""
    return tag


def _keys_within(tensor: Any, place: str) -> Iterator[str]:
    """Yield the place and the key of each tensor of ours that this one is, or has inside."""
    if isinstance(tensor, Keyed):
        yield f"{place}: {graph_key(tensor)}"
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _keys_within(getattr(tensor, name), f"{place}.{name}")


class _Code:
    """The code that graphs are traced through: part of what tensors of ours are made anew from (`__tensor_flatten__`).

    torch compares that before it runs a graph, and stores it with a graph, whoever keeps the graph: graphs of other
    code cannot be loaded.
    """

    def __repr__(self) -> str:
        return code_digest(HERE)

    def __reduce__(self) -> tuple[Any, ...]:
        return _this_code, (code_digest(HERE),)


THIS_CODE = _Code()


def _this_code(digest: str) -> _Code:
    # a graph has our kernels as they were: with other code the bytes might differ
    if digest != code_digest(HERE):
        raise RuntimeError(
            "this compiled graph was traced through another version of qtensor, whose kernels it would run; compile it "
            "again with the version that is installed"
        )
    return THIS_CODE


def graph_key(tensor: Any) -> str:
    """Return the key of a tensor: its looks, what flattening it gives (our code, too), and the looks of all inside.

    The width of the CPU's vectors is in it, too: torch leaves that out, and code for other vectors writes wrong values,
    or beyond its output.
    """
    with torch.no_grad(), without_torch_function():
        # torch's own key of a wrapper says nothing of what is inside
        names, context = tensor.__tensor_flatten__()
        inside = [(name, _looks(getattr(tensor, name))) for name in names]
        vectors = torch.backends.cpu.get_cpu_capability()
        return repr((type(tensor).__qualname__, _looks(tensor), context, inside, vectors))


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return *layout, tensor.device, tensor.requires_grad


@functools.cache
def code_digest(packages: tuple[Path, ...]) -> str:
    """Return a digest of the source of packages; if it is not there as files, the version."""
    files = sorted((path.relative_to(root.parent), path) for root in packages for path in root.rglob("*.py"))
    if not files:
        return VERSION
    found = hashlib.sha256()
    for name, path in files:
        found.update(f"{name.as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
