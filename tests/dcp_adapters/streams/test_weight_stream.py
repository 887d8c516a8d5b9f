"""WeightStream: the bytes of an export, group by group, out of shards that training goes on with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.sync_rank import BytesAlive
from dcp_adapters import WeightStream, export_hf
from dcp_adapters.hf.layouts.registry import LAYOUTS
from fsdp_hooks import sync_scales, unsharded
from fsdp_hooks.torch_private import local_of
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize, quantize_
from qtensor.numerics import kernels
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.dcp_adapters.cases import values
from tests.dcp_adapters.streams.cases import (
    CONFIG,
    EXPORTED,
    Model,
    assert_same,
    dense,
    files,
    filled,
    high_precision,
    quantized,
    raw,
    rows_for,
    sharded,
    streamed,
)
from tests.fsdp_hooks.cases import Collectives
from tests.ranks import agreed, run_ranks, run_ranks_each
from tests.recipes import TABLE
from tests.sampling import sampled

MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
GROUPS = 4  # three layers and the root


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "fp8"])
@pytest.mark.parametrize("name", EXPORTED)
def test_a_stream_has_what_an_export_writes(name: str, layout: str, tmp_path: Path) -> None:
    """Or refuses it with the same words."""
    assert layout in LAYOUTS
    model, refused = quantized(name), None
    try:
        export_hf(model, tmp_path / "out", config=CONFIG, layout=layout)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        with pytest.raises(ValueError, match=re.escape(refused)):
            WeightStream(model, config=CONFIG, layout=layout)
        assert layout != "compressed-tensors"
        return
    stream = WeightStream(model, config=CONFIG, layout=layout, bucket_bytes=3000)
    buckets = list(stream)
    found = streamed(buckets)
    assert_same(found, files(tmp_path / "out"))
    assert [(each.name, each.dtype, each.shape) for each in stream.metadata()] == [
        (each, tensor.dtype, tuple(tensor.shape)) for each, tensor in found.items()
    ]
    assert stream.nbytes == sum(tensor.nbytes for tensor in found.values())
    assert all(sum(-(-t.nbytes // 64) * 64 for t in each.values()) <= 3000 or len(each) == 1 for each in buckets)
    assert len(buckets) == len(stream.sizes) > 3
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert json.loads(json.dumps(stream.json)) == written


def test_every_pass_is_a_version_with_the_values_of_its_time() -> None:
    model = quantized("mxfp8")
    stream = WeightStream(model, config=CONFIG)
    first = streamed(stream)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    assert stream.version == 1
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(-param.dequantize() if isinstance(param, QuantizedTensor) else -param)
    assert_same(first, kept)  # in memory of their own
    second = streamed(stream)
    assert stream.version == 2
    assert any(not torch.equal(raw(second[name]), raw(tensor)) for name, tensor in kept.items())
    for bucket in stream:
        del bucket
        break
    assert stream.version == 2


def test_a_model_that_became_another_one_is_refused() -> None:
    model = quantized("mxfp8")
    linear = model.layers[0].o_proj
    stream, bias = WeightStream(model, config=CONFIG), linear.bias

    def refusal() -> str:
        with pytest.raises(ValueError, match=r"; make another stream$") as caught:
            next(iter(stream))
        return str(caught.value)

    linear.bias = None
    assert refusal().startswith("WeightStream: since the stream was made, layers.0.o_proj.bias has gone;")
    linear.bias = nn.Parameter(bias.detach()[:3].float())
    assert f"layers.0.o_proj.bias changed from bfloat16 [{len(bias)}] to float32 [3];" in refusal()
    linear.bias = bias
    model.scale = nn.Parameter(torch.ones(2))
    assert "made, scale has come;" in refusal()
    del model.scale
    layers, model.layers = model.layers, nn.ModuleDict()
    del model.layers
    model.register_module("layers", layers)
    assert refusal().startswith("WeightStream: since the stream was made, the order of the tensors has changed;")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"to": "second"}, 'WeightStream: to=\'second\' is not one of "first", "all"'),
        ({"bucket_bytes": 0}, "WeightStream: bucket_bytes=0, expected a positive number of bytes"),
        ({"fused_scales": "no"}, 'WeightStream: fused_scales=\'no\' is not one of "raise", "requantize"'),
        ({"layout": "gguf"}, "layout='gguf' is not one of"),
        (
            {"include": ["layers.*"]},
            "WeightStream: include= and exclude= say which dense linears recipe= quantizes, and",
        ),
        ({"recipe": MXFP8, "include": ["norms.*"]}, "include pattern 'norms.*' matches no dense linear of the source"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text below
        WeightStream(quantized("mxfp8"), config=CONFIG, **options)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("name", EXPORTED)
def test_dense_linears_are_quantized_on_the_way(name: str) -> None:
    """To the bytes of quantize()."""
    stream = WeightStream(dense(name), config=CONFIG, recipe=EXPORTED[name], include=["layers.*"])
    expected = WeightStream(quantized(name), config=CONFIG)
    assert stream.metadata() == expected.metadata()
    assert_same(streamed(stream), streamed(expected))
    state = WeightStream(dense(name).state_dict(), config=CONFIG, recipe=EXPORTED[name], exclude=["lm_head"])
    assert_same(streamed(state), streamed(expected))


def test_fused_dense_linears_are_quantized_once_under_their_largest_scale() -> None:
    weights = {
        f"{own}_proj.weight": torch.randn(32, 64, generator=torch.manual_seed(n)) * (n + 1)
        for n, own in enumerate("qkv")
    }
    with pytest.raises(ValueError, match="engines run these as one linear with one global scale, and theirs differ"):
        WeightStream(weights, recipe=NVFP4)
    found = streamed(WeightStream(weights, recipe=NVFP4, fused_scales="requantize"))
    largest = max(float(weight.abs().max()) for weight in weights.values())
    for name, weight in weights.items():
        together = quantize(torch.cat([weight, torch.full((1, 64), largest)]), NVFP4)  # under the largest amax
        module = name.removesuffix(".weight")
        assert torch.equal(found[f"{module}.weight_packed"], together.payload[:32])
        assert torch.equal(raw(found[f"{module}.weight_scale"]), raw(together.scale[:32]))


def test_defaults_of_the_caller_do_not_matter() -> None:
    model, other = quantized("nvfp4"), dense("nvfp4")
    expected = streamed(WeightStream(model, config=CONFIG))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert_same(streamed(WeightStream(model, config=CONFIG)), expected)
            on_the_way = WeightStream(other, config=CONFIG, recipe=NVFP4, include=["layers.*"])
            assert_same(streamed(on_the_way), expected)
    finally:
        torch.set_default_dtype(torch.float32)


SHARING = {each.name: each for each in TABLE if kernels.shares_amax(each.recipe) and not each.history}


@pytest.mark.parametrize("name", SHARING)
def test_the_scale_that_a_plan_reads_is_that_of_the_gathered_weight(name: str) -> None:
    weight = HighPrecisionWeight(values((32, 64), 3), SHARING[name].recipe)
    assert torch.equal(weight.shared_scale(), weight.quantize().parts()[SHARING[name].tensor_wide or "scale"])


# -- shards ------------------------------------------------------------------------------------------------------------


def _stream_and_export(name: str, path: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)  # casts what forwards gather
    model = sharded(quantized(name), mesh, mp_policy=policy)
    export_hf(model, f"{path}/{name}", config=CONFIG, max_shard_size=20_000)
    expected = files(f"{path}/{name}")
    ranks = dist.get_world_size()
    for to in ("first", "all"):
        stream = WeightStream(model, config=CONFIG, bucket_bytes=4000, to=to)
        assert {each.name for each in stream.metadata()} == expected.keys()
        with Collectives() as comms:
            buckets = list(stream)
        assert len(buckets) == len(stream.sizes)
        if stream.receives:
            assert_same(streamed(buckets), expected)
        else:
            assert not any(buckets)
        if ranks > 1:
            helps = to == "first" and len(mesh_shape) == 2 and dist.get_rank() >= mesh_shape[1]
            kind = "gather_" if to == "first" else "_allgather_base_"
            assert comms.counts[kind] == (0 if helps else GROUPS), comms.counts
    assert all(isinstance(param, DTensor) for param in model.parameters())


# All formats on 2 ranks; replicas change who sends, and what scales for all and blocks that are cut are agreed with.
STREAMED = [((2,), tuple(EXPORTED)), ((2, 2), ("float8_block_square", "nvfp4"))]
FEW = ("float8_tensor", "float8_block_square", "nvfp4", "int4_32", "mxfp8_square")
OTHERS = [((2, 2), ("float8_tensor", "int4_32", "mxfp8_square")), ((1,), FEW), ((4,), FEW)]


@sampled(("mesh", "names"), [*STREAMED, *OTHERS], STREAMED)
def test_shards_are_streamed_as_they_are_exported(
    mesh: tuple[int, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    """And the export is that of one process; one collective brings a group together."""
    there = agreed(value=str(tmp_path))
    run_ranks_each(torch.Size(mesh).numel(), names, _stream_and_export, there, mesh)
    for name in names:
        assert_same(files(f"{there}/{name}"), streamed(WeightStream(quantized(name), config=CONFIG)))


def _of_high_precision(name: str) -> None:
    model = sharded(high_precision(EXPORTED[name], rows_for(name)))
    sync_scales(model)
    found = streamed(WeightStream(model, config=CONFIG, to="all"))
    expected: dict[str, Any] = {}
    with unsharded(model):  # what forwards compute with
        for fqn, param in model.named_parameters():
            local = local_of(param)
            expected[fqn] = local.parts() if isinstance(local, QuantizedTensor) else local.detach().clone()
        for fqn, parts in expected.items():
            module = fqn.removesuffix(".weight")
            if isinstance(parts, Tensor):
                assert torch.equal(raw(found[fqn]), raw(parts)), fqn
                continue
            packed = found.get(f"{module}.weight_packed", found.get(f"{module}.weight"))
            assert torch.equal(raw(packed), raw(parts["payload"])), fqn
            if parts["scale"].ndim == 2 and "block" not in name:
                assert torch.equal(raw(found[f"{module}.weight_scale"]), raw(parts["scale"])), fqn


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_forwards_gather_of_dense_shards_is_streamed(ranks: int) -> None:
    names = ("float8_row", "float8_tensor", "mxfp8", "nvfp4", "int4_32")
    run_ranks_each(ranks, names, _of_high_precision)


def _recipe_on_shards(name: str) -> None:
    model = sharded(dense(name))
    stream = WeightStream(model, config=CONFIG, recipe=EXPORTED[name], include=["layers.*"], to="all")
    assert_same(streamed(stream), streamed(WeightStream(quantized(name).state_dict(), config=CONFIG, to="all")))


def test_dense_shards_are_quantized_as_the_whole_weight_would_be() -> None:
    run_ranks_each(2, ("float8_tensor", "float8_block_square", "nvfp4", "mxfp8_square"), _recipe_on_shards)


def _ways_of_cutting() -> None:
    """Columns and rows at once, as tensor parallelism under FSDP has them, and replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weights = {f"{n}.weight": torch.randn(32, 128, generator=torch.manual_seed(n)).bfloat16() for n in range(4)}
    places: list[list[Any]] = [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
        [Replicate()] * 2,
    ]
    state = {
        name: distribute_tensor(weight, mesh, placed)
        for (name, weight), placed in zip(weights.items(), places, strict=True)
    }
    stream = WeightStream(state, recipe=MXFP8, to="all", group_of=lambda _: "all")
    with Collectives() as comms:
        found = streamed(stream)
    assert_same(found, streamed(WeightStream(weights, recipe=MXFP8, to="all")))
    assert comms.counts["_allgather_base_"] == 2  # one for each mesh dim on which something is cut alone


