"""Tell which tensors have bytes of their own to look at, and give those bytes.

A wrapper subclass, of this library or of another one, answers `data_ptr()` with 0, whatever it says of its storage; so
do tensors whose storage was freed. The memory of quantized (torch.quantize_per_tensor) tensors holds codes, that of
conjugate or negative views holds other values than the view, and sparse and meta tensors have none. Code that reads or
writes memory by its address asks here first.
"""

import ctypes
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

FREED = "its storage was freed, as FSDP does with gathered weights; take the state dict of the sharded model anew"


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is nothing but elements in a storage, on whatever device.

    Parameters count, and so do subclasses that define no `__torch_dispatch__`.
    """
    # Parameter is a subclass, too, and its memory is its values; only a class with its own dispatch hides them.
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def plain_among(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain ones."""
    return {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}


def why_no_bytes(tensor: Tensor) -> str | None:
    """Say why a tensor has no bytes to save, and what to do; None if it has some, or its class has."""
    if tensor.is_meta:
        return "on the meta device, without data; materialise it (to_empty) and initialise or load"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor, which has no storage; save its to_dense(), or its indices and values"
    # FSDP frees gathered weights by resizing their storage to 0: shape and dtype stay, and reads would crash.
    if is_plain(tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
        return FREED
    return None


def refuse_without_bytes(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for the first of these named tensors that has no bytes, on which a writer would fail later."""
    for name, tensor in tensors:
        if (why := why_no_bytes(tensor)) is not None:
            raise ValueError(f"{name}: {why}")


def elements_of(tensor: Tensor) -> "tuple[Tensor, ctypes.Array[ctypes.c_char]] | None":
    """The bytes of a plain CPU tensor's elements in logical order, and the tensor whose memory they are.

    None for a tensor that is not plain. Keep the tensor alive. Raises ValueError as `memory_of`.
    """
    if not is_plain(tensor):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain, memory_of(plain)


def memory_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """View the bytes of a contiguous CPU tensor, without a copy and without numpy; keep the tensor alive.

    Raises:
        ValueError: it has no bytes of its own, or its bytes are not its values.
    """
    count = tensor.numel() * tensor.itemsize
    if not is_plain(tensor) or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a {type(tensor).__name__} {tuple(tensor.shape)} on {tensor.device} has no contiguous bytes in memory; "
            "expected a plain CPU tensor"
        )
    address = tensor.data_ptr()
    if count and not address:
        raise ValueError(f"a tensor {tuple(tensor.shape)} without memory: {FREED}")
    return (ctypes.c_char * count).from_address(address) if count else (ctypes.c_char * 0)()
