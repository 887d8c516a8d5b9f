"""What the coordinator makes of the ranks' plans is what stock DCP makes of them, and so is what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_adapters import QuantizedSavePlanner
from dcp_adapters.save.global_plan import global_plan
from dcp_adapters.save.write_items import plain_item
from tests.dcp_adapters.test_plans import columns, fsdp, fsdp_tp_columns, hsdp
from tests.dcp_adapters.test_read_items import LAYOUTS, quantized, with_others
from tests.growth import assert_linear, bytecodes

MORE = LAYOUTS | {"columns 3": columns(4), "hsdp 3x1": hsdp(3, 1), "fsdp 48": fsdp(48), "tp": fsdp_tp_columns(1, 4)}


def plans_of(name: str) -> list[SavePlan]:
    """The plans of all ranks, with the paths of their entries as planner data, as stock takes them."""
    layout, whole, plans = MORE[name], quantized(), []
    for rank in range(layout.ranks):
        planner = QuantizedSavePlanner()
        planner.set_up_planner({"model": with_others(whole, layout, rank)}, None, rank == 0)
        plan = planner.create_local_plan()
        plans.append(dataclasses.replace(plan, planner_data=plan.planner_data.mappings))
    return plans


def described(items: list[WriteItem]) -> list[Any]:
    """Items with the numbers of their chunks, which do not count where indices are compared."""
    return [(item, item.index.index) for item in items]


@pytest.mark.parametrize("lowest", [False, True], ids=["balanced", "to lowest rank"])
@pytest.mark.parametrize("name", MORE)
def test_the_plan_is_that_of_stock(name: str, lowest: bool) -> None:
    plans = plans_of(name)
    expected, metadata = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest).create_global_plan(plans)
    found = global_plan(plans, to_lowest_rank=lowest, flattened=True)
    assert found is not None
    planned, own = found
    assert planned == expected
    assert [described(plan.items) for plan in planned] == [described(plan.items) for plan in expected]
    assert own == metadata
    assert list(own.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert list(own.planner_data) == list(metadata.planner_data)


def test_where_ranks_name_other_paths_the_first_one_counts() -> None:
    paths: list[dict[str, Any]] = [{"a": ("a",), "b": ("b",)}, {"a": (0,), "c": ("c",)}]
    plans = [SavePlan([], planner_data=one) for one in paths]
    _, metadata = DefaultSavePlanner().create_global_plan(plans)
    found = global_plan(plans, to_lowest_rank=False, flattened=True)
    assert found is not None
    assert list(found[1].planner_data.items()) == list(metadata.planner_data.items())
    assert found[1].planner_data["a"] == ("a",)


def test_without_flattening_there_are_no_paths() -> None:
    plans = [SavePlan([rows(0, 8)])]
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    found = global_plan(plans, to_lowest_rank=False, flattened=False)
    assert found is not None
    assert found[1] == metadata
    assert metadata.planner_data is None


def rows(first: int, count: int, total: int = 8, name: str = "w") -> WriteItem:
    return plain_item(name, torch.zeros(count, 4, dtype=torch.float32, device="cpu"), rows=(first, total))


def whole(name: str = "w") -> WriteItem:
    return plain_item(name, torch.zeros(8, 4, dtype=torch.float32, device="cpu"))


UNSOUND = {
    "a gap": ([rows(0, 3)], [rows(4, 4)]),
    "an overlap": ([rows(0, 5)], [rows(4, 4)]),
    "an overlap as large as a gap": ([rows(0, 4)], [rows(2, 4)]),
    "beyond the end": ([rows(0, 4)], [rows(6, 4)]),
    "an empty one within": ([rows(0, 8)], [rows(4, 0)]),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_what_stock_refuses_is_left_to_it(case: str) -> None:
    """Sound twins before and after it do not hide it."""
    plans = [SavePlan([rows(4 * rank, 4, name="sound"), *items, rows(4 * rank, 4, name="z")], planner_data={})
             for rank, items in enumerate(UNSOUND[case])]  # fmt: skip
    assert global_plan(plans, to_lowest_rank=False, flattened=True) is None
    with pytest.raises(ValueError, match="Failed to validate global plan"):
        DefaultSavePlanner().create_global_plan(plans)


def test_an_entry_of_two_kinds_is_left_to_stock() -> None:
    number = WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)
    for one, other in ((number, rows(0, 8)), (rows(0, 8), number), (whole(), rows(4, 4))):
        plans = [SavePlan([one], planner_data={}), SavePlan([other], planner_data={})]
        assert global_plan(plans, to_lowest_rank=False, flattened=True) is None


def test_an_incomplete_plan_of_one_rank_is_stocks_to_accept() -> None:
    """A rank that saves for itself writes its own pieces only."""
    plans = [SavePlan([rows(0, 4)], planner_data={})]
    assert global_plan(plans, to_lowest_rank=False, flattened=True) is None
    DefaultSavePlanner().create_global_plan(plans)


def test_the_planner_raises_what_stock_raises() -> None:
    planners = [QuantizedSavePlanner() for _ in range(2)]
    for planner in planners:
        planner.set_up_planner({}, None, is_coordinator=True)
    plans = [
        dataclasses.replace(planner.create_local_plan(), items=items)
        for planner, items in zip(planners, UNSOUND["a gap"], strict=True)
    ]
    plans = [
        dataclasses.replace(plan, planner_data=dataclasses.replace(plan.planner_data, kinds=bytes([255])))
        for plan in plans
    ]
    with pytest.raises(ValueError, match="Failed to validate global plan"):
        planners[0].create_global_plan(plans)


def test_byte_entries_and_write_items_have_no_other_fields_than_those_that_are_made() -> None:
    """Planned items are made of these; a field that a later torch adds would be lost."""
    assert [field.name for field in dataclasses.fields(WriteItem)] == ["index", "type", "bytes_io_data", "tensor_data"]
    assert [field.name for field in dataclasses.fields(MetadataIndex)] == ["fqn", "offset", "index"]
    assert not dataclasses.fields(BytesStorageMetadata)


def test_a_plan_is_linear_in_the_ranks_also_where_a_dim_that_is_not_cut_is_the_longest() -> None:
    """Stock compares every chunk with every other there."""
    costs = []
    for ranks in (16, 32, 64):
        pieces = [
            plain_item("w", torch.empty(1, 512, dtype=torch.uint8, device="meta"), rows=(rank, ranks))
            for rank in range(ranks)
        ]
        plans = [SavePlan([item], planner_data={}) for item in pieces]
        costs.append(bytecodes(lambda: global_plan(plans, to_lowest_rank=False, flattened=True)))  # noqa: B023
    assert_linear("a plan", costs)
