"""The layouts, one file each: both directions, and what it refuses. Each registers itself, as soon as one is asked for.

compressed_tensors.py  modelopt.py  fp8.py  gpt_oss.py   the four
layout.py     what a layout is; forms.py: how a part looks in a file; registry.py: which there are
experts.py    which linears a weight of all experts becomes
rotations.py  inputs that a layout says are rotated; recorded.py: what our own exports say besides
"""

from dcp_adapters.hf.layouts import compressed_tensors, fp8, gpt_oss, modelopt

__all__ = ["compressed_tensors", "fp8", "gpt_oss", "modelopt"]
