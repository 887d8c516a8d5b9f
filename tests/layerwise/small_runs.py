"""A small model whose calibration has all there is (norms to fold into, a starved linear, a head), and runs of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from layerwise import (
    AWQ,
    GPTAQ,
    GPTQ,
    Algorithm,
    CalibrationResult,
    Event,
    LocalHessian,
    Max,
    Mse,
    Qronos,
    SmoothQuant,
    calibrate,
)
from qtensor import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantized_model_init,
)
from tests.layerwise.algorithm_table import ALGORITHMS

DIM, HIDDEN, VOCABULARY, LAYERS = 32, 64, 48, 3


class Layer(nn.Module):
    """Two norms in front of three and of two linears, and one linear that no token ever reaches."""

    calls = 0  # of all layers in this process

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q_proj, self.v_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.up_proj, self.down_proj = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM)
        self.spare = nn.Linear(3 * DIM, DIM, bias=False)  # of its own width: nothing folded could reach it
        self.fails: Callable[[], None] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        Layer.calls += 1
        if self.fails is not None:
            self.fails()
        x = self.norm1(hidden)
        hidden = hidden + self.o_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))
        return hidden + self.down_proj(torch.relu(self.up_proj(self.norm2(hidden))))


class Model(nn.Module):
    """An embedding, layers, a norm and a head."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way to calibrate the model; `stored` is the recipe of its storage, None for dense."""

    algorithm: Algorithm = field(default_factory=Max)
    recipe: Any = field(default_factory=NVFP4BlockScaling)
    stored: Any = None
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, int] = ("checkpoint", 0)

    @property
    def name(self) -> str:
        """For directories."""
        told = [type(self.algorithm).__name__, type(self.recipe).__name__, str(self.stored), str(dict(self.options))]
        return f"{told[0]}-{hashlib.sha256(''.join(told).encode()).hexdigest()[:8]}"


ROW, TENSOR = Float8CurrentScaling(), Float8CurrentScaling(granularity="tensor")
CASES = {
    "max": Case(),
    "max, static": Case(recipe=TENSOR, options={"inputs": "static"}, stop=("checkpoint", 2)),
    "max, quantized storage": Case(recipe=MXFP8BlockScaling(), stored=MXFP8BlockScaling(), stop=("write", 2)),
    "max, on quantized": Case(recipe=ROW, options={"layer_inputs": "quantized"}, stop=("capture", 1)),
    "mse": Case(algorithm=Mse(), recipe=TENSOR, dtype=torch.float32, stop=("checkpoint", 1)),
    "local_hessian": Case(algorithm=LocalHessian(), options={"inputs": "static"}, stop=("calibrate", 3)),
    "smoothquant": Case(algorithm=SmoothQuant(), recipe=ROW, stored=ROW, stop=("checkpoint", 1)),
    "awq": Case(algorithm=AWQ(), recipe=MXFP8BlockScaling(), dtype=torch.float32, stop=("metrics", 1)),
    "gptq": Case(algorithm=GPTQ(), stop=("checkpoint", 1)),
    "awq, then gptq": Case(
        algorithm=GPTQ(smoothing=AWQ(), scales=LocalHessian(), descent=2), recipe=MXFP8BlockScaling(), stop=("write", 2)
    ),
    "gptq, on unquantized": Case(algorithm=GPTQ(), options={"layer_inputs": "unquantized"}, stop=("checkpoint", 2)),
    "gptaq": Case(algorithm=GPTAQ(), stop=("checkpoint", 1)),
    "qronos": Case(algorithm=Qronos(smoothing=SmoothQuant(), hessians="one_at_a_time"), stop=("checkpoint", 1)),
    "gptaq, quantized storage": Case(
        algorithm=GPTAQ(smoothing=SmoothQuant()),
        recipe=MXFP8BlockScaling(),
        stored=MXFP8BlockScaling(),
        stop=("write", 2),
    ),
}
OF_CASES = {type(case.algorithm) for case in CASES.values()}
CASES |= {
    name: Case(algorithm=algorithm, stop=("checkpoint", 1))
    for name, algorithm in ALGORITHMS.items()
    if type(algorithm) not in OF_CASES
}


