"""What holds on every device alike; where there is a GPU, it is held against the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init, stochastic_rounding
from tests.devices import every_device, told_of_waits
from tests.qtensor.recipes_under_test import RECIPES, every_recipe, same_bytes, same_parts, weight

WIDTH, TOKENS = 128, 16
MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def block(recipe: Any, device: str) -> Block:
    torch.manual_seed(0)
    with quantized_model_init(recipe):
        return Block().to(device)


def tokens(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(torch.bfloat16).to(device).requires_grad_()


def gradients(model: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    out.float().square().sum().backward()
    return [grad for each in (x, *model.parameters()) if (grad := each.grad) is not None]


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


@every_device
@every_recipe
@pytest.mark.parametrize("selective", [True, False])
def test_activation_checkpointing_changes_no_gradient(recipe: Any, device: str, selective: bool) -> None:
    found = []
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(saves_products)
    for checkpointed in (False, True):
        model, x = block(recipe, device), tokens(device)
        out = checkpoint(model, x, **options) if checkpointed else model(x)
        found.append([out.detach(), *gradients(model, x, out)])
    assert len(found[0]) == 1 + 1 + 5  # the output, the input, a norm of two, a linear with its bias, one without
    assert all(same_bytes(one.cpu(), other.cpu()) for one, other in zip(*found, strict=True))


@every_device
@every_recipe
def test_stochastic_rounding_follows_its_generator(recipe: Any, device: str) -> None:
    """The same seed gives the same bytes, another seed others, and the device's own generator stays as it was."""
    found = []
    default = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    for seed in (0, 0, 1):
        q = quantize(weight(), recipe).to(device)
        with stochastic_rounding(torch.Generator(device).manual_seed(seed)):
            q.add_(torch.full(q.shape, 1e-3, dtype=q.dtype, device=device))
        assert {part.device.type for part in q.parts().values()} == {device}
        found.append(q.cpu())
    assert same_parts(found[0], found[1])
    assert not same_parts(found[0], found[2])
    assert torch.equal(torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state(), default)


@every_device
@every_recipe
def test_a_forward_keeps_the_quantized_weight_and_no_dense_one(recipe: Any, device: str) -> None:
    model, x = block(recipe, device), tokens(device)
    assert dense_bytes_saved(model, x) == 0


@every_device
def test_dense_weights_that_are_kept_are_counted(device: str) -> None:
    model = Block().to(device)
    assert dense_bytes_saved(model, tokens(device)) == 2 * 2 * 2 * WIDTH * WIDTH


@pytest.mark.full
@every_device
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_block_keeps_no_dense_weight(device: str) -> None:
    """Though dense weights are made on the way."""
    model = block(RECIPES["mxfp8"], device)
    model.compile(fullgraph=True)
    assert dense_bytes_saved(model, tokens(device)) == 0


def dense_bytes_saved(model: nn.Module, x: Tensor) -> int:
    """Of tensors of a weight's shape, in 16 bits or more, between forward and backward."""
    shapes = {(2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)}
    saved = 0

    def save(tensor: Tensor) -> Tensor:
        nonlocal saved
        plain = not isinstance(tensor, QuantizedTensor)
        saved += tensor.nbytes if plain and tuple(tensor.shape) in shapes and tensor.itemsize > 1 else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = model(x)
    out.sum().backward()
    return saved


@pytest.mark.gpu
@every_recipe
def test_a_step_on_the_gpu_gives_the_bytes_of_the_cpu(recipe: Any) -> None:
    """Of SGD without momentum: a product and a difference for each element, each rounded once, on both."""
    found = []
    for device in ("cpu", "cuda"):
        model = block(recipe, device)
        optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.5)
        for step in range(2):
            for param in model.parameters():
                generator = torch.Generator().manual_seed(step)
                param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(device)
            optimizer.step()
        found.append([part.cpu() for part in parts_of(model)])
    assert all(same_bytes(one, other) for one, other in zip(*found, strict=True))


def parts_of(model: nn.Module) -> list[Tensor]:
    held = [value.detach() for value in get_model_state_dict(copy.deepcopy(model)).values()]
    return [
        part for value in held for part in (value.parts().values() if isinstance(value, QuantizedTensor) else [value])
    ]


# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_recipe
def test_forward_and_backward_wait_for_no_value(recipe: Any) -> None:
    model, x = block(recipe, "cuda"), tokens("cuda")
    model(x).sum().backward()  # kernels are chosen
    torch.cuda.synchronize()
    with told_of_waits("error"):
        model(x).sum().backward()
        y = model(x)
    assert y.isfinite().all()


@pytest.mark.gpu
@every_recipe
def test_a_step_waits_for_values_twice_at_most(recipe: Any) -> None:
    """Whether others wrote the parameters, and what ranks agree on; tests/gpu_offline says where."""
    model, x = block(recipe, "cuda"), tokens("cuda")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    for _ in range(2):  # in the first, fresh masters are compared with what they were made from
        model(x).sum().backward()
        optimizer.step()
    model(x).sum().backward()
    with told_of_waits("warn"), pytest.warns(UserWarning, match="synchronizing") as waits:
        optimizer.step()
    assert len(waits) <= 2, [str(one.message) for one in waits]
