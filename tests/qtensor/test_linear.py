"""F.linear with a quantized weight: the arithmetic of its dequantized values, and nothing dense kept for backward.

With activations="dynamic" the output is that of the quantized input, and the gradients are what they were.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.products.dynamic import product, quantize_rows
from tests.qtensor.recipes_under_test import RECIPES, every_main_recipe, same_bytes, weight
from tests.qtensor.test_products import accumulation_bound, decoded
from tests.sampling import sampled

both_activations = pytest.mark.parametrize("activations", [None, "dynamic"])
INPUT_SHAPES = [(96,), (7, 96), (3, 5, 96), (2, 3, 5, 96), (0, 96)]


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()


def run(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Output and the gradients of x, w and b."""
    y = F.linear(x, w, b)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    return y, x.grad, w.grad, b.grad if b is not None else None


@every_main_recipe
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", INPUT_SHAPES, ids=str)
def test_forward_and_backward_are_those_of_the_dequantized_weight(
    recipe: Any, shape: tuple[int, ...], with_bias: bool
) -> None:
    """Bitwise: the same products of the same operands."""
    q = quantize(weight(), recipe)
    bias = weight(1, 64)[0] if with_bias else None

    def arguments(w: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return inputs(*shape), nn.Parameter(w), nn.Parameter(bias.clone()) if with_bias else None

    found, expected = run(*arguments(q)), run(*arguments(q.dequantize()))
    for name, a, b in zip(("y", "dx", "dw", "db"), found, expected, strict=True):
        if b is None:
            assert a is None
            continue
        assert type(a) is Tensor, name
        assert same_bytes(a, b), name


@every_main_recipe
def test_gradients_are_plain_and_have_the_appearance_dtype(recipe: Any) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        w = nn.Parameter(quantize(weight(dtype=dtype), recipe))
        _, dx, dw, _ = run(inputs(4, 96, dtype=dtype), w, None)
        assert (dx.dtype, dw.dtype) == (dtype, dtype)
        assert type(dw) is Tensor
        assert w.grad is dw


def penalised(x: Tensor, w: Tensor, b: Tensor | None) -> list[Tensor]:
    """The gradients of a loss that contains the gradients of a loss."""
    y = F.linear(x, w, b)
    outer = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype).requires_grad_()
    leaves = [leaf for leaf in (x, w, b) if leaf is not None]
    first = torch.autograd.grad(y, leaves, outer, create_graph=True)
    loss = sum((number + 2) * grad.square().sum() for number, grad in enumerate(first))
    return list(torch.autograd.grad(loss, [outer, x, w]))


