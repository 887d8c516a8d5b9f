"""Adapters of peft that are trained through their own merge: the switch around a model; see through_merge.py.

A layer of peft computes base(x) + scaling * b(a(x)). While the switch is on, hooks make of it what the merged layer
computes. They are torch's own hooks of modules, and hold no tensor of a forward:

    before base and a   the input is exchanged for one without tokens: their products cost next to nothing
    after the layer     its output, without tokens, is exchanged for x @ M.T + bias

So no class and no module changes, and a state dict has the names that it had. What is active, and by which factor, is
read anew in each forward, as peft does it. Under FSDP2 the hook runs where the layer does: the base is gathered as its
quantized bytes, the factors as they are.

Compiled code does not look whether hooks came since it was compiled, and would go on without a merge. So all hooks are
registered at once, all code is compiled anew behind that, and `start` and `stop` write a flag that is looked at.

Weights that share one scale (`share_scales`) are merged under the one that all of them ask for, so the forward of each
reads the factors of the others, which must be gathered with it; linears among them without an adapter are hooked, too.

`merge_` must see the factors that the forwards saw. A MixedPrecisionPolicy that gathers fp32 factors in bf16 rounds
them on the way, which the shards do not show: such a forward raises, unless the user has named that dtype.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from fsdp_hooks.scale_sync import parameters_at_rest
from qtensor.merging.followers import Follower, Member, any_active, join, shared_of
from qtensor.merging.low_rank import LowRankUpdate, UpdateSum
from qtensor.merging.mergeable import Hooked, active_of, adapted, hooks_of, is_left, owner_of, why_not, why_not_alone
from qtensor.merging.through_merge import How, Keep, Merge, through_merge, why_unfit
from qtensor.tensor.quantized_tensor import QuantizedTensor

TRACKER = ModuleTracker()  # never entered; asked whether a backward runs


class merge_aware:  # noqa: N801 - reads as a statement: with merge_aware(model): ...
    """Let the forwards of a model with adapters of peft compute with the weights that `merge_` would write.

    Inside the block, or between `start()` and `stop()`, each adapted linear computes with M = requantize(W + s b a),
    and gradients pass straight through the rounding. `merge_(model, aware.updates())` then writes M, bit for bit: what
    is exported is what was trained. `start` and `stop` cost nothing and change no name, so that the last steps of a
    training may be those through the merge; a save does not hold the switch. What was compiled before is compiled
    anew. Weights that share one scale (`share_scales`) compute under that of all of them. Ranks call all of this alike.
    With activation checkpointing, backward belongs into the block, too: it computes forwards again.

    Args:
        model: with LoRA of peft on linears, whose weights are quantized (all recipes) or dense. Several adapters may be
            active. `fully_shard` may come before or after.
        adapter_dtype: in which dtype the factors are merged: that in which a MixedPrecisionPolicy gathers them. None:
            their own.
        keep: what backward finds of a merged weight, see `linear_through_merge`.

    Raises:
        ValueError: there is no adapter of peft, or some cannot be merged in each forward: with dropout, a bias of their
            own, DoRA or another variant; on embeddings, convolutions or stacked experts; on a weight that is trained,
            tied or stored dense for quantized gathers, or one that shares its scale with such. All of them by name,
            with what to do.

    Example:
        ```python
        >>> from peft import LoraConfig, get_peft_model
        >>> base = nn.Sequential(nn.Linear(64, 32))
        >>> quantize_(base, MXFP8BlockScaling())
        >>> model = get_peft_model(base, LoraConfig(target_modules=["0"], init_lora_weights=False))
        >>> with merge_aware(model) as aware:  # train here
        ...     y = model(torch.ones(1, 64))
        >>> report = merge_(model, aware.updates())
        >>> torch.equal(model.unload()(torch.ones(1, 64)), y)
        True
        ```
    """

    def __init__(self, model: nn.Module, *, adapter_dtype: torch.dtype | None = None, keep: Keep = "nothing") -> None:
        if keep not in ("nothing", "merged"):
            raise ValueError(f'merge_aware: keep={keep!r} is not known; expected "nothing" or "merged"')
        self._model, self._switch = model, _Switch()
        self._before: list[bool] = []  # of the blocks that are open
        parameters_at_rest(model)  # what is gathered may have another dtype than its shards
        self._layers, problems = [], []
        names: dict[Tensor, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        for name, layer in adapted(model):
            why = list(why_not(layer)) or list(why_not_alone(names[layer.base_layer.weight]))
            if why:
                problems.append(f"{name}: {'; '.join(why)}")
            else:
                how = adapter_dtype, keep, self._switch
                seen = {own: layer.lora_A[own] for own in active_of(layer)}
                dtypes = _factor_dtypes(layer)
                self._layers.append(_Layer(name, layer, seen, dtypes, layer.base_layer.weight.dtype, *how))
        bases = {id(layer.layer.base_layer): layer for layer in self._layers}

        def follower(name: str, linear: nn.Linear) -> Follower:
            return Follower(name, linear, keep, self._switch)

        followers, why = ([], []) if problems else join(model, names, bases, follower)
        problems += why
        if problems:
            raise ValueError("merge_aware: " + ". ".join(problems) + ". Nothing was changed")
        if not self._layers:
            raise ValueError(
                "merge_aware: the model has no layers with adapters of peft; call it after get_peft_model(). In the "
                "forward of an adapter of your own call qtensor.linear_through_merge"
            )
        # the copies of hooks that a copy of a model has compute nothing from now on
        for owner in {id(own): own for layer in self._layers for own in layer.left()}.values():
            owner.switch.retire()
        hooked: list[Hooked] = [*self._layers, *followers]
        self._handles = [handle for each in hooked for handle in each.hook()]
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled
            torch.compiler.reset()

    def start(self) -> None:
        """Compute through the merge from now on."""
        if not self._handles or self._switch.retired:
            raise RuntimeError("merge_aware: its hooks were removed; call merge_aware(model) again")
        self._switch.on = True

    def stop(self) -> None:
        """Compute with base and adapters beside one another again."""
        self._switch.on = False

    def remove(self) -> None:
        """Call `stop`, and take the hooks off the model, for good."""
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> "merge_aware":
        """Call `start`."""
        before = self._switch.on
        self.start()
        self._before.append(before)
        return self

    def __exit__(self, *exception: object) -> None:
        """Go back to what was before the block."""
        self._switch.on = self._before.pop() and bool(self._handles)

    def updates(self) -> dict[str, Callable[[tuple[slice, ...]], Tensor]]:
        """Return the updates that the forwards compute with, as `merge_` takes them; a collective if they are sharded.

        Name of a base weight -> its update: that of the active adapter, or their sum. Weights whose adapters are
        switched off have none. The full factors are gathered, on every rank.

        Raises:
            RuntimeError: another adapter became active, or factors have changed their dtype.
        """
        parameters_at_rest(self._model)  # puts the shards back, which are other parameters
        active = [(layer, names) for layer in self._layers if (names := layer.active())]
        for layer, names in active:
            layer.check_known(names)
            layer.check_dtypes(names)
        return {f"{layer.name}.base_layer.weight".removeprefix("."): layer.update(names) for layer, names in active}


@dataclass
class _Switch:
    """Whether forwards go through the merge, and whether the last one did that was no recomputation."""

    on: bool = False
    last: bool = False
    retired: bool = False  # for good: another one has taken its place

    def retire(self) -> None:
        self.on, self.retired = False, True

    def look(self, name: str) -> None:
        """Raise RuntimeError if a backward computes a forward again, and not as it was."""
        if torch.compiler.is_compiling():
            return
        if not TRACKER.is_bw:
            self.last = self.on
        elif self.last != self.on:
            raise RuntimeError(
                f"merge_aware: {name} is computed again in a backward, and the switch was changed since its forward: "
                "gradients would be those of another model. With activation checkpointing call backward inside the "
                "block, or before stop()"
            )


@dataclass(eq=False)
class _Layer(Hooked):
    """A layer of peft, and what was known of it when it was looked at.

    known: adapter -> its module of lora_A.
    dtypes: adapter -> those of its factors a and b.
    base_dtype: that in which its base weight is stored, or appears if it is quantized.
    switch: of the model.
    inside: whether the layer is in a forward through the merge. `unload` leaves its base in the model, with our hook.
    trained: whether the last forward with gradients went through the merge.
    members: all whose weights share the scale of its base, itself among them; none if it has one of its own.
    """

    name: str
    layer: Any
    known: dict[str, nn.Module]
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]]
    base_dtype: torch.dtype
    adapter_dtype: torch.dtype | None
    keep: Keep
    switch: "_Switch"
    inside: bool = False
    trained: bool = False
    members: Sequence[Member] = ()

    def hook(self) -> Iterator[RemovableHandle]:
        """Register the hooks; first of all that of the layer, behind which FSDP2 may reshard it."""
        yield self.layer.register_forward_pre_hook(self.look_at, with_kwargs=True, prepend=True)
        yield self.layer.register_forward_hook(self.exchange, with_kwargs=True, prepend=True)
        yield self.layer.register_forward_hook(self.leave, always_call=True)
        for module in (self.layer.base_layer, *(self.layer.lora_A[name] for name in self.dtypes)):
            yield module.register_forward_pre_hook(self.leave_out_tokens)

    def active(self) -> list[str]:
        """Return the names of the adapters that the layer would add to its base; none if peft has merged them."""
        if self.layer.disable_adapters or self.layer.merged:
            return []
        return [name for name in self.layer.active_adapters if name in self.layer.lora_A]

    def look_at(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise before a forward that no merged weight can compute."""
        self.switch.look(self.name)
        names = self.active()
        through = self.switch.on and (bool(names) or any_active(self.members))
        if torch.is_grad_enabled():
            self.trained = through
        if not through:
            return
        self.check_known(names)
        if any(owner_of(hook) is None for hook in hooks_of(layer.base_layer)):
            raise RuntimeError(
                f"merge_aware: {self.name}.base_layer has got hooks on its forward since merge_aware(model) looked, "
                "which a merged product does not run; remove them, or call stop() before such a forward"
            )
        if given := [key for key, value in kwargs.items() if key != "x" and value is not None]:
            raise RuntimeError(
                f"merge_aware: {self.name} is called with {', '.join(given)}, by which rows get adapters of their own; "
                "a merged weight is the same for all. Call stop() before such a forward"
            )
        self.inside = True

    def check_known(self, names: Sequence[str]) -> None:
        """Raise RuntimeError if an adapter is none of those that were looked at, though it may have the name of one."""
        if others := [name for name in names if self.known.get(name) is not self.layer.lora_A[name]]:
            raise RuntimeError(
                f"merge_aware: {self.name}: the adapter {others[0]!r} was not active when merge_aware(model) looked, "
                "or was made since; call remove(), and merge_aware(model) again"
            )

    def check_dtypes(self, names: Sequence[str]) -> None:
        """Raise RuntimeError if factors are not in the dtypes that were seen."""
        for name in names:
            for factor, own in zip(self.factors(name), self.dtypes[name], strict=True):
                if factor.dtype not in (own, self.adapter_dtype):
                    raise RuntimeError(
                        f"merge_aware: {self.name}: the factors of the adapter {name!r} are {own}, and this forward "
                        f"sees {factor.dtype}: the merge would see other numbers. If a MixedPrecisionPolicy gathers "
                        f"them so, call merge_aware(model, adapter_dtype={factor.dtype})"
                    )

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a [r, K] and b [N, r] of an adapter, as they are at this moment."""
        return self.layer.lora_A[name].weight, self.layer.lora_B[name].weight

    def leave_out_tokens(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return an input [0, K] in the place of x [.., K]: what comes of it is not used."""
        if not self.inside:
            return None
        return args[0].new_empty((0, args[0].shape[-1])), *args[1:]

    def exchange(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Return the output of the merged layer; RuntimeError if it is not the layer that was looked at."""
        if not self.inside:
            return None
        # here, and not before: a layer that is sharded by itself has been gathered by now
        self.check_dtypes(self.active())
        base = layer.base_layer
        why = why_unfit(base.weight)
        # the parts of a quantized weight are the same whatever it appears as
        if why is None and not isinstance(base.weight, QuantizedTensor) and base.weight.dtype != self.base_dtype:
            why = (
                f"is dense and was {self.base_dtype}, and this forward sees {base.weight.dtype}, where merge_ would "
                "round to the former; store it in the dtype in which it is gathered"
            )
        if why is not None:
            raise RuntimeError(f"merge_aware: {self.name}.base_layer.weight {why}")
        x = args[0] if args else kwargs["x"]
        weight, factors, scalings = self.merging()
        shared = shared_of(self.name, self.members)
        return through_merge(x, weight, base.bias, factors, How(scalings, self.keep), shared)

    def merging(self) -> Merge:
        """Return the base weight and what would be merged into it, as they are at this moment."""
        names = self.active()
        self.check_known(names)
        factors = [factor for name in names for factor in self.factors(name)]
        if not any(isinstance(factor, DTensor) for factor in factors):  # else `shared_of` raises
            self.check_dtypes(names)
        scalings = tuple(float(self.layer.scaling[name]) for name in names)
        return Merge(self.layer.base_layer.weight, [self._rounded(factor) for factor in factors], scalings)

    def left(self) -> Iterator[Any]:
        """Yield those whose hooks the layer has from the model that it was copied with."""
        yield from (owner_of(hook) for hook in hooks_of(self.layer.base_layer) if is_left(hook))

    def leave(self, *_: object) -> None:
        """Say that the forward has ended, by an error, too."""
        self.inside = False

    def update(self, names: Sequence[str]) -> Callable[[tuple[slice, ...]], Tensor]:
        """Return the update of the base weight, from the full factors."""
        each = []
        for name in names:
            a, b = (self._rounded(_full(factor.detach())) for factor in self.factors(name))
            scaling = float(self.layer.scaling[name])
            each.append(LowRankUpdate(a=a, b=b, scaling=scaling, through_merge=self.trained))
        return each[0] if len(each) == 1 else UpdateSum(tuple(each))

    def _rounded(self, factor: Tensor) -> Tensor:
        return factor if self.adapter_dtype in (None, factor.dtype) else factor.to(self.adapter_dtype)


def _full(factor: Tensor) -> Tensor:
    return factor.full_tensor() if isinstance(factor, DTensor) else factor


def _factor_dtypes(layer: Any) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    return {name: (layer.lora_A[name].weight.dtype, layer.lora_B[name].weight.dtype) for name in active_of(layer)}
