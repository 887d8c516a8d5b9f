"""Grouped tokens by stacked experts, both operands quantized: the loop over experts with F.linear, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_hooks.all_gather import Sharding, ShardRows
from fsdp_hooks.torch_private import without_torch_function
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize, use_kernels
from qtensor.products.grouped import multiply
from qtensor.products.grouped.layout import places, spread
from qtensor.products.grouped.operands import encode_group_columns
from tests.qtensor.low_precision_backward import FLOAT8, MXFP8, expected_input_gradient, expected_weight_gradient
from tests.qtensor.recipes_under_test import DELAYED, RECIPES, same_bytes
from tests.sampling import sampled

DYNAMIC = {name: dataclasses.replace(recipe, activations="dynamic") for name, recipe in (RECIPES | DELAYED).items()}
EVERY = DYNAMIC | {f"{name}_gradients": recipe for name, recipe in (FLOAT8 | MXFP8).items()}
every = pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY.keys())
WITH_GRADIENTS = {name: EVERY[f"{name}_gradients"] for name in ("float8_row", "float8_tensor", "mxfp8_square")}
SOME = {"mxfp8": DYNAMIC["mxfp8"], **WITH_GRADIENTS}
some = pytest.mark.parametrize("recipe", SOME.values(), ids=SOME.keys())
# tokens of each expert: uneven, none, all to one, more than a block, one expert alone
SIZES = [(5, 0, 33, 20), (0, 0, 40, 0), (0, 1, 0, 64, 31, 16), (37,), (0,)]
N, K = 128, 256  # whole squares of 128


def tokens(count: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> Tensor:
    """Rows and channels of very different sizes: a scale of another one shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, width), generator=generator)
    x *= 10.0 ** torch.randint(-2, 3, (count, 1), generator=generator)
    return (x * 10.0 ** torch.randint(-1, 2, (1, width), generator=generator)).to(dtype)


def stack(recipe: Any, experts: int, dtype: torch.dtype = torch.bfloat16, n: int = N, k: int = K) -> nn.Parameter:
    """Experts of very different sizes."""
    generator = torch.Generator().manual_seed(experts)
    values = torch.randn((experts, n, k), generator=generator) * 3.0 ** torch.arange(experts).reshape(-1, 1, 1)
    return nn.Parameter(quantize(values.to(dtype), recipe))


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, w.transpose(-2, -1), offs=ends)


def looped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Every expert by itself; rows behind the last end are zeros."""
    bounds = [0, *ends.tolist()]
    ys = [F.linear(x[start:end], w[e]) for e, (start, end) in enumerate(itertools.pairwise(bounds))]
    return torch.cat([*ys, x.new_zeros(x.shape[0] - bounds[-1], w.shape[1])])


def trained(product: Any, x: Tensor, w: nn.Parameter, dy: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Output and both gradients."""
    x, w = x.clone().requires_grad_(), nn.Parameter(w.detach())
    y = product(x, w, ends)
    y.backward(dy)
    assert type(y) is type(x.grad) is type(w.grad) is Tensor
    return y.detach(), x.grad, w.grad


def assert_as_looped(recipe: Any, sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, n: int = N) -> None:
    ends, w = ends_of(sizes), stack(recipe, len(sizes), dtype, n)
    count = int(ends[-1]) + 3  # three rows behind the last end
    found = trained(grouped, tokens(count, K, dtype), w, tokens(count, n, dtype, 5), ends)
    wanted = trained(looped, tokens(count, K, dtype), w, tokens(count, n, dtype, 5), ends)
    for name, one, other in zip(("y", "dx", "dw"), found, wanted, strict=True):
        assert one.dtype == other.dtype, name
        assert one.shape == other.shape, name
        assert same_bytes(one, other), name


# -- the numbers -------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("sizes", SIZES[:1], ids=str)
def test_output_and_gradients_are_those_of_a_loop_over_experts(recipe: Any, sizes: tuple[int, ...]) -> None:
    assert_as_looped(recipe, sizes)


@some
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_so_they_are_however_tokens_are_shared_out(recipe: Any, sizes: tuple[int, ...]) -> None:
    assert_as_looped(recipe, sizes)


@some
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_so_they_are_in_other_dtypes(recipe: Any, dtype: torch.dtype) -> None:
    assert_as_looped(recipe, SIZES[0], dtype)


