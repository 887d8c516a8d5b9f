"""Low-precision backward: both products against a reference in numpy, and what programs do around them."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_hooks.kernels.compiled import use_kernels
from qtensor import MXFP8BlockScaling, QuantizedTensor, quantize
from qtensor.formats import mxfp8, nvfp4
from qtensor.products import dynamic as products
from qtensor.products import gradients, in_bf16
from qtensor.products.dynamic import product, quantize_rows, scaled_mm_support
from qtensor.products.gradients import kinds_of, turn_weight
from qtensor.spec.registry import format_of
from tests.qtensor.low_precision_backward import (
    FLOAT8,
    MXFP8,
    NVFP4,
    element_of,
    expected_input_gradient,
    expected_weight_gradient,
    input_operands,
    rows,
    weight_operands,
)
from tests.qtensor.recipes_under_test import raw, same_bytes, weight
from tests.qtensor.test_products import accumulation_bound, block_scaled_mm, gathered
from tests.sampling import sampled
from tests.torch_versions.release import RELEASE

EVERY = FLOAT8 | MXFP8 | NVFP4
every = pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY.keys())
MAIN = {name: EVERY[name] for name in ("float8_row", "float8_tensor", "float8_delayed", "mxfp8_row", "mxfp8_square")}
MAIN["nvfp4_square"] = EVERY["nvfp4_square"]
main = pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN.keys())
# A compilation takes a second: in `make test` scales of rows and of the tensor, and operands that are drawn.
COMPILED_FIRST = [MAIN[name] for name in ("float8_row", "float8_tensor", "nvfp4_square")]
main_compiled = sampled("recipe", MAIN.values(), COMPILED_FIRST, ids=MAIN.keys())
SHAPES = [(96,), (0, 96), (1, 96), (7, 96), (64, 96), (3, 11, 96)]


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Channels of very different sizes, as activations have them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-2, 2, (shape[-1],), generator=generator)
    return x.to(dtype).requires_grad_()


def seed(y: Tensor) -> Tensor:
    """A gradient for the output whose tokens and channels differ by powers of ten."""
    generator = torch.Generator().manual_seed(5)
    dy = torch.randn(y.shape, generator=generator)
    sizes = torch.randint(-3, 1, (y.shape[-1],), generator=generator)
    if y.ndim > 1:
        sizes = sizes + torch.randint(-3, 1, (*y.shape[:-1], 1), generator=generator)
    return (dy * 10.0**sizes).to(y.dtype)


def parameter(recipe: Any, n: int = 64, k: int = 96, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(quantize(weight(n, k, dtype), recipe))


def flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def run(x: Tensor, w: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of the output, and those of x and w."""
    y = F.linear(x, w)
    dy = seed(y) if dy is None else dy
    y.backward(dy)
    return dy, x.grad, w.grad


# -- the numbers -------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_products_are_those_of_the_reference(recipe: Any, shape: tuple[int, ...]) -> None:
    x, w = inputs(*shape), parameter(recipe)
    dy, dx, dw = run(x, w)
    assert type(dx) is type(dw) is Tensor
    assert same_bytes(dx, expected_input_gradient(flat(dy), w).reshape(shape))
    assert same_bytes(dw, expected_weight_gradient(flat(dy), flat(x), recipe))


@main
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_rounded_once_to_their_own(recipe: Any, dtype: torch.dtype) -> None:
    x, w = inputs(7, 96, dtype=dtype), parameter(recipe, dtype=dtype)
    dy, dx, dw = run(x, w)
    assert same_bytes(dx, expected_input_gradient(dy, w))
    assert same_bytes(dw, expected_weight_gradient(dy, x.detach(), recipe))


@every
def test_the_forward_product_is_what_it_was(recipe: Any) -> None:
    x, w = inputs(7, 96), parameter(recipe)
    without = quantize(weight(), dataclasses.replace(recipe, gradients=None))
    assert same_bytes(F.linear(x, w).detach(), product(x, without))


