"""How a model runs while it is looked at, and that it is as before afterwards, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerwise.inputs.replaying.evaluating import set_eval_mode


class Stubborn(nn.Module):
    """Refuses to leave training."""

    def train(self, mode: bool = True) -> Stubborn:
        if not mode:
            raise RuntimeError("I train for ever")
        return super().train(mode)


def look(model: nn.Module) -> None:
    with set_eval_mode(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_cache_enabled()
        raise ZeroDivisionError


def test_modules_train_again_that_did() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with pytest.raises(ZeroDivisionError):
        look(model)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
    assert torch.is_autocast_cache_enabled()


def test_an_error_on_the_way_in_leaves_nothing_changed() -> None:
    model = nn.Sequential(nn.Dropout(), Stubborn())
    with pytest.raises(RuntimeError, match="I train for ever"), set_eval_mode(model):
        pass
    assert all(module.training for module in model.modules())
    assert torch.is_autocast_cache_enabled()


def test_an_error_on_the_way_in_leaves_compiled_code_to_run() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="I train for ever"), set_eval_mode(Stubborn()):
        pass
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(graphs) == 1
