"""What the question `overhead` runs: ops on one small weight, and a model that is nearly all Python and dispatch.

dense       bf16 linears, AdamW
by hand     the arithmetic of quantized training on plain tensors, with nothing around it: parts in a list, one
            autograd.Function, fp32 masters, AdamW, amax and encode. What it takes beyond dense is arithmetic.
quantized   the same with quantized parameters and MasterWeightOptimizer. What it takes beyond by hand is ours.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantized_model_init,
)
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import encode, format_of, shared_amax
from qtensor.tensor.quantized_tensor import OPS as TABLE

SIZE, TOKENS = 64, 16
X = torch.ones(TOKENS, SIZE, dtype=torch.bfloat16)
OPS: dict[str, Callable[[Tensor], object]] = {
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(SIZE, SIZE),
    "view(-1)": lambda t: t.view(-1),
    "t": lambda t: t.t(),
    "slice": lambda t: t[: SIZE // 2],
    "split": lambda t: t.split(SIZE // 2),
    "as_strided": lambda t: t.as_strided((SIZE, SIZE), (SIZE, 1), 0),
    "clone": lambda t: t.clone(),
    "F.linear": lambda t: F.linear(X, t),
}
RECIPES = {"float8": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
Step = Callable[[], None]


def operands() -> dict[str, Tensor]:
    """A weight: plain, and in every format."""
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return {"plain": weight, **{name: quantize(weight, recipe) for name, recipe in RECIPES.items()}}


def peers() -> dict[str, Tensor]:
    """The same weight in torchao's tensor subclasses."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8Tensor

    weight = operands()["plain"]
    return {
        "float8": Float8Tensor.from_hp(weight),
        "mxfp8": MXTensor.to_mx(weight, torch.float8_e4m3fn, 32),
        "nvfp4": NVFP4Tensor.to_nvfp4(weight),
    }


def defined(call: Callable[[Tensor], object], value: Tensor) -> bool:
    """Whether an op is defined for a tensor: torchao leaves some out."""
    try:
        call(value)
    except Exception:  # noqa: BLE001 - an unknown op raises whatever it likes
        return False
    return True


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, which FSDP2 needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(layers: int, recipe: Recipe | None, *, sharded: bool) -> Step:
    """One training step of a model of `layers` linears: quantized, or dense where there is no recipe."""
    torch.manual_seed(0)
    with quantized_model_init(recipe) if recipe else contextlib.nullcontext():
        net = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    if sharded:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    params, adamw = list(net.parameters()), torch.optim.AdamW
    optimizer = MasterWeightOptimizer(adamw, params, lr=1e-3) if recipe else adamw(params, lr=1e-3)
    x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16)

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor, parts: dict[str, Tensor], recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parts, ctx.recipe = parts, recipe
        return F.linear(x, format_of(recipe).decode(parts, recipe).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        (grad,), (x,) = grads, ctx.saved_tensors
        return grad @ format_of(ctx.recipe).decode(ctx.parts, ctx.recipe).to(grad.dtype), grad.T @ x, None, None


def by_hand(layers: int, recipe: Recipe) -> Step:
    """The same step on plain tensors: every op of its arithmetic, and nothing else."""
    torch.manual_seed(0)
    weights = [nn.Linear(SIZE, SIZE, bias=False).weight.detach() for _ in range(layers)]
    held = [quantize(weight.bfloat16(), recipe).parts() for weight in weights]
    masters = [nn.Parameter(weight) for weight in weights]
    handles = [torch.empty((SIZE, SIZE), dtype=torch.bfloat16, requires_grad=True) for _ in weights]  # carry gradients
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for handle, parts in zip(handles, held, strict=True):
            y = _ByHand.apply(y, handle, parts, recipe)  # type: ignore[no-untyped-call]
        y.sum().backward()
        for handle, master in zip(handles, masters, strict=True):
            assert handle.grad is not None
            master.grad, handle.grad = handle.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parts in zip(masters, held, strict=True):
                for name, value in encode(master, recipe, shared_amax(master, recipe)).items():
                    parts[name].copy_(value)

    return step


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what goes through the op table, by op."""
    calls: Counter[str] = Counter()

    def counting(handler: Callable[..., Any]) -> Callable[..., Any]:
        def count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls[str(func)] += 1
            return handler(func, args, kwargs)

        return count

    before = dict(TABLE)
    TABLE.update({op: counting(handler) for op, handler in before.items()})
    try:
        yield calls
    finally:
        TABLE.update(before)


def calls_per_layer(recipe: Recipe, *, sharded: bool, few: int = 2, many: int = 8) -> dict[str, float]:
    """Op-table calls that one more layer adds to a training step, by op."""
    seen = {}
    for layers in (few, many):
        step = trained(layers, recipe, sharded=sharded)
        step()  # the first step makes optimizer state and gathered weights
        with counted() as seen[layers]:
            step()
    return {op: (seen[many][op] - seen[few][op]) / (many - few) for op in sorted(seen[few] | seen[many])}
