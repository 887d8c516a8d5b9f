"""Quantized weights in models that know nothing of them.

model_init.py   quantized_model_init, while a model is built
built_model.py  quantize_, afterwards
routers.py      linears that choose experts, which stay as they are
log.py          what both log
loading.py      dense state dicts into quantized models
"""
