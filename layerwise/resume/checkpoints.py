"""The resumable state of a calibration run: a directory with one DCP checkpoint for each window of layers.

    checkpoint_dir/progress.json           which run, which windows (progress.py)
    checkpoint_dir/layers-00004-00007/     a DCP checkpoint of what these layers became

    open          every rank   read and compare, refuse or drop what is damaged; take the directory over
    load_window   every rank   one window after the other, onto any world size
    save_window   every rank   write files, sync them and their directory -> digest them -> rename progress.json
    mark_finished every rank   the digests of the finished weights

The rename is the commit. A process that is killed before it leaves the previous state, and a directory that no record
names, which the next start removes. All ranks come to the same outcome at each step: rank 0 reads and writes
progress.json and tells the others, and an error on one rank is raised on all.

Two runs in one directory: the later one takes it over by writing its name into progress.json. The earlier one finds
that name at its next commit, commits nothing more, and stops with an error. Each run makes the directories of its
windows anew, so neither ever writes into one of the other's.
"""

import dataclasses
import json
import os
import re
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_adapters.plain.durable import sync
from fsdp_hooks.ranks.across_ranks import on_first
from layerwise.resume.fingerprint import Fingerprint
from layerwise.resume.progress import BACKUP, PROGRESS, WINDOW, Progress, Window, read_progress, write_progress
from layerwise.resume.window_files import check_usable, find_faults, read_window, write_window

LEFT_OVER = re.compile(r"\.probe-.*|progress(\.backup)?\.json\..*\.tmp")


@dataclass(frozen=True)
class Resumed:
    """What an earlier run has left.

    Attributes:
        windows: the undamaged ones, in the order of the layers, without gaps from layer 0 on.
        finished: nothing is left to calibrate.
    """

    windows: tuple[Window, ...]
    finished: bool

    @property
    def next_layer(self) -> int:
        """The first layer to calibrate."""
        return self.windows[-1].last + 1 if self.windows else 0


