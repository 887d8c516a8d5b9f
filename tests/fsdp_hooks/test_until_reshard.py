"""The weight's operand in backward is made once a gather, for all micro-batches of it, and freed as FSDP reshards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp_hooks import sync_scales
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.until_reshard import UntilReshard
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, quantized_model_init
from qtensor.products import gradients
from tests.ranks import run_ranks

RECIPES: dict[str, Any] = {
    "float8_row": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "float8_tensor": Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "mxfp8": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
}
WIDTH = 96
every = pytest.mark.parametrize("name", RECIPES)


def inputs(seed: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def net(recipe: Any, storage: str) -> Any:
    """Of which the last shard has fewer rows, if there are two and the format allows it."""
    torch.manual_seed(0)
    between = WIDTH if isinstance(recipe, MXFP8BlockScaling) else 65
    with quantized_model_init(recipe, storage=storage):
        layers = [nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((WIDTH, between), (between, 64))]
    return nn.Sequential(*layers)


def memory_of(weight: Any) -> list[int]:
    """Bytes of what is kept beside a gathered weight."""
    return [held.untyped_storage().size() for held in weight._turned.held]


def microbatches_share(name: str, storage: str) -> None:
    model, alone = net(RECIPES[name], storage), net(RECIPES[name], storage)
    for module in (model, alone):
        for layer in module:
            fully_shard(layer)
        sync_scales(module)
    for layer in model:
        assert isinstance(layer, FSDPModule)
        layer.set_reshard_after_backward(False)
        layer.set_reshard_after_forward(False)
    with mock.patch.object(gradients, "turn_weight", wraps=gradients.turn_weight) as turned:
        for number in range(3):
            model(inputs(number).requires_grad_()).float().square().sum().backward()
        assert turned.call_count == 2  # once for each weight
        whole = [layer.weight for layer in model]
        assert all(min(memory_of(weight)) > 0 for weight in whole)
        for layer in model:
            layer.reshard()
        assert [memory_of(weight) for weight in whole] == [[0, 0], [0, 0]]
        assert all(not each.untyped_storage().size() for weight in whole for each in weight._turned._made.values())
        for number in range(3):
            alone(inputs(number).requires_grad_()).float().square().sum().backward()
        assert turned.call_count == 2 + 6
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(local_of(one.grad), local_of(other.grad))


@every
@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_microbatches_of_a_gather_share_it_and_nothing_outlives_the_reshard(
    name: str, storage: str, ranks: int
) -> None:
    run_ranks(ranks, microbatches_share, name, storage)


def follows_the_weights(name: str) -> None:
    """An optimizer's step between gathers, and a write to the gathered weight: what is kept is made anew."""
    model = net(RECIPES[name], "quantized")
    for layer in model:
        fully_shard(layer)
    sync_scales(model)
    x = inputs(0).requires_grad_()
    found = []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for param in model.parameters():
                shard: Any = local_of(param)
                shard.copy_(shard.dequantize() * factor)
        sync_scales(model)
        x.grad = None
        model(x).float().sum().backward()
        found.append(x.grad)
    assert torch.equal(found[1], found[0] * 4)
    layer: Any = model[0]
    layer.unshard()
    layer.set_reshard_after_backward(False)
    with torch.no_grad():
        whole = layer.weight
    first = inputs(1).requires_grad_()
    layer(first).float().sum().backward()
    with torch.no_grad():
        whole.copy_(whole.dequantize() * -2.0)
    second = inputs(1).requires_grad_()
    layer(second).float().sum().backward()
    assert torch.equal(second.grad, first.grad * -2)


@pytest.mark.parametrize("name", ["float8_row", "mxfp8"])
def test_what_is_kept_is_made_anew_where_the_weight_was_written(name: str) -> None:
    run_ranks(1, follows_the_weights, name)


def holds_nothing_without_gradients() -> None:
    model = net(Float8CurrentScaling(activations="dynamic"), "quantized")
    for layer in model:
        fully_shard(layer)
    sync_scales(model)
    model.requires_grad_(True)
    model(inputs(0)).float().sum().backward()
    for layer in model:
        layer.unshard()
        assert layer.weight._turned is None


def test_a_recipe_whose_backward_is_dense_keeps_nothing() -> None:
    run_ranks(1, holds_nothing_without_gradients)


def test_what_was_made_is_made_once_until_its_memory_is_taken_or_its_source_is_written() -> None:
    kept, source, made = UntilReshard(1, torch.device("cpu")), torch.arange(6.0), []

    def make() -> dict[str, Tensor]:
        made.append(1)
        return {"double": source * 2}

    for times in (1, 1):
        assert torch.equal(kept.keep([source], make)["double"], source * 2)
        assert len(made) == times
    source += 1
    assert torch.equal(kept.keep([source], make)["double"], source * 2)
    kept.held[0].untyped_storage().resize_(0)  # as FSDP does
    assert torch.equal(kept.keep([source], make)["double"], source * 2)
    assert len(made) == 3
    with torch.inference_mode():
        unseen = torch.ones(2)
    assert kept.keep([unseen], make) is not kept.keep([unseen], make)
