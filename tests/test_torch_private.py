"""Private torch names: used in one file, each of them still there and still meaning what that file takes it to mean."""

import ast
import dataclasses
import datetime as dt
import inspect
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dcp_adapters import torch_private as dcp_private
from fsdp_hooks import torch_private
from qtensor import MXFP4BlockScaling, MXFP8BlockScaling, quantize, stochastic_rounding
from tests.ranks import run_ranks

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise")
ALLOWED_FILES = {"fsdp_hooks/torch_private.py", "dcp_adapters/torch_private.py"}

# Underscored attributes of torch's objects that other files use, and why that is no bet on torch's insides.
ATTRIBUTES = {
    "_parameters": "nn.Module's registry, the only place where a parameter can be exchanged",
    "_buffers": "the same for buffers",
    "_version": "the version counter that the autograd notes describe",
}


def foreign_names(tree: ast.AST) -> Iterator[str]:
    """Private names of torch that a file imports or reaches through a dotted name beginning with `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            path = (node.module or "").split(".")
            yield from (f"{node.module}.{alias.name}" for alias in node.names if any(map(private, [*path, alias.name])))
        elif isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if alias.name.startswith("torch") and any(map(private, alias.name.split(".")))
            )
        elif isinstance(node, ast.Attribute) and private(node.attr):
            dotted = ast.unparse(node)
            if dotted.startswith("torch.") and not dotted.startswith("torch.ops."):
                yield dotted


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(trees: Sequence[ast.AST]) -> set[str]:
    """Underscored names that the packages define themselves: functions, classes, attributes of self, annotations."""
    names: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def foreign_attributes(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Underscored attributes of objects that are not ours; names of ops are public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            yield from () if ast.unparse(node.value).startswith(("aten", "torch.ops")) else (node.attr,)


def sources(root: Path) -> dict[str, ast.AST]:
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {str(file.relative_to(root)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def test_private_names_of_torch_stand_in_their_files() -> None:
    used = {file: sorted(set(foreign_names(tree))) for file, tree in sources(REPO).items()}
    assert {file: names for file, names in used.items() if names and file not in ALLOWED_FILES} == {}
    assert all(used[file] for file in ALLOWED_FILES)


def test_private_attributes_are_the_listed_ones() -> None:
    trees = sources(REPO)
    own = own_names(list(trees.values()))
    used = {
        (file, name)
        for file, tree in trees.items()
        if file not in ALLOWED_FILES
        for name in foreign_attributes(tree, own)
    }
    assert {(file, name) for file, name in used if name not in ATTRIBUTES} == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._C import _nn", ["torch._C._nn"]),
        ("from torch.distributed.tensor._utils import x", ["torch.distributed.tensor._utils.x"]),
        ("from torch.nn import _reduction", ["torch.nn._reduction"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch\ntorch._foreach_add_([], [])", ["torch._foreach_add_"]),
        ("import torch\ntorch.ops.aten._to_copy.default\ntorch.__version__\nself._masters", []),
    ],
)
def test_the_check_sees_private_names(source: str, found: list[str]) -> None:
    assert list(foreign_names(ast.parse(source))) == found


def test_the_check_sees_private_attributes() -> None:
    tree = ast.parse("x = param._local_tensor\ny = self._spec\nz = aten._to_copy\nself._mine = 1\nw = other._mine")
    assert list(foreign_attributes(tree, own_names([tree]))) == ["_local_tensor", "_spec"]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("module", [torch_private, dcp_private])
def test_everything_the_file_exports_exists(module: Any) -> None:
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_flatten_state_dict_returns_leaves_by_dotted_name_and_their_paths() -> None:
    flat, mappings = dcp_private.flatten_state_dict({"a": {"b": torch.ones(1), "c": 2}, "d": [torch.zeros(1)]})
    assert set(flat) == {"a.b", "a.c", "d.0"}
    assert mappings == {"a.b": ("a", "b"), "a.c": ("a", "c"), "d.0": ("d", 0)}


def save_alone(path: Path, state_dict: dict[str, Any], planner: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=True)


def test_set_element_puts_a_value_at_its_path() -> None:
    tree: dict[str, Any] = {"a": {"b": 1}, "d": [2, 3]}
    dcp_private.set_element(tree, ("a", "b"), 4)
    dcp_private.set_element(tree, ("d", 1), 5)
    assert tree == {"a": {"b": 4}, "d": [2, 5]}


def test_storage_info_says_where_the_bytes_of_a_chunk_stand(tmp_path: Path) -> None:
    save_alone(tmp_path, {"w": torch.ones(2)})
    ((_, info),) = dcp.FileSystemReader(tmp_path).read_metadata().storage_data.items()
    assert type(info) is dcp_private.StorageInfo
    assert [field.name for field in dataclasses.fields(info)] == [
        "relative_path", "offset", "length", "transform_descriptors",
    ]  # fmt: skip
    assert info == dcp_private.StorageInfo("__0_0.distcp", 0, (tmp_path / "__0_0.distcp").stat().st_size)


def test_tree_map_walks_the_arguments_of_an_op() -> None:
    assert torch_private.tree_map(lambda leaf: leaf + 1, ([1, 2], {"k": 3}, (4,))) == ([2, 3], {"k": 4}, (5,))


def test_without_torch_function_leaves_a_subclass_alone() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any) -> Any:
            raise AssertionError("called")

    loud = torch.ones(2).as_subclass(Loud)
    with torch_private.without_torch_function():
        assert torch.add(loud, 1).shape == (2,)
    with pytest.raises(AssertionError, match="called"):
        torch.add(loud, 1)


def test_is_tracing_is_true_while_a_compiler_looks_at_tensors() -> None:
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(torch_private.is_tracing())
        return graph.forward

    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    torch.compiler.reset()
    assert seen == [True]
    assert not torch_private.is_tracing()


def test_traced_inputs_are_the_tensors_themselves_under_the_names_that_torch_keys_graphs_by() -> None:
    found: list[dict[str, torch.Tensor]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(dict(torch_private.traced_inputs()))
        return graph.forward

    assert not dict(torch_private.traced_inputs())
    x, q = torch.ones(2, 32), quantize(torch.ones(2, 32), MXFP8BlockScaling())
    torch.compile(lambda x, ws: x + ws[1].detach().dequantize(), backend=backend, fullgraph=True)(x, [None, q])
    (seen,) = found
    assert seen["L['x']"] is x
    assert seen["L['ws'][1]"] is q


def test_traced_inputs_of_a_trace_without_dynamo_are_its_fake_tensors() -> None:
    with FakeTensorMode() as mode, tracing(TracingContext(mode)):
        assert not dict(torch_private.traced_inputs())
        weights = [quantize(torch.ones(2, 32), recipe) for recipe in (MXFP8BlockScaling(), MXFP4BlockScaling())]
        fakes = [mode.from_tensor(weight) for weight in weights]
        seen = [each for _, each in torch_private.traced_inputs() if type(each) in map(type, fakes)]
    assert [*map(id, seen)] == [*map(id, fakes)]


def test_a_compilation_in_one_thread_is_no_tracing_in_another() -> None:
    begun, end = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        begun.set()
        assert end.wait(60)
        return graph.forward

    torch.compiler.reset()
    compiling = threading.Thread(target=torch.compile(lambda x: x + 1, backend=backend), args=(torch.ones(2),))
    compiling.start()
    try:
        assert begun.wait(60)
        assert not torch_private.is_tracing()
        q = quantize(torch.ones(8, 32), MXFP8BlockScaling())
        with stochastic_rounding(torch.Generator().manual_seed(0)):
            q.mul_(1.01)  # to elements 1/8 apart
        assert 0 < int((q.dequantize() != 1).sum()) < q.numel()
    finally:
        end.set()
        compiling.join()
        torch.compiler.reset()


def test_a_constant_in_graphs_is_what_torch_marks_as_one() -> None:
    marked, ours = (
        mark(lambda: 0) for mark in (torch.compiler.assume_constant_result, torch_private.constant_in_graphs)
    )
    assert vars(marked) == vars(ours) != {}


def test_zero_tensors_and_what_an_op_writes_are_known() -> None:
    assert torch_private.is_zero_tensor(torch._efficientzerotensor((2, 3)))
    assert not torch_private.is_zero_tensor(torch.zeros(2, 3))
    assert torch_private.written_by(torch.ops.aten.copy_.default) == [True, False, False]
    assert torch_private.written_by(torch.ops.aten._foreach_add_.List)[:2] == [True, False]
    assert torch_private.written_by(torch.ops.c10d.broadcast_.default)[0]


def test_make_wrapper_makes_a_tensor_without_data() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
            raise AssertionError(f"{func} on a tensor without data")

    made = torch_private.make_wrapper(Wrapper, (3, 4), torch.bfloat16, torch.device("cpu"))
    assert type(made) is Wrapper
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((3, 4), (4, 1), torch.bfloat16, "cpu")
    assert made.storage_offset() == 0
    for shape in [(), (0,), (0, 4), (3, 0, 4), (2, 1, 4)]:
        made = torch_private.make_wrapper(Wrapper, shape, torch.bfloat16, torch.device("cpu"))
        assert made.stride() == torch.empty(shape).stride()
    cut = torch_private.make_wrapper(Wrapper, (3, 4), torch.bfloat16, torch.device("cpu"), strides=(8, 1))
    assert cut.stride() == (8, 1)
    assert not cut.is_contiguous()


def test_signatures_are_those_the_file_calls() -> None:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert parameters(DTensorSpec)[:3] == ["mesh", "placements", "tensor_meta"]
    assert TensorMeta._fields == ("shape", "stride", "dtype")
    assert parameters(torch_private.dtensor_utils.compute_local_shape_and_global_offset)[:3] == [
        "global_shape",
        "mesh",
        "placements",
    ]


def build_dtensors() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((2 - dist.get_rank(), 4), float(dist.get_rank()))
    made = torch_private.dtensor_around(local, mesh, (Shard(0),), (3, 4))
    shape, offset = torch_private.compute_local_shape_and_global_offset((3, 4), mesh, (Shard(0),))
    elsewhere = torch_private.dtensor_around(torch.empty(3, 4, device="meta"), mesh, (Replicate(),), (3, 4))
    like = torch_private.dtensor_like(torch.empty(local.shape, device="meta"), made)
    same = (like.device_mesh, like.placements, like.shape, like.stride(), like.dtype, like.requires_grad)
    assert same == (made.device_mesh, made.placements, made.shape, made.stride(), made.dtype, False)
    assert like.to_local().device.type == "meta"
    parameter = torch.nn.Parameter(made)
    assert torch_private.local_of(made) is local
    assert torch_private.local_of(parameter) is torch_private.local_of(parameter)
    assert torch_private.local_of(parameter).data_ptr() == local.data_ptr()
    return [
        made.to_local().data_ptr() == local.data_ptr(),
        made.full_tensor().tolist(),
        (tuple(shape), tuple(offset)),
        elsewhere.to_local().device.type,
    ]


def test_dtensor_around_and_dtensor_like_wrap_the_local_tensor_itself() -> None:
    expected = [[0.0] * 4, [0.0] * 4, [1.0] * 4]
    first, second = run_ranks(2, build_dtensors)
    assert first == [True, expected, ((2, 4), (0, 0)), "meta"]
    assert second == [True, expected, ((1, 4), (2, 0)), "meta"]


def test_attributes_of_other_objects_are_still_there() -> None:
    linear = torch.nn.Linear(2, 2)
    assert linear._parameters["weight"] is linear.weight
    version = linear.weight._version
    with torch.no_grad():
        linear.weight.zero_()
    assert linear.weight._version == version + 1


def test_hook_tables_are_the_live_registries_of_forward_hooks() -> None:
    module = torch.nn.Linear(2, 2)
    before = {name: set(table) for name, table in torch_private.hook_tables(module).items()}
    assert all(not keys for keys in before.values())
    pre = module.register_forward_pre_hook(lambda *args: None, with_kwargs=True)
    post = module.register_forward_hook(lambda *args: None, always_call=True)
    tables = torch_private.hook_tables(module)
    assert {name: set(table) for name, table in tables.items()} == {
        "forward_pre_hooks": {pre.id},
        "forward_pre_hooks_with_kwargs": {pre.id},
        "forward_hooks": {post.id},
        "forward_hooks_with_kwargs": set(),
        "forward_hooks_always_called": {post.id},
    }
    tables["forward_hooks"].clear()
    called: list[int] = []
    module.register_forward_hook(lambda *args: called.append(1))
    tables["forward_hooks"].clear()
    module(torch.zeros(1, 2))
    assert called == []


def _policy_and_casts() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=False)
    alone, *pair = (torch.nn.Linear(2, 2, device="cpu", dtype=torch.float32) for _ in range(3))
    fully_shard(alone, mp_policy=policy)
    fully_shard(pair, mp_policy=policy)
    assert [torch_private.mixed_precision(module) for module in (alone, *pair)] == [policy] * 3
    assert [torch_private.group_size(module) for module in (alone, *pair)] == [1, 2, 2]


def test_the_policy_of_an_fsdp_module_can_be_read() -> None:
    run_ranks(1, _policy_and_casts)


def _managed_and_ignored() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device="cpu", dtype=torch.float32) for _ in range(4)))
    first, tied, ignoring, empty = model
    tied.weight = first.weight
    fully_shard(ignoring, ignored_params={ignoring.weight})
    fully_shard(empty, ignored_params={*empty.parameters()})
    fully_shard(model, ignored_params={first.bias, ignoring.weight, *empty.parameters()})
    assert {*torch_private.managed(model)} == {(first, "weight"), (tied, "weight"), (tied, "bias")}
    assert {*torch_private.managed(ignoring)} == {(ignoring, "bias")}
    assert {*torch_private.managed(empty)} == set()
    model.double()  # gives FSDP's parameters new objects
    assert {*torch_private.managed(ignoring)} == {(ignoring, "bias")}


def test_parameters_that_fsdp_ignores_are_told_from_its_own() -> None:
    run_ranks(1, _managed_and_ignored)


def test_apply_to_tensors_goes_into_what_fsdp_casts() -> None:
    @dataclasses.dataclass
    class Pair:
        first: torch.Tensor
        second: int = 3

    one = torch.ones(2, dtype=torch.float32, device="cpu")
    found = torch_private.apply_to_tensors(lambda tensor: tensor * 2, [(one, "text"), {"key": Pair(one)}, None])
    assert torch.equal(found[0][0], one * 2)
    assert torch.equal(found[1]["key"].first, one * 2)
    assert (found[0][1], found[1]["key"].second, found[2]) == ("text", 3, None)


def test_is_described_is_true_to_what_makes_a_fake_tensor_and_to_nobody_else() -> None:
    seen = []

    class Storage(torch.Tensor):
        def untyped_storage(self) -> Any:
            seen.append(torch_private.is_described())
            return super().untyped_storage()

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2).as_subclass(Storage))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Holder()
    model.weight.untyped_storage()
    assert seen == [False]
    torch.export.export(model, (torch.ones(2),), strict=False)
    assert True in seen[1:]


def test_a_tensor_without_values_is_told_from_others() -> None:
    with FakeTensorMode() as mode:
        fake = torch.ones(2)
    assert torch_private.is_fake(fake)
    assert torch_private.is_fake(mode.from_tensor(torch.ones(2)))
    assert not torch_private.is_fake(torch.ones(2))
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_fake(x))
        return x + 1

    with mode:
        make_fx(torch.func.functionalize(look))(fake)
    assert seen == [True]


class Asked(TorchDispatchMode):
    """What a gather inside is for, as our code sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.found.append(torch_private.redistributed_for())
        return func(*args, **(kwargs or {}))


