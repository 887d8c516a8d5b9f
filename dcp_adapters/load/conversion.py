"""Conversion of one tensor while it is loaded: dense -> quantized, quantized -> dense, recipe A -> recipe B.

The result is, bit for bit, this rank's piece of converting the full tensor:

    dense d   -> recipe     quantize(d)
    A         -> recipe B   q_b.copy_(q_a): exact where B can hold A's values, else B's encoding (numerics/exact.py)
    quantized -> dtype      q.dequantize(dtype)

Boxes (offsets, sizes) alone decide which piece of the stored tensor this needs: the rank's own box, widened to whole
square blocks of the target along N and to whole blocks of both sides along K. Scales that shards share are made from
claims that all of them agree on (see all_conversions.py); scales of blocks need no other rank.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import Leaf
from dcp_adapters.records.part_places import Box, box_of
from fsdp_hooks.scale_sync import cuts_of, groups_of, label_of
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of
from fsdp_hooks.versions import count_writes
from qtensor.numerics import exact, kernels
from qtensor.spec.blocks import canonical_nan
from qtensor.spec.lens import OWN
from qtensor.spec.registry import block_multiple, row_multiple, shares_scale_along, specs_of
from qtensor.tensor.contents import INITIAL_VALUE, store
from qtensor.tensor.quantized_tensor import QuantizedTensor


@dataclasses.dataclass
class Conversion:
    """One tensor on its way from what the checkpoint holds into the target.

    Attributes:
        source: how the checkpoint holds it. target: the local quantized tensor, or the local dense one. box: this
            rank's piece. region: the widened piece to read, which decides its bytes.
        pieces: key -> dtype of the part stored under it, and the box of it to read.
        groups: process groups over which a shared scale of the target is agreed; empty if there is none.
        cutting: the global ranks of each group that cuts the target.
        label: what all ranks of these groups must have alike; of a tensor on which nothing is agreed, its name.
        partners: what is equal for those whose scale it shares; None if there are none, and for the values of
            another recipe, which stay what they are.
        inputs: part -> the piece of it that has been read so far; filled in from `buffer`.
        outstanding: read items that have not arrived.
        name: its name in the state dict. device: the target's.
        waits: it is written only when something has been agreed on: with other ranks, or with its partners.
    """

    source: Entry
    target: Tensor
    box: Box
    region: Box
    pieces: dict[str, tuple[torch.dtype, Box]]
    groups: list[dist.ProcessGroup]
    cutting: list[tuple[int, ...]]
    label: str
    partners: Hashable | None = None
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    outstanding: int = 0
    name: str = dataclasses.field(init=False)
    waits: bool = dataclasses.field(init=False)
    device: torch.device = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Set what follows from the other attributes."""
        self.name, self.device = self.source.name, self.target.device
        self.waits = bool(self.groups) or self.partners is not None

    @staticmethod
    def of(leaf: Leaf, source: Entry) -> "Conversion | None":
        """Decide what to read for a leaf of the target; None if this rank is outside of its mesh.

        Raises:
            ValueError: the leaf is a view that cannot be written as a whole, or says itself where it lies, and has
                several pieces, or a scale in common with ranks that it does not name.
        """
        name, value, q = source.name, leaf.value, leaf.quantized
        if q is not None:
            if q._lens != OWN:
                raise ValueError(
                    f"{name}: the target is a view of some of a larger tensor, which a conversion can not write; load "
                    "all of it at once"
                )
            target: Tensor = q
            box = box_of(name, value, q) if leaf.place is None else _described_box(leaf, name)
        elif leaf.place is not None:
            target, box = local_of(leaf.plain), _described_box(leaf, name)
        else:
            target, box = local_of(leaf.plain), _dense_box(leaf.plain)
        if box is None:
            return None
        recipes = (source.recipe, None if q is None else q.recipe)
        blocks = [block_multiple(recipe) for recipe in recipes if recipe is not None]
        rows = 1 if q is None else row_multiple(q.recipe)
        region = widened_box(box, leaf.shape, rows=rows, columns=math.lcm(*blocks))
        # an amax history is not gathered, and says nothing about values
        # a rank whose piece is empty reads nothing, but takes part in what the others agree on
        specs = source.stored_specs() if all(region[1]) else {}
        pieces = {key: (spec.dtype, spec.box(*region)) for key, spec in specs.items() if spec.gathered}
        partners = None if q is None or q._partners is None or source.recipe is not None else q._partners.within(name)
        groups: list[dist.ProcessGroup] = []
        cutting: list[tuple[int, ...]] = []
        label = name
        if isinstance(value, DTensor) and leaf.place is None:
            # a square block that is cut is read whole, and needs no agreement
            groups = [] if q is None else groups_of(value, lambda dim: shares_scale_along(q.recipe, dim, q.ndim))
            cutting = [tuple(dist.get_process_group_ranks(group)) for _, group in cuts_of([value])[0]]
        if cutting or partners is not None:
            label = label_of(name, value)
        return Conversion(source, target, box, region, pieces, groups, cutting, label, partners)

    def read_items(self, metadata: Metadata) -> list[ReadItem]:
        """Return what to read for it, and count from now on how much is outstanding."""
        items: list[ReadItem] = []
        for key, (_, (offsets, sizes)) in self.pieces.items():
            stored = metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            items += create_read_items_for_chunk_list(key, stored, [chunk])
        self.outstanding = len(items)
        return items

    def buffer(self, key: str) -> Tensor:
        """Return where a part's piece is read into: on the target's device, in the stored dtype; made once."""
        part = key[len(self.name) + 1 :]
        if part not in self.inputs:
            dtype, (_, sizes) = self.pieces[key]
            self.inputs[part] = torch.empty(sizes, dtype=dtype, device=self.device)
        return self.inputs[part]

    def claim(self) -> Tensor:
        """Return what this rank's values say about the target's shared scales: fp32, flat."""
        assert isinstance(self.target, QuantizedTensor)
        claim = exact.claim(self._decoded(), self.target.recipe, self._coded(), self.source.recipe)
        assert claim is not None
        return claim

    @torch.no_grad()
    def write_target(self, agreed: Tensor | None = None) -> None:
        """Convert what was read, write it into the target, and free it; `agreed` is what was agreed on, flat."""
        if all(self.box[1]) or isinstance(self.target, QuantizedTensor):
            values = self._decoded()
            if isinstance(self.target, QuantizedTensor):
                self._write_quantized(self.target, values, agreed)
            else:
                values = narrowed(values, self.region, self.box)
                self.target.copy_(canonical_nan(values) if self.target.dtype == torch.float32 else values)
        # freed at once, so that a load holds the pieces of few tensors at a time
        self.inputs.clear()

    def _write_quantized(self, q: QuantizedTensor, values: Tensor, agreed: Tensor | None) -> None:
        parts = exact.convert_parts(values, q.recipe, self._coded(), self.source.recipe, agreed)
        specs = {spec.name: spec for spec in specs_of(q.recipe)}
        own = dict(parts)
        if self.region != self.box:
            own = {
                name: narrowed(part, specs[name].box(*self.region), specs[name].box(*self.box))
                for name, part in parts.items()
            }
        if self.source.recipe is None:
            own[INITIAL_VALUE] = narrowed(values, self.region, self.box)  # the value it was quantized from
        store(q, own)
        # parts are written behind the wrapper, so torch does not count it as a write
        count_writes([q])

    def _coded(self) -> dict[str, Tensor] | None:
        """Return the parts of the region that decode to its values; None if there are none."""
        return self.inputs if self.source.recipe is not None and all(self.region[1]) else None

    def _decoded(self) -> Tensor:
        """Return the fp32 values of the region."""
        if not all(self.region[1]):
            return torch.empty(self.region[1], dtype=torch.float32, device=self.target.device)
        if self.source.recipe is None:
            return self.inputs[""].float()
        return kernels.decode(self.inputs, self.source.recipe, torch.float32)


