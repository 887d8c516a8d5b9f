"""The sources, one file a library: what its quantized modules look like, and how their bytes become ours.

torchao.py   tensors of `torchao.quantization.quantize_`: Float8, MXFP8, MXFP4, NVFP4, INT4
torchao_tensors.py   the way back to these
packing.py   what several of them share

A new one is a file with a `Source`, and an entry in SOURCES. The first that knows a module takes it, so a source that
means a whole package, and refuses, comes behind all others.
"""

from dcp_adapters.adopting.source import Source
from dcp_adapters.adopting.sources import torchao

SOURCES: tuple[Source, ...] = (torchao.TENSORS, torchao.OTHERS)

__all__ = ["SOURCES", "torchao"]
