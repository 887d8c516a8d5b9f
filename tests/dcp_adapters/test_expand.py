"""expand: a quantized leaf becomes the parts that alias it, on the same mesh, cut where the weight is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_adapters import expand
from fsdp_hooks import sync_scales, unsharded
from qtensor import quantize
from tests.dcp_adapters.cases import (
    RECIPES,
    assert_holds,
    bits,
    held,
    load,
    local_of,
    model,
    models,
    placed,
    save,
    sharded,
    values,
)
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled


def weight(name: str, seed: int = 0) -> Any:
    return quantize(values((96, 64), seed), RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_parts_alias_the_weight(name: str) -> None:
    w = weight(name)
    expanded = expand({"w": w})
    assert list(expanded) == [f"w.{part}" for part in w.parts()]
    for part, tensor in w.parts().items():
        found = expanded[f"w.{part}"]
        assert type(found) is torch.Tensor
        assert found.data_ptr() == tensor.data_ptr()
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        found.view(-1).view(torch.uint8).fill_(7)
        assert set(bits(w.parts()[part])) == {7}


def test_nested_dicts_and_lists_expand_to_the_names_dcp_gives_them() -> None:
    dense = torch.ones(3)
    state = {
        "model": {"w": weight("mxfp8"), "b": dense},
        "list": [weight("mxfp8"), dense, {"v": weight("mxfp8")}],
        "n": 3,
        "pair": (1, 2),
    }
    expanded = expand(state)
    assert list(expanded) == ["model", "list", "n", "pair"]
    assert list(expanded["model"]) == ["w.payload", "w.scale", "b"]
    assert list(expanded["list"][0]) == ["payload", "scale"]
    assert list(expanded["list"][2]) == ["v.payload", "v.scale"]
    assert expanded["model"]["b"] is dense
    assert expanded["list"][1] is dense
    assert expanded["pair"] is state["pair"]
    assert list(state["model"]) == ["w", "b"]  # the state dict itself is as it was


def test_what_is_not_quantized_is_passed_through() -> None:
    state = {"b": torch.ones(3), "s": "text", "none": None, "nested": {"x": torch.zeros(1)}}
    expanded = expand(state)
    assert expanded["b"] is state["b"]
    assert expanded["nested"]["x"] is state["nested"]["x"]
    assert expanded == state


def test_a_name_that_is_taken_is_refused() -> None:
    for state in ({"w": weight("mxfp8"), "w.scale": 1}, {"w.scale": 1, "w": weight("mxfp8")}):
        with pytest.raises(
            ValueError, match=r"the state dict holds 'w.scale' twice: as an entry and as a part of a quantized weight"
        ):
            expand(state)


# weight placements -> placements of a row part, of a [N, 1] part and of a tensor-wide part
PLACEMENTS = {
    (Shard(0), Shard(0)): ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())),
    (Shard(0), Shard(1)): ((Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())),
    (Replicate(), Shard(0)): ((Replicate(), Shard(0)), (Replicate(), Shard(0)), (Replicate(), Replicate())),
    (Replicate(), Shard(1)): ((Replicate(), Shard(1)), (Replicate(), Replicate()), (Replicate(), Replicate())),
    (Shard(-2), Shard(-1)): ((Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())),
}
GLOBAL_SHAPES = {
    "float8_row": {"payload": (96, 64), "scale": (96, 1)},
    "float8_tensor": {"payload": (96, 64), "scale": ()},
    "mxfp8": {"payload": (96, 64), "scale": (96, 2)},
    "nvfp4": {"payload": (96, 32), "scale": (96, 4), "global_scale": ()},
    "nvfp4_square": {"payload": (96, 32), "scale": (96, 4), "global_scale": ()},
    "mxfp8_square": {"payload": (96, 64), "scale": (96, 2)},
    "mxfp4": {"payload": (96, 32), "scale": (96, 2)},
    "int4_32": {"payload": (96, 32), "scale": (96, 2)},
    "int8_row": {"payload": (96, 64), "scale": (96, 1)},
    "nf4_32": {"payload": (96, 32), "scale": (96, 2)},
    "float8_block_square": {"payload": (96, 256), "scale": (96, 2)},  # wide enough to be cut along K
}


def parts_are_placed_as_the_weight() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name in RECIPES:
        for placements, (rows, row_scale, wide) in PLACEMENTS.items():
            columns = 256 if name == "float8_block_square" else 64
            w = placed(quantize(values((96, columns), 0), RECIPES[name]), mesh, *placements)
            expanded = expand({"w": w})
            for part, shape in GLOBAL_SHAPES[name].items():
                found = expanded[f"w.{part}"]
                assert isinstance(found, DTensor)
                assert found.device_mesh == mesh
                assert tuple(found.shape) == shape, (name, part)
                expected = wide if shape == () else row_scale if shape == (96, 1) else rows
                assert tuple(found.placements) == expected, (name, part, placements)
                alias = w.to_local().parts()[part]
                assert found.to_local().data_ptr() == alias.data_ptr()
                assert found.to_local().shape == alias.shape


def test_parts_are_placed_as_the_weight_and_replicated_where_they_do_not_extend() -> None:
    run_ranks(4, parts_are_placed_as_the_weight)


def cut_at_other_columns() -> None:
    mesh = init_device_mesh("cpu", (2,))
    columns = (64, 32)[dist.get_rank()]  # DTensor's own cut of 96 columns would be 48 and 48
    local = quantize(values((32, columns), 0), RECIPES["mxfp8"])
    expand(
        {"w": DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=torch.Size((32, 96)), stride=(96, 1))}
    )


def test_column_cuts_that_dcp_would_misplace_are_refused() -> None:
    for error, columns in zip(run_ranks_catching(2, cut_at_other_columns), (64, 32), strict=True):
        assert error == (
            f"ValueError: w: a shard of (32, {columns}) out of (32, 96) has a payload of (32, {columns}), expected "
            "(32, 48): column cuts must fall on multiples of 32; choose a mesh that divides K into such pieces"
        )


def gathered_weights(base: Path) -> None:
    for name in RECIPES:
        expected = dict(model(name, 0).named_parameters())
        net = sharded(model(name, 0))
        with unsharded(net):
            save(gathered(net), base / name)
        target = dict(sharded(model(name, 1)).named_parameters())
        load(target, base / name)
        assert_holds(target, expected)
        net = sharded(model(name, 1))
        with unsharded(net, writeback=True):
            load(gathered(net), base / name)
        assert_holds(dict(net.named_parameters()), expected)


def gathered(net: Any) -> dict[str, Any]:
    """The full weights inside `unsharded`; state_dict() would shard them again."""
    found = {name: param.detach() for name, param in net.named_parameters()}
    assert not any(isinstance(value, DTensor) for value in found.values())
    return found


@sampled("world", [1, 2, 4], [4])
def test_gathered_weights_save_and_load_as_the_whole_tensor(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, gathered_weights, shared_tmp_path)


def gathered_with_other_scales() -> None:
    net = sharded(model("nvfp4", 0))
    for layer in net.layers:
        local = layer.weight.to_local()
        local.global_scale.mul_(1 + dist.get_rank())
    with unsharded(net), pytest.raises(ValueError, match="hold different values") as caught:
        expand(gathered(net))
    sync_scales(net)
    with unsharded(net):
        expanded = expand(gathered(net))
    assert expanded["layers.0.weight.global_scale"].shape == ()
    raise caught.value


def test_a_gathered_weight_whose_shards_disagree_is_refused_until_they_agree() -> None:
    for error in run_ranks_catching(2, gathered_with_other_scales):
        assert "layers.0.weight: the shards of this gathered weight hold different values of global_scale: [" in error
        assert "call fsdp_hooks.sync_scales on the sharded model first" in error


def staged_parts_stay_on_the_cpu() -> None:
    state = models(0, names={"nvfp4": None})
    expanded = expand(state)
    assert all(local_of(value).device.type == "cpu" for value in expanded["nvfp4"].values())
    assert held(expanded) == held(state)


def test_expanding_changes_no_byte() -> None:
    run_ranks(2, staged_parts_stay_on_the_cpu)


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w.view(-1), lambda w: w.view(4, -1, 64)])
def test_a_view_of_another_shape_is_not_saved_as_the_weight(view: Any, tmp_path: Path) -> None:
    weight = quantize(values((64, 128), 0), RECIPES["mxfp8"])
    text = "w: a transposed or reshaped view of a quantized weight, whose parts are those of shape"
    with pytest.raises(ValueError, match=text):
        expand({"w": view(weight)})
    with pytest.raises(BaseException, match=text):
        save({"w": view(weight)}, tmp_path)
    save({"w": weight}, tmp_path)
    with pytest.raises(BaseException, match="w: the checkpoint holds shape"):
        load({"w": view(weight)}, tmp_path)
