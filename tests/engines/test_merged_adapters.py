"""Adapters that were trained through their merge, in vLLM: its linears compute with what the training computed with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, get_peft_model

from dcp_adapters import export_hf
from qtensor import MXFP8BlockScaling, merge_, merge_aware, quantize_
from tests.engines.engine import Engine, unavailable
from tests.engines.models import BATCHES, LAYERS, PROMPT, Written, cut_model

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

from tests.engines.test_layouts import Case, check_logits, members  # which skips itself likewise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks
def test_vllm_computes_with_the_weights_that_were_trained(tmp_path: Path) -> None:
    """In MXFP8, whose weights vLLM decodes to bf16 here; of NVFP4 and MXFP4 weights alone it runs none on a CPU."""
    recipe = MXFP8BlockScaling()
    dense = cut_model()
    base = cut_model()
    quantize_(base, recipe, exclude=("lm_head",))
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    trained = {}
    with merge_aware(model) as aware:
        for tokens in BATCHES:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for number in range(LAYERS):
            for name in (each for linear in LINEARS for each in members(f"model.layers.{number}.{linear}")):
                layer = model.base_model.model.get_submodule(name)
                # products with the identity are the weights themselves
                trained[name] = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).detach().T
    merge_(model, aware.updates())
    merged = model.unload()
    export_hf(merged, tmp_path / "out", progress=False)
    weights = {name: merged.get_submodule(name).weight.detach() for name in trained}
    made = Written(tmp_path / "out", dense, recipe, weights)
    with Engine(tmp_path) as engine:
        engine.load(str(tmp_path / "out"))
        found = engine.generate(PROMPT[0].tolist(), 2)["logits"]
        check_logits(made, Case(recipe), found)
        for number in range(LAYERS):
            for linear in LINEARS:
                names = members(f"model.layers.{number}.{linear}")
                x = torch.randn(
                    5, trained[names[0]].shape[1], generator=torch.Generator().manual_seed(number)
                ).bfloat16()
                y = engine.linear(f"model.layers.{number}.{linear}", x)
                assert torch.equal(y, torch.nn.functional.linear(x, torch.cat([trained[name] for name in names])))
