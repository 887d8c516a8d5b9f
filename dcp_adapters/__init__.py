"""Quantized tensors in PyTorch distributed checkpoints.

Payloads and scales are stored as plain tensors, and stock DCP reshards them. The folders, the lowest first;
each imports only what is listed before it, qtensor and fsdp_hooks:

    torch_private.py  what torch does not promise and this package relies on
    plain/            what knows nothing of quantized tensors: words, boxes, files
    records/          what is stored, in records that all folders after it share
    stored/           a checkpoint on disk: read without executing anything in it (reading/), inspected, verified
    save/             the save planner, and what is written in which order; staging/: copies in host memory
    load/             the load planner: compare, read in place, convert
    convert/          a checkpoint on disk into another format
    hf/               Hugging Face directories: export and import
    adopting/         quantized modules of other libraries, in memory, with their bytes
    gguf/             GGUF files: export
    digests/          one value for all weights: of a model, a checkpoint, a directory, received tensors
    delta/            exact deltas between two states of the same tensors; coding/: changes as few bytes
    streams/          the tensors of an export into engines that are running
    transformers/     `from_pretrained` with quantized weights, for those who import it
    torch_checkpointing.py  items for the package of this name, for those who import it
    cli/              the command line, `python -m dcp_adapters`

Importing this package imports what saves and loads need. The other public names come with their first use; those of
deltas, of streams and of other libraries' modules have their homes in `dcp_adapters.delta`, `dcp_adapters.streams` and
`dcp_adapters.adopting`.

Words: docs/glossary.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dcp_adapters.load.planner import QuantizedLoadPlanner
from dcp_adapters.plain.placed_shard import PlacedShard
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import expand
from dcp_adapters.records.manifest import BaseLink, Manifest
from dcp_adapters.save.atomic_writer import AtomicFileSystemWriter
from dcp_adapters.save.planner import QuantizedSavePlanner
from dcp_adapters.save.staging.stager import QuantizedStager
from dcp_adapters.save.steps.overwrite import remove_replaced
from dcp_adapters.stored.read_manifest import read_manifest
from dcp_adapters.stored.reading.reader import SafeFileSystemReader

if TYPE_CHECKING:
    from dcp_adapters.adopting import AdoptedWeight, AdoptionReport, adopt, release
    from dcp_adapters.delta import (
        Anchors,
        Delta,
        HeldVersion,
        PatchedCopy,
        WrittenDelta,
        apply_deltas,
        checkpoint_bases,
        delta_from_bytes,
        delta_to_bytes,
        open_delta,
        patched_copy,
        removable,
        remove_checkpoints,
        save_delta,
        write_delta,
    )
    from dcp_adapters.digests.digest import digest, tensor_digests
    from dcp_adapters.gguf.export import export_gguf
    from dcp_adapters.hf.exporting.engine_scales import fused_linears
    from dcp_adapters.hf.exporting.export import export_hf
    from dcp_adapters.hf.reading.importing import import_hf
    from dcp_adapters.stored.saves import LatestVerified, Retained, Skipped, keep_latest, latest_verified
    from dcp_adapters.streams import (
        GroupReceiver,
        GroupSender,
        Incoming,
        SharedMemoryReceiver,
        SharedMemorySender,
        TensorRecord,
        WeightStream,
        WeightStreamError,
        join_group,
        vllm_source,
    )

__all__ = [
    "AdoptedWeight",
    "AdoptionReport",
    "Anchors",
    "AtomicFileSystemWriter",
    "BaseLink",
    "Delta",
    "Entry",
    "GroupReceiver",
    "GroupSender",
    "HeldVersion",
    "Incoming",
    "LatestVerified",
    "Manifest",
    "PatchedCopy",
    "PlacedShard",
    "QuantizedLoadPlanner",
    "QuantizedSavePlanner",
    "QuantizedStager",
    "Retained",
    "SafeFileSystemReader",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "Skipped",
    "TensorRecord",
    "WeightStream",
    "WeightStreamError",
    "WrittenDelta",
    "adopt",
    "apply_deltas",
    "checkpoint_bases",
    "delta_from_bytes",
    "delta_to_bytes",
    "digest",
    "expand",
    "export_gguf",
    "export_hf",
    "fused_linears",
    "import_hf",
    "join_group",
    "keep_latest",
    "latest_verified",
    "open_delta",
    "patched_copy",
    "read_manifest",
    "release",
    "removable",
    "remove_checkpoints",
    "remove_replaced",
    "save_delta",
    "tensor_digests",
    "vllm_source",
    "write_delta",
]

# public name -> the package or module that it comes from
_HOMES = {
    **dict.fromkeys(("AdoptedWeight", "AdoptionReport", "adopt", "release"), "dcp_adapters.adopting"),
    "Anchors": "dcp_adapters.delta",
    "Delta": "dcp_adapters.delta",
    "HeldVersion": "dcp_adapters.delta",
    "PatchedCopy": "dcp_adapters.delta",
    "WrittenDelta": "dcp_adapters.delta",
    "apply_deltas": "dcp_adapters.delta",
    "checkpoint_bases": "dcp_adapters.delta",
    "delta_from_bytes": "dcp_adapters.delta",
    "delta_to_bytes": "dcp_adapters.delta",
    "open_delta": "dcp_adapters.delta",
    "patched_copy": "dcp_adapters.delta",
    "removable": "dcp_adapters.delta",
    "remove_checkpoints": "dcp_adapters.delta",
    "save_delta": "dcp_adapters.delta",
    "write_delta": "dcp_adapters.delta",
    "digest": "dcp_adapters.digests.digest",
    "tensor_digests": "dcp_adapters.digests.digest",
    "export_gguf": "dcp_adapters.gguf.export",
    "export_hf": "dcp_adapters.hf.exporting.export",
    "fused_linears": "dcp_adapters.hf.exporting.engine_scales",
    "import_hf": "dcp_adapters.hf.reading.importing",
    **dict.fromkeys(
        ("LatestVerified", "Retained", "Skipped", "keep_latest", "latest_verified"), "dcp_adapters.stored.saves"
    ),
    "GroupReceiver": "dcp_adapters.streams",
    "GroupSender": "dcp_adapters.streams",
    "Incoming": "dcp_adapters.streams",
    "SharedMemoryReceiver": "dcp_adapters.streams",
    "SharedMemorySender": "dcp_adapters.streams",
    "TensorRecord": "dcp_adapters.streams",
    "WeightStream": "dcp_adapters.streams",
    "WeightStreamError": "dcp_adapters.streams",
    "join_group": "dcp_adapters.streams",
    "vllm_source": "dcp_adapters.streams",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
