"""One rank, or some, work on whole weights while the others of the job do something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dcp_adapters import HeldVersion, WeightStream, apply_deltas, digest, export_hf, import_hf, tensor_digests
from qtensor import MXFP8BlockScaling, quantize_
from tests.ranks import run_ranks

RECIPE = MXFP8BlockScaling()


def model() -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    quantize_(found, RECIPE)
    return found


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def streamed(stream: WeightStream) -> dict[str, Tensor]:
    return {name: tensor for bucket in stream for name, tensor in bucket.items()}


def rank_by_itself(directory: Path) -> None:
    """Each rank in turn does everything, and the others wait for it in a barrier."""
    group = dist.new_group([1])
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            own = directory / f"{turn}"
            export_hf(model(), own, no_dist=True, max_shard_size=8000)
            assert digest(model(), no_dist=True) == digest(own, like=model())
            assert tensor_digests(model(), no_dist=True).keys() == model().state_dict().keys()
            stream = WeightStream(model(), no_dist=True, keep_last=True)
            assert stream.receives
            assert streamed(stream).keys() == {f"{n}.{part}" for n in range(3) for part in ("weight", "weight_scale")}
            target = model()
            with torch.no_grad():
                target[0].weight.zero_()
            import_hf(own, target, no_dist=True)
            held = HeldVersion(target.state_dict(), no_dist=True)
            with torch.no_grad():
                target[1].weight.mul_(2)
            delta = held.since(target.state_dict(), 1)
            assert delta is not None
            other = model()
            assert apply_deltas(other.state_dict(), [delta], no_dist=True) == 1
            assert digest(other, no_dist=True) == digest(target, no_dist=True)
            if turn == 1:
                export_hf(model(), directory / "group", group=group, max_shard_size=8000)
        dist.barrier()


def test_a_rank_works_by_itself(shared_tmp_path: Path) -> None:
    run_ranks(2, rank_by_itself, shared_tmp_path)
    export_hf(model(), shared_tmp_path / "plain", max_shard_size=8000)
    for name in ("0", "1", "group"):
        assert files(shared_tmp_path / name) == files(shared_tmp_path / "plain")


def some_ranks(directory: Path) -> None:
    """Ranks 1 and 2 of three hold a model, and rank 0 does not; afterwards rank 1 alone has it gathered."""
    group = dist.new_group([1, 2])
    mesh = DeviceMesh("cpu", [1, 2])
    rank = dist.get_rank()
    if rank:
        sharded = model()
        fully_shard(sharded, mesh=mesh)
        export_hf(sharded, directory / "sharded", group=group, max_shard_size=8000)
        received = streamed(WeightStream(sharded, group=group))
        assert bool(received) == (rank == 1)
        import_hf(directory / "sharded", sharded, group=group)
        assert digest(sharded, group=group) == digest(directory / "sharded", like=model())
        for refused in (
            lambda: export_hf(sharded, directory / "refused", no_dist=True),
            lambda: WeightStream(sharded, no_dist=True),
            lambda: import_hf(directory / "sharded", sharded, no_dist=True),
        ):
            with pytest.raises(ValueError, match=rf"are shards on ranks that do not take part \({3 - rank}\); call it"):
                refused()
        with pytest.raises(ValueError, match=r"the ranks hold .* elements of weights that have .*: pass the group"):
            digest(sharded, no_dist=True)
        assert not (directory / "refused").exists()
        full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
        if full:
            export_hf(full, directory / f"gathered {rank}", no_dist=True, max_shard_size=8000)
    dist.barrier()


def test_some_ranks_work_on_what_they_hold(shared_tmp_path: Path) -> None:
    run_ranks(3, some_ranks, shared_tmp_path)
    export_hf(model(), shared_tmp_path / "plain", max_shard_size=8000)
    assert len(list((shared_tmp_path / "plain").glob("*.safetensors"))) > 1
    found = sorted(path.name for path in shared_tmp_path.iterdir() if path.name not in ("plain", "refused"))
    assert "sharded" in found
    for name in found:
        assert files(shared_tmp_path / name) == files(shared_tmp_path / "plain")
