"""Entries of bytes (counters, scheduler states) as the values they were, made by torch's safe unpickler alone."""

import io
import pickle
from typing import Any

import torch


def unpickled(name: str, value: io.BytesIO) -> Any:
    """Return the value of an entry of bytes. Raises ValueError, with its name, if it is damaged or not allowed."""
    try:
        return torch.load(value, weights_only=True)
    except Exception as error:
        # of torch's long text only the line that names the class helps; other errors mean damage
        lines = [line.strip() for line in str(error).splitlines()] if isinstance(error, pickle.UnpicklingError) else []
        reason = next((line for line in lines if "GLOBAL" in line or "class" in line), None)
        if reason is None:
            raise ValueError(
                f"{name}: this entry of the checkpoint is damaged, it can not be unpickled: {type(error).__name__}: "
                f"{error}. Some tensors of the target may be loaded already: load another checkpoint"
            ) from error
        raise ValueError(
            f"{name}: this entry of the checkpoint holds pickled objects that torch.load(weights_only=True) does not "
            f"allow ({reason}). If you trust the checkpoint, load it inside torch.serialization.safe_globals([...]) "
            "with the classes it needs"
        ) from error
