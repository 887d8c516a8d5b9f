"""What torch.optim.Muon computes, split where the matrix has to be whole.

    advance           of a piece     momentum <- lerp(momentum, gradient, 1 - mu)
                                     update    = lerp(gradient, momentum, mu) (Nesterov), or the momentum; to bf16
    orthogonalized    of all of it   update   -> orthogonal matrix, bf16; by torch's Muon itself
    move              of a piece     master   <- master * (1 - lr * weight decay) - lr * adjustment([N, K]) * orthogonal

The lines of pieces are written after the algorithm in torch's documentation of Muon. Nobody promises that a later torch
keeps their roundings, or that it takes its update to bf16 first, so `check_arithmetic` compares both on small matrices,
once for each choice of options.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTUM = "momentum_buffer"
MOVED = {"lr": 0.5, "weight_decay": 0.1, "momentum": 0.9}
OF_PIECES = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": "original"}


def advance(momentum: Tensor, grad: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Move the momentum in place, fp32; returns the update before it is orthogonalized, bf16 and new."""
    mu = options["momentum"]
    momentum.lerp_(grad, 1 - mu)
    update = grad.lerp(momentum, mu) if options["nesterov"] else momentum
    return update.to(torch.bfloat16)


def orthogonalized(update: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the orthogonal matrix of a whole update, bf16 [N, K]; the update's memory may be written.

    A step of torch's Muon that adds nothing to it: from zeros, with lr=1, no decay, and the momentum as it is.
    """
    # torch computes on the transpose of a tall matrix; given it as such, it leaves lr as it is
    tall = update.shape[0] > update.shape[1]
    grad = update.T if tall else update
    target = torch.full_like(grad, -0.0)  # -0.0 - x is -x for zeros of either sign, too
    target.grad = grad
    optimizer = torch.optim.Muon([target], **(_own(options) | OF_PIECES))
    optimizer.state[target][MOMENTUM] = grad
    optimizer.step()
    target.grad = None
    found = target.neg_()
    return found.T if tall else found


def move(master: Tensor, orthogonal: Tensor, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
    """Move a piece of a master, fp32, by the same piece of the orthogonal matrix, bf16; `shape`: of the whole."""
    lr = options["lr"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    master.mul_(1 - lr * options["weight_decay"])
    master.add_(orthogonal, alpha=-(lr * _adjustment(shape, options["adjust_lr_fn"])))


@functools.cache
def _names() -> frozenset[str]:
    """Return the names of the options of this torch's Muon."""
    return frozenset(torch.optim.Muon([torch.zeros(1, 1, dtype=torch.float32, device="cpu")]).defaults)


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that torch's Muon knows, without what schedulers and others keep there."""
    return {name: options[name] for name in sorted(_names()) if name in options}


def _adjustment(shape: tuple[int, ...], how: str | None) -> float:
    rows, columns = shape
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if how == "spectral_unclamped":  # from torch 2.14 on
        return math.sqrt(rows / columns)
    return math.sqrt(max(1, rows / columns))


def check_arithmetic(options: Mapping[str, Any]) -> None:
    """Raise unless steps that are split make the bytes of torch's own, with the options of a group.

    Raises:
        NotImplementedError: they do not; another torch computes otherwise.
    """
    own = _own(options)
    # kept by all but numbers that schedulers move, which no choice hangs on
    key = [(name, tuple(one) if isinstance(one, list) else one) for name, one in own.items() if name not in MOVED]
    if not _same_bytes(tuple(key)):
        raise NotImplementedError(
            f"MasterWeightOptimizer(Muon): torch {torch.__version__} computes a step with {own} otherwise than "
            "it is split here between shards, so sharded weights would get other bytes than one process gives them; "
            "use a version of torch that docs/compatibility.md lists, or another optimizer"
        )


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _same_bytes(options: tuple[tuple[str, Any], ...]) -> bool:
    """Compare two steps on small matrices, wide and tall."""
    known = dict(options) | MOVED
    for shape in ((5, 9), (9, 5)):
        numbers = torch.arange(1, 46, dtype=torch.float32, device="cpu").view(shape)
        master, momentum = numbers.sin(), torch.zeros(shape, dtype=torch.float32, device="cpu")
        param = master.clone()
        theirs = torch.optim.Muon([param], **known)
        for step in range(2):
            grad = (numbers * (step + 2)).cos()
            param.grad = grad.clone()
            theirs.step()
            move(master, orthogonalized(advance(momentum, grad, known), known), shape, known)
        for own, other in ((master, param), (momentum, theirs.state[param][MOMENTUM])):
            if not torch.equal(own.view(torch.int32), other.view(torch.int32)):
                return False
    return True
