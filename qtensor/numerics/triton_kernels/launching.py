"""Launches: one program for each tile of blocks, on the device and the stream of the tensors.

Triton's way to a kernel binds arguments, makes a text of them and looks the code up: most of a launch's time on the
host. What it decides by is little, and known here (`specialized`): for arguments that are alike in it, the code that
the first launch returned is launched again, as Triton documents for compiled kernels: `code[grid](*args, *constants)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from fsdp_hooks.kernels.replays import Launch, hear

Parts = Mapping[str, Tensor] | None  # where a kernel writes; None: into new ones
ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
WARPS = 4  # of a program, unless a tile needs more
# Elements of a thread; more have fewer instructions each, until registers run out. Packed codes have many, fp8 few:
# there more threads load while others compute.
ENCODED, PACKED, DECODED = 32, 64, 16
MOST_BLOCKS = 2**31 - 2**16  # which a number of 32 bits counts, with those of the last program
MOST_IN_A_TILE = 2**31  # lanes from the first to the last one of a tile, which such a number counts


def encode_blocks(
    kernel: Any,
    x: Tensor,
    *given: Any,
    payload: torch.dtype,
    scale: torch.dtype,
    tile: int,
    square: int = 1,
    out: Parts = None,
    **constants: Any,
) -> dict[str, Tensor]:
    """Launch kernel(values, payload, scale, *given, columns, blocks, TILE=tile, **constants); return the parts.

    A kernel makes a byte of each lane, which is a value or, if codes are packed, a word of two values, and a scale of
    each block. It stores numbers of less than 32 bits as integers, since older GPUs have no others.

    Args:
        kernel: of the format.
        x: values [.., columns, block].
        given: what else the kernel takes.
        payload: its dtype; uint8 packs two codes into a byte.
        scale: its dtype.
        tile: the blocks of a program.
        square: of how many rows blocks are.
        out: parts that are there already, which the kernel writes.
        constants: of the kernel, and options of Triton's.

    Returns:
        payload: [rows, columns * lanes of a block].
        scale: [rows, columns].
    """
    lanes = x
    if payload == torch.uint8:
        lanes = x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)
        constants["ELEMENT"] = ELEMENTS[x.dtype]
    columns, each = lanes.shape[-2:]
    rows = lanes.numel() // (columns * each)
    parts = {
        "payload": made(out, "payload", (rows, columns * each), payload, x.device),
        "scale": made(out, "scale", (rows, columns), scale, x.device),
    }
    programs = tiles(rows, columns, square, tile, each)
    args = (lanes, *parts.values(), *given, columns, rows * columns)
    launch(kernel, programs, *args, parts=(1, 2), TILE=tile, **constants)
    return parts


def decode_blocks(
    kernel: Any, payload: Tensor, scale: Tensor, *given: Any, dtype: torch.dtype, block: int, **constants: Any
) -> Tensor:
    """Launch kernel(payload, scale, values, *given, columns, blocks, ..) on row blocks; return new values [rows, K].

    Square blocks are stored as row blocks are.

    Args:
        kernel: makes values of all parts.
        payload: [rows, columns, bytes of a block].
        scale: [rows, columns].
        given: what else it takes.
        dtype: of the values.
        block: the elements of a block.
        constants: of the kernel.
    """
    rows, columns = scale.shape
    values, tile = torch.empty(rows, columns * block, dtype=dtype, device=payload.device), tile_of(DECODED, block)
    args, programs = (payload, scale, values, *given, columns, rows * columns), tiles(rows, columns, 1, tile, 1)
    launch(kernel, programs, *args, parts=(0, 1), ELEMENT=ELEMENTS[dtype], TILE=tile, **constants)
    return values


def made(out: Parts, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the memory that a kernel writes a part to: the part that is there, in this shape, or a new one."""
    return torch.empty(shape, dtype=dtype, device=device) if out is None else out[name].view(shape)


def as_stored(part: Tensor) -> Tensor:
    """Return a part as kernels load and store it: numbers of less than 32 bits as integers."""
    return part if part.itemsize > 2 else part.view(torch.uint8 if part.itemsize == 1 else torch.int16)


