"""Low-precision weights that stay low-precision.

Recipes, exact numerics, `QuantizedTensor`, model wrapping and the master-weight optimizer. The folders, the
lowest first; each imports only what is listed before it, and fsdp_hooks:

    spec/      what a format is
    numerics/  values to parts and back, at speed, and what can be said of them exactly
    probes/    what kernels written by hand are tried with on a device, before they run there
    tensor/    QuantizedTensor: a wrapper around its parts
    ops/       what torch may do to it: the op table
    products/  products with quantized weights, forward and backward
    formats/   the formats, one file each: add one here
    scales/    scales that reach beyond a shard or a tensor
    states/    states of training in two bytes or one: what they can hold, and how they are rounded
    optim/     MasterWeightOptimizer
    model/     quantized weights in models that know nothing of them
    merging/   updates (trained adapters, say) merged into quantized weights
    vectors/   inputs and the bytes that they must give, as files, for whoever writes kernels

The life of a weight under FSDP2, and the file of each stage:

    built       quantized_model_init puts a QuantizedTensor into the place       model/model_init.py
                of an nn.Linear's weight                                         tensor/quantized_tensor.py
    sharded     fully_shard splits it along rows: each part is cut alike, and    ops/views.py: cut
                copied into a shard with padding rows                            ops/table.py: new_zeros, copy_
    filled      to_empty allocates the parts, and a load or an init writes       ops/table.py, tensor/contents.py: write
                them; shards that share a scale agree on it                      scales/, fsdp_hooks/scale_sync.py
    gathered    the bytes of the parts travel, and the whole weight is views     fsdp_hooks/all_gather.py
                of what arrived
    used        F.linear decodes the weight inside the product; the gradient     products/linear.py
                is a plain tensor                                                numerics/kernels.py: decode
    resharded   FSDP2 frees what arrived; the shard was never changed            torch, fsdp_hooks/unshard.py
    gathered, used, resharded once more in backward; then FSDP2 reduces and scatters the gradient
    stepped     gradient -> fp32 master -> agreed scales -> new bytes in the     optim/master_weights.py
                same shard                                                       scales/, optim/batches.py

With storage="high_precision" the shard stays dense, and is quantized as it is gathered: scales/high_precision.py.

Words: docs/glossary.md.
"""

import sys

import fsdp_hooks
from fsdp_hooks.kernels.compiled import use_kernels
from fsdp_hooks.ranks.scale_partners import Partners
from qtensor.formats.float8 import Float8CurrentScaling, Float8Tensor
from qtensor.formats.float8_blocks import Float8BlockScaling
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.formats.int4 import Int4GroupScaling, Int4Tensor
from qtensor.formats.int8 import Int8RowScaling, Int8Tensor
from qtensor.formats.mxfp4 import MXFP4BlockScaling, MXFP4Tensor
from qtensor.formats.mxfp8 import MXFP8BlockScaling, MXFP8Tensor
from qtensor.formats.nf4 import NF4BlockScaling, NF4Tensor
from qtensor.formats.nvfp4 import NVFP4BlockScaling, NVFP4Tensor
from qtensor.merging.low_rank import LowRankUpdate
from qtensor.merging.merge import merge_
from qtensor.merging.merge_aware import merge_aware
from qtensor.merging.merge_report import MergedWeight, MergeReport
from qtensor.merging.through_merge import linear_through_merge
from qtensor.model.built_model import quantize_
from qtensor.model.loading import quantize_dense_entries
from qtensor.model.model_init import clear_high_precision_init_val, high_precision_init_val, quantized_model_init
from qtensor.ops import data_attribute, in_place, optimizer_ops, redistribute, table, views  # noqa: F401 - importing these fills the op table
from qtensor.ops.stochastic import stochastic_rounding
from qtensor.optim.master_weights import MasterWeightOptimizer
from qtensor.products import linear, matmul  # noqa: F401 - likewise
from qtensor.products.decode_once import decode_once
from qtensor.products.grouped import calls  # noqa: F401 - likewise
from qtensor.products.input_rotation import InputRotation
from qtensor.scales.high_precision import rebuild_dense
from qtensor.scales.shared_scales import share_scales
from qtensor.spec.recipes import Recipe
from qtensor.tensor.old_paths import keep_old_paths, name_by_package
from qtensor.tensor.pickling import rebuild
from qtensor.tensor.quantized_tensor import QuantizedTensor, quantize

__all__ = [
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8DelayedScaling",
    "Float8Tensor",
    "Int4GroupScaling",
    "Int4Tensor",
    "Int8RowScaling",
    "Int8Tensor",
    "LowRankUpdate",
    "MXFP4BlockScaling",
    "MXFP4Tensor",
    "MXFP8BlockScaling",
    "MXFP8Tensor",
    "MasterWeightOptimizer",
    "MergeReport",
    "MergedWeight",
    "NF4BlockScaling",
    "NF4Tensor",
    "NVFP4BlockScaling",
    "NVFP4Tensor",
    "QuantizedTensor",
    "Recipe",
    "clear_high_precision_init_val",
    "decode_once",
    "high_precision_init_val",
    "linear_through_merge",
    "merge_",
    "merge_aware",
    "quantize",
    "quantize_",
    "quantized_model_init",
    "share_scales",
    "stochastic_rounding",
    "use_kernels",
]

# What pickles of tensors, models and optimizers name.
name_by_package(
    sys.modules[__name__], MasterWeightOptimizer, InputRotation, rebuild, rebuild_dense, quantize_dense_entries
)
name_by_package(sys.modules[__name__], *(kind for kind in Recipe.registry.values() if kind.__name__ in __all__))
name_by_package(fsdp_hooks, Partners)
keep_old_paths(MasterWeightOptimizer)
