"""The grouped products of quantized or plain operands, each one operation of a compiled graph.

    rows      tokens [T, C] by the matrix [L, C] of their group   -> [T, L]       y, and dx with the stack turned
    columns   [M, W] by [L, W] along the tokens of each group     -> [E, M, L]    dw

Rows behind the last end are zeros, where torch's grouped_mm leaves whatever was in memory.

In a graph a product is opaque: what the stack is decoded or turned to is made inside of an operation that takes the
tokens or the gradient, so that no graph keeps it (see ../late_decode.py); quantizing tokens is plain operations before
it. Fake and meta tensors, whose ends have no values, go the same way.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.torch_private import constant_in_graphs, is_tracing
from qtensor.numerics import kernels
from qtensor.products import in_bf16
from qtensor.products.dynamic import Parts
from qtensor.products.emulation import tell_of_emulation, without_autocast
from qtensor.products.gradients import contraction_multiple, kinds_of
from qtensor.products.grouped.choice import Case, Way, case_of, choose
from qtensor.products.grouped.layout import groups
from qtensor.products.grouped.operands import turn_stack
from qtensor.spec.format import GroupedRoute
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import logical_shape, registered, specs_of

FORWARD, TURNED, PLAIN = "forward", "turned", "plain"  # what rows are multiplied with


class Told(NamedTuple):
    """What an operation is told in words."""

    recipe: Recipe
    role: str


def rows(a: Sequence[Tensor], stack: Sequence[Tensor], ends: Tensor, told: Told, dtype: torch.dtype) -> Tensor:
    """Return the product of grouped rows with a stack.

    Args:
        a: the parts of the rows, ordered as their specs: of tokens [T, K] (FORWARD) or of the gradient [T, N], turned
            stack or plain (then it is one tensor).
        stack: the gathered parts of a stack [E, N, K], likewise.
        ends: [E].
        told: the recipe of the stack, and the role.
        dtype: of the result.
    """
    if _is_opaque(a[0], ends):
        return torch.ops.qtensor.grouped_rows(list(a), list(stack), ends, _text(*told), dtype)  # type: ignore[no-any-return]
    return _rows(a, stack, ends, told, dtype)


def columns(a: Sequence[Tensor], b: Sequence[Tensor], ends: Tensor, told: Told, dtype: torch.dtype) -> Tensor:
    """Return the products along the tokens of each group, [E, M, L].

    Args:
        a: parts of columns of the gradient (see operands.py), or, told PLAIN, the gradient [T, M] itself.
        b: those of the input, or x [T, L].
        ends: [E], of groups in whole blocks unless PLAIN.
        told: the recipe of the stack, and the role.
        dtype: of the result.
    """
    if _is_opaque(a[0], ends):
        return torch.ops.qtensor.grouped_columns(list(a), list(b), ends, _text(*told), dtype)  # type: ignore[no-any-return]
    return _columns(a, b, ends, told, dtype)


def _is_opaque(*tensors: Tensor) -> bool:
    return is_tracing() or any(type(each) is not Tensor or each.is_meta for each in tensors)


def held_names(recipe: Recipe) -> list[str]:
    """Return the names of the parts that a product needs of a stack."""
    return [spec.name for spec in specs_of(recipe) if spec.gathered]


def _named(parts: Sequence[Tensor], recipe: Recipe) -> dict[str, Tensor]:
    return dict(zip(held_names(recipe), parts, strict=True))


def _rows(a: Sequence[Tensor], stack: Sequence[Tensor], ends: Tensor, told: Told, dtype: torch.dtype) -> Tensor:
    recipe, role = told
    held = _named(stack, recipe)
    if not a[0].shape[0]:
        return a[0].new_zeros((0, _width(held, told)), dtype=dtype)
    if role == PLAIN:
        return _plain_rows(a[0], held, ends, recipe)
    if role == FORWARD:
        return _multiply_rows(_named(a, recipe.of_rows), recipe.of_rows, held, recipe, ends, dtype)
    kinds = kinds_of(recipe)
    return _multiply_rows(_named(a, kinds.gradient), kinds.gradient, turn_stack(held, kinds), kinds.other, ends, dtype)


def multiply_turned(a: Parts, turned: Parts, ends: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return dx of the gradient's rows and a stack that is turned already; outside of graphs."""
    kinds = kinds_of(recipe)
    if not a["payload"].shape[0]:
        return a["payload"].new_zeros((0, turned["payload"].shape[1]), dtype=dtype)
    return _multiply_rows(a, kinds.gradient, turned, kinds.other, ends, dtype)


