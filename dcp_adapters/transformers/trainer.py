"""transformers' `Trainer` with checkpoints that hold quantized weights, so that a stopped run can go on.

    checkpoint-<step>/
        dcp/                  weights (with adapters, what is trained alone), optimizer with its masters, scheduler:
                              through the planners of this package, each rank its shards
        trainer_state.json    the Trainer's own, as are rng_state*.pth: by them it finds its place in the data

The Trainer's own checkpoints have what `save_pretrained` writes, which is for engines: their names are not the model's.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import Trainer

from dcp_adapters.load.planner import QuantizedLoadPlanner
from dcp_adapters.save.planner import QuantizedSavePlanner
from fsdp_hooks.wrappers import PlainNames

FOLDER = "dcp"


class QuantizedTrainer(Trainer):  # type: ignore[misc] # transformers has no types
    """A `Trainer` whose checkpoints go through `dcp`; a class of another library's derives from it and from that.

    A run that is stopped and goes on by `train(resume_from_checkpoint=...)`, on as many ranks and over the same data,
    ends in the bytes of one that was not stopped: weights, masters, optimizer states. A checkpoint also loads on
    another number of ranks.

    Weights are whole, or sharded before the optimizer is made (`fully_shard`, accelerate's `fsdp2_prepare_model`); the
    Trainer then leaves them where they are, and `TrainingArguments(fsdp=...)` is left out. If quantized weights are
    trained, give it an optimizer that keeps masters by `optimizers=`.

    With `save_only_model=True` a checkpoint holds weights alone, and no run goes on from it.

    With adapters of peft a checkpoint holds what is trained. The frozen base is that of the run that goes on; it is not
    compared.

    Raises:
        ValueError: `resume_from_checkpoint` is not a checkpoint of this class; `save_model()` of a sharded model
            without adapters. On all ranks, and nothing has been loaded or written.

    Example:
        ```python
        >>> trainer = QuantizedTrainer(model, args, optimizers=(optimizer, None))
        >>> trainer.train(resume_from_checkpoint="runs/checkpoint-500")
        >>> class Tuner(QuantizedTrainer, trl.SFTTrainer): ...
        ```
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As for a model that transformers has sharded: no DDP around it, and no second sharding.
        if _is_sharded(self.model):
            self.is_distributed_loading_by_transformers, self.place_model_on_device = True, False

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave shards where their mesh has them."""
        if not _is_sharded(model):
            super()._move_model_to_device(model, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002
        """Save what `from_pretrained` reads (of a sharded model: its adapters); or, for a checkpoint, what is trained.

        A collective if the model is sharded.
        """
        if _internal_call and output_dir is not None:
            held = {"model": _trained(self.model)} if self.args.save_only_model else self._held()
            with _in_one_process():
                dcp.save(held, checkpoint_id=Path(output_dir) / FOLDER, planner=QuantizedSavePlanner())
        elif _is_sharded(self.model):
            self._save_adapters(output_dir or self.args.output_dir)
        else:
            super().save_model(output_dir, _internal_call)

    def _save_adapters(self, output_dir: str) -> None:
        weights = _trained(self.model)
        if not _has_adapters(self.model):
            raise ValueError(
                "save_model: the model is sharded; dcp_adapters.export_hf(model, directory) writes what engines read"
            )
        full = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()}
        if self.args.should_save:
            self.model.save_pretrained(output_dir, state_dict=full)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: `save_model` has saved them."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Look for what is loaded once there is an optimizer."""
        if not (Path(resume_from_checkpoint) / FOLDER / ".metadata").is_file():
            raise ValueError(
                f"{resume_from_checkpoint} has no {FOLDER}/.metadata: it is not a checkpoint of QuantizedTrainer, or "
                "was not finished; nothing has been loaded. Load what save_pretrained wrote by from_pretrained"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load weights, too, in place."""
        if checkpoint is not None:
            held = self._held()
            _load(held, checkpoint)
            set_optimizer_state_dict(self.model, self._own_optimizer, held["optim"])

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, in place."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)
        _load({"model": _trained(self.model)}, self.state.best_model_checkpoint)

    def _held(self) -> dict[str, Any]:
        """Return what a checkpoint holds; tensors are those of the run."""
        optim = get_optimizer_state_dict(self.model, self._own_optimizer)
        return {"model": _trained(self.model), "optim": optim, "scheduler": self.lr_scheduler}

    @property
    def _own_optimizer(self) -> Any:
        """Return the optimizer that accelerate has wrapped."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _load(held: dict[str, Any], checkpoint: str) -> None:
    with _in_one_process():
        dcp.load(held, checkpoint_id=Path(checkpoint) / FOLDER, planner=QuantizedLoadPlanner())


def _is_sharded(model: Any) -> bool:
    return model is not None and any(isinstance(param, DTensor) for param in model.parameters())


def _has_adapters(model: nn.Module) -> bool:
    names = PlainNames(model)
    return any(names.is_adapter(name) for name, _ in model.named_parameters())


def _trained(model: nn.Module) -> dict[str, Any]:
    """Return the model's tensors; of one with adapters those that are trained."""
    if not _has_adapters(model):
        return model.state_dict()
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Leave out what DCP says of a single process, which is meant here."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
