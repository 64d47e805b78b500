"""``python -m benchmarks NAME`` in a checkout, ``python -m overlap_torch.benchmarks NAME`` where it is installed."""

import sys

from .study import main

if __name__ == "__main__":
    sys.exit(main())
