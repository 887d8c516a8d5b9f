"""`calibrate`: from a model and some data to quantized weights, one layer held at a time, resumable anywhere.

    plan       options, layers and targets; refused here if anything does not fit
    agreement  all ranks are about to do the same
    run        batches recorded; each stage held -> calibrated -> released -> own boxes kept -> shards -> checkpoint
    result     quantized weights beside the shards, and a report

Each is a module of running/. Ranks go through the same stages together, each with as many batches as it has.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_hooks.devices import this_device
from fsdp_hooks.ranks.across_ranks import ALONE, is_first, raise_together
from fsdp_hooks.ranks.waiting import IN_GROUP, waited_for
from fsdp_hooks.wrappers import without_replication
from layerwise.algorithms.algorithm import Algorithm
from layerwise.algorithms.awq import AWQ
from layerwise.algorithms.gptaq import GPTAQ
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.local_hessian import LocalHessian
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.qronos import Qronos
from layerwise.algorithms.smoothquant import SmoothQuant
from layerwise.formats.assignment import Assignment
from layerwise.running.calibration import Calibration
from layerwise.running.events import Event, log_plan, observing
from layerwise.running.kv_cache import KVCache
from layerwise.running.one_stage.agreement import check_agreed
from layerwise.running.plan import Options, make_plan
from layerwise.running.result import CalibrationResult, result_of
from layerwise.stages.caller import calling
from qtensor.spec.recipes import Recipe

MAX = Max()
# those that write nothing on the way to a decision
OWN_ALGORITHMS = (Max, Mse, LocalHessian, SmoothQuant, AWQ, GPTQ, GPTAQ, Qronos)


def calibrate(  # noqa: PLR0913 - the options of a run, keyword-only
    model: nn.Module,
    data: Iterable[Any] | Callable[[nn.Module], object] | None,
    *,
    recipe: Recipe | Assignment,
    algorithm: Algorithm = MAX,
    layers: Any = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    inputs: str = "dynamic",
    expert_inputs: str = "routed",
    kv_cache: KVCache | None = None,
    checkpoint_dir: str | Path | None = None,
    save_every: int = 1,
    on_event: Callable[[Event], object] | None = None,
    progress: bool = True,
    layer_inputs: str | None = None,
    inputs_on: str = "device",
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> CalibrationResult:
    """Quantize the linear weights of a model, layer by layer, each with scales (and values) fitted to data.

    Call it on all ranks of the group. Only one layer's weights are gathered at a time, and the batches run through that
    layer alone, on the outputs of the layer before. Afterwards the model's weights equal the result's, dequantized and
    cast to the parameters' dtype (in quantized storage they are the same bytes); the model does not quantize inputs.
    What the model stores transposed is [N, K] or [E, N, K] in the result.

    Args:
        model: plain, or sharded by FSDP2 (dense, quantized or high-precision storage, CPU offload), by tensor
            parallelism, by expert parallelism or several of them, or on the meta device with `weights`. It runs in eval
            mode.
        data: an iterable of this rank's batches (a tensor, a tuple, or a dict of keyword arguments for the model), or
            a function that gets the model and calls it with each batch (these calls compute nothing and return None).
            Ranks may have different numbers of batches, or none, those of one group of expert parallelism, too; those
            of one group of tensor parallelism have the same. `None` is enough for Max and Mse.
        recipe: the format of the weights; or an assignment, which names the weights and gives each its own.
        algorithm: Max(), Mse(), LocalHessian(), SmoothQuant(), AWQ(), GPTQ(), GPTAQ(), Qronos(), or one of your own.
        layers: the layers, as names, glob patterns or modules; None: the largest list of modules; (): no layers, the
            whole model at once.
        include: globs over module fqns of what to quantize; each must match something.
        exclude: globs over module fqns of what to leave alone; one that matches nothing warns.
        inputs: "dynamic", or "static": the result holds a scale for each linear's input.
        expert_inputs: "routed", or "all": for statistics each expert sees every token of its block. What layers return
            is as ever.
        kv_cache: KVCache(): the result holds scales for the keys and values of each attention.
        checkpoint_dir: where to keep finished layers, a directory that all ranks share. A later run of the same
            calibration continues after them, on any number of ranks, to the same bytes.
        save_every: after how many layers to save.
        on_event: called with every `Event`, on every rank.
        progress: show a bar on rank 0, if it has a terminal.
        layer_inputs: what layers are calibrated on: outputs of the "unquantized" or of the "quantized" layer before;
            None: as the algorithm says ("quantized" for GPTQ, and for GPTAQ and Qronos, which take nothing else).
        inputs_on: where inputs of layers wait: "device", "cpu" or "disk".
        device: where a model without FSDP computes; None: where its weights are.
        weights: safetensors of a model on the meta device: a file, or a directory.
        process_group: the ranks; None: all of them, or this process alone if there is no process group.

    Returns:
        The result; see `CalibrationResult.state_dict` and `.report`.

    Raises:
        ValueError, TypeError: options, patterns, shapes or a checkpoint that do not fit, or differ between ranks;
            nothing has been changed.
        NotImplementedError: a model whose layers depend on each other in a way that cannot be replayed, by name.
        RuntimeError: weights were changed where the change would be lost; inputs that are not finite; a factorisation
            that failed. Finished layers keep their results, and the model is sharded and usable.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64)))
        >>> batches = [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=NVFP4BlockScaling(), algorithm=GPTQ(), layers=["0", "1"])
        >>> sorted(result.state_dict())
        ['0.0.weight', '1.0.weight']
        ```
    """
    model = without_replication(model)
    group = process_group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
    # Only a callback or a user's own algorithm can write where no writes are expected; else no bytes are compared.
    watched = on_event is not None or not is_own(algorithm)
    # files may be missing on some ranks
    with calling("calibrate"), waited_for(group or ALONE, "calibrate", IN_GROUP), raise_together(group):
        options = Options(
            recipe=recipe,
            algorithm=algorithm,
            inputs=inputs,
            expert_inputs=expert_inputs,
            kv_cache=kv_cache,
            layer_inputs=layer_inputs,
            inputs_on=inputs_on,
            save_every=save_every,
            device=None if device is None else this_device(device),
            weights=weights,
        )
        plan = make_plan(model, options, layers=layers, include=include, exclude=exclude, group=group, watched=watched)
    first = is_first(group)
    observed = observing(on_event, len(plan.stages), bar=progress and first, logs=first)
    with calling("calibrate"), observed as observer:
        if first:
            log_plan(plan)
        # Reductions add by position, so ranks that differ in anything would mix statistics, silently.
        check_agreed(group, plan.told(checkpoint=checkpoint_dir is not None))
        run = Calibration(plan, observer)
        run.calibrate_stages(() if data is None else data, checkpoint_dir)
    return result_of(plan, run.outcomes, range(run.resumed))


def is_own(algorithm: object) -> bool:
    """Return whether it, and each algorithm among its options, is one of this library."""
    if not isinstance(algorithm, Algorithm):
        return False  # what is no algorithm is refused later
    options = [getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)]
    inner = [one for one in options if isinstance(one, Algorithm)]
    return type(algorithm) in OWN_ALGORITHMS and all(is_own(one) for one in inner)
