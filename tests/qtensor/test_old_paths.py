"""Files that torch.save wrote before the modules moved into rooms load, and new ones name no room."""

import pickle
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from qtensor import QuantizedTensor, quantize
from qtensor.spec.recipes import Recipe
from qtensor.tensor.old_paths import MOVED
from tests.qtensor.recipes_under_test import every_recipe

WRITTEN = Path(__file__).with_name("written_before_rooms.pt")  # by version 0.1: a weight, and quantized in nine ways


def assert_as_written(loaded: Any) -> None:
    assert len(loaded["quantized"]) == 9
    for found in loaded["quantized"]:
        assert isinstance(found, torch.nn.Parameter)
        expected = quantize(loaded["dense"], found.recipe)
        for name, part in expected.parts().items():
            read = found.parts()[name].reshape(-1).view(torch.uint8)
            assert torch.equal(read, part.reshape(-1).view(torch.uint8)), (found.recipe, name)


def test_a_file_written_before_loads_without_pickle() -> None:
    with torch.serialization.safe_globals(QuantizedTensor.safe_globals()):
        assert_as_written(torch.load(WRITTEN, weights_only=True))


def test_a_file_written_before_loads_as_a_pickle() -> None:
    assert_as_written(torch.load(WRITTEN, weights_only=False))


def test_the_file_names_all_paths_that_are_kept() -> None:
    with zipfile.ZipFile(WRITTEN) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert all(path.encode() in pickled for path in MOVED)


@every_recipe
def test_a_new_file_names_the_package_alone(recipe: Recipe) -> None:
    buffer = BytesIO()
    torch.save(quantize(torch.ones(128, 128), recipe), buffer)
    with zipfile.ZipFile(buffer) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert b"qtensor." not in pickled
    assert pickle.loads(pickle.dumps(recipe)) == recipe