def _gathers_for() -> None:
    mesh = init_device_mesh("cpu", (2,))
    linear = torch.nn.Linear(2, 4)
    fully_shard(linear, mesh=mesh)
    shard: Any = linear.weight
    group = mesh.get_group().group_name
    calls = {
        "copy": [
            shard.full_tensor,
            lambda: shard.detach().full_tensor(),
            lambda: get_model_state_dict(linear, options=StateDictOptions(full_state_dict=True)),
        ],
        "other": [lambda: shard.redistribute(placements=[Replicate()])],
        None: [lambda: torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(2), 2, group)],
    }
    for wanted, each in calls.items():
        for call in each:
            with Asked() as asked:
                call()
            assert {*asked.found} == {wanted}


def test_a_copy_that_dtensor_gathers_is_told_from_other_gathers() -> None:
    run_ranks(2, _gathers_for)


def test_is_watched_sees_modes_and_function_transforms():
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_watched())
        return x

    look(torch.ones(2))
    with FlopCounterMode(display=False):
        look(torch.ones(2))
    torch.vmap(look)(torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    with BaseTorchFunctionMode():
        look(torch.ones(2))
    with torch.device("cpu"):
        look(torch.ones(2))
    look(torch.ones(2))
    assert seen == [False, True, True, True, True, False, False]


def test_one_dispatch_state_is_the_same_from_everywhere():
    """What dynamo guards on: the keys that operations see, grad mode, autocast, __torch_function__."""
    found = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append("__torch_function__")
            return torch.ones(2)

    def look() -> None:
        with torch_private.one_dispatch_state("cpu"):
            base = torch.ones(4)
            torch.add(torch.ones(2).as_subclass(Watched), 1)
            found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), base[1:]._is_view()))

    modes = (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu"), torch_private.without_torch_function())
    look()
    once = [*found]
    assert once[0] == "__torch_function__"
    assert once[-1] == (False, False, False)
    for mode in modes:
        with mode:
            look()
    assert found == once * (1 + len(modes))


def test_marked_rows_are_a_variable_of_compiled_code() -> None:
    """Without the mark, code for the first number of rows is compiled before code for all."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compilations(*, marked: bool) -> int:
        torch.compiler.reset()
        graphs.clear()
        doubled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
        for rows in (8, 16, 24):
            x = torch.ones(rows, 4)
            if marked:
                torch_private.mark_rows_dynamic(x)
            doubled(x)
        return len(graphs)

    assert compilations(marked=True) == 1
    assert compilations(marked=False) == 2


def test_foreach_copy_copies_each():
    targets = [torch.zeros(3), torch.zeros(2, dtype=torch.uint8), torch.zeros(2).to(torch.float8_e4m3fn)]
    sources = [torch.ones(3), torch.full((2,), 7, dtype=torch.uint8), torch.ones(2).to(torch.float8_e4m3fn)]
    torch_private.foreach_copy(targets, sources)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(targets, sources, strict=True))


def test_grouped_mm_is_what_a_tensor_is_asked_for() -> None:
    class Asked(torch.Tensor):
        names: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.names.append(func)
            return None

    ends = torch.tensor([2], dtype=torch.int32)
    torch.nn.functional.grouped_mm(torch.zeros(2, 8), torch.zeros(1, 8, 8).as_subclass(Asked), offs=ends)
    assert Asked.names == [torch_private.grouped_mm]


def test_foreach_add_adds_to_each_and_counts_its_writes() -> None:
    steps = [torch.tensor(1.0), torch.tensor(5.0)]
    torch_private.foreach_add(steps, torch.ones(()))
    torch_private.foreach_add(steps, 1)
    assert [step.item() for step in steps] == [3.0, 7.0]
    assert [step._version for step in steps] == [2, 2]


def test_hooks_around_steps_are_found() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    assert not torch_private.has_step_hooks(optimizer)

    def hook(*_: Any) -> None: ...

    registrations = (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    )
    for register in registrations:
        handle = register(hook)
        assert torch_private.has_step_hooks(optimizer)
        handle.remove()
        assert not torch_private.has_step_hooks(optimizer)


def test_the_cpu_is_the_default_device_where_it_is_asked_for() -> None:
    with torch.device("meta"), torch_private.cpu_by_default():
        assert torch.get_default_device() == torch.device("cpu")
        assert torch.zeros(1).device == torch.device("cpu")
    with torch_private.cpu_by_default() as context:
        assert context is None  # attributes are slow under a device context


class Listening(DefaultLoadPlanner):
    """Keeps the items that a reader hands it, in their order."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.state_dict, self.heard = targets, list[ReadItem]()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.heard.append(read_item)


def test_a_reader_groups_items_by_the_path_it_is_given_and_hands_them_back(tmp_path: Path) -> None:
    """What `OwnPath` and `Alias` stand on: one file, its items in two groups, which the order of the plan cuts."""
    names = ["a", "b", "c", "d"]
    save_alone(tmp_path, {name: torch.full((3,), float(place)) for place, name in enumerate(names)})
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    looked: list[Path] = []
    paths = [dcp_private.OwnPath.of("__0_0.distcp", looked.append) for _ in range(2)]
    items = []
    for place, name in enumerate(names):  # a and c, b and d
        index = next(index for index in metadata.storage_data if index.fqn == name)
        alias = dcp_private.Alias("alias", torch.Size([place]), original=index)
        metadata.storage_data[alias] = dataclasses.replace(metadata.storage_data[index], relative_path=paths[place % 2])
        zero, three = torch.Size([0]), torch.Size([3])
        items.append(ReadItem(LoadItemType.TENSOR, MetadataIndex(name, zero), zero, alias, zero, three))
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    targets = {name: torch.zeros(3) for name in names}
    planner = Listening(targets)
    reader.read_data(LoadPlan(items), planner).wait()
    assert [item.dest_index.fqn for item in planner.heard] == ["a", "c", "b", "d"]
    assert [item.storage_index.original.fqn for item in planner.heard] == ["a", "c", "b", "d"]
    assert looked == [tmp_path / "__0_0.distcp"] * 2
    assert [float(targets[name][0]) for name in names] == [0, 1, 2, 3]


def test_a_reader_opens_no_file_that_the_look_at_it_refuses(tmp_path: Path) -> None:
    save_alone(tmp_path, {"a": torch.ones(3)})
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    ((index, info),) = metadata.storage_data.items()

    def refuse(path: Path) -> None:
        path.unlink()
        raise ValueError("refused")

    path = dcp_private.OwnPath.of("__0_0.distcp", refuse)
    metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    zero, three = torch.Size([0]), torch.Size([3])
    item = ReadItem(LoadItemType.TENSOR, MetadataIndex("a", zero), zero, index, zero, three)
    with pytest.raises(ValueError, match="refused"):
        reader.read_data(LoadPlan([item]), Listening({"a": torch.zeros(3)}))


def test_a_reader_refuses_a_chunk_of_a_transformation_that_it_does_not_know(tmp_path: Path) -> None:
    """What `DELTA` stands on."""
    save_alone(tmp_path, {"a": torch.ones(3)})
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    ((index, info),) = metadata.storage_data.items()
    metadata.storage_data[index] = marked = dcp_private.marked("a", info)
    assert dcp_private.is_marked(marked)
    assert not dcp_private.is_marked(info)
    assert dcp_private.unmarked(marked) == info
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    zero, three = torch.Size([0]), torch.Size([3])
    for kind in (LoadItemType.TENSOR, LoadItemType.BYTE_IO):
        item = ReadItem(kind, MetadataIndex("a", zero), zero, index, zero, three)
        with pytest.raises(ValueError, match=r"Unknown extension name='qtensor\.delta'"):
            reader.read_data(LoadPlan([item]), Listening({"a": torch.zeros(3)}))
    with pytest.raises(RuntimeError, match="a: the storage writer keeps no record of how a chunk was transformed"):
        dcp_private.marked("a", "s3://somewhere")


class Committing(dcp.DefaultSavePlanner):
    """Saves with `Committed` metadata; with `lost`, of a tensor that no rank writes."""

    def __init__(self, before: Any, *, lost: bool = False) -> None:
        super().__init__()
        self.before, self.lost = before, lost

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        if self.lost:
            metadata.state_dict_metadata["lost"] = metadata.state_dict_metadata["w"]
        committed = dcp_private.Committed(metadata.state_dict_metadata, metadata.planner_data, before=self.before)
        return plans, committed


def test_a_writer_pickles_the_metadata_behind_all_data_and_in_front_of_the_rename(tmp_path: Path) -> None:
    seen: list[tuple[set[str], set[str]]] = []
    save_alone(
        tmp_path,
        {"w": torch.ones(2), "n": 3},
        Committing(lambda files: seen.append((files, {path.name for path in tmp_path.iterdir()}))),
    )
    assert seen == [({"__0_0.distcp"}, {"__0_0.distcp", ".metadata.tmp"})]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert type(metadata) is dcp.Metadata
    assert set(vars(metadata)) == {field.name for field in dataclasses.fields(dcp.Metadata)}
    assert {index.fqn for index in metadata.storage_data} == {"w", "n"}


def test_an_error_while_metadata_are_pickled_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match=r"lost at .*: the storage writer did not write it"):
        save_alone(tmp_path, {"w": torch.ones(2)}, Committing(lambda files: None, lost=True))
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("alone", [False, True])
def test_the_prefix_of_a_ranks_files_stands_in_its_plan(alone: bool, tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path)
    writer.set_up_storage_writer(is_coordinator=True, rank=3, use_collectives=not alone)
    local = writer.prepare_local_plan(dcp.SavePlan([]))
    assert dcp_private.prefix_of(local.storage_data) == ("__3_" if alone else None)
    plans = writer.prepare_global_plan([local, dcp.SavePlan([])])
    assert [dcp_private.prefix_of(plan.storage_data) for plan in plans] == ["__3_" if alone else "__0_", "__1_"]


