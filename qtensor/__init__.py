"""Low-precision weights that stay low-precision.

Recipes, exact numerics, `QuantizedTensor`, model wrapping and the master-weight optimizer.
"""

from fsdp_hooks.compiled import use_kernels
from qtensor import data_attribute, linear, matmul, ops, optimizer_ops, redistribute, views  # noqa: F401 - importing these fills the table of handlers
from qtensor.decode_once import decode_once
from qtensor.float8 import Float8CurrentScaling, Float8Tensor
from qtensor.float8_blocks import Float8BlockScaling
from qtensor.float8_delayed import Float8DelayedScaling
from qtensor.int4 import Int4GroupScaling, Int4Tensor
from qtensor.low_rank import LowRankUpdate
from qtensor.merge_report import MergedWeight, MergeReport
from qtensor.merging import merge_
from qtensor.model_init import clear_high_precision_init_val, high_precision_init_val, quantize_, quantized_model_init
from qtensor.mxfp4 import MXFP4BlockScaling, MXFP4Tensor
from qtensor.mxfp8 import MXFP8BlockScaling, MXFP8Tensor
from qtensor.nvfp4 import NVFP4BlockScaling, NVFP4Tensor
from qtensor.optim import MasterWeightOptimizer
from qtensor.recipes import Recipe
from qtensor.shared_scales import share_scales
from qtensor.stochastic import stochastic_rounding
from qtensor.tensor import QuantizedTensor, quantize

__all__ = [
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8DelayedScaling",
    "Float8Tensor",
    "Int4GroupScaling",
    "Int4Tensor",
    "LowRankUpdate",
    "MXFP4BlockScaling",
    "MXFP4Tensor",
    "MXFP8BlockScaling",
    "MXFP8Tensor",
    "MasterWeightOptimizer",
    "MergeReport",
    "MergedWeight",
    "NVFP4BlockScaling",
    "NVFP4Tensor",
    "QuantizedTensor",
    "Recipe",
    "clear_high_precision_init_val",
    "decode_once",
    "high_precision_init_val",
    "merge_",
    "quantize",
    "quantize_",
    "quantized_model_init",
    "share_scales",
    "stochastic_rounding",
    "use_kernels",
]
