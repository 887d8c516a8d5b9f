"""Digests tell writes apart that a sum of weighted words would not."""

from __future__ import annotations

import pytest
import torch

from fsdp_hooks.digest import digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_signs_of_any_column_show(dtype: torch.dtype) -> None:
    weight = (torch.arange(64 * 8).reshape(64, 8) + 1).to(dtype)
    before = digest([weight])
    found = []
    for column in range(8):
        weight[:, column] *= -1
        found.append(int(digest([weight])))
        weight[:, column] *= -1
    if dtype is torch.int64:  # their highest bits alone
        found.append(int(digest([weight ^ -(2**63)])))
    assert len({int(before), *found}) == 1 + len(found)
    assert torch.equal(digest([weight]), before)
