"""Column factors: where they can go, found by probing, and folding them there."""
