"""vLLM in a process of its own, under another Python: answers what tests/engines/engine.py asks.

    .venv-engines/bin/python -m tests.engines.vllm_process ADDRESS

A request is the name of a function here and its arguments, an answer is what it returned, or its error as text. One
engine is loaded at a time. Nothing of vLLM is replaced: kernels, the engine's end of a weight update and functions over
its model go through the registries and calls that it offers.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

# Before vLLM is imported: in this process, offline, without a word of what is used.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels.linear import (
    EmulationMxfp8LinearKernel,
    EmulationNvFp4LinearKernel,
    register_linear_kernel,
)
from vllm.platforms import PlatformEnum

if TYPE_CHECKING:
    from torch import Tensor, nn

_loaded: list[LLM] = []


def load(path: str, **options: Any) -> None:
    """An engine for a directory; the one before it goes."""
    unload()
    small = {"max_model_len": 128, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**25}
    _loaded.append(
        LLM(
            path,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            logprobs_mode="raw_logits",
            max_logprobs=-1,
            seed=0,
            **{**small, **options},
        )
    )


def unload() -> None:
    """What an engine that could not be loaded leaves behind goes, too."""
    _loaded.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


def generate(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Greedy tokens; logits of the prompt's positions, but for the first, fp32 [len(prompt) - 1, vocabulary]."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, prompt_logprobs=-1 if tokens < 16 else None
    )
    (out,) = _loaded[0].generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    logits = [[found[token].logprob for token in sorted(found)] for found in (out.prompt_logprobs or [])[1:] if found]
    return {"tokens": list(out.outputs[0].token_ids), "logits": torch.tensor(logits)}


def weights() -> dict[str, Tensor]:
    """Everything that the engine's model holds, under the engine's names."""

    def copies(model: nn.Module) -> dict[str, Tensor]:
        held = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in held}

    return _loaded[0].apply_model(copies)[0]


def linear(module: str, x: Tensor) -> Tensor:
    """What one of the engine's linears makes of x."""

    def run(model: nn.Module) -> Tensor:
        with torch.inference_mode():
            out = model.get_submodule(module)(x)
        return (out[0] if isinstance(out, tuple) else out).clone()

    return _loaded[0].apply_model(run)[0]


def environment(name: str, value: str) -> None:
    """A switch that vLLM reads when it is used."""
    os.environ[name] = value


def serve(address: str) -> None:
    """Answer until the other side goes."""
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    offered: dict[str, Callable[..., Any]] = {
        each.__name__: each for each in (load, unload, generate, weights, linear, environment)
    }
    with Client(address, "AF_UNIX") as link:
        while True:
            try:
                name, args, options = pickle.loads(link.recv_bytes())
            except EOFError:
                return
            try:
                answer = (offered[name](*args, **options), None)
            except Exception as error:
                answer = (None, f"{type(error).__name__}: {error}")
            link.send_bytes(pickle.dumps(answer))  # `send` would share tensors' memory, which needs more than a link


if __name__ == "__main__":
    serve(sys.argv[1])
