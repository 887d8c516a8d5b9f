"""Models with storage="high_precision", and what must hold of them; every function here runs inside a rank.

The reference is the same model, unsharded, with the same ordinary optimizer and the averaged gradients that FSDP
produced. What must be gathered is quantize(full dense weight), bit for bit, once the shards have agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales
from qtensor import QuantizedTensor, quantize
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.fsdp_hooks.cases import (
    RECIPES,
    Net,
    assert_same_bytes,
    batch,
    build,
    gathered,
    local,
    parts_of,
    rows_for,
    rows_of,
)

ONE_ALL_REDUCE = {"allreduce_": 1}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=0.5, foreach=True),
}


def build_dense(name: str, **init: Any) -> Net:
    return build(RECIPES[name], rows_for(name), storage="high_precision", **init)


def weights(net: nn.Module) -> Iterator[tuple[str, Any, HighPrecisionWeight]]:
    """(fqn, parameter, shard) of every weight that is gathered quantized."""
    for fqn, param in net.named_parameters():
        if isinstance(local(param), HighPrecisionWeight):
            yield fqn, param, local(param)


def values(param: Tensor) -> Tensor:
    """The dense values behind a parameter of an unsharded model."""
    return (param.dense if isinstance(param, HighPrecisionWeight) else param).detach()


def assert_parts(found: dict[str, Tensor], expected: QuantizedTensor, what: str) -> None:
    """Gathered parts are those of `expected`, with the tensor-wide scale in the entry of every shard."""
    for part, tensor in parts_of(expected).items():
        wanted = tensor.repeat(found[part].shape) if tensor.ndim == 0 else tensor
        assert_same_bytes(found[part], wanted, f"{what}.{part}")


def assert_gathers(net: nn.Module, full: dict[str, Tensor], recipe: Any, what: str) -> None:
    """What FSDP gathers is quantize(full weight), and the dense tensor for all other parameters."""
    kinds = {fqn for fqn, _, _ in weights(net)}
    assert kinds
    for fqn, found in gathered(net).items():
        if fqn in kinds:
            assert_parts(found, quantize(full[fqn], recipe), f"{what}: gathered {fqn}")
        else:
            assert_same_bytes(found, full[fqn], f"{what}: gathered {fqn}")


def assert_shards(net: nn.Module, full: dict[str, Tensor], what: str) -> None:
    """Every rank holds its rows of the full dense weights."""
    for fqn, param in net.named_parameters():
        mesh = param.device_mesh
        rows = rows_of(full[fqn], local(param), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        assert_same_bytes(values(local(param)), rows, f"{what}: shard of {fqn}")


def whole(net: nn.Module) -> dict[str, Tensor]:
    """fqn -> the full dense value, gathered as DTensors do; plain copies."""
    found = {}
    for fqn, param in net.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        found[fqn] = values(full).clone()
    return found


def backward(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out.float().square().mean().backward()
    return out.detach()


def train_dense(
    net: Any, reference: Any, recipe: Any, *, make: str = "adamw", micro_batches: int = 1, hook: bool = False
) -> None:
    optimizer, its_optimizer = OPTIMIZERS[make](net.parameters()), OPTIMIZERS[make](reference.parameters())
    if hook:
        optimizer.register_step_post_hook(lambda *_: sync_scales(net))
    sync_scales(net)
    full = {fqn: values(param) for fqn, param in reference.named_parameters()}  # alias what the reference trains
    assert_gathers(net, full, recipe, "before the first step")
    for step in range(2):
        for micro in range(micro_batches):
            net.set_requires_gradient_sync(micro == micro_batches - 1)
            x = batch(step * micro_batches + micro)
            out = backward(net, x)
            with torch.no_grad():
                assert_same_bytes(out, reference(x), f"step {step}: output")
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) != param.requires_grad, fqn
            if param.grad is not None:
                assert type(param.grad.to_local()) is Tensor, fqn
                its.grad = param.grad.full_tensor()
        before = {fqn: value.clone() for fqn, value in full.items()}
        optimizer.step()
        its_optimizer.step()
        assert any(not torch.equal(full[fqn], value) for fqn, value in before.items()), "nothing was trained"
        if not hook:
            sync_scales(net)
        assert_shards(net, full, f"step {step}")
        assert_gathers(net, full, recipe, f"step {step}")
        optimizer.zero_grad()
    x = batch(99)
    with torch.no_grad():
        assert_same_bytes(net(x), reference(x), "output without grad")
    net.reshard()
