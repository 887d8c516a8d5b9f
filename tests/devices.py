"""Tests that hold on a CPU and on a GPU alike: `@every_device` gives each a `device`, and the GPU's needs one."""

from __future__ import annotations

import pytest

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
