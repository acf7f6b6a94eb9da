"""``python -m marl``: the ``marl`` command."""

import sys

from marl.cli import main

if __name__ == "__main__":
    sys.exit(main())
