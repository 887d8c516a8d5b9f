"""What a Hugging Face directory looks like as a DCP checkpoint: entries, the chunks they consist of, and a manifest.

    <module>.weight*  of a quantized linear   ->  <module>.weight.payload, .scale[, .global_scale] and a recipe
    <module>.<e>.gate_proj.weight*, ...       ->  one entry <module>.gate_up_proj.*, each expert's tensor a chunk of it,
                                                  if the target has such a weight of all experts
    scales of inputs and of the KV cache      ->  fp32 [] under their calibrated names
    everything else                           ->  as it is

placed.py says where the values of each come from. Tensor-wide scales are checked here, before anything is loaded:
those of experts must agree, and a scale that is stored as a reciprocal must have a reciprocal.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dcp_adapters.hf.files.directory import Directory, FileTensor
from dcp_adapters.hf.files.engine_names import Piece, pieces_of, turned_experts, turned_pieces
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, SHAPE, kind_of
from dcp_adapters.hf.layouts.recorded import appearance, recorded_recipes
from dcp_adapters.hf.reading.delayed import history_of
from dcp_adapters.hf.reading.placed import Chunk, Placed, Slice, as_is, source_of_part
from dcp_adapters.hf.reading.schemes import DTYPES, Contents, FileLinear, is_one
from dcp_adapters.plain.words import few_of, in_lines
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import Manifest
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, check_shape, specs_of

VALUE = PartSpec("", torch.float32, per_row=False)
VALUES = PartSpec("", torch.float32, per_row=True)
WIDE_APART = (
    "their weights have tensor-wide scales that differ, and a weight of all experts has one; quantize the experts with "
    "one scale, or with a recipe whose scales belong to rows or blocks, or import into a model with a linear an expert"
)
TURNED = (
    "the directory has rows of linears, [E, N, K], and the model multiplies by the weight as it is, [E, K, N]; give it "
    "parameters [E, N, K] and multiply by their transpose, or import without a model and copy the values: "
    "import_hf(path)[name].dequantize().transpose(1, 2)"
)
Look = Callable[[FileTensor], Tensor]  # reads a small tensor


@dataclass
class Presented:
    """The directory as a checkpoint.

    placed: all that is stored, by key. quantized: the quantized tensors, by name. scales: names of the scales of inputs
    and of the KV cache. layout: how it is quantized, "" if it is not.
    """

    layout: str = ""
    placed: dict[str, Placed] = field(default_factory=dict)
    quantized: dict[str, Entry] = field(default_factory=dict)
    scales: set[str] = field(default_factory=set)

    @property
    def manifest(self) -> Manifest:
        """Return the quantized tensors."""
        return Manifest(self.quantized)

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """Return all tensors, by name."""
        parts = {key for entry in self.quantized.values() for key in entry.part_keys()}
        dense = {key: Entry(key, None, held.shape, held.dtype) for key, held in self.placed.items() if key not in parts}
        return dense | self.quantized


def renamed(made: Presented, name_of: Callable[[str], str]) -> Presented:
    """Return the same entries under other names.

    Raises:
        ValueError: two tensors would have one name.
    """
    found = Presented(made.layout, scales={name_of(name) for name in made.scales})
    for name, entry in made.entries.items():
        other = replace(entry, name=name_of(name))
        for key, its in zip(entry.part_keys(), other.part_keys(), strict=True):
            if its in found.placed:
                raise ValueError(f"{name}: the directory has {other.name} twice, under this name and another one")
            found.placed[its] = made.placed[key]
        if other.recipe is not None:
            found.quantized[other.name] = other
    return found


def presented(directory: Directory, contents: Contents, wanted: Mapping[str, Entry], look: Look) -> Presented:
    """Decide the entries that the directory has as a checkpoint.

    Args:
        directory: as read.
        contents: its tensors, sorted.
        wanted: what the target has. Weights of all experts are put together only if it has them.
        look: reads one of the small tensors.

    Raises:
        ValueError: one error for all weights that cannot be presented, each with what was found.
    """
    return _Presentation(directory, contents, wanted, look).decide()


class _Presentation:
    """The state of `presented`: what is left of the contents, and what has been found wrong."""

    def __init__(self, directory: Directory, contents: Contents, wanted: Mapping[str, Entry], look: Look) -> None:
        self.directory, self.wanted, self.look = directory, wanted, look
        self.turned = turned_experts({name: want.shape for name, want in wanted.items()})
        self.linears, self.dense, self.scales = dict(contents.linears), dict(contents.dense), dict(contents.scales)
        self.recipes, self.kinds = recorded_recipes(directory), contents.kinds
        self.appearance = appearance(directory) if self.linears else torch.bfloat16
        self.problems: list[str] = []
        self.out = Presented(contents.layout)

    def decide(self) -> Presented:
        for name, want in self.wanted.items():
            pieces = turned_pieces(name, want.shape) if name in self.turned else pieces_of(name, want.shape)
            if pieces and pieces[0].expert is not None and name not in self.dense:
                self._enter_experts(name, want.shape, pieces)
        # What is left are single linears: those that make up a weight of all experts have been taken out.
        for module, linear in self.linears.items():
            self._enter_quantized(linear.weight, linear.shape, [(Piece(module, None, (0, linear.shape[-2])), linear)])
        for name, tensor in self.dense.items():
            dtype = DTYPES.get(tensor.dtype)
            if dtype is None:
                self.problems.append(f"{name}: {tensor}, which torch can not hold")
            else:
                self._enter(name, Placed.whole(dtype, tensor.shape, Slice(tensor, as_is)))
        for name, (stored, tensor) in self.scales.items():
            heads = not is_one(tensor)
            source = source_of_part(tensor, stored, VALUES if heads else VALUE)
            self._enter(name, Placed.whole(torch.float32, tensor.shape[:1] if heads else (), source))
            self.out.scales.add(name)
        if self.problems:
            raise ValueError(
                f"{self.directory.path}: can not be imported; nothing has been loaded:" + in_lines(self.problems)
            )
        return self.out

    def _enter(self, name: str, entry: Placed) -> None:
        """Enter an entry, whose name must be its own."""
        if self.out.placed.setdefault(name, entry) is not entry:
            self.problems.append(f"{name}: the directory has it twice, as a tensor and as a part or scale of a linear")

    def _enter_experts(self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """Enter the linears of all experts as one weight; if none of them is there, the name stays missing."""
        linears = [self.linears.get(piece.module) for piece in pieces]
        dense = [self.dense.get(f"{piece.module}.weight") for piece in pieces]
        there = [bool(linear or tensor) for linear, tensor in zip(linears, dense, strict=True)]
        if not any(there):
            return
        # Taken out in any case: they are parts of this weight, and no entries of their own.
        for piece in pieces:
            self.linears.pop(piece.module, None)
            self.dense.pop(f"{piece.module}.weight", None)
        if not all(there):
            lacking = [piece.module for piece, found in zip(pieces, there, strict=True) if not found]
            told = few_of(lacking, 20, last=", ")
            self.problems.append(f"{name}: it consists of linears that are not there: {told}")
        elif all(linears) and pieces[0].turned:
            self.problems.append(f"{name}: {TURNED}")
        elif all(linears):
            self._enter_quantized(name, shape, list(zip(pieces, filter(None, linears), strict=True)))
        elif all(dense):
            self._enter_joined(name, shape, list(zip(pieces, filter(None, dense), strict=True)))
        else:
            self.problems.append(f"{name}: it consists of linears some of which are quantized, some not")

    def _enter_joined(self, name: str, shape: tuple[int, ...], tensors: Sequence[tuple[Piece, FileTensor]]) -> None:
        """Enter a dense weight of all experts."""
        dtypes = sorted({tensor.dtype for _, tensor in tensors})
        if len(dtypes) > 1:
            self.problems.append(f"{name}: it consists of tensors of {', '.join(dtypes)}, expected one dtype")
            return
        chunks = []
        for piece, tensor in tensors:
            rows, columns = piece.rows[1] - piece.rows[0], shape[1] if piece.turned else shape[2]
            if tensor.shape != (rows, columns):
                self.problems.append(f"{tensor.name}: {tensor}, expected {[rows, columns]} of {name} {list(shape)}")
                return
            at, sizes = (piece.rows[0], 0), (rows, columns)
            # The rows of this linear are columns of the weight.
            if piece.turned:
                at, sizes = at[::-1], sizes[::-1]
            held = Slice(tensor, as_is, lead=1, turned=piece.turned)
            chunks.append(Chunk((piece.expert or 0, *at), (1, *sizes), held))
        self._enter(name, Placed(DTYPES[dtypes[0]], shape, tuple(chunks)))

    def _enter_quantized(self, name: str, shape: tuple[int, ...], linears: Sequence[tuple[Piece, FileLinear]]) -> None:
        """Enter a quantized weight that consists of one linear or of several."""
        kinds = sorted({linear.scheme.kind for _, linear in linears})
        if len(kinds) > 1:
            self.problems.append(f"{name}: it consists of linears quantized as {', '.join(kinds)}, expected one way")
            return
        for piece, linear in linears:
            expected = (*linear.shape[:-2], piece.rows[1] - piece.rows[0], shape[-1])
            if linear.shape != expected:
                self.problems.append(f"{linear.module}: a weight of {linear.shape}, expected {expected} of {name}")
                return
            self._check_shape(linear)
        if len(linears[0][1].shape) > 2 and name in self.turned:
            self.problems.append(f"{name}: {TURNED}")
            return
        recipe = self._recipe(name, kinds[0], [linear.weight for _, linear in linears], shape)
        if recipe is None:
            return
        want = self.wanted.get(name)
        dtype = want.dtype if want is not None and want.dtype in APPEARANCE_DTYPES else self.appearance
        entry = Entry(name, recipe, tuple(shape), dtype)
        self.out.quantized[name] = entry
        for spec in specs_of(recipe):
            self._enter(f"{name}.{spec.name}", self._part(name, entry, spec, linears))
        self._move_input_scale(name, linears)

    def _check_shape(self, linear: FileLinear) -> None:
        """Check a shape that is stored beside the codes against theirs."""
        if SHAPE in linear.parts:
            tensor = linear.parts[SHAPE][1]
            said = self.look(tensor).tolist()
            if said != list(linear.shape):
                self.problems.append(f"{tensor.name}: it says {said}, and the codes are those of {list(linear.shape)}")

    def _recipe(self, name: str, kind: str, weights: Sequence[str], shape: Sequence[int]) -> Recipe | None:
        """Return the target's recipe if that keeps a history, else the recorded one, else the kind's."""
        recorded = {self.recipes[one] for one in {name, *weights} if one in self.recipes}
        if any(kind_of(recipe) != kind for recipe in recorded) or len(recorded) > 1:
            said = ", ".join(map(repr, recorded))
            self.problems.append(f"{name}: its tensors are {kind}, and the file's metadata says {said}")
            return None
        recipe = recorded.pop() if recorded else self.kinds[kind]
        want = self.wanted.get(name)
        # Files hold its scale alone; as the target's recipe it gets a history, and its bytes stay.
        if want is not None and isinstance(want.recipe, Float8DelayedScaling) and kind_of(want.recipe) == kind:
            recipe = want.recipe.stored
        try:
            check_shape(shape, recipe, name)
        except ValueError as error:
            self.problems.append(str(error))
            return None
        return recipe

    def _part(self, name: str, entry: Entry, spec: PartSpec, linears: Sequence[tuple[Piece, FileLinear]]) -> Placed:
        """Return the entry of one part."""
        # The history of a delayed scale, which no file holds.
        if spec.length is not None:
            assert isinstance(entry.recipe, Float8DelayedScaling)
            stored, tensor = linears[0][1].parts["scale"]
            scale, history = source_of_part(tensor, stored, VALUE), functools.partial(history_of, recipe=entry.recipe)
            source = Slice(tensor, lambda held: history(scale.read(held)), per_row=False)
            return Placed.whole(spec.dtype, spec.shape(entry.shape), source)
        if not spec.per_row:
            self._check_wide(name, spec, linears)
            stored, tensor = linears[0][1].parts[spec.name]
            return Placed.whole(spec.dtype, (), source_of_part(tensor, stored, spec))
        chunks = []
        for piece, linear in linears:
            lead = () if piece.expert is None else (piece.expert,)
            start = (*lead, *(0 for _ in linear.shape[:-2]), piece.rows[0], 0)
            box = spec.box(start, (*(1 for _ in lead), *linear.shape))
            stored, tensor = linear.parts[spec.name]
            chunks.append(Chunk(*box, source_of_part(tensor, stored, spec, lead=len(lead))))
        return Placed(spec.dtype, spec.shape(entry.shape), tuple(chunks))

    def _check_wide(self, name: str, spec: PartSpec, linears: Sequence[tuple[Piece, FileLinear]]) -> None:
        """Check that a tensor-wide scale stored as a reciprocal has one, and that all linears have the same scale."""
        held = [linear.parts[spec.name] for _, linear in linears]
        # Only these cases need a value, and a directory has thousands of linears.
        if len(linears) == 1 and not held[0][0].form.inverts:
            return
        values = {tensor.name: source_of_part(tensor, stored, spec).read(self.look(tensor)) for stored, tensor in held}
        unusable = [one for (stored, _), one in zip(held, values, strict=True) if stored.form.inverts]
        unusable = [one for one in unusable if not 0 <= values[one].item() < torch.inf]
        if unusable:
            self.problems.append(f"{unusable[0]}: its reciprocal, {values[unusable[0]].item()}, is no scale")
        # As bits: scales that differ in the last place decode differently.
        elif len({value.view(torch.int32).item() for value in values.values()}) > 1:
            few = [f"{one} {value.item():.9g}" for one, value in list(values.items())[:2]]
            self.problems.append(f"{name}: {WIDE_APART} ({', '.join(few)}, ...)")

    def _move_input_scale(self, name: str, linears: Sequence[tuple[Piece, FileLinear]]) -> None:
        """Move a scale that all experts share for their inputs under the name of their weight; different ones stay."""
        if linears[0][0].expert is None:
            return
        held = [linear.parts.get(INPUT_SCALE) for _, linear in linears]
        found = [(stored, tensor) for stored, tensor in filter(None, held)]
        values = {source_of_part(tensor, stored, VALUE).read(self.look(tensor)).item() for stored, tensor in found}
        if len(found) == len(linears) and len(values) == 1:
            for _, linear in linears:
                self.scales.pop(f"{linear.module}.{INPUT_SCALE}")
            self.scales[f"{name}.{INPUT_SCALE}"] = found[0]
