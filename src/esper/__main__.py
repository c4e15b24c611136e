"""`python -m esper` is the command `esper`."""

import sys

from esper.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
