"""Which linears of a directory are quantized, and how: read off their tensors, compared with what its JSON says.

    every tensor      <module>.<name>
    quantized linear  its tensors have the names, dtypes and shapes of a scheme of the layout, all of them and no other
    scales            of inputs and of the KV cache, under the names they have when they are calibrated here
    dense             what remains, and holds values; and what says that inputs are rotated, which stands in config.json

Whatever else looks quantized, by a name or by a dtype, is refused: a tensor of codes is never taken for values.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dcp_adapters.hf.files.config_sections import said_of_quantization
from dcp_adapters.hf.files.directory import Directory, FileTensor
from dcp_adapters.hf.layouts.forms import Form
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KINDS, SHAPE, Claims, Layout, Scheme, SchemeEntry, StoredAs
from dcp_adapters.hf.layouts.registry import LAYOUTS, claims_of, layout_named
from dcp_adapters.hf.layouts.rotations import said_markers
from dcp_adapters.plain.words import in_lines
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import column_multiple, specs_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
VALUES = {"F64", "F32", "F16", "BF16"}
COUNTS = {"I64", "I32", "I16", "I8", "U8", "BOOL"}
# Files may hold an fp32 scale in fewer bits; engines read it as fp32, and so do we, which is exact.
FP32 = {"F32", "F16", "BF16"}
STORED_AS = {dtype: {name} for name, dtype in DTYPES.items()} | {torch.float32: FP32}
# Names by which other schemes are known.
FOREIGN = {
    "zero points": ("weight_zero_point", "input_zero_point", "qzeros"),
    "groups in the order of activations (actorder)": ("weight_g_idx", "g_idx"),
    "inputs that are scaled before they are quantized (AWQ, SmoothQuant)": ("pre_quant_scale",),
    "a low-rank correction (SVDQuant)": ("svdquant_lora_a", "svdquant_lora_b"),
    "FP8 in blocks (quant_method fp8)": ("weight_scale_inv",),
    "integers packed into int32 (GPTQ, AWQ)": ("qweight",),
    "quantized outputs": ("output_scale", "output_zero_point"),
    "sparse weights": ("bitmask", "compressed"),
}
FOREIGN_NAMES = {name for names in FOREIGN.values() for name in names}


@dataclass(frozen=True)
class FileLinear:
    """A linear of the file, or a weight of all experts that is stored whole.

    module: of the linear; the name of such a weight. shape: logical, [N, K] or [E, N, K]. parts: of the weight,
    INPUT_SCALE and SHAPE, each with its tensor.
    """

    module: str
    scheme: Scheme
    shape: tuple[int, ...]
    parts: Mapping[str, tuple[StoredAs, FileTensor]]

    @property
    def weight(self) -> str:
        """Return the name of the weight in a state dict."""
        return self.module if len(self.shape) > 2 else f"{self.module}.weight".lstrip(".")


@dataclass(frozen=True)
class Contents:
    """What a directory holds.

    linears: the quantized ones, by module. scales: calibrated name of a scale of inputs or of the KV cache -> how it
    is stored. dense: the other tensors, by name. layout: the name of the quantized ones' layout. kinds: the recipe of
    each kind, as far as the JSON tells it.
    """

    linears: Mapping[str, FileLinear] = field(default_factory=dict)
    scales: Mapping[str, tuple[StoredAs, FileTensor]] = field(default_factory=dict)
    dense: Mapping[str, FileTensor] = field(default_factory=dict)
    layout: str = ""
    kinds: Mapping[str, Recipe] = field(default_factory=lambda: KINDS)


def code_names() -> frozenset[str]:
    """Return the own names of all tensors that may be parts of a quantized weight, in whatever layout."""
    return _code_names(*LAYOUTS)


@functools.cache
def _code_names(*layouts: str) -> frozenset[str]:
    return frozenset(_names(map(layout_named, layouts)) | FOREIGN_NAMES)


def is_quantized(directory: Directory) -> bool:
    """Return whether the directory's JSON says in any way that it is quantized."""
    return said_of_quantization(directory.config) is not None or directory.quantization is not None