def _width(held: Parts, told: Told) -> int:
    shape = logical_shape(held["payload"], told.recipe)
    return shape[1] if told.role == FORWARD else shape[2]


def _multiply_rows(  # noqa: PLR0913, PLR0917 - two operands, and how
    a: Parts, of_a: Recipe, b: Parts, of_b: Recipe, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    experts, width, contraction = logical_shape(b["payload"], of_b)
    device = b["payload"].device
    case = case_of(device, of_a, of_b, dtype, (experts, contraction, width))
    way, reason, y = _scaled(case, lambda route: route.rows(a, b, ends, dtype, of_b))
    if y is not None:
        return _zero_behind(y, ends)
    if way is Way.BF16:
        x, w = kernels.decode(a, of_a, torch.bfloat16), kernels.decode(b, of_b, torch.bfloat16)
        with without_autocast(device):
            return _zero_behind(F.grouped_mm(x, w.transpose(-2, -1), offs=ends), ends)
    if way is Way.FP32_EACH:
        tell_of_emulation(device, type(of_b).__name__, reason)
    values = kernels.decode(a, of_a, torch.float32) if way is Way.FP32_EACH else None
    y = torch.zeros((a["payload"].shape[0], width), dtype=dtype, device=device)
    for expert, group in groups(ends, y.shape[0]):
        matrix = _entry(b, expert)
        if values is None:
            cut = {name: part[group] for name, part in a.items()}
            y[group] = in_bf16.multiply(cut, of_a, matrix, of_b, dtype)
        else:
            with without_autocast(device):
                y[group] = F.linear(values[group], kernels.decode(matrix, of_b, torch.float32)).to(dtype)
    return y


def _columns(a: Sequence[Tensor], b: Sequence[Tensor], ends: Tensor, told: Told, dtype: torch.dtype) -> Tensor:
    if told.role == PLAIN:
        return _plain_columns(a[0], b[0], ends)
    kinds = kinds_of(told.recipe)
    named = _named(a, kinds.gradient), _named(b, kinds.other)
    high, width = named[0]["payload"].shape[0], named[1]["payload"].shape[0]
    sizes = ends.shape[0], contraction_multiple(kinds.other), width
    device = ends.device
    case = case_of(device, kinds.gradient, kinds.other, dtype, sizes)
    way, reason, dw = _scaled(case, lambda route: route.columns(*named, ends, dtype, kinds.other))
    if dw is not None:
        return dw
    if way is Way.BF16:
        x, w = (kernels.decode(part, of, torch.bfloat16) for part, of in zip(named, kinds[:2], strict=True))
        with without_autocast(device):
            return F.grouped_mm(x, w.t(), offs=ends)
    if way is Way.FP32_EACH:
        tell_of_emulation(device, type(kinds.other).__name__, reason)
    dw = torch.zeros((ends.shape[0], high, width), dtype=dtype, device=device)
    for expert, group in groups(ends, named[0]["payload"].shape[1]):
        cut = [_cut_columns(part, of, expert, group) for part, of in zip(named, kinds[:2], strict=True)]
        if way is Way.BF16_EACH:
            dw[expert] = in_bf16.multiply(cut[0], kinds.gradient, cut[1], kinds.other, dtype)
            continue
        values = [kernels.decode(part, of, torch.float32) for part, of in zip(cut, kinds[:2], strict=True)]
        with without_autocast(device):
            dw[expert] = F.linear(*values).to(dtype)
    return dw


_missing: dict[type[Recipe], str] = {}  # what torch said of products that it has been built without


def _scaled(case: Case, call: Callable[[GroupedRoute], Tensor]) -> tuple[Way, str, Tensor | None]:
    """Return the way, why it is not SCALED, and the product if it is.

    MXFP8's is a part that builds of torch may lack, which no flag tells: the first call finds out.
    """
    kind = type(case.b)
    case = dataclasses.replace(case, missing=_missing.get(kind, ""))
    way, reason = choose(case)
    route = registered(case.b).route
    if way is not Way.SCALED or route is None or route.grouped is None:
        return way, reason, None
    try:
        return way, reason, call(route.grouped)
    except NotImplementedError as error:
        _missing[kind] = str(error).partition("\n")[0]
        return *choose(dataclasses.replace(case, missing=_missing[kind])), None


def _entry(stack: Parts, expert: int) -> dict[str, Tensor]:
    """Return the parts of one matrix; a scale of the whole stack is that of each.

    So are the scales [1, N, 1] of rows that come from shards which hold some rows of every matrix.
    """
    return {name: part[0 if part.shape[0] == 1 else expert] if part.ndim else part for name, part in stack.items()}


def _cut_columns(parts: Parts, recipe: Recipe, expert: int, group: slice) -> dict[str, Tensor]:
    """Return the parts of the columns of one group, as those of rows of their own."""
    cut = {}
    for spec in specs_of(recipe):
        part = parts[spec.name]
        if spec.block:
            start, end = spec.columns(group.start, group.stop)
            cut[spec.name] = part[:, start:end].contiguous()
        else:
            cut[spec.name] = part[expert].unsqueeze(-1)
    return cut


def _zero_behind(y: Tensor, ends: Tensor) -> Tensor:
    """Zero the rows behind the last end, which no group wrote."""
    behind = torch.arange(y.shape[0], dtype=torch.int32, device=y.device) >= ends[-1]
    return y.masked_fill_(behind.unsqueeze(1), 0)


# -- plain operands: the gradients of recipes without `gradients` ------------------------------------------------------


def _plain_rows(grad: Tensor, held: Parts, ends: Tensor, recipe: Recipe) -> Tensor:
    experts, _, width = logical_shape(held["payload"], recipe)
    if _is_one_launch(grad, experts, width):
        values = kernels.decode(held, recipe, grad.dtype)
        return _zero_behind(F.grouped_mm(grad.contiguous(), values, offs=ends), ends)
    dx = grad.new_zeros((grad.shape[0], width))
    for expert, group in groups(ends, grad.shape[0]):
        dx[group] = torch.matmul(grad[group], kernels.decode(_entry(held, expert), recipe, grad.dtype))
    return dx


def _plain_columns(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if _is_one_launch(grad, ends.shape[0], x.shape[1]):
        return F.grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends)
    dw = grad.new_zeros((ends.shape[0], grad.shape[1], x.shape[1]))
    for expert, group in groups(ends, grad.shape[0]):
        dw[expert] = grad[group].T @ x[group]
    return dw


def _is_one_launch(grad: Tensor, experts: int, width: int) -> bool:
    """Return whether torch's grouped_mm takes operands like these, by one launch; elsewhere it loops, too."""
    whole = not grad.shape[1] % 8 and not width % 8 and experts <= 1023 and grad.shape[0] > 0
    return grad.device.type == "cuda" and grad.dtype == torch.bfloat16 and whole


# -- in a compiled graph -----------------------------------------------------------------------------------------------


@constant_in_graphs
@functools.cache
def _text(recipe: Recipe, role: str) -> str:
    """Return a text that another process understands, too: it may find this graph, compiled, in a cache on disk."""
    return json.dumps([recipe.to_json(), recipe.gradients, recipe.accumulation, role])


@functools.cache
def _told(text: str) -> Told:
    record, gradients, accumulation, role = json.loads(text)
    how = {"activations": "dynamic", "gradients": gradients, "accumulation": accumulation}
    return Told(dataclasses.replace(Recipe.from_json(record), **how), role)


@torch.library.custom_op("qtensor::grouped_rows", mutates_args=())
def _grouped_rows(a: list[Tensor], stack: list[Tensor], ends: Tensor, told: str, dtype: torch.dtype) -> Tensor:
    """Compute `rows`."""
    return _rows(a, stack, ends, _told(told), dtype)


@_grouped_rows.register_fake
def _(a: list[Tensor], stack: list[Tensor], ends: Tensor, told: str, dtype: torch.dtype) -> Tensor:
    how = _told(told)
    return a[0].new_empty((a[0].shape[0], _width(_named(stack, how.recipe), how)), dtype=dtype)


@torch.library.custom_op("qtensor::grouped_columns", mutates_args=())
def _grouped_columns(a: list[Tensor], b: list[Tensor], ends: Tensor, told: str, dtype: torch.dtype) -> Tensor:
    """Compute `columns`."""
    return _columns(a, b, ends, _told(told), dtype)


@_grouped_columns.register_fake
def _(a: list[Tensor], b: list[Tensor], ends: Tensor, told: str, dtype: torch.dtype) -> Tensor:
    along = 1 if _told(told).role == PLAIN else 0
    return a[0].new_empty((ends.shape[0], a[0].shape[along], b[0].shape[along]), dtype=dtype)
