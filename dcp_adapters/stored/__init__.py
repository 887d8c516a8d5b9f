"""Is a checkpoint what was saved? Every chunk is read once; findings are collected, not thrown.

verify.py            the walk over all chunks
report.py            findings and counts
manifest_checks.py   do manifest and entries agree
part_values.py       could a quantizer have written these scales and payloads
"""
