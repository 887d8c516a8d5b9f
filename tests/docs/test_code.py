"""The code of every page runs: in order, in one namespace, in a rank of the pool.

What runs here are the pages whose code needs nothing but a small model. The others have a test file of their own,
named in ELSEWHERE. A page with code that is in neither fails, and so does a block marked `not run` that is not in
NOT_RUN.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import qtensor
from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand, import_hf, read_manifest
from layerwise import Assignment
from qtensor import MXFP8BlockScaling, QuantizedTensor
from tests.docs import small_models
from tests.docs.pages import namespace, page, pages
from tests.docs.small_models import Adapted, Model, Pair, fill, shard, train
from tests.layerwise import small_runs
from tests.ranks import run_ranks

ELSEWHERE = {  # page: the test that runs it, in tests/
    "docs/calibration.md": "docs/test_calibration.py",
    **{
        f"docs/coming_from/{name}.md": "docs/test_coming_from.py"
        for name in ("compressed_tensors", "modelopt", "torchao", "transformer_engine")
    },
    "docs/extending.md": "docs/test_extending.py",
    "docs/install.md": "packaging/test_docs_install.py",
    "docs/quickstart.md": "docs/test_quickstart.py",
    "docs/speed.md": "docs/test_speed.py",
}
NOT_RUN = {
    "docs/calibration.md": 1,
    "docs/calibration_parallel.md": 3,
    "docs/checkpoints.md": 1,
    "docs/coming_from/README.md": 1,
    "docs/coming_from/transformer_engine.md": 3,
    "docs/coming_from/transformers.md": 2,
    "docs/export.md": 2,
    "docs/guide.md": 2,
    "docs/how_to_shard.md": 1,
    "docs/rotations.md": 3,
    "docs/from_pretrained.md": 3,
}  # how many blocks each page marks so


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def api(path: Path) -> None:
    names = page("api/qtensor.md").run(namespace(torch=torch))
    assert type(names["q"]) is qtensor.MXFP8Tensor


def checkpoint_format(path: Path) -> None:
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16)
    with qtensor.use_kernels("eager"):  # large enough to compile
        q = qtensor.quantize(weight, MXFP8BlockScaling())
        state = {"model.layers.0.weight": q}
        dcp.save(state, checkpoint_id=path / "saved", planner=QuantizedSavePlanner())
        names = page("checkpoint_format.md").run(namespace(path=path / "saved"))
        assert torch.equal(names["weight"], q.dequantize(torch.float32))


def checkpoints(path: Path) -> None:
    dense = Model()
    model = shard(Model())
    with qtensor.quantized_model_init(MXFP8BlockScaling()):
        model = shard(Model())
    optimizer = qtensor.MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    train(model, optimizer)
    (path / "hf").mkdir()
    save_file(dense.state_dict(), path / "hf" / "model.safetensors")
    names = namespace(model=model, optimizer=optimizer, step=1, path=path, hf_dir=path / "hf", build_model=Model)
    crc32 = torch.serialization.get_crc32_options()
    try:
        page("checkpoints.md").run(names | {"train": train, "shard": shard}, dots=CHECKPOINT_DOTS)
    finally:
        torch.serialization.set_crc32_options(crc32)
    for step in ("step-1000", "step-2000", "step-3000"):
        assert len(read_manifest(path / step).tensors) == 4


def faults(path: Path) -> None:
    for seed in (0, 1):  # the second one over the first
        torch.manual_seed(seed)
        state = {"weight": qtensor.quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected an existing checkpoint")
            page("faults.md").run(namespace(state=state, path=path))
        found = {"weight": qtensor.quantize(torch.zeros(64, 64), MXFP8BlockScaling())}
        dcp.load(found, checkpoint_id=path / "latest", planner=QuantizedLoadPlanner())
        assert torch.equal(found["weight"].dequantize(), state["weight"].dequantize())


CHECKPOINT_DOTS = ("train(model, optimizer)", "shard(model).to_empty(device='cpu')")


def compatibility(path: Path) -> None:
    with qtensor.quantized_model_init(MXFP8BlockScaling()):
        saved, loaded = Model(), Model()
    dcp.save(saved.state_dict(), checkpoint_id=path / "saved", planner=QuantizedSavePlanner())
    page("compatibility.md").run(namespace(state_dict=loaded.state_dict(), path=path / "saved"))
    for name, value in saved.state_dict().items():
        for part, kept in qtensor_parts(value).items():
            assert torch.equal(kept, qtensor_parts(loaded.state_dict()[name])[part]), name


def qtensor_parts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = value.parts() if isinstance(value, QuantizedTensor) else {"": value}
    return {name: part.detach().contiguous().view(-1).view(torch.uint8) for name, part in parts.items()}


def export(path: Path) -> None:
    with contextlib.chdir(path):
        names = page("export.md").run(namespace())
    dense = names["dense"].state_dict()
    exported = import_hf(path / "calibrated")
    assert exported.keys() == {*dense, "0.input_scale", "1.input_scale"}
    assert isinstance(local(names["model"][0].weight), QuantizedTensor)


def format_search(path: Path) -> None:
    names = namespace(build_model=lambda: small_runs.model_of(shard=False), path=path, batches=small_runs.batches())
    page("format_search.md").run(names)
    assignment, result = names["assignment"], names["result"].state_dict()
    assert 5 < assignment.bits_per_weight <= 6
    assert names["smaller"] == Assignment.load(path / "formats.json") == assignment.at(5.5)
    served = {name: param for name, param in names["served"].named_parameters() if isinstance(param, QuantizedTensor)}
    assert {name: param.recipe for name, param in served.items()} == {name: q.recipe for name, q in result.items()}
    assert len({param.recipe for param in served.values()}) == 2
    assert {q.recipe for name, q in names["mixed"].state_dict().items() if "down_proj" in name} == {MXFP8BlockScaling()}


def engines(path: Path) -> None:
    """On two ranks; the engines are threads of rank 0, since what they do is the same."""
    torch.manual_seed(0)
    with qtensor.quantized_model_init(MXFP8BlockScaling()):
        model, first = Model(), dist.get_rank() == 0
    fill(model)
    shard(model)
    dense = nn.Sequential(OrderedDict(up=nn.Linear(64, 64), lm_head=nn.Linear(64, 64))).bfloat16()
    loaded: dict[str, torch.Tensor] = {}

    def load_weights(named: Any) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in named)

    code = page("engines.md")
    names = code.run(namespace(model=model, dense=dense), only=[0, 1, 2])
    assert (names["total"] == 0) == first
    with ThreadPoolExecutor() as threads:
        if first:
            version = threads.submit(names["engine"], path / "weights", load_weights)
            code.run(names | {"address": path / "weights"}, only=[3])
            assert version.result() == 2
        else:
            names["stream"].send(None)
        names = code.run(names, only=[4, 6])
        alone = dist.new_group([0])
        if first:
            held: dict[str, torch.Tensor] = {}

            def follow() -> int:
                with names["SharedMemoryReceiver"](path / "weights") as receiver:
                    for _ in range(2):
                        names["receive_into"](held, receiver, alone)
                return int(receiver.version)

            version = threads.submit(follow)
            code.run(names | {"address": path / "weights"}, only=[5])
            assert version.result() == 2
            assert held.keys() == loaded.keys()
        else:
            names["keeping"].send(None)
            names["keeping"].send_since(None, 1)
        names = code.run(names, only=[7])
        if first:
            with closing(socket.socket()) as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            version = threads.submit(names["remote_engine"], address, load_weights)
            names["trainer"](address, names["stream"])
            assert version.result() == 3
        else:
            names["stream"].send(None)
    assert loaded.keys() == ({record.name for record in names["records"]} if first else set())


def guide(path: Path) -> None:
    names = namespace(build_model=Model, load_or_init=fill, device="cpu", path=path)
    better = torch.full((2 * small_models.WIDTH, small_models.WIDTH), 0.5, dtype=torch.bfloat16)
    names |= {"better": better, "shard": shard, "fill": fill, "train": train}
    names["loss_of"] = lambda model: model(small_models.batch()).float().square().mean()
    names = page("guide.md").run(names, dots=("shard(model); fill(model)", "train(model, optimizer)"))
    assert isinstance(names["model"], FSDPModule)
    held = {name: {"momentum_buffer", "exp_avg"} & state.keys() for name, state in names["states"]["state"].items()}
    assert held == {name: {"momentum_buffer" if "_proj" in name else "exp_avg"} for name in held}
    assert len(held) == 6
    assert (path / "step-1000" / ".metadata").exists()
    assert (path / "step-2000" / ".metadata").exists()


def graphs(path: Path) -> None:
    names = namespace(build_model=Model, mesh=init_device_mesh("cpu", (2,)), x=small_models.batch())
    with pytest.MonkeyPatch.context() as patch:
        # dynamo finds no names in a module that is a page; tests/fsdp_hooks/test_graph_fsdp.py compiles
        patch.setattr(torch, "compile", lambda model, fullgraph: model)
        names = page("graphs.md").run(names)
    for module in names["model"].modules():
        if isinstance(module, names["Gathered"]):
            assert isinstance(local(module._parameters["weight"]), QuantizedTensor)
            assert local(module._parameters["weight"].grad).abs().max() > 0


def how_to_shard(path: Path) -> None:
    models = iter([Model(Pair), Model(Adapted)])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build_model() -> Model:
        made = next(models)
        return type(made)(type(made.layers[0]))  # anew, so that it is built where the page says

    names = namespace(build_model=build_model, init_weights=fill, mesh=mesh, device="cpu", shard=shard)
    names = page("how_to_shard.md").run(names, dots=("shard(model)",))
    base = names["model"].layers[0].base
    assert isinstance(local(base.weight), QuantizedTensor)
    assert not base.weight.requires_grad
    assert not base.bias.requires_grad
    train(names["model"], names["optimizer"])


def deltas(path: Path) -> None:
    with qtensor.quantized_model_init(MXFP8BlockScaling()):
        model = Model()
    optimizer = qtensor.MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    receiver = {name: value.clone() for name, value in model.state_dict().items()}
    names = namespace(model=model, receiver=receiver, optimizer=optimizer, train=train, path=path)
    saved = "applied_to = copied(model.state_dict()); train(model, optimizer)"
    names |= {"copied": lambda state: {name: value.clone() for name, value in state.items()}}
    names = page("deltas.md").run(names, dots=("train(model, optimizer)", saved))
    assert names["applied"] == 1
    assert {one.name for one in path.iterdir()} == {"step-1000", "step-1010"}
    for name, value in names["applied_to"].items():
        if isinstance(value, QuantizedTensor):
            assert torch.equal(receiver[name].payload, value.payload)


def shards_by_hand(path: Path) -> None:
    import tests.dcp_adapters.test_torch_checkpointing  # noqa: F401 - its stand-in for an exchange over CUDA

    with qtensor.quantized_model_init(MXFP8BlockScaling()):
        model = Model()
    names = page("shards_by_hand.md").run(namespace(path=path, model=shard(model)))
    held, rows = names["state"]["weight"], slice(names["first"], names["last"])
    assert torch.equal(held.local.payload.view(torch.uint8), names["whole"].payload[rows].view(torch.uint8))


def index(path: Path) -> None:
    names = page("index.md").run(namespace(build_model=Model, path=path, shard=shard, fill=fill, train=train))
    assert isinstance(local(names["model"].layers[0].mlp.up_proj.weight), QuantizedTensor)


def memory(path: Path) -> None:
    """What one kind has saved the other loads; the way back changes nothing that 16 bits and 8 can hold."""
    names = page("memory.md").run(namespace(build_model=Model, train=train))
    states = names["optimizer"].state_dict()["state"]
    quantized = [state for state in states.values() if "exp_avg_sq_root" in state]
    assert quantized
    at_home = names["on_host"].state_dict()["state"]
    assert at_home.keys() == states.keys()
    assert all("master_remainder" in state for state in at_home.values())
    assert {"master_weight"} == {key for state in names["wide"].state_dict()["state"].values() for key in state} - {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert all(kept in state for state in quantized for kept in ("exp_avg", "step"))
    train(names["model"], names["optimizer"])
    kept = names["optimizer"].state_dict()["state"].values()
    assert all("master_remainder" in state for state in kept)


def numerics(path: Path) -> None:
    names = page("numerics.md").run(namespace())
    assert names["q"].recipe.to_json() == names["recipe"]


def merge_aware_lora(path: Path) -> None:
    def trains(model: nn.Module) -> None:
        train(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.5))

    names = namespace(build_model=Model, trains=trains, torch=torch)
    names = page("merge_aware_lora.md").run(names, dots=("trains(model)",))
    assert len(names["plain"].state_dict()) == len(Model().state_dict())
    assert isinstance(names["plain"].layers[0].mlp.up_proj.weight, QuantizedTensor)
    assert names["layer"].a.grad is not None


def qat(path: Path) -> None:
    def build_model() -> nn.Module:
        model = Model()
        for layer in model.layers:
            layer.mlp.gate_proj = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)  # which engines fuse with up_proj
        return model

    dots = ("shard(model); fill(model)", "train(model, optimizer)")
    names = namespace(build_model=build_model, path=path, shard=shard, fill=fill, train=train)
    names = page("qat.md").run(names, dots=dots)
    exported = import_hf(path / "exported", progress=False)
    trained = {name: value.full_tensor() for name, value in expand(names["model"].state_dict()).items()}
    for name, value in exported.items():
        assert isinstance(value, QuantizedTensor) == ("norm" not in name)
        expected = trained[name]
        if isinstance(value, QuantizedTensor):
            other = {"up": "gate", "gate": "up"}.get(name.split("_proj")[0].rpartition(".")[2])
            fused = [name] if other is None else [name, f"{name.split('mlp.')[0]}mlp.{other}_proj.weight"]
            whole = qtensor.quantize(torch.cat([trained[one] for one in fused]), value.recipe)
            expected = whole[: value.shape[0]]  # as rows of one weight
        for part, kept in qtensor_parts(expected).items():
            assert torch.equal(kept, qtensor_parts(value)[part]), name


def readme(path: Path) -> None:
    """With a model of transformers."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    names = namespace(LlamaForCausalLM=transformers.LlamaForCausalLM, config=config, path=path / "saved", fill=fill)
    page("README.md").run(names, dots=("fill(model)", "pass"))
    assert (path / "saved" / ".metadata").exists()


