"""The layout of gpt-oss (quant_method "mxfp4"), which transformers and vLLM read: MXFP4 weights of all experts, whole.

    <module>.experts.gate_up_proj_blocks   the payload, its bytes in groups of 16: [E, 2 I, H / 32, 16]
    <module>.experts.gate_up_proj_scales   the scales, [E, 2 I, H / 32]
    <module>.experts.down_proj_blocks, down_proj_scales, and biases beside them

The rows are those of a linear, [E, N, K]; transformers' own dense weights are their transpose, [E, K, N]. Rows of gate
and up alternate. Everything else is dense.
"""

from typing import Any

from dcp_adapters.hf.layouts.layout import BLOCKS, Layout, Linears, Scheme, SchemeEntry, StoredAs, register_layout

SCHEMES = {
    Scheme("mxfp4", "none"): SchemeEntry((StoredAs("payload", "_blocks", BLOCKS), StoredAs("scale", "_scales")), {}),
}


def _json(layout: Layout, linears: Linears) -> dict[str, Any]:
    """What is not quantized."""
    return {"config.json": {"quant_method": layout.name, "modules_to_not_convert": list(linears.ignored)}}


GPT_OSS = Layout(
    name="mxfp4",
    schemes=SCHEMES,
    kv_scales={},
    json=_json,
    experts="all",
    models=frozenset({"gpt_oss"}),
)
register_layout(GPT_OSS)
