"""Muon on states that are expanded for it: the orthogonal matrices first, then each weight when its chunk comes.

    orthogonalize    sharded weights, chunk by chunk: momentum is expanded and advanced, and left as it is kept; of all
                     of them the updates go to the owners of the matrices, and come back orthogonal
    step             a weight of a chunk: momentum and master move

Momentum is advanced twice, since ranks have yet to agree on the step when they exchange updates. Between both each rank
holds the orthogonal pieces of all its shards, 2 bytes an element.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import local_of
from qtensor.optim.compressed.entries import expand
from qtensor.optim.matrices.arithmetic import MOMENTUM, advance, move, orthogonalized
from qtensor.optim.matrices.step import MatrixStep


class MuonOfChunks:
    """One step of all weights.

    Args:
        matrices: the sharded ones.
        inner: torch's Muon, of the masters.
        masters: parameter -> what its master is called there.
        groups: parameter -> the number of its group.
        grads: parameter -> the gradient of its shard.
    """

    def __init__(
        self,
        matrices: MatrixStep,
        inner: torch.optim.Optimizer,
        masters: Mapping[Tensor, Tensor],
        groups: Mapping[Tensor, int],
        grads: Mapping[Tensor, Tensor],
    ) -> None:
        self.matrices = matrices
        self._inner, self._masters, self._groups, self._grads = inner, masters, groups, grads
        self._orthogonal: dict[Tensor, Tensor] = {}  # of sharded weights, their pieces in bf16

    def advance(self, brought: Iterable[list[Tensor]]) -> None:
        """Find the updates of sharded weights, as they are brought to their devices; states stay as they are."""
        for chunk in brought:
            for param in chunk:
                state = expand(self._inner.state.get(self._masters[param]) or {}, param)
                # one that is kept in fp32 is not expanded
                momentum = _momentum_of(state, local_of(param)).clone()
                grad = self._grads[param].to(torch.float32)
                self._orthogonal[param] = advance(momentum, grad, self._options(param))

    def orthogonalize(self) -> None:
        """Exchange these updates for pieces of orthogonal matrices; a collective.

        Raises:
            Exception: whatever failed on this rank since ranks have agreed which matrices step.
        """
        self.matrices.orthogonalize(self._orthogonal)

    def step(self, param: Tensor, master: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Step the master of a shard, fp32, in place; returns its expanded state behind the step."""
        options, momentum = self._options(param), _momentum_of(state, master)
        update, found = advance(momentum, self._grads[param].to(torch.float32), options), self._orthogonal.get(param)
        move(master, orthogonalized(update, options) if found is None else found, param.shape, options)
        return {**state, MOMENTUM: momentum}

    def _options(self, param: Tensor) -> Mapping[str, Any]:
        return self._inner.param_groups[self._groups[param]]


def _momentum_of(state: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return the momentum in a state, or zeros of a shard's shape and device, as torch's Muon begins."""
    found = state.get(MOMENTUM)
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device) if found is None else found