@pytest.mark.parametrize("options", [{}, {"save_distributed": True}, {"fqn_to_index_mapping": {"w": 1}}])
def test_the_writer_of_safetensors_is_known_by_its_plans(options: dict[str, Any], tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), **options)
    (plan,) = writer.prepare_global_plan([dcp.SavePlan([])])
    assert dcp_private.writes_safetensors(plan.storage_data)
    assert dcp_private.prefix_of(plan.storage_data) is None
    (plan,) = dcp.FileSystemWriter(tmp_path).prepare_global_plan([dcp.SavePlan([])])
    assert not dcp_private.writes_safetensors(plan.storage_data)


def meet_in_a_group_of_their_own() -> tuple[float, str]:
    default = dist.group.WORLD
    assert default is not None
    own = dcp_private.gloo_group(default, "test.own", dt.timedelta(seconds=30))
    other = dcp_private.gloo_group(default, "test.other", dt.timedelta(milliseconds=300))
    largest = torch.tensor([float(dist.get_rank())])
    dcp_private.all_reduce_max(own, largest)
    error = ""
    if dist.get_rank() == 0:  # alone
        try:
            dcp_private.all_reduce_max(other, torch.zeros(1))
        except RuntimeError as caught:
            error = str(caught)
    dist.barrier()
    return float(largest), error