@pytest.mark.parametrize("recipe", (FLOAT8 | MXFP8).values(), ids=(FLOAT8 | MXFP8).keys())
def test_the_gradients_are_near_the_dense_ones_and_not_the_same(recipe: Any) -> None:
    """Rounding to e5m2 changes a value by up to 2^-3 of itself, to e4m3 by 2^-4: two operands by less than 1/4."""
    dense = parameter(dataclasses.replace(recipe, gradients=None))
    _, *found = run(inputs(64, 96), parameter(recipe), torch.ones(64, 64, dtype=torch.bfloat16).cumsum(1) / 64)
    _, *wanted = run(inputs(64, 96), dense, torch.ones(64, 64, dtype=torch.bfloat16).cumsum(1) / 64)
    for a, b in zip(found, wanted, strict=True):
        assert not torch.equal(a, b)
        assert (a.float() - b.float()).norm() <= 0.25 * b.float().norm()


@pytest.mark.parametrize("recipe", FLOAT8.values(), ids=FLOAT8.keys())
def test_the_weight_of_float8_enters_backward_with_its_own_elements(recipe: Any) -> None:
    q = quantize(weight(40, 96), recipe)
    parts, factors = turn_weight(
        q.parts(), kinds_of(recipe), gradients.SeenWeight((40, 96), view=False, transposed=False)
    )
    assert torch.equal(raw(parts["payload"][:, :40]), raw(q.payload.T))
    assert raw(parts["payload"][:, 40:]).count_nonzero() == 0
    assert (parts["scale"] == 1).all()
    assert torch.equal(factors, q.scale.reshape(1, -1))


