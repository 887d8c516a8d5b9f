"""What each layer is called with, for every batch, without rerunning the model for every layer.

    with Recorder(model, find_layers(model), data, inputs_on="cpu") as recorder:
        for i, (fqn, layer) in enumerate(recorder.layers):
            if recorder.needs_parent(i):             # mostly for the first two layers only
                recorder.prepare(i)                  # runs the parent, with stand-ins for all layers
            for b in range(len(recorder)):
                args, kwargs = recorder.inputs(i, b)
                recorder.put(i, b, layer.forward(*args, **kwargs))
            recorder.free(i)                         # frees what no later layer needs
        for b in range(len(recorder)):
            recorder.run_tail(b)                     # everything after the last layer sees its true inputs

`prepare(0)` stops each batch at the first layer. Once that has run, the shape of its output is known, so `prepare(1)`
can run the parent with placeholders up to the last layer. If a layer returns something of another shape than its
placeholder had, `put` notices, and `needs_parent` of the next layer is True. It is also True if a parent does more
between two layers than pass hidden states on (see `ParentRun`).

Nothing here is a collective, and no weight is touched; a rank may have no batches. But the parent's own modules run in
`Recorder(...)` with a forward_loop, in `prepare` and in `run_tail`. If these are sharded, keep them gathered around
such calls, and let all ranks agree on `needs_parent`, which depends on each rank's batches. Outside these calls the
model is as it was.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn

from layerwise.inputs.recording.batch_progress import BatchProgress
from layerwise.inputs.recording.parent_run import ParentRun
from layerwise.inputs.recording.shared_objects import SharedObjects
from layerwise.inputs.values.batches import Data, batches_of
from layerwise.inputs.values.calls import Call, Returned, Statics, restore_container
from layerwise.inputs.values.stand_ins import Placeholder, refuse_placeholders, swap_in
from layerwise.inputs.values.stores import Store
from layerwise.inputs.values.structure import flatten

T = TypeVar("T")


class Recorder:
    """Records and replays the calls of all layers of a model.

    Args:
        model: in eval mode; if sharded, it must have run once (FSDP finds its root in the first forward).
        layers: (fqn, module) in the order of their calls; none to use only `run_tail`, as a plain forward.
        data: an iterable of batches, or a callable forward_loop(model), see batches.py. All of it is taken at once.
        inputs_on: where inputs and outputs of layers wait: "device", "cpu" or "disk" (a temporary directory, removed at
            the end). Tensors inside of mutable containers that layers share stay where they are.

    Raises:
        ValueError: `inputs_on` is none of the three.
        TypeError: `data` does not give batches.
    """

    def __init__(
        self, model: nn.Module, layers: list[tuple[str, nn.Module]], data: Data, *, inputs_on: str = "device"
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self._store = Store(inputs_on)
        self._statics = Statics(self._store)
        self._run: ParentRun | None = None
        self._shared = SharedObjects([fqn for fqn, _ in self.layers])
        self._uncounted: set[str] = set()  # arguments that layers may write into without torch counting it
        try:
            batches = batches_of(model, data, self._statics.keep)
        # Without a recorder nobody could call `close`, and files of the first batches would stay.
        except BaseException:
            self._store.close()
            raise
        self._progress = [BatchProgress(batch) for batch in batches]

    def twin(self) -> "Recorder":
        """Make a recorder of the same batches for different outputs of the layers; it keeps them in the same place.

        An object that both hand to layers, and that these change, is refused, as one that several batches share.
        """
        twin = copy.copy(self)
        twin._progress = [BatchProgress(progress.batch) for progress in self._progress]  # noqa: SLF001 - its own class
        return twin

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Return how many batches this rank has."""
        return len(self._progress)

    def batch_hashes(self) -> list[int]:
        """Return, for each batch, an unsigned 64-bit hash of its arguments; the same on every device.

        Raises:
            TypeError: an argument is an object whose effect on the outcome cannot be hashed.
        """
        for number, progress in enumerate(self._progress):
            if progress.batch.opaque:
                raise TypeError(
                    f"batch {number} holds {', '.join(progress.batch.opaque)}: whether another run has the same data "
                    "can not be told from such an object; pass tensors, numbers and texts, or no checkpoint_dir"
                )
        return self.hashes()

    def hashes(self) -> list[int]:
        """Return the hashes of `batch_hashes`; objects that cannot be hashed are in them by their type alone."""
        return [progress.batch.hash for progress in self._progress]

    def keep_only(self, batches: Iterable[int]) -> None:
        """Leave all other batches out; call it before `prepare`."""
        self._progress = [self._progress[number] for number in batches]

    def needs_parent(self, index: int) -> bool:
        """Tell whether this rank's parent must run for a layer's inputs to be known; `put` what it depends on first."""
        return any(len(progress.calls) <= index for progress in self._progress)

    def prepare(self, index: int) -> None:
        """Run the parent for all batches that need it; later layers are recorded on the way, as far as possible.

        Raises:
            NotImplementedError: the model does something between its layers that cannot be replayed, or passes them one
                object and fills it again for another batch; names the layer.
            RuntimeError: the outputs of the layer before were not put.
        """
        if not self.needs_parent(index):
            return
        with self._swap_layers():
            for number, progress in enumerate(self._progress):
                self._check_put(index - 1, number)
                # A run that turns out to need caution records nothing, and is done again.
                while len(progress.calls) <= index:
                    stop = index if progress.cautious else len(self.layers) - 1
                    self._run = ParentRun(progress, number, self.layers, index, stop)
                    self._run.execute(self.model, self._statics)
                    self._run.commit()
                progress.met = {}
        # When all batches were recorded: only then an object shows that a later batch has filled it anew.
        for progress in self._progress:
            self._shared.meet(progress.sights)
            progress.sights = []
        self._statics.forget()

    def inputs(self, index: int, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs to call a layer's forward with; their tensors may be written in place.

        Call it again for the same layer and batch as often as needed, until the next layer's turn.

        Args:
            index: of the layer.
            batch: 0 .. len(recorder) - 1.

        Raises:
            RuntimeError: the layer was not prepared, or is done.
            NotImplementedError: layers changed an object that is the same for several batches.
        """
        args, kwargs = self._call(index, batch).arguments(lambda source: self._output(source, batch))
        return args, kwargs

    def run(
        self, index: int, batch: int, layer: Callable[..., Any], *, compare: bool = False
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a layer with its `inputs`, as its parent called it.

        Returns:
            The output, and the tensors among the arguments that it wrote into, by name.

        Args:
            index: of the layer.
            batch: 0 .. len(recorder) - 1.
            layer: is called.
            compare: find writes that torch does not count, too; from then on, they are looked for in every run.
        """
        call = self._call(index, batch)
        returned, written = call.run(
            lambda source: self._output(source, batch), layer, compare=compare or self._uncounted
        )
        if compare:
            self._uncounted.update(written)
        return returned, written

    def shared_tensors(self, index: int, batch: int) -> tuple[Tensor, ...]:
        """Return tensors that a layer, just called with its `inputs`, put into containers that later layers get."""
        call = self._progress[batch].calls[index]
        return () if call is None else tuple(call.find_new_tensors())

    def put(self, index: int, batch: int, output: Any, written: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Keep what a layer returned for a batch, and wrote into its arguments; replaces what was put before.

        Raises:
            NotImplementedError: it was computed from a placeholder, which reached the layer hidden inside some object.
        """
        if any(isinstance(leaf, Placeholder) for leaf in flatten(output)[0]):
            raise NotImplementedError(
                f"layer {self.layers[index][0]} takes hidden states out of an object inside of an argument, where they "
                "cannot be replaced; the model has to pass them as arguments, or in tuples, lists, dicts or dataclasses"
            )
        progress = self._progress[batch]
        kept = Returned.of(output, self._store, written)
        progress.outputs[index] = kept
        call = progress.calls[index]
        progress.left = [] if call is None else call.containers()
        progress.touched |= {} if call is None else call.find_touched()
        progress.shapes[index] = kept.shape
        # Later layers were recorded with a stand-in that returned something else. The parent will run for them again.
        if progress.assumed.get(index, kept.shape) != kept.shape:
            del progress.calls[index + 1 :]

    def run_in_place(self, index: int, batch: int, function: Callable[[], T]) -> T | None:
        """Call a function where the parent calls a layer, and return its result; None if the parent does not get there.

        The stand-ins of the layers before return what these returned, as far as it is kept.
        """
        self._run = run = ParentRun(self._progress[batch], batch, self.layers, index, index)
        run.instead = function
        self._execute(run)
        inside: T | None = run.inside
        return inside

    def rehearse(self, output: Any, written: Mapping[str, Tensor], *, behind: bool) -> None:
        """Record the first batch once as if every layer returned what the first one does, and forget it again.

        Args:
            output: what the first layer returned for the first batch.
            written: what it wrote into its arguments.
            behind: modules behind the layers will be needed, too.

        Raises:
            NotImplementedError: as `prepare` and `run_tail`.
        """
        # On a copy: what is recorded from guessed outputs must not be replayed.
        progress = self._progress[0].copy()
        first = progress.calls[0]
        progress.touched = {} if first is None else first.find_touched()
        kept = Returned.of(output, self._store, written)
        last = len(self.layers)
        for index in range(last):
            while len(progress.calls) <= index:
                run = self._run = ParentRun(progress, 0, self.layers, index, index if progress.cautious else last - 1)
                self._execute(run)
                run.commit()
            progress.outputs[index], progress.shapes[index] = kept, kept.shape
            progress.forget(index, last)
        if behind:
            run = self._run = ParentRun(progress, 0, self.layers, last, last)
            run.rehearses = True
            self._execute(run)
            run.check_tail()
        self._statics.forget()

    def _execute(self, run: ParentRun) -> None:
        with self._swap_layers():
            run.execute(self.model, self._statics)

    def free(self, index: int) -> None:
        """Free the inputs of a layer, and the outputs that no layer after it takes.

        Containers that layers share are set to what the call left in them whose output was put last, even if the layer
        has been called again since.

        Raises:
            NotImplementedError: layers changed an object that is the same for several batches.
        """
        for progress in self._progress:
            # The layer may have been called again, for a report's figures, say; later ones get what fits its output.
            for container, state in progress.left:
                restore_container(container, state)
            progress.left = []
            progress.forget(index, len(self.layers))
        self._shared.check()
        self._statics.forget()

    def run_tail(self, batch: int) -> Any:
        """Run the parent to its end for one batch, the last layer's stand-in returning what that layer returned.

        Returns:
            What the model returns. Outputs of earlier layers in it are placeholders.

        Raises:
            NotImplementedError: a module outside the layers takes the output of a layer that is not the last.
            RuntimeError: outputs of the last layer were not put.
        """
        self._check_put(len(self.layers) - 1, batch)
        run = self._run = ParentRun(self._progress[batch], batch, self.layers, len(self.layers), len(self.layers))
        with self._swap_layers(), refuse_placeholders(self.model, run.refusal_behind):
            try:
                run.execute(self.model, self._statics)
            except Exception as error:
                error.add_note(
                    "in a forward with stand-ins for its layers, the model has nothing to collect from inside of them; "
                    "do not ask it for router logits or losses made of them"
                )
                raise
        run.check_tail()
        return run.result

    def close(self) -> None:
        """Set caches back, free everything and remove what is on disk; may be called twice."""
        caches = [state for progress in self._progress for state in progress.batch.caches]
        self._progress, self._run = [], None
        self._store.close()
        for state in caches:
            with suppress(NotImplementedError):  # raised before, when it mattered
                state.restore()

    def _call(self, index: int, batch: int) -> Call:
        self._shared.check()
        calls = self._progress[batch].calls
        call = calls[index] if index < len(calls) else None
        if call is None:
            raise RuntimeError(f"inputs of layer {self.layers[index][0]} are not there: not prepared yet, or done")
        return call

    def _output(self, index: int, batch: int) -> Returned:
        self._check_put(index, batch)
        return self._progress[batch].outputs[index]

    def _check_put(self, index: int, batch: int) -> None:
        if index >= 0 and index not in self._progress[batch].outputs:
            raise RuntimeError(
                f"the output of layer {self.layers[index][0]} for batch {batch} was not put, or is freed"
            )

    @contextmanager
    def _swap_layers(self) -> Iterator[None]:
        def answer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert self._run is not None
            return self._run.answer(index, args, kwargs)

        def refuse_attribute(index: int, name: str) -> None:
            assert self._run is not None
            self._run.refuse_attribute(index, name)

        try:
            with swap_in(self.model, [layer for _, layer in self.layers], answer, refuse_attribute):
                yield
        finally:
            self._run = None
