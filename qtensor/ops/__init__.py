"""What torch may do to a quantized tensor: the op table.

table.py           the table, and what copies and allocates
in_place.py        updates in place, which requantize
views.py           other looks at the same bytes
redistribute.py    collectives of `full_tensor()` and `distribute_tensor()`
joined.py          `torch.cat` of flat weights, which DDP's first broadcast makes
optimizer_ops.py   what optimizers do besides in-place updates
stochastic.py      writes whose expectation is exact
lost_updates.py    tells of updates that rounding takes back
data_attribute.py  assigning `.data`
"""
