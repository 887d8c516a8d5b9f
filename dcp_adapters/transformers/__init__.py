"""transformers' `from_pretrained` with quantized weights: import this module, and it knows `QTensorConfig`.

    from_pretrained(dense, quantization_config=QTensorConfig(recipe))
        model on the meta device  ->  which weights (as `quantize_` chooses them)
        each tensor that is read  ->  quantized on the device it is for, and the dense one is dropped

    from_pretrained(quantized, config=quantized_config(quantized))
        headers of the files      ->  which weights, of which recipes, or one error (as `import_hf` reads them)
        each tensor that is read  ->  collected until a weight is complete; its bytes stay as they are

    save_pretrained(out)  ->  the tensors of `export_hf`, and in config.json what engines are told of them

transformers calls the classes here through its public registration. A directory that is quantized belongs to whoever
its config.json names, unless a `config=` says otherwise; `quantized_config` makes one.

config.py     QTensorConfig and quantized_config: what is asked
conversion.py how tensors of the files become weights: quantized, or taken over
quantizer.py  what transformers asks while it loads and saves
trainer.py    QuantizedTrainer: a Trainer that goes on from its checkpoints; imported by itself, since it takes long
"""

from dcp_adapters.transformers.config import QTensorConfig, quantized_config
from dcp_adapters.transformers.quantizer import QTensorQuantizer

__all__ = ["QTensorConfig", "QTensorQuantizer", "quantized_config"]
