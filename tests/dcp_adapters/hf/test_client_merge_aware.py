"""Train what is deployed: an adapter that was trained through its merge is exported with the very loss of the training.

The export's weights decode to the bf16 numbers that the training multiplied by, and both sides run torch's own products
of equal operands, so the losses are equal bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sampling import sampled

pytest.importorskip("compressed_tensors")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from torch import Tensor

from dcp_adapters import export_hf
from qtensor import QuantizedTensor, merge_, merge_aware
from tests.dcp_adapters.hf.exports import assert_equal, linears, loaded
from tests.dcp_adapters.hf.test_client_qat import NVFP4, WEIGHTS, built, loss_of, start

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks

# q, k, v and gate, up share NVFP4's global scale with one another, so that only these two take adapters there
ADAPTED = {"nvfp4": ["o_proj", "down_proj"]}


def trained(name: str) -> tuple[Any, Any, Tensor]:
    """A model of peft, its switch, and its loss through the merge after three steps."""
    base = built(WEIGHTS[name], "quantized", torch.bfloat16)
    base.load_state_dict(start(torch.bfloat16))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED.get(name, "all-linear"))
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=2e-2)
    with merge_aware(model) as aware:
        first = loss_of(model)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        last = loss_of(model).detach()
    assert last < first
    return model, aware, last


@sampled("name", ["float8_row", "float8_block", "mxfp8", "mxfp4", "int4", "nvfp4"], ["float8_row", "mxfp4", "nvfp4"])
@pytest.mark.filterwarnings("ignore:merge_. .* farther from weight:UserWarning")  # INT4 is always rounded once more
def test_the_loss_of_the_exported_model_is_that_of_the_training(name: str, tmp_path: Path) -> None:
    model, aware, loss = trained(name)
    with torch.no_grad():
        beside = loss_of(model)
    report = merge_(model, aware.updates())
    assert len(report.weights) == 2 * len(ADAPTED.get(name, range(7)))
    merged = model.unload()
    export_hf(merged, tmp_path / "out", progress=False)
    client = loaded(tmp_path / "out", dequantize=True)
    for module in linears(merged):
        weight = merged.get_submodule(module).weight
        if isinstance(weight, QuantizedTensor):
            assert_equal(module, client.get_submodule(module).weight, weight.dequantize())
    with torch.no_grad():
        assert torch.equal(loss_of(client), loss)
    assert beside != loss, "base and adapter beside one another have another loss"


def test_nvfp4_adapters_on_linears_that_share_a_scale_are_refused() -> None:
    model = get_peft_model(built(NVFP4, "quantized", torch.bfloat16), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"q_proj: share_scales says that its base weight has one scale with others"):
        merge_aware(model)
