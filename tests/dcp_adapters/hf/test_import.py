"""import_hf into models: on the meta device, sharded in every way, quantized or dense, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_adapters.hf.reading.reader
from dcp_adapters import export_hf, import_hf
from dcp_adapters.hf.layouts.layout import KINDS, Scheme
from dcp_adapters.hf.reading.reader import OpenFiles
from dcp_adapters.records.expand import quantized_local
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    high_precision_init_val,
    quantize,
    quantize_,
    quantized_model_init,
)
from tests.dcp_adapters.cases import EVERY, RECIPES, assert_holds, bits, held, local_of, values
from tests.dcp_adapters.hf.directories import (
    K,
    dense_tensors,
    linear_names,
    linears_of,
    meta_model,
    model_like,
    quantized_directory,
    shapes_of,
    sharded,
    stored_as,
    write,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled

MIXED = {
    name: scheme
    for layer, schemes in enumerate(
        [
            (Scheme("fp8_row", "static"), Scheme("mxfp8", "dynamic"), Scheme("nvfp4", "static")),
            (Scheme("fp8_tensor", "dynamic"), Scheme("fp8_tensor", "static"), Scheme("nvfp4", "none")),
        ]
    )
    for name, scheme in zip(linear_names()[3 * layer : 3 * layer + 3], schemes, strict=True)
}
PACKED = {
    name: Scheme(kind, "none")
    for name, kind in zip(linear_names(), ["int4_64", "mxfp4", "int4_32", "mxfp4", "int4_64", "mxfp4"], strict=True)
}
PACKED_RECIPES = {name: KINDS[scheme.kind] for name, scheme in PACKED.items()}
MIXED_RECIPES = {name: KINDS[scheme.kind] for name, scheme in MIXED.items()}
Q0 = "model.layers.0.self_attn.q_proj"


def mixed(path: Path, *, files: int = 2) -> tuple[Path, dict[str, Tensor]]:
    return quantized_directory(path, "compressed-tensors", MIXED, files=files)


def quantized_reference(state: dict[str, Tensor], recipes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: quantize(value, recipes[name.removesuffix(".weight")])
        if name.removesuffix(".weight") in recipes
        else value
        for name, value in state.items()
    }


# -- in one process ----------------------------------------------------------------------------------------------------


def test_a_model_on_meta_gets_memory_and_the_bytes(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    net = meta_model(state, MIXED_RECIPES)
    params = {name: id(param) for name, param in net.named_parameters()}
    found = import_hf(path, net)
    assert_holds(found, state)
    assert {name: id(param) for name, param in net.named_parameters()} == params
    assert_holds(dict(net.named_parameters()), {name: value for name, value in state.items() if "_scale" not in name})
    assert not any(param.is_meta for param in net.parameters())


def test_what_has_memory_keeps_it(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    net = meta_model(state, MIXED_RECIPES, device="cpu")
    pointers = {name: tensor.data_ptr() for name, tensor in parts_of(net)}
    import_hf(path, net)
    assert {name: tensor.data_ptr() for name, tensor in parts_of(net)} == pointers
    assert_holds(net.state_dict(), {name: value for name, value in state.items() if "_scale" not in name})


def parts_of(net: nn.Module) -> list[tuple[str, Tensor]]:
    found = []
    for name, param in net.named_parameters():
        q = quantized_local(param)
        parts = {"": local_of(param.detach())} if q is None else q.parts()
        found += [(f"{name}.{part}", tensor) for part, tensor in parts.items()]
    return found


def test_half_a_model_on_meta(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    net = meta_model(state, MIXED_RECIPES)
    net.model.layers[0].to_empty(device="cpu")
    pointers = {name: tensor.data_ptr() for name, tensor in parts_of(net.model.layers[0])}
    assert_holds(import_hf(path, net), state)
    assert {name: tensor.data_ptr() for name, tensor in parts_of(net.model.layers[0])} == pointers


def test_the_device_of_the_caller_is_taken(tmp_path: Path) -> None:
    """On a machine without another device: the meta device, where nothing can be loaded into, stands for it."""
    path, state = mixed(tmp_path)
    net = meta_model(state, MIXED_RECIPES)
    import_hf(path, net, device=torch.device("cpu"))
    assert net.lm_head.weight.device == torch.device("cpu")
    assert import_hf(path, device="cpu")["lm_head.weight"].device == torch.device("cpu")


@pytest.mark.parametrize("name", RECIPES)
def test_dense_files_are_quantized_while_they_are_read(name: str, tmp_path: Path) -> None:
    state, recipe = dense_tensors(), RECIPES[name]
    recipes = dict.fromkeys(linear_names(), recipe)
    net = meta_model(state, recipes)
    found = import_hf(write(tmp_path, state, files=2), net)
    assert_holds(found, quantized_reference(state, recipes))


def test_a_delayed_parameter_takes_a_dense_file(tmp_path: Path) -> None:
    state, recipes = dense_tensors(), dict.fromkeys(linear_names(), Float8DelayedScaling(amax_history_len=4))
    assert_holds(import_hf(write(tmp_path, state), meta_model(state, recipes)), quantized_reference(state, recipes))


def test_a_delayed_parameter_goes_on_under_the_imported_scale(tmp_path: Path) -> None:
    schemes = dict.fromkeys(linear_names(), Scheme("fp8_tensor", "dynamic"))
    path, state = quantized_directory(tmp_path, "compressed-tensors", schemes)
    recipe = Float8DelayedScaling(amax_history_len=4)
    net = meta_model(state, dict.fromkeys(schemes, recipe))
    import_hf(path, net)
    weight: Any = net.get_parameter(f"{Q0}.weight").detach()
    want: Any = state[f"{Q0}.weight"]
    assert weight.recipe == recipe
    assert bits(weight.payload) == bits(want.payload)
    assert torch.equal(weight.scale, want.scale)
    MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.0).step()
    assert torch.equal(weight.scale, want.scale)
    assert bits(weight.payload) == bits(want.payload)


def test_preserved_initial_values_are_those_of_a_dense_file(tmp_path: Path) -> None:
    state = dense_tensors()
    with torch.device("meta"), quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        linear = nn.Linear(K, 64, bias=False, dtype=torch.bfloat16)
    net = nn.Module()
    net.l = linear
    import_hf(write(tmp_path, {"l.weight": state[f"{Q0}.weight"]}), net)
    kept = high_precision_init_val(net.l.weight)
    assert kept is not None
    assert torch.equal(kept, state[f"{Q0}.weight"])


def test_a_dense_shard_that_gathers_quantized_takes_a_dense_file(tmp_path: Path) -> None:
    with torch.device("meta"), quantized_model_init(MXFP8BlockScaling(), storage="high_precision"):
        net = nn.Sequential(nn.Linear(K, 64, bias=False, dtype=torch.bfloat16))
    weight = values((64, K), 1)
    import_hf(write(tmp_path, {"0.weight": weight}), net)
    assert torch.equal(net[0].weight.dense, weight)


def test_a_model_of_another_dtype_gets_the_same_bytes(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    net = meta_model(state, MIXED_RECIPES, dtype=torch.float32)
    found = import_hf(path, net)
    assert found["lm_head.weight"].dtype == torch.float32
    assert torch.equal(found["lm_head.weight"], state["lm_head.weight"].float())
    weight: Any = found[f"{Q0}.weight"]
    assert weight.dtype == torch.float32
    assert bits(weight.payload) == bits(state[f"{Q0}.weight"].payload)  # type: ignore[attr-defined]


# -- tied weights, buffers, names --------------------------------------------------------------------------------------


def tied(net: Any) -> Any:
    net.lm_head.weight = net.model.embed_tokens.weight
    return net


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tie_stays_whichever_name_the_directory_has(kept: str, device: str, tmp_path: Path) -> None:
    state = dense_tensors()
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    pair = {"model.embed_tokens.weight", "lm_head.weight"}
    on_disk = {name: value for name, value in state.items() if kept in {name, "both"} or name not in pair}
    net = tied(model_like(shapes_of(state), device=device))
    found = import_hf(write(tmp_path, on_disk), net)
    assert net.lm_head.weight is net.model.embed_tokens.weight
    assert_holds(found, state)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(), Float8DelayedScaling(amax_history_len=2)])
def test_quantized_linears_that_share_a_weight_are_exported_and_imported(recipe: Any, tmp_path: Path) -> None:
    """Both names are in the files; a directory in which they differ by a bit is refused."""

    def two(seed: int) -> nn.Module:
        with quantized_model_init(recipe):
            net = nn.Sequential(*(nn.Linear(K, K, bias=False, dtype=torch.bfloat16) for _ in range(2)))
            net[1].weight = net[0].weight
        with torch.no_grad():
            net[0].weight.copy_(values((K, K), seed))
        return net

    saved, net = two(1), two(2)
    export_hf(saved, tmp_path / "out", config={}, progress=False)
    import_hf(tmp_path / "out", net, progress=False)
    assert net[1].weight is net[0].weight
    assert bits(net[0].weight.payload) == bits(saved[0].weight.payload)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    key = max((key for key in tensors if key.startswith("1.")), key=lambda key: tensors[key].nbytes)
    tensors[key].view(torch.uint8)[5, 7] ^= 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"1\.weight: the model ties it to 0\.weight, and the directory has other"):
        import_hf(tmp_path / "out", net, progress=False)


def test_a_tie_that_the_directory_does_not_have_is_refused(tmp_path: Path) -> None:
    state = dense_tensors()
    net = tied(model_like(shapes_of(state)))
    with pytest.raises(
        ValueError, match=r"ties it to (model\.embed_tokens|lm_head)\.weight, and the directory has other"
    ):
        import_hf(write(tmp_path, state), net)
    assert net.lm_head.weight.is_meta


def test_persistent_buffers_come_from_the_directory(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.BatchNorm1d(4))
    saved = {
        "0.weight": values((4,), 1, torch.float32), "0.bias": values((4,), 2, torch.float32),
        "0.running_mean": values((4,), 3, torch.float32), "0.running_var": values((4,), 4, torch.float32).abs(),
        "0.num_batches_tracked": torch.tensor(7),
    }  # fmt: skip
    assert_holds(import_hf(write(tmp_path, saved), net), saved)
    assert net[0].running_mean.device == torch.device("cpu")
    with torch.device("meta"):
        other = nn.Sequential(nn.BatchNorm1d(4))
    del saved["0.running_mean"]
    with pytest.raises(ValueError, match="running_mean: only the model has it"):
        import_hf(write(tmp_path, saved), other)
    assert other[0].weight.is_meta


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


def test_buffers_that_no_file_has_are_refused_on_the_meta_device(tmp_path: Path) -> None:
    state = dense_tensors()
    net = model_like(shapes_of(state))
    with torch.device("meta"):
        net.model.rotary_emb = Rotary()
    write(tmp_path, state | {"model.rotary_emb.inv_freq": torch.arange(4.0)})
    with pytest.raises(
        ValueError, match=r"model\.rotary_emb\.inv_freq: a buffer on the meta device that is in no state"
    ) as caught:
        import_hf(tmp_path, net)
    assert "type(model.rotary_emb)(config=model.config)" in str(caught.value)
    assert net.lm_head.weight.is_meta
    net.model.rotary_emb = Rotary()
    assert_holds(import_hf(tmp_path, net), state)  # what old files hold of it is left alone


def test_names_that_one_side_has_are_listed_together_and_nothing_is_touched(tmp_path: Path) -> None:
    state = dense_tensors()
    net = model_like(shapes_of(state) | {"model.extra.weight": (4, 4)})
    on_disk = {name: value for name, value in state.items() if name != "model.norm.weight"}
    on_disk |= {"model.other.weight": values((4, 4), 1), "lm_head.weight": values((20, K), 1)}
    with pytest.raises(ValueError, match="does not fit the model; nothing has been loaded") as caught:
        import_hf(write(tmp_path, on_disk), net)
    assert str(caught.value).splitlines()[1:] == [
        "  lm_head.weight: the checkpoint holds shape (20, 64), the target has (19, 64)",
        "  model.extra.weight: only the model has it",
        "  model.norm.weight: only the model has it",
        "  model.other.weight: only the directory has it; the model has no such tensor",
    ]
    assert all(param.is_meta for param in net.parameters())
    net = model_like({f"layers.{number}.weight": (4, 4) for number in range(60)})
    with pytest.raises(ValueError, match=r"and \d+ more"):
        import_hf(tmp_path, net)


# -- recipes that are not the parameter's ------------------------------------------------------------------------------


def test_another_recipe_raises_or_is_converted(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    recipes = dict.fromkeys(MIXED, MXFP8BlockScaling())
    net = meta_model(state, recipes, device="cpu")
    before = held(net.state_dict())
    with pytest.raises(ValueError, match="nothing has been loaded") as caught:
        import_hf(path, net)
    assert (
        f"{Q0}.weight: the directory holds {KINDS['fp8_row']!r}, the parameter is {MXFP8BlockScaling()!r}; build the "
        'model with the directory\'s recipe, or import with on_mismatch="convert"'
    ) in str(caught.value)
    assert "k_proj" not in str(caught.value).replace("layers.1.self_attn.k_proj", "")  # that one is MXFP8
    assert held(net.state_dict()) == before
    found = import_hf(path, net, on_mismatch="convert")
    for name in linears_of(state):
        own: Any = found[f"{name}.weight"]
        other: Any = quantize(torch.zeros(own.shape, dtype=torch.bfloat16), MXFP8BlockScaling())
        assert_holds({"w": own}, {"w": other.copy_(state[f"{name}.weight"])})


def test_quantized_files_become_dense_only_when_asked_to(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    net = model_like(shapes_of(state))
    with pytest.raises(ValueError, match=r"the parameter is dense; build the model with the directory's recipe"):
        import_hf(path, net)
    assert net.lm_head.weight.is_meta
    found = import_hf(path, net, on_mismatch="convert")
    weights: dict[str, Any] = state
    for name in linears_of(state):
        assert torch.equal(found[f"{name}.weight"], weights[f"{name}.weight"].dequantize())
    with pytest.raises(ValueError, match='on_mismatch=\'no\' is not one of "raise", "convert"'):
        import_hf(path, net, on_mismatch="no")


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(blocks="square"), Float8CurrentScaling(power_of_two=True)])
def test_a_recorded_recipe_fits_its_parameter_and_no_other(recipe: Any, tmp_path: Path) -> None:
    kind = "nvfp4" if isinstance(recipe, NVFP4BlockScaling) else "fp8_row"
    scheme = Scheme(kind, "static")
    path, state = quantized_directory(tmp_path, "compressed-tensors", {Q0: scheme}, recipes={Q0: recipe})
    assert_holds(import_hf(path, meta_model(state, {Q0: recipe})), state)
    with pytest.raises(ValueError, match=f"the directory holds {type(recipe).__name__}"):
        import_hf(path, meta_model(state, {Q0: KINDS[kind]}))


def test_a_compiled_model_is_filled_under_the_names_of_the_plain_one(tmp_path: Path) -> None:
    state = {f"{place}.weight": values((8, 64), place) for place in range(2)}
    write(tmp_path, state)
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(64, 8, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    quantize_(net, MXFP8BlockScaling(), include=["1"])
    net[1] = torch.compile(net[1])
    found = import_hf(tmp_path, net)
    assert list(found) == list(state)
    assert torch.equal(net[0].weight, state["0.weight"])
    assert torch.equal(net[1].weight.dequantize(), quantize(state["1.weight"], MXFP8BlockScaling()).dequantize())


def test_a_buffer_of_integers_is_not_taken_for_codes(tmp_path: Path) -> None:
    net = nn.Module()
    net.register_buffer("table", torch.zeros(4, 4, dtype=torch.uint8))
    table = torch.arange(16, dtype=torch.uint8).view(4, 4)
    write(tmp_path, {"table": table})
    assert_holds(import_hf(tmp_path, net), {"table": table})
    with pytest.raises(ValueError, match=r"table U8 \[4, 4\]: it is quantized"):
        import_hf(tmp_path)


# -- experts -----------------------------------------------------------------------------------------------------------

EXPERTS, INNER = 4, 64


class Experts(nn.Module):
    """Weights of all experts, as recent transformers keep them."""

    def __init__(self, recipe: Any = None) -> None:
        super().__init__()
        for name, shape in (("gate_up_proj", (EXPERTS, 2 * INNER, K)), ("down_proj", (EXPERTS, K, INNER))):
            weight: Any = torch.zeros(shape, dtype=torch.bfloat16)
            setattr(self, name, nn.Parameter(weight if recipe is None else quantize(weight, recipe)))


def with_experts(recipe: Any = None) -> Any:
    net = nn.Module()
    net.mlp = nn.Module()
    net.mlp.experts = Experts(recipe)
    return net


def expert_weights() -> dict[str, Tensor]:
    return {
        "mlp.experts.gate_up_proj": values((EXPERTS, 2 * INNER, K), 1),
        "mlp.experts.down_proj": values((EXPERTS, K, INNER), 2),
    }


def dense_experts() -> dict[str, Tensor]:
    weights, tensors = expert_weights(), {}
    for e in range(EXPERTS):
        gate_up = weights["mlp.experts.gate_up_proj"][e]
        tensors[f"mlp.experts.{e}.gate_proj.weight"], tensors[f"mlp.experts.{e}.up_proj.weight"] = gate_up.chunk(2)
        tensors[f"mlp.experts.{e}.down_proj.weight"] = weights["mlp.experts.down_proj"][e]
    return tensors


def quantized_experts(path: Path, scheme: Scheme) -> tuple[Path, dict[str, Any]]:
    """A linear an expert, cut out of weights that were quantized whole, so that they share what is tensor-wide."""
    whole: dict[str, Any] = {name: quantize(value, KINDS[scheme.kind]) for name, value in expert_weights().items()}
    linears: dict[str, Any] = {}
    for name, q in whole.items():
        halves = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
        rows = q.shape[1] // len(halves)
        for e in range(EXPERTS):
            for number, half in enumerate(halves):
                parts = {
                    part: tensor[e, number * rows : (number + 1) * rows] if tensor.ndim else tensor
                    for part, tensor in q.parts().items()
                }
                linears[f"mlp.experts.{e}.{half}"] = type(q).from_parts(parts, q.recipe, q.dtype)
    tensors, files = stored_as("compressed-tensors", dict.fromkeys(linears, scheme), linears)
    return write(path, tensors, {"quantization_config": files["config.json"]}, files=3), whole


def _experts(case: tuple[str, str, Any]) -> None:
    path, kind, full = case
    net = with_experts(None if kind == "dense" else KINDS[kind])
    if dist.is_initialized():
        fully_shard(net)
    assert_holds(import_hf(path, net), full)


@pytest.mark.parametrize("kind", ["dense", "fp8_row", "fp8_tensor", "mxfp8", "nvfp4", "mxfp4", "int4_32"])
def test_linears_of_experts_fill_the_weight_of_all(kind: str, tmp_path: Path) -> None:
    if kind == "dense":
        path, full = write(tmp_path, dense_experts()), expert_weights()
    else:
        inputs = "none" if kind in ("nvfp4", "mxfp4", "int4_32") else "dynamic"
        path, full = quantized_experts(tmp_path, Scheme(kind, inputs))  # type: ignore[arg-type]
    _experts((str(path), kind, full))
    for ranks in (2, 3):
        run_ranks(ranks, _experts, (str(path), kind, full))


def test_dense_linears_of_experts_are_quantized_as_the_weight_of_all(tmp_path: Path) -> None:
    recipe = Float8CurrentScaling(granularity="tensor")
    found = import_hf(write(tmp_path, dense_experts()), with_experts(recipe))
    assert_holds(found, {name: quantize(value, recipe) for name, value in expert_weights().items()})


# -- sharded -----------------------------------------------------------------------------------------------------------


def _imports(case: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    path, recipes, full = case
    net = sharded(meta_model(full, recipes))
    found = import_hf(path, net)
    assert_holds(found, full)
    assert_holds(net.state_dict(), {name: value for name, value in full.items() if "_scale" not in name})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_hold_the_bytes_of_the_directory(ranks: int, tmp_path: Path) -> None:
    cases = []
    path, state = mixed(tmp_path / "mixed")
    cases.append((str(path), MIXED_RECIPES, state))
    path, state = quantized_directory(tmp_path / "packed", "compressed-tensors", PACKED, files=2)
    cases.append((str(path), PACKED_RECIPES, state))
    schemes = dict.fromkeys(linear_names(), Scheme("nvfp4", "static"))
    path, state = quantized_directory(tmp_path / "modelopt", "modelopt", schemes, files=3)
    cases.append((str(path), dict.fromkeys(schemes, KINDS["nvfp4"]), state))
    run_ranks_each(ranks, cases, _imports)


@sampled("ranks", [2, 3], [3])
def test_dense_files_are_quantized_as_the_full_tensor_is(ranks: int, tmp_path: Path) -> None:
    state = dense_tensors()
    path = write(tmp_path, state, files=2)
    cases = []
    for recipe in EVERY.values():
        recipes = dict.fromkeys(linear_names(), recipe)
        cases.append((str(path), recipes, quantized_reference(state, recipes)))
    run_ranks_each(ranks, cases, _imports)


def _as_alone(path: str, shapes: dict[str, Any], recipes: dict[str, Any], on_mismatch: str) -> None:
    """Shards hold what one process gets for the whole model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        full = import_hf(path, meta_model(shapes, recipes), on_mismatch=on_mismatch)
    assert_holds(import_hf(path, sharded(meta_model(shapes, recipes)), on_mismatch=on_mismatch), full)


