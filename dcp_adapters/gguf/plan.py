"""The tensors of a GGUF file, decided from names, formats and shapes: what becomes of each output of an export's plan.

    linear in MXFP4    <name>.weight
    linear in NVFP4    <name>.weight, <name>.scale (the global scale) and, if calibrated, <name>.input_scale: fp32 [1]
    dense              as it is, in its dtype; vectors in fp32, which llama.cpp asks for and which is exact

A `GGUFTensor` says what is in the file; `make_tensors` makes it from an output's parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_adapters.gguf.architectures import name_in_file, pair_rows
from dcp_adapters.gguf.blocks import BLOCK_TYPES, BlockType
from dcp_adapters.gguf.like import OF_CONFIG, Like
from dcp_adapters.hf.exporting.outputs import Output
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, Layout, Scheme, SchemeEntry, StoredAs, kind_of
from dcp_adapters.plain.words import few_of, in_lines

_CODES = (StoredAs("payload", "weight"), StoredAs("scale", "weight_scale"))
_GLOBAL = StoredAs("global_scale", "weight_scale_2")
# For the plan of linears and scales alone. No directory has this layout, so it is not registered.
GGUF = Layout(
    name="gguf",
    schemes={
        Scheme("mxfp4", "none"): SchemeEntry(_CODES, {}),
        Scheme("nvfp4", "none"): SchemeEntry((*_CODES, _GLOBAL), {}),
        Scheme("nvfp4", "static"): SchemeEntry((*_CODES, _GLOBAL, StoredAs(INPUT_SCALE, "input_scale")), {}),
    },
    fuses=False,
)
DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
LEFT = ".inv_freq"  # left out: made from the config wherever a model is loaded


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
        name: in the file.
        kind: its type in ggml, "NVFP4".
        shape: of its elements, rows first.
        nbytes: in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int


def tensors_of(outputs: Sequence[Output], like: Like) -> list[tuple[Output, tuple[GGUFTensor, ...]]]:
    """Plan what becomes of each output, in order.

    Args:
        outputs: of an export's plan in the layout GGUF.
        like: of the same model.

    Raises:
        ValueError: tensors that have no name in the file, are not in `like`, have another shape there, or that the
            types of the file cannot hold; tensors of `like` that no output makes. All of them are named.
    """
    problems: list[str] = []
    made = []
    for output in outputs:
        found = () if output.source.endswith(LEFT) else _plan_output(output, like, problems)
        made.append((output, found))
    if problems:
        raise ValueError(f"the layout gguf can not hold this:{in_lines(problems)}")
    have = {tensor.name for _, found in made for tensor in found}
    # Scales are not asked for: a file of dense weights has none, and one that llama.cpp quantized has its own.
    lacking = [name for name in like.shapes if name not in have | OF_CONFIG and not name.endswith(_SCALES)]
    if lacking:
        raise ValueError(
            f"the source lacks {len(lacking)} tensors that {like.path} has ({few_of(lacking, 4)}); say by rest=... "
            "(--rest) where they are taken from, for example the model's directory"
        )
    return made


def make_tensors(output: Output, made: Sequence[GGUFTensor], parts: Mapping[str, Tensor], like: Like) -> list[Tensor]:
    """Return the bytes of each tensor, in the order of `made`.

    Args:
        output: of the plan.
        made: what becomes of it.
        parts: of its weight, and the scale of its input; a dense tensor is there under "". On the CPU.
        like: of the same model.

    Raises:
        ValueError: a block has a negative scale.
    """
    if not made:
        return []
    # Codes and scales are permuted as the rows are, since a block never crosses rows.
    heads = _heads(made[0].name, like)
    if output.recipe is None:
        rows = parts[""] if heads is None else pair_rows(parts[""], heads)
        return [rows.float() if made[0].kind == "F32" else rows]
    payload, scale = parts["payload"], parts["scale"]
    if heads is not None:
        payload, scale = pair_rows(payload, heads), pair_rows(scale, heads)
    try:
        blocks = _block_type(output).pack(payload, scale)
    except ValueError as error:
        raise ValueError(f"{output.source}: {error}") from error
    return [blocks, *(parts[name].float().reshape(1) for name in _VECTORS if name in parts)]


_VECTORS = {"global_scale": "scale", INPUT_SCALE: "input_scale"}  # part -> its name in the file
_SCALES = tuple(f".{name}" for name in _VECTORS.values())


def _block_type(output: Output) -> BlockType:
    assert output.recipe is not None
    return BLOCK_TYPES[str(kind_of(output.recipe))]


def _heads(name: str, like: Like) -> int | None:
    """Return how many heads the rows of a tensor make up; None if they stay in their order."""
    own = name.split(".")[-2]
    return like.heads[own] if own in like.known.in_pairs else None


def _plan_output(output: Output, like: Like, problems: list[str]) -> tuple[GGUFTensor, ...]:
    """Return the tensors that an output becomes; if there is a problem, add it to `problems`, and return none."""
    first = output.written[0]
    module, _, own = first.name.rpartition(".")
    base = name_in_file(like.known, module)
    name = f"{base}.{own}"
    columns = 2 if output.recipe is not None else 1  # a byte of a payload holds two
    shape = (*first.shape[:-1], first.shape[-1] * columns) if first.shape else ()
    problem = None
    if base is None or own not in ("weight", "bias"):
        problem = f"{output.source}: files of {like.architecture} have no such tensor; expected transformers' names"
    elif name not in like.shapes:
        problem = f"{output.source}: {like.path} has no {name}; give a file of the same model"
    elif like.shapes[name] != shape:
        problem = f"{output.source} is {list(shape)}, {name} of {like.path} {list(like.shapes[name])}"
    elif output.recipe is None and first.dtype not in DENSE:
        problem = f"{output.source} is {str(first.dtype).removeprefix('torch.')}, expected {', '.join(DENSE.values())}"
    elif output.recipe is not None and shape[-1] % _block_type(output).columns:
        block = _block_type(output)
        problem = f"{output.source} has {shape[-1]} columns; blocks of {block.name} have {block.columns} there"
    if problem is not None:
        problems.append(problem)
        return ()
    # llama.cpp asks for vectors in fp32: norms and biases.
    if output.recipe is None:
        kind = "F32" if len(shape) < 2 else DENSE[first.dtype]
        return (GGUFTensor(name, kind, shape, _elements(shape) * (4 if kind == "F32" else 2)),)
    block = _block_type(output)
    weight = GGUFTensor(name, block.name, shape, _elements(shape) // block.columns * block.nbytes)
    held = {written.part for written in output.written}
    return (weight, *(GGUFTensor(f"{base}.{tail}", "F32", (1,), 4) for part, tail in _VECTORS.items() if part in held))


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