def contents_of(directory: Directory, counts: Collection[str] = ()) -> Contents:
    """Sort all tensors of a directory into quantized linears, scales and dense ones.

    Args:
        directory: as read.
        counts: names of tensors that are known to hold integers; other matrices of few bits are taken for codes.

    Raises:
        ValueError: one error for all linears whose scheme the library does not have, or which contradict the JSON.
    """
    claims = claims_of(directory)
    linears: dict[str, FileLinear] = {}
    scales: dict[str, tuple[StoredAs, FileTensor]] = {}
    dense: dict[str, FileTensor] = {}
    refused: dict[str, str] = {}
    taken: set[str] = set()
    for module, own in _modules(directory.tensors, claims).items():
        for name, tensor, form in _kv_scales(module, own, claims):
            scales[name] = (StoredAs(name.rpartition(".")[2], tensor.name.rpartition(".")[2], form), tensor)
            if claims is not None and claims.kv_cache:
                refused[tensor.name] = claims.kv_cache
            taken.add(tensor.name)
        rest = {name: tensor for name, tensor in own.items() if tensor.name not in taken}
        codes = _codes(module, rest, claims, counts)
        if not codes:
            dense |= {tensor.name: tensor for tensor in rest.values()}
            continue
        dense |= {tensor.name: tensor for name, tensor in rest.items() if name not in codes}
        found, problem = _linear_from(module, codes, claims)
        if found is None:
            refused[module or "the model itself"] = problem
        else:
            linears[module] = found
            if INPUT_SCALE in found.parts:
                scales[f"{module}.{INPUT_SCALE}".lstrip(".")] = found.parts[INPUT_SCALE]
    if refused:
        raise _refusal(directory, claims, refused)
    if claims is None:
        return Contents(linears, scales, dense)
    # A state dict says by an entry that inputs are rotated; here config.json does, so the entry is made.
    dense |= said_markers(directory, claims.layout, _shapes(linears, dense), dense)
    return Contents(linears, scales, dense, claims.layout.name, claims.kinds)


def weight_of(name: str) -> str:
    """Return the name of the weight that a tensor is a part of in some layout, by its name alone; else its own name."""
    names = code_names()
    module, _, own = name.rpartition(".")
    if own in names:
        return f"{module}.weight".lstrip(".")
    ends = (end for end in names if end.startswith("_") and own.endswith(end))
    return name.removesuffix(max(ends, key=len, default=""))


def _shapes(linears: Mapping[str, FileLinear], dense: Mapping[str, FileTensor]) -> dict[str, tuple[int, ...]]:
    """Map modules to the shape [N, K] of each weight that may be a linear's."""
    weights = {name: tensor for name, tensor in dense.items() if name.rpartition(".")[2] == "weight"}
    matrices = {name.rpartition(".")[0]: tensor.shape for name, tensor in weights.items() if tensor.dtype in VALUES}
    matrices |= {module: linear.shape for module, linear in linears.items()}
    return {module: shape for module, shape in matrices.items() if len(shape) == 2}


def _modules(tensors: Mapping[str, FileTensor], claims: Claims | None) -> dict[str, dict[str, FileTensor]]:
    """Map modules, and weights of all experts that are stored whole, to their tensors by their own names."""
    modules: dict[str, dict[str, FileTensor]] = {}
    ends = sorted(_names([] if claims is None or claims.layout.experts == "each" else [claims.layout]))
    for name, tensor in tensors.items():
        end = next((end for end in ends if name.endswith(end)), None)
        module, _, own = name.rpartition(".") if end is None else (name.removesuffix(end), "", end)
        modules.setdefault(module, {})[own] = tensor
    return modules


def _kv_scales(
    module: str, own: Mapping[str, FileTensor], claims: Claims | None
) -> Iterator[tuple[str, FileTensor, Form]]:
    """Yield (calibrated name, tensor, how it is read) of the scales of the KV cache that stand in a module."""
    for calibrated, stored in (claims.layout.kv_scales if claims is not None else {}).items():
        inside, _, name = stored.rpartition(".")
        tensor = own.get(name)
        attention, _, last = module.rpartition(".") if inside else (module, "", "")
        if claims is None or tensor is None or last != inside or tensor.dtype not in FP32:
            continue
        form = claims.layout.kv_form if is_one(tensor) else claims.layout.kv_heads
        if form is not None and (is_one(tensor) or form.shape(tensor.shape[:1]) == tensor.shape):
            yield f"{attention}.{calibrated}".lstrip("."), tensor, form


def is_one(tensor: FileTensor) -> bool:
    """Return whether a tensor of a file is a single value."""
    return tensor.shape in {(), (1,)}


def _codes(
    module: str, own: Mapping[str, FileTensor], claims: Claims | None, counts: Collection[str]
) -> dict[str, FileTensor]:
    """Return the tensors of a module that belong to a quantized weight, with the weight; none if it is dense."""
    layouts = LAYOUTS.values() if claims is None else [claims.layout]
    # Without a quantization_config the names of all layouts count: codes must not be taken for values.
    names = _names(layouts) | FOREIGN_NAMES
    codes = {
        name: tensor
        for name, tensor in own.items()
        if (name in names and name != "weight") or _holds_codes(tensor, counts)
    }
    # Its dtype may be that of values; beside scales it is a weight that was never compressed, and refused as such.
    if codes and "weight" in own:
        codes["weight"] = own["weight"]
    return codes


def _names(layouts: Iterable[Layout]) -> set[str]:
    """Return the own names of all tensors of quantized linears."""
    return {stored.name for layout in layouts for _, entry in layout.readable for stored in entry.stored}


