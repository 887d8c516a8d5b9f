"""Compiled graphs in torch's cache on disk: one of another weight, or of other code of ours, is never taken."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import standalone_compile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from fsdp_hooks.release import VERSION
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    quantize,
    quantized_model_init,
)
from qtensor.numerics import graph_key
from qtensor.numerics.graph_key import HERE, THIS_CODE, KeyTag, code_digest
from tests.qtensor.recipes_under_test import DELAYED, MAIN, RECIPES
from tests.ranks import run_ranks
from tests.torch_versions.release import RELEASE

INPUT = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def values(rows: int = 32) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))


def parameter(recipe: Any = None, rows: int = 32, *, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(quantize(values(rows), recipe or MXFP8BlockScaling()), requires_grad=trained)


def in_high_precision(recipe: Any, rows: int = 32) -> nn.Parameter:
    with quantized_model_init(recipe, storage="high_precision"):
        return nn.Linear(64, rows, bias=False).weight


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that begins empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


def compiled(weight: nn.Parameter) -> tuple[Tensor, Tensor | None, str]:
    """Output, the weight's gradient, and how a process that has compiled nothing yet came to the graph."""
    x = INPUT.clone().requires_grad_()
    with as_in_a_new_process() as found:
        y = torch.compile(lambda x, w: F.linear(x, w).square(), fullgraph=True)(x, weight)
        y.sum().backward()
    return y, weight.grad, found[0]


@contextmanager
def as_in_a_new_process() -> Iterator[list[str]]:
    """Inside, what is on disk is known and what is in memory is not; "hit" or "miss" for each graph, at the end."""
    torch.compiler.reset()
    counters.clear()
    found: list[str] = []
    yield found
    count = counters["aot_autograd"]
    found += [each for each in ("hit", "miss") for _ in range(count[f"autograd_cache_{each}"])]


WEIGHTS: dict[str, nn.Parameter] = {
    "first": parameter(),
    "frozen": parameter(trained=False),
    "more rows": parameter(rows=48),
    "of another recipe": parameter(Float8CurrentScaling()),
    "of another element": parameter(Float8CurrentScaling(element="e5m2")),
    "of other blocks": parameter(MXFP8BlockScaling(blocks="square")),
}


