"""Hugging Face directories for the tests, written by hand or by a layout's tables, and models that fit them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KINDS, SHAPE, Linears, Scheme
from dcp_adapters.hf.layouts.registry import layout_named
from qtensor import quantize, quantize_
from tests.dcp_adapters.cases import values

ROWS = {"q_proj": 64, "k_proj": 32, "o_proj": 96}  # two of three ranks get more rows than the last
K = 64
Tensors = dict[str, Tensor]


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    files: int = 1,
    notes: Mapping[str, str] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Path:
    """A directory with these tensors, in as many files, with config.json and hf_quant_config.json (`quantization`)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config or {})))
    if quantization is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(dict(quantization)))
    held = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if files == 1:
        save_file(held, path / "model.safetensors", metadata=dict(notes or {}) or None)
        return path
    assigned: dict[str, str] = {}
    for number in range(files):
        names = sorted(held)[number::files]
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file({name: held[name] for name in names}, path / file, metadata=dict(notes or {}) or None)
        assigned |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": assigned}))
    return path


def linear_names(layers: int = 2) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{own}" for layer in range(layers) for own in ROWS]


def dense_tensors(layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A little transformer's tensors: an embedding, linears, norms, a head."""
    tensors = {"model.embed_tokens.weight": values((19, K), 500, dtype)}
    for number, module in enumerate(linear_names(layers)):
        tensors[f"{module}.weight"] = values((ROWS[module.rpartition(".")[2]], K), number, dtype)
    for layer in range(layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = values((K,), 600 + layer, dtype)
    return tensors | {"model.norm.weight": values((K,), 700, dtype), "lm_head.weight": values((19, K), 800, dtype)}


def stored_as(layout: str, schemes: Mapping[str, Scheme], weights: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """File tensors and JSON of quantized linears, by a layout's tables; `weights` are quantized tensors by module."""
    its = layout_named(layout)
    tensors: Tensors = {}
    for number, (module, scheme) in enumerate(schemes.items()):
        shape = torch.tensor(weights[module].shape)
        parts = {**weights[module].parts(), INPUT_SCALE: torch.tensor(0.5**number), SHAPE: shape}
        for stored in its.entry(scheme, module).stored:
            tensors[stored.of(module)] = stored.form.write(parts[stored.part])
    linears = Linears(schemes, ["lm_head"], kv_cache=None, producer={"name": "test", "version": "0"})
    return tensors, its.json(linears)


def quantized_directory(
    path: Path, layout: str, schemes: Mapping[str, Scheme], *, recipes: Mapping[str, Any] | None = None, files: int = 1
) -> tuple[Path, dict[str, Tensor]]:
    """A directory in which these modules of `dense_tensors` are quantized; and what it holds, as a state dict."""
    state: dict[str, Tensor] = dense_tensors()
    weights = {
        module: quantize(state[f"{module}.weight"], (recipes or {}).get(module, KINDS[scheme.kind]))
        for module, scheme in schemes.items()
    }
    tensors, files_of_json = stored_as(layout, schemes, weights)
    state |= {f"{module}.weight": weight for module, weight in weights.items()}
    dense = {name: tensor for name, tensor in state.items() if name.removesuffix(".weight") not in weights}
    notes = None
    if recipes:
        notes = {"qtensor.recipes": json.dumps({f"{name}.weight": each.to_json() for name, each in recipes.items()})}
    config = {"quantization_config": files_of_json["config.json"]}
    write(
        path, dense | tensors, config, files=files, notes=notes, quantization=files_of_json.get("hf_quant_config.json")
    )
    for number, (module, scheme) in enumerate(schemes.items()):
        if scheme.inputs == "static":
            state[f"{module}.input_scale"] = torch.tensor(0.5**number)
    return path, state


class Bare(nn.Module):
    """Holds one parameter, `weight`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))


def model_like(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16, device: Any = "meta") -> Any:
    """A tree of modules with these weights; linears but for the embedding and what has one dim."""
    root = nn.Module()
    with torch.device(device):
        for name, shape in shapes.items():
            *path, last, own = name.split(".")
            module = root
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.ModuleList() if step == "layers" else nn.Module())
                module = getattr(module, step)
            if own != "weight":
                holder = getattr(module, last, None) or nn.Module()
                holder.register_parameter(own, nn.Parameter(torch.zeros(shape, dtype=dtype)))
                setattr(module, last, holder)
            elif len(shape) == 2 and "embed" not in last:
                setattr(module, last, nn.Linear(shape[1], shape[0], bias=False, dtype=dtype))
            else:
                setattr(module, last, Bare(shape, dtype))
    return root


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if not name.endswith("_scale")}


def meta_model(state: Mapping[str, Tensor], recipes: Mapping[str, Any], **options: Any) -> Any:
    """A model like a state dict, with these modules quantized under their recipes."""
    net = model_like(shapes_of(state), **options)
    for recipe in dict.fromkeys(recipes.values()):
        quantize_(net, recipe, include=[name for name, its in recipes.items() if its == recipe])
    return net


def sharded(net: Any, mesh: Any = None) -> Any:
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def linears_of(state: Mapping[str, Tensor]) -> Iterable[str]:
    return [name.removesuffix(".weight") for name in state if "_proj.weight" in name]
