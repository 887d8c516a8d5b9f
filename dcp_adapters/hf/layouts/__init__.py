"""The layouts, and what their JSON says.

layout.py        what a layout is; compressed_tensors.py, modelopt.py, fp8.py, gpt_oss.py are the four
experts.py       which linears a weight of all experts becomes
rotations.py     inputs that a layout says are rotated; recorded.py: what our own exports say besides
claims.py        what JSON says of each linear; plain_claims.py: where it says one thing of all
"""