def _holds_codes(tensor: FileTensor, counts: Collection[str]) -> bool:
    """Return whether the dtype of a tensor says that it holds no values without scales."""
    if tensor.dtype in VALUES or tensor.name in counts:
        return False
    # Models have matrices of masks and positions, which are BOOL and I64; narrower ones are mostly packed codes.
    return tensor.dtype not in COUNTS or (len(tensor.shape) > 1 and tensor.dtype not in {"I64", "BOOL"})


def _linear_from(module: str, codes: Mapping[str, FileTensor], claims: Claims | None) -> tuple[FileLinear | None, str]:
    """Return the linear that these tensors are, or None and why they are none."""
    found = ", ".join(f"{name} {tensor}" for name, tensor in sorted(codes.items()))
    if claims is None:
        return None, f"{found}: it is quantized, and no quantization_config in config.json says how"
    problems = []
    # The tensors decide, and the JSON must agree: it may say what they do not show, such as integers in place of
    # floats.
    for scheme, entry in claims.layout.readable:
        linear = _fitting(module, codes, scheme, entry)
        if linear is not None:
            problem = claims.problem(module, scheme)
            if problem is None:
                return linear, ""
            problems.append(f"{found}: {scheme}, and {problem}")
    if problems:
        return None, problems[0]
    guess, said = _guess(codes), claims.said_of(module)
    return None, found + (f": {guess}" if guess else "") + (f" (the JSON says {said})" if said else "")


def _fitting(module: str, codes: Mapping[str, FileTensor], scheme: Scheme, entry: SchemeEntry) -> FileLinear | None:
    """Return the linear if its tensors are those of the scheme, all of them and no other; else None."""
    stored = {one.part: one for one in entry.stored}
    if codes.keys() != {one.name for one in entry.stored}:
        return None
    recipe = KINDS[scheme.kind]
    specs = {spec.name: spec for spec in specs_of(recipe)}
    payload, dims = stored["payload"], 3 if stored["payload"].name.startswith("_") else 2
    held = codes[payload.name].shape
    if len(held) < dims:
        return None
    shape = (*held[: dims - 1], held[dims - 1] * payload.form.columns * specs["payload"].block)
    if shape[-1] % column_multiple(recipe):
        return None
    specs |= {name: PartSpec(name, torch.float32, per_row=False) for name in (INPUT_SCALE, SHAPE)}
    if not all(_is_part(codes[one.name], one, specs[one.part], shape) for one in entry.stored):
        return None
    return FileLinear(module, scheme, shape, {one.part: (one, codes[one.name]) for one in entry.stored})


def _is_part(tensor: FileTensor, stored: StoredAs, spec: PartSpec, shape: Sequence[int]) -> bool:
    if stored.part == SHAPE:
        return tensor.dtype in {"I64", "I32"} and tensor.shape == (2,)
    if tensor.dtype not in STORED_AS[stored.form.dtype or spec.dtype] | stored.also:
        return False
    if not spec.per_row:
        return tensor.dtype in FP32 and is_one(tensor)
    return tensor.shape == stored.form.shape(spec.shape(shape))


def _guess(codes: Mapping[str, FileTensor]) -> str:
    """Say what these tensors may be instead."""
    weight = codes.get("weight") or codes.get("weight_packed") or codes.get("_blocks")
    scale = codes.get("weight_scale") or codes.get("_scales")
    dtype = weight.dtype if weight is not None else ""
    scaled_by = scale.dtype if scale is not None else ""
    blocks = scale is not None and len(scale.shape) > 1
    guesses = {
        **{words: any(name in codes for name in names) for words, names in FOREIGN.items()},
        "scales without a weight": weight is None,
        "scales beside a weight that is not quantized (saved before it was compressed)": dtype in VALUES,
        "int8, or narrower integers in int8": dtype == "I8",
        "INT4 in groups whose scales are not bf16, which is what the library keeps": dtype == "I32"
        and scaled_by in FP32 - {"BF16"},
        "integers packed into int32 (pack-quantized), of other bits or in other groups": dtype == "I32",
        "MXFP4": dtype == "U8" and scaled_by == "U8",
        "4-bit integers": dtype == "U8" and scaled_by in FP32,
        "FP8 in blocks that this layout does not have": dtype == "F8_E4M3" and scaled_by in FP32 and blocks,
    }
    return next((words for words, holds in guesses.items() if holds), "")


def _refusal(directory: Directory, claims: Claims | None, refused: Mapping[str, str]) -> ValueError:
    layouts: list[Layout] = list(LAYOUTS.values()) if claims is None else [claims.layout]
    have = "; ".join(
        f"{layout.name}: {', '.join(dict.fromkeys(str(scheme) for scheme, _ in layout.readable))}" for layout in layouts
    )
    return ValueError(
        f"{directory.path}: quantized in ways that the library does not read ({have}); nothing has been loaded:"
        + in_lines(f"{module}: {problem}" for module, problem in refused.items())
    )
