"""Layerwise calibration: quantize a model layer by layer, sharded, resumable on any number of ranks."""