def logs(path: Path) -> None:
    """The lines come once they are asked for, with the loggers and the words that the page shows."""
    with qtensor.quantized_model_init(MXFP8BlockScaling()):
        model = Model()
    shown = page("logging.md")
    logger, records = logging.getLogger("dcp_adapters"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root = logging.getLogger()
    before = [*root.handlers]
    logger.addHandler(handler)
    try:
        shown.run(namespace(model=model, path=path / "saved"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        for added in {*root.handlers}.difference(before):
            root.removeHandler(added)
    told = "\n".join(f"{record.name}: {record.getMessage()}" for record in records)
    example = next(block.text for block in shown.blocks if block.language == "")
    assert _without_numbers(told, path / "saved") == _without_numbers(example.strip(), Path("/checkpoints/step-1000"))


def _without_numbers(lines: str, path: Path) -> str:
    return re.sub(r"[0-9]+(\.[0-9]+)?", "N", lines.replace(str(path), "PATH"))


RUN: dict[str, tuple[int, Callable[[Path], None]]] = {  # page: on how many ranks, and what they do
    "README.md": (1, readme),
    "docs/api/qtensor.md": (1, api),
    "docs/checkpoint_format.md": (1, checkpoint_format),
    "docs/checkpoints.md": (1, checkpoints),
    "docs/compatibility.md": (1, compatibility),
    "docs/deltas.md": (1, deltas),
    "docs/faults.md": (1, faults),
    "docs/engines.md": (2, engines),
    "docs/export.md": (1, export),
    "docs/format_search.md": (1, format_search),
    "docs/graphs.md": (2, graphs),
    "docs/guide.md": (2, guide),
    "docs/how_to_shard.md": (4, how_to_shard),
    "docs/index.md": (2, index),
    "docs/logging.md": (1, logs),
    "docs/memory.md": (1, memory),
    "docs/numerics.md": (1, numerics),
    "docs/merge_aware_lora.md": (1, merge_aware_lora),
    "docs/qat.md": (2, qat),
    "docs/shards_by_hand.md": (2, shards_by_hand),
}
YAML = ("docs/calibrate_command.md", "yaml")  # read by tests/layerwise/command/test_reference.py


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_the_page_runs(name: str, shared_tmp_path: Path) -> None:
    ranks, run = RUN[name]
    run_ranks(ranks, run, shared_tmp_path)


def test_no_page_and_no_block_is_left_out() -> None:
    assert {name for name, one in pages().items() if one.python} == {*RUN, *ELSEWHERE}
    for name, file in ELSEWHERE.items():
        assert (Path(__file__).parent.parent / file).exists(), name
    not_run = {name: sum(bool(block.not_run) for block in one.blocks) for name, one in pages().items()}
    assert {name: count for name, count in not_run.items() if count} == NOT_RUN
    for one in pages().values():
        for block in one.blocks:
            assert block.language or "import " not in block.text, f"{one.name}:{block.line} is Python"
            assert block.language in {"", "python", "json"} or (one.name, block.language) == YAML, (
                f"{one.name}:{block.line}"
            )
            assert not block.not_run or block.language == "python", f"{one.name}:{block.line}"
