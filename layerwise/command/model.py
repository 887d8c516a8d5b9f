"""A model from its directory: on the meta device, sharded layer by layer, its weights read into the shards alone.

    built        config.json -> the model on the meta device; tables that no file holds are computed
    sharded      FSDP groups, one for each layer, if there are several ranks
    load         the files' tensors, each rank its slices; a directory that is quantized, as the values it stands for

With weights on disk the model stays on the meta device, and `calibrate` reads it layer by layer.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from dcp_adapters import import_hf
from dcp_adapters.hf.models.kept_dtypes import LASTING, LASTING_FP16, lasting_patterns
from fsdp_hooks.lazy_bits import resolve
from layerwise.command.config import ModelKeys
from layerwise.command.yaml_text import ConfigError

MISSING = "models are built by transformers, which is not installed: pip install 'qtensor-fsdp[command]'"
NO_CLASS = (
    "transformers' AutoModelForCausalLM and AutoModelForImageTextToText do not build it, and code in the directory is "
    "never run"
)


def transformers_library() -> Any:
    """Return the module. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ConfigError(MISSING) from None


def built(keys: ModelKeys) -> nn.Module:
    """Build the model on the meta device; buffers that no file holds (rotary tables) are on the CPU, computed.

    Raises:
        ConfigError: no directory of a model that transformers knows; a buffer that nothing computes.
    """
    library = transformers_library()
    if not keys.path.is_dir():
        raise ConfigError(f"model.path: {keys.path}: no such directory")
    if not (keys.path / "config.json").is_file():
        raise ConfigError(f"model.path: {keys.path} has no config.json; expected a Hugging Face directory")
    try:
        config = library.AutoConfig.from_pretrained(keys.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, TypeError, KeyError) as error:
        raise ConfigError(f"model.path: {keys.path / 'config.json'} cannot be used: {error}") from None
    dtype = config.dtype if keys.dtype == "auto" else getattr(torch, keys.dtype)
    if dtype is None:
        raise ConfigError(f"model.dtype: {keys.path / 'config.json'} names none; say one, such as bfloat16")
    # A buffer that is the same after both starts was computed; any other would keep arbitrary memory.
    model, other = (_with_buffers(library, config, dtype, fill) for fill in (0, 1))
    there = dict(other.named_buffers())
    for name, buffer in model.named_buffers():
        if not buffer.is_meta and not torch.equal(_bytes(buffer), _bytes(there[name])):
            raise ConfigError(
                f"model.path: {name} is in no file, and nothing computes it, so the model cannot be built"
            )
    model.eval()
    return model


def _with_buffers(library: Any, config: Any, dtype: torch.dtype, fill: int) -> nn.Module:
    """Build the model on the meta device, with buffers that no file holds as its initialisation leaves them.

    They hold `fill` before it: a value that still depends on `fill` afterwards has not been computed.
    """
    found: list[Any] = []
    errors: list[Exception] = []
    for auto in (library.AutoModelForCausalLM, library.AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                found.append(auto.from_config(config, dtype=dtype))
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            errors.append(error)
    if not found:
        raise ConfigError(f"model.path: {NO_CLASS}: {errors[0]}") from None
    # Some configs are built by both, as different classes: `architectures` names the one whose names the files have.
    model = next((one for one in found if type(one).__name__ in (config.architectures or ())), found[0])
    _keep_in_fp32(model, dtype)
    # Only buffers outside of the state dict: files may hold all others, and the import fills them.
    kept = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta and name not in kept:
            owner, _, attribute = name.rpartition(".")
            new = torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu")
            model.get_submodule(owner)._buffers[attribute] = new
    model.initialize_weights()  # computes nothing on the meta device
    built: nn.Module = model
    return built


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast to fp32 what transformers keeps in it when it loads in this dtype: a router's correction bias, say."""
    attributes = {torch.bfloat16: (LASTING,), torch.float16: (LASTING, LASTING_FP16)}.get(dtype, ())
    # `from_config` builds everything in `dtype`, and the import would round to that; transformers follows these lists
    # only while it loads files.
    patterns = lasting_patterns(model, attributes)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and any(one.search(name) for one in patterns):
            tensor.data = tensor.data.float()  # in place: tied tensors stay tied


def _bytes(tensor: Tensor) -> Tensor:
    # As bytes: a table may hold NaN, which equals nothing.
    return resolve(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


def vocabulary_of(model: Any) -> int:
    """Return how many token ids the model knows."""
    return int(model.config.get_text_config().vocab_size)


def longest_of(model: Any) -> int | None:
    """Return how many tokens a sample may have; None if the config does not say."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def load(model: nn.Module, layers: Sequence[nn.Module], keys: ModelKeys, device: torch.device, *, show: bool) -> None:
    """Shard the model if there are several ranks, and read its weights; weights on disk stay where they are.

    Args:
        model: on the meta device.
        layers: each becomes an FSDP group.
        keys: where the weights are, and where they wait.
        device: where the model computes.
        show: a bar on rank 0.
    """
    if keys.weights_on == "disk":
        _move_buffers(model, device)
        return
    offloaded = keys.weights_on == "cpu" and device.type != "cpu"
    sharded = dist.is_available() and dist.is_initialized()
    if sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = CPUOffloadPolicy() if offloaded else OffloadPolicy()
        for layer in layers:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
    where = torch.device("cpu") if offloaded else None if sharded else device  # None: as the mesh says
    # After `fully_shard`: each rank reads only the slices of its shards, and no rank ever holds the model.
    import_hf(keys.path, model, on_mismatch="convert", device=where, progress=show)
    if not offloaded:
        _move_buffers(model, device)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers that are not on the meta device to where the model computes."""
    for name, buffer in list(model.named_buffers()):
        if not buffer.is_meta and buffer.device != device:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._buffers[attribute] = buffer.to(device)


def directory_files(path: Path) -> list[Path]:
    """Return the files of a directory, without those of directories in it."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