# In `make test` those that torch's own key tells least apart; below, the keys of every option of a recipe are compared.
@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize(
    "names",
    [("first", "frozen", "of another element"), pytest.param(tuple(WEIGHTS), marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_a_graph_of_another_weight_is_never_taken(names: tuple[str, ...]) -> None:
    weights = {name: WEIGHTS[name] for name in names}
    for name, weight in weights.items():
        weight.grad = None
        y, grad, found = compiled(weight)
        assert found == "miss", name
        assert torch.allclose(y, F.linear(INPUT, weight.detach().dequantize()).square(), rtol=1e-5), name
        assert (grad is None) == (not weight.requires_grad), name
        if grad is not None:
            assert grad.shape == weight.shape, name
    for name, weight in weights.items():  # and the right one is
        assert compiled(weight)[2] == "hit", name


def options(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe, and what it offers besides."""
    yield recipe
    dynamic = dataclasses.replace(recipe, activations="dynamic")
    yield from (dynamic, *(dataclasses.replace(dynamic, gradients=each) for each in recipe.gradient_elements))


def weights(of: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that differ in one thing each, of these recipes among others."""
    recipes = [each for recipe in of.values() for each in options(recipe)]
    plain: dict[str, Any] = {f"{recipe}": parameter(recipe) for recipe in recipes}
    plain |= {f"dense, {each}": in_high_precision(each) for each in recipes if type(each) is not Float8DelayedScaling}
    plain |= {
        "frozen": WEIGHTS["frozen"],
        "more rows": WEIGHTS["more rows"],
        "bf16": quantize(values().bfloat16(), NVFP4BlockScaling()),
        "meta": quantize(values().to("meta"), NVFP4BlockScaling()),
        "a view": quantize(values(), NVFP4BlockScaling())[:16],
        "16 rows": quantize(values(16), NVFP4BlockScaling()),
        "turned": quantize(values(), NVFP4BlockScaling()).t(),
        "dense, more rows": in_high_precision(NVFP4BlockScaling(), 48),
        "dense, frozen": in_high_precision(NVFP4BlockScaling()).requires_grad_(False),
    }
    with quantized_model_init(NVFP4BlockScaling(), preserve_high_precision_init_val=True):
        plain["with its initial value"] = nn.Linear(64, 32, bias=False).weight
    return plain


def keys() -> dict[str, str]:
    return {name: weight._stable_hash_for_caching() for name, weight in weights(RECIPES | DELAYED).items()}


def test_whatever_a_trace_depends_on_is_in_the_key() -> None:
    found = keys()
    assert len({*found.values()}) == len(found)
    assert found == keys()


def test_the_key_changes_with_the_vectors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = parameter()._stable_hash_for_caching()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "of another CPU")
    assert parameter()._stable_hash_for_caching() != before


def test_the_key_changes_with_our_code(tmp_path: Path) -> None:
    copies = tuple(Path(shutil.copytree(package, tmp_path / package.name)) for package in HERE)
    before = code_digest(copies)
    assert before == code_digest(HERE)
    assert code_digest(HERE) in parameter()._stable_hash_for_caching()
    assert code_digest(HERE) in in_high_precision(MXFP8BlockScaling())._stable_hash_for_caching()
    file = copies[0] / "spec" / "codecs" / "e2m1.py"
    file.write_text(file.read_text().replace("4.0", "5.0") + "\n")
    code_digest.cache_clear()
    assert code_digest(copies) != before
    file.rename(file.with_name("other.py"))
    code_digest.cache_clear()
    assert code_digest(copies) != before


def test_without_files_the_version_takes_their_place(tmp_path: Path) -> None:
    assert code_digest((tmp_path,)) == VERSION


# -- inside of other wrappers ------------------------------------------------------------------------------------------


class Around(Tensor):
    """Somebody's wrapper, whose key says nothing of what is inside."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Around:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inside.shape, inside.stride(), dtype=inside.dtype, requires_grad=inside.requires_grad
        )
        made.inside = inside
        return made  # type: ignore[no-any-return]

    def __init__(self, inside: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return "Around(...)"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda each: each.inside if isinstance(each, Around) else each, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map(lambda each: Around(each) if isinstance(each, Tensor) else each, out)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Around:
        return Around(inner["inside"])

    def _stable_hash_for_caching(self) -> str:
        return f"Around {tuple(self.shape)} {self.dtype} {self.requires_grad}"


def tags_in_a_trace(found: dict[str, Any]) -> list[str]:
    """What torch pickles with its tag for a graph of all these weights: for each of them what is said of it."""
    pickled: list[tuple[str, ...]] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        pickled.append(torch.compiler.config.cache_key_tag.__reduce_ex__(4)[1])
        return graph.forward  # type: ignore[no-any-return]

    torch.compiler.reset()
    torch.compile(lambda every: [each.detach() for each in every], backend=backend, fullgraph=True)([*found.values()])
    ((_, *entries),) = pickled
    of_each = [[entry.partition(f"L['every'][{place}]")[2] for entry in entries] for place in range(len(found))]
    return ["\n".join(filter(None, said)) for said in of_each]


def test_no_wrapper_keeps_a_key_from_torch() -> None:
    def wrapped() -> dict[str, Any]:
        return {name: Around(Around(weight)) for name, weight in weights(MAIN | DELAYED).items() if name != "meta"}

    tags = tags_in_a_trace(wrapped())
    assert all(tags)
    assert len({*tags}) == len(tags)
    assert tags == tags_in_a_trace(wrapped())


@pytest.mark.usefixtures("on_disk")
def test_a_graph_of_another_weight_inside_a_wrapper_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    def output(recipe: Recipe) -> str:
        weight = parameter(recipe, trained=False)
        with as_in_a_new_process() as found, torch.no_grad():
            y = torch.compile(linear, fullgraph=True)(Around(INPUT), Around(weight))
        assert torch.allclose(y.inside, F.linear(INPUT, weight), rtol=1e-5, atol=1e-5), recipe
        return found[0]

    recipes = MXFP4BlockScaling(), Int4GroupScaling()
    assert [output(recipe) for recipe in recipes] == ["miss", "miss"]
    assert [output(recipe) for recipe in recipes] == ["hit", "hit"]
    monkeypatch.setattr(graph_key, "code_digest", lambda packages: "of another version")
    assert output(recipes[0]) == "miss"


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("shapes", ["from_tracing_context", "from_example_inputs", "from_graph"])
def test_a_piece_that_is_compiled_alone_has_the_keys_too(shapes: Any) -> None:
    """torch._inductor.standalone_compile has a trace of its own, in which dynamo takes no tensor."""

    def alone(graph: Any, inputs: Any) -> Any:
        return standalone_compile(graph, inputs, dynamic_shapes=shapes)

    def linear(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    def output(weight: nn.Parameter) -> list[str]:
        with as_in_a_new_process() as found, torch.no_grad():
            y = torch.compile(linear, backend=alone, fullgraph=True)(Around(INPUT), Around(weight))
        assert torch.allclose(y.inside, F.linear(INPUT, weight), rtol=1e-5, atol=1e-5)
        return found

    found = [parameter(recipe, trained=False) for recipe in (MXFP4BlockScaling(), Int4GroupScaling())]
    cached = [["miss"], ["miss"], ["hit"], ["hit"]]
    if torch.__version__ < "2.13" and shapes != "from_example_inputs":
        cached = [[]] * 4  # that torch cannot pickle wrappers with sizes of its dynamo's trace, and does without
    assert [output(weight) for weight in found * 2] == cached


PARALLEL = {"MXFP4": parameter(MXFP4BlockScaling()), "INT4": parameter(Int4GroupScaling())}
PARALLEL["frozen"] = parameter(MXFP4BlockScaling(), trained=False)


def parallel_linears(turn: int, cache: str) -> list[str]:
    """On one of the ranks, a process each: a linear of each weight, column-wise parallel, which takes no collective."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    if dist.get_rank() != turn:
        return []
    x = distribute_tensor(INPUT, mesh, [Replicate()], src_data_rank=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        for name, weight in PARALLEL.items():
            shard = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            w = nn.Parameter(shard, weight.requires_grad)
            with as_in_a_new_process() as how:
                y = torch.compile(lambda x, w: F.linear(x, w).to_local(), fullgraph=True)(x, w)
                if w.requires_grad:
                    y.sum().backward()
            assert torch.allclose(y, F.linear(INPUT, weight).chunk(2, 1)[turn], rtol=1e-5, atol=1e-5), name
            assert (w.grad is None) == (not w.requires_grad), name
            found += how
    return found


@pytest.mark.slow
def test_processes_share_graphs_of_a_parallel_linear_and_mix_up_none(tmp_path: Path) -> None:
    found = [run_ranks(2, parallel_linears, turn, str(tmp_path), timeout=240)[turn] for turn in range(2)]
    # torch 2.11 keeps no graph of DTensors of several ranks: it cannot make a key of their group
    assert found == ([["miss"] * 3, ["hit"] * 3] if RELEASE > (2, 11) else [[], []])


# -- the tag that carries the keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "mine"])
def test_the_tag_is_what_the_user_has_set(text: str) -> None:
    with torch.compiler.config.patch(cache_key_tag=text):
        parameter().__tensor_flatten__()
        assert type(torch.compiler.config.cache_key_tag) is str  # until a trace needs it
        assert tags_in_a_trace({"w": parameter()}) == [f": {parameter()._stable_hash_for_caching()}"]
        tag = torch.compiler.config.cache_key_tag
        assert isinstance(tag, KeyTag)
        for again in (tag, pickle.loads(pickle.dumps(tag)), copy.deepcopy(tag), str(tag), f"{tag}"):
            assert again == text
        assert type(str(tag)) is str


def test_a_compiled_graph_of_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = pickle.dumps(parameter().__tensor_flatten__()[1])
    assert pickle.loads(stored)[-1] is THIS_CODE
    monkeypatch.setattr(graph_key, "code_digest", lambda packages: "of another version")
    with pytest.raises(RuntimeError, match=r"^this compiled graph was traced through another version of qtensor"):
        pickle.loads(stored)
