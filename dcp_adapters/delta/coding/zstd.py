"""Compress with zstd: `compression.zstd` of Python 3.14, or its backport, which the extra `delta` installs.

Without either of them everything can still be imported, and the first delta that is made or read says what to install.
"""

import importlib
from types import ModuleType

from dcp_adapters.delta.coding.damage import damaged

LARGEST_WINDOW = 24  # log2 of bytes; frames are smaller, and a hostile one may not ask for more
MISSING = (
    'deltas are compressed with zstd, which Python has from 3.14 on; install "qtensor-fsdp[delta]", or backports.zstd, '
    "before that"
)


def require_zstd() -> None:
    """Raise ImportError if there is no zstd."""
    _library()


def compress(data: bytes, level: int) -> bytes:
    """Make one zstd frame. Raises ImportError if there is no zstd."""
    return bytes(_library().compress(data, level))


def decompress(data: bytes, most: int, what: str) -> bytes:
    """Return the contents of one zstd frame.

    Raises:
        ValueError: it is damaged, cut off, followed by something, or holds more than `most` bytes.
        ImportError: there is no zstd.
    """
    library = _library()
    reader = library.ZstdDecompressor(options={library.DecompressionParameter.window_log_max: LARGEST_WINDOW})
    try:
        # One byte more than there may be tells a frame that holds more; nothing beyond it is unpacked.
        held = bytes(reader.decompress(data, max_length=most + 1))
        # The end of the frame may still be unread.
        if len(held) <= most and not reader.eof:
            held += bytes(reader.decompress(b"", max_length=1))
    except (library.ZstdError, EOFError) as error:
        raise damaged(what, str(error)) from error
    if len(held) > most:
        raise damaged(what, f"it holds more than the {most} bytes that it should")
    if not reader.eof or reader.unused_data:
        raise damaged(what, "bytes follow its end" if reader.eof else "it is cut off")
    return held


def _library() -> ModuleType:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError(MISSING)
