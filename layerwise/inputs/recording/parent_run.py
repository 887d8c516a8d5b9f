"""One run of the parent for one batch, with stand-ins for all layers, that records how layers are called.

    layers before `first`    have run: they return their outputs again, where these are still kept, or placeholders
    layer `first`            is recorded from what the parent made of the real output of the layer before it
    layers after it          are recorded as long as the parent passes on, untouched, what stand-ins return
    layer `stop`             ends the run; after the last layer it goes on until another module is called, which shows
                             whether the parent calls its layers again

A parent that only hands each layer's output to the next is recorded in one run. Where a parent changes hidden states
between two layers, the run ends; the next one begins there, once the real output is known. A parent that changes them
between all layers is run once per layer.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from layerwise.inputs.recording import refusals
from layerwise.inputs.recording.batch_progress import BatchProgress
from layerwise.inputs.recording.filled_containers import fill
from layerwise.inputs.recording.shared_objects import SharedObject
from layerwise.inputs.recording.taints import Taints
from layerwise.inputs.values.ambient import Ambient
from layerwise.inputs.values.caches import CacheState, is_cache, is_empty
from layerwise.inputs.values.calls import (
    Call,
    EarlierOutput,
    Fixed,
    Shape,
    Statics,
    is_value,
    same_state,
    state_of_container,
)
from layerwise.inputs.values.contents import content_hash
from layerwise.inputs.values.stand_ins import EarlyStop, Escape, Placeholder, StandIn, TensorSpec, forward_of
from layerwise.inputs.values.stores import StoredTensor, version
from layerwise.inputs.values.structure import flatten, is_mutable, paths, unflatten
from layerwise.weights.own_hooks import own_hooks_may_fail

PLACEHOLDER = {"origins", "uncounted"}  # attributes of Placeholder


class ParentRun:
    """One run, see the module; `number` and the layers' names are for messages."""

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
        self.again: dict[
            int, tuple[Placeholder, int, StoredTensor]
        ] = {}  # stand for what was computed in an earlier run
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
        """Run the parent; its layers are replaced by stand-ins that call `called`."""
        self.statics = statics
        for state in self.progress.batch.caches:
            state.restore()
        args, kwargs, used = self.progress.batch.call()
        for tensor, kept in used:
            statics.known(tensor, kept)
        original: Callable[..., Any] = model.forward

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
            stack.enter_context(forward_of(model, forward))
            if self.first < len(self.fqns) or self.rehearses:
                self.watch = register_module_forward_pre_hook(self._before_module)  # before FSDP's, which gathers
                stack.callback(self.watch.remove)
            if self.first < len(self.fqns):
                stack.enter_context(own_hooks_may_fail(model, "forward_hooks"))  # there will be no output
            if written:
                stack.enter_context(self.taints)
            self.result = model(*args, **kwargs)
        if self.disorder is not None:
            raise self.disorder

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if self.behind and not isinstance(module, StandIn):
            raise EarlyStop
        if self.rehearses and not isinstance(module, StandIn) and not any(True for _ in module.children()):
            for leaf in flatten(args)[0]:
                if isinstance(leaf, Placeholder):
                    raise Escape(leaf.origins)
            if self.next == len(self.fqns):
                raise EarlyStop

    def given(self, index: int, name: str) -> None:
        """What a stand-in does when the parent sets an attribute of it."""
        self.disorder = refusals.attribute_of_a_layer(name, self.fqns[index], self.number)
        raise EarlyStop

    def commit(self) -> None:
        """Add what was recorded to what is known of the batch.

        Raises:
            NotImplementedError: layer `first` was not recorded.
        """
        if not self.calls:
            raise self._refusal()
        # the parent later changed an object that it had called a layer with
        if self.stop > self.first and any(not seen.holds() for seen in self.captured):
            self.progress.cautious = True
            return
        for index, call in enumerate(self.calls, start=self.first):
            for source in call.links():
                self.progress.last_use[source] = max(index, self.progress.last_use.get(source, -1))
        self.progress.calls += self.calls
        self.progress.sights += [seen for seen in self.captured if seen.content is not None]
        self.progress.assumed |= self.assumed

    def called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a stand-in does when it is called."""
        self.taints.paused = True
        try:
            return self._called(index, args, kwargs)
        except EarlyStop:
            self.over = True
            raise
        finally:
            self.taints.paused = False

    def _called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.over or self.disorder is not None:
            raise EarlyStop
        if index != self.next:
            met = "again" if index < self.next else f"before {self.fqns[self.next]}"
            self.disorder = refusals.out_of_order(self.fqns[index], met, self.number)
            raise self.disorder
        if index == self.first and self.instead is not None:
            self.watch.remove()  # compiled modules warn of such hooks
            self.inside = self.instead()
            raise EarlyStop
        leaves, structure = flatten((args, kwargs), lambda value: value is not kwargs and self._is_live(value))
        names = [
            name.replace("[0]", "args", 1) if name.startswith("[0]") else name.replace("[1]", "kwargs", 1)
            for name in paths(structure)
        ]
        if index < self.first:
            for name, leaf in zip(names, leaves, strict=True):
                self._remember(index, name, leaf)
        else:
            sources = [self._source(index, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
            devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
            self.calls.append(Call(structure, sources, names, Ambient.now(devices)))
        self.next = index + 1
        if index == self.stop and index + 1 < len(self.fqns):
            raise EarlyStop
        returned = self._behind_layers(index, leaves) if index == self.stop else self._returned(index)
        self._write(index, dict(zip(names, leaves, strict=True)))
        return returned

    # -- what a stand-in returns -------------------------------------------------------------------------------

    def _returned(self, index: int) -> Any:
        output = self.progress.outputs.get(index)
        shape = output.shape if output is not None else self._shape(index)
        if shape is None:  # the first layer, before it ever ran
            raise EarlyStop
        leaves = output.values() if output is not None else shape.placeholders(index, self.zeros)
        for number, leaf in enumerate(leaves):
            if not is_value(leaf):
                count = version(leaf) if isinstance(leaf, Tensor) else 0
                self.links.setdefault(id(leaf), (leaf, count, EarlierOutput(index, number)))
        self.assumed[index] = shape
        self.guessed |= index not in self.progress.shapes
        return unflatten(shape.structure, leaves)

    def _write(self, index: int, given: dict[str, Any]) -> None:
        """Do what the layer does to its arguments, as far as their new values are known."""
        shape, output = self._shape(index), self.progress.outputs.get(index)
        for number, name in enumerate(() if shape is None else shape.written, start=len(shape.specs) if shape else 0):
            leaf = given.get(name)
            if not isinstance(leaf, Tensor):
                continue
            if isinstance(leaf, Placeholder):
                leaf.origins = frozenset({index})
            elif output is None:
                self.taints.add(leaf, index)
            else:
                leaf.detach().copy_(output.leaves[number].tensor())
                self.taints.remove(leaf)
            self.links[id(leaf)] = (leaf, version(leaf), EarlierOutput(index, number))
        for name in self.progress.touched:
            sight = None if isinstance(given.get(name), Tensor) else self._seen(given.get(name))
            if sight is not None and sight.live is not sight.value and not is_cache(sight.live):
                fill(index, sight, self.progress.touched[name], real=index == self.first - 1, zeros=self.zeros)

    def _behind_layers(self, index: int, given: list[Any]) -> Any:
        """What the last layer's stand-in returns, to see whether the parent calls layers again; never recorded."""
        self.behind = True
        if index in self.progress.outputs or self._shape(index) is not None:
            returned = self._returned(index)
            del self.assumed[index]
            return returned
        spec = next((spec for spec in map(TensorSpec.of, given) if spec is not None), None)
        if spec is None:
            raise EarlyStop
        return spec.placeholder(index, self.zeros)  # the only layer, which never ran: returns the shape it is given

    def _shape(self, index: int) -> Shape | None:
        """The shape of this layer's output; while unknown, that of the last layer of the same class, or of any."""
        shapes = self.progress.shapes
        same_class = [other for other in shapes if self.kinds[other] is self.kinds[index]]
        return shapes.get(index) or (shapes[max(same_class or shapes)] if shapes else None)

    # -- what a stand-in is called with ------------------------------------------------------------------------

    def _is_live(self, value: Any) -> bool:
        if not is_mutable(value):
            return False
        if id(value) in self.sights and self._seen(value) is not None:
            return True
        return not any(isinstance(leaf, Placeholder) or id(leaf) in self.links for leaf in flatten(value)[0])

    def _source(self, index: int, name: str, leaf: Any) -> EarlierOutput | StoredTensor | Fixed:
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
        held = not isinstance(leaf, Tensor) and self._seen(leaf) is None and _holds_placeholder(leaf)
        if isinstance(leaf, Placeholder) or held or tainted:
            if index == self.first:
                self.disorder = self._refusal(name, Escape(tainted) if tainted else leaf)
                raise self.disorder
            raise EarlyStop
        if isinstance(leaf, Tensor):
            return self.statics.keep(leaf)
        if is_value(leaf) or (is_cache(leaf) and is_empty(leaf)):
            return Fixed(leaf if is_value(leaf) else None)
        sight = self._seen(leaf)
        if sight is None:
            content = None if is_cache(leaf) else content_hash(leaf)  # caches are set back by themselves
            sight = self.sights[id(leaf)] = SharedObject(leaf, leaf, state_of_container(leaf), (index, name), content)
            self.progress.live[index, name] = leaf
        self.captured.append(sight)
        return Fixed(sight.live, self._cache_state(sight.live))

    def _check_attributes(self, index: int, name: str, leaf: Tensor) -> None:
        """Refuse tensors with Python attributes, which copies do not have; those of parameters say how they came."""
        own = [one for one in getattr(leaf, "__dict__", ()) if not one.startswith("_") and one not in PLACEHOLDER]
        if own and not isinstance(leaf, nn.Parameter):
            self.disorder = refusals.attribute_of_a_tensor(name, self.fqns[index], own[0])
            raise self.disorder

    def _is_untouched(self, leaf: Tensor, link: EarlierOutput) -> bool:
        """Whether a stand-in's output still holds what it held: a write past torch does not raise the version."""
        output = self.progress.outputs.get(link.layer)
        return output is None or output.leaves[link.leaf].holds(leaf)

    def _remember(self, index: int, name: str, leaf: Any) -> None:
        """Find the object of an earlier run that this one stands for."""
        known = isinstance(leaf, Placeholder) and not leaf.is_inference()  # those count no writes
        if known and index == self.first - 1 and name in self.progress.met:
            self.again[id(leaf)] = (leaf, version(leaf), self.progress.met[name])
        if isinstance(leaf, Tensor) or is_value(leaf) or self._seen(leaf) is not None:
            return
        live = self.progress.live.get((index, name))
        if live is not None:
            self.sights[id(leaf)] = SharedObject(leaf, live, state_of_container(leaf))

    def _seen(self, value: Any) -> SharedObject | None:
        """What is known of an object in this run; None where the parent has changed it since, or it is new."""
        sight = self.sights.get(id(value))
        if sight is None or not same_state(state_of_container(value), sight.state):
            return None
        return sight if sight.filled is None or content_hash(value) == sight.filled else None

    def _cache_state(self, value: Any) -> CacheState | None:
        if not is_cache(value):
            return None
        states = (state for state in self.progress.batch.caches if state.cache is value)
        known = next(states, None)
        if known is None:  # the parent filled it itself
            known = CacheState(value)
            self.progress.batch.caches.append(known)
        return known

    def _refusal(self, name: str = "", leaf: Any = None) -> NotImplementedError:
        origins = getattr(self.escape or leaf, "origins", None)
        fqn = self.fqns[self.first]
        if origins is None and not name:
            return refusals.not_called(fqn, self.number)
        return refusals.not_kept(name, fqn, self._named(origins or frozenset()))

    def _named(self, origins: frozenset[int]) -> list[str]:
        return [self.fqns[origin] for origin in sorted(origins)]

    def check_tail(self) -> None:
        """Check that a run reached the model's end as it should.

        Raises:
            NotImplementedError: it looked at outputs that are not kept, or did not call all layers.
        """
        if self.escape is not None:
            raise self.after_layers("the model", self.escape.origins)
        if self.next < len(self.fqns):
            self.first = self.next
            raise self._refusal()

    def after_layers(self, who: str, origins: frozenset[int]) -> NotImplementedError:
        """The error of something outside the layers that needs outputs which are not kept."""
        return refusals.not_kept_behind(who, self._named(origins), self.fqns[-1])


def _holds_placeholder(value: Any) -> bool:
    """Whether an object that is passed as it is has one among its values."""
    state = None if is_value(value) else state_of_container(value)
    held = state.values() if isinstance(state, dict) else state or ()
    return any(isinstance(one, Placeholder) for one in held)
