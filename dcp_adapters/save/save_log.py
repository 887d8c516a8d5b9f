"""Log lines of a save: a step like the options, in the list only while the logger lets INFO through.

finish_plan    every rank      what the rank writes, and how long planning took
commit         coordinator     all ranks have written, and how long the save took
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import SavePlan

from dcp_adapters.save.steps.step import SaveStep, Saving

LOG = logging.getLogger(__name__)


class SaveLog(SaveStep):
    """The lines of one save."""

    def __init__(self, saving: Saving) -> None:
        self.where, self.began = saving.checkpoint_id or "the storage", time.perf_counter()
        self.told = False

    def finish_plan(self, plan: SavePlan, answers: Mapping[str, Any]) -> SavePlan:
        """Tell what this rank writes."""
        sizes = [item.tensor_storage_size() for item in plan.items]
        tensors = [size for size in sizes if size is not None]
        LOG.info(
            "save to %s: this rank writes %d tensors of %d bytes and %d other entries; planned in %.2f s",
            *(self.where, len(tensors), sum(tensors), len(sizes) - len(tensors), time.perf_counter() - self.began),
        )
        return plan

    def commit(self, files: set[str]) -> None:
        """Tell that all is written, once."""
        # the last checks run each time the metadata are pickled: for the file, and again if DCP sends them to a group
        if self.told:
            return
        self.told = True
        seconds = time.perf_counter() - self.began
        LOG.info("save to %s: %d files are written, %.2f s after it began", self.where, len(files), seconds)
