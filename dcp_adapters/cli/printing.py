"""What commands answer: the exit status, results on stdout, warnings and errors on stderr."""

import json
import sys
from typing import Any

PROGRAM = "python -m dcp_adapters"
FINE, FOUND, FAILED = 0, 1, 2  # the exit status


def show(result: Any) -> None:
    """Print a text as it is, anything else as JSON."""
    text = result if isinstance(result, str) else json.dumps(result, indent=2, allow_nan=False)
    encoding = sys.stdout.encoding or "utf-8"
    # a path may hold bytes that are no text in this encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def warn(text: str) -> None:
    """Print a warning."""
    print(f"{PROGRAM}: warning: {text}", file=sys.stderr)
