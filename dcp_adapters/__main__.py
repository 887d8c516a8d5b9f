"""`python -m dcp_adapters`."""

import sys

from dcp_adapters.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
