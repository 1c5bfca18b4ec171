"""`python -m powerprop` is the command `powerprop`."""

import sys

from powerprop.cli import main

if __name__ == "__main__":
    sys.exit(main())
