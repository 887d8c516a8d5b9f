"""Dense values <-> parts at speed: one definition, run compiled, in chunks of rows, or inside somebody else's graph.

The formats say what the bytes are, in torch ops on fp32 values. Here is how they are run, always to the same bytes:

    large, with a compiler       one fused kernel (fsdp_hooks/kernels) that reads the values in the dtype they have and
                                 writes the parts; its only temporaries in memory are block scales and, for
                                 packed formats, one byte an element
    large, on an NVIDIA GPU      a kernel written by hand (triton_kernels/) in its place, without temporaries
    eager                        chunks of rows that fit into a core's cache, so that no temporary is larger
    traced by torch.compile      the plain definition, which joins the graph

Compiled code sees the values as [rows, blocks, block], so that the last dim is a constant and indices need no division:
if K itself is the dynamic dim, inductor does not vectorise. Rows that end in a smaller block are cut in two for it,
see ragged.py. It returns the encoding scales of blocks beside the
parts, though nobody uses them: this makes inductor compute them once a block instead of once an element.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import COMPILED_FROM, Kernel, use_kernels
from fsdp_hooks.kernels.probes import Written
from fsdp_hooks.kernels.replays import replayed
from fsdp_hooks.lazy_bits import resolve
from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import ragged, triton_kernels
from qtensor.numerics.in_place import are_written, writable_parts
from qtensor.numerics.tiles import (
    CHUNK,
    CHUNK_ELSEWHERE,
    cut_into_tiles,
    join_tiles,
    own_rows,
    packed_block,
    part_rows,
    pieces_of,
    rows_of,
)
from qtensor.probes.calls import amax_probes, decode_probes, encode_probes
from qtensor.spec import registry as formats
from qtensor.spec.blocks import BlockFacts, canonical_nan, finite_amax, row_amax, scatter_blocks
from qtensor.spec.codecs.rounding import is_armed
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import (
    block_multiple,
    format_of,
    logical_shape,
    row_multiple,
    shares_scale_along,
    specs_of,
    tensor_wide,
)


def shared_amax(x: Tensor, recipe: Recipe) -> Tensor | None:
    """Do `formats.shared_amax` on dense values [.., N, K] in any floating dtype."""
    x = resolve(x)
    if x.is_meta and not is_tracing() and shares_amax(recipe):
        return x.new_empty(amax_shape(x.shape, recipe), dtype=torch.float32)
    if _runs_as_defined(x):
        return formats.shared_amax(x.to(torch.float32), recipe)
    if not shares_amax(recipe):
        return None
    if tensor_wide(recipe) is None:
        return row_amaxes(x, recipe)
    flat, kernel = rows_of(x), _amax_kernel(x.dtype, rows=False)
    # as one long row, since rows do not matter here and the compiler would specialise on equal dims
    found = [kernel(flat[piece].view(-1)) for piece in pieces_of(flat, 1, kernel)]
    return found[0] if len(found) == 1 else torch.stack(found).amax()


def encode(
    x: Tensor,
    recipe: Recipe,
    amax: Tensor | None = None,
    blocks: BlockFacts | None = None,
    *,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Do `formats.encode` on dense values [.., N, K] in any floating dtype; without `amax` the values' own is taken.

    `out` are parts that may be written. If one launch of a kernel written by hand can write them all, it does, and they
    are what is returned; otherwise they stay as they are, and what is returned is new.
    """
    x = resolve(x)
    # shapes alone; a tracer's tensors go through the definition, which its graph needs
    if x.is_meta and not is_tracing():
        return {spec.name: x.new_empty(spec.shape(x.shape), dtype=spec.dtype) for spec in specs_of(recipe)}
    if _runs_as_defined(x):
        values = x.to(torch.float32)
        return formats.encode(values, recipe, formats.shared_amax(values, recipe) if amax is None else amax, blocks)
    group = row_multiple(recipe)
    # blocks end with each matrix of a stack
    if blocks is None and group > 1 and x.ndim > 2 and x.shape[-2] % group:
        blocks = BlockFacts(*(scatter_blocks(fact, group) for fact in block_facts(x, recipe)))
    # a pass of its own: the codes of the first rows cannot wait for the largest value of all
    if amax is None and tensor_wide(recipe) is not None and (blocks is not None or not _finds_amax_by_hand(x, recipe)):
        amax = shared_amax(x, recipe)
    if amax is not None and amax.ndim:
        amax = amax.reshape(-1, 1)
    if blocks is not None:
        # all scales are decided by the facts, so rows need not come in whole blocks
        facts = [rows_of(fact) for fact in blocks]
        return _over_rows(_encode_kernel(recipe.stored, x.dtype, decided=True), recipe, x, amax, *facts, group=1)
    # that of each row, which the kernel has at hand, or by hand that of all of them
    own = {"own": True} if amax is None and shares_amax(recipe) else {}
    return _over_rows(_encode_kernel(recipe.stored, x.dtype, **own), recipe, x, amax, out=out)


