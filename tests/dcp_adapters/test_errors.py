"""What is wrong is said on every rank, in words that name the tensor, and before a byte of any target has changed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, high_precision_init_val, quantize, quantized_model_init
from qtensor.spec.registry import tensor_wide
from qtensor.tensor.contents import initial_value, preserve
from tests import ranks
from tests.dcp_adapters.cases import (
    RECIPES,
    Model,
    alone,
    assert_holds,
    held,
    load,
    models,
    placed,
    reference,
    save,
    sharded,
    values,
)
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled
from tests.torch_versions.release import RELEASE

NAMES = ("mxfp8", "nvfp4", "float8_tensor")
ROWS = (48, 33)
MX = "MXFP8BlockScaling(element='e4m3', blocks='row', scale_rounding='up')"
NV = "NVFP4BlockScaling(blocks='row')"


def net(recipe: str, seed: int, rows: tuple[int, ...] = ROWS, columns: int = 64) -> Any:
    return sharded(Model(RECIPES[recipe], rows, seed, columns))


def state(seed: int) -> dict[str, Any]:
    return {name: net(name, seed).state_dict() for name in NAMES} | {"step": seed}


def full(seed: int) -> dict[str, Any]:
    return {name: Model(RECIPES[name], ROWS, seed).state_dict() for name in NAMES} | {"step": seed}


def dense_state(seed: int) -> dict[str, Any]:
    with torch.no_grad():
        linears = nn.ModuleDict({name: nn.Linear(64, 48, dtype=torch.bfloat16) for name in NAMES})
        for i, linear in enumerate(linears.values()):
            linear.weight.copy_(values((48, 64), seed + i))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: {"w": placed(linear.weight.detach(), mesh, Shard(0))} for name, linear in linears.items()}


def quantized_state(seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: {"w": placed(quantize(values((48, 64), seed + i), RECIPES[name]), mesh, Shard(0))}
        for i, name in enumerate(NAMES)
    }


def save_all(base: Path) -> None:
    optimizer = {"state": {"w": {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.5}]}
    save({"models": state(0), "optim": optimizer}, base / "good")
    with_dense = dense_state(0)
    dcp.save(with_dense, checkpoint_id=base / "dense")
    save(quantized_state(0), base / "quantized")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks: good (models and an optimizer), dense (stock), quantized (the same names)."""
    base: Path = ranks.agreed(tmp_path_factory.mktemp("errors"))
    run_ranks(2, save_all, base)
    return base


def attempt(target: dict[str, Any], load_it: Callable[[], None]) -> None:
    """Let the error of a load out, once it is sure that this rank's bytes are what they were."""
    before = held(target)
    try:
        load_it()
    except BaseException:
        if held(target) != before:
            raise AssertionError("the target has changed") from None
        raise
    raise AssertionError("nothing was raised")


def each_rank_says(errors: list[str], *texts: str) -> None:
    assert len(errors) == 2
    for error in errors:
        assert "the target has changed" not in error
        for text in texts:
            assert text in error, error


# -- loading what does not fit -----------------------------------------------------------------------------------------


def other_recipe() -> Any:
    target = state(1)
    target["mxfp8"] = net("nvfp4", 1).state_dict()
    return target


def other_blocks() -> Any:
    target = state(1)
    target["nvfp4"] = sharded(Model(NVFP4BlockScaling(blocks="square"), (48, 64), 1)).state_dict()
    return target


def more_in_target() -> Any:
    target = state(1)
    target["mxfp8"]["more.weight"] = target["mxfp8"]["layers.0.weight"]
    target["nvfp4"]["more.bias"] = torch.zeros(3)
    target["more_steps"] = 1
    return target


def less_in_target() -> Any:
    target = state(1)
    del target["mxfp8"]["layers.1.weight"], target["nvfp4"]["norm"]
    return target


def other_shapes() -> Any:
    target = state(1)
    target["mxfp8"] = net("mxfp8", 1, (48, 34)).state_dict()
    target["nvfp4"] = net("nvfp4", 1, ROWS, 128).state_dict()
    return target