@every_main_recipe
@pytest.mark.parametrize("shape", INPUT_SHAPES, ids=str)
def test_second_derivatives_are_those_of_the_dequantized_weight(recipe: Any, shape: tuple[int, ...]) -> None:
    """A penalty on gradients reaches the weight through the gradient of the input, too. Bitwise, as the first ones."""
    q, bias = quantize(weight(dtype=torch.float32), recipe), weight(1, 64, dtype=torch.float32)[0]

    def arguments(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return inputs(*shape, dtype=torch.float32), nn.Parameter(w), nn.Parameter(bias.clone())

    found, expected = penalised(*arguments(q)), penalised(*arguments(q.dequantize()))
    for name, a, b in zip(("outer", "x", "w"), found, expected, strict=True):
        assert type(a) is Tensor, name
        assert bool(b.any()) or 0 in shape, name
        if len(shape) == 1:
            # Autograd adds up other products for vectors: 96 terms in another order, whose magnitudes add up to 2^13.
            torch.testing.assert_close(a, b, rtol=0, atol=96 * 2.0 ** (13 - 24))
        else:
            assert same_bytes(a, b), name


@both_activations
@every_main_recipe
@pytest.mark.parametrize("shape", INPUT_SHAPES, ids=str)
def test_the_output_can_be_written_in_place(recipe: Any, activations: Any, shape: tuple[int, ...]) -> None:
    """As nn.ReLU(inplace=True) does."""
    if activations is not None:
        recipe = dataclasses.replace(recipe, activations=activations)
    w = nn.Parameter(quantize(weight(), recipe))
    expected = F.linear(inputs(*shape), w).relu()
    y = F.linear(inputs(*shape), w).relu_()
    assert same_bytes(y, expected)
    y.sum().backward()
    assert w.grad is not None


@every_main_recipe
def test_derivatives_of_any_order_are_those_of_the_dequantized_weight(recipe: Any) -> None:
    """Each is a loss made of the gradients of the one before."""

    def fourth(w: Tensor) -> list[Tensor]:
        x = inputs(5, 96, dtype=torch.float32)
        value = F.linear(x, w).pow(4).sum() * 1e-4
        for _ in range(3):
            of_x, of_w = torch.autograd.grad(value, (x, w), create_graph=True)
            value = (of_x.square().sum() + of_w.square().sum()) * 1e-4
        return list(torch.autograd.grad(value, (x, w)))

    q = quantize(weight(dtype=torch.float32), recipe)
    for a, b in zip(fourth(nn.Parameter(q)), fourth(nn.Parameter(q.dequantize())), strict=True):
        assert bool(b.any())
        # sums of products and of what autograd adds up in another order: some hundred roundings of 2^-24
        assert float((a - b).norm() / b.norm()) < 2**-16


@every_main_recipe
@pytest.mark.parametrize("activations", [None, "dynamic"])
def test_only_what_a_wanted_gradient_needs_is_kept(recipe: Any, activations: Any) -> None:
    """As of a plain linear: a frozen weight keeps no input alive, and the first layer no weight."""
    if activations is not None:
        recipe = dataclasses.replace(recipe, activations=activations)
    q, x = quantize(weight(), recipe), inputs(4, 96)
    for trained, entered, kept in ((True, True, {"x", "w"}), (False, True, {"w"}), (True, False, {"x"})):
        w, given = nn.Parameter(q.detach(), requires_grad=trained), x.detach().requires_grad_(entered)
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            y = F.linear(given, w)
        # what decode_once would keep has a place, and no elements
        assert {"w" if isinstance(tensor, QuantizedTensor) else "x" for tensor in saved if tensor.numel()} == kept
        with torch.no_grad():
            if "w" not in kept:
                w.add_(1.0)
            if "x" not in kept:
                given.add_(1.0)
        y.sum().backward()
        assert (w.grad is not None, given.grad is not None) == (trained, entered)


@every_main_recipe
def test_gradients_accumulate(recipe: Any) -> None:
    w = nn.Parameter(quantize(weight(), recipe))
    run(inputs(4, 96), w, None)
    once = w.grad.clone()
    run(inputs(4, 96), w, None)
    assert same_bytes(w.grad, once + once)


@every_main_recipe
def test_a_frozen_weight_gets_no_gradient_and_passes_it_on(recipe: Any) -> None:
    w, x = nn.Parameter(quantize(weight(), recipe), requires_grad=False), inputs(4, 96)
    F.linear(x, w).sum().backward()
    assert w.grad is None
    assert x.grad is not None
    y = F.linear(x.detach(), w)
    assert not y.requires_grad


@every_main_recipe
def test_an_input_without_gradient_trains_the_weight(recipe: Any) -> None:
    w, x = nn.Parameter(quantize(weight(), recipe)), inputs(4, 96).detach()
    F.linear(x, w).sum().backward()
    assert x.grad is None
    assert w.grad is not None


@every_main_recipe
def test_backward_keeps_the_input_and_the_parts_and_nothing_dense(recipe: Any) -> None:
    x, w = inputs(4, 96), nn.Parameter(quantize(weight(), recipe))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.linear(x, w).sum().backward()
    quantized = [tensor for tensor in saved if isinstance(tensor, QuantizedTensor)]
    plain = [tensor for tensor in saved if not isinstance(tensor, QuantizedTensor)]
    assert len(quantized) == 1
    own = {part.data_ptr() for part in w.parts().values()}
    assert {part.data_ptr() for part in quantized[0].parts().values()} == own
    assert sum(tensor.numel() for tensor in plain) <= x.numel()
    node = F.linear(x, w).grad_fn
    assert [name for name, value in vars(node).items() if isinstance(value, Tensor)] == []


@every_main_recipe
def test_a_linear_module_trains(recipe: Any) -> None:
    module = nn.Linear(96, 64, dtype=torch.bfloat16)
    module.weight = nn.Parameter(quantize(weight(), recipe))
    y = module(inputs(4, 96))
    assert type(y) is Tensor
    y.sum().backward()
    assert module.weight.grad.shape == (64, 96)
    assert module.bias.grad.shape == (64,)
    with torch.no_grad():
        assert same_bytes(module(inputs(4, 96)), y)
    with torch.inference_mode():
        assert same_bytes(module(inputs(4, 96)), y.detach())


@every_main_recipe
def test_autocast_computes_in_its_dtype(recipe: Any) -> None:
    """As for an fp32 module: output in autocast's dtype, gradients in the parameters' own."""
    q = quantize(weight(dtype=torch.float32), recipe)
    results = []
    for w in (nn.Parameter(q), nn.Parameter(q.dequantize())):
        x, bias = inputs(4, 96, dtype=torch.float32), nn.Parameter(torch.ones(64))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, w, bias)
        y.backward(torch.ones_like(y))
        assert y.dtype == torch.bfloat16
        assert {w.grad.dtype, x.grad.dtype, bias.grad.dtype} == {torch.float32}
        results.append((y, w.grad, x.grad, bias.grad))
    for a, b in zip(*results, strict=True):
        assert same_bytes(a, b)


