"""Quantized modules of other libraries become ours, with their bytes, and go back.

    adoption.py  `adopt`: all decisions first, and then every module is changed; candidates.py: which modules there are
    releasing.py  `release`: back to tensors of the library
    outcome.py   what a source says of one weight: taken, or refused and why; what it gives back
    report.py    what became of each weight
    source.py    what a source is; sources/: one file a library
    replace.py   how a module gets its new weight; forget.py: what a library says of the whole model

A library is never imported to adopt from it: its classes are known by their names (`type(x).__mro__`).
"""

from dcp_adapters.adopting.adoption import adopt
from dcp_adapters.adopting.releasing import release
from dcp_adapters.adopting.report import AdoptedWeight, AdoptionReport

__all__ = ["AdoptedWeight", "AdoptionReport", "adopt", "release"]
