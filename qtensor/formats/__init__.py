"""The formats, one file each. Each registers itself (`qtensor.spec.registry.register`); nothing else names it.

float8.py  float8_blocks.py  float8_delayed.py  mxfp8.py  mxfp4.py  nvfp4.py  int8.py  int4.py  nf4.py
"""
