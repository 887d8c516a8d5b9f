"""Agreement among weights that share one tensor-wide scale, as linears do that an inference engine runs as one.

    claims of q, k and v, each over all shards   ->   the maximum of the three   ->   adopted by each of them

Once claims are reduced over all shards, every rank knows what they say about the whole weight. So partners agree by a
maximum of numbers that are there already: it costs no collective, and partners may be cut in different ways.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partners:
    """Whose scale a weight shares.

    own: the weight's name in the model. names: of all that share the scale, this one among them; the same for each.
    """

    own: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return a text for the labels by which ranks compare what they hold."""
        return f"one scale for {', '.join(self.names)}"

    def within(self, key: str) -> Hashable:
        """Return a key of these partners in a state dict that holds this weight under `key`.

        Copies of a model, under other prefixes, get other keys; of a part of the model names are shorter than `own`.
        """
        return self.names, key.removesuffix(self.own) if key.endswith(self.own) else None


def check_complete(what: str, given: Iterable[Partners | None], among: str = "the parameters") -> None:
    """Raise if one weight is there and another, whose scale it shares, is not.

    Args:
        what: the operation, for errors.
        given: of each weight; None for one that shares its scale with no other.
        among: what they were looked for in, for errors.

    Raises:
        ValueError: a partner is missing, or there twice.
    """
    seen: dict[tuple[str, ...], list[str]] = {}
    for one in given:
        if one is not None:
            seen.setdefault(one.names, []).append(one.own)
    for names, own in seen.items():
        missing = [name for name in names if name not in own]
        if missing:
            raise ValueError(
                f"{what}: {', '.join(missing)}: not among {among}, and shares one scale with {own[0]}; give all that "
                "share one, or leave their group out of qtensor.share_scales"
            )
        if len(own) > len(names):
            twice = next(name for name in names if own.count(name) > 1)
            raise ValueError(
                f"{what}: {twice} is there {own.count(twice)} times, as in copies of a model, and weights know by "
                "name whose scale they share; give one model at a time, or call qtensor.share_scales on the module "
                "that holds all of them"
            )


def pool(partners: Sequence[Hashable | None], sizes: Sequence[int], claims: Sequence[Tensor]) -> list[Tensor]:
    """Return claims, with the maximum over those of partners in front.

    Args:
        partners: what is equal for partners; None for a weight without any.
        sizes: of each claim, how many values in front stand for the tensor-wide scale; equal for partners.
        claims: fp32, 1-D, on any devices, reduced over all shards already.
    """
    found = list(claims)
    together: dict[Hashable, list[int]] = {}
    for number, key in enumerate(partners):
        if key is not None:
            together.setdefault(key, []).append(number)
    # the values in front stand for the shared scale; cut blocks behind them are each weight's own
    for numbers in together.values():
        size, device = sizes[numbers[0]], claims[numbers[0]].device
        largest = torch.stack([claims[number][:size].to(device) for number in numbers]).amax(dim=0)
        for number in numbers:
            found[number] = torch.cat([largest.to(claims[number].device), claims[number][size:]])
    return found