def test_shards_that_are_converted_or_delayed_hold_what_one_process_gets(tmp_path: Path) -> None:
    path, state = mixed(tmp_path / "mixed")
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in state.items()}
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling(granularity="tensor"), NVFP4BlockScaling()):
        run_ranks(3, _as_alone, str(path), shapes, dict.fromkeys(MIXED, recipe), "convert")
    run_ranks(2, _as_alone, str(path), shapes, {}, "convert")
    schemes = dict.fromkeys(linear_names(), Scheme("fp8_tensor", "static"))
    path, state = quantized_directory(tmp_path / "delayed", "modelopt", schemes)
    run_ranks(
        3, _as_alone, str(path), shapes, dict.fromkeys(schemes, Float8DelayedScaling(amax_history_len=4)), "raise"
    )


def _on_meshes(path: str, full: dict[str, Any], recipes: dict[str, Any]) -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_holds(import_hf(path, sharded(meta_model(full, recipes), hybrid)), full)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = meta_model(full, recipes)
    for layer in net.model.layers:
        plan = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tensor"], plan)
    assert_holds(import_hf(path, sharded(net, mesh["data"])), full)


def test_tensor_parallel_and_hybrid_shards(tmp_path: Path) -> None:
    path, state = mixed(tmp_path / "mixed")
    run_ranks(4, _on_meshes, str(path), state, MIXED_RECIPES)
    path, state = quantized_directory(tmp_path / "packed", "compressed-tensors", PACKED)
    run_ranks(4, _on_meshes, str(path), state, PACKED_RECIPES)