def everything_at_once() -> Any:
    target = other_shapes()
    target["float8_tensor"] = net("mxfp8", 1).state_dict()
    del target["nvfp4"]["norm"]
    target["nvfp4"]["more"] = torch.zeros(2)
    return target


MISFITS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "another recipe": (
        other_recipe,
        (
            f"models.mxfp8.layers.0.weight: the checkpoint holds {MX}, the target is {NV}; build the target",
            "models.mxfp8.layers.1.weight: the checkpoint holds",
        ),
    ),
    "other blocks of the same parts": (
        other_blocks,
        (f"models.nvfp4.layers.0.weight: the checkpoint holds {NV}, the target is NVFP4BlockScaling(blocks='square')",),
    ),
    "a tensor the checkpoint lacks": (
        more_in_target,
        (
            "models.mxfp8.more.weight: missing in the checkpoint",
            "models.nvfp4.more.bias: missing in the checkpoint",
            "models.more_steps: missing in the checkpoint",
        ),
    ),
    "a tensor only the checkpoint has": (
        less_in_target,
        (
            "models.mxfp8.layers.1.weight: only the checkpoint has it; the target has no such tensor (allow",
            "models.nvfp4.norm: only the checkpoint has it",
        ),
    ),
    "other shapes": (
        other_shapes,
        (
            "models.mxfp8.layers.1.weight: the checkpoint holds shape (33, 64), the target has (34, 64)",
            "models.mxfp8.layers.1.bias: the checkpoint holds shape (33,), the target has (34,)",
            "models.nvfp4.layers.0.weight: the checkpoint holds shape (48, 64), the target has (48, 128)",
            "models.nvfp4.norm: the checkpoint holds shape (64,), the target has (128,)",
        ),
    ),
    "all of it in one error": (
        everything_at_once,
        (
            "models.mxfp8.layers.1.weight: the checkpoint holds shape",
            "models.nvfp4.layers.0.weight: the checkpoint holds shape",
            "models.nvfp4.norm: only the checkpoint has it",
            "models.nvfp4.more: missing in the checkpoint",
            "models.float8_tensor.layers.0.weight: the checkpoint holds Float8CurrentScaling(",
        ),
    ),
}


def load_misfit(misfit: str, path: Path) -> None:
    target = {"models": MISFITS[misfit][0]()}
    attempt(target, lambda: load(target, path))


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_target_that_does_not_fit_is_refused(misfit: str, saved: Path) -> None:
    errors = run_ranks_catching(2, load_misfit, misfit, saved / "good")
    each_rank_says(errors, "the checkpoint does not fit the target; nothing has been loaded:", *MISFITS[misfit][1])


def load_misfit_on_rank_1(path: Path) -> None:
    target = {"models": state(1)}
    if dist.get_rank() == 1:
        target["models"]["mxfp8"]["more"] = torch.zeros(2)
    attempt(target, lambda: load(target, path))


def test_a_target_that_does_not_fit_on_one_rank_is_refused_on_all(saved: Path) -> None:
    errors = run_ranks_catching(2, load_misfit_on_rank_1, saved / "good")
    each_rank_says(errors, "models.mxfp8.more: missing in the checkpoint")


