"""`rotate_`: the same model with rotated weights, whose blocks hold fewer outliers; called before quantization.

    options, modules by their names -> one run: what is reached, which norm is in front of which linear
    -> signs: the plan fits the model, exactly -> weights rotated -> outputs compared, or all put back

Rotations of the residual stream and of the values are R1 and R2 of SpinQuant (arXiv 2405.16406), after QuaRot (arXiv
2404.00456). Both are in the weights alone; nothing is added to the model. What no other weight can take up (the input
of a down_proj, their R4) is rotated at run time instead, by a hook: `online`.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fsdp_hooks.ranks.across_ranks import is_first
from fsdp_hooks.wrappers import module_named, plain_modules, without_replication
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.folding.folds import AMPLIFICATION, deviation, tolerance
from layerwise.inputs.replaying.evaluating import set_eval_mode
from layerwise.rotating.choice import Axis, Chosen, RotationOptions, choose
from layerwise.rotating.hadamard import Rotation, rotate_weight_
from layerwise.rotating.online import find_linears
from layerwise.rotating.plan import Norm, RotationPlan, norms_of, plan_rotations
from layerwise.rotating.proof import find_norm_kind, make_rotations, prove
from layerwise.rotating.tracing import Runs, trace_run
from layerwise.rotating.written import note_written
from qtensor.products.input_rotation import is_size, rotate_inputs_of

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RotationReport:
    """What `rotate_` has done.

    Attributes:
        difference: the largest relative RMS difference of an output of the model on the batch, before and after.
        allowed: how much rounding may make of it: 4 times what the same rounding of weights made of the outputs when
            they were rotated, rounded, and rotated back; at least that of one weight, and at most a bound for all.
        changed: fqns of all parameters that were written.
        online: fqn of each linear whose inputs are rotated at run time -> its block.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = rotate_(model, torch.randn(8, 64), where=(), online=["0"])
        >>> report.difference <= report.allowed
        True
        ```
    """

    difference: float
    allowed: float
    changed: tuple[str, ...]
    online: Mapping[str, int] = field(default_factory=dict)


def rotate_(  # noqa: PLR0913 - the options of a rotation, keyword-only
    model: nn.Module,
    batch: Any,
    *,
    where: Sequence[str] = ("stream", "values"),
    block: int = 32,
    seed: int | None = 0,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    head_dim: int | None = None,
    tied: Literal["refuse", "untie"] = "refuse",
    online: Sequence[str] | Mapping[str, int] = (),
) -> RotationReport:
    """Rotate the weights of a dense model in place, so that it computes the same function with other weights.

    R is block-diagonal, of random signs and normalized Hadamard matrices. "stream": the gains of RMSNorms are moved
    into the linears behind them, and embeddings and linears write x R, and read it, in place of x. "values": each head
    of a v_proj makes v R, and its o_proj reads that. Call it before `calibrate`, `quantize_` and `fully_shard`.

    It is tested on `batch` whether the model allows this: changes of signs have to leave its outputs equal (0 equals
    -0), and the outputs after it are compared with those before, within what rounding makes of them. Products are
    computed in float64 and rounded to the weight's dtype at the end. The result depends on weights and options alone,
    on every device.

    Args:
        model: plain parameters with their values, in bf16, fp16, fp32 or fp64.
        batch: what the model is called with, as one batch of `calibrate`: a tensor, a tuple or a dict of keyword
            arguments. It must reach every linear that is rotated.
        where: what to rotate: "stream", "values", or both; with `online` also neither.
        block: size of the Hadamard matrices, a power of two that divides the channels of the stream and of a head. The
            block of the format keeps an outlier in its block.
        seed: of the signs; None: no signs.
        reads: globs over fqns of the linears that read the residual stream; None: the usual names.
        writes: globs over fqns of the embeddings and linears that write it; None: the usual names.
        head_dim: channels of a head; None: the attribute `head_dim` of each attention.
        tied: what to do if an output projection is tied to an embedding, and the gain of the last norm would have
            to go into it: "refuse", or "untie", which gives it a parameter of its own, and says so in `model.config`.
        online: globs over fqns of linears whose weights are rotated along K, without signs, and their inputs at run
            time, by a forward pre-hook; in blocks of `block`, or of what a dict says for each glob.

    Returns:
        What was written, and how far the outputs differ.

    Raises:
        ValueError, TypeError: options, names, shapes or parameters that do not fit, values that are not finite, or a
            batch that does not reach something; nothing was changed.
        NotImplementedError: the model is not one that can be rotated exactly, by name; nothing was changed.
        OverflowError, RuntimeError: rotated values leave the range of their dtype, or the outputs differ by more than
            rounding; everything was put back.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = rotate_(model, torch.randn(8, 64), where=(), online=["0"])
        >>> report.changed, dict(report.online)
        (('0.weight',), {'0': 32})
        ```
    """
    asked = RotationOptions(
        where=where, block=block, seed=seed, reads=reads, writes=writes, head_dim=head_dim, tied=tied, online=online
    )
    model = without_replication(model)
    chosen = choose(model, asked)
    device = next(iter(model.parameters())).device
    with set_eval_mode(model), full_precision(device), ExitStack() as undo:
        if tied == "untie":
            _untie(model, chosen, undo)
        runs = Runs(model, batch)
        plan = plan_rotations(model, chosen, trace_run(runs, chosen.reads, norms_of(model, chosen)))
        matrices = make_rotations(plan, block, seed)
        norms = list(_norms(plan, chosen, matrices))
        copies = _copies(plan, norms)
        undo.callback(_restore, copies)  # also what an interrupt leaves between a change of signs and its note
        prove(plan, norms, runs)
        before = runs.outputs()
        _write(plan, norms, matrices)
        # Rotated there and back, all that is left is rounding: how far it moves the outputs is what may be
        # allowed.
        _write_back(plan, matrices)
        rounding = _difference(before, runs.outputs())
        _restore(copies)
        _write(plan, norms, matrices)
        for name, axis in chosen.online.items():
            undo.callback(rotate_inputs_of(module_named(model, name), axis.online))
        report = _compare(plan, norms, _difference(before, runs.outputs()), rounding)
        undo.pop_all()  # all is well: keep it
    note_written(model, report.changed)
    if is_first(None):
        LOG.info(
            "rotate_: %d parameters written, %d linears get rotated inputs; outputs differ by %.3g, %.3g is allowed",
            *(len(report.changed), len(report.online), report.difference, report.allowed),
        )
    return report


def rotate_inputs_(model: nn.Module, online: Mapping[str, int]) -> dict[str, int]:
    """Rotate inputs of linears at run time, whose weights are rotated already: those of a checkpoint, say.

    `rotate_` does this itself, with the weights. A model that is built anew and gets its weights from a checkpoint of
    the rotated one needs the hooks alone: call this before it is loaded, before or after `fully_shard`. Each linear
    gets a buffer, `input_rotation`, that state dicts have beside the weight; so does what `rotate_` makes.

    Args:
        model: any, also on the meta device, sharded or quantized.
        online: glob over fqns of linears -> the block, a power of two, as in the report of `rotate_`.

    Returns:
        Fqn of each linear -> its block.

    Raises:
        ValueError, TypeError: globs, modules or blocks that do not fit, by name; nothing was changed.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> rotate_inputs_(model, {"0": 32})  # before a checkpoint of the rotated model is loaded
        {'0': 32}
        ```
    """
    for pattern, block in online.items():
        if not is_size(block):
            raise ValueError(
                f"rotate_inputs_: online= has {block!r} for {pattern!r}, which is no power of two from 2 on"
            )
    found = list(find_linears("rotate_inputs_", dict(plain_modules(model)), online))
    with ExitStack() as undo:
        for _, linear, block in found:
            undo.callback(rotate_inputs_of(linear, block))
        undo.pop_all()
    return {name: block for name, _, block in found}


def _norms(plan: RotationPlan, chosen: Chosen, matrices: Mapping[Axis, Rotation]) -> Iterator[Norm]:
    """Yield the norms whose gains are moved; check all norms."""
    for name, module in plan.norms.items():
        assert chosen.stream is not None
        kind = find_norm_kind(name, module, matrices[chosen.stream])
        weight = module._parameters["weight"]
        assert weight is not None
        if name in plan.folded:
            yield Norm(name, weight, kind)


def _untie(model: nn.Module, chosen: Chosen, undo: ExitStack) -> None:
    """Give the linears that are tied to an embedding parameters of their own."""
    embeddings = {id(one.weight) for one in chosen.writes.values() if isinstance(one, nn.Embedding)}
    tied = [linear for linear in chosen.reads.values() if id(linear.weight) in embeddings]
    for linear in tied:
        shared = linear.weight
        undo.callback(_put, linear, shared)
        linear.weight = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    config: Any = getattr(model, "config", None)
    if tied and getattr(config, "tie_word_embeddings", False):  # or transformers would tie them when they are loaded
        undo.callback(setattr, config, "tie_word_embeddings", True)
        config.tie_word_embeddings = False


def _put(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight = weight


def _copies(plan: RotationPlan, norms: Sequence[Norm]) -> list[tuple[Tensor, Tensor]]:
    """Copy all that will be written, with its values in CPU memory."""
    tensors = [*(change.tensor for change in plan.changes), *(norm.weight for norm in norms)]
    return [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]


@torch.no_grad()
def _write(plan: RotationPlan, norms: Sequence[Norm], matrices: Mapping[Axis, Rotation]) -> None:
    """Write all changes."""
    gains = {norm.name: norm.gain() for norm in norms}
    for change in plan.changes:
        rotate_weight_(
            change.tensor,
            gain=None if change.norm is None else gains[change.norm],
            columns=None if change.columns is None else matrices[change.columns],
            rows=None if change.rows is None else matrices[change.rows],
        )
    for norm in norms:
        norm.weight.fill_(0.0 if norm.kind == "offset" else 1.0)


def _write_back(plan: RotationPlan, matrices: Mapping[Axis, Rotation]) -> None:
    """Rotate the rotated weights back (gains stay in them), to the old weights with the rounding of the rotated ones.

    Whether the model allows a rotation makes no difference to these, so they show what rounding alone does to outputs.
    """
    for change in plan.changes:
        rotate_weight_(
            change.tensor,
            gain=None,
            columns=None if change.columns is None else matrices[change.columns].invert(),
            rows=None if change.rows is None else matrices[change.rows].invert(),
        )


@torch.no_grad()
def _restore(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, values in copies:
        tensor.copy_(values)


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    return max(deviation(one, other) for one, other in zip(before, after, strict=True))


def _compare(plan: RotationPlan, norms: Sequence[Norm], difference: float, rounding: float) -> RotationReport:
    coarsest = max((change.tensor.dtype for change in plan.changes), key=lambda dtype: torch.finfo(dtype).eps)
    columns = max(change.tensor.shape[-1] for change in plan.changes)
    allowed = tolerance(coarsest, len(plan.changes), columns)
    if math.isfinite(rounding):
        # Rotated activations are rounded anew too, by about as much; if no weight is rounded, they alone are.
        allowed = min(allowed, max(AMPLIFICATION * rounding, tolerance(coarsest, 1, columns)))
    if not difference <= allowed:
        raise RuntimeError(
            f"rotate_: the model's outputs changed by {difference:.3g} (relative RMS), more than the {allowed:.3g} of "
            "rounding, so the rotation is not exact in this model; everything was put back"
        )
    written = (*(one.name for one in plan.changes), *(f"{one.name}.weight" for one in norms))
    online = {one.columns.maker: one.columns.online for one in plan.changes if one.columns and one.columns.online}
    return RotationReport(difference, allowed, written, online)