@pytest.mark.parametrize("scale_rounding", ["up", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_square_blocks_are_quantized_along_n_to_the_same_values(scale_rounding: str, element: str) -> None:
    """Scales are powers of two, and those along N are no larger: every value has a code under them, too."""
    recipe = MXFP8BlockScaling(
        element=element, blocks="square", scale_rounding=scale_rounding, activations="dynamic", gradients="e4m3"
    )
    values = weight(64, 96, torch.float32) * 10.0 ** torch.linspace(-30, 20, 96)
    values[:, 5], values[3] = 0, 0
    q = quantize(values, recipe)
    parts, _ = turn_weight(q.parts(), kinds_of(recipe), gradients.SeenWeight((64, 96), view=False, transposed=False))
    found = format_of(recipe).decode(parts, kinds_of(recipe).other)
    assert torch.equal(found, q.dequantize(torch.float32).T)


def test_no_gradient_is_clamped_where_scales_are_rounded_down_in_forward() -> None:
    """1.9 * 2^8 is beyond 448; as a scale's "floor" would have it, the largest gradient would lose 7 % of itself."""
    dy = torch.full((32, 32), 1.9 * 2.0**8)
    found = quantize_rows(dy, kinds_of(MXFP8["mxfp8_floor"]).gradient)
    values = format_of(MXFP8["mxfp8_floor"]).decode(found, kinds_of(MXFP8["mxfp8_floor"]).gradient)
    assert (values == 480).all()  # the nearest with 3 bits behind the point


def test_row_blocks_are_rounded_twice() -> None:
    """A small value beside a large one of the same column is below the least step of their new block."""
    recipe = MXFP8["mxfp8_row"]
    values = torch.full((32, 32), 1.0)
    values[1] = 1.125 * 2.0**-20  # a row of its own blocks, which hold it exactly
    q = quantize(values, recipe)
    assert torch.equal(q.dequantize(torch.float32), values)
    parts, _ = turn_weight(q.parts(), kinds_of(recipe), gradients.SeenWeight((32, 32), view=False, transposed=False))
    found = format_of(recipe).decode(parts, kinds_of(recipe).other)
    assert (found[:, 1] == 0).all()
    assert torch.equal(found, rows(values.T, recipe, "e4m3"))


@every
@pytest.mark.parametrize(("n", "tokens"), [(40, 5), (48, 17), (1, 1), (33, 31)])
def test_zeros_behind_n_and_t_add_nothing(recipe: Any, n: int, tokens: int) -> None:
    if getattr(recipe, "blocks", "row") == "square":
        n = 64  # K and N of square blocks are multiples already
    x, w = inputs(tokens, 96), parameter(recipe, n=n)
    dy, dx, dw = run(x, w)
    assert same_bytes(dx, expected_input_gradient(dy, w))
    assert same_bytes(dw, expected_weight_gradient(dy, x.detach(), recipe))
    more = F.pad(dy, (0, 0, 0, 3))
    _, more_dx, more_dw = run(F.pad(x.detach(), (0, 0, 0, 3)).requires_grad_(), nn.Parameter(w.detach()), more)
    if recipe in NVFP4.values():  # its products have more bits, and a matrix of one row is summed in another order
        scaled, turned = input_operands(dy, w)
        bound = accumulation_bound(scaled, turned, torch.bfloat16)
        assert ((more_dx[:tokens].double() - dx.double()).abs() <= bound).all()
    else:
        assert torch.equal(more_dx[:tokens], dx)
    assert (more_dx[tokens:] == 0).all()
    bound = accumulation_bound(*weight_operands(dy, x.detach(), recipe), torch.bfloat16)
    assert ((more_dw.double() - dw.double()).abs() <= bound).all()  # the sums may be taken in another order


@pytest.mark.parametrize("recipe", [FLOAT8["float8_tensor"], FLOAT8["float8_delayed"]], ids=["tensor", "delayed"])
def test_a_gathered_weight_brings_the_scale_of_every_shard(recipe: Any) -> None:
    w, values = gathered(recipe)
    x = inputs(7, 96)
    dy, dx, dw = run(x, w.requires_grad_())
    scales = torch.cat([scale.expand(32) for scale in w.detach().scale])
    expected = rows(dy.float() * scales, recipe, recipe.gradients) @ (values / scales[:, None])
    assert torch.allclose(values / scales[:, None], w.payload.float(), rtol=2.0**-22, atol=0)
    assert same_bytes(dx, (rows(dy.float() * scales, recipe, recipe.gradients) @ w.payload.float()).to(dx.dtype))
    assert torch.allclose(dx.float(), expected, rtol=2.0**-7, atol=float(expected.abs().max()) * 2.0**-7)
    assert same_bytes(dw, expected_weight_gradient(dy, x.detach(), recipe))


@main
def test_a_transposed_weight_is_quantized_anew(recipe: Any) -> None:
    q = quantize(weight(64, 96), recipe)
    x = inputs(7, 64)
    y = F.linear(x, q.t())
    dy = seed(y)
    y.backward(dy)
    turned_again = rows(q.dequantize(torch.float32), recipe, element_of(recipe))
    assert same_bytes(x.grad, (rows(dy, recipe, recipe.gradients) @ turned_again.T).to(dy.dtype))


@pytest.mark.full
@pytest.mark.parametrize("name", ["float8_tensor", "mxfp8_square"])
def test_operands_from_compiled_kernels_have_the_same_bytes(name: str) -> None:
    """Of each format the recipe with most kernels: rows for operands, and others for the weight."""
    recipe, found = MAIN[name], []
    for mode in ("eager", "compiled"):
        with use_kernels(mode):
            found.append(run(inputs(40, 96), parameter(recipe))[1:])
    for a, b in zip(*found, strict=True):
        assert same_bytes(a, b)


# -- what is not finite ------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_is_seen(recipe: Any, value: float) -> None:
    """In all of its token's dx and all of its channel's dw; no other token or channel changes."""
    clean, broken = inputs(7, 96), inputs(7, 96)
    dy, dx, dw = run(clean, parameter(recipe))
    bad = dy.clone()
    bad[2, 40] = value
    _, bad_dx, bad_dw = run(broken, parameter(recipe), bad)
    assert bad_dx[2].isnan().all()
    assert bad_dw[40].isnan().all()
    rest = [row for row in range(7) if row != 2], [row for row in range(64) if row != 40]
    assert same_bytes(bad_dx[rest[0]], dx[rest[0]])
    assert same_bytes(bad_dw[rest[1]], dw[rest[1]])


@every
def test_an_input_that_is_not_finite_is_seen_in_the_gradient_of_the_weight(recipe: Any) -> None:
    x = inputs(7, 96).detach()
    x[2, 40] = torch.inf
    _, dx, dw = run(x.requires_grad_(), parameter(recipe))
    assert dw[:, 40].isnan().all()
    assert dw[:, :40].isfinite().all()
    assert dx.isfinite().all()


def test_a_sum_beyond_fp16_is_infinite() -> None:
    """As a dense product's: a loss scaler finds it."""
    x = torch.full((32, 32), 200.0, dtype=torch.float16, requires_grad=True)
    w = parameter(MXFP8["mxfp8_row"], 32, 32, torch.float16)
    _, _, dw = run(x, w, torch.full((32, 32), 200.0, dtype=torch.float16))
    assert dw.isinf().all()


# -- what programs do --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the products that backward multiplies."""
    found: list[tuple[int, ...]] = []
    emulated = gradients.emulate

    def spy(*args: Any) -> Tensor:
        y = emulated(*args)
        found.append(tuple(y.shape))
        return y

    with monkeypatch.context() as patch:
        patch.setattr(gradients, "emulate", spy)
        yield found


@main
@pytest.mark.parametrize(("trains_x", "trains_w"), [(True, True), (True, False), (False, True)])
def test_what_is_frozen_costs_no_product(
    recipe: Any, trains_x: bool, trains_w: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = inputs(7, 96).detach().requires_grad_(trains_x), parameter(recipe).requires_grad_(trains_w)
    with counted(monkeypatch) as shapes:
        dy, dx, dw = run(x, w)
    assert shapes == [(7, 96)] * trains_x + [(64, 96)] * trains_w
    assert (dx is not None, dw is not None) == (trains_x, trains_w)
    if dx is not None:
        assert same_bytes(dx, expected_input_gradient(dy, w))
    if dw is not None:
        assert same_bytes(dw, expected_weight_gradient(dy, x.detach(), recipe))


@main
def test_the_gradient_of_a_bias_is_the_dense_sum(recipe: Any) -> None:
    bias = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    y = F.linear(inputs(3, 5, 96), parameter(recipe), bias)
    dy = seed(y)
    y.backward(dy)
    assert same_bytes(bias.grad, flat(dy).sum(0))


@main
def test_gradients_accumulate(recipe: Any) -> None:
    """Each pass by itself: no scale is remembered."""
    w = parameter(recipe)
    _, _, first = run(inputs(7, 96), w)
    first = first.clone()
    dy = seed(F.linear(inputs(7, 96), w)) * 3
    _, _, total = run(inputs(7, 96), w, dy)
    assert same_bytes(total, first + expected_weight_gradient(dy, inputs(7, 96).detach(), recipe))


@main
def test_autocast_rounds_to_its_dtype_first(recipe: Any) -> None:
    x, w = inputs(7, 96, dtype=torch.float32), parameter(recipe, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w)
        dy = seed(y)
        y.backward(dy)  # inside, where it would round the emulation's operands
    assert y.dtype == torch.bfloat16
    assert same_bytes(x.grad, expected_input_gradient(dy, w).float())
    assert same_bytes(w.grad, expected_weight_gradient(dy, x.detach().bfloat16(), recipe).float())


@main
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_give_the_same(recipe: Any, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    dy, dx, dw = run(inputs(7, 96), parameter(recipe))
    x, w = inputs(7, 96), parameter(recipe)
    checkpoint(F.linear, x, w, use_reentrant=use_reentrant).backward(dy)
    assert same_bytes(x.grad, dx)
    assert same_bytes(w.grad, dw)


@main
def test_nothing_is_kept_but_the_input_and_the_quantized_weight(recipe: Any) -> None:
    x, w = inputs(7, 96), parameter(recipe)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = F.linear(x, w)
    plain = [tensor for tensor in saved if not isinstance(tensor, QuantizedTensor)]
    (quantized,) = [tensor for tensor in saved if isinstance(tensor, QuantizedTensor)]
    assert [tensor.data_ptr() for tensor in plain] == [x.data_ptr()]
    assert {part.data_ptr() for part in quantized.parts().values()} == {p.data_ptr() for p in w.parts().values()}
    assert [name for name, value in vars(y.grad_fn).items() if isinstance(value, Tensor)] == []


@main
def test_a_second_derivative_is_refused(recipe: Any) -> None:
    """Also where the gradient of the output needs none itself, and where a loss has other terms."""
    x, w = inputs(7, 96), parameter(recipe)
    y = F.linear(x, w)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert torch.equal(dx, expected_input_gradient(torch.ones_like(y).detach(), w))
    with pytest.raises(NotImplementedError) as caught:
        (dx.float().square().sum() + F.linear(x, w).float().sum()).backward()
    assert str(caught.value) == (
        f"the second derivative of F.linear with a quantized weight of shape (64, 96) ({recipe}): its backward rounds "
        "gradients; leave gradients=None where a loss contains gradients"
    )


@main
def test_dense_storage_has_the_same_backward(recipe: Any) -> None:
    from qtensor import Float8DelayedScaling, quantized_model_init

    if isinstance(recipe, Float8DelayedScaling):
        pytest.skip("delayed scaling has no dense storage")
    with quantized_model_init(recipe, storage="high_precision"):
        module = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(weight())
    again = copy.deepcopy(module)
    dy, dx, dw = run(inputs(7, 96), parameter(recipe))
    for net in (module, again):
        x = inputs(7, 96)
        net(x).backward(dy)
        assert same_bytes(x.grad, dx)
        assert same_bytes(net.weight.grad, dw)


@main
def test_a_low_rank_path_beside_a_frozen_weight_trains(recipe: Any) -> None:
    """As adapters do: the product with the frozen weight passes its gradient on, and the factors get dense ones."""
    x, w = inputs(7, 96), parameter(recipe).requires_grad_(False)
    a, b = (nn.Parameter(weight(*shape, seed=1)) for shape in ((4, 96), (64, 4)))
    y = F.linear(x, w) + F.linear(F.linear(x, a), b)
    dy = seed(y)
    y.backward(dy)
    hidden = (dy @ b).detach()
    assert same_bytes(a.grad, hidden.T @ x.detach())
    assert same_bytes(x.grad, expected_input_gradient(dy, w) + (hidden @ a).detach())


@main
def test_products_written_out_are_refused_where_they_would_be_differentiated(recipe: Any) -> None:
    """Autograd would make a dense backward of them, unlike the recipe."""
    q, x = quantize(weight(), recipe), inputs(7, 96)
    bias = torch.ones(64, dtype=torch.bfloat16)
    for name, call in (
        ("aten.mm.default", lambda: x @ q.t()),
        ("aten.addmm.default", lambda: torch.addmm(bias, x, q.t())),
    ):
        with pytest.raises(NotImplementedError) as caught:
            call()
        assert str(caught.value) == (
            f"{name} with a quantized weight of shape (96, 64) ({recipe}): gradients={recipe.gradients!r} is defined "
            "for F.linear, and neither for tensor parallelism nor for products of a transposed weight; leave "
            "gradients=None, or compute under torch.no_grad()"
        )
        with torch.no_grad():
            expected = product(x, q)
            assert same_bytes(call(), expected + bias if "addmm" in name else expected)


@main
def test_a_weight_on_the_left_is_refused_as_well(recipe: Any) -> None:
    """Its product would be dense in both directions."""
    w, x = parameter(recipe), inputs(96, 7)
    with pytest.raises(NotImplementedError, match=r"aten\.mm\.default with a quantized weight .* is defined for F\.li"):
        w @ x


@main
@pytest.mark.parametrize("shape", [(96,), (5, 96), (2, 5, 96)], ids=str)
def test_backward_has_shapes_on_the_meta_device(recipe: Any, shape: tuple[int, ...]) -> None:
    w = nn.Parameter(quantize(torch.empty(64, 96, dtype=torch.bfloat16, device="meta"), recipe))
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    F.linear(x, w).sum().backward()
    assert (x.grad.shape, x.grad.dtype, x.grad.device.type) == (shape, torch.bfloat16, "meta")
    assert (w.grad.shape, w.grad.dtype, w.grad.device.type) == ((64, 96), torch.bfloat16, "meta")


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@main_compiled
def test_a_linear_compiles_into_one_graph_of_each_direction_to_the_same_bytes(recipe: Any) -> None:
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(recipe)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for shape in ((7, 96), (7, 96), (3, 5, 96)):
        dy, dx, dw = run(inputs(*shape), parameter(recipe))
        x = inputs(*shape)
        module.weight.grad = None
        compiled(x).backward(dy)
        assert same_bytes(x.grad, dx)
        assert same_bytes(module.weight.grad, dw)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@main_compiled
def test_a_compiled_forward_keeps_nothing_dense_for_backward(recipe: Any) -> None:
    """What backward gets from forward: the input and the parts, and no decoded weight or operand."""
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(recipe)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(inputs(7, 96)).sum().backward()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = inputs(7, 96)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x)
    own = sum(part.nbytes for part in module.weight.parts().values())
    seen = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in saved if type(one) is Tensor}
    assert sum(seen.values()) <= x.nbytes + own + 64
    assert any(one.data_ptr() == x.data_ptr() for one in saved)


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "recipe",
    [FLOAT8["float8_row"], MXFP8["mxfp8_square"], NVFP4["nvfp4_square"], NVFP4["nvfp4_4over6"]],
    ids=["float8", "mxfp8", "nvfp4", "4over6"],
)
def test_inductor_compiles_it(recipe: Any) -> None:
    dy, dx, dw = run(inputs(7, 96), parameter(recipe))
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(recipe)
    x = inputs(7, 96)
    torch.compile(module, fullgraph=True)(x).backward(dy)
    assert same_bytes(x.grad, dx)
    assert same_bytes(module.weight.grad, dw)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "recipe",
    [FLOAT8["float8_row"], MXFP8["mxfp8_row"], NVFP4["nvfp4_square"]],
    ids=["float8", "mxfp8", "nvfp4"],
)
def test_any_number_of_tokens_runs_in_one_graph(recipe: Any) -> None:
    """Zeros are behind them, as many as they need. (Up to 32 tokens are one block of MXFP8, and another graph.)"""
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(recipe)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for number, tokens in enumerate((40, 33, 64, 150)):
        dy, dx, dw = run(inputs(tokens, 96), parameter(recipe))
        x = inputs(tokens, 96)
        module.weight.grad = None
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            compiled(x).backward(dy)
        assert same_bytes(x.grad, dx)
        assert same_bytes(module.weight.grad, dw)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_is_exported_with_its_forward(strict: bool) -> None:
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(FLOAT8["float8_row"])
    x = inputs(7, 96).detach()
    exported = torch.export.export(module, (x,), strict=strict)
    assert same_bytes(exported.module()(x).detach(), module(x).detach())


