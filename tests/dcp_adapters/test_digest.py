"""One value for all weights: as defined, on any ranks and meshes, saved and loaded; and another for other bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from dcp_adapters import digest, tensor_digests
from dcp_adapters.cli.main import main
from dcp_adapters.delta.live import HeldVersion
from dcp_adapters.digests import summing
from dcp_adapters.records.weight_sums import DigestDifference, add_twins, first_difference
from qtensor import Float8DelayedScaling, MXFP8BlockScaling, quantize, quantized_model_init
from tests import weight_digests
from tests.dcp_adapters.cases import EVERY, arbitrary, load, local_of, model, models, placed, reference, save, values
from tests.dcp_adapters.test_reshard import WORLDS, state, whole
from tests.fsdp_hooks.cases import Collectives
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled

SMALL = {name: arbitrary((64, 128), recipe, number) for number, (name, recipe) in enumerate(EVERY.items())}


def small() -> dict[str, Tensor]:
    """A weight of each recipe, and dense tensors of several dims; fresh bytes in each call."""
    dense = {
        "bias": values((64,), 1),
        "norm": values((3, 5, 7), 2),
        "scale": torch.tensor(0.5),
        "none": values((0, 4), 3),
    }
    return {name: tensor.clone() for name, tensor in {**SMALL, **dense}.items()}


# -- one process -------------------------------------------------------------------------------------------------------


def test_the_digest_is_the_one_defined() -> None:
    assert tensor_digests(whole(0)) == weight_digests.values(whole(0))
    assert digest(whole(0)) == weight_digests.value(whole(0))


def test_the_digest_is_frozen() -> None:
    """Digests are kept in files and logs, and compared with those of other versions."""
    fixed = {
        "a.weight": quantize(torch.arange(2048, dtype=torch.float32).view(32, 64), MXFP8BlockScaling()),
        "b": torch.arange(5, dtype=torch.bfloat16),
    }
    assert digest(fixed) == "0e9193d2d84ec33059774f0aac2a1fc6"


def test_order_and_defaults_do_not_matter() -> None:
    weights = small()
    expected, names = digest(weights), list(weights)
    random.Random(0).shuffle(names)
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert digest({name: weights[name] for name in names}) == expected
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert digest(weights) == expected
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("name", SMALL)
def test_a_flipped_bit_in_any_part_shows(name: str) -> None:
    before, chosen = tensor_digests(small()), random.Random(name)
    for part, tensor in small()[name].parts().items():
        for _ in range(8):
            weights = small()
            flat = weights[name].parts()[part].view(-1).view(torch.uint8)
            flat[chosen.randrange(len(flat))] ^= 1 << chosen.randrange(8)
            after = tensor_digests(weights)
            changed = [one for one in before if before[one] != after[one]]
            assert changed == ([] if part == "amax_history" else [name]), (part, tensor.dtype)


def test_tensors_that_change_names_dtypes_or_shapes_show() -> None:
    a, b = values((8, 64), 0), values((8, 64), 1)
    variants: list[dict[str, Any]] = [
        {"a": a, "b": b},
        {"a": b, "b": a},
        {"a": a},
        {"b": b},
        {"a": a, "c": b},
        {"a": a.view(torch.float16), "b": b},
        {"a": a.view(4, 128), "b": b},
        {"a": a.view(512), "b": b},
        {"a": a, "b": b, "c": torch.zeros(0)},
        {"a": quantize(a, MXFP8BlockScaling()), "b": b},
    ]
    assert len({digest(one) for one in variants}) == len(variants)


def test_fields_and_histories_that_decode_nothing_do_not_count() -> None:
    x = values((32, 64), 0)
    square = quantize(x, MXFP8BlockScaling(scale_rounding="floor"))
    other = type(square).from_parts(square.parts(), MXFP8BlockScaling(), torch.float32)
    assert digest({"w": square}) == digest({"w": other})
    delayed = quantize(x, Float8DelayedScaling())
    before = digest({"w": delayed})
    delayed.parts()["amax_history"].add_(1)
    assert digest({"w": delayed}) == before


def test_a_model_is_its_state_dict_and_ties_count_each() -> None:
    net = model("mxfp8")
    assert digest(net) == digest(net.state_dict()) == digest({"model": net.state_dict(), "step": 3})
    assert list(tensor_digests(net)) == list(net.state_dict())
    tied = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    found = tensor_digests(tied)
    assert list(found) == ["a.weight", "b.weight"]
    assert found["a.weight"] == found["b.weight"]


def test_dense_shards_of_high_precision_storage_count() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))

    with quantized_model_init(MXFP8BlockScaling(), storage="high_precision"):
        stored = build()
    assert digest(stored) == digest(build())


# -- ranks -------------------------------------------------------------------------------------------------------------


def digests_of_layouts(world: int) -> None:
    for layout in WORLDS[world]:
        weights = state(layout, 0)["model"]
        names = list(weights)
        random.Random(dist.get_rank()).shuffle(names)  # each rank lists them in an order of its own
        with Collectives() as comms:
            found = digest({name: weights[name] for name in names})
        assert found == weight_digests.value(whole(0)), layout
        assert comms.counts == ({"allreduce_": 1} if world > 1 else {}), layout


@sampled("world", WORLDS, [4])
def test_every_layout_has_the_digest_of_the_whole_by_one_all_reduce(world: int) -> None:
    run_ranks(world, digests_of_layouts, world)


def many_tensors() -> None:
    weights = {f"w{number}": torch.full((3,), float(number)) for number in range(summing.FIRST)}
    with Collectives() as comms:
        assert digest(weights) == weight_digests.value(weights)
    assert comms.counts == {"allreduce_": 2}


def test_more_tensors_than_one_message_holds() -> None:
    run_ranks(2, many_tensors)


def a_model_in_training() -> None:
    net = models(names={"mxfp8": EVERY["mxfp8"]})["mxfp8"]
    assert digest(net) == digest(reference(names={"mxfp8": EVERY["mxfp8"]})["mxfp8"])


def test_fully_sharded_models_have_it_too() -> None:
    run_ranks(3, a_model_in_training)


def on_some_of_the_ranks() -> None:
    weight = {"w": distribute_tensor(values((8, 4), 0), DeviceMesh("cpu", [1, 2]), [Shard(0)])}
    assert digest(weight) == digest({"w": values((8, 4), 0)})
    assert HeldVersion(weight).since(weight, 1) is not None or dist.get_rank()


def test_a_mesh_without_the_first_rank_has_it_too() -> None:
    run_ranks(3, on_some_of_the_ranks)


def other_tensors() -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(4 + dist.get_rank())}
    digest(weights)


def one_rank_fails() -> None:
    digest({"a": torch.zeros(3) if dist.get_rank() == 0 else torch.zeros(3, device="meta")})


def one_rank_fails_in_tensor_digests() -> None:
    tensor_digests({"a": torch.zeros(3) if dist.get_rank() == 0 else torch.zeros(3, device="meta")})


def half_of_the_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = {"a": placed(values((8, 4), 0), mesh, Shard(0))}
    groups = [dist.new_group([rank]) for rank in range(2)]
    digest(weight, group=groups[dist.get_rank()])


def a_sum_of_terms() -> None:
    digest({"a": DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])})


APART = (
    "RuntimeError: digest: the ranks do not hold the same tensors: rank 0 has 'b: torch.float32 (4,)' where rank 1 has "
    "'b: torch.float32 (5,)'. Digest the state dict of one model on all ranks of the group; for stages of a pipeline "
    "pass each stage's group"
)
HALF = (
    "ValueError: digest: the ranks hold 16 elements of weights that have 32: pass the group of all ranks that hold the "
    "model, and of none else"
)
TERMS = (
    "ValueError: a: it is placed as (Partial(sum),): each rank holds a term of a sum, and what is read would be added "
    "up; redistribute it to Replicate() or Shard() first"
)
FAILED = [
    "RuntimeError: digest: rank 1 failed before the sums could be added up, see the error there",
    "ValueError: a is on the meta device, it has no values; load the weights first",
]
REFUSALS: list[tuple[Callable[[], None], list[str]]] = [
    (other_tensors, [APART, APART]),
    (one_rank_fails, FAILED),
    (one_rank_fails_in_tensor_digests, [FAILED[0].replace("digest:", "tensor_digests:"), FAILED[1]]),
    (half_of_the_ranks, [HALF, HALF]),
    (a_sum_of_terms, [TERMS, TERMS]),
]


@pytest.mark.parametrize(("fails", "messages"), REFUSALS)
def test_what_is_no_model_on_all_ranks_is_refused_on_all(fails: Callable[[], None], messages: list[str]) -> None:
    assert run_ranks_catching(2, fails) == messages


# -- on disk -----------------------------------------------------------------------------------------------------------


def save_by_ranks(path: Path) -> None:
    save(state("fsdp 3", 0), path)


def load_by_ranks(path: Path) -> None:
    target = state("fsdp x tp columns", 1)
    load(target, path)
    assert digest(target["model"]) == weight_digests.value(whole(0))


def test_a_checkpoint_has_the_digest_of_what_was_saved_and_of_what_loads_it(shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "c"
    run_ranks(3, save_by_ranks, path)
    assert digest(path, prefix="model.") == weight_digests.value(whole(0))
    run_ranks(4, load_by_ranks, path)


def test_a_checkpoint_whose_bytes_changed_has_another(tmp_path: Path) -> None:
    weights = small()
    save(weights, tmp_path / "a")
    weights["norm"][0, 0, 0] += 1
    save(weights, tmp_path / "b")
    a, b = tensor_digests(tmp_path / "a"), tensor_digests(str(tmp_path / "b"))
    assert a == weight_digests.values(small())
    assert first_difference(a, b) == DigestDifference("norm", "other")


def test_what_has_no_weights_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(3), "name": "run"}, tmp_path / "c")
    with pytest.raises(ValueError, match=r"name is an entry of bytes; a digest holds tensors only: say by prefix"):
        digest(tmp_path / "c")
    with pytest.raises(ValueError, match=r"name is a str; a digest holds tensors only: leave it out"):
        digest({"w": torch.zeros(3), "name": "run"})


@pytest.mark.parametrize("function", [digest, tensor_digests])
def test_arguments_that_do_not_fit_are_refused_in_the_name_of_the_function(function: Any, tmp_path: Path) -> None:
    def refused(text: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(TypeError, match=f"^{function.__name__}: .*{text}"):
            function(*arguments, **options)

    refused("expected a module, a state dict or a path, got int; tensors that an engine", 3)
    refused("a live model has its own names", {"w": torch.zeros(3)}, like={})
    refused("a directory has a config.json of its own", tmp_path, config={})
    refused("expected a mapping from names to plain tensors, and no prefix", nn.Linear(2, 2), config={})


# -- comparison, and the command line ----------------------------------------------------------------------------------


def test_the_first_difference_is_in_the_order_of_the_first_side() -> None:
    a = {"x": "1", "y": "2", "z": "3"}
    assert first_difference(a, dict(reversed(a.items()))) is None
    assert first_difference(a, {**a, "z": "0", "y": "0"}) == DigestDifference("y", "other")
    assert first_difference(a, {"z": "0", "y": "2"}) == DigestDifference("x", "only_in_a")
    assert first_difference(a, {"w": "0", **a}) == DigestDifference("w", "only_in_b")
    assert add_twins({"x": "1"}, {"x": "1", "y": "1", "z": "3"}) == {"x": "1", "y": "1"}
    assert add_twins({"x": "0"}, {"x": "1", "y": "1"}) == {"x": "0", "y": "0"}


def test_the_command_prints_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = model("nvfp4")
    save({"model": net.state_dict(), "step": 3}, tmp_path / "a")
    save(net.state_dict(), tmp_path / "b")
    expected = digest(net)
    assert main(["digest", f"{tmp_path}/a"]) == 0
    assert capsys.readouterr().out == f"{expected}  {tmp_path}/a\n"
    assert main(["digest", f"{tmp_path}/a", f"{tmp_path}/b"]) == 0
    assert capsys.readouterr().out == f"{expected}  {tmp_path}/a\n{expected}  {tmp_path}/b\n"
    with torch.no_grad():
        local_of(net.layers[1].weight).parts()["scale"].view(torch.uint8)[0, 0] ^= 1
        net.norm[0] *= -1
    save(net.state_dict(), tmp_path / "c")
    assert main(["digest", f"{tmp_path}/b", f"{tmp_path}/c"]) == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(name for name in tensor_digests(tmp_path / "b") if name in ("layers.1.weight", "norm"))
    assert lines[2] == f"first difference: {first}: A and B hold other bytes, dtypes or shapes"
    assert main(["digest", f"{tmp_path}/a", f"{tmp_path}/c", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "dcp_adapters.digest/1"
    assert record["sides"][0] == {
        "path": f"{tmp_path}/a",
        "digest": expected,
        "tensors": tensor_digests(model("nvfp4")),
    }
    assert record["first_difference"] == {"name": first, "kind": "other"}
    assert main(["digest", f"{tmp_path}/nothing"]) == 2
    assert capsys.readouterr().err == f"python -m dcp_adapters: error: {tmp_path}/nothing: no such directory\n"