@pytest.mark.parametrize("recipe", [FLOAT8["float8_row"], DYNAMIC["float8_row"], DYNAMIC["int8_row"]], ids=str)
def test_so_they_are_for_rows_that_no_grouped_kernel_takes(recipe: Any) -> None:
    """torch's own grouped_mm wants rows of whole 16 bytes, on a CPU, too."""
    assert_as_looped(recipe, SIZES[0], n=35)


@pytest.mark.parametrize("name", ["float8_row", "float8_row_e4m3", "mxfp8_row"])
def test_the_gradients_of_a_group_are_those_of_the_reference_in_numpy(name: str) -> None:
    recipe = (FLOAT8 | MXFP8)[name]
    sizes = (7, 0, 50)
    ends, w = ends_of(sizes), stack(recipe, 3, n=64)
    x, dy = tokens(57, K), tokens(57, 64, seed=5)
    _, dx, dw = trained(grouped, x, w, dy, ends)
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if start == end:
            assert dw[e].count_nonzero() == 0
            continue
        matrix = QuantizedTensor.from_parts({name: part[e] for name, part in w.parts().items()}, recipe, w.dtype)
        assert same_bytes(dx[start:end], expected_input_gradient(dy[start:end], matrix))
        assert same_bytes(dw[e], expected_weight_gradient(dy[start:end], x[start:end], recipe))


@some
def test_rows_behind_the_last_end_change_nothing_and_are_zeros(recipe: Any) -> None:
    ends, w = ends_of((9, 0, 21)), stack(recipe, 3)
    x, dy = tokens(40, K), tokens(40, N, seed=5)
    plain = trained(grouped, x[:30], w, dy[:30], ends)
    x[30:], dy[30:] = torch.nan, torch.inf
    y, dx, dw = trained(grouped, x, w, dy, ends)
    assert same_bytes(torch.cat([plain[0], torch.zeros(10, N, dtype=y.dtype)]), y)
    assert same_bytes(torch.cat([plain[1], torch.zeros(10, K, dtype=y.dtype)]), dx)
    assert same_bytes(plain[2], dw)


@some
def test_what_is_not_finite_stays_in_its_group(recipe: Any) -> None:
    ends, w = ends_of((9, 12, 21)), stack(recipe, 3)
    x, dy = tokens(42, K), tokens(42, N, seed=5)
    clean = trained(grouped, x, w, dy, ends)
    x[10, 7], dy[11, 3] = torch.inf, torch.nan
    _, dx, dw = trained(grouped, x, w, dy, ends)
    assert dw[1].isnan().any()
    assert dx[11].isnan().any()
    for e in (0, 2):
        assert same_bytes(dw[e], clean[2][e])
    rest = torch.arange(42) != 11
    assert same_bytes(dx[rest], clean[1][rest])