class CalibrationCheckpoint:
    """The state of one calibration in a directory that all ranks share. Every method is called on all ranks alike.

    Call `open` first, before anything that takes long: it finds out whether the directory can be used.

    Args:
        directory: a local path, the same on all ranks; made if it is not there.
        group: the ranks of the run; None for the default group, or a single process without one.

    Raises:
        ValueError: the directory is a URL.
    """

    def __init__(self, directory: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
        if "://" in os.fspath(directory):
            raise ValueError(
                f"checkpoint_dir={os.fspath(directory)!r} is a URL; give a directory of a file system that all "
                "ranks share"
            )
        self.directory, self.group = Path(directory), group
        self._progress: Progress | None = None

    def open(self, fingerprint: Fingerprint, check: Callable[[Window], None] | None = None) -> Resumed | None:
        """Return what an earlier run of this fingerprint has left, None if there is nothing; make ready to save.

        Damage causes a warning, and everything from the first damaged layer on is dropped. Another thread count or
        other versions cause a warning, too. The model may hold the finished weights instead of the original ones: then
        a finished run is taken as it is.

        Args:
            fingerprint: of this run.
            check: called on rank 0 with each window before anything is changed; raises ValueError for one whose `extra`
                the run cannot use.

        Raises:
            ValueError: the directory holds another calibration, one that a newer version of this library has written,
                or what `check` refuses. Nothing has been changed.
            OSError: the directory cannot be written by some rank, or is not the same one on all ranks; or a file cannot
                be read at the moment. No window has been removed.
        """
        run = f"{uuid.uuid4().hex[:8]} ({socket.gethostname()}, process {os.getpid()})"
        # Rank 0 names the run: random bytes of each rank would differ.
        run, found, damages = on_first(self.group, lambda: (run, *self._read(fingerprint, check)))
        check_usable(self.directory, run.split()[0], self.group)
        sound = found
        if found is not None:
            faults = find_faults(self.directory, found.windows, self.group)
            if faults:
                # What was saved behind it is of no use: a resumed run replays all layers before its first one.
                place = min(faults)
                damages.append(faults[place])
                sound = dataclasses.replace(found, windows=found.windows[:place], finished=None)
                self._refuse_half_done(fingerprint, found, sound, faults[place])
        if damages:
            warnings.warn(self._describe_damage(damages, found, sound), stacklevel=2)
        remarks = found.fingerprint.remarks(fingerprint) if found else []
        if remarks:
            warnings.warn(f"checkpoint_dir={str(self.directory)!r}: {'; '.join(remarks)}", stacklevel=2)
        self._progress = dataclasses.replace(sound or Progress(fingerprint=fingerprint, run=run), run=run)
        # Last, when nothing can be refused any more: a refused run must not take the directory from a running one.
        on_first(self.group, self._take_over)
        if sound is None:
            return None
        return Resumed(sound.windows, sound.finished is not None)

    def save_window(
        self, first: int, last: int, state: Mapping[str, Any], extra: Any = None, *, names: Sequence[str] = ()
    ) -> Window:
        """Save what layers first..last became, and commit it: a run that is killed later resumes after them.

        Args:
            first: the layer after the last window's.
            last: the last layer, included.
            state: tensors, DTensors and quantized ones under their names, as `dcp.save` takes them. Plain tensors must
                be the same on all ranks.
            extra: json-able; rank 0's is kept.
            names: fqns of the layers, for messages.

        Raises:
            ValueError: the layers are not the next ones, or `extra` is not json-able.
            RuntimeError: another run has taken the directory over; or writing failed on some rank. What was committed
                before is untouched.
        """
        progress = self._require_opened()
        if progress.finished is not None or first != progress.next_layer or last < first:
            raise ValueError(
                f"layers {first}..{last} can not be saved: the calibration is finished or the next layer is "
                f"{progress.next_layer}; save windows in the order of the layers"
            )
        name, text = on_first(self.group, lambda: self._reserve(f"layers-{first:05}-{last:05}", extra))
        try:
            files = write_window(self.directory / name, state, self.group)
        except Exception as error:
            on_first(self.group, lambda: self._give_up(name))
            raise RuntimeError(
                f"saving layers {first}..{last} in {self.directory / name} failed: {error}. What was saved before is "
                f"untouched: make room or mend what is named, and start again, from layer {first}"
            ) from error
        window = Window(first=first, last=last, names=tuple(names), directory=name, files=files, extra=json.loads(text))
        done = dataclasses.replace(progress, windows=(*progress.windows, window))
        self._progress = on_first(self.group, lambda: self._commit(done))
        return window

    def load_window(self, window: Window, targets: Mapping[str, Any]) -> None:
        """Load one window, in place, into tensors like those that were saved, for the current ranks and meshes.

        Raises:
            RuntimeError: a target does not fit what was saved (nothing has been loaded), or reading failed.
        """
        directory = self.directory / window.directory
        try:
            read_window(directory, targets, self.group)
        except Exception as error:
            raise RuntimeError(
                f"loading layers {window.first}..{window.last} from {directory} failed: {error}. If the checkpoint is "
                "damaged, start again: what is damaged will be found and dropped"
            ) from error

    def mark_finished(self, weights: Mapping[str, int]) -> None:
        """Record that all layers are done, and `weights_digest` of what the model became.

        Raises:
            RuntimeError: another run has taken the directory over.
        """
        finished = dataclasses.replace(self._require_opened(), finished=dict(weights))
        self._progress = on_first(self.group, lambda: self._commit(finished))

    def _require_opened(self) -> Progress:
        if self._progress is None:
            raise RuntimeError("CalibrationCheckpoint: call open(fingerprint) first, on all ranks")
        return self._progress

    # Steps of rank 0

    def _read(
        self, fingerprint: Fingerprint, check: Callable[[Window], None] | None
    ) -> tuple[Progress | None, list[str]]:
        """Return the progress there is, and what of it is damaged; raise if it is another calibration's, or refused."""
        if not self.directory.is_dir():
            return None, []
        found, damages = read_progress(self.directory)
        if found is not None:
            held = found.fingerprint
            # The model may have the finished weights already: then the run is done, and these count as the right ones.
            if found.finished is not None and found.finished == fingerprint.weights:
                held = dataclasses.replace(held, weights=fingerprint.weights)
            differences = held.differences(fingerprint)
            if differences:
                raise ValueError(
                    f"checkpoint_dir={str(self.directory)!r} holds a calibration of {'; '.join(differences)}. Nothing "
                    "has been changed. To continue it, start from the weights, data and options that it was started "
                    "with; to calibrate anew, give an empty checkpoint_dir"
                )
            if check is not None:
                self._check_windows(found, check, BACKUP if damages else PROGRESS)
        return found, damages

    def _check_windows(self, found: Progress, check: Callable[[Window], None], file: str) -> None:
        for window in found.windows:
            try:
                check(window)
            except ValueError as error:
                raise ValueError(
                    f"{self.directory / file}: what it notes of layers {window.first}..{window.last} is not what a "
                    f"calibration of this model writes: {error}. Nothing has been changed; give an empty "
                    "checkpoint_dir to calibrate anew"
                ) from error

    def _take_over(self) -> None:
        """Make the directory this run's, and remove what no record names."""
        progress = self._require_opened()
        self._write(progress)
        kept = {window.directory for window in progress.windows}
        for path in list(self.directory.iterdir()):
            if WINDOW.fullmatch(path.name) and path.name not in kept:
                # An earlier run may still write into it, until its next commit; so errors are no matter.
                shutil.rmtree(path, ignore_errors=True)
            elif LEFT_OVER.fullmatch(path.name):
                path.unlink(missing_ok=True)
        sync(self.directory)

    def _reserve(self, name: str, extra: Any) -> tuple[str, str]:
        """Make a new directory for a window; return its name, and `extra` as JSON."""
        try:
            text = json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra of {name} can not be written as JSON: {error}") from error
        self._check_owner()
        try:
            (self.directory / name).mkdir()
        # What an earlier run still writes, or has left after it lost the directory. It is never written into.
        except FileExistsError:
            name = f"{name}-{uuid.uuid4().hex[:8]}"
            (self.directory / name).mkdir()
        return name, text

    def _give_up(self, name: str) -> None:
        """Remove an unfinished window; raise if another run has taken the directory over."""
        self._check_owner()
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def _commit(self, progress: Progress) -> Progress:
        self._check_owner()
        self._write(progress)
        return progress

    def _write(self, progress: Progress) -> None:
        """Write the record."""
        try:
            # `write_window` has synced the window, but not its name in this directory. What a record names is durable
            # before the record is.
            sync(self.directory)
            write_progress(self.directory, progress)
        except OSError as error:
            raise OSError(
                f"checkpoint_dir={str(self.directory)!r} can not be written: {error}. What was saved before is "
                "untouched: make room or mend what is named, and start again"
            ) from error

    def _check_owner(self) -> None:
        held, _ = read_progress(self.directory)
        if held is None or held.run != self._require_opened().run:
            other = "was removed" if held is None else f"has been taken over by another run, {held.run}"
            raise RuntimeError(
                f"checkpoint_dir={str(self.directory)!r} {other}; this run stops and has not changed it since. Let one "
                "run at a time use a checkpoint_dir"
            )

    def _refuse_half_done(self, fingerprint: Fingerprint, found: Progress, sound: Progress, fault: str) -> None:
        """Raise if layers must be calibrated again, but the model holds finished weights; change no file."""
        if found.finished == fingerprint.weights != found.fingerprint.weights:
            raise ValueError(
                f"checkpoint_dir={str(self.directory)!r}: {fault}, so layers from {sound.next_layer} on must be "
                "calibrated again, but the model holds the finished weights. Nothing has been changed; start from the "
                "original weights"
            )

    def _describe_damage(self, damages: Sequence[str], found: Progress | None, sound: Progress | None) -> str:
        number = sound.next_layer if sound else 0
        dropped = found.windows[len(sound.windows) :] if found and sound else ()
        name = f" ({dropped[0].names[0]})" if dropped and dropped[0].names else ""
        if found and not dropped:
            return (
                f"checkpoint_dir={str(self.directory)!r}: {'; '.join(damages)}. Its copy is used: the calibration "
                f"continues from layer {number}"
            )
        return (
            f"checkpoint_dir={str(self.directory)!r}: {'; '.join(damages)}. The calibration restarts from layer "
            f"{number}{name}; what was saved from there on is dropped"
        )
