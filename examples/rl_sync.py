"""Reinforcement learning in small: a trainer of two ranks, an engine in a process of its own, weights streamed between.

    python examples/rl_sync.py --recipe nvfp4 --updates 4

    engine     receives a version of the policy, samples from it, and says what it sampled
    trainer    rewards every token that is even, makes a policy-gradient step under FSDP2, and streams the next version

The engine knows nothing of the trainer but the layout of compressed-tensors: it reads the tensors by their names, into
a model of its own. Each round it also tells the logits of a fixed prompt, which are those of the trainer's own forward:
both sides hold the same bytes. The table at the end has what was sent, and how long it took.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters.streams import SharedMemoryReceiver, SharedMemorySender, WeightStream
from fsdp_hooks import sync_scales
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize_
from qtensor import quantized_model_init as quantized_init

RECIPES = {"float8": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
RANKS, VOCABULARY, WIDTH, TOKENS, SEQUENCES = 2, 64, 64, 8, 16
PROMPT = [1, 2, 3]
# What compressed-tensors calls the parts of a weight, and how they are read back.
NAMES = {
    "weight": ("payload", None),
    "weight_packed": ("payload", None),
    "weight_scale": ("scale", None),
    "weight_global_scale": ("global_scale", lambda stored: stored.reciprocal().reshape(())),
}


class Block(nn.Module):
    """x + down(relu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """[.., width] -> [.., width]."""
        changed: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return x + changed


class Policy(nn.Module):
    """A language model that sees the mean of the tokens so far; its blocks' linears are quantized."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [n, length] -> logits bf16 [n, length, vocabulary]."""
        x = self.embed_tokens(tokens)
        x = x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


# -- the engine --------------------------------------------------------------------------------------------------------


def load(model: Policy, tensors: dict[str, Tensor]) -> None:
    """What an engine's `load_weights` does: names of the layout -> its own memory."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            module, _, own = name.rpartition(".")
            weight: Any = model.get_submodule(module).weight if own in NAMES else None
            if isinstance(weight, QuantizedTensor):
                part, read = NAMES[own]
                held = weight.parts()[part]
                held.copy_((tensor if read is None else read(tensor)).view(held.dtype))
            else:
                model.get_parameter(name).copy_(tensor)


def engine(address: str, recipe: str, layers: int) -> None:
    """Serve until the trainer is gone: one line of JSON for every version."""
    model = Policy(layers)
    quantize_(model, RECIPES[recipe], include=["layers.*"])
    with SharedMemoryReceiver(address, timeout=300) as receiver:
        for line in sys.stdin:  # one for each version
            started = time.perf_counter()
            with receiver.receive() as weights:
                for tensors in weights:
                    load(model, tensors)
            seconds = time.perf_counter() - started
            torch.manual_seed(int(line))
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT]))[0, -1].float()
                tokens = torch.tensor([PROMPT] * SEQUENCES)
                for _ in range(TOKENS):
                    chances = model(tokens)[:, -1].float().softmax(-1)
                    tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
            told = {
                "version": receiver.version,
                "tokens": tokens.tolist(),
                "logits": logits.tolist(),
                "seconds": seconds,
            }
            print(json.dumps(told), flush=True)


@contextmanager
def engine_process(address: str, recipe: str, layers: int) -> Iterator["subprocess.Popen[str]"]:
    """An engine that ends with the block."""
    command = [sys.executable, __file__, "--engine", address, "--recipe", recipe, "--layers", str(layers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # it waits for a version that does not come
                process.kill()


# -- the trainer -------------------------------------------------------------------------------------------------------


def policy(recipe: str, layers: int) -> Policy:
    """Dense shards that are gathered quantized, so that any optimizer trains them."""
    torch.manual_seed(0)
    with quantized_init(RECIPES[recipe], storage="high_precision"):
        model = Policy(layers)
    model.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def step(model: Policy, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One policy-gradient step on sampled sequences; the share of even tokens among them."""
    reward = (tokens[:, len(PROMPT) :] % 2 == 0).float().mean(1)  # [n]
    advantage = reward - reward.mean()
    mine = slice(dist.get_rank(), None, RANKS)
    logits = model(tokens[mine, :-1]).float()
    chances = logits.log_softmax(-1).gather(-1, tokens[mine, 1:, None])[:, len(PROMPT) - 1 :, 0]
    loss = -(advantage[mine, None] * chances).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sync_scales(model)
    return float(reward.mean())


def train(rank: int, store: str, address: str, options: argparse.Namespace) -> None:
    """One rank: stream a version, get samples of it, learn from them."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = policy(options.recipe, options.layers)
    sync_scales(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = WeightStream(model, config={"model_type": "tiny"}, bucket_bytes=options.bucket_bytes)
    dense = 2 * sum(param.numel() for param in model.parameters())
    rows: list[dict[str, Any]] = []
    with ExitStack() as opened:
        sender = process = None
        if rank == 0:
            sender = opened.enter_context(SharedMemorySender(address, timeout=300))
            process = opened.enter_context(engine_process(address, options.recipe, options.layers))
        for update in range(options.updates):
            if process is not None:
                print(update, file=process.stdin, flush=True)
            started = time.perf_counter()
            stream.send(sender)
            seconds = time.perf_counter() - started
            said = [json.loads(process.stdout.readline())] if process is not None and process.stdout else [{}]
            dist.broadcast_object_list(said, src=0)
            answer = said[0]
            assert answer["version"] == stream.version == update + 1
            with torch.no_grad():
                own = model(torch.tensor([PROMPT]))[0, -1].float()
            apart = float((own - torch.tensor(answer["logits"])).abs().max())
            reward = step(model, optimizer, torch.tensor(answer["tokens"]))
            rows.append({"version": stream.version, "seconds": seconds, "reward": reward, "apart": apart})
    if rank == 0:
        report(options, rows, stream.nbytes, dense, len(stream.sizes))
    dist.destroy_process_group()


def report(options: argparse.Namespace, rows: list[dict[str, Any]], nbytes: int, dense: int, buckets: int) -> None:
    """The table, and a file of the same figures."""
    table = Table(
        title=f"{options.recipe}: {nbytes:,} bytes a version in {buckets} buckets, {nbytes / dense:.2f} of bf16"
    )
    for column in ("version", "seconds", "reward", "largest difference of logits"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row["version"]), f"{row['seconds']:.3f}", f"{row['reward']:.3f}", f"{row['apart']:g}")
    Console().print(table)
    if options.out is not None:
        options.out.write_text(
            json.dumps({"nbytes": nbytes, "bf16": dense, "buckets": buckets, "rows": rows}, indent=2)
        )


def main() -> None:
    """Start the ranks, or be the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket-bytes", type=int, default=64 * 1024)
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--engine", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.engine:
        engine(options.engine, options.recipe, options.layers)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", f"{folder}/weights", options)
        multiprocessing.start_processes(train, arguments, nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
