"""What config.json says in layouts whose JSON says one thing of all linears, and names those that are left alone.

See claims.py for what a class of claims does; those of layouts with groups of linears are there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.fp8 import FP8, IGNORED, POWERS_OF_TWO
from dcp_adapters.hf.layouts.gpt_oss import GPT_OSS
from dcp_adapters.hf.layouts.layout import KINDS, Layout, Scheme
from dcp_adapters.plain.words import short, short_each
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling
from qtensor.spec.recipes import Recipe

# -- fp8 ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FP8Claims:
    """One scheme for all, but for the modules that are named as left alone."""

    said: Mapping[str, Any]
    ignored: frozenset[str]
    kinds: Mapping[str, Recipe]
    kv_cache: str | None = None
    layout: Layout = FP8

    @staticmethod
    def of(directory: Directory, said: Mapping[str, Any]) -> "FP8Claims":
        """The claims of a quantization_config. Raises ValueError for elements, blocks and scales of other kinds."""
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
        names = [name for key in IGNORED for name in _names(said.get(key))]
        power_of_two = said.get("scale_fmt") == POWERS_OF_TWO
        return FP8Claims(said, frozenset(names), {**KINDS, "fp8_block": Float8BlockScaling(power_of_two=power_of_two)})

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """All that is said must be of the scheme, and a size must be said: without one, clients differ."""
        expected = next(entry.config for its, entry in self.layout.readable if its == scheme)
        problems = [
            f"{key} {short_each(self.said.get(key))}, expected {short_each(expected[key])}"
            for key in expected
            if self.said.get(key) != expected[key]
        ]
        if any(module == name or module.startswith(f"{name}.") for name in self.ignored):
            problems.append("that it is left alone")
        return f"config.json says {'; '.join(problems)}" if problems else None

    def said_of(self, module: str) -> str:
        """The size of the blocks."""
        size = self.said.get("weight_block_size")
        return "" if size is None else f"weight_block_size {short_each(size)}"


def _names(said: Any) -> list[str]:
    """The names in a list of them; none where nothing is said."""
    return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []


# -- gpt-oss -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GptOssClaims:
    """Experts are quantized, but for those in modules that are named."""

    left: list[str]
    kv_cache: str | None = None
    layout: Layout = GPT_OSS
    kinds: Mapping[str, Recipe] = field(default_factory=lambda: KINDS)

    @staticmethod
    def of(directory: Directory, said: Mapping[str, Any]) -> "GptOssClaims":
        """The claims of a quantization_config. Raises ValueError for a malformed one."""
        left = said.get("modules_to_not_convert") or []
        if not isinstance(left, list) or not all(isinstance(name, str) for name in left):
            raise ValueError(
                f"{directory.path}: the modules_to_not_convert of config.json are {short(left)}, expected names"
            )
        return GptOssClaims(left)

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """A module that is named there, or is inside of one, is not quantized."""
        named = next((name for name in self.left if fnmatchcase(f"{module}.", f"{name}.*")), None)
        return None if named is None else f"config.json says by modules_to_not_convert that {named} is not quantized"

    def said_of(self, module: str) -> str:
        """Nothing."""
        return ""
