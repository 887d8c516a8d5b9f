"""What does a training step of Llama-3-8B's blocks cost under FSDP2, beside bf16 and torchao?

Four blocks (28 linears), 8,192 tokens, `fully_shard` on one rank with NCCL, eager and each block compiled. Contenders:

    bf16           fp32 shards gathered in bf16, torch's fused AdamW
    a recipe       weights quantized, MasterWeightOptimizer(AdamW, fused=True)
    high_precision storage="high_precision": bf16 shards, quantized as they are gathered, torch's fused AdamW
    products       activations and gradients are quantized, too: all three products in Float8
    torchao        convert_to_float8_training on fp32 shards, torch's fused AdamW; where it is installed

"pass" is forward and backward, "step" that and the optimizer. Wall ends with an empty queue; host is what the calls
take until they return; device is what the kernels take together. Memory at rest is that between two steps, without
gradients.
"""

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.device_time import launches_of
from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from fsdp_hooks import sync_scales
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantized_model_init,
)
from qtensor.spec.recipes import Recipe

SECONDS = 190
PASS, HOST = "pass wall ms", "pass host ms"
COMPILED = ", compiled"


@dataclass(frozen=True)
class Contender:
    """What the weights are, and who makes the products."""

    recipe: Recipe | None = None
    storage: Literal["quantized", "high_precision"] = "quantized"
    torchao: Literal["", "tensorwise", "rowwise"] = ""


def products(granularity: str) -> Contender:
    """Activations and gradients in Float8, too."""
    return Contender(Float8CurrentScaling(granularity=granularity, activations="dynamic", gradients="e5m2"))


CONTENDERS = {
    "bf16": Contender(),
    "mxfp8 row": Contender(MXFP8BlockScaling()),
    "float8 tensor, products": products("tensor"),
    "torchao tensorwise, fp8 gather": Contender(torchao="tensorwise"),
    "nvfp4 row": Contender(NVFP4BlockScaling()),
    "float8 row": Contender(Float8CurrentScaling()),
    "float8 row, products": products("row"),
    "torchao rowwise": Contender(torchao="rowwise"),
    "mxfp8 row, high_precision": Contender(MXFP8BlockScaling(), "high_precision"),
    "float8 tensor": Contender(Float8CurrentScaling(granularity="tensor")),
    "float8 block": Contender(Float8BlockScaling()),
}
QUANTIZED = ("mxfp8 row", "nvfp4 row", "float8 row")
AIMS = (
    *(
        Aim(row=f"{name}, products{COMPILED}", figure=PASS, most=0.8, over=f"bf16{COMPILED}")
        for name in ("float8 tensor", "float8 row")
    ),
    *(Aim(row=f"{name}{COMPILED}", figure=PASS, most=0.95, over=f"bf16{COMPILED}") for name in QUANTIZED),
    *(Aim(row=f"{name}{COMPILED}", figure="step wall ms", most=1.0, over=f"bf16{COMPILED}") for name in QUANTIZED),
    *(Aim(row=name, figure=HOST, most=1.3, over="bf16") for name in QUANTIZED),
    Aim(
        row=f"float8 tensor, products{COMPILED}",
        figure=PASS,
        most=1.0,
        over=f"torchao tensorwise, fp8 gather{COMPILED}",
    ),
)


def rows(scale: Scale) -> Iterator[Row]:
    """Compiled ones first: they are what people train with."""
    with alone(scale) as mesh:
        for said in (COMPILED, ""):
            for name, contender in CONTENDERS.items():
                if contender.torchao and importlib.util.find_spec("torchao") is None:
                    yield Row(f"{name}{said}", skipped="torchao is not installed")
                else:
                    yield tried(f"{name}{said}", partial(_measured, scale, mesh, contender, compiled=bool(said)))


