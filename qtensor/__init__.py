"""Low-precision weights that stay low-precision.

Recipes, exact numerics, `QuantizedTensor`, model wrapping and the master-weight optimizer. The rooms, from the lowest
to the highest; each imports only what stands above it here, and fsdp_hooks:

    spec/      what a format is
    numerics/  values to parts and back, at speed, and what can be said of them exactly
    tensor/    QuantizedTensor: a wrapper around its parts
    ops/       what torch may do to it: the op table
    products/  products with quantized weights, forward and backward
    formats/   the formats, one file each: add one here
    scales/    scales that reach beyond a shard or a tensor
    optim/     MasterWeightOptimizer
    model/     quantized weights in models that know nothing of them
    merging/   updates (trained adapters, say) merged into quantized weights
"""

from fsdp_hooks.kernels.compiled import use_kernels
from qtensor.formats.float8 import Float8CurrentScaling, Float8Tensor
from qtensor.formats.float8_blocks import Float8BlockScaling
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.formats.int4 import Int4GroupScaling, Int4Tensor
from qtensor.formats.mxfp4 import MXFP4BlockScaling, MXFP4Tensor
from qtensor.formats.mxfp8 import MXFP8BlockScaling, MXFP8Tensor
from qtensor.formats.nvfp4 import NVFP4BlockScaling, NVFP4Tensor
from qtensor.merging.low_rank import LowRankUpdate
from qtensor.merging.merge import merge_
from qtensor.merging.merge_report import MergedWeight, MergeReport
from qtensor.model.model_init import (
    clear_high_precision_init_val,
    high_precision_init_val,
    quantize_,
    quantized_model_init,
)
from qtensor.ops import data_attribute, optimizer_ops, redistribute, table, views  # noqa: F401 - importing these fills the op table
from qtensor.ops.stochastic import stochastic_rounding
from qtensor.optim.master_weights import MasterWeightOptimizer
from qtensor.products import linear, matmul  # noqa: F401 - likewise
from qtensor.products.decode_once import decode_once
from qtensor.scales.shared_scales import share_scales
from qtensor.spec.recipes import Recipe
from qtensor.tensor.old_paths import keep_old_paths
from qtensor.tensor.pickling import rebuild  # noqa: F401 - pickles name it, as qtensor.rebuild
from qtensor.tensor.quantized_tensor import QuantizedTensor, quantize

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

keep_old_paths()
