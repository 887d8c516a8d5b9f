"""The tool that changes the product: its changes, the tests that it asks, and how it judges."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adversary.mutation import __main__ as command
from tests.adversary.mutation import reach
from tests.adversary.mutation.mutants import Mutant, drawn, mutants_of
from tests.adversary.mutation.relevant import files_for, modules

REPO = Path(__file__).resolve().parents[2]
SOURCE = """
import torch

SIZE = 16


def cut(x: "list[2]", least, dtype=torch.float32):
    '''Not this 3.'''
    if x < least and least:
        raise ValueError("too few, expected 3")
    swap(x, least + 1)
    return [y.detach() for y in x if y == "é"]  # 4
"""
CHANGES = {
    ("off by one", "16", "17"),
    ("off by one", "1", "2"),
    ("dtype", "torch.float32", "torch.float64"),
    ("negated condition", "x < least and least", "(not (x < least and least))"),
    ("negated condition", 'y == "é"', "(not y == 'é')"),
    ("and, or", "x < least and least", "(x < least or least)"),
    ("comparison", "x < least", "(x <= least)"),
    ("comparison", 'y == "é"', "(y != 'é')"),
    ("removed statement", 'raise ValueError("too few, expected 3")', "pass"),
    ("removed statement", "swap(x, least + 1)", "pass"),
    ("swapped argument", "swap(x, least + 1)", "(swap(least + 1, x))"),
    ("arithmetic", "least + 1", "(least - 1)"),
    ("dropped call", "y.detach()", "(y)"),
}


def test_changes_are_what_runs_and_nothing_else():
    found = mutants_of("m.py", SOURCE)
    assert {(each.operator, each.before, each.after) for each in found} == CHANGES
    for each in found:
        changed = each.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), each
        assert changed.count("\n") == SOURCE.count("\n")
    assert len({each.key for each in found}) == len(found)


def test_a_seed_draws_the_same_mutants_of_all_kinds(tmp_path):
    (tmp_path / "m.py").write_text(SOURCE, encoding="utf-8")
    first = drawn(tmp_path, ["m.py"], 3, 8)
    assert first == drawn(tmp_path, ["m.py"], 3, 8) != drawn(tmp_path, ["m.py"], 4, 8)
    assert len(drawn(tmp_path, ["m.py"], 3, 99)) == len(CHANGES)


def test_parts_are_all_mutants_once():
    parts = [command._options(["--part", f"{number}/3"]).part(range(8)) for number in (1, 2, 3)]
    assert sorted(each for part in parts for each in part) == list(range(8))
    for wrong in ("0/2", "3/2", "half"):
        with pytest.raises(SystemExit):
            command._options(["--part", wrong])


def test_every_module_is_asked_of_tests_that_are_there():
    found = modules(REPO)
    assert {"qtensor/formats/mxfp8.py", "fsdp_hooks/ranks/exchange.py", "dcp_adapters/load/planner.py"} <= set(found)
    for module in found:
        files = files_for(REPO, module)
        assert files, module
        assert all((REPO / file).is_file() for file in files)
    assert "tests/qtensor/test_batches.py" in files_for(REPO, "qtensor/optim/batches.py")
    assert "tests/fsdp_hooks/test_exchange.py" in files_for(REPO, "fsdp_hooks/ranks/exchange.py")


NESTED = """
def f(x):
    if (x and
            x > 1):
        return g(
            x,
        )
    return [
        x
    ]
