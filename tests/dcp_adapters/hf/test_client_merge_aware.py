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
from tests.dcp_adapters.hf.test_client_qat import WEIGHTS, built, loss_of, start

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks

# q, k, v and gate, up share NVFP4's global scale with one another
SOME = ["q_proj", "v_proj", "down_proj"]  # k follows q and v


def trained(name: str, targets: Any) -> tuple[Any, Any, Tensor]:
    """A model of peft, its switch, and its loss through the merge after three steps."""
    base = built(WEIGHTS[name], "quantized", torch.bfloat16)
    base.load_state_dict(start(torch.bfloat16))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
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


CASES = [(name, "all-linear") for name in ("float8_row", "float8_block", "mxfp8", "mxfp4", "int4", "nvfp4")]
KEPT = [("float8_row", "all-linear"), ("mxfp4", "all-linear"), ("nvfp4", "all-linear"), ("nvfp4", SOME)]


@sampled(("name", "targets"), [*CASES, KEPT[-1]], KEPT)
def test_the_loss_of_the_exported_model_is_that_of_the_training(name: str, targets: Any, tmp_path: Path) -> None:
    model, aware, loss = trained(name, targets)
    with torch.no_grad():
        beside = loss_of(model)
    report = merge_(model, aware.updates())
    assert len(report.weights) == 2 * (7 if targets == "all-linear" else len(targets))
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
