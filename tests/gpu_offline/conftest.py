"""A process that believes in a GPU."""

from __future__ import annotations

import pytest

from tests.gpu_offline import unavailable
from tests.gpu_offline.pretended import pretend_gpu


@pytest.fixture(scope="session", autouse=True)
def _gpu_that_is_not_there() -> None:
    if why := unavailable():
        pytest.skip(why)
    pretend_gpu()
