"""The sources, one file a library: what its quantized modules look like, and how their bytes become ours.

torchao.py   tensors of `torchao.quantization.quantize_`: Float8, MXFP8, MXFP4, NVFP4, INT4, INT8
torchao_tensors.py   the way back to these
compressed_tensors.py   modules with a `quantization_scheme`
compressed_modules.py   the way back to these
hugging_face.py   transformers' FP8 linears; what of it stays
bitsandbytes.py   linears of 4 and 8 bits
modelopt.py   linears after `mtq.compress`
packing.py   what several of them share

A new one is a file with a `Source`, and an entry in SOURCES. The first that knows a module takes it, so a source that
means a whole package, and refuses, comes behind all others.
"""

from dcp_adapters.adopting.source import Source
from dcp_adapters.adopting.sources import bitsandbytes, compressed_tensors, hugging_face, modelopt, torchao

SOURCES: tuple[Source, ...] = (
    torchao.TENSORS,
    hugging_face.OTHERS,  # some of its classes are made of FP8Linear
    hugging_face.LINEARS,
    compressed_tensors.MODULES,
    bitsandbytes.FOUR_BITS,
    bitsandbytes.EIGHT_BITS,
    bitsandbytes.OTHERS,
    modelopt.LINEARS,
    modelopt.OTHERS,
    torchao.OTHERS,
)

__all__ = ["SOURCES", "bitsandbytes", "compressed_tensors", "hugging_face", "modelopt", "torchao"]
