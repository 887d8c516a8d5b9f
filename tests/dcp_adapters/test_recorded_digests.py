"""QuantizedSavePlanner(digest=True): the manifest says what was saved, sharded, by cached plans, or asynchronously."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from dcp_adapters import QuantizedSavePlanner, read_manifest, tensor_digests
from dcp_adapters.cli.main import main
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON, Manifest
from dcp_adapters.save.steps import plan_cache
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.verifying.verify import verify
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, alone, load, model, models, placed, reference, save, values
from tests.dcp_adapters.test_async import overwrite
from tests.dcp_adapters.test_foreign_tensors import Coded
from tests.ranks import run_ranks, run_ranks_catching

if TYPE_CHECKING:
    from pathlib import Path

FEW = {name: RECIPES[name] for name in ("mxfp8", "nvfp4")}


def expected(seed: int) -> dict[str, str]:
    """Of the unsharded models, one after the other: names as in the checkpoint."""
    nested = reference(seed, names=FEW)
    return {f"{kind}.{name}": one for kind, state in nested.items() for name, one in tensor_digests(state).items()}


def recorded(path: Path) -> dict[str, str]:
    """What the checkpoint says; in both copies of its manifest alike."""
    stored = StoredCheckpoint(path)
    data = stored.metadata.planner_data
    assert Manifest.from_json(data[MANIFEST_JSON]) == Manifest.from_tensor(stored.read_key(MANIFEST))
    return dict(read_manifest(path).digests)


def saved_in_a_row(base: Path) -> None:
    plan_cache._locals.clear()
    plan_cache._globals.clear()
    for step in range(3):
        state: dict[str, Any] = {**models(step, names=FEW), "step": step}
        save(state, base / str(step), digest=True, enable_plan_caching=True)
    save({**models(3, names=FEW), "step": 3}, base / "3", enable_plan_caching=True)
    save({**models(4, names=FEW), "step": 4}, base / "4", digest=True, enable_plan_caching=True)


@pytest.mark.parametrize("world", [1, 2])
def test_the_manifest_has_the_digests_of_the_model_with_cached_plans_too(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, saved_in_a_row, shared_tmp_path)
    for step in (0, 1, 2, 4):
        path = shared_tmp_path / str(step)
        assert recorded(path) == expected(step), step
        assert verify(path).ok
        assert main(["digest", str(path), "--prefix", "mxfp8."]) == 0
    assert recorded(shared_tmp_path / "3") == {}
    assert "digests" not in read_manifest(shared_tmp_path / "3").to_json()


def columns_and_replicas(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "columns": placed(quantize(values((64, 128), 0), RECIPES["float8_row"]), mesh, Shard(0), Shard(1)),
        "copies": placed(quantize(values((64, 128), 1), RECIPES["nvfp4"]), mesh, Replicate(), Shard(0)),
        "dense": placed(values((6, 10), 2), mesh, Shard(1), Replicate()),
        "uneven": placed(values((3, 10), 3), mesh, Replicate(), Shard(0)),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    save(state, path, digest=True)


def test_column_cuts_and_replicas_count_once(shared_tmp_path: Path) -> None:
    run_ranks(4, columns_and_replicas, shared_tmp_path)
    state = {
        "columns": quantize(values((64, 128), 0), RECIPES["float8_row"]),
        "copies": quantize(values((64, 128), 1), RECIPES["nvfp4"]),
        "dense": values((6, 10), 2),
        "uneven": values((3, 10), 3),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    assert recorded(shared_tmp_path) == tensor_digests(state)
    assert verify(shared_tmp_path).findings == ()


def other_copies(base: Path) -> None:
    save({"w": values((4, 4), 0), "mine": torch.tensor([dist.get_rank()])}, base, digest=True)


def other_options(base: Path) -> None:
    save({"w": values((4, 4), 0)}, base, digest=dist.get_rank() == 0)


@pytest.mark.parametrize(
    ("saves", "told"),
    [
        (other_copies, r"mine at \(0,\): rank 0 and rank 1 hold other bytes, and one of them would be saved for both"),
        (other_options, "some ranks save with digest=True, some with False; choose one for all"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(saves: Any, told: str, shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, saves, shared_tmp_path):
        assert re.search(told, error)
    assert not (shared_tmp_path / ".metadata").exists()


def staged(path: Path) -> None:
    live = models(0, names=FEW)
    upload = dist.new_group(backend="gloo")
    planner = QuantizedSavePlanner(digest=True)
    saving = dcp.async_save(live, checkpoint_id=path, planner=planner, process_group=upload)
    overwrite(live, 0xA5)
    saving.result()


def test_an_async_save_records_what_was_staged(shared_tmp_path: Path) -> None:
    run_ranks(2, staged, shared_tmp_path)
    assert recorded(shared_tmp_path) == expected(0)
    assert verify(shared_tmp_path).ok


def apart(path: Path) -> None:
    with alone():
        planner = QuantizedSavePlanner(digest=True)
        dcp.save({"w": values((4, 4), 0)}, checkpoint_id=path, planner=planner, use_collectives=False)


def test_ranks_that_save_for_themselves_are_refused(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, apart, shared_tmp_path):
        assert "digest=True adds up the sums of all ranks, and here each rank saves for itself" in error
    assert not [*shared_tmp_path.glob("*.distcp")]


def foreign(base: Path) -> None:
    plan_cache._locals.clear()
    plan_cache._globals.clear()
    for step, other in enumerate((torch.ones(4, 3), Coded(torch.ones(4, 3, dtype=torch.int8), torch.tensor(0.5)))):
        state = {"a": values((64, 64), step), "other": other}
        save(state, base / str(step), digest=True, enable_plan_caching=True)


def test_a_leaf_that_becomes_a_tensor_of_another_library_has_no_digest_any_more(shared_tmp_path: Path) -> None:
    run_ranks(1, foreign, shared_tmp_path)  # the plan stays what it was, and the manifest becomes shorter
    for step, names in enumerate((["a", "other"], ["a"])):
        digests = recorded(shared_tmp_path / str(step))
        assert [*digests] == names
        assert digests["a"] == tensor_digests({"a": values((64, 64), step)})["a"]
        assert verify(shared_tmp_path / str(step)).ok


def test_without_it_nothing_is_recorded_and_older_readers_ignore_the_key(tmp_path: Path) -> None:
    state = model("mxfp8").state_dict()
    save(state, tmp_path / "without")
    save(state, tmp_path / "with", digest=True)
    plain, told = (StoredCheckpoint(tmp_path / name) for name in ("without", "with"))
    records = [one.metadata.planner_data[MANIFEST_JSON] for one in (plain, told)]
    assert {key: value for key, value in records[1].items() if key != "digests"} == records[0]
    target = model("mxfp8", 9).state_dict()
    load(target, tmp_path / "with", verify_checksums=True)
    assert tensor_digests(target) == told.digests


def test_a_changed_byte_is_found_without_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": quantize(values((64, 64), 0), RECIPES["mxfp8"]), "b": torch.ones(4096)}
    save(state, tmp_path, digest=True, checksums=False)
    assert [found.severity for found in verify(tmp_path).findings] == ["warning"]
    assert main(["digest", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{tmp_path}: as recorded when it was saved"
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(bytes(torch.ones(64).view(torch.uint8).tolist()))
    data[at] ^= 1
    file.write_bytes(data)
    ((entry, message),) = ((found.entry, found.message) for found in verify(tmp_path).errors)
    assert entry == "b"
    assert f"qtensor.manifest says {tensor_digests(state)['b']}: its bytes have changed" in message
    assert main(["digest", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{tmp_path}: b is not what was recorded when it was saved"
    assert main(["digest", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sides"][0]["as_recorded"] is False


def test_digests_that_are_none_are_refused(tmp_path: Path) -> None:
    save({"w": quantize(values((64, 64), 0), RECIPES["mxfp8"])}, tmp_path, digest=True)
    record = read_manifest(tmp_path).to_json()
    for wrong in ({"w": "0" * 31}, {"w": 7}, ["0" * 32], "0" * 33):
        with pytest.raises(ValueError, match=r"qtensor\.manifest has .* among its digests, expected 32 hex digits"):
            Manifest.from_json({**record, "digests": wrong})


def test_copies_of_the_manifest_with_other_digests_are_an_error(tmp_path: Path) -> None:
    save({"w": quantize(values((64, 64), 0), RECIPES["mxfp8"])}, tmp_path, digest=True)
    path = tmp_path / ".metadata"
    said = next(iter(read_manifest(tmp_path).digests.values())).encode()
    path.write_bytes(path.read_bytes().replace(said, b"0" * 32))
    messages = [found.message for found in verify(tmp_path).errors]
    assert messages == ["the entry and the planner data in .metadata differ about w"]
