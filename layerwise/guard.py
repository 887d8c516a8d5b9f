"""Whether somebody wrote into the weights of a stage: told by their bytes, for nothing else sees every write.

    taken -> events "layer_start", "capture", "calibrate"     a write takes part, if the algorithm writes weights
          -> decisions                                         the algorithm's own writes
          -> installed -> events "write", "metrics" ...        any write would be lost: refused

Only callbacks and algorithms of somebody else can write where none is expected, so without them nothing is compared.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fsdp_hooks.digest import digest
from fsdp_hooks.torch_private import local_of
from layerwise.algorithms.algorithm import Algorithm
from layerwise.weights.hold import params_of
from qtensor.tensor import QuantizedTensor


class Guard:
    """The parameters of a stage at one moment.

    Args:
        name: fqn of the stage; "" for what is outside of layers.
        module: its module.
        without: modules in it that do not belong to it.
        watched: whether anybody could write; else every answer is that nothing was written.
    """

    def __init__(self, name: str, module: nn.Module, without: tuple[nn.Module, ...], *, watched: bool) -> None:
        self.name, self.module, self.without, self.watched = name, module, without, watched
        self.taken = self._contents() if watched else {}

    def written(self) -> list[str]:
        """The parameters whose bytes are others than at that moment, or that came or went."""
        if not self.watched:
            return []
        then, now = self.taken, self._contents()
        return [name for name in {**then, **now} if name not in now or name not in then or now[name] != then[name]]

    def check_unwritten(self, algorithm: Algorithm) -> None:
        """Raise RuntimeError where weights were written although the algorithm writes none."""
        changed = [] if algorithm.writes_weights else self.written()
        if changed:
            raise RuntimeError(
                f"calibrate: {', '.join(changed[:5])} changed while {type(algorithm).__name__} calibrated "
                f"{self.name or 'the model'}, and it is an algorithm that writes no weights: the change would be lost. "
                "Nothing of this layer was stored; set writes_weights = True on an algorithm that writes them, or "
                "change weights before the calibration"
            )

    def check_installed(self) -> None:
        """Raise RuntimeError where weights were written since their quantized values were installed."""
        late = self.written()
        if late:
            raise RuntimeError(
                f"calibrate: {', '.join(late[:5])} in {self.name or 'the model'} changed after the quantized values "
                'were there, which would lose the change; change weights before the event "calibrate" has been told'
            )

    def check_finished(self, kind: str) -> None:
        """Raise RuntimeError where weights were written in an event of a finished stage."""
        changed = self.written()
        if changed:
            raise RuntimeError(
                f'calibrate: {", ".join(changed[:5])} changed in the event "{kind}", when {self.name or "the model"} '
                'was finished; change weights before the event "calibrate" has been told'
            )

    def _contents(self) -> Mapping[str, Tensor]:
        """A digest of every parameter on this rank."""
        params = params_of(self.name, self.module, self.without)
        local: dict[str, Any] = {name: local_of(param) for name, param in params.items() if not param.is_meta}
        return {
            name: digest(held.parts().values() if isinstance(held, QuantizedTensor) else [held])
            for name, held in local.items()
        }
