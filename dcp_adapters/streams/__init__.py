"""Quantized weights into running engines, out of the shards of a training that goes on.

buckets.py         which tensors travel together, and where each lies among the bytes; pure
announcement.py    what a sender says before the first bucket: names, dtypes, shapes, files of JSON
transport.py       the interface of senders; what receivers check; their errors
kept_tensors.py    the last version, on the host: what `since` makes deltas from
together.py        steps of a pass that may fail on one rank
weight_stream.py   WeightStream: a model or state dict -> buckets of tensors, and `send`
shared_memory.py   an engine on the same host: memory of the trainer, mapped by the engine; wires.py has ring and socket
process_group.py   an engine anywhere: broadcasts of torch.distributed, over gloo or NCCL; link.py makes these calls
vllm.py            vllm_source: vLLM's own seam for weights
"""

from dcp_adapters.streams.buckets import TensorRecord
from dcp_adapters.streams.process_group import GroupReceiver, GroupSender, join_group
from dcp_adapters.streams.shared_memory import SharedMemoryReceiver, SharedMemorySender
from dcp_adapters.streams.transport import Incoming, WeightStreamError
from dcp_adapters.streams.vllm import vllm_source
from dcp_adapters.streams.weight_stream import WeightStream

__all__ = [
    "GroupReceiver",
    "GroupSender",
    "Incoming",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "TensorRecord",
    "WeightStream",
    "WeightStreamError",
    "join_group",
    "vllm_source",
]
