"""The layout "fp8": Float8 in blocks of 128 x 128, as DeepSeek's files have it; vLLM, SGLang and transformers read it.

A scale for each block, `weight_scale_inv` fp32 [ceil(N / 128), ceil(K / 128)], by which the weight is multiplied. Files
by others may hold scales that are powers of two in 8 bits, or one scale for a whole weight; such files are read, and
never written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.forms import ONE_A_BLOCK
from dcp_adapters.hf.layouts.layout import (
    GROUPS_OF_INPUTS,
    INPUT_SCALE,
    KINDS,
    Claims,
    Layout,
    Linears,
    Scheme,
    SchemeEntry,
    StoredAs,
)
from dcp_adapters.hf.layouts.registry import register_layout
from dcp_adapters.plain.words import names_in, short_each
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling

POWERS_OF_TWO = "ue8m0"  # what scale_fmt says
IGNORED = ("modules_to_not_convert", "ignored_layers")  # names of modules; this writes the first
_WEIGHT = StoredAs("payload", "weight")
_WHOLE = 'engines call such a scale by different names; use layout="compressed-tensors"'
BLOCKS = SchemeEntry(
    (_WEIGHT, StoredAs("scale", "weight_scale_inv", ONE_A_BLOCK, also=frozenset({"F8_E8M0"}))),
    {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
)


def _whole(scale: str, *inputs: str) -> tuple[Scheme, SchemeEntry]:
    """Return the scheme and entry of a weight with one scale, under the name that a tool gives that."""
    scheme = Scheme("fp8_tensor", "static" if inputs else "dynamic")
    stored = (_WEIGHT, StoredAs("scale", scale), *(StoredAs(INPUT_SCALE, name) for name in inputs))
    return scheme, SchemeEntry(stored, {"activation_scheme": scheme.inputs, "weight_block_size": None})


class Float8Blocks(Layout):
    """The JSON says one thing of all linears, and names those that are left alone."""

    def json(self, linears: Linears) -> dict[str, Any]:
        """Return what is the same for all linears; scales are called powers of two only if all of them are."""
        _check_ignored(self, linears)
        told: dict[str, Any] = {"quant_method": self.name, "fmt": "e4m3", **BLOCKS.config}
        recipes = [recipe for recipe in linears.recipes if isinstance(recipe, Float8BlockScaling)]
        if recipes and all(recipe.power_of_two for recipe in recipes):
            told["scale_fmt"] = POWERS_OF_TWO
        return {"config.json": {**told, IGNORED[0]: linears.names(linears.ignored)}}

    def claims(self, directory: Directory, said: Mapping[str, Any]) -> "Float8BlocksClaims":
        """Read what is said of all linears; refuse elements, blocks and scales of other kinds."""
        known = {
            "fmt": (None, "e4m3"),
            "activation_scheme": ("dynamic", "static"),
            "weight_block_size": (None, [BLOCK, BLOCK]),
            "scale_fmt": (None, "float", POWERS_OF_TWO),
        }
        for key, values in known.items():
            if said.get(key) not in values:
                expected = " or ".join(short_each(value) for value in values if value is not None)
                raise ValueError(
                    f"{directory.path}: the quantization_config of config.json says {key} {short_each(said.get(key))}, "
                    f"which the library does not read; expected {expected}"
                )
        ignored = frozenset(name for key in IGNORED for name in names_in(said.get(key)))
        blocks = Float8BlockScaling(power_of_two=said.get("scale_fmt") == POWERS_OF_TWO)
        return Float8BlocksClaims(layout=self, kinds={**KINDS, "fp8_block": blocks}, said=said, ignored=ignored)


def _check_ignored(layout: Layout, linears: Linears) -> None:
    """Refuse an ignored module whose name ends a quantized one's, or is that of a module around it."""
    every = linears.names(linears.ignored)
    for module in linears.names(linears.schemes):
        ignored = next((name for name in every if is_meant(name, module)), None)
        if ignored is not None:
            raise ValueError(
                f"{module}: engines that read the layout {layout.name} would take it for "
                f"{ignored or 'the model itself'}, which is not quantized, as its name ends with that name, or begins "
                'with it and a dot; quantize both or neither, or use layout="compressed-tensors"'
            )


def is_meant(ignored: str, module: str) -> bool:
    """Return whether a module is one that engines leave alone by this name."""
    return module.endswith(ignored) or module.startswith(f"{ignored}.")


@dataclass(frozen=True, kw_only=True)
class Float8BlocksClaims(Claims):
    """One scheme for all, but for the modules that are named as left alone (`ignored`)."""

    said: Mapping[str, Any]
    ignored: frozenset[str]

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """Compare all that is said with the scheme; a size must be said, since clients differ without one."""
        expected = next(entry.config for its, entry in self.layout.readable if its == scheme)
        problems = [
            f"{key} {short_each(self.said.get(key))}, expected {short_each(expected[key])}"
            for key in expected
            if self.said.get(key) != expected[key]
        ]
        if any(module == name or module.startswith(f"{name}.") for name in self.ignored):
            problems.append("that it is left alone")
        return f"config.json says {'; '.join(problems)}" if problems else None

    def left_alone_by(self, module: str) -> str | None:
        """Return a name that ends the module's, or is that of a module around it."""
        return next((name for name in sorted(self.ignored) if is_meant(name, module)), None)

    def said_of(self, module: str) -> str:
        """Return the size of the blocks."""
        size = self.said.get("weight_block_size")
        return "" if size is None else f"weight_block_size {short_each(size)}"


FP8 = Float8Blocks(
    name="fp8",
    schemes={Scheme("fp8_block", "dynamic"): BLOCKS},
    kv_scales={"k_scale": "k_scale", "v_scale": "v_scale"},
    lacks={
        Scheme("fp8_block", "static"): GROUPS_OF_INPUTS,
        Scheme("fp8_tensor", "static"): _WHOLE,
        Scheme("fp8_tensor", "dynamic"): _WHOLE,
    },
    also_reads=(
        _whole("weight_scale_inv"),
        _whole("weight_scale"),
        _whole("weight_scale_inv", "activation_scale"),
        _whole("weight_scale", "input_scale"),
    ),
)
register_layout(FP8)