def widened_box(box: Box, shape: Sequence[int], *, rows: int = 1, columns: int = 1) -> Box:
    """Widen the last two dims of a box to multiples of `rows` and `columns` within the shape; empty boxes stay.

    >>> widened_box(((3, 40), (2, 8)), (7, 64), rows=4, columns=32)
    ((0, 32), (7, 32))
    """
    offsets, sizes = list(box[0]), list(box[1])
    if not all(sizes):
        return box
    for dim, multiple in ((len(shape) - 2, rows), (len(shape) - 1, columns)):
        if dim < 0 or multiple == 1:
            continue
        end = offsets[dim] + sizes[dim]
        offsets[dim] -= offsets[dim] % multiple
        sizes[dim] = min(end + -end % multiple, shape[dim]) - offsets[dim]
    return tuple(offsets), tuple(sizes)


def narrowed(tensor: Tensor, outer: Box, inner: Box) -> Tensor:
    """Return the inner box of a tensor that holds the outer one."""
    for dim, (start, begin, size) in enumerate(zip(outer[0], inner[0], inner[1], strict=True)):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, begin - start, size)
    return tensor


def _described_box(leaf: Leaf, name: str) -> Box:
    """Return the box of a leaf that says itself where it lies."""
    assert leaf.place is not None
    (offsets, sizes, _), *more = leaf.place.pieces or (((), (), ()),)
    if more or sizes != tuple(leaf.value.shape if leaf.local is None else leaf.local.shape):
        raise ValueError(
            f"{name}: a conversion writes one piece, and this tensor describes {1 + len(more)} in its memory; give "
            "each piece a tensor of its own (PlacedShard), under a name of its own, or load without a conversion"
        )
    q, ndim = leaf.quantized, len(sizes)
    cut = [dim for dim in range(ndim) if sizes[dim] != leaf.place.shape[dim]]
    if q is not None and any(shares_scale_along(q.recipe, dim, ndim) for dim in cut):
        raise ValueError(
            f"{name}: its pieces share a scale under {q.recipe}, which the ranks have to agree on, and a piece that is "
            "placed by hand does not name the ranks of the others; convert the checkpoint (python -m dcp_adapters "
            "convert) and load it as it is, or load into a DTensor"
        )
    return offsets, sizes


def _dense_box(value: Tensor) -> Box | None:
    if not isinstance(value, DTensor):
        return (0,) * value.ndim, tuple(value.shape)
    if value.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(offsets), tuple(sizes)
