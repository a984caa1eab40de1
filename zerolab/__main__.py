"""`python -m zerolab` is the command `zerolab`."""

import sys

from zerolab.cli import main

if __name__ == "__main__":
    sys.exit(main())
