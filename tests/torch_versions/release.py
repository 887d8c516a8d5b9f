"""Which torch is installed, for what differs by version."""

import torch


def release_of(version: str) -> tuple[int, ...]:
    """Its first two numbers, to be compared."""
    return tuple(int(number) for number in version.split(".")[:2])


RELEASE = release_of(torch.__version__)