@every_main_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same(recipe: Any, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    w = nn.Parameter(quantize(weight(), recipe))
    plain = run(inputs(4, 96), w, None)
    w.grad = None
    x = inputs(4, 96)
    y = checkpoint(F.linear, x, w, use_reentrant=use_reentrant)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    for a, b in zip((y, x.grad, w.grad), plain, strict=False):
        assert same_bytes(a, b)


@every_main_recipe
def test_only_the_weight_may_be_quantized(recipe: Any) -> None:
    q, dense = quantize(weight(64, 64), recipe), weight(64, 64)
    for call, what in (
        (lambda: F.linear(q, dense), "input"),
        (lambda: F.linear(q, q), "input"),
        (lambda: F.linear(dense, dense, q), "bias"),
    ):
        with pytest.raises(TypeError, match=rf"F.linear: the {what} is a quantized weight.*call .dequantize"):
            call()


# -- activations="dynamic" ---------------------------------------------------------------------------------------------


def dynamic(recipe: Any) -> Any:
    return dataclasses.replace(recipe, activations="dynamic")


@every_main_recipe
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", INPUT_SHAPES, ids=str)
def test_a_quantized_input_changes_the_output_and_no_gradient(
    recipe: Any, shape: tuple[int, ...], with_bias: bool
) -> None:
    """The output is the product plus the bias; the rounding of the input is passed straight through."""
    bias = weight(1, 64)[0]

    def results(kind: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        w = nn.Parameter(quantize(weight(), kind))
        return run(inputs(*shape), w, nn.Parameter(bias.clone()) if with_bias else None)

    found, weight_only = results(dynamic(recipe)), results(recipe)
    y = product(inputs(*shape), quantize(weight(), recipe))
    assert same_bytes(found[0], y + bias if with_bias else y)
    assert y.numel() == 0 or not same_bytes(found[0], weight_only[0])
    for name, a, b in zip(("dx", "dw", "db"), found[1:], weight_only[1:], strict=True):
        if b is None:
            assert a is None
            continue
        assert type(a) is Tensor, name
        assert same_bytes(a, b), name


@every_main_recipe
@both_activations
def test_a_validation_between_two_steps_changes_nothing(recipe: Any, activations: str | None) -> None:
    """No operand is cached: what a pass without gradients leaves behind cannot be stale in the next step."""

    def second_gradients(*, validate: bool) -> tuple[Tensor, ...]:
        module = nn.Linear(96, 64, dtype=torch.bfloat16)
        module.weight = nn.Parameter(quantize(weight(), dataclasses.replace(recipe, activations=activations)))
        module.bias = nn.Parameter(weight(1, 64)[0])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        step(module, module)
        optimizer.step()
        if validate:
            with torch.no_grad():
                module(inputs(11, 96))
            module.eval()
            with torch.inference_mode():
                module(inputs(2, 96))
            module.train()
        return *step(module, module), module.bias.grad

    for a, b in zip(second_gradients(validate=True), second_gradients(validate=False), strict=True):
        assert same_bytes(a, b)


@every_main_recipe
def test_a_quantized_input_under_autocast_is_rounded_to_its_dtype_first(recipe: Any) -> None:
    q = quantize(weight(dtype=torch.float32), dynamic(recipe))
    w, x, bias = nn.Parameter(q), inputs(4, 96, dtype=torch.float32), nn.Parameter(torch.full((64,), 1 / 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w, bias)
    assert same_bytes(y, product(x.to(torch.bfloat16), q) + bias.to(torch.bfloat16))
    y.backward(torch.ones_like(y))
    assert {w.grad.dtype, x.grad.dtype, bias.grad.dtype} == {torch.float32}


@every_main_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_quantizes_the_input_to_the_same(recipe: Any, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    w = nn.Parameter(quantize(weight(), dynamic(recipe)))
    plain = run(inputs(4, 96), w, None)
    w.grad = None
    x = inputs(4, 96)
    y = checkpoint(F.linear, x, w, use_reentrant=use_reentrant)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    for a, b in zip((y, x.grad, w.grad), plain, strict=False):
        assert same_bytes(a, b)


@every_main_recipe
def test_a_quantized_input_is_not_what_is_kept_for_backward(recipe: Any) -> None:
    x, w = inputs(4, 96), nn.Parameter(quantize(weight(), dynamic(recipe)))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.linear(x, w)
    plain = [tensor for tensor in saved if not isinstance(tensor, QuantizedTensor)]
    assert [tensor.data_ptr() for tensor in plain] == [x.data_ptr()]


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    x = inputs(5, 96)
    module.zero_grad()
    y = forward(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    return y.detach(), x.grad, module.weight.grad


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_linear_compiles_into_one_graph() -> None:
    """An MXFP8 scale is a power of two: the dense weight is exact, so the compiled one is the same."""
    module = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    module.weight = nn.Parameter(quantize(weight(), MXFP8BlockScaling()))
    expected = step(module, module)
    found = step(module, torch.compile(module, fullgraph=True))
    for a, b in zip(found, expected, strict=True):
        assert type(a) is Tensor
        assert same_bytes(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@sampled(
    ("recipe", "backend"),
    [(MXFP8BlockScaling(), "inductor"), (NVFP4BlockScaling(blocks="square"), "aot_eager")],
    [(NVFP4BlockScaling(blocks="square"), "aot_eager")],
    ids=["mxfp8-inductor", "nvfp4-aot_eager"],
)
def test_a_linear_with_a_quantized_input_compiles_into_one_graph(recipe: Any, backend: str) -> None:
    """Once: a second step finds the graph, and recompiling would raise.

    Inductor may hand the fp32 product its operands in another layout, so its sums are compared up to their order.
    """
    module = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    module.weight = nn.Parameter(quantize(weight(), dynamic(recipe)))
    expected, *gradients = step(module, module)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    first = step(module, compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        second = step(module, compiled)
    values = decoded(quantize_rows(inputs(5, 96), recipe), recipe)
    bound = accumulation_bound(values, module.weight.dequantize(torch.float32), torch.bfloat16)
    for y, dx, dw in (first, second):
        assert {type(y), type(dx), type(dw)} == {Tensor}
        assert ((y.double() - expected.double()).abs() <= (bound if backend == "inductor" else 0 * bound)).all()
        assert same_bytes(dx, gradients[0])
        assert same_bytes(dw, gradients[1])
    assert same_bytes(second[0], first[0])


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.of_rows == recipe])
def test_compiling_changes_no_byte_of_a_quantized_input(name: str) -> None:
    """Of the recipes for rows: inputs of a layer with another recipe are quantized by one of these."""
    recipe = RECIPES[name]
    x = inputs(7, 96).detach()
    compiled = torch.compile(lambda x: quantize_rows(x, recipe), fullgraph=True)(x)
    for part, value in quantize_rows(x, recipe).items():
        assert same_bytes(compiled[part], value), part
