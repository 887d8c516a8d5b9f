"""What the trainers' tests ask of the checkpoints that a recipe leaves behind."""

from pathlib import Path

from dcp_adapters import read_manifest
from dcp_adapters.cli.main import main


def hold_the_same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bytes under the same names: weights, optimizer states and masters."""
    return main(["diff", str(one), str(other)]) == 0


def quantized_in(checkpoint: Path) -> dict[str, str]:
    """Name -> class name of the recipe, of the tensors that a checkpoint holds quantized."""
    assert main(["verify", str(checkpoint)]) == 0
    return {name: type(held.recipe).__name__ for name, held in read_manifest(checkpoint).tensors.items()}
