"""Does the manifest fit what is stored? Each of its weights has all its parts, and no part is without a weight."""

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_adapters.records.manifest import Manifest
from dcp_adapters.stored.reading.metadata_checks import METADATA, Fault
from qtensor.spec.registry import part_names


def manifest_faults(manifest: Manifest, metadata: Metadata) -> list[Fault]:
    """Return where the manifest and the stored tensors contradict each other."""
    stored, faults = metadata.state_dict_metadata, []
    owned, parts = set(), part_names().union(*(entry.parts() for entry in manifest.tensors.values()))
    for name, entry in manifest.tensors.items():
        if name in stored:
            faults.append(Fault(METADATA, name, "it is held as a whole, beside the parts that the manifest lists"))
        for part, (dtype, shape) in entry.parts().items():
            owned.add(f"{name}.{part}")
            found = stored.get(f"{name}.{part}")
            if not isinstance(found, TensorStorageMetadata):
                held = "no such entry is stored" if found is None else "it is stored as something else than a tensor"
                faults.append(Fault(METADATA, f"{name}.{part}", f"the manifest lists it, and {held}"))
            elif (found.properties.dtype, tuple(found.size)) != (dtype, shape):
                held = f"{found.properties.dtype} {tuple(found.size)} is stored"
                faults.append(
                    Fault(METADATA, f"{name}.{part}", f"{held}, the manifest's {entry.recipe} needs {dtype} {shape}")
                )
    # a part that the manifest forgot would be loaded as a dense tensor of codes
    for name in stored.keys() - owned:
        owner, _, part = name.rpartition(".")
        if (owner in manifest.tensors and part in parts) or (part == "payload" and f"{owner}.scale" in stored):
            faults.append(Fault(METADATA, name, f"a part of {owner} that the manifest does not list"))
    return sorted(faults, key=lambda fault: fault.entry)
