"""Scales that engines share, or divide by: those of inputs, of linears that are fused, of the KV cache.

Decided for a plan, from names and values alone; what engines could not use is refused here, all of a kind in one error.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import nn

from dcp_adapters.hf.files.engine_names import Piece, fused_sets
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KV_SCALES, Layout, Scheme
from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from fsdp_hooks.wrappers import ModulePlace, places


def scale_entries(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, list[str]]:
    """Map an `input_scale` entry to the modules whose inputs it scales; experts have one for all, or one each."""
    together = {
        f"{name}.{INPUT_SCALE}": [piece.module for piece in those]
        for name, those in pieces.items()
        if those[0].expert is not None
    }
    each = (piece.module for those in pieces.values() for piece in those)
    return together | {f"{module}.{INPUT_SCALE}".lstrip("."): [module] for module in each}  # of a single linear


def input_scales(
    pieces: Mapping[str, Sequence[Piece]],
    entries: Mapping[str, Sequence[str]],
    scales: Mapping[str, float],
    also: Mapping[str, str],
) -> dict[str, float]:
    """Map each module to the scale of its inputs; fused ones get the largest, as their input is one."""
    own = {module: scales[entry] for entry, modules in entries.items() if entry in scales for module in modules}
    unusable = [module for module, value in own.items() if not (math.isfinite(value) and value > 0)]
    if unusable:
        raise ValueError(
            f"{few_of(unusable)}: input_scale is {own[unusable[0]]}, which engines divide by; calibrate it "
            "again, or leave it out"
        )
    shared: dict[str, float] = {}
    for members in fused_sets((piece.module for those in pieces.values() for piece in those), also):
        known = [own[module] for module in members if module in own]
        if known:
            shared |= dict.fromkeys(members, max(known))
    return shared


def check_fused(schemes: Mapping[str, Scheme], ignored: Sequence[str], also: Mapping[str, str]) -> None:
    """Refuse linears that engines fuse and that are quantized in different ways."""
    for members in fused_sets([*schemes, *ignored], also):
        found = {str(schemes.get(module, "not quantized")) for module in members}
        if len(found) > 1:
            told = ", ".join(f"{module}: {schemes.get(module, 'not quantized')}" for module in members)
            raise ValueError(f"{told}: engines run these as one linear; give all of them the same format, or none")


def renewed_scales(
    owners: Mapping[str, str],
    schemes: Mapping[str, Scheme],
    scales: Mapping[str, float],
    also: Mapping[str, str],
    *,
    requantize: bool,
) -> dict[str, float]:
    """Map weights to the global scale to requantize them under, for fused linears that do not share theirs."""
    renewed: dict[str, float] = {}
    apart = []
    for members in fused_sets((module for module in owners if schemes[module].kind == "nvfp4"), also):
        names = list(dict.fromkeys(owners[module] for module in members))
        largest = max(scales[name] for name in names)
        # Under a smaller scale the largest values would no longer fit.
        other = {name: largest for name in names if scales[name] != largest}
        if other:
            apart.append(names)
            renewed |= other
    if apart and not requantize:
        sets = (", ".join(f"{name} {scales[name]:.6g}" for name in names) for names in apart)
        told = few_of(sets, 3, between="; ")
        raise ValueError(
            f"engines run these as one linear with one global scale, and theirs differ: {told}. Calibrate them "
            "together (layerwise.calibrate gives them one), train them together (qtensor.share_scales, and "
            "fsdp_hooks.sync_scales after the last write), or allow them to be rounded again under the larger scale: "
            'fused_scales="requantize" (--fused-scales requantize)'
        )
    return renewed


def fused_linears(model: nn.Module) -> list[list[str]]:
    """Return the linears of a model that inference engines run as one, by the names of their modules, set by set.

    The names are those of `named_modules()`: with the steps into wrappers (of torch.compile, peft and the like) that
    are around a module. Which linears belong together is told without these steps.

    q_proj, k_proj and v_proj of an attention; gate_proj and up_proj, or w1 and w3, of an MLP or an expert; q_a_proj and
    kv_a_proj_with_mqa of latent attention. `qtensor.share_scales(model, fused_linears(model))` gives the weights of
    each set one NVFP4 global scale, with which `export_hf` keeps their bytes.

    Example:
        ```python
        >>> mlp = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("gate_proj", "up_proj", "down_proj")})
        >>> fused_linears(nn.ModuleDict({"mlp": mlp}))
        [['mlp.gate_proj', 'mlp.up_proj']]
        ```
    """
    # By identity: a module that stands in two places is one linear.
    found: dict[int, ModulePlace] = {}
    for place in places(model):
        if isinstance(place.module, nn.Linear) and not place.adapter:
            found.setdefault(id(place.module), place)
    linears = {place.name: place.path for place in found.values()}
    return [[linears[name] for name in members] for members in fused_sets(linears) if len(members) > 1]


def kv_granularity(
    attentions: Mapping[str, Mapping[str, str]], records: Mapping[str, Entry], layout: Layout
) -> Literal["tensor", "head"] | None:
    """Tell what has scales of the KV cache: each attention, each of its heads, or nothing.

    Raises:
        ValueError: the layout has no such scales; attentions have different ones.
    """
    if attentions and not layout.kv_scales:
        raise ValueError(
            f"{few_of(attentions)}: the layout {layout.name} has no scales of the KV cache; leave them out"
        )
    shapes = {entry: records[entry].shape for entries in attentions.values() for entry in entries.values()}
    of_heads = [entry for entry, shape in shapes.items() if shape not in ((), (1,))]
    if not of_heads:
        return "tensor" if attentions else None
    if layout.kv_heads is None:
        raise ValueError(
            f"{few_of(of_heads)}: a scale for each head, and the layout {layout.name} has one for all heads of an "
            'attention; calibrate with granularity="tensor", or use layout="compressed-tensors"'
        )
    single = [entry for entry, shape in shapes.items() if len(shape) != 1]
    if single:
        raise ValueError(
            f"{few_of(of_heads)}: a scale for each head, and {single[0]} has the shape {list(shapes[single[0]])}; "
            "engines have one of the two everywhere: calibrate all attentions alike"
        )
    return "head"


def kv_attentions(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Map attentions to {"k_scale": its entry, "v_scale": ...}; the entries are `<attention>[.k_proj].k_scale`."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        if own in KV_SCALES:
            # ModelOpt has them inside of k_proj and v_proj, other layouts beside these.
            attention = parent.removesuffix(f".{own[0]}_proj")
            found.setdefault(attention, {})[own] = name
    for attention, entries in found.items():
        missing = [own for own in KV_SCALES if own not in entries]
        if missing:
            raise ValueError(f"{attention} has no {missing[0]} beside its {next(iter(entries))}; engines need both")
    return found
