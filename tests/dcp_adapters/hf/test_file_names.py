"""Names in memory that are not those in the files: whose names a source has, by names alone."""

from __future__ import annotations

import pytest

from dcp_adapters.hf.models.file_names import FileNames, joined_names, names_of

Q, K, HEAD = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight", "lm_head.weight"
IN_FILES = {f"model.language_model.{name}": f"language_model.model.{name}" for name in (Q, K)}
NAMES = FileNames({**IN_FILES, HEAD: f"language_model.{HEAD}", "model.tower.0.weight": "tower.0.weight"})
HELD = frozenset(NAMES.in_files.values())


class TestFileNames:
    def test_what_is_beside_a_weight_goes_with_it(self) -> None:
        attention, its = "model.language_model.layers.0.self_attn", "language_model.model.layers.0.self_attn"
        for own in ("q_proj.input_scale", "k_scale", "v_scale", "q_proj.input_rotation"):
            assert NAMES.file_name(f"{attention}.{own}") == f"{its}.{own}"
            assert NAMES.memory_name(f"{its}.{own}") == f"{attention}.{own}"
        experts = FileNames({"model.mlp.experts.gate_up_proj": "model.moe.experts.w13"})
        assert experts.file_name("model.mlp.experts.gate_up_proj.input_scale") == "model.moe.experts.w13.input_scale"

    def test_an_unknown_name_stays(self) -> None:
        assert NAMES.file_name("model.other.weight") == NAMES.memory_name("model.other.weight") == "model.other.weight"

    @pytest.mark.parametrize(
        ("own", "expected"),
        [
            pytest.param(IN_FILES, IN_FILES, id="in memory"),
            pytest.param({name: name for name in HELD}, {name: name for name in HELD}, id="in the files"),
            pytest.param(
                {Q: 0, K: 0}, {name: f"language_model.model.{name}" for name in (Q, K)}, id="of a module inside"
            ),
            pytest.param(
                {f"policy.net.{name}": 0 for name in IN_FILES},
                {f"policy.net.{name}": other for name, other in IN_FILES.items()},
                id="of a module that holds the model",
            ),
            pytest.param(
                {f"policy.{name}": 0 for name in HELD}, {f"policy.{name}": name for name in HELD}, id="files, held"
            ),
            pytest.param({Q: 0, "value_head.weight": 0}, {Q: Q, "value_head.weight": "value_head.weight"}, id="mixed"),
        ],
    )
    def test_whose_names_they_are(self, own: dict[str, object], expected: dict[str, str]) -> None:
        assert names_of(list(own), NAMES, HELD) == expected

    def test_a_prefix_that_is_not_the_only_one_is_none(self) -> None:
        held = frozenset(f"{tower}.{Q}" for tower in ("text", "vision"))
        assert names_of([Q], FileNames(), held) == {Q: Q}


class TestJoinedNames:
    @pytest.mark.parametrize(
        ("leaves", "expected"), [(("w1", "w3"), "a.experts.w13"), (("w2",), "a.experts.w2")], ids=["two", "one"]
    )
    def test_all_experts(self, leaves: tuple[str, ...], expected: str) -> None:
        names = [f"a.experts.{number}.{leaf}.weight" for number in range(3) for leaf in leaves]
        assert joined_names(names, leaves) == expected

    @pytest.mark.parametrize(
        "names",
        [
            pytest.param(["a.experts.0.w2.weight", "a.experts.2.w2.weight"], id="one is missing"),
            pytest.param(["a.experts.0.w2.weight", "b.experts.1.w2.weight"], id="of two modules"),
            pytest.param(["a.experts.0.w2.bias"], id="no weight"),
            pytest.param(["a.experts.x.w2.weight"], id="no number"),
            pytest.param(["a.lists.0.w2.weight"], id="no experts"),
        ],
    )
    def test_others(self, names: list[str]) -> None:
        assert joined_names(names, ("w2",)) is None
