"""How large the errors of quantization are, and how they are shown.

measure    errors of one stage: its linears and its output
report     the report of a run: a table, a JSON file
figure     its picture
"""
