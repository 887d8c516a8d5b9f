"""What a layout is: the tensors in the file for each kind of quantized linear, and the JSON that describes them.

    Scheme     how one linear is quantized: the kind of its weight, and what becomes of its inputs
    Form       how a part looks in the file: as it is, as one value in a 1-dim tensor, as its reciprocal, ...
    StoredAs   one tensor of a linear, `<module>.<name>`: which part it is, in which form
    Layout     the table scheme -> tensors and JSON, and the function that makes the files of JSON from it

A layout is data, in a file of its own that registers it. Writing follows the tables from parts to files, reading from
files to parts; claims.py also compares its JSON when a directory is read.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.formats.int4 import GROUPS, Int4GroupScaling
from qtensor.formats.mxfp4 import MXFP4BlockScaling
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.formats.nvfp4 import NVFP4BlockScaling
from qtensor.spec.recipes import Recipe

INPUT_SCALE = "input_scale"  # not a part of the weight; calibrated beside it, under `<module>.input_scale`
KV_SCALES = ("k_scale", "v_scale")  # likewise, of what attentions cache
GROUPS_OF_INPUTS = "its engines scale every 128 columns of an input anew: leave the input scales out"
SHAPE = "shape"  # not a part either; the logical shape of the weight, as whole numbers
RECIPES = "qtensor.recipes"  # in the metadata of a file: JSON {weight: its recipe}, where that is not KINDS[kind]
Inputs = Literal["none", "dynamic", "static"]

# The recipe of each kind as files describe it; to an engine, other recipes that decode alike are the same.
KINDS: Mapping[str, Recipe] = {
    "fp8_tensor": Float8CurrentScaling(granularity="tensor"),
    "fp8_row": Float8CurrentScaling(granularity="row"),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    **{f"int4_{group}": Int4GroupScaling(group=group) for group in GROUPS},
}
# Inputs of a linear without a calibrated scale: quantized on the fly, or, where that needs one, left as they are.
UNCALIBRATED: Mapping[str, Inputs] = {
    "fp8_tensor": "dynamic",
    "fp8_row": "dynamic",
    "fp8_block": "dynamic",
    "mxfp8": "dynamic",
    "nvfp4": "none",
    "mxfp4": "none",
    **{f"int4_{group}": "none" for group in GROUPS},
}


@dataclass(frozen=True)
class Scheme:
    """How one linear is quantized.

    kind: a key of KINDS. inputs: "none", they stay as they are; "dynamic", quantized on the fly; "static", under a
    calibrated `input_scale`.
    """

    kind: str
    inputs: Inputs

    @staticmethod
    def of(kind: str, *, calibrated: bool) -> "Scheme":
        """The scheme of a linear, with or without an `input_scale`."""
        return Scheme(kind, "static" if calibrated else UNCALIBRATED[kind])

    def __str__(self) -> str:
        return f"{self.kind} weights with {'unquantized' if self.inputs == 'none' else self.inputs} inputs"


def kind_of(recipe: Recipe) -> str | None:
    """The kind under which engines decode what was quantized under `recipe`; None where they have none."""
    if getattr(recipe, "element", "e4m3") != "e4m3":
        return None
    if isinstance(recipe, Float8DelayedScaling):
        return "fp8_tensor"
    if isinstance(recipe, Float8BlockScaling) and recipe.blocks != "square":
        return None
    if isinstance(recipe, Float8CurrentScaling):
        return f"fp8_{recipe.granularity}"
    if isinstance(recipe, Int4GroupScaling):
        return f"int4_{recipe.group}"
    return next((kind for kind, other in KINDS.items() if type(other) is type(recipe)), None)


@dataclass(frozen=True)
class Form:
    """How a part looks in the file.

    shape: the part's shape -> the file's. write, read: the part -> what the file holds, and back. columns: how many
    columns of the part one of the file's stands for. rows: how many rows of the part, all equal, one row of the file
    stands for; `read` gives one row for them. dtype: the file's; None: the part's.
    """

    shape: Callable[[Sequence[int]], tuple[int, ...]]
    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]
    columns: int = 1
    rows: int = 1
    dtype: torch.dtype | None = None


def reciprocal(value: Tensor) -> Tensor:
    """The fp32 number whose reciprocal is `value`, where there is one; else the one nearest to 1 / value.

    So reading gives back what was written. Global scales are such reciprocals (of 2688 / amax); a value between two
    reciprocals comes back as the nearer one, and does not change again.
    """
    nearest = torch.reciprocal(value.float())
    for step in (0, 1, -1):
        candidate = (nearest.view(torch.int32) + step).view(torch.float32)
        if torch.equal(torch.reciprocal(candidate), value.float()):
            return candidate
    return nearest


def _little_endian() -> None:
    """Refuse a machine on which the bytes of a word are not in the order in which files have them."""
    if sys.byteorder != "little":
        raise NotImplementedError(
            "codes in words of 32 bits (pack-quantized): this machine stores the highest byte of a word first, and the "
            "codes would be out of order; use a little-endian machine"
        )


def _as_words(part: Tensor) -> Tensor:
    _little_endian()
    return part.contiguous().view(torch.int32)


def _as_bytes(stored: Tensor) -> Tensor:
    _little_endian()
    return stored.contiguous().view(torch.uint8)


SAME = Form(shape=tuple, write=lambda part: part, read=lambda stored: stored)
ONE = Form(shape=lambda shape: (1,), write=lambda part: part.reshape(1), read=lambda stored: stored.reshape(()))
FLAT = Form(
    shape=lambda shape: tuple(shape[:-1]),
    write=lambda part: part.squeeze(-1),
    read=lambda stored: stored.unsqueeze(-1),
)
ONE_A_BLOCK = Form(  # of scales [N, blocks along K] of square blocks
    shape=lambda shape: (-(-shape[0] // BLOCK), *shape[1:]),
    write=lambda part: part[::BLOCK],
    read=lambda stored: stored,
    rows=BLOCK,
)
ONE_OVER = Form(
    shape=lambda shape: (1,),
    write=lambda part: reciprocal(part).reshape(1),
    read=lambda stored: torch.reciprocal(stored.float()).reshape(()),
)
# Four bytes a word, the first one lowest: eight codes of 4 bits, the first code lowest.
WORDS = Form(
    shape=lambda shape: (*shape[:-1], shape[-1] // 4), write=_as_words, read=_as_bytes, columns=4, dtype=torch.int32
)
# The bytes of each 32-block of 4-bit codes in a dim of their own.
BLOCKS = Form(
    shape=lambda shape: (*shape[:-1], shape[-1] // 16, 16),
    write=lambda part: part.unflatten(-1, (-1, 16)),
    read=lambda stored: stored.flatten(-2),
    columns=16,
)


def _of_heads(part: Tensor) -> Tensor:
    """Scales [heads] as the file has them; ValueError for one that engines cannot divide by."""
    if not bool((part.isfinite() & (part > 0)).all()):
        raise ValueError(
            f"scales of the KV cache {part.tolist()}, which engines divide by; calibrate them again, or leave them out"
        )
    return part.reshape(-1, 1, 1)


# Scales [heads] of the KV cache, beside whose dim those of tokens and of columns are 1.
HEADS = Form(shape=lambda shape: (*shape, 1, 1), write=_of_heads, read=lambda stored: stored.reshape(-1))


@dataclass(frozen=True)
class StoredAs:
    """One tensor of a linear in the file.

    part: of the quantized weight, INPUT_SCALE or SHAPE. name: what follows the module's fqn and a dot, or, where it
    begins with "_", the name of a weight of all experts. also: dtypes, besides the part's, in which files by others
    hold it.
    """

    part: str
    name: str
    form: Form = SAME
    also: frozenset[str] = frozenset()

    def of(self, module: str) -> str:
        """The tensor's name for a module, or for a weight of all experts; a model may be a single linear."""
        return module + self.name if self.name.startswith("_") else f"{module}.{self.name}".lstrip(".")


