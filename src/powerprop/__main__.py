"""`python -m powerprop` is the command `powerprop`."""

import sys

from powerprop.cli import main
from powerprop.train.distributed import leave, under_torchrun

if __name__ == "__main__":
    code = main()
    if under_torchrun():
        leave(code)
    sys.exit(code)
