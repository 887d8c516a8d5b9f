"""Which modules are the layers, however they are given; linears outside of them are calibrated too, on true inputs."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise import GPTQ, Event, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from tests.layerwise.algorithm_table import ALGORITHMS
from tests.layerwise.families import assert_same, batches_for, family, off

DIM = 32
FP8 = Float8CurrentScaling()


class Block(nn.Module):
    """A linear with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Wide(Block):
    """Another class, which returns a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x) * 2, None


class Net(nn.Module):
    """Linears before, beside and behind two lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, DIM)
        self.encoder = nn.ModuleList([Block(), Wide(), Block()])
        self.beside = nn.Linear(DIM, DIM)
        self.decoder = nn.ModuleList([Block(), Block(), Wide()])
        self.behind = nn.ModuleDict({"norm": nn.LayerNorm(DIM), "head": nn.Linear(DIM, 48)})
        with torch.no_grad():
            for param in self.parameters():
                param.add_(0.2 * torch.randn(param.shape))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        beside = self.beside(torch.tanh(hidden))
        for layer in self.encoder:
            out = layer(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        hidden = torch.tanh(hidden) + beside
        for layer in self.decoder:
            out = layer(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.behind["head"](self.behind["norm"](hidden))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, length, 16, generator=generator) for length in (5, 3, 4)]