@dataclass(frozen=True)
class SchemeEntry:
    """A scheme in a layout: its tensors, and what the layout's JSON says of it."""

    stored: tuple[StoredAs, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Linears:
    """What there is to tell an engine.

    schemes: module -> its scheme. ignored: modules of linears that are not quantized. kv_cache: what has scales of the
    KV cache, each attention ("tensor") or each of its heads ("head"); None: there are none. producer: name and version
    of what wrote the file. recipes: of the weights, all of them. rotated: module -> block, of linears whose inputs
    engines must rotate. also: module -> its name in memory, where that differs. Engines look up one or the other, so
    `names` gives both.
    """

    schemes: Mapping[str, Scheme]
    ignored: Sequence[str]
    kv_cache: Literal["tensor", "head"] | None
    producer: Mapping[str, str]
    recipes: frozenset[Recipe] = frozenset()
    rotated: Mapping[str, int] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)

    def names(self, modules: Iterable[str]) -> list[str]:
        """All names of these modules."""
        own = list(modules)
        return [*own, *(self.also[module] for module in own if module in self.also)]

    @property
    def kinds(self) -> list[Scheme]:
        """The schemes that occur, in a fixed order."""
        return sorted(set(self.schemes.values()), key=lambda scheme: (scheme.kind, scheme.inputs))

    def modules(self, scheme: Scheme) -> list[str]:
        """The modules of a scheme, in the order of the model."""
        return [module for module, its in self.schemes.items() if its == scheme]


