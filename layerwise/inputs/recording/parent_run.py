"""One run of the parent for one batch, with stand-ins for all layers, that records how layers are called.

    layers before `first`    have run: they return their outputs again, if these are still kept, or placeholders
    layer `first`            is recorded from what the parent made of the real output of the layer before it
    layers after it          are recorded as long as the parent passes on, untouched, what stand-ins return
    layer `stop`             ends the run; after the last layer it goes on until another module is called, which shows
                             whether the parent calls its layers again

A parent that only hands each layer's output to the next is recorded in one run. If a parent changes hidden states
between two layers, the run ends; the next one begins there, once the real output is known. A parent that changes them
between all layers is run once for each layer.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from layerwise.inputs.recording import refusals
from layerwise.inputs.recording.batch_progress import BatchProgress
from layerwise.inputs.recording.filled_containers import fill, holds_placeholder
from layerwise.inputs.recording.shared_objects import SharedObject
from layerwise.inputs.recording.taints import Taints
from layerwise.inputs.values.ambient import Ambient
from layerwise.inputs.values.caches import is_cache, is_empty
from layerwise.inputs.values.calls import (
    Call,
    EarlierOutput,
    Fixed,
    Shape,
    Statics,
    is_same_state,
    is_value,
    state_of_container,
)
from layerwise.inputs.values.contents import content_hash
from layerwise.inputs.values.stand_ins import EarlyStop, Escape, Placeholder, StandIn, TensorSpec, replace_forward
from layerwise.inputs.values.stores import StoredTensor, version
from layerwise.inputs.values.structure import argument_names, flatten, is_mutable, unflatten
from layerwise.weights.own_hooks import own_hooks_may_fail

PLACEHOLDER = {"origins", "uncounted"}  # attributes of Placeholder


class ParentRun:
    """One run; `number` and the layers' names are for messages.

    Call `execute`, then `commit`, or, for a run to the end of the model, `check_tail`.
    """

    def __init__(
        self, progress: BatchProgress, number: int, layers: list[tuple[str, nn.Module]], first: int, stop: int
    ) -> None:
        self.progress, self.number, self.first, self.stop = progress, number, first, stop
        self.fqns = [fqn for fqn, _ in layers]
        self.kinds = [type(layer) for _, layer in layers]
        self.next = 0  # the layer that is to be called next
        self.calls: list[Call] = []
        self.links: dict[int, tuple[Any, int, EarlierOutput]] = {}
        self.sights: dict[int, SharedObject] = {}
        # Placeholders that stand for what the parent computed in an earlier run.
        self.again: dict[int, tuple[Placeholder, int, StoredTensor]] = {}
        self.captured: list[SharedObject] = []
        self.assumed: dict[int, Shape] = {}
        self.zeros: dict[Any, Tensor] = {}
        self.escape: Escape | None = None
        self.result: Any = None
        self.behind = False  # the last layer was called, and the run should end soon
        self.over = False  # a stand-in has ended it, which the parent may not have let through
        self.guessed = False  # a stand-in returned what its layer, which has not run, may not return
        self.taints = Taints()
        self.rehearses = False  # it ends at the first module behind the layers
        self.instead: Callable[[], Any] | None = None  # what layer `first` does in place of being recorded
        self.inside: Any = None  # what that returned
        self.disorder: NotImplementedError | None = None

    def execute(self, model: nn.Module, statics: Statics) -> None:
        """Run the parent; its layers are replaced by stand-ins that call `answer`."""
        self.statics = statics
        for state in self.progress.batch.caches:
            state.restore()
        args, kwargs, used = self.progress.batch.call()
        for tensor, kept in used:
            statics.note(tensor, kept)
        original: Callable[..., Any] = model.forward

        # The run ends inside of the model's forward, and not outside: so FSDP's post-forward hooks run, which reshard.
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Escape as escape:
                self.escape = escape
            except EarlyStop:
                pass
            except Exception:
                # After a guess the next run begins where this one failed, and shows whether that was its fault. Behind
                # the layers it computes with placeholders that nobody will look at.
                if not (self.behind or self.over or self.guessed):
                    raise
            return None

        written = any(shape.written for shape in self.progress.shapes.values())
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(replace_forward(model, forward))
            if self.first < len(self.fqns) or self.rehearses:
                # A global hook runs before those of the module, so what ends here is not gathered by FSDP first.
                self.watch = register_module_forward_pre_hook(self._before_module)
                stack.callback(self.watch.remove)
            # The run stops at a layer, so the user's hooks get no output.
            if self.first < len(self.fqns):
                stack.enter_context(own_hooks_may_fail(model, "forward_hooks"))
            # A function mode slows every operation of the parent, so it is entered for such layers alone.
            if written:
                stack.enter_context(self.taints)
            self.result = model(*args, **kwargs)
        # Raised again, since a parent that catches exceptions may have caught it.
        if self.disorder is not None:
            raise self.disorder

    def _before_module(self, module: nn.Module, args: Any) -> None:
        # All layers were called, and no layer is called again before this module: that is all the run had to show.
        if self.behind and not isinstance(module, StandIn):
            raise EarlyStop
        if self.rehearses and not isinstance(module, StandIn) and not any(True for _ in module.children()):
            for leaf in flatten(args)[0]:
                if isinstance(leaf, Placeholder):
                    raise Escape(leaf.origins)
            if self.next == len(self.fqns):
                raise EarlyStop

    def refuse_attribute(self, index: int, name: str) -> None:
        """End the run, since the parent sets an attribute of a stand-in."""
        self.disorder = refusals.attribute_of_a_layer(name, self.fqns[index], self.number)
        raise EarlyStop

    def commit(self) -> None:
        """Add what was recorded to what is known of the batch.

        Raises:
            NotImplementedError: layer `first` was not recorded.
        """
        if not self.calls:
            raise self._refusal()
        # The parent later changed an object that it had called a layer with, so what was recorded does not fit it. This
        # run is dropped; from now on each run records one layer.
        if self.stop > self.first and any(not seen.is_unchanged() for seen in self.captured):
            self.progress.cautious = True
            return
        self.progress.add(self.first, self.calls)
        self.progress.sights += [seen for seen in self.captured if seen.content is not None]
        self.progress.assumed |= self.assumed

    def answer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a stand-in, and return what it is to return."""
        # The stand-in handles tainted tensors, and writes into them, without computing with their values.
        self.taints.paused = True
        try:
            return self._answer(index, args, kwargs)
        except EarlyStop:
            self.over = True
            raise
        finally:
            self.taints.paused = False

    def _answer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.over or self.disorder is not None:
            raise EarlyStop
        if index != self.next:
            met = "again" if index < self.next else f"before {self.fqns[self.next]}"
            self.disorder = refusals.out_of_order(self.fqns[index], met, self.number)
            raise self.disorder
        if index == self.first and self.instead is not None:
            # `instead` runs modules for real, and compiled ones warn of global hooks.
            self.watch.remove()
            self.inside = self.instead()
            raise EarlyStop
        # `kwargs` is a dict that nobody else has, and never a container that layers share.
        leaves, structure = flatten((args, kwargs), lambda value: value is not kwargs and self._is_live(value))
        names = argument_names(structure)
        if index < self.first:
            for name, leaf in zip(names, leaves, strict=True):
                self._remember(index, name, leaf)
        else:
            sources = [self._find_source(index, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
            devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
            self.calls.append(Call(structure, sources, names, Ambient.now(devices)))
        self.next = index + 1
        if index == self.stop and index + 1 < len(self.fqns):
            raise EarlyStop
        returned = self._probe_behind(index, leaves) if index == self.stop else self._hand_on(index)
        self._write_arguments(index, dict(zip(names, leaves, strict=True)))
        return returned

    # -- what a stand-in returns -------------------------------------------------------------------------------

    def _hand_on(self, index: int) -> Any:
        """Return a layer's output, or placeholders, and note how to recognise its leaves."""
        output = self.progress.outputs.get(index)
        shape = output.shape if output is not None else self.progress.shape_of(index, self.kinds)
        if shape is None:  # the first layer, before it ever ran
            raise EarlyStop
        leaves = output.values() if output is not None else shape.placeholders(index, self.zeros)
        # Held in `links`, so that no other object gets an id that stands for one of these.
        for number, leaf in enumerate(leaves):
            if not is_value(leaf):
                count = version(leaf) if isinstance(leaf, Tensor) else 0
                self.links.setdefault(id(leaf), (leaf, count, EarlierOutput(index, number)))
        self.assumed[index] = shape
        self.guessed |= index not in self.progress.shapes
        return unflatten(shape.structure, leaves)

    def _write_arguments(self, index: int, given: dict[str, Any]) -> None:
        """Do what the layer does to its arguments, as far as their new values are known."""
        shape, output = self.progress.shape_of(index, self.kinds), self.progress.outputs.get(index)
        for number, name in enumerate(() if shape is None else shape.written, start=len(shape.specs) if shape else 0):
            leaf = given.get(name)
            if not isinstance(leaf, Tensor):
                continue
            # Whoever reads it from now on reads what this layer wrote, wherever the placeholder came from.
            if isinstance(leaf, Placeholder):
                leaf.origins = frozenset({index})
            elif output is None:
                self.taints.add(leaf, index)
            else:
                leaf.detach().copy_(output.leaves[number].tensor())
                self.taints.remove(leaf)
            self.links[id(leaf)] = (leaf, version(leaf), EarlierOutput(index, number))
        for name in self.progress.touched:
            sight = None if isinstance(given.get(name), Tensor) else self._find_known(given.get(name))
            if sight is not None and sight.live is not sight.value and not is_cache(sight.live):
                fill(index, sight, self.progress.touched[name], real=index == self.first - 1, zeros=self.zeros)

    def _probe_behind(self, index: int, given: list[Any]) -> Any:
        """Return what lets the parent go on behind the last layer, to see whether it calls layers again."""
        self.behind = True
        if index in self.progress.outputs or self.progress.shape_of(index, self.kinds) is not None:
            returned = self._hand_on(index)
            del self.assumed[index]
            return returned
        spec = next((spec for spec in map(TensorSpec.of, given) if spec is not None), None)
        if spec is None:
            raise EarlyStop
        return spec.placeholder(index, self.zeros)  # the only layer, which never ran: returns the shape it is given

    # -- what a stand-in is called with ------------------------------------------------------------------------

    def _is_live(self, value: Any) -> bool:
        """Tell whether a container is passed on as the object it is: it can be filled, and holds no layer's output."""
        if not is_mutable(value):
            return False
        if id(value) in self.sights and self._find_known(value) is not None:
            return True
        return not any(isinstance(leaf, Placeholder) or id(leaf) in self.links for leaf in flatten(value)[0])

    def _find_source(self, index: int, name: str, leaf: Any) -> EarlierOutput | StoredTensor | Fixed:
        if isinstance(leaf, Tensor):
            self._check_attributes(index, name, leaf)
        if id(leaf) in self.links:
            _, count, link = self.links[id(leaf)]
            if not isinstance(leaf, Tensor) or (version(leaf) == count and self._is_untouched(leaf, link)):
                return link
        if id(leaf) in self.again:
            _, count, kept = self.again[id(leaf)]
            if version(leaf) == count:
                return kept
        tainted = self.taints.origins(leaf) if isinstance(leaf, Tensor) else frozenset[int]()
        held = not isinstance(leaf, Tensor) and self._find_known(leaf) is None and holds_placeholder(leaf)
        if isinstance(leaf, Placeholder) or held or tainted:
            if index == self.first:
                self.disorder = self._refusal(name, Escape(tainted) if tainted else leaf)
                raise self.disorder
            raise EarlyStop
        if isinstance(leaf, Tensor):
            return self.statics.keep(leaf)
        # An empty cache is passed as None: attention without a past is the same, and nothing has to be set back.
        if is_value(leaf) or (is_cache(leaf) and is_empty(leaf)):
            return Fixed(leaf if is_value(leaf) else None)
        sight = self._find_known(leaf)
        if sight is None:
            # A cache may grow from layer to layer: it is set back before each call, and never refused for its content.
            content = None if is_cache(leaf) else content_hash(leaf)
            sight = self.sights[id(leaf)] = SharedObject(leaf, leaf, state_of_container(leaf), (index, name), content)
            self.progress.live[index, name] = leaf
        self.captured.append(sight)
        return Fixed(sight.live, self.progress.batch.cache_state(sight.live) if is_cache(sight.live) else None)

    def _check_attributes(self, index: int, name: str, leaf: Tensor) -> None:
        """Refuse tensors with Python attributes, which copies do not have; those of parameters say how they came."""
        own = [one for one in getattr(leaf, "__dict__", ()) if not one.startswith("_") and one not in PLACEHOLDER]
        if own and not isinstance(leaf, nn.Parameter):
            self.disorder = refusals.attribute_of_a_tensor(name, self.fqns[index], own[0])
            raise self.disorder

    def _is_untouched(self, leaf: Tensor, link: EarlierOutput) -> bool:
        """Tell whether a stand-in's output still holds what it held: a write through `.data` raises no version."""
        output = self.progress.outputs.get(link.layer)
        return output is None or output.leaves[link.leaf].holds(leaf)

    def _remember(self, index: int, name: str, leaf: Any) -> None:
        """Note which object of an earlier run this one stands for, if any: the parent makes its objects anew."""
        # Inference tensors count no writes, so nobody could tell whether one still stands for it.
        known = isinstance(leaf, Placeholder) and not leaf.is_inference()
        if known and index == self.first - 1 and name in self.progress.met:
            self.again[id(leaf)] = (leaf, version(leaf), self.progress.met[name])
        if isinstance(leaf, Tensor) or is_value(leaf) or self._find_known(leaf) is not None:
            return
        live = self.progress.live.get((index, name))
        if live is not None:
            self.sights[id(leaf)] = SharedObject(leaf, live, state_of_container(leaf))

    def _find_known(self, value: Any) -> SharedObject | None:
        """Return what is known of an object in this run; None if the parent has changed it since, or it is new."""
        sight = self.sights.get(id(value))
        if sight is None or not is_same_state(state_of_container(value), sight.state):
            return None
        return sight if sight.filled is None or content_hash(value) == sight.filled else None

    def _refusal(self, name: str = "", leaf: Any = None) -> NotImplementedError:
        origins = getattr(self.escape or leaf, "origins", None)
        fqn = self.fqns[self.first]
        if origins is None and not name:
            return refusals.not_called(fqn, self.number)
        return refusals.not_kept(name, fqn, self._names_of(origins or frozenset()))

    def _names_of(self, origins: frozenset[int]) -> list[str]:
        return [self.fqns[origin] for origin in sorted(origins)]

    def check_tail(self) -> None:
        """Check that a run reached the model's end as it should.

        Raises:
            NotImplementedError: it looked at outputs that are not kept, or did not call all layers.
        """
        if self.escape is not None:
            raise self.refusal_behind("the model", self.escape.origins)
        if self.next < len(self.fqns):
            self.first = self.next
            raise self._refusal()

    def refusal_behind(self, who: str, origins: frozenset[int]) -> NotImplementedError:
        """Make the error of something outside the layers that needs outputs which are not kept."""
        return refusals.not_kept_behind(who, self._names_of(origins), self.fqns[-1])
