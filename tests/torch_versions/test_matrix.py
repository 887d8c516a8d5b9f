"""The page on versions holds what the runs came to."""

from __future__ import annotations

import json

from tests.torch_versions.matrix import PAGE, PROVEN, RESULTS, page


def test_the_page_holds_the_results() -> None:
    text = PAGE.read_text()
    assert page(text, json.loads(RESULTS.read_text())) == text


def test_the_page_names_the_versions_under_which_all_tests_ran() -> None:
    ran = [version for version, row in sorted(json.loads(RESULTS.read_text()).items()) if row["tests"] == "all"]
    text = " ".join(PAGE.read_text().split())
    assert f"All tests passed with torch {', '.join(ran[:-1])} and {ran[-1]}, " in text


def test_no_version_in_the_table_has_a_failure() -> None:
    results = json.loads(RESULTS.read_text())
    assert results.keys() <= PROVEN.keys()
    for version, row in results.items():
        assert row["failed"] == 0, version
        assert row["passed"] > 1000, version
        assert row["tests"] == ("touched" if PROVEN[version] else "all"), version
