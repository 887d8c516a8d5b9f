"""Is what is stored right for this target? Asked here, once and in this order, before the first byte is read.

    1  leaves       can each be loaded as it is placed, or is it a slice that is a copy?            compare.py
    2  tensors      has the checkpoint one under each name, of the same recipe or one that can be
                    converted, the same shape, a dtype that keeps the values, all parts, and for
                    inputs that are rotated alike?                                                  compare.py
    3  memory       can it be written?                                                              live_parts.py
    4  names        has the target all tensors of its containers? Another rank may have the others  compare.py
                    up to here all that is wrong is told in one error
    5  pieces       do shards fall on blocks, is each view one of a whole tensor?    live_parts.py, conversion.py
    6  checksums    are there if they are to be compared, or a delta is to be rebuilt
    7  chunks       do those that are read make up what is written?                                 coverage.py

Three things are not known here. What all ranks have between them, the coordinator asks (together.py, and
all_conversions.py). What the files hold is asked when the reader opens them, before the first tensor is read
(stored/reading/places.py). And if a storage keeps the manifest only as an entry, that is read first, and its recipes
are compared when it arrives (planner.py).
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_adapters.load.all_conversions import Conversions
from dcp_adapters.load.compare import LoadTarget, differences, lacking, stored_names, to_convert
from dcp_adapters.load.conversion import Conversion
from dcp_adapters.load.coverage import coverage_problems, parts_of_target
from dcp_adapters.load.live_parts import local_parts, not_writable, vectors_of
from dcp_adapters.load.read_items import ReadItems
from dcp_adapters.load.together import RankShare, misfit
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.expand import leaves_of
from dcp_adapters.records.manifest import MANIFEST, Manifest, manifest_of
from dcp_adapters.stored.reading.metadata_checks import own_buffer
from fsdp_hooks.ranks.across_ranks import ranks_of
from fsdp_hooks.torch_private import cpu_by_default, without_torch_function
from qtensor.tensor.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class Fitted:
    """A target that what is stored is right for.

    Attributes:
        manifest: of the checkpoint; None if its storage keeps it only as an entry, or it has none.
        target: what is to be loaded.
        state_dict: what is read into as it is, by entry: the checkpoint's own entries, plain tensors, and the local
            parts of quantized ones, which alias them.
        parts: the entries of these parts. pieces: those in several pieces, and where each begins -> the piece.
        quantized: the weights that they are parts of. vectors: part -> the vector that the one value read is spread to.
        wrapped: values that hold their bytes in tensors inside them.
        conversions: what is not read as it is.
        items: all that is to be read.
        share: what the coordinator is told.
        has_checksums, awaits_manifest: whether the checksums, and the manifest, are read first.
    """

    manifest: Manifest | None
    target: LoadTarget
    state_dict: dict[str, Any]
    parts: frozenset[str]
    pieces: dict[str, dict[tuple[int, ...], Tensor]]
    quantized: dict[str, QuantizedTensor]
    vectors: dict[str, Tensor]
    wrapped: list[Tensor]
    conversions: Conversions
    items: list[ReadItem]
    share: RankShare
    has_checksums: bool
    awaits_manifest: bool


def fit(  # noqa: PLR0913 - a load's options
    flat: Mapping[str, Any],
    paths: Mapping[str, Any],
    metadata: Metadata,
    *,
    partial: bool,
    convert: bool,
    verify_checksums: bool,
    timeout: dt.timedelta,
) -> Fitted:
    """Ask all of the module's questions of one rank, and decide what it reads.

    Args:
        flat: the flattened state dict.
        paths: name -> its place in the nested one.
        metadata: of the checkpoint.
        partial: tensors that only one side has are left out.
        convert: tensors of another recipe are converted.
        verify_checksums: chunks are to be compared with their checksums.
        timeout: how long a conversion waits for other ranks.

    Raises:
        ValueError: what is stored is not right for this target. Nothing has been touched.
    """
    manifest, leaves = manifest_of(metadata), leaves_of(flat)
    target = LoadTarget.of(leaves, paths)
    problems = differences(target, metadata, manifest, partial=partial, convert=convert)
    problems += not_writable(leaves, stored_names(target, metadata, manifest))
    lacks = {} if partial else lacking(target, metadata, manifest)
    if problems:
        raise misfit(problems, lacks, ranks_of(None))

    sources = to_convert(target, metadata, manifest) if convert else {}
    # each attribute of a subclass would go through __torch_function__
    with without_torch_function():
        pieces = [Conversion.of(leaves[name], source) for name, source in sources.items()]
    conversions = Conversions([piece for piece in pieces if piece is not None], timeout)
    as_is = {name: leaf for name, leaf in leaves.items() if name not in sources}
    stored = metadata.state_dict_metadata
    quantized = {
        name: leaf.quantized
        for name, leaf in as_is.items()
        if leaf.quantized is not None and f"{name}.payload" in stored
    }
    vectors = vectors_of(quantized)
    state_dict, boxes, several = local_parts(as_is)

    checksums = None
    if verify_checksums or (manifest is not None and manifest.base is not None):
        checksums = _own_entry(CHECKSUMS, metadata, 2)
        if checksums is None:
            why = "verify_checksums=True" if verify_checksums else "a delta needs checksums"
            raise ValueError(
                f"{why}: the checkpoint has no checksums, since it was saved without QuantizedSavePlanner or with "
                "checksums=False; nothing has been loaded"
            )
    # a storage without planner data keeps the recipes in the entry alone, and payloads of another recipe may fit in
    # shape and dtype
    late = _own_entry(MANIFEST, metadata, 1) if manifest is None and quantized else None
    state_dict = {**(checksums or {}), **(late or {}), **state_dict}

    # not stock's `create_local_plan`: it tries the names of checkpoints before torch 2.4 on every entry that the target
    # lacks, and the entries of conversions are among these
    with cpu_by_default():
        items = ReadItems(metadata, strict=not partial).of(state_dict, boxes, several)
    items += conversions.read_items(metadata)
    shapes = parts_of_target(state_dict, metadata, boxes, several) | conversions.parts()
    faults = coverage_problems(items, shapes, metadata)
    if faults:
        raise ValueError(
            "the checkpoint's .metadata is damaged; nothing has been loaded. Use another checkpoint:" + in_lines(faults)
        )
    return Fitted(
        manifest,
        target,
        state_dict,
        frozenset(boxes),
        {entry: {piece.box[0]: piece.data for piece in own} for entry, own in several.items()},
        quantized,
        vectors,
        [leaf.value for leaf in as_is.values() if leaf.quantized is not None or leaf.plain is not leaf.value],
        conversions,
        items,
        RankShare.of(target, lacks, items, shapes),
        checksums is not None,
        late is not None,
    )


def _own_entry(name: str, metadata: Metadata, dims: int) -> dict[str, Tensor] | None:
    """Return room for an entry of the checkpoint's own, read before what was asked for; None if it has none."""
    buffer = own_buffer(name, metadata, dims)
    return None if buffer is None else {name: buffer}
