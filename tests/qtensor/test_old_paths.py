"""Files that torch.save wrote before the modules moved into rooms load, and new ones name no room."""

import pickle
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize
from qtensor.products.input_rotation import InputRotation
from qtensor.spec.recipes import Recipe
from qtensor.tensor.old_paths import MOVED, OPTIMIZER
from tests.qtensor.recipes_under_test import every_recipe

WRITTEN = Path(__file__).with_name("written_before_rooms.pt")  # by version 0.1: a weight, and quantized in nine ways
MODELS = Path(__file__).with_name("models_before_rooms.pt")  # likewise: models with all that pickles of them name


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


def test_models_and_an_optimizer_written_before_load() -> None:
    held = torch.load(MODELS, weights_only=False)
    with torch.no_grad():
        for name, model in held["models"].items():
            wanted = held["outputs"][name]
            found = model(held["input"].to(wanted.dtype))
            # the order in which a library sums products, and so how it rounds, is that of the CPU
            assert found.dtype == wanted.dtype
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 8 * torch.finfo(wanted.dtype).eps, name
    assert all(param._partners is not None for param in held["models"]["dense"].parameters())
    [rotation] = held["models"]["rotated"][0]._forward_pre_hooks.values()
    assert type(rotation) is InputRotation
    assert isinstance(held["optimizer"], MasterWeightOptimizer)
    held["models"]["trained"](held["input"]).sum().backward()
    held["optimizer"].step()
    assert [type(one).__name__ for one in held["algorithms"]] == ["GPTQ", "AWQ", "Max", "Mse", "Qronos", "KVCache"]
    assert len(held["report"].records) == 2


def pickled(file: Path | BytesIO) -> bytes:
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def test_the_files_name_all_paths_that_are_kept() -> None:
    written = pickled(WRITTEN) + pickled(MODELS)
    assert [path for path in (*MOVED, OPTIMIZER) if path.encode() not in written] == []


def test_new_files_name_packages_alone() -> None:
    held, buffer = torch.load(MODELS, weights_only=False), BytesIO()
    torch.save({"models": held["models"], "optimizer": held["optimizer"]}, buffer)
    assert not re.search(rb"(qtensor|fsdp_hooks)\.", pickled(buffer))
    torch.load(BytesIO(buffer.getvalue()), weights_only=False)


@every_recipe
def test_a_new_file_names_the_package_alone(recipe: Recipe) -> None:
    buffer = BytesIO()
    torch.save(quantize(torch.ones(128, 128), recipe), buffer)
    assert b"qtensor." not in pickled(buffer)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
