"""The fusion suite, as ``autotune bench fusion`` runs it.

    python -m benchmarks.fusion --device cuda:0 --out benchmarks/results/h200/fusion.json --db fusion.db --timeout 60
    python -m benchmarks.fusion --device cpu --out benchmarks/results/cpu/fusion.json --db fusion-cpu.db --timeout 30

A killed run loses at most one case: the same command with ``--resume`` goes on where it was.
"""

from __future__ import annotations

import sys

from autotune.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "fusion", *sys.argv[1:]]))