# -- what the hardware is asked ----------------------------------------------------------------------------------------

HARDWARE = {name: recipe for name, recipe in EVERY.items() if getattr(recipe, "element", "e4m3") == "e4m3"}
hardware = pytest.mark.parametrize("recipe", HARDWARE.values(), ids=HARDWARE.keys())


Products = Callable[[], Any]
Operands = tuple[Tensor, Tensor]  # decoded, fp32: [M, C] and [L, C]


def both(recipe: Any, tokens: int, device: str = "cpu") -> tuple[Products, list[Operands]]:
    """The two products, to be called, and what they multiply."""
    q, x = quantize(weight(160, 96), recipe), inputs(tokens, 96).detach()
    dy = seed(torch.empty(tokens, 160, dtype=torch.bfloat16))
    kinds = kinds_of(recipe)
    w, factors = turn_weight(q.parts(), kinds, gradients.SeenWeight((160, 96), view=False, transposed=False))
    scaled = dy if factors is None else dy.float() * factors
    operands = [
        (rows(scaled, recipe, recipe.gradients), format_of(kinds.other).decode(w, kinds.other)),
        (rows(dy.T, recipe, recipe.gradients, tokens=True), rows(x.T, recipe, element_of(recipe), tokens=True)),
    ]
    q, x, dy = q.to(device), x.to(device), dy.to(device)
    return lambda: gradients.gradients(dy, x, q, recipe), operands


