"""Many writers and readers, writers killed, the server restarted: ``benchmarks/fleet.py``, small."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_nothing_is_lost_or_torn(kind: str) -> None:
    """In a separate process, which has not imported torch: its children are forked.

    The first writer is killed at once: on a quiet host all of them end within 0.15 s.
    """
    if kind == "postgresql":
        from tests.support import postgres

        if postgres.binaries() is None:
            pytest.skip("no PostgreSQL server is installed (initdb and postgres were not found)")
    code = """
import sys
from benchmarks import fleet
size = fleet.Size(writers=3, readers=2, each=60, kill_s=0.0, kills=8, away_s=0.5, pause_s=0.1)
with fleet.database(sys.argv[1], size.away_s) as (url, restart):
    found = fleet.fleet(url, size, restart)
assert "torch" not in sys.modules or sys.argv[1] == "postgresql"
print(found.rows, found.acknowledged, found.kills > 0, found.rounds > 0, found.outages, found.faults)
"""
    done = subprocess.run([sys.executable, "-c", code, kind], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == f"180 180 True True {int(kind == 'postgresql')} []", done.stderr[-2000:]
