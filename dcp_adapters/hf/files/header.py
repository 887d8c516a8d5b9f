"""The header of a safetensors file, in place: 8 bytes of its size, then JSON filled up with spaces."""

import json
from typing import IO, Any

METADATA = "__metadata__"


def read_header(stream: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """Return its size and its content; tensors begin at 8 + size."""
    stream.seek(0)
    size = int.from_bytes(stream.read(8), "little")
    return size, json.loads(stream.read(size))


def write_header(stream: IO[bytes], size: int, header: dict[str, Any]) -> None:
    """Replace it by a header that needs no more room. Raises ValueError if that is longer."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > size:
        raise ValueError(f"{stream.name}: a header of {len(text)} bytes in place of one of {size}")
    stream.seek(8)
    # The format allows spaces behind the JSON; a shorter header would move all tensors.
    stream.write(text.ljust(size))