@hardware
@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_the_operands_of_the_hardware_are_those_of_the_emulation(
    recipe: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the kernels that the CPU lacks, which refuse what the kernels refuse."""
    if recipe in FLOAT8.values() and RELEASE < (2, 12):
        pytest.skip("torch 2.11 has no scaled_mm for Float8 on the CPU")
    products, operands = both(recipe, tokens)
    expected = products()
    monkeypatch.setattr(gradients, "scaled_mm_support", lambda *args: (True, ""))
    monkeypatch.setattr(gradients, "emulate", None)
    for module in (mxfp8, nvfp4):
        monkeypatch.setattr(module, "scaled_mm", block_scaled_mm)
    for found, wanted, (a, b) in zip(products(), expected, operands, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
        assert ((found.double() - wanted.double()).abs() <= accumulation_bound(a, b, torch.bfloat16)).all()


@every
@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_the_operands_of_bf16_products_are_those_of_the_emulation(
    recipe: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This CPU counts as a GPU that has no product for the format."""
    products, operands = both(recipe, tokens)
    expected = products()
    monkeypatch.setattr(in_bf16, "KINDS", ("cpu",))
    monkeypatch.setattr(gradients, "emulate", None)
    for found, wanted, (a, b) in zip(products(), expected, operands, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
        assert ((found.double() - wanted.double()).abs() <= accumulation_bound(a, b, torch.bfloat16)).all()


@hardware
def test_the_hardware_is_asked_about_what_is_padded(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def support(*args: Any) -> tuple[bool, str]:
        asked.append(args)
        return False, ""

    monkeypatch.setattr(gradients, "scaled_mm_support", support)
    products, _ = both(recipe, 5)
    products()
    padded = 16 if recipe in FLOAT8.values() else 32
    rest = (torch.device("cpu"), kinds_of(recipe).other, torch.bfloat16, 96)
    assert asked == [(*rest, 160), (*rest, padded)]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_of_no_tokens_asks_the_hardware_for_nothing_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(gradients, "scaled_mm_support", lambda *args: (asked.append(args[3:]), (False, ""))[1])
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(MAIN["float8_row"])
    x = inputs(0, 96)
    torch.compile(module, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert (96, 0) in asked
    assert module.weight.grad.count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["float8_row", "float8_tensor", "float8_delayed"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_asks_the_hardware_for_what_eager_code_asks(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own scaled_mm for the CPU, whose sums are the same for the same operands."""
    if RELEASE < (2, 12):
        pytest.skip("torch 2.11 has no scaled_mm for Float8 on the CPU")
    for module in (gradients, products):
        monkeypatch.setattr(module, "scaled_mm_support", lambda *args: (True, ""))
        monkeypatch.setattr(module, "emulate", None)
    module = nn.Linear(96, 64, bias=False)
    module.weight = parameter(MAIN[name])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (64, 80, 33):
        dy, dx, dw = run(inputs(tokens, 96), parameter(MAIN[name]))
        x, module.weight.grad = inputs(tokens, 96), None
        compiled(x).backward(dy)
        assert same_bytes(x.grad, dx)
        assert same_bytes(module.weight.grad, dw)


@pytest.mark.gpu
@hardware
@pytest.mark.parametrize("tokens", [16, 77, 512])
def test_the_hardware_agrees_with_the_emulation(recipe: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the accumulation, see tests/qtensor/test_products.py for its bound."""
    supported, reason = scaled_mm_support(torch.device("cuda"), kinds_of(recipe).other, torch.bfloat16, 96, 160)
    if not supported:
        pytest.skip(reason)
    products, operands = both(recipe, tokens, "cuda")
    expected = both(recipe, tokens)[0]()
    monkeypatch.setattr(gradients, "emulate", None)
    for found, wanted, (a, b) in zip(products(), expected, operands, strict=True):
        cut_off = 4 * 33 * 2.0**-13 * (a.double().abs() @ b.double().abs().T)
        bound = cut_off + accumulation_bound(a, b, torch.bfloat16) + 2.0**-8 * cut_off
        assert ((found.cpu().double() - wanted.double()).abs() <= bound).all()


@pytest.mark.gpu
@every
def test_operand_bytes_on_the_gpu_are_those_of_the_cpu(recipe: Any) -> None:
    rows_of_weight = 48 if getattr(recipe, "blocks", "row") == "row" else 64
    q, kinds = quantize(weight(rows_of_weight, 96), recipe), kinds_of(recipe)
    seen = gradients.SeenWeight((q.shape[0], 96), view=False, transposed=False)
    found, expected = turn_weight(q.cuda().parts(), kinds, seen)[0], turn_weight(q.parts(), kinds, seen)[0]
    for name, part in expected.items():
        assert torch.equal(raw(found[name].cpu()), raw(part)), name
    x = inputs(96, 64).detach()
    found, expected = quantize_rows(x.cuda(), kinds.gradient), quantize_rows(x, kinds.gradient)
    for name, part in expected.items():
        assert torch.equal(raw(found[name].cpu()), raw(part)), name