"""


def test_a_line_stands_for_its_statement():
    assert [list(reach.statement_at(NESTED, line)) for line in (3, 4, 6, 9)] == [[3, 4], [3, 4], [5, 6, 7], [8, 9, 10]]
    assert list(reach.statement_at(NESTED, 2)) == [2]
    assert list(reach.statement_at(NESTED, 1)) == [1]


def test_quick_tests_of_different_files_are_asked_first_and_not_for_ever():
    seconds = {"a.py::one": 1.0, "a.py::two": 2.0, "b.py::one": 9.5, "c.py::long": 25.0, "d.py::longer": 500.0}
    turn = reach.by_file_in_turn(seconds, seconds)
    assert turn == ["a.py::one", "b.py::one", "c.py::long", "d.py::longer", "a.py::two"]
    groups = reach.in_steps(turn, seconds)
    assert groups == [["a.py::one"], ["b.py::one"], ["c.py::long"]]
    assert reach.in_steps(["d.py::longer"], seconds) == [["d.py::longer"]]
    assert reach.in_steps([], seconds) == []
    known = reach.Reach(seconds, {"m.py": {8: ["a.py::two"], 9: ["a.py::one"], 3: ["b.py::one"]}})
    line_9 = Mutant("m.py", 9, "", "x", "y", 0, 1)
    assert known.groups(line_9, NESTED) == [["a.py::one", "a.py::two"]]
    assert known.groups(replace(line_9, line=5), NESTED) == []
    assert known.groups(replace(line_9, module="n.py"), NESTED) == []


@pytest.mark.full
def test_what_runs_in_ranks_counts_as_run_by_their_test(tmp_path):
    test = "tests/fsdp_hooks/test_unsharded.py::test_a_group_that_keeps_its_weights_after_forward_goes_on_doing_so"
    reach.record(REPO, tmp_path / "reach.json", [test], jobs=1)
    known = reach.Reach.read(tmp_path / "reach.json")
    assert list(known.seconds) == [test]
    source = (REPO / "fsdp_hooks/unshard.py").read_text(encoding="utf-8")
    inside = source[: source.index("def _insist_on_reshard")].count("\n") + 3
    assert known.lines["fsdp_hooks/unshard.py"][inside] == [test]


RUN = """
import sys
from pathlib import Path
from tests.adversary.mutation.mutants import mutants_of
from tests.adversary.mutation.running import copy_of, run

root = Path(sys.argv[1])
with copy_of(root) as tree:
    assert run(tree, None, ["tests/test_m.py"], 60).by == ""
    for mutant in mutants_of("qtensor/m.py", (root / "qtensor/m.py").read_text()):
        print(mutant.before, "->", mutant.after, ":", run(tree, mutant, ["tests/test_m.py"], 60).by)
    assert run(tree, None, ["tests/test_m.py", "tests/test_long.py"], 3).by == "timeout"
    assert (tree.path / "qtensor/m.py").read_text() == (root / "qtensor/m.py").read_text()
"""


@pytest.mark.full
def test_a_change_that_a_test_notices_is_killed_and_the_tree_is_as_it_was(tmp_path):
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
        "qtensor/__init__.py": "",
        "qtensor/m.py": "def most(a, b):\n    return a if a > b else b\n\n\nLIMIT = 7\n",
        "tests/__init__.py": "",
        "tests/test_m.py": "from qtensor.m import most\n\n\ndef test_it():\n    assert most(1, 2) == most(2, 1) == 2\n",
        "tests/test_long.py": "import time\n\n\ndef test_it():\n    time.sleep(100)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=REPO, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "7 -> 8 : ",
        "a > b -> (a >= b) : ",
        "a > b -> (not a > b) : tests/test_m.py::test_it",
    ]


def test_the_score_counts_what_is_in_the_file(tmp_path, capsys):
    results = tmp_path / "mutants.jsonl"
    mutant = mutants_of("qtensor/m.py", SOURCE)[0].to_json()
    lines = [
        {**mutant, "outcome": "survived", "by": "", "files": ["tests/a.py"], "seconds": 1.0},
        {**mutant, "key": "1", "outcome": "killed", "by": "tests/a.py::b", "files": ["tests/a.py"], "seconds": 1.0},
        {**mutant, "key": "2", "outcome": "timeout", "by": "timeout", "files": ["tests/a.py"], "seconds": 1.0},
        {"key": "tests/a.py", "outcome": "baseline", "by": "", "seconds": 1.0},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command.main(["--survivors", "--results", str(results)]) == 0
    told = capsys.readouterr().out
    assert "2 of 3 mutants killed (1 by taking too long)" in told
    assert "qtensor/m.py:4 off by one" in told
