"""One file a question; `python -m benchmarks` asks them all and writes results/<date>-<machine>.json."""
