"""One batch, run through a model as often as it is needed, and what reaches the modules in it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.wrappers import plain_modules
from layerwise.inputs.values.batches import batches_of
from layerwise.inputs.values.stores import Store
from layerwise.inputs.values.structure import flatten


class Runs:
    """Runs of a model on one batch.

    Raises:
        TypeError: the batch is not what a model can be called with.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        # Kept as a calibration keeps it: each run gets copies, since a model may write into its inputs.
        (self._batch,) = batches_of(model, [batch], Store("device").keep)

    def outputs(self) -> list[Tensor]:
        """Run the model, and return copies of its floating-point outputs; it does not look into caches.

        Raises:
            ValueError: there are none.
        """
        args, kwargs, _ = self._batch.call()
        leaves = flatten(self.model(*args, **kwargs))[0]
        found = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not found:
            raise ValueError(
                "rotate_: the model returned no floating-point tensor for this batch, so nothing can be compared"
            )
        return found


@dataclass(frozen=True)
class Trace:
    """What one run has shown.

    Attributes:
        reached: fqns of the modules that were called with a tensor that is not empty.
        sources: fqn of a linear -> fqns of the norms that gave it its inputs; None stands for anything else.
    """

    reached: set[str] = field(default_factory=set)
    sources: dict[str, set[str | None]] = field(default_factory=dict)


def trace_run(runs: Runs, linears: Collection[str], norms: Mapping[str, nn.Module]) -> Trace:
    """Run the model once, and note what is called, and which linears take the output of which norms.

    An output is known by its memory, so a view of it is recognised, and a copy is not. (A linear whose norm is not
    noticed is planned without a gain, which the proof then refuses.)
    """
    trace = Trace()
    held: dict[int, tuple[str, Tensor]] = {}
    names = {module: name for name, module in norms.items()}

    def before(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            # Some models call an expert that no token chose, with an empty tensor: the batch shows nothing of it.
            if any(one.numel() for one in given):
                trace.reached.add(name)
            if name in linears and given:
                source = held.get(given[0].untyped_storage().data_ptr())
                trace.sources.setdefault(name, set()).add(source[0] if source else None)

        return note

    def after(module: nn.Module, _: Any, output: Any) -> None:
        # Held, so that no other tensor gets its memory in the meantime.
        if isinstance(output, Tensor):
            held[output.untyped_storage().data_ptr()] = (names[module], output)

    with _hook(runs.model, before, after, norms):
        runs.outputs()
    return trace


@contextmanager
def _hook(
    model: nn.Module, before: Callable[[str], Any], after: Callable[..., None], norms: Mapping[str, nn.Module]
) -> Iterator[None]:
    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        for name, module in plain_modules(model):
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles += [module.register_forward_hook(after) for module in norms.values()]
        yield
    finally:
        for handle in handles:
            handle.remove()