def test_whatever_is_not_cut_in_one_way_is_gathered_by_itself() -> None:
    run_ranks(4, _ways_of_cutting)


# -- what a stream leaves behind ---------------------------------------------------------------------------------------


def _twins(leave_after: int) -> None:
    def step(model: Model, number: int) -> None:
        tokens = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(number + dist.get_rank()))
        model(tokens).float().square().mean().backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    streams, twin = (sharded(high_precision(NVFP4)) for _ in range(2))
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1) for model in (streams, twin)}
    for model in (streams, twin):
        sync_scales(model)
        step(model, 0)
        sync_scales(model)
    stream = WeightStream(streams, config=CONFIG, bucket_bytes=2000)
    for number, _ in enumerate(stream):
        assert all(isinstance(param, DTensor) for param in streams.parameters())
        if number == leave_after:
            break
    for model in (streams, twin):
        step(model, 1)
    for (fqn, one), other in zip(streams.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(raw(_values(one)), raw(_values(other))), fqn


def _values(param: Tensor) -> Tensor:
    local: Any = local_of(param)
    return local.dense if hasattr(local, "dense") else local.detach()


@pytest.mark.parametrize("leave_after", [0, 3, 10**6])
def test_training_goes_on_as_if_nothing_had_been_streamed(leave_after: int) -> None:
    """Whether the stream was taken to its end or left half-way; with a group kept gathered after the forward."""
    run_ranks(2, _twins, leave_after)


def _starts_ahead() -> list[int]:
    model = sharded(quantized("mxfp8"))
    stream = WeightStream(model, config=CONFIG, bucket_bytes=1)  # each tensor alone
    groups = [sum(each.name.startswith(f"layers.{n}.") for each in stream.metadata()) for n in range(3)]
    began = []
    with Collectives() as comms:
        for bucket in stream:
            del bucket
            began.append(comms.counts["gather_"])
    root = len(stream.metadata()) - sum(groups)
    return [began[0], began[root], began[root + groups[0]], began[-1]]


def test_the_next_gather_has_begun_before_a_bucket_is_handed_out() -> None:
    assert run_ranks(2, _starts_ahead) == [[2, 3, 4, 4]] * 2


def _most_bytes(layers: int) -> tuple[int, int, int]:
    model = sharded(quantize_layers(filled(Model((256, 64), layers))))
    stream = WeightStream(model, config=CONFIG, bucket_bytes=10_000)
    group = sum(each.nbytes for each in stream.metadata() if each.name.startswith("layers.0."))
    next(iter(stream))  # what is made once
    with BytesAlive() as alive:
        for bucket in stream:
            del bucket
    return alive.most, group, stream.nbytes


def quantize_layers(model: Model) -> Model:
    quantize_(model, MXFP8, include=["layers.*"])
    return model


def test_memory_is_that_of_groups_and_a_bucket_whatever_the_size_of_the_model() -> None:
    """On the rank that receives: this group, the next one, a bucket, and a tensor in the making."""
    (small, group, _), helper = run_ranks(2, _most_bytes, 4)
    (large, _, nbytes), _ = run_ranks(2, _most_bytes, 12)
    # two groups, the bucket and its last tensor (256 x 128), twice in the making
    bound = 2 * group + 10_000 + 3 * 256 * 128
    assert nbytes > 2 * bound  # so the bound says something
    assert small <= bound
    assert large <= bound
    assert large - small < group / 4  # but for the plan
    assert helper[0] < 2 * group  # its own shards of two groups


# -- ranks that differ, and errors -------------------------------------------------------------------------------------


def _disagrees(what: str) -> str:
    model = sharded(high_precision(Float8CurrentScaling(granularity="tensor")))
    options: dict[str, Any] = {}
    if what == "arguments" and dist.get_rank() == 1:
        options["layout"] = "modelopt"
    if what == "buckets" and dist.get_rank() == 1:
        options["bucket_bytes"] = 1000
    if what == "a group_of that fails" and dist.get_rank() == 1:
        options["group_of"] = int
    if what != "scales":
        sync_scales(model)
    with Collectives() as comms:
        try:
            WeightStream(model, config=CONFIG, **options)
        except ValueError as error:
            assert not comms.counts["gather_"] + comms.counts["_allgather_base_"], comms.counts
            return str(error)
    return "nothing was raised"


def test_ranks_that_differ_are_told_before_anything_is_gathered() -> None:
    scales = run_ranks(2, _disagrees, "scales")
    text = "differ in the values of tensor-wide scales; call fsdp_hooks.sync_scales on the model first"
    assert scales == [f"WeightStream: ranks 0 and 1 {text}"] * 2
    text = "differ in group_of=, bucket_bytes=, to= or keep_last=; give all ranks the same arguments"
    assert run_ranks(2, _disagrees, "buckets") == [f"WeightStream: ranks 0 and 1 {text}"] * 2
    text = "rank 1: invalid literal for int() with base 10: 'embed_tokens.weight'"
    assert run_ranks(2, _disagrees, "a group_of that fails") == [text] * 2
    arguments = run_ranks(2, _disagrees, "arguments")
    assert len(set(arguments)) == 1
    assert "modelopt" in arguments[0] or "differ in what is to become of them" in arguments[0]


def _not_finite() -> tuple[str, int, int]:
    model = dense("mxfp8")
    with torch.no_grad():
        model.layers[1].o_proj.weight[5, 5] = float("nan")
    quantize_(model, MXFP8, include=["layers.*"])
    model = sharded(model)
    stream = WeightStream(model, config=CONFIG, bucket_bytes=3000)
    taken = 0
    try:
        for bucket in stream:
            taken += bool(bucket)
    except ValueError as error:
        assert all(isinstance(param, DTensor) for param in model.parameters())
        return str(error), taken, stream.version
    return "nothing was raised", taken, stream.version


def test_an_error_on_the_rank_that_receives_is_raised_on_all() -> None:
    (first, taken, version), (second, _, _) = run_ranks(2, _not_finite)
    text = "layers.1.o_proj.weight holds NaN: what it was quantized from was not finite; an engine would run on it"
    assert first.endswith(text)
    assert second.endswith(text)
    assert taken > 0
    assert version == 0


def _fully_sharded_root_only() -> None:
    model = fully_shard(quantized("mxfp8"))
    stream = WeightStream(model, config=CONFIG)
    with Collectives() as comms:
        found = streamed(stream)
    assert comms.counts["gather_"] == 1
    by_layer = WeightStream(model, config=CONFIG, group_of=lambda name: name.split(".")[:2] == ["layers", "0"])
    with Collectives() as comms:
        again = streamed(by_layer)
    assert comms.counts["gather_"] == 2
    assert_same(again, found)


def test_groups_are_those_of_fsdp_or_of_the_caller() -> None:
    run_ranks(2, _fully_sharded_root_only)
