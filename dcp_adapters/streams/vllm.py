"""A WeightStream as the source of vLLM's own weight transfer (`vllm.distributed.weight_transfer`, vLLM >= 0.28).

vLLM's trainer engines (NCCL, CUDA IPC, sharded RDT) take a `WeightSource`, and call on every trainer rank:

    metadata()      name, dtype, shape of every tensor, the same on all ranks
    iteration       (name, tensor) in that order; the rank that sends has the tensors, a rank that helps has None
    held_names()    what this rank has: everything, or nothing where it helps
    groups(), iter_groups()   vLLM's own, which follow from these: all names of a layer come one after the other

The engine must have been started on a directory with the same quantization_config (an export, or one with the stream's
`json`), since that is what tells it how to read the tensors. vLLM is imported when `vllm_source` is called.
"""

import importlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from dcp_adapters.streams.weight_stream import WeightStream

SEAM = "vllm.distributed.weight_transfer.base"


def vllm_source(stream: WeightStream) -> Any:
    """A vLLM `WeightSource` of a stream; each iteration is a version.

    Raises:
        ImportError: no vLLM, or one without this interface.

    Example:
        ```python
        >>> source = vllm_source(WeightStream(model))
        >>> [name for name, tensor in source]
        ```
    """
    base = importlib.import_module(SEAM)
    if not hasattr(base, "WeightSource"):
        raise ImportError(f"{SEAM} has no WeightSource; vllm_source needs vLLM 0.28 or newer")

    class StreamSource(base.WeightSource):  # type: ignore[misc, name-defined] # of a module known at run time only
        """The stream's tensors, as vLLM asks for them."""

        def metadata(self) -> list[Any]:
            """What the stream says."""
            return [base.ParamMeta(each.name, each.dtype, each.shape) for each in stream.metadata()]

        def held_names(self) -> Collection[str] | None:
            """None: all of them."""
            return None if stream.receives else frozenset()

        def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
            """One version."""
            names = iter([each.name for each in stream.metadata()])
            for size, bucket in zip(stream.sizes, stream, strict=True):
                for name in (next(names) for _ in range(size)):
                    yield name, bucket.get(name)

    return StreamSource()
