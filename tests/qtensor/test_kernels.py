"""Kernels: compiled, chunked and plain code give the same bytes, and the policy picks the one it says."""

import functools
import gc
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fsdp_hooks.kernels import compiled, probes
from fsdp_hooks.kernels.compiled import Kernel
from qtensor import Float8CurrentScaling, Int4GroupScaling, QuantizedTensor, quantize, use_kernels
from qtensor.numerics import kernels, tiles, triton_kernels
from qtensor.spec.blocks import finite
from qtensor.spec.codecs import fp8
from qtensor.spec.registry import encode, format_of, shared_amax
from qtensor.tensor.contents import write
from tests.qtensor.recipes_under_test import DELAYED, RECIPES, every_recipe, same_bytes, weight
from tests.recipes import MAIN, facts
from tests.sampling import sampled

INF, NAN = float("inf"), float("nan")
FORMS = ["float8_row", "mxfp8_square", "nvfp4"]  # rows, groups of rows, packed: test_golden compiles the others


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = use_kernels.mode, Kernel.works, Kernel.failed
    Kernel.works = False
    use_kernels("auto")  # as it is where no environment variable says otherwise
    yield
    use_kernels.mode, Kernel.works, Kernel.failed = before


def awkward(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values of all magnitudes, zeros of both signs, blocks of zeros, outliers, and what is not finite."""
    x = weight(rows, columns, torch.float32)
    x *= torch.exp2(-torch.randint(0, 24, x.shape, generator=torch.Generator().manual_seed(rows)).float())
    x[:, 3], x[:, 4] = 0.0, -0.0
    x[1] = 0.0
    x[2] *= 1e-20
    x[3] *= -1e20
    x[5, 7], x[7, 40], x[7, 70] = NAN, INF, -INF
    return x.to(dtype)


def parts_as_defined(x: Tensor, recipe: Any) -> dict[str, Tensor]:
    """What the format says of the whole tensor at once."""
    values = x.float()
    return encode(values, recipe, shared_amax(values, recipe))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert same_bytes(found[name], part), name


# -- the bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@sampled("name", FORMS, ["nvfp4"])
def test_compiled_kernels_give_the_bytes_of_the_definition(name: str) -> None:
    """Several shapes through the same code; a tail that fills no vector among them."""
    recipe = RECIPES[name]
    for rows, columns in ((64, 96), (96, 160), (33, 96)):
        x = awkward(rows, columns, torch.bfloat16)
        wanted = parts_as_defined(x, recipe)
        use_kernels("compiled")
        if name.endswith("square") and rows % 32:  # a full tensor has whole blocks
            assert_same(kernels.encode(x, recipe), wanted)
            continue
        q = quantize(x, recipe)
        assert_same(q.parts(), wanted)
        found = q.dequantize(), q.dequantize(torch.float32)
        use_kernels("eager")
        assert torch.equal(found[0].isnan(), q.dequantize().isnan())  # which NaN bf16 holds, differs
        assert same_bytes(found[0].nan_to_num(7.0), q.dequantize().nan_to_num(7.0))
        assert same_bytes(found[1], q.dequantize(torch.float32))


def clipped(x: Tensor, recipe: Any) -> dict[str, Tensor]:
    """Scales that no amax of x gives: of its values at a third."""
    values = x.float() / 3
    return format_of(recipe).quantizer(values, recipe, shared_amax(values, recipe))


@pytest.mark.full
@pytest.mark.parametrize("name", [*FORMS, "float8_block_square", "int4_32"])
def test_compiled_kernels_round_under_decided_scales(name: str) -> None:
    for rows, columns in ((64, 128), (96, 256)):
        x = awkward(rows, columns, torch.bfloat16)
        scales = clipped(x, RECIPES[name])
        use_kernels("compiled")
        found = kernels.encode_under(x, RECIPES[name], scales)
        assert_same(found, format_of(RECIPES[name]).encode_with(x.float(), RECIPES[name], scales))


@every_recipe
@pytest.mark.parametrize("elements", [1, 32 * 96, 5000])
def test_chunks_are_rounded_under_the_decided_scales(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, elements: int
) -> None:
    x = awkward(160, 96, torch.bfloat16)
    scales = clipped(x, recipe)
    wanted = format_of(recipe).encode_with(x.float(), recipe, scales)
    assert any(not same_bytes(part, wanted[name]) for name, part in parts_as_defined(x, recipe).items())
    monkeypatch.setitem(tiles.CHUNK, "cpu", elements)
    assert_same(kernels.encode_under(x, recipe, scales), wanted)


@pytest.mark.slow
@pytest.mark.full
def test_a_compiled_kernel_takes_fp32_and_fp16_too() -> None:
    """Whatever the recipe, values become fp32 first; packed codes become fp16 in vectors of their own width."""
    for dtype in (torch.float32, torch.float16):
        x = awkward(64, 96, torch.float32).clamp(-6e4, 6e4).to(dtype)
        use_kernels("compiled")
        found = quantize(x, RECIPES["float8_row"])
        assert_same(found.parts(), parts_as_defined(x, RECIPES["float8_row"]))
    use_kernels("eager")
    packed = quantize(x, RECIPES["nvfp4"])
    values = packed.dequantize(torch.float16)
    use_kernels("compiled")
    assert same_bytes(packed.dequantize(torch.float16).nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_gpu_gives_the_bytes_of_the_cpu(name: str, mode: str) -> None:
    x = awkward(2048, 1024, torch.bfloat16)
    use_kernels(mode)
    q = quantize(x.cuda(), RECIPES[name])
    assert_same({part: value.cpu() for part, value in q.parts().items()}, parts_as_defined(x, RECIPES[name]))
    use_kernels("eager")
    wanted = quantize(x, RECIPES[name]).dequantize(torch.float32)
    use_kernels(mode)
    assert same_bytes(q.dequantize(torch.float32).cpu(), wanted)


@every_recipe
@pytest.mark.parametrize("elements", [1, 32 * 96, 5000])
def test_chunks_give_the_bytes_of_the_whole(monkeypatch: pytest.MonkeyPatch, recipe: Any, elements: int) -> None:
    x = awkward(160, 96, torch.bfloat16)
    whole = quantize(x, recipe)
    values, exact = whole.dequantize(), whole.dequantize(torch.float32)
    assert_same(whole.parts(), parts_as_defined(x, recipe))
    monkeypatch.setitem(tiles.CHUNK, "cpu", elements)
    found = quantize(x, recipe)
    assert_same(found.parts(), whole.parts())
    assert same_bytes(found.dequantize().nan_to_num(7.0), values.nan_to_num(7.0))
    assert same_bytes(found.dequantize(torch.float32), exact)


@every_recipe
@pytest.mark.parametrize("shape", [(3, 40, 96), (2, 32, 96), (2, 2, 5, 96), (96,), (45, 96)])
def test_chunks_end_where_blocks_do(monkeypatch: pytest.MonkeyPatch, recipe: Any, shape: tuple[int, ...]) -> None:
    """Stacks whose matrices end within a square block, and the rows of a shard."""
    x = weight(256, 96).flatten()[: torch.Size(shape).numel()].view(shape)
    if facts(recipe).square and x.ndim == 1:
        return  # square blocks need two dims
    wanted = parts_as_defined(x, recipe)
    for elements in (1, 4000):
        monkeypatch.setitem(tiles.CHUNK, "cpu", elements)
        assert_same(kernels.encode(x, recipe), wanted)


@pytest.mark.parametrize("name", ["mxfp8_square", "nvfp4_square"])
def test_stacks_of_square_blocks_are_quantized_under_autocast(name: str) -> None:
    x = weight(120, 96).view(3, 40, 96)
    wanted = parts_as_defined(x, RECIPES[name])
    with torch.autocast("cpu"):
        assert_same(kernels.encode(x, RECIPES[name]), wanted)


@pytest.mark.parametrize("name", ["float8_tensor", "nvfp4"])
def test_chunks_of_a_gathered_weight_take_the_scales_of_their_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recipe = RECIPES[name]
    shards = [quantize(weight(8, 96) * factor, recipe) for factor in (1.0, 100.0, 0.01)]
    wide = str(facts(recipe).tensor_wide)
    parts = {part: torch.cat([raw_rows(q.parts()[part]) for q in shards]) for part in shards[0].parts()}
    parts[wide] = torch.stack([q.parts()[wide] for q in shards]).repeat_interleave(8).view(24, 1)
    parts = {part: value.view(shards[0].parts()[part].dtype) for part, value in parts.items()}
    wanted = torch.cat([q.dequantize() for q in shards])
    for elements in (1, 500, 10**6):
        monkeypatch.setitem(tiles.CHUNK, "cpu", elements)
        assert same_bytes(kernels.decode(parts, recipe, torch.bfloat16), wanted)


def raw_rows(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.ndim and part.itemsize == 1 else part.reshape(-1, 1)


def test_a_payload_may_begin_anywhere_in_a_buffer() -> None:
    q = quantize(weight(8, 32), RECIPES["nvfp4"])
    buffer = torch.zeros(q.payload.numel() + 1, dtype=torch.uint8)
    buffer[1:] = q.payload.flatten()
    moved = QuantizedTensor.from_parts({**q.parts(), "payload": buffer[1:].view(8, 16)}, q.recipe, q.dtype)
    assert same_bytes(moved.dequantize(), q.dequantize())


def test_a_step_with_a_history_is_chunked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = DELAYED.values()
    whole, chunked = (quantize(weight(64, 96), recipe) for _ in range(2))
    for seed in range(3):
        write(whole, weight(64, 96, seed=seed), step=True)
        with monkeypatch.context() as patch:
            patch.setitem(tiles.CHUNK, "cpu", 96)
            write(chunked, weight(64, 96, seed=seed), step=True)
        assert_same(chunked.parts(), whole.parts())


@every_recipe
def test_a_weight_without_values_is_described_as_it_would_be(recipe: Any) -> None:
    real = quantize(weight(64, 96), recipe)
    described = quantize(weight(64, 96).to("meta"), recipe)
    for name, part in real.parts().items():
        found = described.parts()[name]
        assert (found.shape, found.dtype, found.device.type) == (part.shape, part.dtype, "meta"), name
    values = described.dequantize(torch.float32)
    assert (values.shape, values.dtype, values.device.type) == (real.shape, torch.float32, "meta")
    with Counted() as ops:
        described.copy_(weight(64, 96).to("meta"))
    assert ops.calls <= 6 + 2 * len(real.parts())  # allocates and copies parts; encodes nothing


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not any(issubclass(kind, QuantizedTensor) for kind in types)
        return func(*args, **(kwargs or {}))


# -- no dense copy -----------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the bytes of the largest floating tensor that any op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, tuple | list) else [out]:
            fresh = isinstance(leaf, Tensor) and not func.is_view
            if fresh and leaf.is_floating_point() and leaf.itemsize > 1:
                self.bytes = max(self.bytes, leaf.nbytes)
        return out


@every_recipe
def test_a_write_makes_no_dense_temporary_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    q, master = quantize(weight(512, 96), recipe), weight(512, 96, torch.float32, seed=1)
    whole = q.clone()
    write(whole, master, step=True)
    monkeypatch.setitem(tiles.CHUNK, "cpu", 64 * 96)
    with Largest() as largest:
        write(q, master, step=True)
    known = facts(recipe)
    rows = max(64, known.rows)  # square blocks are not split
    columns = -(-96 // known.block) * known.block  # rows are filled up to whole blocks
    wide = 8 if getattr(recipe, "scale_choice", None) else 4  # errors that decide a scale are taken in fp64
    assert 0 < largest.bytes <= rows * columns * wide
    assert_same(q.parts(), whole.parts())


def test_scales_of_a_stack_are_not_taken_for_those_of_its_rows() -> None:
    stack = torch.ones(2, 32, 32)
    with pytest.raises(ValueError, match="encode_under of 3 dims: rows share out scales of \\[N, K\\] alone"):
        kernels.encode_under(stack, RECIPES["int4_32"], {"scale": torch.ones(2, 32, 1)})


# -- the policy --------------------------------------------------------------------------------------------------------


class Compiler:
    """Stands in for torch.compile: counts what it compiles, and which calls of compiled code were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.calls = 0
        self.error: Exception | None = None
        monkeypatch.setattr(torch, "compile", self)

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options == {"dynamic": True, "fullgraph": True, **compiled._for_cpu(narrow=False)}
        self.compiled.append(fn.__name__)

        def call(*args: Any) -> Any:
            self.calls += 1
            assert not torch.is_grad_enabled()
            if self.error is not None:
                raise self.error
            return fn(*args)

        return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture
def double(compiler: Compiler) -> Kernel:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    return Kernel(doubled, "double")


LARGE = torch.ones(compiled.COMPILED_FROM)


def test_auto_compiles_what_is_large_once(compiler: Compiler, double: Kernel) -> None:
    assert torch.equal(double(LARGE[:-1]), LARGE[:-1] * 2)
    assert (compiler.compiled, compiler.calls) == ([], 0)
    for _ in range(2):
        assert torch.equal(double(LARGE), LARGE * 2)
    assert (compiler.compiled, compiler.calls) == (["double"], 2)


def test_the_mode_decides_and_ends_with_its_block(compiler: Compiler, double: Kernel) -> None:
    with use_kernels("eager"):
        double(LARGE)
    assert compiler.calls == 0
    with use_kernels("compiled"):
        double(LARGE[:8])
        with use_kernels("auto"):
            double(LARGE[:8])
        assert use_kernels.mode == "compiled"
    assert compiler.calls == 1
    assert use_kernels.mode == "auto"
    use_kernels("eager")
    assert use_kernels.mode == "eager"


def test_what_can_not_be_compiled_runs_eagerly(compiler: Compiler, double: Kernel) -> None:
    use_kernels("compiled")
    double(LARGE.to("meta"))
    double(LARGE[:0])
    with FlopCounterMode(display=False):
        double(LARGE)
    torch.vmap(double)(LARGE.view(2, -1))
    double(torch.nn.Parameter(LARGE))  # a subclass may be anything: FakeTensor, say
    assert compiler.calls == 0


def test_a_compiler_that_fails_is_left_alone_and_the_call_succeeds(compiler: Compiler, double: Kernel) -> None:
    compiler.error = RuntimeError("no C++ compiler")
    text = r"torch.compile failed on double \(RuntimeError\), so quantization kernels run eagerly .* QTENSOR_KERNELS"
    with pytest.warns(UserWarning, match=text):
        assert torch.equal(double(LARGE), LARGE * 2)
    assert torch.equal(double(LARGE), LARGE * 2)
    assert compiler.calls == 1
    with use_kernels("compiled"), pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        double(LARGE)


def test_an_option_that_torch_does_not_know_is_a_compiler_that_fails(
    compiler: Compiler, double: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fn: Any, **options: Any) -> Any:
        raise RuntimeError("Unexpected optimization option")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(
        UserWarning, match=r"torch.compile failed on double \(RuntimeError\), so quantization kernels run"
    ):
        assert torch.equal(double(LARGE), LARGE * 2)
    with use_kernels("compiled"), pytest.raises(RuntimeError, match="Unexpected optimization option"):
        double(LARGE)


def test_a_kernel_that_fails_after_it_worked_is_left_alone_by_itself(compiler: Compiler, double: Kernel) -> None:
    other = Kernel(lambda x: x * 3, "triple")
    double(LARGE)
    compiler.error = RuntimeError("recompile limit")
    with pytest.warns(UserWarning, match=r"torch.compile failed on double \(RuntimeError\), so it runs eagerly from"):
        double(LARGE)
    compiler.error = None
    assert Kernel.failed is None
    before = compiler.calls
    assert torch.equal(double(LARGE), LARGE * 2)
    assert compiler.calls == before
    assert torch.equal(other(LARGE), LARGE * 3)
    assert compiler.calls == before + 1


def test_each_compilation_may_warn_once_where_warnings_are_errors(
    double: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a kernel compiles anew for each row length, not only at its first call."""

    def compiled_for(length: int) -> Callable[[Tensor], Tensor]:
        waiting = [f"{length} is a strange length"]

        def run(x: Tensor) -> Tensor:
            while waiting:
                warnings.warn(waiting.pop(), stacklevel=1)
            return x * 2

        return run

    use_kernels("compiled")
    for run in [compiled_for(1024), compiled_for(2048)]:
        monkeypatch.setattr(double, "compiled_for", lambda args, run=run: run)
        assert torch.equal(double(LARGE), LARGE * 2)


def test_away_from_the_cpu_code_is_compiled_for_a_row_length_and_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: without a mark on the rows, code for the first number of rows would be compiled before."""
    shapes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append([tuple(x.shape) for x in inputs if isinstance(x, Tensor)])
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    halved = Kernel(lambda x, by: x / by, "halved")
    codes = []
    for columns in (32, 64):
        for rows in (8, 16, 24):
            args = (torch.empty(rows, columns, device="meta"), 2)
            codes.append(halved.compiled_for(args))
            assert codes[-1](*args).shape == (rows, columns)
    assert codes == [codes[0]] * 3 + [codes[3]] * 3
    assert codes[0] is not codes[3]
    assert len(shapes) == 2, shapes


def test_a_compiler_that_fails_keeps_no_tensor_alive(compiler: Compiler, double: Kernel) -> None:
    compiler.error = RuntimeError("no C++ compiler")
    large = LARGE.clone()
    address = large.data_ptr()
    with pytest.warns(UserWarning, match="torch.compile failed"):
        double(large)
    compiler.error = None
    del large
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Tensor and one.data_ptr() == address]


def test_a_packed_weight_counts_by_its_elements(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_decode_kernel", functools.cache(kernels._decode_kernel.__wrapped__))
    for rows, calls in ((compiled.COMPILED_FROM // 512 - 16, 0), (compiled.COMPILED_FROM // 512, 1)):
        with use_kernels("eager"):
            q = quantize(weight(rows, 512), RECIPES["nvfp4"])
        q.dequantize(torch.float32)
        assert compiler.calls == calls


@pytest.mark.parametrize(
    ("capability", "bits", "narrow"), [("AVX512", 512, 256), ("AVX2", 256, 256), ("DEFAULT", None, None)]
)
def test_code_for_a_cpu_says_for_which_vectors(
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    bits: int | None,
    narrow: int | None,
) -> None:
    """Which makes them part of the key in the cache on disk; packed codes take vectors that they fill."""
    given: list[Any] = []

    def compile_(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        given.append(options.get("options"))
        return fn

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(kernels, "_decode_kernel", functools.cache(kernels._decode_kernel.__wrapped__))
    for name, dtype, expected in (
        ("nvfp4", torch.bfloat16, narrow),
        ("nvfp4", torch.float16, narrow),
        ("nvfp4", torch.float32, bits),
        ("mxfp8", torch.bfloat16, bits),
    ):
        with use_kernels("eager"):
            q = quantize(weight(32, 96), RECIPES[name])
        with use_kernels("compiled"):
            q.dequantize(dtype)
        assert given.pop() == (None if expected is None else {"cpp.simdlen": expected})


DOUBLED = """
import torch
from fsdp_hooks.kernels.compiled import Kernel, use_kernels
from torch._dynamo.utils import counters
use_kernels("compiled")
x = torch.arange(1000.0)
assert torch.equal(Kernel(lambda x: x * 2 + 1, "doubled")(x), x * 2 + 1)
print(torch.backends.cpu.get_cpu_capability(), counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.full
def test_a_cache_that_cpus_of_other_vectors_share(tmp_path: Path) -> None:
    """Code for vectors of another width writes half of the output, or beyond it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs a CPU that can run code for vectors of both widths")
    told = []
    for capability in ("avx512", "avx2", "avx512"):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run([sys.executable, "-c", DOUBLED], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
    assert told == [["AVX512", "0"], ["AVX2", "0"], ["AVX512", "1"]]


def test_a_kernel_that_gave_up_runs_in_chunks(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM", 512)
    monkeypatch.setitem(tiles.CHUNK, "cpu", 512)
    monkeypatch.setattr(kernels, "_encode_kernel", functools.cache(kernels._encode_kernel.__wrapped__))
    x, recipe = weight(64, 96), RECIPES["mxfp8"]
    wanted = parts_as_defined(x, recipe)
    assert_same(kernels.encode(x, recipe), wanted)
    assert compiler.calls == 1
    compiler.error = RuntimeError("recompile limit")
    with pytest.warns(UserWarning, match="so it runs eagerly from here on"):
        kernels.encode(x, recipe)
    kernel, sizes = kernels._encode_kernel(recipe, x.dtype), list[int]()
    eager = kernel.eager
    monkeypatch.setattr(kernel, "eager", lambda x, amax: (sizes.append(x.numel()), eager(x, amax))[1])
    assert_same(kernels.encode(x, recipe), wanted)
    assert compiler.calls == 2
    assert sum(sizes) == x.numel() > 512 >= max(sizes)


@pytest.mark.parametrize("mode", ["auto", "compiled"])
def test_what_a_compiler_warns_of_is_no_error(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def compile_(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            warnings.warn("torch does what is deprecated", DeprecationWarning, stacklevel=1)
            return fn(*args)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    filters = list(warnings.filters)
    with use_kernels(mode):
        assert torch.equal(Kernel(lambda x: x * 2, "double")(LARGE), LARGE * 2)
    assert Kernel.failed is None
    assert warnings.filters == filters


def test_memory_that_is_short_is_no_failure_of_the_compiler(compiler: Compiler, double: Kernel) -> None:
    double(LARGE)
    compiler.error = torch.OutOfMemoryError("too large")
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        double(LARGE)
    compiler.error = None
    double(LARGE)
    assert (compiler.calls, Kernel.failed) == (3, None)


def test_a_kernel_that_never_works_takes_no_others_along(compiler: Compiler, double: Kernel) -> None:
    double(LARGE)
    compiler.error = RuntimeError("a bug in the code made for one kernel")
    other = Kernel(lambda x: x * 3, "triple")
    with pytest.warns(UserWarning, match=r"torch.compile failed on triple \(RuntimeError\), so it runs eagerly from"):
        assert torch.equal(other(LARGE), LARGE * 3)
    compiler.error = None
    assert Kernel.failed is None
    assert torch.equal(other(LARGE), LARGE * 3)
    assert compiler.calls == 2
    double(LARGE)
    assert compiler.calls == 3


def test_an_error_of_the_input_is_no_failure_of_the_compiler(compiler: Compiler) -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("this input")

    with pytest.raises(ValueError, match="this input"):
        Kernel(refuse, "refuse")(LARGE)
    assert Kernel.failed is None


# -- written by hand ---------------------------------------------------------------------------------------------------


class Written:
    """Stands in for a kernel written by hand: counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return (x + x).view(x.shape)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.setattr(compiled, "BY_HAND_ON", {"cpu"})
    return Written()


def untried(by_hand: Any) -> probes.Written:
    """Code written by hand that has nothing to prove."""
    return probes.Written(by_hand, probes.Probes(lambda *args: None, lambda kind: (), by_hand))


@pytest.fixture
def twice(compiler: Compiler, written: Written) -> Kernel:
    return Kernel(lambda x: x * 2, "twice", untried(written))


def test_what_is_written_by_hand_runs_where_compiled_code_would(
    compiler: Compiler, written: Written, twice: Kernel
) -> None:
    given = LARGE.clone().requires_grad_()
    made = twice(given)
    assert torch.equal(made, LARGE * 2)
    assert (made.requires_grad, made._is_view()) == (False, False)  # no history, and nobody's view
    assert (written.calls, compiler.calls) == (1, 0)
    twice(LARGE[:-1])
    twice(LARGE.to("meta"))
    twice(torch.nn.Parameter(LARGE))
    with use_kernels("eager"):
        twice(LARGE)
    with FlopCounterMode(display=False):
        twice(LARGE)
    torch.vmap(twice)(LARGE.view(2, -1))
    assert written.calls == 1
    with use_kernels("compiled"):
        twice(LARGE[:8])
    assert (written.calls, compiler.calls) == (2, 0)


def test_what_is_written_by_hand_is_told_where_to_write(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    """Compiled and eager code are not, nor what takes the place of the one that fails: they return new results."""

    def by_hand(x: Tensor, *, out: Tensor) -> Tensor:
        if out.numel() < x.numel():
            raise RuntimeError("too small")
        return torch.add(x, x, out=out)

    kernel, out = Kernel(lambda x: x * 2, "twice", untried(by_hand)), torch.zeros_like(LARGE)
    assert kernel.runs_by_hand(LARGE)
    assert kernel(LARGE, out=out) is out
    assert torch.equal(out, LARGE * 2)
    assert kernel(LARGE[:8], out=out) is not out  # too small to compile
    with use_kernels("eager"):
        assert not kernel.runs_by_hand(LARGE)
        assert kernel(LARGE, out=out) is not out
    with pytest.warns(UserWarning, match="The kernel written by hand for twice failed"):
        assert torch.equal(kernel(LARGE, out=out[:8]), LARGE * 2)
    assert not kernel.runs_by_hand(LARGE)
    assert compiler.calls == 1
    monkeypatch.setattr(compiled, "BY_HAND_ON", {"cuda"})
    assert not Kernel(lambda x: x * 2, "twice", untried(by_hand)).runs_by_hand(LARGE)


def test_what_is_written_by_hand_runs_on_gpus_alone(compiler: Compiler) -> None:
    written = Written()
    assert torch.equal(Kernel(lambda x: x * 2, "twice", untried(written))(LARGE), LARGE * 2)
    assert (written.calls, compiler.calls) == (0, 1)
    assert {"cuda"} == compiled.BY_HAND_ON


def test_compiled_code_takes_the_place_of_what_fails(compiler: Compiler, written: Written, twice: Kernel) -> None:
    written.error = RuntimeError("no such instruction")
    text = r"The kernel written by hand for twice failed \(RuntimeError\), so torch.compile's runs .* QTENSOR_KERNELS"
    with pytest.warns(UserWarning, match=text):
        assert torch.equal(twice(LARGE), LARGE * 2)
    assert torch.equal(twice(LARGE), LARGE * 2)
    assert (written.calls, compiler.calls, Kernel.failed) == (1, 2, None)


def test_two_threads_in_which_it_fails_leave_the_compiler_alone(
    compiler: Compiler, written: Written, twice: Kernel
) -> None:
    """The second one to raise finds it dropped already."""

    def dropped_elsewhere(x: Tensor) -> Tensor:
        twice.by_hand = None
        raise RuntimeError("no such instruction")

    twice.by_hand = twice._given = dropped_elsewhere
    with pytest.warns(UserWarning, match="The kernel written by hand for twice failed"):
        assert torch.equal(twice(LARGE), LARGE * 2)
    assert (compiler.calls, Kernel.failed) == (1, None)


def test_what_is_written_by_hand_raises_where_compiled_code_is_asked_for(written: Written, twice: Kernel) -> None:
    written.error = RuntimeError("no such instruction")
    with use_kernels("compiled"), pytest.raises(RuntimeError, match="no such instruction"):
        twice(LARGE)
    written.error = torch.OutOfMemoryError("too large")
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        twice(LARGE)
    written.error = None
    assert torch.equal(twice(LARGE), LARGE * 2)
    assert written.calls == 3


def test_what_is_written_by_hand_says_nothing_of_the_compiler(
    compiler: Compiler, written: Written, twice: Kernel
) -> None:
    """One warning for all kernels where there is no compiler, though some of them were written."""
    twice(LARGE)
    compiler.error = RuntimeError("no compiler")
    with pytest.warns(UserWarning, match="so quantization kernels run eagerly"):
        Kernel(lambda x: x * 3, "triple")(LARGE)


def test_the_definition_joins_a_graph_of_the_caller(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    kernel = Kernel(lambda x: x * 2, "twice", untried(written))
    run = torch.compile(lambda x: kernel(x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(run(LARGE), LARGE * 2 + 1)
    assert written.calls == 0


WRITTEN = {
    **{name: recipe for name, recipe in RECIPES.items() if format_of(recipe).by_hand(recipe) is not None},
    **{f"int4_{group}": Int4GroupScaling(group=group) for group in (32, 64, 128)},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_written_by_hand_wait_for_triton_and_for_nvidia(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recipe, takes = WRITTEN[name], triton_kernels.available.__wrapped__
    for found, hip in ((None, None), (object(), "7.0")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert not takes()
    monkeypatch.setattr(torch.version, "hip", None)
    assert takes()
    for available in (False, True):
        monkeypatch.setattr(triton_kernels, "available", lambda available=available: available)
        make = functools.partial(kernels._encode_kernel.__wrapped__, recipe)
        assert (make(torch.bfloat16).by_hand is not None) is available
        assert make(torch.bfloat16, decided=True).by_hand is None  # its facts are given
        assert make(torch.float64).by_hand is None
        decode = kernels._decode_kernel.__wrapped__(recipe, torch.float16, per_row=False)
        assert (decode.by_hand is not None) is available
    for delayed in DELAYED.values():
        assert kernels._encode_kernel.__wrapped__(delayed, torch.bfloat16).by_hand is None  # it would make no history


@pytest.mark.parametrize("given", [False, True])
def test_an_amax_of_rows_takes_no_kernel_of_its_own(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """A row's amax is found by the kernel that encodes it, but for one that is given."""
    monkeypatch.setattr(kernels, "_encode_kernel", functools.cache(kernels._encode_kernel.__wrapped__))
    recipe, x = RECIPES["float8_row"], weight(compiled.COMPILED_FROM // 512, 512)
    amax = kernels.shared_amax(x, recipe)
    assert amax is not None
    before = compiler.calls
    found = kernels.encode(x, recipe, amax * 2 if given else None)
    assert compiler.calls == before + 1
    assert_same(found, encode(x.to(torch.float32), recipe, amax * 2 if given else amax))
    q = quantize(x, recipe)
    before = compiler.calls
    write(q, x)
    assert compiler.calls == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("by_hand", [True, False])
def test_kernels_written_by_hand_give_the_bytes_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, by_hand: bool
) -> None:
    """Inductor's, too, which take their place where they fail; in shapes that fill no tile, strided and transposed."""
    recipe = WRITTEN[name]
    if not by_hand:
        monkeypatch.setattr(compiled, "BY_HAND_ON", set())
    x = awkward(1024, 1024, torch.float32)
    x[11] *= 1e-30 / x[11].abs().amax()
    x[12] *= 1e-40 / x[12].abs().amax()  # denormal
    shapes = (x, x.t(), x[:, 128:640], x[:48, :384], x.view(4, 256, 1024))
    for values in (each.to(dtype) for each in shapes):
        wanted = parts_as_defined(values, recipe)
        use_kernels("compiled")
        there = values.cuda()
        found = kernels.encode(there, recipe)
        ran = kernels._encode_kernel(recipe, dtype, **({"own": True} if kernels.shares_amax(recipe) else {}))
        assert (ran.by_hand is not None) or not by_hand
        assert_same({part: value.cpu() for part, value in found.items()}, wanted)
        for to in (torch.bfloat16, torch.float16, torch.float32):
            got = kernels.decode(found, recipe, to).cpu()
            use_kernels("eager")
            assert same_bytes(got.nan_to_num(7.0), kernels.decode(wanted, recipe, to).nan_to_num(7.0))
            use_kernels("compiled")
        if kernels.row_multiple(recipe) == 1:
            rows = kernels.encode_rows(there, recipe)
            use_kernels("eager")
            assert_same({part: value.cpu() for part, value in rows.items()}, kernels.encode_rows(values, recipe))


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_number_becomes_the_code_of_the_definition_on_a_gpu(element: str) -> None:
    """All 2^32, by the hardware's conversion where it has one, under a scale of 1."""
    recipe, (_, largest) = Float8CurrentScaling(element=element, granularity="tensor"), fp8.ELEMENTS[element]
    amax = torch.tensor(largest, dtype=torch.float32, device="cuda")
    use_kernels("compiled")
    for first in range(-(2**31), 2**31, 2**26):
        bits = torch.arange(first, first + 2**26, dtype=torch.int64, device="cuda").to(torch.int32)
        x = bits.view(torch.float32).view(-1, 2**12)
        found = kernels.encode(x, recipe, amax)["payload"].view(torch.uint8)
        assert torch.equal(found, fp8.encode(x, finite(x), element).view(torch.uint8)), hex(first)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_written_by_hand_write_into_the_parts_that_are_there(name: str) -> None:
    x = awkward(512, 1024, torch.bfloat16)
    use_kernels("compiled")
    q = quantize(torch.ones_like(x).cuda(), WRITTEN[name])
    places = {part: own.data_ptr() for part, own in q.parts().items()}
    written_into = kernels.encode(x.cuda(), q.recipe, out=q.parts())
    assert {part: own.data_ptr() for part, own in written_into.items()} == places
    q.copy_(torch.zeros_like(x).cuda())
    q.copy_(x.cuda())
    assert {part: own.data_ptr() for part, own in q.parts().items()} == places
    assert_same({part: own.cpu() for part, own in q.parts().items()}, parts_as_defined(x, q.recipe))


@pytest.mark.gpu
def test_kernels_written_by_hand_run_on_the_device_of_their_values() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = awkward(64, 96, torch.bfloat16)
    with use_kernels("compiled"), torch.cuda.device(0):
        found = kernels.encode(x.to("cuda:1"), RECIPES["nvfp4"])
    assert found["payload"].device == torch.device("cuda", 1)
    assert_same({part: value.cpu() for part, value in found.items()}, parts_as_defined(x, RECIPES["nvfp4"]))


# -- modes -------------------------------------------------------------------------------------------------------------


def test_unknown_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"use_kernels\('fast'\): expected one of 'auto', 'compiled', 'eager'"):
        use_kernels("fast")
    assert use_kernels.mode == "auto"
    monkeypatch.setenv("QTENSOR_KERNELS", "fast")
    with pytest.raises(ValueError, match="QTENSOR_KERNELS='fast': expected one of 'auto', 'compiled', 'eager'"):
        compiled._begin_as_told()
    monkeypatch.setenv("QTENSOR_KERNELS", "eager")
    compiled._begin_as_told()
    assert use_kernels.mode == "eager"
    monkeypatch.delenv("QTENSOR_KERNELS")
    compiled._begin_as_told()
    assert use_kernels.mode == "auto"


@pytest.mark.budget
def test_nothing_is_compiled_again_for_another_place_to_call_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo guards on autograd, autocast, inference mode, views' bases and whether __torch_function__ is on."""
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(inputs))
        return graph.forward

    compile_ = torch.compile

    def seen(fn: Any, *, options: dict[str, Any], **others: Any) -> Any:  # the options are inductor's
        return compile_(fn, backend=backend, **others)

    monkeypatch.setattr(torch, "compile", seen)
    monkeypatch.setattr(kernels, "_encode_kernel", functools.cache(kernels._encode_kernel.__wrapped__))
    monkeypatch.setattr(kernels, "_decode_kernel", functools.cache(kernels._decode_kernel.__wrapped__))
    x, recipe = weight(64, 96), RECIPES["mxfp8"]
    with use_kernels("compiled"):
        q = quantize(x, recipe)
        q.dequantize()
        assert len(graphs) == 2
        q.copy_(x)
        parameter = torch.nn.Parameter(q)
        with torch.no_grad():
            parameter.mul_(1.5)
            quantize(torch.cat([x, x])[32:96], recipe)
            parameter[32:].dequantize()
        for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu")):
            with mode:
                y = torch.nn.functional.linear(weight(4, 96).requires_grad_(), parameter)
                quantize(x, recipe)
            if y.requires_grad:
                y.sum().backward()
    assert len(graphs) == 2


@pytest.mark.budget
@pytest.mark.slow
def test_shapes_are_dynamic_so_that_nothing_is_compiled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Special to torch are dims of size 1, and dims that are equal at first; it compiles once more for what is not."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile

    def seen(fn: Any, *, options: dict[str, Any], **others: Any) -> Any:  # the options are inductor's
        return compile_(fn, backend=backend, **others)

    monkeypatch.setattr(torch, "compile", seen)
    # kernels of other tests are compiled already
    monkeypatch.setattr(kernels, "_encode_kernel", functools.cache(kernels._encode_kernel.__wrapped__))
    monkeypatch.setattr(kernels, "_decode_kernel", functools.cache(kernels._decode_kernel.__wrapped__))
    for name in ("mxfp8", "nvfp4_square"):
        recipe, graphs[:] = RECIPES[name], []
        amax = torch.ones(()) if facts(recipe).tensor_wide else None
        with use_kernels("compiled"):
            for rows, columns in ((64, 64), (32 * 3, 512), (128, 1024), (512, 128), (1024, 64), (64, 96)):
                parts = kernels.encode(weight(rows, columns), recipe, amax)
                kernels.decode(parts, recipe, torch.bfloat16)
            assert 2 <= len(graphs) <= 3, name
            before = len(graphs)
            for rows, columns in ((16, 96), (32, 96), (96, 16), (96, 32)):  # one group of rows, one block a row
                if columns % facts(recipe).block or (rows < 32 and name == "mxfp8"):
                    continue
                parts = kernels.encode(weight(rows, columns), recipe, amax)
                kernels.decode(parts, recipe, torch.bfloat16)
            assert before < len(graphs) <= before + 4, name


@pytest.mark.parametrize("name", ["float8_row", "mxfp8", "nvfp4"])
def test_a_traced_graph_does_not_depend_on_the_size_from_which_kernels_are_compiled(name: str) -> None:
    """One dynamic graph of the caller's for activations of any number of tokens."""
    torch.compiler.reset()
    recipe, graphs = RECIPES[name], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def round_trip(x: Tensor) -> Tensor:
        rows = kernels.encode_rows(x, recipe)
        return kernels.decode(rows, recipe, torch.bfloat16)

    traced = torch.compile(round_trip, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (64, 2048, compiled.COMPILED_FROM // 64):
        x = weight(tokens, 96)
        found = traced(x)
        with use_kernels("eager"):
            assert same_bytes(found, round_trip(x))
    assert len(graphs) == 1


# Of the others only numbers differ: which elements, how many to a block.
OTHERWISE = ("float8_block_row", "float8_tensor_power_of_two", "mxfp8_floor")
TRACED = MAIN | DELAYED | {name: RECIPES[name] for name in OTHERWISE}


@pytest.mark.parametrize("recipe", TRACED.values(), ids=TRACED)
def test_kernels_trace_into_the_graph_of_their_caller(recipe: Any) -> None:
    """fullgraph, whatever the mode: their own compilation would break the caller's graph."""
    torch.compiler.reset()  # dynamo counts the recipes, whose code is the same, as recompilations
    x = weight(64, 96)

    def round_trip(x: Tensor) -> Tensor:
        return kernels.decode(kernels.encode(x, recipe), recipe, torch.bfloat16)

    with use_kernels("compiled"):
        found = torch.compile(round_trip, fullgraph=True, backend="eager")(x)
    assert same_bytes(found, quantize(x, recipe).dequantize())
