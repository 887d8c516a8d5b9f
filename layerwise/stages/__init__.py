"""What of a model is calibrated together: its layers, the weights to quantize in them, and the stages they make up."""
