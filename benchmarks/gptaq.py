"""Do errors of layers add up less where GPTAQ or Qronos round them? Output errors of stacked layers, beside GPTQ's.

    python -m benchmarks.gptaq                        # 8 layers of 256 channels, NVFP4; a minute of one core

The layers are those of Llama with random weights, and inputs have channels of different size. What is shown is the SNR
of the hidden states after each layer, in dB, to those of the dense model, on batches that were not calibrated on. It
tells how errors go on through layers; what they do to language is what `benchmarks.evaluation` asks.
"""

import argparse
import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine_and_versions
from layerwise import GPTAQ, GPTQ, Algorithm, Max, Qronos, calibrate
from qtensor import NVFP4BlockScaling

RESULTS = Path(__file__).parent / "results"
WAYS: dict[str, Algorithm] = {
    "Max": Max(),
    "GPTQ": GPTQ(),
    "GPTAQ(alpha=0.25)": GPTAQ(alpha=0.25),
    "GPTAQ(alpha=0.5)": GPTAQ(alpha=0.5),
    "GPTAQ(alpha=1)": GPTAQ(alpha=1.0),
    "Qronos(alpha=0.25)": Qronos(alpha=0.25),
    "Qronos(alpha=0.5)": Qronos(alpha=0.5),
    "Qronos(alpha=1)": Qronos(alpha=1.0),
}
VOCABULARY, TOKENS, SEEDS = 512, 128, (0, 1)


def model_of(layers: int, dim: int, seed: int) -> nn.Module:
    """The same for a seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = dim // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        initializer_range=dim**-0.5,
    )
    model: nn.Module = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.copy_(torch.exp2(torch.randn(param.shape, dtype=torch.float32, device="cpu")))
    return model


def batches(count: int, seed: int) -> list[Tensor]:
    """Token ids, [4, TOKENS] each."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    size = (4, TOKENS)
    return [
        torch.randint(0, VOCABULARY, size, generator=generator, dtype=torch.int64, device="cpu") for _ in range(count)
    ]


@torch.no_grad()
def states_of(model: Any, data: Sequence[Tensor]) -> list[Tensor]:
    """The hidden states after each layer, over all batches."""
    found = [model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states for ids in data]
    return [torch.cat(layer) for layer in zip(*found, strict=True)][1:]


def snr(found: Tensor, expected: Tensor) -> float:
    """In dB."""
    noise = (found.double() - expected.double()).square().sum()
    return 10 * float(torch.log10(expected.double().square().sum() / noise))


def measure(layers: int, dim: int, count: int) -> dict[str, list[list[float]]]:
    """Way -> for each seed the SNR after each layer."""
    out: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for seed in SEEDS:
        held_out = batches(4, 1000 + seed)
        expected = states_of(model_of(layers, dim, seed), held_out)
        for name, algorithm in WAYS.items():
            model = model_of(layers, dim, seed)
            data = [{"input_ids": ids, "use_cache": False} for ids in batches(count, seed)]
            calibrate(
                model,
                data,
                recipe=NVFP4BlockScaling(),
                algorithm=algorithm,
                exclude=("lm_head",),
                progress=False,
            )
            found = states_of(model, held_out)
            out[name].append([round(snr(*pair), 3) for pair in zip(found, expected, strict=True)])
            print(seed, name, out[name][-1], flush=True)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gptaq", description="Compares GPTAQ and Qronos with GPTQ."
    )
    parser.add_argument("--layers", type=int, default=8, metavar="N")
    parser.add_argument("--dim", type=int, default=256, metavar="N", help="a multiple of 64")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="of 512 tokens, to calibrate on")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the file of figures, ending in .json")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    asked_for = {"layers": asked.layers, "dim": asked.dim, "tokens": 4 * TOKENS * asked.batches, "format": "NVFP4"}
    results = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        **machine_and_versions(),
        **asked_for,
        "snr_db": measure(asked.layers, asked.dim, asked.batches),
    }
    path = asked.out or RESULTS / f"{dt.date.today().isoformat()}-gptaq.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
