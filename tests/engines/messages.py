"""What the tests and the engine's process tell each other, as bytes: tensors of every dtype, and what is around them.

Both sides are ours, so they may unpickle what they get. `Connection.send` would share the memory of tensors instead,
which needs more than a connection, and pickle alone does not know the younger dtypes.
"""

from __future__ import annotations

import io
from typing import Any

import torch


def to_bytes(message: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
