"""Quantized tensors in PyTorch distributed checkpoints.

Raw payloads and scales as plain tensors, resharded by stock DCP.
"""

from dcp_adapters.expand import expand
from dcp_adapters.hf.export import export_hf
from dcp_adapters.hf.importing import import_hf
from dcp_adapters.load.planner import QuantizedLoadPlanner
from dcp_adapters.manifest import Manifest
from dcp_adapters.reading.reader import SafeFileSystemReader
from dcp_adapters.save.atomic_writer import AtomicFileSystemWriter
from dcp_adapters.save.overwrite import remove_replaced
from dcp_adapters.save.planner import QuantizedSavePlanner
from dcp_adapters.staging.stager import QuantizedStager
from dcp_adapters.stored.read_manifest import read_manifest

__all__ = [
    "AtomicFileSystemWriter",
    "Manifest",
    "QuantizedLoadPlanner",
    "QuantizedSavePlanner",
    "QuantizedStager",
    "SafeFileSystemReader",
    "expand",
    "export_hf",
    "import_hf",
    "read_manifest",
    "remove_replaced",
]
