"""What appears when it is complete: exports, conversions, deltas, and what deltas are applied to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedSavePlanner, export_hf
from dcp_adapters.convert.convert_checkpoint import convert_checkpoint, plan_conversion
from dcp_adapters.delta.files import patched_copy, write_delta
from dcp_adapters.digests.stored import source_digests, stored_source
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from tests.adversary.attack import Found
from tests.adversary.crashes.operations import NAMES, NOTHING, Mark, Operation, full, quiet
from tests.dcp_adapters.cases import RECIPES


class Appearing(Operation):
    """Something that appears when it is complete, and is then as one that nothing has interrupted."""

    def build(self) -> None:
        self.recipes = [self.draw.choice([name for name in NAMES if "delayed" not in name]) for _ in range(2)]
        self.states = [NOTHING, "whole"]
        self.wanted: Any = None

    def prepare(self, root: Path) -> None:
        for name, seed in (("old", 1), ("new", 2)):
            with quiet():
                dcp.save(self.weights(seed), checkpoint_id=root / name, planner=QuantizedSavePlanner(), no_dist=True)

    def weights(self, seed: int) -> dict[str, Any]:
        return {name: value for name, value in full(self.recipes, seed).items() if name != "step"}

    def act(self, root: Path, mark: Mark) -> None:
        self.make(root, root / "out")
        mark(1)

    def make(self, root: Path, out: Path) -> None:
        raise NotImplementedError

    def held(self, out: Path) -> Any:
        """What tells two of them apart."""
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    def seen(self, root: Path) -> Any:
        if self.wanted is None:
            other = root / "reference"
            self.make(root, other)
            self.wanted = self.held(other)
            shutil.rmtree(other) if other.is_dir() else other.unlink()
        out = root / "out"
        try:
            out.lstat()  # os.path.lexists would take an error for an answer
        except FileNotFoundError:
            return NOTHING
        if (found := self.held(out)) != self.wanted:
            raise Found(f"{out} is there and not what was written: {_difference(found, self.wanted)}")
        return "whole"


class Export(Appearing):
    name = "export"

    def build(self) -> None:
        super().build()
        recipe = self.draw.choice([name for name in NAMES if name.startswith(("nvfp4", "float8_row"))])
        self.recipes = [recipe, recipe]
        self.size = self.draw.choice(("5GB", 4000))

    def make(self, root: Path, out: Path) -> None:
        config = {"model_type": "llama", "architectures": ["X"]}
        export_hf(root / "old", out, config=config, max_shard_size=self.size, progress=False)

    def weights(self, seed: int) -> dict[str, Any]:
        held = super().weights(seed)
        return {f"model.layers.{i}.mlp.down_proj.weight": held[f"w{i}"] for i in range(len(self.recipes))}


class Convert(Appearing):
    name = "convert"

    def build(self) -> None:
        super().build()
        self.to: Any = self.draw.choice((torch.bfloat16, *(RECIPES[name] for name in NAMES)))

    def make(self, root: Path, out: Path) -> None:
        source = StoredCheckpoint(root / "old", check=True)
        convert_checkpoint(source, out, plan_conversion(source.entries, self.to))

    def held(self, out: Path) -> Any:
        return source_digests(stored_source(out, None))


class MakeDelta(Appearing):
    name = "delta"

    def make(self, root: Path, out: Path) -> None:
        write_delta(root / "old", root / "new", out)

    def held(self, out: Path) -> Any:
        return {"": out.read_bytes()}


class Apply(Convert):
    name = "apply"

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        write_delta(root / "old", root / "new", root / "delta")

    def make(self, root: Path, out: Path) -> None:
        patched_copy(root / "old", [root / "delta"], out)


class ApplyFiles(Export):
    name = "apply to files"

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        for name in ("old", "new"):
            export_hf(root / name, root / f"{name}-files", max_shard_size=self.size, progress=False)
        write_delta(root / "old-files", root / "new-files", root / "delta")

    def make(self, root: Path, out: Path) -> None:
        patched_copy(root / "old-files", [root / "delta"], out)


def _difference(found: Any, wanted: Any) -> str:
    names = sorted({*found, *wanted})
    return ", ".join(name for name in names if found.get(name) != wanted.get(name)) or "nothing"
