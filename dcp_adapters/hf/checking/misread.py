"""What an engine would misread in a directory: decided from names, shapes, schemes and scales of one value.

    left alone      a quantized linear that a name in the JSON's list of unquantized modules means, too
    not quantized   a dense linear of which nothing says that it is left alone, among quantized ones of its name
    run as one      linears that engines join (q, k, v; gate, up) with other schemes or other tensor-wide scales
    inputs          an input scale that cannot be divided by, that is missing beside others, or differs in a joined one
    cut blocks      rows or columns that end within a square block of 128

A directory that contradicts itself so that its weights cannot be read at all is refused where it is opened.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dcp_adapters.hf.files.directory import FileTensor, read_directory
from dcp_adapters.hf.files.engine_names import fused_sets
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KINDS, Claims
from dcp_adapters.hf.layouts.registry import claims_of
from dcp_adapters.hf.reading.reader import OpenFiles
from dcp_adapters.hf.reading.schemes import VALUES, Contents, FileLinear, contents_of
from dcp_adapters.plain.words import few_of
from dcp_adapters.stored.verifying.findings import Finding
from qtensor.spec.registry import block_multiple, row_multiple, tensor_wide

Look = Callable[[FileTensor], float]  # reads the value of a tensor that has one
SHOWN = 3  # names in a sentence
# Scales of one value that engines make one of by rounding the codes again. Of all others they take the largest for all.
ROUNDED_AGAIN = "fp8_tensor"


def find_misread(path: str) -> list[Finding]:
    """Return what engines misread in a directory of quantized safetensors; nothing for a dense one.

    Raises:
        FileNotFoundError, ValueError: as `import_hf` does.
    """
    directory = read_directory(path)
    claims = claims_of(directory)
    if claims is None:
        return []
    contents = contents_of(directory)
    with OpenFiles(directory.path) as files:

        def look(tensor: FileTensor) -> float:
            held: Tensor = files.piece(tensor)[...]
            return held.to(torch.float64).item()

        found = [*_left_alone(contents, claims), *_run_as_one(contents, claims, look), *_inputs(contents, look)]
        return [*found, *_cut_blocks(contents)]


def _left_alone(contents: Contents, claims: Claims) -> Iterator[Finding]:
    """Yield quantized linears that engines would read as dense ones, and dense ones that they would not."""
    for module, linear in contents.linears.items():
        name = claims.left_alone_by(module)
        if name is not None:
            yield Finding(
                "error",
                _file(linear),
                linear.weight,
                f"the JSON leaves {name!r} alone, and engines take this module for one of those: they would read its "
                "codes as values; name the modules in full, or quantize both or neither",
            )
    own = {module.rpartition(".")[2] for module in contents.linears}
    for module, tensor in _dense_linears(contents).items():
        if module.rpartition(".")[2] in own and claims.means_linear(module):
            yield Finding(
                "error",
                tensor.file,
                tensor.name,
                f"it is {tensor.dtype}, others of its name are quantized, and nothing says that it is left alone: "
                "engines make a quantized linear of it, and find no scales; add it to the modules that are left alone",
            )


def _run_as_one(contents: Contents, claims: Claims, look: Look) -> Iterator[Finding]:
    """Yield linears that engines join, whose schemes or scales do not go together."""
    if not claims.layout.fuses:
        return
    linears, dense = contents.linears, _dense_linears(contents)
    for members in fused_sets([*linears, *dense]):
        if len(members) == 1 or all(module in dense for module in members):
            continue
        schemes = [str(linears[module].scheme) if module in linears else "not quantized" for module in members]
        if len({*schemes}) > 1:
            told = ", ".join(f"{module}: {scheme}" for module, scheme in zip(members, schemes, strict=True))
            yield Finding("error", "", members[0], f"engines run these as one linear, and they differ: {told}")
            continue
        those = [linears[module] for module in members]
        yield from _wide_scales(those, look)
        scales = _values(those, INPUT_SCALE, look)
        if len({*scales.values()}) > 1:
            told = ", ".join(f"{name} {value:.6g}" for name, value in scales.items())
            what = "the input of these is one, and engines take the largest scale for all of them"
            yield Finding("warning", "", members[0], f"{what}: {told}")


def _wide_scales(linears: list[FileLinear], look: Look) -> Iterator[Finding]:
    """Yield what becomes of joined linears whose weights have other tensor-wide scales."""
    part = tensor_wide(KINDS[linears[0].scheme.kind])
    values = {} if part is None else _values(linears, part, look)
    if len({*values.values()}) < 2:
        return
    told = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
    if linears[0].scheme.kind == ROUNDED_AGAIN:
        what = "engines run these as one linear with one scale, and round the codes again under the largest"
        yield Finding("warning", "", linears[0].weight, f"{what}: {told}")
        return
    what = "engines run these as one linear with one global scale, and take one of these for all"
    yield Finding("error", "", linears[0].weight, f"{what}, so the weights of the others change: {told}")


def _inputs(contents: Contents, look: Look) -> Iterator[Finding]:
    """Yield input scales that are missing or no scales."""
    for linear in contents.linears.values():
        for name, value in _values([linear], INPUT_SCALE, look).items():
            if not (math.isfinite(value) and value > 0):
                yield Finding("error", _file(linear), name, f"it is {value:g}, and engines divide by it")
    calibrated = Counter(linear.scheme.kind for linear in contents.linears.values() if INPUT_SCALE in linear.parts)
    lacking: dict[str, list[str]] = {}
    for module, linear in contents.linears.items():
        if INPUT_SCALE not in linear.parts and calibrated[linear.scheme.kind]:
            lacking.setdefault(linear.scheme.kind, []).append(module)
    for kind, modules in lacking.items():
        message = f"no input scale, and {calibrated[kind]} other {kind} linears have one: {few_of(modules, SHOWN)}"
        yield Finding("warning", "", modules[0], message)


def _cut_blocks(contents: Contents) -> Iterator[Finding]:
    """Yield linears whose last blocks are cut."""
    found: dict[str, list[str]] = {}
    for module, linear in contents.linears.items():
        recipe = KINDS[linear.scheme.kind]
        rows, columns = row_multiple(recipe), block_multiple(recipe)
        if rows > 1 and (linear.shape[-2] % rows or linear.shape[-1] % columns):
            found.setdefault(f"{rows} x {columns}", []).append(f"{module} {list(linear.shape)}")
    for block, modules in found.items():
        message = (
            f"the last blocks of {block} are cut: engines that share these out over GPUs need whole blocks: "
            f"{few_of(modules, SHOWN)}"
        )
        yield Finding("warning", "", modules[0].partition(" ")[0], message)


def _dense_linears(contents: Contents) -> dict[str, FileTensor]:
    """Map modules to weights that may be those of linears: matrices of values."""
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in contents.dense.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in VALUES
    }


def _values(linears: list[FileLinear], part: str, look: Look) -> Mapping[str, float]:
    """Map the names of tensors of one value to their values, in the order of the linears that have one."""
    held = [linear.parts[part][1] for linear in linears if part in linear.parts]
    return {tensor.name: look(tensor) for tensor in held}


def _file(linear: FileLinear) -> str:
    return linear.parts["payload"][1].file
