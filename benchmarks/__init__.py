"""One file a question; `python -m benchmarks` (or `make bench`) asks them all and writes results/<date>-<machine>.json."""
