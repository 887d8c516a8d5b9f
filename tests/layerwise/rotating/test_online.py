"""`rotate_(online=...)`: the same function, with inputs that are rotated at run time; or refused, nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise import rotate_
from qtensor.products.input_rotation import input_rotations
from tests.layerwise.rotating.decoders import BLOCK, HIDDEN, WIDE, Mlp, decoder, digest, expected, ids, matrix
from tests.layerwise.rotating.test_rotate import EXACT, _difference, refused

DOWN = [f"layers.{index}.mlp.down_proj" for index in range(2)]
ONLY: dict[str, Any] = {"where": (), "online": ["*down_proj"]}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("where", [(), ("stream",), ("values",), ("stream", "values")])
def test_the_function_stays_and_the_weights_change(bias: bool, where: tuple[str, ...]) -> None:
    model = decoder(bias=bias)
    dense, others = copy.deepcopy(model), copy.deepcopy(model)
    report = rotate_(model, ids(), where=where, block=BLOCK, online=["*down_proj"])
    assert report.online == input_rotations(model) == dict.fromkeys(DOWN, BLOCK)
    assert report.difference < EXACT
    assert _difference(dense, model) < EXACT
    if where:
        rotate_(others, ids(), where=where, block=BLOCK)
    turned, found, was = matrix(WIDE, WIDE, BLOCK, None), model.state_dict(), others.state_dict()
    assert found.keys() - was.keys() == {f"{name}.input_rotation" for name in DOWN}
    for name, value in found.items():
        if name not in was:
            assert (value.dtype, value.shape) == (torch.uint8, (BLOCK,))
        elif name.removesuffix(".weight") in DOWN:  # no signs, whatever the seed: engines have none
            torch.testing.assert_close(value, was[name] @ turned, rtol=0, atol=1e-13)
            assert name in report.changed
        else:
            assert torch.equal(value, was[name]), name


def test_what_reaches_the_weight_is_the_rotated_input() -> None:
    model = decoder()
    dense = copy.deepcopy(model)
    rotate_(model, ids(), block=BLOCK, **ONLY)
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(args[0])

    for each in (dense, model):
        each.layers[1].mlp.down_proj.register_forward_hook(note)
        each(ids())
    torch.testing.assert_close(seen[1], seen[0] @ matrix(WIDE, WIDE, BLOCK, None), rtol=0, atol=1e-13)


def test_blocks_of_their_own() -> None:
    model = decoder()
    wanted = expected(model, BLOCK, 0)
    report = rotate_(model, ids(), block=BLOCK, online={"layers.0.*down_proj": 4, "layers.1.*down_proj": 8})
    assert report.online == {DOWN[0]: 4, DOWN[1]: 8}
    for name, block in report.online.items():
        value = wanted[f"{name}.weight"] @ matrix(WIDE, WIDE, block, None)
        torch.testing.assert_close(model.get_parameter(f"{name}.weight"), value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_differ_by_rounding(dtype: torch.dtype) -> None:
    model = decoder(dtype)
    dense = copy.deepcopy(model)
    report = rotate_(model, ids(), block=BLOCK, **ONLY)
    assert 0 < report.difference <= report.allowed
    assert _difference(dense, model) <= report.allowed


def test_an_output_projection_takes_it_where_values_are_not_rotated() -> None:
    model = decoder()
    dense = copy.deepcopy(model)
    rotate_(model, ids(), block=BLOCK, where=("stream",), online=["*o_proj"])
    assert _difference(dense, model) < EXACT
    message = "layers.0.self_attn.o_proj, which online= names, takes what is rotated without it; leave it out of online"
    refused(decoder(), NotImplementedError, message, online=["*o_proj"])
    refused(decoder(), NotImplementedError, message.replace("o_proj", "q_proj"), online=["*q_proj"])


OPTIONS: dict[str, tuple[type[Exception], Any, str]] = {
    "a string": (TypeError, "*down_proj", "online is a list of patterns, got '*down_proj'; write ['*down_proj']"),
    "nothing": (ValueError, ["*.w2"], "the pattern '*.w2' of online= matches no module"),
    "no power": (ValueError, {"*down_proj": 20}, "online= has 20 for '*down_proj', which is not a power of two from 2"),
    "no size": (ValueError, {"*down_proj": True}, "online= has True for '*down_proj', which is not a power of two"),
    "too large": (
        ValueError,
        {"*down_proj": 32},
        "block=32 does not divide the 80 inputs of layers.0.mlp.down_proj, which online= names",
    ),
    "several": (
        ValueError,
        {"*down_proj": 16, "*.1.mlp.down*": 8},
        "online= has several blocks for layers.1.mlp.down_proj: 8, 16",
    ),
    "a norm": (TypeError, ["norm"], "norm is a RMSNorm; only nn.Linear, as it is, can be rotated"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_do_not_fit(case: str) -> None:
    error, online, message = OPTIONS[case]
    refused(decoder(), error, message, where=(), online=online)


def test_a_second_time_is_refused() -> None:
    model = decoder()
    rotate_(model, ids(), block=BLOCK, **ONLY)
    message = "the inputs of layers.0.mlp.down_proj are rotated at run time already; leave it out of online="
    refused(model, ValueError, message, **ONLY)
    rotate_(model, ids(), block=BLOCK)  # the stream and the values, afterwards
    assert _difference(decoder(), model) < EXACT


@pytest.mark.parametrize("shared", ["weight", "module"])
def test_shared_weights_are_refused(shared: str) -> None:
    model = decoder()
    first, second = (layer.mlp for layer in model.layers)
    if shared == "weight":
        second.down_proj.weight = first.down_proj.weight
    else:
        second.down_proj = first.down_proj
    message = "the weight of layers.0.mlp.down_proj, which online= names, has other names or uses in the model"
    refused(model, NotImplementedError, message, **ONLY)


class Aside(Mlp):
    """Takes the weight without calling its module, half of the time."""

    def forward(self, x: Tensor) -> Tensor:
        wide = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return (self.down_proj(wide) + F.linear(wide, self.down_proj.weight)) / 2


def test_a_weight_that_is_used_without_its_module_is_refused() -> None:
    model = decoder()
    aside = Aside(bias=False).double()
    aside.load_state_dict(model.layers[0].mlp.state_dict())
    model.layers[0].mlp = aside
    message = (
        "other signs in the inputs of layers.0.mlp.down_proj, layers.1.mlp.down_proj and in the columns of their "
        "weights changed the model's outputs: something uses a weight in another way than by calling the module"
    )
    refused(model, NotImplementedError, message, **ONLY)
    assert not input_rotations(model)


def test_a_batch_that_does_not_show_it_is_refused() -> None:
    model = decoder()
    for layer in model.layers:
        nn.init.zeros_(layer.mlp.up_proj.weight)
    message = "other signs in the weights of layers.0.mlp.down_proj, layers.1.mlp.down_proj do not show in the model's"
    refused(model, ValueError, message, **ONLY)
    idle = decoder()
    idle.layers[0].spare = nn.Linear(HIDDEN, HIDDEN)
    message = "the batch does not reach layers.0.spare, so nothing can be shown of it; give more tokens"
    refused(idle.double(), ValueError, message, where=(), online=["*spare"])


def stopped_after(model: nn.Module, last: int) -> int:
    """Rotate a model whose run behind the last of these fails. Returns how many there were."""
    runs = 0

    def fail(*_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs > last:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(fail)
    try:
        rotate_(model, ids(), block=BLOCK, online=["*down_proj"])
    finally:
        handle.remove()
    return runs


def test_all_is_put_back_where_a_run_fails() -> None:
    """In every run in turn, the last of them with the hooks in place."""
    for last in range(stopped_after(decoder(), 100)):
        model = decoder()
        was = digest(model)
        with pytest.raises(KeyboardInterrupt):
            stopped_after(model, last)
        assert digest(model) == was, f"after {last} runs"
        assert not input_rotations(model)
        assert not any(module._forward_pre_hooks for module in model.layers.modules())
    assert last > 9
