"""What cannot be saved, refused by name while a save is planned: no older checkpoint has gone, no rank has written."""

from collections.abc import Collection, Mapping

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST
from dcp_adapters.torch_private import writes_safetensors


def refuse_taken_names(flat: Collection[str], entries: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse names that would be there twice. flat: of what has no parts; entries: leaf -> part -> its entry."""
    for name in (MANIFEST, CHECKSUMS):
        if name in flat:
            raise ValueError(
                f"the state dict holds an entry {name!r}, which is the name of the checkpoint's own; rename it"
            )
    taken = [entry for parts in entries.values() for entry in parts.values() if entry in flat]
    if taken:
        raise ValueError(
            f"the state dict holds {min(taken)!r} twice: as an entry and as a part of a quantized weight; rename "
            "the entry"
        )


def refuse_bytes_in_safetensors(plan: SavePlan) -> None:
    """Refuse byte entries: HuggingFaceStorageWriter writes them before a file's header, and nobody can read that."""
    if not writes_safetensors(plan.storage_data):
        return
    names = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
    if names:
        raise ValueError(
            f"{names[0]}: safetensors files hold tensors alone, and {len(names)} entries of the state dict are none; "
            "save them elsewhere, or as tensors"
        )
