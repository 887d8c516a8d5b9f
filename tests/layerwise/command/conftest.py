"""The command in this process is one process, also where pytest is a rank of torchrun."""

from __future__ import annotations

import pytest

from tests.layerwise.command.runs import OF_A_RANK
from tests.ranks import agreed


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed(value=None)
    for name in OF_A_RANK:
        monkeypatch.delenv(name, raising=False)