def _reads(path: str, full: dict[str, Any], recipes: dict[str, Any]) -> Counter[str]:
    """Elements that were read of each tensor of the files while shards were loaded."""
    taken: Counter[str] = Counter()
    stock = OpenFiles.piece

    class Counting:
        def __init__(self, piece: Any, name: str) -> None:
            self.piece, self.name = piece, name

        def __getitem__(self, index: Any) -> Tensor:
            found: Tensor = self.piece[index]
            taken[self.name] += found.numel()
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dcp_adapters.hf.reading.reader.OpenFiles,
            "piece",
            lambda self, tensor: Counting(stock(self, tensor), tensor.name),
        )
        import_hf(path, sharded(meta_model(full, recipes)))
    return taken


@pytest.mark.parametrize("schemes", [MIXED, PACKED], ids=["mixed", "packed"])
def test_each_rank_reads_only_its_slices(schemes: dict[str, Scheme], tmp_path: Path) -> None:
    path, state = quantized_directory(tmp_path, "compressed-tensors", schemes, files=2)
    recipes = {name: KINDS[scheme.kind] for name, scheme in schemes.items()}
    reads = run_ranks(3, _reads, str(path), state, recipes)
    tensors = {tensor.name: tensor for tensor in _file_tensors(path)}
    for name, tensor in tensors.items():
        count = torch.Size(tensor.shape).numel()
        if len(tensor.shape) < 2:
            continue
        own = [taken[name] for taken in reads]
        assert sum(own) == count, name
        rows = -(-tensor.shape[0] // 3)
        assert max(own) == rows * tensor.shape[1], name


def _file_tensors(path: Path) -> Any:
    from dcp_adapters.hf.files.directory import read_directory

    return read_directory(path).tensors.values()


def _step(path: str, full: dict[str, Any]) -> None:
    """As a job goes on: a forward that fails for want of memory, the import, a step; a gather has the bytes."""
    net = sharded(meta_model(full, MIXED_RECIPES))
    attention = net.model.layers[0].self_attn
    with pytest.raises(RuntimeError, match="meta device"):
        net.model.layers[0].unshard()
    import_hf(path, net)
    net.model.layers[0].unshard()
    for name in ("q_proj", "k_proj", "o_proj"):
        weight = getattr(attention, name).weight
        assert torch.equal(weight.dequantize(), full[f"model.layers.0.self_attn.{name}.weight"].dequantize())
    assert torch.equal(net.model.layers[0].input_layernorm.weight, full["model.layers.0.input_layernorm.weight"])
    net.model.layers[0].reshard()
    assert_holds(net.state_dict(), {name: value for name, value in full.items() if "_scale" not in name})


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_imported_model_gathers_what_was_imported(ranks: int, tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    run_ranks(ranks, _step, str(path), state)


def _reported(path: str, full: dict[str, Any]) -> tuple[bool, int, int]:
    """Whether a bar would be shown, of how many bytes, and how many were reported to it."""
    seen: list[Any] = []

    @contextmanager
    def bar(stage: str, total: int, *, enabled: bool) -> Iterator[Any]:
        reported: list[int] = []
        yield reported.append
        seen.extend([enabled, total, sum(reported)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_adapters.hf.reading.reader, "progress_bar", bar)
        import_hf(path, sharded(meta_model(full, MIXED_RECIPES)))
    return tuple(seen)  # type: ignore[return-value]


def test_progress_is_in_bytes_and_on_the_first_rank(tmp_path: Path) -> None:
    path, state = mixed(tmp_path)
    first, second = run_ranks(2, _reported, str(path), state)
    assert (first[0], second[0]) == (True, False)
    assert first[1] == first[2]
    whole = sum(tensor.nbytes for q in state.values() for tensor in (getattr(q, "parts", dict)() or {"": q}).values())
    assert whole / 2 <= first[1] < whole * 0.6


def _differing(paths: list[str], full: dict[str, Any], recipes: dict[str, Any]) -> None:
    net = sharded(meta_model(full, recipes))
    try:
        import_hf(paths[dist.get_rank()], net)
    finally:
        assert all(param.is_meta for param in net.parameters())  # nothing was touched


def test_errors_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    path, state = mixed(tmp_path / "whole")
    same = run_ranks_catching(3, _differing, [str(path)] * 3, state, dict.fromkeys(MIXED, KINDS["mxfp8"]))
    assert len(set(same)) == 1
    assert f"{Q0}.weight: the directory holds" in same[0]
    cut, _ = mixed(tmp_path / "cut")
    file = cut / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    told = run_ranks_catching(3, _differing, [str(path), str(cut), str(path)], state, MIXED_RECIPES)
    assert len(set(told)) == 1
    assert "model-00002-of-00002.safetensors: it is damaged or cut off" in told[0]
    lost = run_ranks_catching(2, _differing, [str(path), str(tmp_path / "none")], state, MIXED_RECIPES)
    assert [message.partition(":")[0] for message in lost] == ["FileNotFoundError"] * 2
    assert lost[0] == lost[1]
    assert "rank 1: " in lost[0]


def _fails_late(path: str, full: dict[str, Any]) -> None:
    """A read that fails on one rank while others wait for its amaxes."""
    recipes = dict.fromkeys(linear_names(), Float8CurrentScaling(granularity="tensor"))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(OpenFiles, "piece", _breaks)
        import_hf(path, sharded(meta_model(full, recipes)))


def _breaks(self: Any, tensor: Any) -> Any:
    raise OSError("the disk is gone")


def test_a_read_that_fails_late_is_told_to_all(tmp_path: Path) -> None:
    state = dense_tensors()
    messages = run_ranks_catching(2, _fails_late, str(write(tmp_path, state)), state, timeout=60)
    assert all("CheckpointException" in message and "the disk is gone" in message for message in messages)


def _replicated(path: str, full: dict[str, Any]) -> None:
    assert_holds(import_hf(path, meta_model(full, MIXED_RECIPES)), full)
    alone = import_hf(path)  # each process for itself
    assert_holds(alone, full)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = nn.Module()
    net.weight = nn.Parameter(distribute_tensor(torch.zeros(19, K, dtype=torch.bfloat16), mesh, [Shard(1)]))
    write(Path(path).parent / f"one-{dist.get_rank()}", {"weight": full["lm_head.weight"]})
    found = import_hf(Path(path).parent / f"one-{dist.get_rank()}", net)
    assert isinstance(found["weight"], DTensor)
    assert_holds(found, {"weight": full["lm_head.weight"]})


def test_models_that_are_not_sharded_and_columns(tmp_path: Path) -> None:
    path, state = mixed(tmp_path / "mixed")
    run_ranks(2, _replicated, str(path), state)
