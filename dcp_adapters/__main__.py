"""`python -m dcp_adapters`."""

import sys

from dcp_adapters.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