@some
@pytest.mark.parametrize(
    "call", [torch.bmm, torch.matmul, Tensor.bmm, operator.matmul], ids=["bmm", "matmul", "method", "@"]
)
def test_a_batch_of_each_expert_is_a_group(recipe: Any, call: Any) -> None:
    def batched(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return call(x.unflatten(0, (3, -1)), w.mT).flatten(0, 1)

    ends, w = ends_of((11, 11, 11)), stack(recipe, 3)
    x, dy = tokens(33, K), tokens(33, N, seed=5)
    found, wanted = trained(batched, x, w, dy, ends), trained(looped, x, w, dy, ends)
    assert all(same_bytes(one, other) for one, other in zip(found, wanted, strict=True))


def test_grouped_mm_of_two_stacks_needs_no_offs() -> None:
    w, x = stack(DYNAMIC["mxfp8"], 3), tokens(33, K).unflatten(0, (3, -1))
    assert same_bytes(F.grouped_mm(x, w.mT), torch.bmm(x, w.mT))


@pytest.mark.parametrize("recipe", [*FLOAT8.values(), NVFP4BlockScaling(activations="dynamic")], ids=str)
def test_shards_of_a_gathered_stack_keep_their_own_scales(recipe: Any) -> None:
    pieces = [stack(recipe, 2).detach() for _ in range(2)]
    pieces[1] = quantize(pieces[1].dequantize() * 7, recipe)
    together = {}
    for name, part in pieces[0].parts().items():
        both = [piece.parts()[name] for piece in pieces]
        raw = torch.stack if part.ndim == 0 else torch.cat
        together[name] = raw([each.view(torch.uint8) for each in both] if part.ndim else both).view(part.dtype)
    if "amax_history" in together:
        together["amax_history"] = pieces[0].parts()["amax_history"]
    whole = type(pieces[0])(together, recipe, torch.bfloat16, sharding=Sharding(shards=ShardRows(2)))
    ends, x, dy = ends_of((5, 0, 20, 9)), tokens(34, K), tokens(34, N, seed=5)
    found = trained(grouped, x, nn.Parameter(whole), dy, ends)
    halves = [
        trained(looped, x[:5], nn.Parameter(pieces[0]), dy[:5], ends_of((5, 0))),
        trained(looped, x[5:], nn.Parameter(pieces[1]), dy[5:], ends_of((20, 9))),
    ]
    assert all(same_bytes(torch.cat(both), one) for one, *both in zip(found, *halves, strict=True))


@pytest.mark.parametrize("recipe", [*FLOAT8.values(), NVFP4BlockScaling(activations="dynamic")], ids=str)
def test_rows_of_every_matrix_keep_the_scales_of_their_shards(recipe: Any) -> None:
    """As fully_shard with Shard(1) cuts a stack: expert by expert, all rows of one matrix under scales of their own."""
    pieces = [stack(recipe, 3, n=32).detach() for _ in range(2)]
    pieces[1] = quantize(pieces[1].dequantize() * 7, recipe)
    together = {}
    for name, part in pieces[0].parts().items():
        both = [piece.parts()[name] for piece in pieces]
        raw = [each.view(torch.uint8) for each in both] if part.ndim else both
        together[name] = (torch.cat(raw, dim=1) if part.ndim > 1 else torch.stack(both)).view(part.dtype)
    if "amax_history" in together:
        together["amax_history"] = pieces[0].parts()["amax_history"]
    whole = type(pieces[0])(together, recipe, torch.bfloat16, sharding=Sharding(shards=ShardRows(32, dim=1)))
    ends, x, dy = ends_of((5, 0, 20)), tokens(27, K), tokens(27, 64, seed=5)
    wanted = trained(looped, x, nn.Parameter(whole), dy, ends)
    assert all(
        same_bytes(*pair) for pair in zip(trained(grouped, x, nn.Parameter(whole), dy, ends), wanted, strict=True)
    )
    halves = [looped(x, piece, ends) for piece in pieces]
    assert same_bytes(torch.cat(halves, dim=1), wanted[0])


def test_rows_that_a_view_puts_together_are_experts() -> None:
    recipe = FLOAT8["float8_row"]
    w, ends = stack(recipe, 3), ends_of((5, 0, 20))
    rows = nn.Parameter(
        QuantizedTensor.from_parts({name: part.flatten(0, 1) for name, part in w.parts().items()}, recipe, w.dtype)
    )
    x, dy = tokens(25, K).requires_grad_(), tokens(25, N, seed=5)
    y = grouped(x, rows.view(3, N, K), ends)
    y.backward(dy)
    wanted = trained(looped, x.detach(), w, dy, ends)
    found = y.detach(), x.grad, rows.grad.view(3, N, K)
    assert all(same_bytes(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_stack_of_no_experts_leaves_zeros() -> None:
    recipe = FLOAT8["float8_row"]
    x, w = tokens(5, K).requires_grad_(), stack(recipe, 1).detach()[:0]
    assert w.shape == (0, N, K)
    assert same_bytes(grouped(x, w, ends_of(())), torch.zeros(5, N, dtype=x.dtype))


@some
def test_tokens_may_stand_in_memory_in_any_order(recipe: Any) -> None:
    ends, w = ends_of((5, 0, 20)), stack(recipe, 3)
    x, dy = tokens(25, K), tokens(25, N, seed=5)
    found = trained(grouped, x.t().contiguous().t(), w, dy.t().contiguous().t(), ends)
    assert all(same_bytes(one, other) for one, other in zip(found, trained(grouped, x, w, dy, ends), strict=True))


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_only_what_is_trained_gets_a_gradient(frozen: str) -> None:
    recipe, ends = FLOAT8["float8_row"], ends_of((5, 0, 20))
    x, w, dy = tokens(25, K).requires_grad_(frozen != "x"), stack(recipe, 3), tokens(25, N, seed=5)
    w.requires_grad_(frozen != "w")
    grouped(x, w, ends).backward(dy)
    both = trained(grouped, x.detach(), w, dy, ends)
    assert (x.grad is None) == (frozen == "x")
    assert (w.grad is None) == (frozen == "w")
    assert same_bytes(*((x.grad, both[1]) if frozen == "w" else (w.grad, both[2])))


def test_autocast_casts_the_tokens_as_it_does_for_linear_layers() -> None:
    recipe, ends = FLOAT8["float8_row"], ends_of((5, 0, 20))
    x, w, dy = tokens(25, K, torch.float32), stack(recipe, 3), tokens(25, N, seed=5)

    def cast(product: Any) -> Any:
        def run(*args: Any) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return product(*args).bfloat16()

        return run

    found, wanted = trained(cast(grouped), x, w, dy, ends), trained(cast(looped), x, w, dy, ends)
    assert found[1].dtype == torch.float32
    assert all(same_bytes(one, other) for one, other in zip(found, wanted, strict=True))


# -- what programs do around it ----------------------------------------------------------------------------------------


@sampled("recipe", SOME.values(), [SOME["mxfp8"], SOME["mxfp8_square"]], ids=SOME.keys())
def test_one_graph_computes_the_same(recipe: Any) -> None:
    def layer(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return grouped(x * 2, w, ends) + torch.bmm(x[:33].unflatten(0, (3, 11)), w.mT).flatten(0, 1).sum(0)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    w = stack(recipe, 3)
    for sizes in ((9, 0, 40), (30, 3, 2)):
        ends, count = ends_of(sizes), sum(sizes) + 2
        x, dy = tokens(count, K), tokens(count, N, seed=5)
        found, wanted = trained(compiled, x, w, dy, ends), trained(layer, x, w, dy, ends)
        assert all(same_bytes(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.full
def test_inductor_computes_the_same() -> None:
    recipe, ends = FLOAT8["float8_row"], ends_of((9, 0, 40))
    x, w, dy = tokens(51, K), stack(recipe, 3), tokens(51, N, seed=5)
    found = trained(torch.compile(grouped, fullgraph=True), x, w, dy, ends)
    assert all(same_bytes(one, other) for one, other in zip(found, trained(grouped, x, w, dy, ends), strict=True))


class Counted(TorchDispatchMode):
    """Counts operations; what runs inside of one of ours is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@some
def test_the_number_of_operations_does_not_depend_on_the_number_of_experts(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product is one operation here; test_grouped_hardware.py counts what is inside of it on a GPU."""
    monkeypatch.setattr(multiply, "_is_opaque", lambda *_: True)
    counts = []
    for experts in (2, 9):
        w, ends = stack(recipe, experts, n=32, k=64), ends_of((3,) * experts)
        x = tokens(3 * experts, 64).requires_grad_()
        with Counted() as mode:
            grouped(x, w, ends).sum().backward()
        counts.append(mode.names)
    assert counts[0] == counts[1]
    ours = [name for name in counts[0] if name.startswith("qtensor.")]
    assert ours == ["qtensor.grouped_rows.default"] * 2 + ["qtensor.grouped_columns.default"]


@some
def test_shapes_are_known_without_values(recipe: Any) -> None:
    w, ends = stack(recipe, 3), ends_of((9, 0, 40))
    with torch.device("meta"):
        x = torch.empty(60, K, dtype=torch.bfloat16, requires_grad=True)
    y = grouped(x, nn.Parameter(w.detach().to("meta")), ends.to("meta"))
    assert (y.shape, y.dtype, y.device.type) == ((60, N), torch.bfloat16, "meta")
    y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = grouped(mode.from_tensor(torch.empty(60, K, dtype=torch.bfloat16)), w, mode.from_tensor(ends))
    assert fake.shape == (60, N)


@some
def test_inference_computes_the_same(recipe: Any) -> None:
    x, w, ends = tokens(25, K), stack(recipe, 3), ends_of((5, 0, 20))
    wanted = looped(x, w, ends).detach()
    with torch.inference_mode():
        assert same_bytes(grouped(x, w, ends), wanted)
    with torch.no_grad():
        assert same_bytes(grouped(x, w, ends), wanted)


def test_below_autograd_there_is_a_forward_product_alone() -> None:
    """A subclass around the stack, such as a DTensor, gets there; torch's own backward would be a dense one."""
    recipe = DYNAMIC["mxfp8"]
    x, w, ends = tokens(24, K), stack(recipe, 3).detach(), ends_of((5, 0, 19))
    grouped_op, batched_op = torch.ops.aten._grouped_mm.default, torch.ops.aten.bmm.default
    with torch.no_grad(), without_torch_function():
        assert same_bytes(grouped_op(x, w.mT, ends), looped(x, w, ends))
        batch = x.unflatten(0, (3, 8))
        assert same_bytes(batched_op(batch, w.mT).flatten(0, 1), looped(x, w, ends_of((8, 8, 8))))
        with pytest.raises(NotImplementedError, match='activations="dynamic" is defined for linear layers'):
            batched_op(tokens(24, N).unflatten(0, (3, 8)), w)
    with without_torch_function(), pytest.raises(NotImplementedError, match="loop over them"):
        grouped_op(x, w.mT, ends)


def test_an_export_is_refused() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = stack(DYNAMIC["mxfp8"], 2)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return grouped(x, self.weight, ends)

    with pytest.raises(NotImplementedError, match=r"torch.export of grouped_mm with .*loop over the experts"):
        torch.export.export(Layer(), (tokens(9, K), ends_of((4, 5))), strict=False)


@some
def test_second_derivatives_are_refused(recipe: Any) -> None:
    x, w = tokens(9, K).requires_grad_(), stack(recipe, 2)
    (dx,) = torch.autograd.grad(grouped(x, w, ends_of((4, 5))).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"the second derivative of grouped products with .* loop over"):
        dx.sum().backward()


REFUSED: dict[str, tuple[type[Exception], Any, str]] = {
    "as stored": (
        NotImplementedError,
        lambda x, w, ends: F.grouped_mm(tokens(9, N), w, offs=ends),
        r'grouped_mm of an input of shape \(9, 128\) .*activations="dynamic" is defined for F.grouped_mm\(x, w.tr',
    ),
    "as stored, without gradients": (
        NotImplementedError,
        torch.no_grad()(lambda x, w, ends: torch.bmm(torch.ones(2, 3, N), w)),
        r"bmm of an input of shape \(2, 3, 128\)",
    ),
    "as stored, @": (NotImplementedError, lambda x, w, ends: torch.ones(2, 3, N) @ w, "matmul of an input of shape"),
    "the stack first": (NotImplementedError, lambda x, w, ends: torch.bmm(w, torch.ones(2, K, 3)), "aten.bmm.default"),
    "a bias": (
        NotImplementedError,
        lambda x, w, ends: F.grouped_mm(x, w.mT, offs=ends, bias=torch.zeros(N)),
        "grouped_mm with a bias or another out_dtype",
    ),
    "another dtype": (
        NotImplementedError,
        lambda x, w, ends: F.grouped_mm(x, w.mT, offs=ends, out_dtype=torch.float32),
        "grouped_mm with a bias or another out_dtype",
    ),
    "a quantized input": (
        TypeError,
        lambda x, w, ends: F.grouped_mm(quantize(x, w.recipe), w.mT, offs=ends),
        r"grouped_mm: the input is a quantized weight of shape \(9, 256\)",
    ),
    "another K": (
        ValueError,
        lambda x, w, ends: grouped(tokens(9, 96), w, ends),
        r"an input of shape \(9, 96\) does not fit a quantized weight of shape \(2, 256, 128\)",
    ),
    "no offs": (ValueError, lambda x, w, ends: F.grouped_mm(x, w.mT), r"offs are given for an input \[T, K\]"),
    "int64": (TypeError, lambda x, w, ends: grouped(x, w, ends.long()), "offs of grouped tokens are torch.int64"),
    "three ends": (
        ValueError,
        lambda x, w, ends: grouped(x, w, ends_of((1, 2, 3))),
        r"shape \(3,\) on cpu; expected one end for each of 2 experts, \[2\], on cpu",
    ),
    "falling": (
        ValueError,
        lambda x, w, ends: grouped(x, w, ends.flip(0)),
        r"are \[9, 4\]; expected ends that never fall, from 0 to 9",
    ),
    "too far": (
        ValueError,
        lambda x, w, ends: grouped(x, w, ends + 1),
        r"are \[5, 10\]; expected ends that never fall",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_meaning_is_refused(case: tuple[type[Exception], Any, str]) -> None:
    kind, call, message = case
    with pytest.raises(kind, match=message):
        call(tokens(9, K), stack(FLOAT8["float8_row"], 2), ends_of((4, 5)))


def test_ends_are_read_in_compiled_code_too() -> None:
    """Where a graph cannot look at them, the product does."""
    x, w, wrong = tokens(9, K), stack(DYNAMIC["mxfp8"], 2), ends_of((4, 9))
    with pytest.raises(ValueError, match=r"are \[4, 13\]; expected ends that never fall, from 0 to 9"):
        torch.compile(grouped, fullgraph=True, backend="aot_eager")(x, w, wrong)


class Operations(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


BATCHES, ENDS = tokens(10, K).unflatten(0, (2, -1)), ends_of((4, 6))
PRODUCTS: dict[str, Any] = {
    "grouped_mm": lambda w: grouped(BATCHES.flatten(0, 1), w, ENDS),
    "bmm": lambda w: torch.bmm(BATCHES, w.mT),
    "matmul": lambda w: BATCHES @ w.mT,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_nvfp4_are_refused_before_anything_is_computed(name: str, frozen: bool) -> None:
    recipe = NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4")
    w = stack(recipe, 2).requires_grad_(not frozen)
    message = (
        rf"{name} with a quantized weight of shape \(2, 256, 128\) .*gradients='nvfp4' is defined for F.linear alo"
    )
    with Operations() as ran, pytest.raises(NotImplementedError, match=message):
        PRODUCTS[name](w)
    assert set(ran.names) <= {"view.default", "transpose.int"}
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(PRODUCTS[name], backend="eager", fullgraph=True)(w)
    with torch.no_grad():  # what a model is asked for when nothing trains it
        plain = stack(NVFP4BlockScaling(blocks="square", activations="dynamic"), 2)
        assert same_bytes(PRODUCTS[name](w), PRODUCTS[name](plain))


def test_the_loop_that_is_named_instead_trains() -> None:
    recipe = NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4")
    ends, w, x, dy = ends_of((5, 0, 20)), stack(recipe, 3), tokens(25, K), tokens(25, N, seed=5)
    _, dx, dw = trained(looped, x, w, dy, ends)
    for e, (start, end) in enumerate([(0, 5), (5, 25)]):
        expert = 2 * e
        parts = {name: part[expert] if part.ndim else part for name, part in w.detach().parts().items()}
        alone = nn.Parameter(QuantizedTensor.from_parts(parts, recipe, w.dtype))
        one = x[start:end].clone().requires_grad_()
        F.linear(one, alone).backward(dy[start:end])
        assert same_bytes(dx[start:end], one.grad)
        assert same_bytes(dw[expert], alone.grad)
    assert dw[1].count_nonzero() == 0


def test_stacks_without_quantized_inputs_go_to_torch_as_before() -> None:
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling()):
        w, x, ends = stack(recipe, 2), tokens(9, K), ends_of((4, 5))
        dense = w.detach().dequantize()
        assert same_bytes(grouped(x, w, ends).detach(), grouped(x, dense, ends))
        assert same_bytes(
            torch.bmm(x[:8].unflatten(0, (2, 4)), w.mT).detach(), torch.bmm(x[:8].unflatten(0, (2, 4)), dense.mT)
        )


# -- groups in whole blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 16, 32])
@pytest.mark.parametrize("sizes", [*SIZES, (16, 32, 48)], ids=str)
def test_groups_are_filled_up_with_zeros(sizes: tuple[int, ...], multiple: int) -> None:
    ends = ends_of(sizes)
    x = tokens(int(ends[-1]) + 2, 8)
    at = places(ends, x.shape[0], multiple)
    placed = spread(x, at)
    start, held = 0, 0
    for size, end in zip(sizes, at.ends.tolist(), strict=True):
        assert end - held == max(-(-size // multiple), 1) * multiple
        assert torch.equal(placed[held : held + size], x[start : start + size])
        assert placed[held + size : end].count_nonzero() == 0
        start, held = start + size, end
    assert placed[held:].count_nonzero() == 0
    assert placed.shape[0] % multiple == 0


@pytest.mark.full  # it compiles
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_compiled_code_quantizes_columns_of_groups_to_the_same_bytes(element: str) -> None:
    recipe, ends, x = Float8CurrentScaling(element=element), ends_of((5, 0, 33, 20)), tokens(60, 40)
    at = places(ends, 60, 16)
    with use_kernels("compiled"):
        found = encode_group_columns(x, at, 4, recipe)
    for name, part in encode_group_columns(x, at, 4, recipe).items():
        assert same_bytes(found[name], part), name
