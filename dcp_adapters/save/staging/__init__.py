"""Staging: copies in host memory that an asynchronous save writes from.

stager.py        QuantizedStager
host_memory.py   the buffers, kept from save to save
"""