@dataclass(frozen=True)
class Layout:
    """One way to write quantized linears into safetensors.

    Attributes:
        name: what `layout=` calls it; also the `quant_method` in config.json.
        schemes: the schemes it has. A tensor of a linear is fp32 where it is a tensor-wide scale.
        lacks: what to do instead, for schemes that it does not have.
        also_reads: entries that files by others have; they are read, and never written.
        experts: what becomes of a weight [E, N, K] of all experts: "each", a linear for each; "all", it stays one, and
            nothing else is quantized.
        fuses: whether its engines run some linears as one, which must then share a format and scales.
        rotates: whether its JSON can tell engines to rotate inputs at run time.
        models: the `model_type`s that it is for; empty: all but those whose experts have names of their own.
        kv_scales: the calibrated name of a KV-cache scale -> its name in the file, both behind the attention's fqn.
        kv_form: how such a scale looks in the file.
        kv_heads: how scales of heads, [heads], look in the file; None: the layout has none.
        json: file name -> content, made from what there is to tell; "config.json" holds what is to become of the
            model's `quantization_config`.
    """

    name: str
    schemes: Mapping[Scheme, SchemeEntry]
    kv_scales: Mapping[str, str]
    json: Callable[["Layout", Linears], dict[str, Any]]
    kv_form: Form = SAME
    kv_heads: Form | None = None
    lacks: Mapping[Scheme, str] = field(default_factory=dict)
    also_reads: Sequence[tuple[Scheme, SchemeEntry]] = ()
    experts: Literal["each", "all"] = "each"
    fuses: bool = True
    rotates: bool = False
    models: frozenset[str] = frozenset()

    @property
    def readable(self) -> list[tuple[Scheme, SchemeEntry]]:
        """All entries that a file may have."""
        return [*self.schemes.items(), *self.also_reads]

    def entry(self, scheme: Scheme, module: str) -> SchemeEntry:
        """The entry of a scheme. Raises ValueError where the layout has none."""
        found = self.schemes.get(scheme)
        if found is None:
            instead = self.lacks.get(scheme, f"it has {'; '.join(map(str, self.schemes))}")
            raise ValueError(f"{module}: the layout {self.name} has no {scheme}; {instead}")
        return found


LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> None:
    """Make a layout known. Raises ValueError for a name that is taken."""
    if layout.name in LAYOUTS:
        raise ValueError(f"the layout {layout.name!r} is registered already")
    LAYOUTS[layout.name] = layout


def layout_named(name: str) -> Layout:
    """A layout by its name. Raises ValueError for an unknown one."""
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r} is not one of {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[name]
