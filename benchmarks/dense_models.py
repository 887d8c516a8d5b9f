"""Language models whose weights are truly dense, to judge quantization by; with text that they know.

The weights of SmolLM2-135M come from a file in 4 bits (Q4_1): in each block of 32 there are at most 16 values, on an
even grid, which no dense checkpoint has. A quantizer with blocks of 32 can find that grid again, so errors measured on
those weights say little about others. No package with a free license was found that carries a small language model in
16 or 32 bits. These two take its place:

    bytes     3.4 million weights, trained here on the text below, byte by byte; some minutes, once for a machine
    smollm2   SmolLM2-135M, rotated: the same function, other weights

`bytes` is dense by construction, and small and young: its errors rank algorithms, and are no forecast for large models.

`smollm2` was trained for long. With Q orthogonal (drawn at random), and RMSNorm's gains g moved into the weights that
follow, x Q takes the place of x between the layers, which RMSNorm without gains does not notice:

    embedding   E Q               q, k, v, gate, up   W diag(g) Q
    output      E diag(g) Q       o, down             Q^T W

Every rotated weight is a sum over hundreds of the old, so no block is on a grid. In exact arithmetic the logits are
the same. One thing is lost with the grid: channels of x that are far larger than others, which Q spreads.

The text is Python's language reference: every fifth topic is held out, for `smollm2`, whose tokens are longer, every
fourth.
"""

import functools
import hashlib
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import smollm2  # noqa: E402

Name = Literal["bytes", "smollm2"]
Split = Literal["train", "heldout"]

SEQ_LEN = 256
HELD_OUT: dict[Name, int] = {"bytes": 5, "smollm2": 4}  # one topic of so many
STEPS, BATCH, PEAK_LR, WARMUP = 240, 8, 3e-3, 20  # of the training of `bytes`
BYTES = ROOT / "runs" / "evaluation" / "bytes.safetensors"


def text(name: Name, split: Split) -> str:
    """The topics of one split."""
    held_out = split == "heldout"
    return "\n\n".join(topics[key] for i, key in enumerate(sorted(topics)) if (i % HELD_OUT[name] == 0) == held_out)


@functools.cache
def token_rows(name: Name, split: Split) -> Tensor:
    """The text in the model's tokens, int64 [n, SEQ_LEN]; what does not fill the last row is dropped."""
    written = text(name, split)
    ids = list(written.encode()) if name == "bytes" else smollm2.tokenizer()(written).input_ids
    flat = torch.tensor(ids, dtype=torch.int64, device="cpu")
    return flat[: len(flat) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)


@functools.cache
def dense_model(name: Name) -> nn.Module:
    """The model in fp32, in eval mode; copy it before changing it."""
    return rotated_smollm2() if name == "smollm2" else trained_bytes(BYTES)


def bytes_config(**changes: int) -> Any:
    """The configuration of `bytes`."""
    from transformers import LlamaConfig

    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4} | changes
    return LlamaConfig(vocab_size=256, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, **shape)


def trained_bytes(path: Path, steps: int = STEPS, **shape: int) -> nn.Module:
    """The model of `path`; where there is no such file, it is trained first."""
    from transformers import LlamaForCausalLM

    config = bytes_config(**shape)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        made = LlamaForCausalLM(config)
        train(made, token_rows("bytes", "train"), steps)
        save_file({key: value.contiguous() for key, value in made.state_dict().items()}, path)
    model = LlamaForCausalLM(config)
    model.load_state_dict(load_file(path))
    return model.float().eval()


def train(model: nn.Module, rows: Tensor, steps: int) -> None:
    """AdamW with warmup and a cosine; the same batches in every run."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps - WARMUP, 1), eta_min=PEAK_LR / 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [ramp, decay], [WARMUP])
    drawn = torch.Generator(device="cpu").manual_seed(0)
    began = time.process_time()
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (BATCH,), generator=drawn, device="cpu")]
        loss = next_token_losses(model(input_ids=ids, use_cache=False).logits, ids).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step + 1 == steps:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time() - began:.0f} CPU seconds", flush=True)


def next_token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropies in nats, [n, tokens - 1], of logits [n, tokens, vocabulary] for ids [n, tokens]."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def rotated_smollm2() -> nn.Module:
    """SmolLM2-135M in fp32, off its grid; the output projection is a weight of its own."""
    return rotated(untied_smollm2(), seed=0)


def untied_smollm2() -> nn.Module:
    """SmolLM2-135M in fp32 as it is, but its output projection is a weight of its own."""
    from transformers import LlamaForCausalLM

    config = smollm2.config()
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config).float().eval()
    params = dict(model.named_parameters())
    with torch.no_grad():
        for fqn, weight in smollm2.iter_weights(set(params) - {"lm_head.weight"}):
            params[fqn].copy_(weight)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    untied: nn.Module = model
    return untied


@torch.no_grad()
def rotated(model: Any, seed: int) -> Any:
    """The model, in place: the same function, with weights that were rotated."""
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    size = model.config.hidden_size
    normal = torch.randn(size, size, generator=drawn, dtype=torch.float64, device="cpu")
    turn, upper = torch.linalg.qr(normal)
    turn *= upper.diagonal().sign()  # so every rotation is as likely as any other

    def enters(linear: nn.Linear, gain: Tensor) -> None:
        linear.weight.copy_(linear.weight.double() * gain.double() @ turn)

    def leaves(linear: nn.Linear) -> None:
        linear.weight.copy_(turn.T @ linear.weight.double())

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            enters(linear, layer.input_layernorm.weight)
        for linear in (mlp.gate_proj, mlp.up_proj):
            enters(linear, layer.post_attention_layernorm.weight)
        leaves(attention.o_proj)
        leaves(mlp.down_proj)
        layer.input_layernorm.weight.fill_(1)
        layer.post_attention_layernorm.weight.fill_(1)
    enters(model.lm_head, model.model.norm.weight)
    model.model.norm.weight.fill_(1)
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.double() @ turn)
    return model


def linear_names(model: nn.Module) -> list[str]:
    """The linears that are quantized: all but the output projection."""
    return [name for name, child in model.named_modules() if isinstance(child, nn.Linear) and name != "lm_head"]


def fewest_values(model: nn.Module, block: int = 32) -> dict[str, float]:
    """How many values the blocks along K of quantized weights hold: the mean, and the share with 16 or fewer.

    A Q4 file gives at most 16, dense fp32 nearly `block`.
    """
    counts = []
    for name in linear_names(model):
        ordered = model.get_parameter(f"{name}.weight").detach().reshape(-1, block).sort(dim=1).values
        counts.append((ordered.diff(dim=1) != 0).sum(1) + 1)
    every = torch.cat(counts).double()
    few = (every <= 16).double().mean().item()
    return {"mean": round(every.mean().item(), 3), "share_with_16_or_fewer": round(few, 5)}


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters; it tells whether two runs judged the same model."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
