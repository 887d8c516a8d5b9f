"""What a layout is: the tensors in the file for each kind of quantized linear, and the JSON that describes them.

    Scheme     how one linear is quantized: the kind of its weight, and what becomes of its inputs
    StoredAs   one tensor of a linear, `<module>.<name>`: which part it is, in which form (forms.py)
    Layout     the table scheme -> tensors; `json` writes what engines are told, `claims` reads it
    Claims     what the JSON of one directory says, to be compared with what its tensors are

A layout is one file, which registers it (registry.py). Writing follows its table from parts to files, reading from
files to parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.forms import SAME, Form
from dcp_adapters.plain.words import short
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.formats.float8_blocks import Float8BlockScaling
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.formats.int4 import GROUPS, Int4GroupScaling
from qtensor.formats.int8 import Int8RowScaling
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
KINDS: dict[str, Recipe] = {
    "fp8_tensor": Float8CurrentScaling(granularity="tensor"),
    "fp8_row": Float8CurrentScaling(granularity="row"),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    **{f"int4_{group}": Int4GroupScaling(group=group) for group in GROUPS},
    "int8_row": Int8RowScaling(),
}
# Inputs of a linear without a calibrated scale: quantized on the fly, or, if that needs a scale, left as they are.
UNCALIBRATED: dict[str, Inputs] = {
    "fp8_tensor": "dynamic",
    "fp8_row": "dynamic",
    "fp8_block": "dynamic",
    "mxfp8": "dynamic",
    "nvfp4": "none",
    "mxfp4": "none",
    **{f"int4_{group}": "none" for group in GROUPS},
    "int8_row": "dynamic",
}


def register_kind(name: str, recipe: Recipe, uncalibrated: Inputs = "none") -> None:
    """Give a format of your own a kind, which schemes of layouts can name.

    `recipe` describes the kind: other recipes of its type are recorded in the files beside it. `uncalibrated`: the
    inputs of a linear without a calibrated scale. Raises ValueError if the name is taken, or the recipe has a kind.
    """
    if name in KINDS:
        raise ValueError(f"the kind {name!r} is registered already")
    if kind_of(recipe) is not None:
        raise ValueError(f"{recipe} is of the kind {kind_of(recipe)!r} already")
    KINDS[name], UNCALIBRATED[name] = recipe, uncalibrated


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
        """Return the scheme of a linear, with or without an `input_scale`."""
        return Scheme(kind, "static" if calibrated else UNCALIBRATED[kind])

    def __str__(self) -> str:
        return f"{self.kind} weights with {'unquantized' if self.inputs == 'none' else self.inputs} inputs"


def kind_of(recipe: Recipe) -> str | None:
    """Return the kind under which engines decode what was quantized under `recipe`; None if they have none."""
    # Engines know no other 8-bit float in weights.
    if getattr(recipe, "element", "e4m3") != "e4m3":
        return None
    # It differs from current scaling only in how a scale is found; the bytes decode alike.
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
class StoredAs:
    """One tensor of a linear in the file.

    part: of the quantized weight, INPUT_SCALE or SHAPE. name: what follows the module's fqn and a dot, or, if it
    begins with "_", the name of a weight of all experts. also: dtypes, besides the part's, in which files by others
    hold it.
    """

    part: str
    name: str
    form: Form = SAME
    also: frozenset[str] = frozenset()

    def of(self, module: str) -> str:
        """Return the tensor's name for a module, or for a weight of all experts; a model may be a single linear."""
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
    engines must rotate. also: module -> its name in memory, if that differs. Engines look up one or the other, so
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
        """Return all names of these modules."""
        own = list(modules)
        return [*own, *(self.also[module] for module in own if module in self.also)]

    @property
    def kinds(self) -> list[Scheme]:
        """Return the schemes that occur, in a fixed order."""
        return sorted(set(self.schemes.values()), key=lambda scheme: (scheme.kind, scheme.inputs))

    def modules(self, scheme: Scheme) -> list[str]:
        """Return the modules of a scheme, in the order of the model."""
        return [module for module, its in self.schemes.items() if its == scheme]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to write quantized linears into safetensors, and to read them.

    A layout of your own gives `name` and `schemes`; the rest are answers of a layout that has nothing special. `json`
    and `claims` are overridden if engines are told more than the name.

    Attributes:
        name: what `layout=` calls it; also the `quant_method` in config.json.
        schemes: the schemes it has. A tensor of a linear is fp32 if it is a tensor-wide scale.
        lacks: what to do instead, for schemes that it does not have.
        also_reads: entries that files by others have; they are read, and never written.
        experts: what becomes of a weight [E, N, K] of all experts: "each", a linear for each; "all", it stays one, and
            nothing else is quantized.
        fuses: whether its engines run some linears as one, which must then share a format and scales.
        rotates: whether its JSON can tell engines to rotate inputs at run time.
        models: the `model_type`s that it is for; empty: all but those whose experts have names of their own.
        kv_scales: the calibrated name of a KV-cache scale -> its name in the file, both behind the attention's fqn;
            empty: the layout has none.
        kv_form: how such a scale looks in the file.
        kv_heads: how scales of heads, [heads], look in the file; None: the layout has none.
    """

    name: str
    schemes: Mapping[Scheme, SchemeEntry]
    lacks: Mapping[Scheme, str] = field(default_factory=dict)
    also_reads: Sequence[tuple[Scheme, SchemeEntry]] = ()
    experts: Literal["each", "all"] = "each"
    fuses: bool = True
    rotates: bool = False
    models: frozenset[str] = frozenset()
    kv_scales: Mapping[str, str] = field(default_factory=dict)
    kv_form: Form = SAME
    kv_heads: Form | None = None

    def json(self, linears: Linears) -> dict[str, Any]:
        """Map file names to what engines are told; "config.json" holds the model's `quantization_config`.

        Raises ValueError for what engines would take for something else.
        """
        return {"config.json": {"quant_method": self.name}}

    def describes(self, said: Mapping[str, Any] | None) -> bool:
        """Return whether a `quantization_config` is of this layout; it is None if only other files say something."""
        return said is not None and said.get("quant_method") == self.name

    def claims(self, directory: Directory, said: Mapping[str, Any]) -> "Claims":
        """Return what a directory of this layout says of its linears; `said`: its `quantization_config`, or {}.

        Raises ValueError for a description that the library does not read.
        """
        return Claims(layout=self)

    @property
    def readable(self) -> list[tuple[Scheme, SchemeEntry]]:
        """Return all entries that a file may have."""
        return [*self.schemes.items(), *self.also_reads]

    def entry(self, scheme: Scheme, module: str) -> SchemeEntry:
        """Return the entry of a scheme. Raises ValueError if the layout has none."""
        found = self.schemes.get(scheme)
        if found is None:
            instead = self.lacks.get(scheme, f"it has {'; '.join(map(str, self.schemes))}")
            raise ValueError(f"{module}: the layout {self.name} has no {scheme}; {instead}")
        return found


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the JSON of one directory says of its linears.

    The scheme of a linear is read off its tensors (reading/schemes.py). JSON can say what they do not show: that codes
    are integers and no floats, or that inputs have another format. So both have to agree, for each linear.

    Attributes:
        layout: whose names the tensors have.
        kinds: the recipe of each kind, as far as the JSON tells it.
        kv_cache: why the KV cache is not quantized as FP8; None if it is, or if nothing is said.
    """

    layout: Layout
    kinds: Mapping[str, Recipe] = field(default_factory=lambda: KINDS)
    kv_cache: str | None = None

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """Return how the scheme found for a module contradicts what is said of it, in words; None if it does not."""
        return None

    def said_of(self, module: str) -> str:
        """Return what is said of a module's weights, in few words; "" if nothing is."""
        return ""

    def left_alone_by(self, module: str) -> str | None:
        """Return the name, of those the JSON leaves alone, by which engines pass this module over; None: by none."""
        return None

    def means_linear(self, module: str) -> bool:
        """Return whether engines make a quantized linear of a module of this name, if it is a linear."""
        return self.left_alone_by(module) is None


def differing(said: Mapping[str, Any], expected: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """List what differs from what is expected, of the keys that both have; None counts as not said."""
    return [
        f"{key} {short(said[key])}, expected {short(expected[key])}"
        for key in keys
        if said.get(key) is not None and expected.get(key) is not None and said[key] != expected[key]
    ]