class DropsPlannerData(dcp.FileSystemReader):
    """A storage that does not keep planner data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.planner_data = None
        return metadata


def load_without_planner_data(path: Path) -> None:
    target = {"models": state(1)}
    load(target, path, reader=DropsPlannerData(path))
    assert_holds(target, {"models": full(0)})


def load_other_blocks_without_planner_data(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    recipe = MXFP8BlockScaling(scale_rounding="floor")
    target = quantized_state(1) | {"mxfp8": {"w": placed(quantize(values((48, 64), 5), recipe), mesh, Shard(0))}}
    attempt(target, lambda: load(target, path, reader=DropsPlannerData(path)))


def load_other_shapes_without_planner_data(path: Path) -> None:
    target = {"models": other_shapes()}
    attempt(target, lambda: load(target, path, reader=DropsPlannerData(path)))


def test_a_storage_that_drops_planner_data_loads(saved: Path) -> None:
    run_ranks(2, load_without_planner_data, saved / "good")


def test_a_storage_that_drops_planner_data_still_tells_recipes_apart(saved: Path) -> None:
    errors = run_ranks_catching(2, load_other_blocks_without_planner_data, saved / "quantized")
    each_rank_says(errors, "mxfp8.w: the checkpoint holds", "scale_rounding='up'", "scale_rounding='floor'")


def test_a_storage_that_drops_planner_data_still_compares_parts(saved: Path) -> None:
    errors = run_ranks_catching(2, load_other_shapes_without_planner_data, saved / "good")
    each_rank_says(
        errors,
        "models.mxfp8.layers.1.weight.payload: the checkpoint holds torch.float8_e4m3fn (33, 64), the target needs",
    )


# -- dense and quantized -----------------------------------------------------------------------------------------------


def load_dense_into_quantized(path: Path) -> None:
    target = quantized_state(1)
    attempt(target, lambda: load(target, path))


def load_quantized_into_dense(path: Path) -> None:
    target = dense_state(1)
    attempt(target, lambda: load(target, path))


def stock_load_dense_into_quantized(path: Path) -> None:
    target = quantized_state(1)
    dcp.load(target, checkpoint_id=path)
    rows = 48 // dist.get_world_size()
    for i, name in enumerate(NAMES):
        mine = values((48, 64), i).narrow(0, dist.get_rank() * rows, rows)
        assert held({"w": target[name]["w"]}) == held({"w": quantize(mine, RECIPES[name])})


def test_plain_dcp_load_of_a_dense_checkpoint_quantizes_each_shard(saved: Path) -> None:
    run_ranks(2, stock_load_dense_into_quantized, saved / "dense")


def stock_load_quantized_into_dense(path: Path) -> None:
    target = dense_state(1)
    attempt(target, lambda: dcp.load(target, checkpoint_id=path))


def stock_load_quantized_into_quantized(path: Path) -> None:
    target = quantized_state(1)
    attempt(target, lambda: dcp.load(target, checkpoint_id=path))


def test_a_dense_checkpoint_is_not_loaded_into_a_quantized_target(saved: Path) -> None:
    errors = run_ranks_catching(2, load_dense_into_quantized, saved / "dense")
    each_rank_says(
        errors,
        f"mxfp8.w: the checkpoint holds a dense tensor, the target is quantized ({MX})",
        "float8_tensor.w",
        "nvfp4.w",
    )


def test_a_quantized_checkpoint_is_not_loaded_into_a_dense_target(saved: Path) -> None:
    errors = run_ranks_catching(2, load_quantized_into_dense, saved / "quantized")
    each_rank_says(
        errors,
        f"mxfp8.w: the checkpoint holds it quantized ({MX}), the target is dense; build the target with that recipe",
    )


def test_plain_dcp_load_of_a_quantized_checkpoint_fails_on_a_missing_key(saved: Path) -> None:
    for body in (stock_load_quantized_into_dense, stock_load_quantized_into_quantized):
        errors = run_ranks_catching(2, body, saved / "quantized")
        each_rank_says(errors, "Missing key in checkpoint state_dict: ", ".w")


# -- damaged checkpoints -----------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 200)


DAMAGES = {
    "truncated": (truncate, "EOFError", "__1_0.distcp of the checkpoint is truncated: it should hold at least"),
    "emptied": (lambda path: os.truncate(path, 0), "EOFError", "__1_0.distcp of the checkpoint is truncated"),
    "deleted": (Path.unlink, "FileNotFoundError", "__1_0.distcp"),
    # stock's reader loses the reason in torch 2.11
    "without .metadata": (
        lambda path: (path.parent / ".metadata").unlink(),
        *(("No such file or directory", ".metadata") if RELEASE > (2, 11) else ("metadata is None",)),
    ),
}


def load_damaged(path: Path) -> None:
    target = {"models": state(1)}
    attempt(target, lambda: load(target, path))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    damage: str, world: int, saved: Path, shared_tmp_path: Path
) -> None:
    harm, *texts = DAMAGES[damage]
    copy = shared_tmp_path / "copy"
    if not copy.exists():
        shutil.copytree(saved / "good", copy)
        harm(copy / "__1_0.distcp")
    for error in run_ranks_catching(world, load_damaged, copy):
        assert "the target has changed" not in error
        for text in texts:
            assert text in error, error


def keep_initial_value_through_a_failed_load(good: Path, damaged: Path) -> None:
    with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"mxfp8": {"w": placed(linear.weight, mesh, Shard(0))}}
    param = target["mxfp8"]["w"]
    again = {"mxfp8": {"w": param.detach()}}
    value = high_precision_init_val(param).clone()
    with pytest.raises(BaseException, match="truncated"):
        load(again, damaged)
    assert torch.equal(high_precision_init_val(param), value)
    load(again, good)
    assert high_precision_init_val(param) is None


def test_only_a_load_that_succeeds_forgets_the_preserved_initial_value(saved: Path, shared_tmp_path: Path) -> None:
    if not (shared_tmp_path / "copy").exists():
        shutil.copytree(saved / "quantized", shared_tmp_path / "copy")
        truncate(shared_tmp_path / "copy" / "__1_0.distcp")
    run_ranks(2, keep_initial_value_through_a_failed_load, saved / "quantized", shared_tmp_path / "copy")


# -- partial loads -----------------------------------------------------------------------------------------------------


def load_partially(path: Path) -> None:
    target = {"models": less_in_target()}
    extra = torch.full((3,), 7.0)
    target["models"]["mxfp8"]["extra"] = extra
    kept = quantize(values((4, 64), 9), RECIPES["nvfp4"])
    preserve(kept, torch.ones(4, 64))
    target["models"]["mxfp8"]["kept"] = kept
    before = held({"kept": kept})
    load(target, path, allow_partial_load=True)
    expected = full(0)
    del expected["mxfp8"]["layers.1.weight"], expected["nvfp4"]["norm"]
    del target["models"]["mxfp8"]["extra"], target["models"]["mxfp8"]["kept"]
    assert_holds(target["models"], expected)
    assert extra.tolist() == [7.0, 7.0, 7.0]
    assert held({"kept": kept}) == before
    assert initial_value(kept) is not None


def load_misshapen_partially(path: Path) -> None:
    target = {"models": other_shapes()}
    attempt(target, lambda: load(target, path, allow_partial_load=True))


def test_a_partial_load_leaves_out_what_one_side_lacks(saved: Path) -> None:
    run_ranks(2, load_partially, saved / "good")


def test_a_partial_load_still_refuses_other_shapes(saved: Path) -> None:
    errors = run_ranks_catching(2, load_misshapen_partially, saved / "good")
    each_rank_says(errors, "models.mxfp8.layers.1.weight: the checkpoint holds shape (33, 64), the target has (34, 64)")


def load_one_container(path: Path) -> None:
    target = {"models": state(1)}  # no optimizer
    load(target, path)
    assert_holds(target, {"models": full(0)})
    target = {"models": {"nvfp4": net("nvfp4", 1).state_dict()}}  # one model of three
    load(target, path)
    assert_holds(target["models"]["nvfp4"], full(0)["nvfp4"])


def test_one_container_of_a_checkpoint_loads_without_the_others(saved: Path) -> None:
    run_ranks(2, load_one_container, saved / "good")


# -- saving ------------------------------------------------------------------------------------------------------------


def save_disagreeing(name: str, path: Path) -> None:
    target = quantized_state(0)
    local = target[name]["w"].to_local()
    with torch.no_grad():
        getattr(local, tensor_wide(local.recipe)).mul_(1 + dist.get_rank())
    save(target, path)


@pytest.mark.parametrize(("name", "part"), [("nvfp4", "global_scale"), ("float8_tensor", "scale")])
def test_disagreeing_tensor_wide_scales_are_not_saved(name: str, part: str, shared_tmp_path: Path) -> None:
    errors = run_ranks_catching(2, save_disagreeing, name, shared_tmp_path / "saved")
    each_rank_says(
        errors,
        f"{name}.w.{part}: rank 0 holds",
        "a tensor-wide scale must be the same in all shards. Call fsdp_hooks.sync_scales(model) before saving",
    )
    assert list(shared_tmp_path.rglob(".metadata")) == []
    assert list(shared_tmp_path.rglob("*.distcp")) == []


def save_other_recipe_on_rank_1(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    recipe = MXFP8BlockScaling(scale_rounding=("up", "floor")[dist.get_rank()])
    save({"w": placed(quantize(values((48, 64), 0), recipe), mesh, Shard(0))}, path)


def test_ranks_that_disagree_on_the_recipe_are_not_saved(shared_tmp_path: Path) -> None:
    errors = run_ranks_catching(2, save_other_recipe_on_rank_1, shared_tmp_path / "saved")
    up, floor = (MXFP8BlockScaling(scale_rounding=rounding) for rounding in ("up", "floor"))
    each_rank_says(
        errors,
        f"w: rank 1 holds [48, 64] as bfloat16 under {floor}, an earlier rank [48, 64] as bfloat16 under {up}; "
        "all ranks must quantize it alike",
    )
    assert list(shared_tmp_path.rglob(".metadata")) == []


def save_without_planner(way: str, name: str, path: Path) -> None:
    saved = {"model": models(0, names={name: None})}
    upload = dist.new_group(backend="gloo")
    if way == "sync":
        dcp.save(saved, checkpoint_id=path)
    elif way == "async":
        dcp.async_save(saved, checkpoint_id=path, process_group=upload).result()
    else:
        dcp.async_save(saved, storage_writer=dcp.FileSystemWriter(path), process_group=upload).result()


# The planner asks no format: each way with one of each trait.
@sampled(
    ("name", "way"),
    itertools.product(RECIPES, ["sync", "async", "async, blocking"]),
    [("float8_row", "sync"), ("nvfp4", "async"), ("mxfp8_square", "async, blocking")],
)
def test_saving_without_the_planner_names_it_and_leaves_no_checkpoint(
    name: str, way: str, shared_tmp_path: Path
) -> None:
    errors = run_ranks_catching(2, save_without_planner, way, name, shared_tmp_path / "saved")
    each_rank_says(errors, "has no single storage to write", "save it by dcp.save with planner=QuantizedSavePlanner()")
    assert list(shared_tmp_path.rglob(".metadata")) == []


def save_part_of_a_mesh(path: Path) -> None:
    mesh = DeviceMesh("cpu", [[0], [2]], mesh_dim_names=("replicate", "shard"))
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    saved = {"step": 1}
    if dist.get_rank() == 2:
        saved |= models(0, mesh, names={"nvfp4": None})
    dcp.save(saved, checkpoint_id=path, planner=QuantizedSavePlanner(), process_group=group)


def test_a_scale_that_no_saving_rank_lists_is_an_error(shared_tmp_path: Path) -> None:
    first, *others = run_ranks_catching(3, save_part_of_a_mesh, shared_tmp_path / "saved")
    assert first == ""
    each_rank_says(others, "weight.global_scale: the rank that saves it, the first of the weight's mesh, takes no part")
    assert list(shared_tmp_path.rglob(".metadata")) == []


# -- one process -------------------------------------------------------------------------------------------------------


def test_saving_and_loading_without_a_process_group_warns_as_dcp_does(tmp_path: Path) -> None:
    saved, target = reference(0), reference(1)
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save(saved, checkpoint_id=tmp_path, planner=QuantizedSavePlanner())
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(target, checkpoint_id=tmp_path, planner=QuantizedLoadPlanner())
    assert_holds(target, reference(0))


def test_on_mismatch_must_be_one_of_its_values() -> None:
    with pytest.raises(ValueError, match=r"on_mismatch='ignore' is not one of \"raise\", \"convert\""):
        QuantizedLoadPlanner(on_mismatch="ignore")


def weight(name: str = "nvfp4", seed: int = 0) -> Any:
    return quantize(values((48, 64), seed), RECIPES[name])


CLASHES: dict[str, tuple[Callable[[], Any], str]] = {
    "a part's name": (lambda: {"w": weight(), "w.payload": torch.ones(2)}, "the state dict holds 'w.payload' twice"),
    "a part's name, nested": (lambda: {"m": {"w": weight()}, "m.w.scale": 1}, "the state dict holds 'm.w.scale' twice"),
    "the manifest's name": (
        lambda: {"w": weight(), "qtensor.manifest": torch.ones(2)},
        "'qtensor.manifest', which is the name of the checkpoint's own",
    ),
    "the checksums' name": (
        lambda: {"w": weight(), "qtensor.checksums": torch.ones(2)},
        "'qtensor.checksums', which is the name of the checkpoint's own",
    ),
    "a tuple": (
        lambda: {"pair": (weight(), 1)},
        "pair: a tuple holds a quantized tensor, and DCP would pickle it whole",
    ),
    "a nested tuple": (
        lambda: {"a": {"b": [1, (2, {"w": weight()})]}},
        "holds a quantized tensor, and DCP would pickle it whole",
    ),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_state_dicts_that_can_not_be_saved_rightly_are_refused(clash: str, tmp_path: Path) -> None:
    build, text = CLASHES[clash]
    with pytest.raises(BaseException, match=re.escape(text)):
        save(build(), tmp_path / "saved")
    assert list(tmp_path.rglob(".metadata")) == []


def test_an_unflattened_nested_dict_with_quantized_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="model: a dict holds a quantized tensor, and DCP would pickle it whole"):
        save({"model": {"w": weight()}}, tmp_path / "saved", flatten_state_dict=False)


def test_rows_of_a_larger_tensor_do_not_load_a_tensor_wide_scale_of_their_own(tmp_path: Path) -> None:
    stack = quantize(values((2, 48, 64), 3), RECIPES["nvfp4"])
    save({"w": weight()}, tmp_path)
    before = held({"w": stack})
    with pytest.raises(
        BaseException, match="w: the target is some rows of a larger tensor and shares its global_scale with the others"
    ):
        load({"w": stack[0]}, tmp_path)
    assert held({"w": stack}) == before


class KeepsMetadata(dcp.FileSystemReader):
    """A reader that reads its metadata once."""

    kept: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = self.kept or super().read_metadata(*args, **kwargs)
        return self.kept


def test_a_reader_that_keeps_its_metadata_can_load_again_and_still_notices_damage(tmp_path: Path) -> None:
    save(reference(0), tmp_path)
    reader = KeepsMetadata(tmp_path)
    sizes = set()
    for _ in range(3):
        target = reference(1)
        load(target, tmp_path, reader=reader)
        assert_holds(target, reference(0))
        sizes.add(len(reader.kept.storage_data))
    assert len(sizes) == 1
    truncate(tmp_path / "__0_0.distcp")
    with pytest.raises(BaseException, match="truncated"), alone():
        dcp.load(target, storage_reader=reader, planner=QuantizedLoadPlanner())


def _row_scales_of_column_cuts(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    q = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), RECIPES["float8_row"])
    weight = placed(q, mesh, Shard(1))
    save({"w": weight}, path)  # cut from one tensor: the scales of its rows are the same in both halves
    with torch.no_grad():
        weight.to_local().copy_(torch.full((8, 32), 1.0 + dist.get_rank()))
    expected = (
        "w.scale: rank 0 and rank 1 hold different scales for the same rows, whose columns they share; call "
        r"fsdp_hooks.sync_scales\(model\), or write the full weight"
    )
    with pytest.raises(BaseException, match=expected):
        save({"w": weight}, f"{path}/other")
    assert sync_scales([weight]) == 1
    save({"w": weight}, f"{path}/agreed")


def test_row_scales_that_differ_between_column_cuts_are_saved_once_they_agree(shared_tmp_path: Path) -> None:
    """Stock DCP would keep one rank's scales and apply them to the other rank's bytes."""
    run_ranks(2, _row_scales_of_column_cuts, str(shared_tmp_path))