def run(model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    model = Net() if model is None else model
    options = {"recipe": FP8, "progress": False, **options}
    return calibrate(model, batches() if data is None else data, **options)


@torch.no_grad()
def seen_amaxes(model: nn.Module, data: list[Any]) -> dict[str, Tensor]:
    """The largest |input| of every linear, by hooks on the model as it is."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            amax = args[0].abs().amax()
            found[name] = torch.maximum(found[name], amax) if name in found else amax

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note(name))
    for batch in data:
        model(**batch) if isinstance(batch, dict) else model(batch)
    return found


WAYS: dict[str, Any] = {
    "said nothing": lambda net: None,
    "all at once": lambda net: (),
    "a list's name": lambda net: "decoder",
    "names": lambda net: ["encoder.0", "encoder.1", "encoder.2"],
    "a pattern": lambda net: "*coder.?",
    "modules": lambda net: list(net.decoder),
    "a module list": lambda net: net.encoder,
    "two lists": lambda net: [net.encoder, "decoder"],
    "one layer": lambda net: "decoder.1",
    "the head": lambda net: ["behind.head"],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_give_layers_gives_the_same_bytes(way: str) -> None:
    net = Net()
    state = run(net, layers=WAYS[way](net), inputs="static").state_dict()
    assert_same(state, run(layers=(), inputs="static").state_dict(), way)
    amaxes = seen_amaxes(Net(), batches())
    assert {f"{name}.input_scale" for name in amaxes} == {name for name in state if name.endswith("input_scale")}
    for name, amax in amaxes.items():
        scale = quantize(amax.reshape(1, 1), Float8CurrentScaling(granularity="tensor")).scale
        assert torch.equal(state[f"{name}.input_scale"], scale.reshape(())), name


@pytest.mark.parametrize(
    ("way", "stages"),
    [
        ("said nothing", ["decoder.0", "decoder.1", "decoder.2", ""]),
        ("all at once", [""]),
        ("two lists", [*(f"{kind}coder.{index}" for kind in ("en", "de") for index in range(3)), ""]),
        ("one layer", ["decoder.1", ""]),
    ],
)
def test_layers_take_their_turn_in_order_and_what_is_outside_comes_last(way: str, stages: list[str]) -> None:
    net = Net()
    with torch.no_grad():
        net.decoder[2].up.weight.mul_(2)  # of two lists of one size the first would do
    events: list[Event] = []
    run(net, layers=WAYS[way](net) if way != "said nothing" else "decoder", on_event=events.append)
    assert [event.layer for event in events if event.kind == "layer_start"] == stages
    assert {(event.index, event.layer, event.count) for event in events} == {
        (index, name, len(stages)) for index, name in enumerate(stages)
    }


@pytest.mark.parametrize(
    "algorithm",
    [*ALGORITHMS.values(), GPTQ(act_order=True, hessians="one_at_a_time")],
    ids=lambda one: type(one).__name__,
)
def test_linears_outside_of_the_layers_are_calibrated_by_every_algorithm(algorithm: Any) -> None:
    net, original = Net(), Net()
    with torch.no_grad():
        expected = original(batches()[0])
    result = run(net, algorithm=algorithm, recipe=NVFP4BlockScaling(), layers=["encoder", "decoder"])
    linears = {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    state = result.state_dict()
    assert linears == {name for name, value in state.items() if isinstance(value, QuantizedTensor)}
    assert {record.name: record.layer is None for record in result.report.records} == {
        name: "coder" not in name for name in linears
    }
    assert all(record.tokens == 24 and record.snr_db > 10 for record in result.report.records)
    with torch.no_grad():
        assert 0 < off(net(batches()[0]), expected) < 0.4
    for name, value in state.items():
        now = net.get_parameter(name)
        assert torch.equal(now, value.dequantize() if isinstance(value, QuantizedTensor) else value), name


def test_the_head_is_calibrated_on_what_the_layers_were_calibrated_on() -> None:
    """With layer_inputs="quantized" its inputs are those of the model with quantized layers."""
    net = Net()
    options = {"recipe": NVFP4BlockScaling(), "exclude": ["be*e"], "layers": ["encoder", "decoder"], "inputs": "static"}
    state = run(net, layer_inputs="quantized", **options).state_dict()
    amax = seen_amaxes(net, batches())["behind.head"]
    expected = quantize(amax.expand(1, 16), NVFP4BlockScaling()).global_scale
    assert torch.equal(state["behind.head.input_scale"], expected.reshape(()))
    unquantized = run(**options).state_dict()
    assert not torch.equal(unquantized["behind.head.input_scale"], state["behind.head.input_scale"])


def test_include_and_exclude_are_globs_over_modules() -> None:
    net = Net()
    before = {name: param.clone() for name, param in net.named_parameters()}
    state = run(net, include=["behind.*", "encoder.*"], exclude=["*.up"], layers="encoder").state_dict()
    assert set(state) == {"behind.head.weight", *(f"encoder.{index}.down.weight" for index in range(3))}
    changed = {name for name, param in net.named_parameters() if not torch.equal(param, before[name])}
    assert changed == set(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": "decode"},
            r"'decode' matches no module of the model; its module lists are 'encoder' \(3 modules\)",
        ),
        ({"layers": ["encoder", "encoder.0.up"]}, r"'encoder.0.up' is inside 'encoder.0'; .* name one of them"),
        ({"layers": [3]}, "layers must be names, patterns or modules of the model, got a int: 3"),
        ({"layers": nn.Linear(2, 2)}, "a Linear was given that is not in the model"),
        ({"include": ["lm_head"]}, "include pattern 'lm_head' matches no module with a weight to quantize"),
        ({"include": "behind.*"}, r"include is a list of patterns, got 'behind.\*'; write \['behind.\*'\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    net = Net()
    before = {name: param.clone() for name, param in net.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=message):
        run(net, **options)
    assert all(torch.equal(param, before[name]) for name, param in net.named_parameters())


def test_an_exclude_pattern_that_matches_nothing_warns() -> None:
    with pytest.warns(UserWarning, match="exclude pattern 'lm_head' matches no module with a weight to quantize"):
        result = run(exclude=["lm_head"])
    with warnings.catch_warnings(record=True) as caught:
        assert_same(result.state_dict(), run().state_dict())
    assert not caught


def test_layers_in_another_order_than_they_are_called_in_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"layer decoder\.1 is called before decoder\.2 in one forward"):
        run(layers=["decoder.2", "decoder.1"])


def test_a_layer_that_is_never_called_is_refused_by_name() -> None:
    net = Net()
    net.decoder.append(Block())
    net.decoder[3].forward = None  # type: ignore[method-assign,assignment]
    layers = net.decoder
    net.decoder = nn.ModuleList(layers[:3])
    net.unused = layers[3]
    with pytest.raises(NotImplementedError, match="layer unused was not called in the model's forward of batch 0"):
        run(net, layers=["decoder", "unused"])


def test_a_sequential_is_a_list_of_layers_itself() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(first=nn.Linear(16, DIM), second=Block(), third=nn.Linear(DIM, 8)))

    events: list[Event] = []
    state = run(model(), on_event=events.append, inputs="static").state_dict()
    starts = [event.layer for event in events if event.kind == "layer_start"]
    assert starts == ["first", "second", "third"]
    assert_same(state, run(model(), layers=(), inputs="static").state_dict(), "all at once")


def test_a_model_without_any_list_is_one_stage() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(16, DIM), nn.Linear(DIM, 16)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.two(torch.relu(self.one(x))) * scale

    model, events = Plain(), []
    data = [{"x": batch, "scale": 2.0} for batch in batches()]
    state = run(model, data, algorithm=GPTQ(), recipe=MXFP8BlockScaling(), on_event=events.append, exclude=["one"])
    assert [event.layer for event in events if event.kind == "layer_start"] == [""]
    assert set(state.state_dict()) == {"two.weight"}
    linear = nn.Linear(16, DIM)
    assert set(run(linear).state_dict()) == {"weight"}, "a model that is a linear itself"


def test_layers_that_have_nothing_to_quantize_are_passed_through() -> None:
    state = run(exclude=["encoder.1.*", "decoder.0.*"], layers=["encoder", "decoder"], inputs="static").state_dict()
    whole = run(exclude=["encoder.1.*", "decoder.0.*"], layers=(), inputs="static").state_dict()
    assert not [name for name in state if name.startswith(("encoder.1.", "decoder.0."))]
    assert_same(state, whole)


def test_a_module_between_two_lists_is_refused_by_name() -> None:
    class Between(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.behind["head"](self.decoder[0](self.beside(self.encoder[0](self.before(x)))))

    message = r"the model takes the output of encoder\.0, which is not kept: .* Give these layers as one module"
    with pytest.raises(NotImplementedError, match=message):
        run(Between(), layers=["encoder.0", "decoder.0"], exclude=["encoder.[12].*", "decoder.[12].*"])


def test_both_lists_of_an_encoder_and_a_decoder() -> None:
    lists = ["encoder.block", "decoder.block"]
    results, models = [], []
    for layers in (lists, None, ()):
        models.append(family("t5"))
        options: dict[str, Any] = {"layers": layers, "inputs": "static", "recipe": NVFP4BlockScaling()}
        results.append(run(models[-1], batches_for("t5"), **options).state_dict())
    assert_same(results[0], results[2], "two lists")
    assert_same(results[1], results[2], "the larger list")
