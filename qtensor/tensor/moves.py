"""A frozen weight stays frozen where fully_shard moves it to the mesh's device.

torch moves a parameter of a wrapper subclass by `nn.Parameter(param.to(device))`, a trainable one, and swaps that in
for the old (torch.utils.swap_tensors). A frozen base would be trained from then on, without a word. Three steps of the
move pass through the op tables, and the last one restores what the first one saw:

    param.to(device)         the copy gets a note that names the parameter it was made from            `take_note`
    nn.Parameter(copy)       the new parameter, an alias of the copy, gets the note                    `carry_note`
    fully_shard cuts it      by the swap the note is at the parameter that it names, which is frozen   `freeze_noted`

A note at any other tensor than the one that it names means nothing.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import without_torch_function


class Sign:
    """Lives as long as the parameter that holds it: swap_tensors takes no parameter with weak references of its own."""


@dataclass(frozen=True)
class MoveNote:
    """The parameter at address `of` was frozen before it was moved; `sign` tells whether it still lives.

    carried: by an alias of the copy, made while the parameter lived, so that the two have different addresses.
    """

    of: int
    sign: weakref.ref[Sign]
    carried: bool = False


def take_note(param: Any, copy: Any) -> Any:
    """Return `copy`, with a note of `param` if that is a frozen parameter being moved.

    Modules move parameters with gradients off; with gradients on, a copy is a step of somebody's computation.
    """
    moves = copy.device != param.device and not torch.is_grad_enabled()
    if moves and isinstance(param, torch.nn.Parameter) and not param.requires_grad:
        copy._note = MoveNote(id(param), weakref.ref(vars(param).setdefault("_sign", Sign())))
    return copy


def carry_note(tensor: Any, alias: Any) -> Any:
    """Return `alias`, with the note that `tensor` got as a copy. An alias of an alias carries none."""
    note = tensor._note
    if note is not None and not note.carried and note.sign() is not None:
        alias._note = MoveNote(note.of, note.sign, carried=True)
    return alias


def freeze_noted(param: Any) -> None:
    """Freeze a parameter that has a note of itself; once."""
    note, param._note = param._note, None
    if note is not None and note.carried and note.of == id(param):
        param.requires_grad_(False)


def requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's own signature
    """Do `Tensor.requires_grad_`. Freezing drops the note: what Module.to, say, froze by name may be trained later."""
    if not requires_grad:
        tensor._note = None
    with without_torch_function():
        return Tensor.requires_grad_(tensor, requires_grad)
