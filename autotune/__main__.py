"""``python -m autotune``: the command, where its script is not on the path."""

from __future__ import annotations

import sys

from autotune.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