def model_of(
    case: Case | None = None, *, shard: bool | None = None, prepare: Callable[[Model], object] | None = None
) -> Model:
    """The same model each time, but for what `prepare` does; sharded where there is a process group, unless told."""
    case = case or Case()
    torch.manual_seed(0)
    dense = Model().to(case.dtype)
    with torch.no_grad():
        for name, param in dense.named_parameters():
            # columns of different sizes, so that algorithms have something to do
            param.copy_(1 + torch.rand_like(param) if "norm" in name else torch.randn_like(param) / 4)
            if "norm" in name:
                param[3] *= 8
        if prepare is not None:
            prepare(dense)
    model = dense
    if case.stored is not None:
        with quantized_model_init(case.stored):
            model = Model().to(case.dtype)
        model.load_state_dict(dense.state_dict())
    if dist.is_initialized() if shard is None else shard:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def batches(count: int = 5) -> list[Tensor]:
    """All of them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 6), generator=generator) for _ in range(count)]


def own(all_batches: Sequence[Any] | None = None) -> list[Any]:
    """Those of this rank, interleaved."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [*(all_batches if all_batches is not None else batches())][rank::ranks]


def run(model: nn.Module, case: Case | None = None, data: Any = None, **options: Any) -> CalibrationResult:
    """Calibrate a model."""
    case = case or Case()
    given = {"recipe": case.recipe, "algorithm": case.algorithm, **case.options, **options}
    return calibrate(model, own() if data is None else data, **given)


class Stop(Exception):
    """What a stopped run raises."""


def stopping(
    kind: str, index: int, error: type[BaseException] = Stop, rank: int | None = None
) -> Callable[[Event], None]:
    """A callback that raises at an event, on one rank or on all."""

    def on_event(event: Event) -> None:
        here = rank is None or rank == (dist.get_rank() if dist.is_initialized() else 0)
        if (event.kind, event.index) == (kind, index) and here:
            raise error(f"stopped at {kind} of {index}")

    return on_event


def stopped(model: nn.Module, case: Case, path: Path, **options: Any) -> None:
    """Calibrate until `case.stop`."""
    try:
        run(model, case, checkpoint_dir=path, on_event=stopping(*case.stop), **options)
    except Stop:
        return
    raise AssertionError(f"nothing stopped at {case.stop}")


def bytes_of(value: Tensor) -> str:
    """Dtype, shape and digest of a whole tensor, whichever way it is sharded or quantized."""
    whole: Any = value.full_tensor() if isinstance(value, DTensor) else value
    held = whole.parts() if isinstance(whole, QuantizedTensor) else {"dense": whole}
    parts = {name: part.detach().cpu() for name, part in held.items()}
    words = [
        f"{name} {part.dtype} {tuple(part.shape)} "
        + hashlib.sha256(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
        for name, part in parts.items()
    ]
    return f"{value.dtype} {tuple(value.shape)} {'; '.join(words)}"


def state_of(model: nn.Module) -> dict[str, str]:
    """The bytes of all parameters; a collective where the model is sharded."""
    return {name: bytes_of(param) for name, param in model.state_dict().items()}


@torch.no_grad()
def logits_of(model: nn.Module) -> str:
    """The bytes of what the model computes."""
    return bytes_of(model(batches()[0]))


@dataclass(frozen=True)
class Found:
    """What a run came to, picklable, the same for every way to shard it."""

    result: dict[str, str]
    model: dict[str, str]
    logits: str
    starved: tuple[str, ...]
    records: str
    resumed: tuple[int, ...]

    def same(self) -> Found:
        """Without what only tells how it was reached."""
        return dataclasses.replace(self, records="", resumed=())


def found(result: CalibrationResult, model: nn.Module) -> Found:
    """Look at a result and its model."""
    logits = logits_of(model)
    report = result.report.to_json()
    return Found(
        {name: bytes_of(value) for name, value in result.state_dict().items()},
        state_of(model),
        logits,
        tuple(result.starved),
        json.dumps([report["records"], report["layer_errors"]]),
        tuple(report["resumed"]),
    )


def assert_usable(model: nn.Module) -> None:
    """Everything is sharded, nothing is left over, and the forward computes what the state dict says."""
    before, state = logits_of(model), model.state_dict()
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for module, fresh in zip(model.modules(), model_of(shard=sharded).modules(), strict=True):
        assert "forward" not in vars(module), type(module)
        assert len(module._forward_hooks) == len(fresh._forward_hooks), type(module)  # FSDP has some of its own
        assert len(module._forward_pre_hooks) == len(fresh._forward_pre_hooks), type(module)
    if sharded:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        assert all(isinstance(param, DTensor) for param in model.parameters())
    plain = Model().to(next(iter(state.values())).dtype)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    plain.load_state_dict(
        {name: value.dequantize() if isinstance(value, QuantizedTensor) else value for name, value in whole.items()}
    )
    assert logits_of(plain) == before
    assert logits_of(model) == before
