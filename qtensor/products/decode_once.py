"""One decode of a weight for forward and backward, if memory allows it.

A linear layer decodes its weight for y = x @ w.T, lets the dense values go, and decodes it again for dx = dy @ w. With
few tokens in a batch the second decode is a large part of the layer's time. Inside `decode_once` the dense values stay
from the one to the other.
"""

from typing import ClassVar


class decode_once:  # noqa: N801 - reads as a statement: with decode_once(): ...
    """Keep what F.linear decodes in forward for the gradient of its input in backward; the bytes are the same.

    Dense weights of all layers between their forward and their backward are alive at once: for a model as it is, all of
    its linear weights, in their appearance dtype, on every rank. Under activation checkpointing these are the weights
    of one checkpointed layer; call backward inside as well then: torch compares what both forwards save, and raises.

    A weight is decoded again if its dense values do not fit: if the gradient has another dtype (under autocast),
    with `activations="dynamic"`, in compiled code, in products other than F.linear, and in second derivatives.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling()):
        ...     model = nn.Linear(64, 64)
        >>> with decode_once():  # until the end of the block (the last that is open), on all threads
        ...     model(torch.randn(8, 64)).sum().backward()
        ```
    """

    on: ClassVar[list[None]] = []  # an entry for each open block; blocks of several threads end in any order

    def __enter__(self) -> None:
        """Count from here on."""
        decode_once.on.append(None)

    def __exit__(self, *exception: object) -> None:
        """Go back to what was before, once no other block is open."""
        decode_once.on.pop()