def encode_under(x: Tensor, recipe: Recipe, quantizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Do `Format.encode_with` on dense values [N, K] in any floating dtype; ValueError for another number of dims."""
    x = resolve(x)
    if x.ndim != 2:
        raise ValueError(f"encode_under of {x.ndim} dims: rows share out scales of [N, K] alone")
    if _runs_as_defined(x) or x.is_meta:
        return format_of(recipe).encode_with(x.to(torch.float32), recipe, quantizer)
    kernel = _encode_under_kernel(recipe.stored, x.dtype, tuple(quantizer))
    return _over_rows(kernel, recipe, x, *quantizer.values(), group=row_multiple(recipe))


def block_facts(x: Tensor, recipe: Recipe) -> BlockFacts:
    """Do `formats.block_facts` on dense values [.., N, K] in any floating dtype."""
    x = resolve(x)
    if _runs_as_defined(x) or x.is_meta:
        return formats.block_facts(x.to(torch.float32), recipe)
    flat, block, kernel = rows_of(x), block_multiple(recipe), _facts_kernel(recipe.stored, x.dtype)
    found = [kernel(cut_into_tiles(flat[piece], block)) for piece in pieces_of(flat, 1, kernel)]
    amax, broken = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True))
    shape = (*x.shape[:-1], amax.shape[-1])
    return BlockFacts(amax.reshape(shape), broken.reshape(shape))


def encode_rows(x: Tensor, recipe: Recipe, *, drawn: bool = False) -> dict[str, Tensor]:
    """Quantize every row of x by itself: a tensor-wide scale becomes one scale a row, [.., 1].

    `drawn`: round stochastically, see `formats.encode_drawn`.
    """
    x = resolve(x)
    if _runs_as_defined(x) or x.is_meta:
        values = x.to(torch.float32)
        return formats.encode_drawn(values, recipe) if drawn else formats.encode(values, recipe, row_amax(values))
    if drawn:
        return _over_rows(_drawing_kernel(recipe.stored, x.dtype), recipe, x)
    return encode(x, recipe, row_amaxes(x, recipe) if tensor_wide(recipe) else None)


def row_amaxes(x: Tensor, recipe: Recipe) -> Tensor:
    """Return fp32 [.., N, 1]: the largest finite magnitude of each row; infinite where the format marks rows."""
    x, marked = resolve(x), format_of(recipe).marks_rows
    if _runs_as_defined(x):
        return row_amax(x.to(torch.float32), marked=marked)
    flat, kernel = rows_of(x), _amax_kernel(x.dtype, rows=True, marked=marked)
    amaxes = [kernel(flat[piece]) for piece in pieces_of(flat, 1, kernel)]
    return (amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)).reshape(*x.shape[:-1], 1)


@functools.cache
def shares_amax(recipe: Recipe) -> bool:
    """Return whether `encode` uses an amax; it does not if every scale belongs to a block."""
    return shares_scale_along(recipe, 1, 2)


def amax_shape(shape: Sequence[int], recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of `shared_amax` of values of a shape, for a recipe that has shared scales."""
    return () if tensor_wide(recipe) else (*shape[:-1], 1)


def encode_step(x: Tensor, recipe: Recipe, *state: Tensor) -> dict[str, Tensor]:
    """Do the `step` of a format that keeps a history: parts of x, continued from `state` (amax, scale, history)."""
    x = resolve(x)
    if _runs_as_defined(x) or x.is_meta:
        return format_of(recipe).step(x.to(torch.float32), recipe, *state)
    return _over_rows(_step_kernel(recipe.stored, x.dtype), recipe, x, *state)


def decode(parts: Mapping[str, Tensor], recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Do `Format.decode`, rounded once to `dtype`: [.., N, K].

    Tensor-wide parts may be given per entry of a dim ([N, 1, ..], [1, N, 1]), as a gathered weight has them.
    """
    # shapes alone, as in `encode`
    if parts["payload"].is_meta and not is_tracing():
        return torch.empty(logical_shape(parts["payload"], recipe), dtype=dtype, device="meta")
    if _runs_as_defined(parts["payload"]):
        return _round_once(format_of(recipe).decode(parts, recipe), dtype)
    how, held = _decoding(recipe), parts["payload"].shape
    shape = held if how.packing == 1 else torch.Size((*held[:-1], held[-1] * how.packing))
    kernel = _decode_kernel(how.stored, dtype, per_row=how.wide is not None and parts[how.wide].ndim > 0)
    if kernel.would_compile(parts["payload"]):
        if kernel.has_by_hand(parts["payload"]):
            given = [parts[spec.name] for spec in how.specs]
            (values,) = replayed(kernel, given, lambda: [_decode_whole(kernel, parts, recipe, shape, dtype)])
            return values
        return _decode_whole(kernel, parts, recipe, shape, dtype)
    payload, *others = [part_rows(parts[spec.name], spec, shape) for spec in how.specs]
    pieces = list(pieces_of(payload, 1, kernel))
    tiles = [cut_into_tiles(payload[piece], how.block) for piece in pieces]
    if len(pieces) == 1:
        # not a view, as in _decode_whole
        return torch.ops.aten._unsafe_view(kernel(tiles[0], *others), shape)  # type: ignore[no-any-return]
    values = torch.empty(shape, dtype=dtype, device=payload.device)
    flat = values.view(-1, shape[-1])
    for piece, tile in zip(pieces, tiles, strict=True):
        flat[piece].copy_(kernel(tile, *(own_rows(part, piece) for part in others)))
    return values


def _decode_whole(
    kernel: Kernel, parts: Mapping[str, Tensor], recipe: Recipe, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Decode all rows by one call, two if they end in a smaller block."""
    how = _decoding(recipe)
    payload, *others = [part_rows(parts[spec.name], spec, shape) for spec in how.specs]
    if payload.shape[1] % how.block:
        given = {spec.name: part for spec, part in zip(how.specs, (payload, *others), strict=True)}
        return _decode_ragged(given, recipe, shape, dtype)
    values = kernel.run(cut_into_tiles(payload, how.block), *others)
    # not a view: autograd would refuse in-place writes to one
    return values if values.shape == shape else torch.ops.aten._unsafe_view(values, shape)  # type: ignore[no-any-return]


# -- kernels -----------------------------------------------------------------------------------------------------------
# One for each recipe, purpose and kind of arguments, because dynamo limits the compiled variants of one function.


@functools.cache
def _amax_kernel(dtype: torch.dtype, *, rows: bool, marked: bool = False) -> Kernel:
    def amax(x: Tensor) -> Tensor:  # [rows, K] or [elements]
        x = x.to(torch.float32)
        return row_amax(x, marked=marked) if rows else finite_amax(x)

    by_hand = not rows and _takes_by_hand(dtype)
    written = Written(triton_kernels.amax, amax_probes(dtype, amax)) if by_hand else None
    return Kernel(amax, f"amax_of_{'marked_' if marked else ''}{'rows' if rows else 'tensor'}_{dtype}", written)


@functools.cache
def _facts_kernel(recipe: Recipe, dtype: torch.dtype) -> Kernel:
    block = block_multiple(recipe)

    def facts(x: Tensor) -> BlockFacts:
        return formats.block_facts(join_tiles(x, block).to(torch.float32), recipe)

    return Kernel(facts, f"block_facts_{_name(recipe, dtype)}")


@functools.cache
def _encode_kernel(
    recipe: Recipe, dtype: torch.dtype, *, own: bool = False, decided: bool = False, strided: bool = False
) -> Kernel:
    fmt = format_of(recipe)
    block, wide = block_multiple(recipe), tensor_wide(recipe) is not None

    def encode(x: Tensor, amax: Tensor | None, *facts: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values = join_tiles(x, block).to(torch.float32)
        if own:
            amax = finite_amax(values) if wide else row_amax(values)
        quantizer = fmt.quantizer(values, recipe, amax, BlockFacts(*facts) if decided else None)
        enc, _ = fmt.grid(recipe, quantizer)
        return fmt.encode_with(values, recipe, quantizer, enc), enc

    kind = (
        (f"_of_{'tensor' if wide else 'rows'}" if own else "")
        + ("_of_cut_blocks" if decided else "")
        + ("_strided" if strided else "")
    )
    hand = None if decided or strided else _by_hand(recipe, dtype)
    written = None if hand is None else Written(hand.encode, encode_probes(recipe, dtype, encode))
    return Kernel(encode, f"encode_{_name(recipe, dtype)}{kind}", written)


@functools.cache
def _encode_under_kernel(recipe: Recipe, dtype: torch.dtype, names: tuple[str, ...]) -> Kernel:
    fmt = format_of(recipe)
    block = block_multiple(recipe)

    def encode(x: Tensor, *scales: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        quantizer = dict(zip(names, scales, strict=True))
        enc, _ = fmt.grid(recipe, quantizer)
        return fmt.encode_with(join_tiles(x, block).to(torch.float32), recipe, quantizer, enc), enc

    return Kernel(encode, f"encode_{_name(recipe, dtype)}_under_{'_'.join(names)}")


@functools.cache
def _drawing_kernel(recipe: Recipe, dtype: torch.dtype) -> Kernel:
    block = block_multiple(recipe)

    def encode(x: Tensor) -> tuple[dict[str, Tensor], None]:
        return formats.encode_drawn(join_tiles(x, block).to(torch.float32), recipe), None

    return Kernel(encode, f"draw_rows_{_name(recipe, dtype)}")


@functools.cache
def _step_kernel(recipe: Recipe, dtype: torch.dtype) -> Kernel:
    fmt = format_of(recipe)
    block = block_multiple(recipe)

    def step(x: Tensor, *state: Tensor) -> tuple[dict[str, Tensor], None]:
        return fmt.step(join_tiles(x, block).to(torch.float32), recipe, *state), None

    return Kernel(step, f"step_{_name(recipe, dtype)}")


@functools.cache
def _decode_kernel(recipe: Recipe, dtype: torch.dtype, *, per_row: bool, strided: bool = False) -> Kernel:
    fmt, names = format_of(recipe), [spec.name for spec in _decoded_specs(recipe)]
    block = packed_block(recipe)

    def decode(payload: Tensor, *others: Tensor) -> Tensor:
        parts = dict(zip(names, (join_tiles(payload, block), *others), strict=True))
        return _round_once(fmt.decode(parts, recipe), dtype)

    kind = f"{'_of_shards' if per_row else ''}{'_strided' if strided else ''}"
    hand = None if strided else _by_hand(recipe, dtype)
    written = None
    if hand is not None:
        written = Written(functools.partial(hand.decode, dtype=dtype), decode_probes(recipe, dtype, decode))
    elements = specs_of(recipe)[0].block or 1
    # 32 numbers of 16 bits fill a wide vector, and inductor does not mix blocks of 16: a quarter of the speed
    narrow = elements > 1 and dtype.itemsize == 2
    return Kernel(decode, f"decode_{_name(recipe, dtype)}{kind}", written, elements=elements, narrow=narrow)


class _Decoding(NamedTuple):
    """What a decode under a recipe needs to know."""

    stored: Recipe
    specs: list[PartSpec]
    wide: str | None  # the name of the tensor-wide part
    block: int  # entries of a row of the payload that share a scale
    packing: int  # elements in an entry


@functools.cache
def _decoding(recipe: Recipe) -> _Decoding:
    specs = _decoded_specs(recipe)
    return _Decoding(recipe.stored, specs, tensor_wide(recipe), packed_block(recipe), specs[0].block)


def _by_hand(recipe: Recipe, dtype: torch.dtype) -> triton_kernels.ByHand | None:
    """Return the kernels for GPUs that somebody wrote for a recipe, if they could run."""
    return format_of(recipe).by_hand(recipe) if _takes_by_hand(dtype) else None


def _takes_by_hand(dtype: torch.dtype) -> bool:
    return dtype in triton_kernels.DTYPES and triton_kernels.available()


def _round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`. In fp32 each NaN becomes the default one; in bf16 and fp16 the backend's conversion decides."""
    return canonical_nan(values) if dtype == torch.float32 else values.to(dtype)


def _decoded_specs(recipe: Recipe) -> list[PartSpec]:
    """Return the specs of the parts that values are made of; a history is not among them."""
    return [spec for spec in specs_of(recipe) if spec.gathered]


def _name(recipe: Recipe, dtype: torch.dtype) -> str:
    return re.sub(r"\W+", "_", repr(recipe)).strip("_") + "_" + str(dtype).removeprefix("torch.")


# -- calls -------------------------------------------------------------------------------------------------------------


def _runs_as_defined(x: Tensor) -> bool:
    """Return whether to run the plain definition: while traced, while rounding stochastically, or for a small x."""
    # asked first: reading the size would put a guard on it into the caller's graph
    if is_tracing() or is_armed():
        return True
    numel = x.numel()
    if numel >= COMPILED_FROM or numel == 0:
        return numel == 0
    # a byte may hold two elements
    return use_kernels.mode != "compiled" and numel < CHUNK.get(x.device.type, CHUNK_ELSEWHERE) // 2


def _finds_amax_by_hand(x: Tensor, recipe: Recipe) -> bool:
    """Return whether one call of a kernel written by hand finds a tensor-wide amax and encodes all of x under it."""
    kernel = _encode_kernel(recipe.stored, x.dtype, own=True)
    return kernel.runs_by_hand(x) and rows_of(x).shape[0] % row_multiple(recipe) == 0


def _over_rows(
    kernel: Kernel,
    recipe: Recipe,
    x: Tensor,
    *args: Tensor | None,
    group: int | None = None,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the parts of x, in the shapes that the specs say, by one or more calls of the kernel.

    `group` is how many rows must come together: those of a square block, unless the arguments decide all scales. `out`:
    see `encode`.
    """
    decided = group is not None
    group = group or row_multiple(recipe)
    flat, block = rows_of(x), block_multiple(recipe)
    # compiled code sees whole blocks only, see ragged.py
    if flat.shape[1] % block and kernel.compiles(flat) and not decided:
        strided = _encode_kernel(recipe.stored, x.dtype, strided=True)
        run = functools.partial(_over_flat, recipe=recipe, args=args, group=group)
        found = ragged.encode_ragged(
            flat, block, specs_of(recipe), lambda rows: run(strided, rows), lambda rows: run(kernel, rows)
        )
    else:
        # of several calls, the first would have written its rows when another one fails
        at_once = kernel.runs_by_hand(flat) and flat.shape[0] % group == 0
        if at_once and (own := writable_parts(out, x, flat, recipe)) is not None:
            found, _ = kernel(cut_into_tiles(flat, block, group), *args, out=own)
            if are_written(found, own):
                return dict(own)
        else:
            found = _over_flat(kernel, flat, recipe, args, group)
    if x.ndim == 2:
        return found
    return {
        name: part.reshape(*x.shape[:-1], part.shape[-1]) if part.ndim == 2 else part for name, part in found.items()
    }


def _over_flat(
    kernel: Kernel, flat: Tensor, recipe: Recipe, args: Sequence[Tensor | None], group: int
) -> dict[str, Tensor]:
    """Return the parts of [rows, K]."""
    block = block_multiple(recipe)
    if not flat.shape[0] % group and kernel.compiles(flat) and kernel.has_by_hand(flat):
        names = [spec.name for spec in specs_of(recipe)]

        def call() -> list[Tensor]:
            parts, _ = kernel.run(cut_into_tiles(flat, block, group), *args)
            return [parts[name] for name in names]

        given = [flat, *(arg for arg in args if arg is not None)]
        return dict(zip(names, replayed(kernel, given, call), strict=True))
    found: dict[str, Tensor] = {}
    pieces = list(pieces_of(flat, group, kernel))
    # one call by hand would have found it, and other code has taken its place since: a piece knows its own amax alone
    if len(pieces) > 1 and tensor_wide(recipe) is not None and args and args[0] is None:
        return _over_flat(_encode_kernel(recipe.stored, flat.dtype), flat, recipe, [shared_amax(flat, recipe)], group)
    for piece in pieces:
        parts, _ = kernel(cut_into_tiles(flat[piece], block, group), *(own_rows(arg, piece) for arg in args))
        for name, part in parts.items():
            # tensor-wide, or all rows at once
            if part.ndim < 2 or part.shape[0] == flat.shape[0]:
                found[name] = part
                continue
            if name not in found:
                found[name] = part.new_empty((flat.shape[0], part.shape[1]))
            found[name][piece].copy_(part)
    return found


def _decode_ragged(parts: dict[str, Tensor], recipe: Recipe, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decode parts [rows, ..] of rows that end in a smaller block."""
    wide, columns = tensor_wide(recipe), shape[-1]
    kernel = functools.partial(_decode_kernel, recipe.stored, dtype, per_row=wide is not None and parts[wide].ndim > 0)
    first, last = ragged.split_ragged(parts, columns, block_multiple(recipe), tuple(_decoded_specs(recipe)))
    values = torch.empty(shape, dtype=dtype, device=parts["payload"].device)
    flat, behind = values.view(-1, columns), columns - columns % block_multiple(recipe)

    def decode_piece(run: Kernel, payload: Tensor, *others: Tensor) -> Tensor:
        tiles = cut_into_tiles(payload, packed_block(recipe))
        return run(tiles, *(rows_of(part) if part.ndim else part for part in others))  # type: ignore[no-any-return]

    if behind:
        flat[:, :behind].copy_(decode_piece(kernel(strided=True), *first.values()))
    flat[:, behind:].copy_(decode_piece(kernel(), *last.values())[:, : columns - behind])
    return values
