"""Looks for collectives in what a rank runs by itself, before they are entered: the other ranks would not be there.

Under expert parallelism tokens go to the ranks that have their experts. If hooks of distribute_module send them, the
hooks are taken away, and a layer with all experts computes the same on one rank. If the layer's own forward sends them,
it would wait for ranks that run different batches, or none, and take the experts of one rank for those of another. So
it is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_hooks.torch_private import TorchDispatchMode
from layerwise.inputs.recording.recorder import Recorder
from layerwise.inputs.replaying.hooks import call_without_fsdp
from layerwise.inputs.replaying.replay import LayerReplay, ModelReplay
from layerwise.stages.caller import caller
from layerwise.stages.cuts import shares_out_experts
from layerwise.stages.stage import Stage

# Libraries of torch in which all operations communicate; whoever calls torch.distributed ends up in one of them.
COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


class Collective(BaseException):
    """Leaves a forward that was about to communicate; not an Exception, so that forwards that catch those let it go."""


class _RefuseCollectives(TorchDispatchMode):
    """Inside, an operation that communicates raises `Collective` and is not run."""

    # Without it, torch refuses operations like flex attention under a mode, which do not communicate.
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in COMMUNICATING:
            raise Collective(f"{func.namespace}.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_collectives() -> Iterator[None]:
    """Return a context manager in which what would communicate raises `Collective`; nothing is compiled in it."""
    # Compiled code does not go together with a dispatch mode.
    with torch.compiler.set_stance("force_eager"), _RefuseCollectives():  # type: ignore[no-untyped-call]
        yield


def check_own_batch(replay: LayerReplay | ModelReplay, stage: Stage) -> None:
    """Run a stage on the first batch, if this rank has one; what it returns is dropped.

    Raises:
        NotImplementedError: it communicates.
    """
    if len(replay):
        _check_run(stage, lambda: replay.run(0))


def check_kind(recorder: Recorder, stage: Stage) -> None:
    """Run a layer on what the first one is called with for the first batch, if this rank has one, and is prepared.

    Raises:
        NotImplementedError: it communicates.
    """
    if len(recorder):
        _check_run(
            stage,
            lambda: recorder.run(0, 0, lambda *args, **kwargs: call_without_fsdp(stage.module, args, kwargs)),
        )


def find_other_kinds(stages: Sequence[Stage]) -> Iterator[Stage]:
    """Yield the first layer of each kind whose experts are shared out over ranks, but not of the first layer's."""
    known = {_kind(stages[0])}
    for stage in stages:
        kind = _kind(stage)
        if stage.name and kind not in known and shares_out_experts(stage.module):
            known.add(kind)
            yield stage


def _kind(stage: Stage) -> tuple[Any, ...]:
    return stage.kind(), tuple(type(module) for module in stage.module.modules())


def _check_run(stage: Stage, run: Callable[[], object]) -> None:
    try:
        with refuse_collectives():
            run()
    except Collective as found:
        raise NotImplementedError(
            f"{caller()}: experts are shared out over ranks (expert parallelism), and the forward of "
            f"{stage.title} calls a collective, {found}: each rank runs layers by itself, with all experts and on "
            "batches of its own, so others would not be there. Send tokens in hooks of distribute_module (input_fn, "
            "output_fn), which are taken away meanwhile, or shard the experts with fully_shard alone"
        ) from found
    # Another error may come of this run alone, whose inputs are those of the first layer. If not, it comes again.
    except Exception:  # noqa: BLE001
        pass
