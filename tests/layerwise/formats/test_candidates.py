"""What gets one format, how many bits it takes, and how errors of different linears are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerwise.formats.candidates import LinearErrors, Menu, Weight, bits_of, candidates_of, fits, least_bits, together
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.recipes import TABLE

NVFP4, MXFP8, ROW = NVFP4BlockScaling(), MXFP8BlockScaling(), Float8CurrentScaling()
MENU = Menu((NVFP4, MXFP8, None))


def weight(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Weight:
    linears = (name,) if len(shape) == 2 else tuple(f"{name}[{expert}]" for expert in range(shape[0]))
    return Weight(name, torch.Size(shape), dtype, linears)


def measured(name: str, signal: float, *noise: float | None, tokens: int = 10) -> dict[str, LinearErrors]:
    return {name: LinearErrors(name, tokens, signal, noise)}


@pytest.mark.parametrize("facts", [one for one in TABLE if not one.history], ids=lambda one: one.name)
def test_bits_are_those_of_the_stored_parts(facts: Any) -> None:
    for shape in ((128, 256), (2, 128, 128)):
        q: Any = quantize(torch.zeros(shape, dtype=torch.bfloat16, device="cpu"), facts.recipe)
        stored = sum(part.numel() * part.itemsize for part in q.parts().values())
        assert bits_of(weight("w", *shape), facts.recipe) == 8 * stored


def test_dense_bits_are_those_of_the_dtype() -> None:
    assert bits_of(weight("w", 3, 5), None) == 15 * 16
    assert bits_of(weight("w", 3, 5, dtype=torch.float32), None) == 15 * 32


def test_what_engines_fuse_is_together() -> None:
    names = [
        *("l.0.attn.q_proj", "l.0.attn.k_proj", "l.0.attn.v_proj", "l.0.attn.o_proj"),
        *("l.0.mlp.up_proj", "l.0.mlp.gate_proj", "l.0.mlp.down_proj", "l.1.mlp.up_proj", "l.1.mlp.gate_proj"),
        *("l.2.mlp.experts.0.up_proj", "l.2.mlp.experts.0.down_proj", "l.2.mlp.experts.11.up_proj"),
        *("l.2.mlp.shared_expert.gate_proj", "l.2.mlp.shared_expert.up_proj", "l.2.mlp.shared_expert.down_proj"),
    ]
    weights = [weight(f"{name}.weight", 4, 64) for name in names]
    weights += [weight("l.3.mlp.experts.gate_up_proj", 2, 8, 64), weight("l.3.mlp.experts.down_proj", 2, 64, 32)]
    sets = [[one.name.removesuffix(".weight") for one in group] for group in together(weights)]
    assert sets == [
        names[:3],
        [names[3]],
        names[4:6],
        [names[6]],
        names[7:9],
        names[9:12],
        names[12:14],
        [names[14]],
        ["l.3.mlp.experts.gate_up_proj", "l.3.mlp.experts.down_proj"],
    ]


def test_a_recipe_must_fit_all_of_a_group() -> None:
    """K = 48 is no multiple of MXFP8's 32, and is one of NVFP4's 16."""
    assert fits((4, 48), NVFP4)
    assert not fits((4, 48), MXFP8)
    weights = [weight("a.gate_proj.weight", 4, 64), weight("a.up_proj.weight", 4, 48)]
    found = measured("a.gate_proj.weight", 1.0, 0.1, 0.01, 0.0) | measured("a.up_proj.weight", 1.0, 0.2, None, 0.0)
    (group,) = candidates_of(weights, MENU, found)
    assert [one.recipe for one in group.candidates] == [NVFP4, None]
    assert group.weights == 4 * (64 + 48)
    assert [one.error for one in group.candidates] == [0.1 + 0.2, 0.0]
    with pytest.raises(ValueError, match=r"no recipe fits a\.weight \(4, 20\); add None to recipes"):
        least_bits([weight("a.weight", 4, 20)], Menu((NVFP4, MXFP8)))


def test_errors_do_not_depend_on_the_scale_of_an_output() -> None:
    """What multiplies a linear's output by 8, and the next module's input by 1/8, changes no relative error."""
    weights = [weight("v_proj.weight", 4, 64), weight("o_proj.weight", 4, 64)]
    plain = measured("v_proj.weight", 3.0, 0.5, 0.25, 0.0) | measured("o_proj.weight", 5.0, 0.25, 0.125, 0.0)
    scaled = measured("v_proj.weight", 3.0 * 64, 0.5 * 64, 0.25 * 64, 0.0) | measured(
        "o_proj.weight", 5.0, 0.25, 0.125, 0.0
    )
    assert candidates_of(weights, MENU, plain) == candidates_of(weights, MENU, scaled)
    absolute = candidates_of(weights, MENU, scaled, "absolute")
    assert [one.error for one in absolute[0].candidates] == [32.0, 16.0, 0.0]


def test_experts_count_by_their_tokens() -> None:
    """One role is one linear: energies over all tokens, so an expert that no token reached does not count."""
    stack = weight("m.experts.up_proj", 2, 4, 64)
    found = measured("m.experts.up_proj[0]", 2.0, 1.0, 0.0, 0.0, tokens=30)
    found |= measured("m.experts.up_proj[1]", 4.0, 4.0, 0.0, 0.0, tokens=10)
    assert candidates_of([stack], MENU, found)[0].candidates[0].error == (30 * 1.0 + 10 * 4.0) / (30 * 2.0 + 10 * 4.0)
    listed = [weight(f"m.experts.{expert}.up_proj.weight", 4, 64) for expert in (0, 1)]
    found = measured(listed[0].name, 2.0, 1.0, 0.0, 0.0, tokens=30) | measured(
        listed[1].name, 4.0, 4.0, 0.0, 0.0, tokens=0
    )
    assert candidates_of(listed, MENU, found)[0].candidates[0].error == 0.5
    found |= measured(listed[0].name, 2.0, 1.0, 0.0, 0.0, tokens=0)  # nobody reached: their weights alone
    assert candidates_of(listed, MENU, found)[0].candidates[0].error == (1.0 + 4.0) / (2.0 + 4.0)


def test_nothing_comes_out_of_a_linear() -> None:
    found = measured("a.weight", 0.0, 0.0, 1e-9, 0.0)
    assert [one.error for one in candidates_of([weight("a.weight", 4, 64)], MENU, found)[0].candidates] == [0, 1.0, 0]


def test_menus() -> None:
    with pytest.raises(TypeError, match="recipes has 'mxfp8'; expected recipes"):
        Menu(("mxfp8",))  # type: ignore[arg-type]
    for empty in ((), (None,)):
        with pytest.raises(ValueError, match="recipes has no recipe"):
            Menu(empty)
    with pytest.raises(ValueError, match=r"recipes has MXFP8BlockScaling\(.*\) twice"):
        Menu((MXFP8, ROW, MXFP8BlockScaling()))