@contextlib.contextmanager
def alone(scale: Scale) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    if scale.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(scale.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(scale.device, (1,))
    finally:
        dist.destroy_process_group()


def _measured(scale: Scale, mesh: DeviceMesh, contender: Contender, *, compiled: bool) -> Figures:
    torch.compiler.reset()
    torch.manual_seed(0)
    net = _sharded(scale, mesh, contender, compiled=compiled)
    optimizer, after = _optimizer(net, contender)
    tokens = torch.randint(0, scale.vocabulary, (scale.sequences, scale.tokens), device=scale.device)

    def passes() -> None:
        net(tokens).float().square().mean().backward()

    def step() -> None:
        passes()
        optimizer.step()
        optimizer.zero_grad()
        after()

    for _ in range(3):
        step()
    cuda = scale.device == "cuda"
    scale.wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [_pass_and_step(scale, passes, step, optimizer) for _ in range(max(scale.rounds // 3, 1))]
    host, wall, step_host, step_wall = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    figures = {PASS: wall, HOST: host, "step wall ms": step_wall, "step host ms": step_host}
    figures["tokens/s"] = tokens.numel() / step_wall * 1e3
    if cuda:  # before the profiler, which allocates
        figures |= {"peak GB": torch.cuda.max_memory_allocated() / 1e9, "rest GB": torch.cuda.memory_allocated() / 1e9}
    launches = launches_of(passes, scale.device)
    optimizer.zero_grad()
    whole = launches_of(step, scale.device)
    device = {"pass device ms": launches.seconds * 1e3, "step device ms": whole.seconds * 1e3}
    return figures | device | {"pass launches": launches.number, "step launches": whole.number}


def _pass_and_step(
    scale: Scale, passes: Callable[[], None], step: Callable[[], None], optimizer: Any
) -> tuple[float, float, float, float]:
    """Seconds of host and wall of one forward and backward, and of a whole step behind it."""
    taken: list[float] = []
    for call in (passes, step):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
        scale.wait()
        taken.append(time.perf_counter() - began)
        optimizer.zero_grad()
    return taken[0], taken[1], taken[2], taken[3]


def _sharded(scale: Scale, mesh: DeviceMesh, contender: Contender, *, compiled: bool) -> nn.Module:
    recipe, dense = contender.recipe, contender.recipe is None
    with _default_dtype(torch.float32 if dense else torch.bfloat16), torch.device(scale.device):
        if recipe is None:
            net = Blocks(scale)
        else:
            with quantized_model_init(recipe, storage=contender.storage):
                net = Blocks(scale)
    if contender.torchao:
        _converted(net, contender.torchao)
    kwargs: dict[str, Any] = {"mesh": mesh}
    if dense:
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        if compiled:
            block.compile(backend=scale.compiler)
        fully_shard(block, **kwargs)
    return fully_shard(net, **kwargs)


def _converted(net: nn.Module, recipe: str) -> None:
    """By torchao; only its tensor-wide scales travel in fp8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    tensorwise = recipe == "tensorwise"
    config = (
        Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        if tensorwise
        else Float8LinearConfig.from_recipe_name(recipe)
    )
    convert_to_float8_training(net, config=config)


def _optimizer(net: nn.Module, contender: Contender) -> tuple[Any, Callable[[], object]]:
    """An optimizer, and what has to follow each of its steps."""
    if contender.recipe is not None and contender.storage == "quantized":
        return MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-4, fused=True), lambda: None
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    if contender.torchao == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        return optimizer, partial(precompute_float8_dynamic_scale_for_fsdp, net)
    return optimizer, partial(sync_scales, net) if contender.recipe is not None else lambda: None


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- Llama's blocks, with random weights -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal, groups of heads share keys and values; no rotation of positions, which costs no linear anything."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        hidden, keys = scale.hidden, scale.hidden // scale.heads * scale.groups
        self.width = scale.hidden // scale.heads
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = nn.Linear(hidden, keys, bias=False), nn.Linear(hidden, keys, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, tokens, hidden] to the same."""
        sequences, tokens, hidden = x.shape
        q, k, v = (
            linear(x).view(sequences, tokens, -1, self.width).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(sequences, tokens, hidden))


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.before, self.attention = nn.RMSNorm(scale.hidden), Attention(scale)
        self.between = nn.RMSNorm(scale.hidden)
        self.gate, self.up = (nn.Linear(scale.hidden, scale.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(scale.inner, scale.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, tokens, hidden] to the same."""
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """An embedding, blocks and a norm; no output projection, which no recipe quantizes."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embedding = nn.Embedding(scale.vocabulary, scale.hidden)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(scale.layers))
        self.norm = nn.RMSNorm(scale.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, tokens] to [sequences, tokens, hidden]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
