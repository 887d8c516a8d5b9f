"""vLLM in a process of its own, under another Python: answers what tests/engines/engine.py asks.

    .venv-engines/bin/python -m tests.engines.vllm_process ADDRESS

A request is the name of a function here and its arguments, an answer is what it returned, or its error as text. One
engine is loaded at a time. Nothing of vLLM is replaced: kernels, the engine's end of a weight update and functions over
its model go through the registries and calls that it offers.
"""

from __future__ import annotations

import dataclasses
import gc
import os
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
from safetensors import safe_open
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.kernels.linear import (
    EmulationMxfp8LinearKernel,
    EmulationNvFp4LinearKernel,
    register_linear_kernel,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name
from vllm.platforms import PlatformEnum

from dcp_adapters import SharedMemoryReceiver, WeightStream, apply_deltas, delta_from_bytes, import_hf
from tests.engines.messages import from_bytes, to_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

_loaded: list[LLM] = []


def pack_head(model: nn.Module) -> None:
    """On CPUs with AVX512 vLLM multiplies by a packed copy of a tied head, which no reload makes anew.

    Under some quantizations the copy is all that the head keeps; the embedding has the weight.
    """
    head: Any = model.get_submodule("lm_head")
    head.weight = model.get_submodule("model.embed_tokens").weight
    head.quant_method.process_weights_after_loading(head)


@dataclasses.dataclass
class Address(WeightTransferInitInfo):
    """Where the trainer listens."""

    address: str


class SharedMemoryTransfer(WeightTransferEngine[Address, WeightTransferUpdateInfo]):
    """The engine's end of a `SharedMemorySender`, as vLLM's worker calls it."""

    init_info_cls = Address
    update_info_cls = WeightTransferUpdateInfo

    def init_transfer_engine(self, init_info: Address) -> None:
        self.receiver = SharedMemoryReceiver(init_info.address, timeout=120, patience=240)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base's waits for a GPU afterwards, too."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        """vLLM keeps tensors until it has all of a layer, and views of a bucket end with the next one: hence copies."""
        with self.receiver.receive() as version:
            for bucket in version:
                self.model.load_weights([(name, tensor.clone()) for name, tensor in bucket.items()])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_head(self.model)

    def shutdown(self) -> None:
        receiver = getattr(self, "receiver", None)
        if receiver is not None:
            receiver.close()


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
            weight_transfer_config={"backend": "shared_memory"},
            **{**small, **options},
        )
    )


def unload() -> None:
    """What an engine that could not be loaded leaves behind goes, too."""
    _loaded.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


def generate(prompt: list[int], tokens: int, *, logits: bool = True) -> dict[str, Any]:
    """Greedy tokens; logits of the prompt's positions but the last, fp32 [len(prompt) - 1, vocabulary]."""
    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=-1 if logits else None,
    )
    (out,) = _loaded[0].generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    rows = [[found[token].logprob for token in sorted(found)] for found in (out.prompt_logprobs or [])[1:] if found]
    return {"tokens": list(out.outputs[0].token_ids), "logits": torch.tensor(rows)}


def weights() -> dict[str, Tensor]:
    """Everything that the engine's model holds, under the engine's names."""

    def copies(model: nn.Module) -> dict[str, Tensor]:
        held = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in held}

    return _loaded[0].apply_model(copies)[0]


def update(address: str) -> None:
    """Take a version from a trainer, between two requests."""
    llm = _loaded[0]
    llm.init_weight_transfer_engine({"init_info": {"address": address}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {}})
    llm.finish_weight_update()
    llm.shutdown_weight_transfer_engine()


def update_by_delta(base: str, message: bytes) -> None:
    """Bring the weights of `base`, an export that the engine has loaded, to a later version.

    A delta is of the tensors of files, so those are held beside the engine, which reads whole layers alone.
    """
    state = import_hf(base)
    apply_deltas(state, [delta_from_bytes(message)])
    pairs = (pair for bucket in WeightStream(state, config=base) for pair in bucket.items())
    _loaded[0].collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
    _loaded[0].apply_model(pack_head)


def linear(module: str, x: Tensor) -> Tensor:
    """What one of the engine's linears makes of x."""

    def run(model: nn.Module) -> Tensor:
        with torch.inference_mode():
            out = model.get_submodule(module)(x)
        return (out[0] if isinstance(out, tuple) else out).clone()

    return _loaded[0].apply_model(run)[0]


def cache_scales(path: str) -> dict[str, str]:
    """Name in a directory's file -> name in a model of vLLM, of scales of its KV cache."""
    with safe_open(f"{path}/model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.endswith(("k_scale", "v_scale"))]  # noqa: SIM118 - no mapping
    held = {f"{name.rpartition('.self_attn.')[0]}.self_attn.attn.{name[-7:]}" for name in names}
    found = {name: maybe_remap_kv_scale_name(name, dict.fromkeys(held)) for name in names}
    return {name: its for name, its in found.items() if its is not None}


def environment(name: str, value: str) -> None:
    """A switch that vLLM reads when it is used."""
    os.environ[name] = value


def serve(address: str) -> None:
    """Answer until the other side goes."""
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryTransfer)
    offered: dict[str, Callable[..., Any]] = {
        each.__name__: each
        for each in (load, unload, generate, weights, update, update_by_delta, linear, cache_scales, environment)
    }
    with Client(address, "AF_UNIX") as link:
        while True:
            try:
                name, args, options = from_bytes(link.recv_bytes())
            except EOFError:
                return
            try:
                answer = (offered[name](*args, **options), None)
            except Exception as error:
                answer = (None, f"{type(error).__name__}: {error}")
            link.send_bytes(to_bytes(answer))


if __name__ == "__main__":
    serve(sys.argv[1])
