"""Products of grouped tokens with stacked experts, both operands quantized.

calls.py       torch's grouped_mm and bmm, which end here
linear.py      forward and backward
operands.py    what the products multiply: a stack turned, columns of groups
layout.py      groups in whole blocks
choice.py      which product a device takes: a decision over a record
multiply.py    the products themselves, one operation each in a compiled graph
scales.py      block scales of groups, as tensor cores read them
"""
