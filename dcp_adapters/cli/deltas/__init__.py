"""The commands of deltas.

delta.py   write what changed between two states
apply.py   write the state that deltas lead to
"""
