"""The layout of gpt-oss (quant_method "mxfp4"), which transformers and vLLM read: MXFP4 weights of all experts, whole.

    <module>.experts.gate_up_proj_blocks   the payload, its bytes in groups of 16: [E, 2 I, H / 32, 16]
    <module>.experts.gate_up_proj_scales   the scales, [E, 2 I, H / 32]
    <module>.experts.down_proj_blocks, down_proj_scales, and biases beside them

The rows are those of a linear, [E, N, K]; transformers' own dense weights are their transpose, [E, K, N]. Rows of gate
and up alternate. Everything else is dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.forms import BLOCKS
from dcp_adapters.hf.layouts.layout import Claims, Layout, Linears, Scheme, SchemeEntry, StoredAs
from dcp_adapters.hf.layouts.registry import register_layout
from dcp_adapters.plain.words import short

SCHEMES = {
    Scheme("mxfp4", "none"): SchemeEntry((StoredAs("payload", "_blocks", BLOCKS), StoredAs("scale", "_scales")), {}),
}


class GptOss(Layout):
    """Only experts are quantized, and the JSON says which are not."""

    def json(self, linears: Linears) -> dict[str, Any]:
        """Name what is not quantized; experts are quantized without being named."""
        return {"config.json": {"quant_method": self.name, "modules_to_not_convert": list(linears.ignored)}}

    def claims(self, directory: Directory, said: Mapping[str, Any]) -> "GptOssClaims":
        """Read the names of what is not quantized; refuse anything but names."""
        left = said.get("modules_to_not_convert") or []
        if not isinstance(left, list) or not all(isinstance(name, str) for name in left):
            raise ValueError(
                f"{directory.path}: the modules_to_not_convert of config.json are {short(left)}, expected names"
            )
        return GptOssClaims(layout=self, left=left)


@dataclass(frozen=True, kw_only=True)
class GptOssClaims(Claims):
    """Experts are quantized, but for those in modules that are named (`left`)."""

    left: list[str]

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """Say that a module is named as not quantized, or is inside of such a module."""
        named = self.left_alone_by(module)
        return None if named is None else f"config.json says by modules_to_not_convert that {named} is not quantized"

    def left_alone_by(self, module: str) -> str | None:
        """Return a name or pattern that means the module, or one around it."""
        return next((name for name in self.left if fnmatchcase(f"{module}.", f"{name}.*")), None)

    def means_linear(self, module: str) -> bool:
        """Return False: weights of all experts are quantized, and no linear is."""
        return False


GPT_OSS = GptOss(name="mxfp4", schemes=SCHEMES, experts="all", models=frozenset({"gpt_oss"}))
register_layout(GPT_OSS)