def test_a_gloo_group_of_ones_own_reduces_and_gives_up_when_it_was_told_to() -> None:
    (first, error), (second, _) = run_ranks(2, meet_in_a_group_of_their_own)
    assert (first, second) == (1.0, 1.0)
    assert "imed out" in error


def cut_by_fsdp() -> int | None:
    net = torch.nn.Linear(32, 10, bias=False)
    weight = quantize(net.weight.detach(), MXFP8BlockScaling())
    net.weight = torch.nn.Parameter(weight, requires_grad=False)
    given = net.weight
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    return torch_private.shard_rows(given)


def test_fsdp_pads_a_shard_by_new_zeros_of_the_weight_that_it_cuts() -> None:
    assert torch_private.shard_rows(torch.ones(2)) is None
    assert run_ranks(4, cut_by_fsdp) == [3] * 4  # 3 + 3 + 3 + 1


def _sizes_while_gathering() -> None:
    net: Any = torch.nn.Module()
    net.weight = torch.nn.Parameter(quantize(torch.randn(3, 8, 32), MXFP8BlockScaling()), requires_grad=False)
    whole = net.weight.detach().clone()
    fully_shard(net, shard_placement_fn=lambda _: Shard(1))
    state = net._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    (param,) = groups[0].fsdp_params
    assert not torch_private.reshards_to_fewer(param)
    for _ in range(2):
        assert param.padded_sharded_param_size == (3, 4, 32)
        handle = net.unshard(async_op=True)
        assert [*param.padded_sharded_param_size] == [1, 3 * 4 * 33]
        assert param.padded_sharded_param_size == (3, 4, 32) == param.padded_sharded_param_size
        assert not torch.Size((3, 4, 32)) != param.padded_sharded_param_size != (3, 4, 33)
        assert param.padded_sharded_param_size.numel() == 3 * 4 * 32
        handle.wait()
        assert param.padded_sharded_param_size == (3, 4, 32)
        assert all(torch.equal(part, whole.parts()[name]) for name, part in net.weight.parts().items())
        net.reshard()


def test_fsdp_lays_out_what_it_gathers_by_the_size_in_its_record() -> None:
    with pytest.raises(NotImplementedError, match=r"gathers in a way that this version does not know"):
        torch_private.calling_fsdp_param()
    run_ranks(2, _sizes_while_gathering)


def _slices() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert torch_private.root_mesh(mesh["dp"]).mesh.tolist() == [[0, 1], [2, 3]]
    assert torch_private.root_mesh(mesh) is mesh


def test_a_slice_of_a_mesh_knows_the_whole() -> None:
    run_ranks(4, _slices)
