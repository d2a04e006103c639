"""`python -m meshpipe` is the command `meshpipe`."""

import sys

from meshpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
