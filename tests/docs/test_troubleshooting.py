"""docs/troubleshooting.md quotes what the packages say: every heading is in the source, and most are earned here.

A message that is reworded fails the first test, one that its code no longer leads to the second.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.messages import HOLE, pattern, templates
from tests.docs.pages import page
from tests.docs.triggers_stored import TRIGGERS, earned
from tests.ranks import run_ranks

PAGE = page("troubleshooting.md")
TORCHS = {  # messages of torch that are met on the way
    "KeyError: <class …",  # with the rest, MkDocs takes it for a tag and leaves it out of the anchor
    "a leaf Variable that requires grad is being used in an in-place operation",
    "DTensor random operators may not have complete support on cpu device mesh",
    "FSDP does not support uneven sharding on dim …",
}
# Messages that need a fault or a model of their own; the tests that raise them, with words they look for.
RAISED_IN = {
    "the config's model has no such tensor": "tests/dcp_adapters/hf/test_renamed_models.py",
    "which would be written twice": "tests/dcp_adapters/hf/test_renamed_models.py",
    "say by rest=": "tests/dcp_adapters/hf/test_renamed_models.py",
    "traced through another version of qtensor": "tests/qtensor/test_graph_key.py",
    "would send dense values": "tests/fsdp_hooks/test_graph_fsdp.py",
    "use True or False": "tests/fsdp_hooks/test_refusals.py",
    "torch.compile failed": "tests/qtensor/test_kernels.py",
    "computes other bytes than the format defines": "tests/gpu_offline/test_proving.py",
    "is emulated on this device": "tests/qtensor/test_emulation.py",
    "to all ranks is not defined": "tests/fsdp_hooks/test_state_dict_apis.py",
    "its state is empty": "tests/qtensor/test_optim_states.py",
    "is not sound, nothing has been written": "tests/dcp_adapters/test_deep.py",
    "column cuts must fall": "tests/dcp_adapters/test_expand.py",
    "KeyError": "tests/dcp_adapters/test_entry_points.py",
    "the storage writer did not write it": "tests/dcp_adapters/test_faults.py",
    "its planner has been given to another save": "tests/dcp_adapters/test_async.py",
    "inputs that are rotated at run time": "tests/dcp_adapters/test_rotated_inputs.py",
    "snapshots are still alive": "tests/dcp_adapters/test_staging.py",
    "this entry of the checkpoint holds pickled objects": "tests/dcp_adapters/test_verified_load.py",
    "the checkpoint's .metadata is damaged": "tests/dcp_adapters/test_coverage.py",
    "Muon takes matrices [N, K] alone": "tests/fsdp_hooks/test_muon_ranks.py",
    "has a gradient on some ranks": "tests/fsdp_hooks/test_muon_ranks.py",
    "takes shards by themselves": "tests/fsdp_hooks/test_whole_matrix_optimizers.py",
    "lost the update": "tests/qtensor/test_lost_updates.py",
    "do not list the same weights": "tests/fsdp_hooks/test_exchange.py",
    "failed before the ranks could agree": "tests/fsdp_hooks/test_exchange.py",
    "theirs differ": "tests/dcp_adapters/hf/test_export.py",
    "the same format, or none": "tests/dcp_adapters/hf/test_plan.py",
    "and shares one": "tests/qtensor/test_shared_scales.py",
    "holds NaN": "tests/dcp_adapters/hf/test_export.py",
    "nothing is overwritten": "tests/dcp_adapters/hf/test_export.py",
    "can not be replaced": "tests/dcp_adapters/hf/test_export.py",
    "another save into the same directory": "tests/dcp_adapters/test_overwrite.py",
    "does not fit the model": "tests/dcp_adapters/hf/test_import.py",
    "calibration can not see": "tests/layerwise/statistics/test_statistics.py",
    "experts are shared out over ranks": "tests/layerwise/test_expert_parallel.py",
    "not positive definite": "tests/layerwise/algorithms/test_gptq.py",
    "differ between ranks": "tests/layerwise/test_runs.py",
    "computes something else when it is called alone": "tests/layerwise/strangers.py",
    "draws random numbers": "tests/layerwise/strangers.py",
    "changes something of its own in each call": "tests/layerwise/strangers.py",
    "which computes when the model asks it to": "tests/layerwise/strangers.py",
    "this compiled graph was traced through another version of qtensor": "tests/qtensor/test_graph_key.py",
}


def quoted() -> list[str]:
    """The headings that quote a message."""
    return [match[1] for heading in PAGE.headings if (match := re.fullmatch(r"`(.+)`", heading))]


def heading_with(words: str) -> str:
    found = [message for message in quoted() if words in message]
    assert len(found) == 1, (words, found)
    return found[0]


def test_what_is_quoted_is_in_the_source() -> None:
    assert len(quoted()) >= 50
    assert len({*quoted()}) == len(quoted())
    for message in quoted():
        assert not message.startswith("…") or len(message) > 20
        found = [text for text in templates() if pattern(message).search(text)]
        assert bool(found) != (message in TORCHS), message


def test_the_search_in_the_source_can_fail() -> None:
    assert HOLE in "".join(templates())
    assert not any(pattern("quantize_: include pattern … fits no nn.Linear").search(text) for text in templates())


def test_every_message_has_an_explanation() -> None:
    for message in quoted():
        entry = PAGE.text.split(f"### `{message}`\n", 1)[1].split("\n#", 1)[0].strip()
        assert len(entry.split()) > 8, message


def test_every_message_is_raised_by_some_test(shared_tmp_path: Path) -> None:
    own = {heading_with(words) for words in TRIGGERS}
    elsewhere = {heading_with(words) for words in RAISED_IN}
    assert own | elsewhere == {*quoted()}
    assert not own & elsewhere
    for rank, raised in enumerate(run_ranks(2, earned, shared_tmp_path)):
        assert raised.keys() == TRIGGERS.keys()
        for words, text in raised.items():
            assert pattern(heading_with(words)).search(text), f"rank {rank}: {words!r} earned {text!r}"


@pytest.mark.parametrize("words", RAISED_IN)
def test_the_others_are_raised_where_it_is_said(words: str) -> None:
    text = Path(__file__).resolve().parents[2].joinpath(RAISED_IN[words]).read_text(encoding="utf-8")
    assert words in text
