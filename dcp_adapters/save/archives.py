"""What torch.save writes of a plain tensor, without running torch.save for each.

With CRC32 off, the archives of two tensors of one dtype, shape and strides differ in the tensors' bytes alone:

    [ head: zip headers, data.pkl, padding ][ the storage's bytes ][ tail: the rest of the zip file ]

So torch.save runs for the first few of a kind, and head and tail are kept: a `Frame`. A state dict repeats its shapes
in every layer, and torch.save takes ten times as long as writing a small tensor.

Nothing is written that is not proven. A frame is made from two archives of torch.save: of a tensor, and of one that
differs from it in every byte. They must differ in the storage's bytes and nowhere else. A frame holds for the settings
that it was made under (alignment, torch's version); what torch.save writes of a tiny tensor stands for them. Whatever
is no plain contiguous tensor with a storage of its own goes to torch.save, and so do kinds seen once and large tensors.
"""

import io
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_adapters.plain.plain_memory import is_plain, memory_of

LARGEST = 4 << 20  # bytes: torch.save is a small part of the time that writing more takes, and frames are not free
WIDEST = 32 << 10  # bytes of a frame; 2 kB by default, more where storages are aligned to large pages
MOST = 1024  # kinds that are known at once


@dataclass(frozen=True)
class Kind:
    """What an archive depends on beside a tensor's bytes."""

    settings: bytes
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """What torch.save writes around the bytes of every tensor of one kind."""

    head: bytes
    tail: bytes


_known: dict[Kind, Frame | None] = {}  # None: torch.save has to write it
_met: set[Kind] = set()  # once, and not yet worth a frame
_lock = threading.Lock()


class Frames:
    """Frames for one thread's tensors, under the settings that hold in that thread."""

    def __init__(self) -> None:
        self._settings: bytes | None = None

    def of(self, tensor: Tensor) -> Frame | None:
        """Return the frame of a tensor; None if torch.save has to write it.

        The thread's settings are looked at when it asks first, and again before a frame is kept.
        """
        # a CRC32 stands behind the bytes, so the tail would depend on them
        if not is_framed(tensor) or torch.serialization.get_crc32_options():
            return None
        if self._settings is None:
            self._settings = _settings()
        kind = Kind(self._settings, tensor.dtype, tensor.shape, tensor.stride())
        with _lock:
            if kind in _known:
                return _known[kind]
            # a frame costs two calls of torch.save, which a kind that comes once does not give back
            if kind not in _met:
                if len(_met) >= MOST:
                    _met.clear()
                    _known.clear()
                _met.add(kind)
                return None
            frame = frame_of(tensor)
            # another thread may have changed them since this one asked first
            if _settings() != self._settings:
                return None
            _known[kind] = frame
            return frame


def is_framed(tensor: Tensor) -> bool:
    """Return whether kind and bytes of a tensor determine its archive, and it is worth a frame."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and is_plain(tensor)
        and 0 < tensor.nbytes <= LARGEST
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__  # which is pickled, too
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def frame_of(tensor: Tensor) -> Frame | None:
    """Return the frame of a tensor for which `is_framed` holds; None if torch.save writes anything but the expected."""
    mine = memory_of(tensor).raw
    # every bit is turned around, so that a byte of the storage that is stored elsewhere, too, shows as a difference
    other = torch.frombuffer(bytearray(mine), dtype=torch.uint8).bitwise_not_()
    twin = torch.empty(0, dtype=tensor.dtype, device="cpu")
    twin.set_(other.untyped_storage(), 0, tensor.shape, tensor.stride())
    one, two = _archive(tensor), _archive(twin)
    # the storages differ in every byte, so they begin where the archives first differ
    begin = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
    end = begin + len(mine)
    found = Frame(one[:begin], one[end:])
    alike = len(one) == len(two) and two[end:] == found.tail
    if not alike or one[begin:end] != mine or two[begin:end] != memory_of(twin).raw:
        return None
    return found if len(found.head) + len(found.tail) <= WIDEST else None


def _settings() -> bytes:
    return _archive(torch.zeros(1, dtype=torch.uint8, device="cpu"))


def _archive(tensor: Tensor) -> bytes:
    data = io.BytesIO()
    torch.save(tensor, data)
    return data.getvalue()
