"""What an option of a save does, and when: the planner runs through one list, with a step for each option that is on.

    local_plan    every rank      what the coordinator is to know is added to the rank's record
    receive       coordinator     the plans of all ranks as they were sent become whole plans
    agree         coordinator     ranks are compared; the manifest is completed
    planned       coordinator     all plans are made, no rank has written: entries are added, room is made
    finish_plan   every rank      the plan to write
    resolve       every rank      the data of an item, in the threads that write
    commit        coordinator     all ranks have written, `.metadata` is not there yet

The planner makes new steps for each save: one that is still being written keeps its own. What reverses another step's
work runs in the opposite order: `receive`, `finish_plan` and `resolve` go through the list from its end.
"""

import dataclasses
import io
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from dcp_adapters.records.manifest import Manifest

Data = Tensor | io.BytesIO
Source = Callable[[WriteItem], Data]  # the data of an item


@dataclasses.dataclass
class Saving:
    """One save, as the steps of a rank see it.

    checkpoint_id: where it goes. flat: the flattened state dict. unlisted: items that another rank lists for all, see
    coordinator.py.
    """

    checkpoint_id: str | os.PathLike[str] | None
    flat: Mapping[str, Any]
    unlisted: list[WriteItem] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class GlobalSave:
    """One save, as the coordinator plans it.

    Attributes:
        plans: of all ranks, first as they sent them, in the end as they are to be written.
        manifest: of all quantized tensors.
        apart: what the names of this rank's files begin with, if each rank saves for itself (use_collectives=False).
        metadata: of the checkpoint; None until it is planned. stored: the manifest as it is stored, likewise.
        coded: names of the tensors that are stored as what changed since a base.
        answers: option -> what all ranks are told beside their plans.
    """

    plans: list[SavePlan]
    manifest: Manifest
    apart: str | None
    metadata: Metadata | None = None
    stored: Tensor | None = None
    coded: frozenset[str] = frozenset()
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)

    def refuse_apart(self, why: str) -> None:
        """Refuse what all ranks are needed for if each saves for itself; why: the option, and for what."""
        if self.apart is not None:
            raise ValueError(
                f"QuantizedSavePlanner: {why}, and here each rank saves for itself (use_collectives=False); save with "
                "collectives, or without it"
            )


class SaveStep:
    """What one option does at each stage. A stage that a step does not define is not asked of it.

    Attributes:
        stages: the names of those that it defines.
    """

    stages: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        # the planner asks only the steps that define a stage: `resolve` runs once for each of thousands of items
        cls.stages |= frozenset(vars(cls))

    def local_plan(self, plan: SavePlan, data: Source) -> SavePlan:
        """Return the plan to send; `data` gives the data of an item, as stock DCP has it."""
        return plan

    def receive(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans behind those that ranks sent."""
        return plans

    def agree(self, save: GlobalSave) -> None:
        """Compare what ranks tell; raise before anything is written."""

    def planned(self, save: GlobalSave) -> None:
        """Add what depends on all plans; the last stage before ranks write."""

    def finish_plan(self, plan: SavePlan, answers: Mapping[str, Any]) -> SavePlan:
        """Return the plan to write."""
        return plan

    def resolve(self, item: WriteItem, source: Source) -> Data:
        """Return what is stored for an item, from the data that `source` gives."""
        return source(item)

    def commit(self, files: set[str]) -> None:
        """Look once more at the files that are written; raise if the metadata must not name them."""
