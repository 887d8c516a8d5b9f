"""Quantization-aware training: what is exported are the weights that were trained, and their loss in transformers."""

from pathlib import Path

import pytest

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

import torch

from examples.trainers import qat
from tests.dcp_adapters.hf.exports import loaded
from tests.examples.trainers.exported import weights_as_trained
from tests.ranks import run_ranks


@pytest.mark.parametrize("form", qat.FORMATS)
def test_what_is_exported_is_what_was_trained(form: str, shared_tmp_path: Path) -> None:
    every = run_ranks(2, qat.main, ["--out", str(shared_tmp_path), "--format", form])
    for losses in every:
        assert losses[-1] < 0.9 * losses[0]
    same = weights_as_trained(shared_tmp_path, qat.FORMATS[form])
    assert len(same) == 2 * 7
    assert all(same.values())
    if form == "mxfp8":  # which was trained with quantized inputs
        return
    client = loaded(shared_tmp_path / "exported", dequantize=True)
    for rank, losses in enumerate(every):
        rows = qat.rows(6)[rank::2]
        with torch.no_grad():
            assert client(input_ids=rows, labels=rows).loss.item() == losses[-1]
