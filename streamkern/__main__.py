"""`python -m streamkern` is the command `streamkern`."""

import sys

from streamkern.cli import main

if __name__ == "__main__":
    sys.exit(main())
