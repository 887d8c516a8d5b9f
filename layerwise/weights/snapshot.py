"""Whether somebody wrote into the weights of a stage: their bytes are compared, since nothing else shows every write.

    taken -> events "layer_start", "capture", "calibrate"     a write counts, if the algorithm writes weights
          -> decisions                                         the algorithm's own writes
          -> installed -> events "write", "metrics" ...        any write would be lost: refused

Only callbacks and users' own algorithms can write where no writes are expected; without these nothing is compared.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsdp_hooks.kernels.digest import digest
from fsdp_hooks.torch_private import local_of
from layerwise.algorithms.algorithm import Algorithm
from layerwise.stages.caller import caller
from layerwise.stages.stage import Stage
from qtensor.tensor.quantized_tensor import QuantizedTensor


class Snapshot:
    """The bytes of a stage's parameters at one moment, to be compared with what they are later.

    Args:
        stage: held or not.
        watched: whether anybody could write; if not, no write is ever reported.
    """

    def __init__(self, stage: Stage, *, watched: bool) -> None:
        self.stage, self.watched = stage, watched
        self.taken = self._contents() if watched else {}

    def find_writes(self) -> list[str]:
        """Return the parameters whose bytes have changed since that moment, or that were added or removed."""
        if not self.watched:
            return []
        then, now = self.taken, self._contents()
        return [name for name in {**then, **now} if name not in now or name not in then or now[name] != then[name]]

    def check_unwritten(self, algorithm: Algorithm) -> None:
        """Raise RuntimeError if weights were written although the algorithm writes none."""
        changed = [] if algorithm.writes_weights else self.find_writes()
        if changed:
            raise RuntimeError(
                f"{caller()}: {', '.join(changed[:5])} changed while {type(algorithm).__name__} calibrated "
                f"{self.stage.title}, and it is an algorithm that writes no weights: the change would be lost. "
                "Nothing of this layer was stored; set writes_weights = True on an algorithm that writes them, or "
                "change weights before the calibration"
            )

    def check_installed(self) -> None:
        """Raise RuntimeError if weights were written since their quantized values were installed."""
        late = self.find_writes()
        if late:
            raise RuntimeError(
                f"{caller()}: {', '.join(late[:5])} in {self.stage.title} changed after the quantized values "
                'were there, which would lose the change; change weights before the event "calibrate" has been told'
            )

    def check_finished(self, kind: str) -> None:
        """Raise RuntimeError if weights were written in an event of a finished stage."""
        changed = self.find_writes()
        if changed:
            raise RuntimeError(
                f'{caller()}: {", ".join(changed[:5])} changed in the event "{kind}", when {self.stage.title} '
                'was finished; change weights before the event "calibrate" has been told'
            )

    def _contents(self) -> Mapping[str, Tensor]:
        """Return a digest of every parameter on this rank."""
        # Digests of bytes, since version counters miss writes through `.data` and through aliases.
        params = self.stage.params().items()
        local: dict[str, Any] = {name: local_of(param) for name, param in params if not param.is_meta}
        return {
            name: digest(held.parts().values() if isinstance(held, QuantizedTensor) else [held])
            for name, held in local.items()
        }
