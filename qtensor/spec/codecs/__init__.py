"""The numbers that formats are made of, each in a module of its own; a format puts them together.

fp8.py       E4M3 and E5M2 elements
e2m1.py      E2M1 elements, two in a byte
int8.py      whole numbers of eight bits
int4.py      whole numbers of four bits, two in a byte
nf4.py       quantiles of the normal distribution, two in a byte
e8m0.py      powers of two as scales of blocks
bf16.py      bf16 numbers as scales of blocks
nibbles.py   codes of four bits, two in a byte

rounding.py  how an element is rounded: to nearest, or stochastically
hashing.py   random bits that are a hash of where an element is, or of the row it stands in

What elements have in common:

    encode(scaled, whole, ..)   fp32 values over their scale -> payload; rounds (stochastically where armed), saturates
    snapped(scaled, ..)         the values of the nearest elements, fp32

`whole` says which elements of the input are finite; the others become NaN, or 0 where the element has no NaN.
"""