# By what launches have in common: the kernel (it stays, as its address is in the key), its code on a device, and the
# constants in their order.
_loaded: dict[tuple[Any, ...], tuple[Any, CompiledKernel, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, programs: int, *args: Any, num_warps: int = WARPS, parts: tuple[int, ...] = (), **constants: Any
) -> None:
    """Run so many programs of a kernel on the device of its first argument, a tensor.

    Args:
        kernel: of Triton, its constants behind its other arguments.
        programs: how many.
        args: tensors and whole numbers.
        num_warps: of a program.
        parts: the places of those among args that the kernel takes `as_stored`.
        constants: all of the kernel's, and options of Triton's.
    """
    device = args[0].device
    # Triton launches on the current device, whatever the device of its arguments
    if device.index == torch.cuda.current_device():
        _launch(kernel, programs, args, (device.index, num_warps, parts), constants)
        return
    with torch.cuda.device(device):
        _launch(kernel, programs, args, (device.index, num_warps, parts), constants)


def _launch(
    kernel: Any, programs: int, args: tuple[Any, ...], how: tuple[Any, int, tuple[int, ...]], constants: dict[str, Any]
) -> None:
    """Launch on the current device; `how`: that, how many warps a program has, and which arguments are parts."""
    key = (id(kernel), how, *constants.items(), *specialized(args))
    grid, found = (programs, 1, 1), _loaded.get(key)
    if found is not None:
        _, code, constants_behind = found
        code[grid](*args, *constants_behind)
        hear(Launch(code, grid, args, constants_behind))
        return
    _, num_warps, parts = how
    stored = [as_stored(arg) if place in parts else arg for place, arg in enumerate(args)]
    # contracted products and sums would round once where the definition rounds twice
    code = kernel[grid](*stored, **constants, num_warps=num_warps, enable_fp_fusion=False)
    # Triton's interpreter compiles nothing
    rest = _constants_behind(kernel, len(args), constants) if isinstance(code, CompiledKernel) else None
    if rest is None:
        hear(None)
        return
    _loaded[key] = kernel, code, rest
    hear(Launch(code, grid, args, rest))


def _constants_behind(kernel: Any, args: int, constants: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the constants behind so many arguments; None if others are among these, or some are not given."""
    names = kernel.arg_names[args:]
    behind = [param.num for param in kernel.params if param.is_constexpr] == [*range(args, len(kernel.arg_names))]
    return tuple(constants[name] for name in names) if behind and constants.keys() >= {*names} else None


def specialized(args: tuple[Any, ...]) -> list[object]:
    """Return what Triton compiles apart for arguments: no two that it tells apart are alike in this.

    Those are the dtype of a tensor, and whether its address is a multiple of 16; whether a whole number is 1, is a
    multiple of 16, and fits into 32 or 64 bits. Arguments of any other type are alike only if they are equal.
    """
    return [
        (arg.dtype, arg.data_ptr() % 16 == 0)
        if type(arg) is Tensor
        else (arg == 1, arg % 16 == 0, (arg if arg >= 0 else ~arg).bit_length() // 32)
        if type(arg) is int
        else (type(arg), arg)
        for arg in args
    ]


def tiles(rows: int, columns: int, square: int, tile: int, lanes: int) -> int:
    """Return how many programs have `tile` blocks each, of rows of `columns` blocks; `square`: see `blocks_at`.

    Raises:
        OverflowError: more blocks than the kernels count, at all or, of so many `lanes` each, in `square` rows.
    """
    if rows * columns > MOST_BLOCKS:
        raise OverflowError(f"{rows * columns} blocks, of which kernels written by hand count at most {MOST_BLOCKS}")
    most = MOST_IN_A_TILE // lanes
    if square > 1 and square * columns > most:
        raise OverflowError(
            f"square blocks of {square} rows of {columns} blocks each, together more than the {most} that kernels "
            "written by hand count in a tile"
        )
    if square == 1:
        return -(-rows * columns // tile)
    return -(-rows // square) * -(-columns // (tile // square))


def tile_of(elements: int, block: int) -> int:
    """Return how many blocks of so many elements a program takes whose threads take `elements` each."""
    return elements * WARPS * 32 // block
