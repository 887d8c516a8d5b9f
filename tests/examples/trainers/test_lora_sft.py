"""LoRA by TRL's SFTTrainer on bases in 4 and 8 bits, on two ranks: SmolLM2's first layers, cut to its first tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import qtensor
from dcp_adapters import export_hf, import_hf
from dcp_adapters.transformers import QTensorConfig, quantized_config
from examples import smollm2
from examples.trainers import lora_sft
from qtensor import QuantizedTensor, quantize_
from tests.dcp_adapters.cases import bits
from tests.examples import small_model
from tests.examples.trainers.accelerate_state import launched
from tests.examples.trainers.checkpoints import hold_the_same
from tests.ranks import run_ranks
from tests.sampling import sampled

# name -> the layout that the base comes in, "" for a dense one, and the recipe of its weights
BASES = {
    "fp8": ("fp8", "Float8BlockScaling"),
    "mxfp4": ("compressed-tensors", "MXFP4BlockScaling"),
    "nvfp4": ("modelopt", "NVFP4BlockScaling"),
    "int4": ("compressed-tensors", "Int4GroupScaling"),
    "dense": ("", "NVFP4BlockScaling"),
    "nf4": ("", "NF4BlockScaling"),
}

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the real model, with its tokenizer, of 2048 tokens."""
    root = tmp_path_factory.mktemp("smol")
    small_model.install(root / "installed", 2)
    sys.path.insert(0, str(root / "installed"))
    smollm2._reader.cache_clear()
    try:
        smollm2.save_pretrained(root / "dense")
    finally:
        sys.path.remove(str(root / "installed"))
        smollm2._reader.cache_clear()
    return root / "dense"


@pytest.fixture(scope="module")
def base_of(smol: Path) -> Callable[[str], Path]:
    """A base by its name, made when it is asked for."""

    def base(name: str) -> Path:
        layout, recipe = BASES[name]
        path = smol if not layout else smol.with_name(name)
        if not path.exists():
            model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.bfloat16)
            quantize_(model, getattr(qtensor, recipe)())
            export_hf(model, path, layout=layout, fused_scales="requantize", progress=False)
            AutoTokenizer.from_pretrained(smol).save_pretrained(path)
        return path

    return base


def _run(*argv: str) -> list[float]:
    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of trl and peft, which use older names of transformers, and of old pickles
        return lora_sft.main(list(argv))


@sampled("name", BASES, ["mxfp4"])
def test_adapters_learn_on_a_base_that_stays(name: str, base_of: Callable[[str], Path], shared_tmp_path: Path) -> None:
    """A resumed run ends in the same bytes; peft reads the adapters, and with them the loss is lower."""
    base, whole, halved = base_of(name), shared_tmp_path / "whole", shared_tmp_path / "halved"
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    argv = ["--base", str(base), "--recipe", BASES[name][1]]
    losses = run_ranks(2, _run, *argv, "--out", str(whole), timeout=300)
    assert all(each[-1] < 0.95 * each[0] for each in losses)
    shutil.copytree(whole / "checkpoint-4", halved / "checkpoint-4")
    resumed = run_ranks(2, _run, *argv, "--out", str(halved), "--resume", timeout=300)
    assert resumed == losses
    assert hold_the_same(whole / "checkpoint-8/dcp", halved / "checkpoint-8/dcp")
    assert not hold_the_same(whole / "checkpoint-4/dcp", whole / "checkpoint-8/dcp")
    one, other = (load_file(path / "adapter/adapter_model.safetensors") for path in (whole, halved))
    assert one.keys() == other.keys()
    assert len(one) == 2 * 7 * 2
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    _check_adapters(name, base, whole / "adapter")


def _check_adapters(name: str, base: Path, adapter: Path) -> None:
    layout, recipe = BASES[name]
    how: dict[str, Any] = (
        {"config": quantized_config(base)}
        if layout
        else {"quantization_config": QTensorConfig(getattr(qtensor, recipe)())}
    )
    model = AutoModelForCausalLM.from_pretrained(base, **how)
    weights: dict[str, Any] = {key: param.detach() for key, param in model.named_parameters()}
    quantized = {key: held for key, held in weights.items() if isinstance(held, QuantizedTensor)}
    assert len(quantized) == 2 * 7
    expected: Any = import_hf(base, progress=False) if layout else {}
    for key in expected.keys() & quantized.keys():
        assert bits(expected[key].payload) == bits(quantized[key].payload)
    tokens = AutoTokenizer.from_pretrained(base)("7 times 8 is 56.", return_tensors="pt").input_ids
    plain = model(tokens, labels=tokens).loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = PeftModel.from_pretrained(model, adapter)
    assert adapted(tokens, labels=tokens).loss < 0.95 * plain


@pytest.mark.full  # processes of its own
def test_accelerate_launch_runs_the_same(base_of: Callable[[str], Path], shared_tmp_path: Path) -> None:
    """With accelerate's flags for FSDP2 in force: the same adapters as those of ranks that something else started."""
    base, ours, theirs = base_of("dense"), shared_tmp_path / "ours", shared_tmp_path / "theirs"
    run_ranks(2, _run, "--base", str(base), "--out", str(ours), timeout=300)
    flags = "--use_fsdp --fsdp_version 2 --fsdp_cpu_ram_efficient_loading false --num_processes 2 --num_machines 1"
    layers = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"
    free = "--mixed_precision no --dynamo_backend no --main_process_port 0"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), *layers.split(), *free.split()]
    script = [str(Path(lora_sft.__file__)), "--base", str(base), "--out", str(theirs)]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment["PYTHONPATH"] = str(Path(lora_sft.__file__).parents[2])
    subprocess.run([*launch, *script], env=environment, check=True, timeout=280)
    one, other = (load_file(path / "adapter/adapter_model.safetensors") for path in (ours, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
