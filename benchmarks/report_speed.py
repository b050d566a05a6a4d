"""Time of ``autotune report`` for a large database.

    python -m benchmarks.report_speed --workloads 1000 --out benchmarks/results/cpu/report.json

The database holds so many workloads of one device with 40 candidates each, a fifth of them failures, written as
searches do. The command runs in a separate process. ``pages_s`` is the time for reading the database and making pages
it, in this process; the rest is imports, and writing the site.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.report.database import pages
from autotune.store import Store
from tests.support.searched import calibrated, region, searched

ROOT = Path(__file__).resolve().parent.parent


def fill(file: Path, workloads: int, candidates: int) -> None:
    """A database as searches of so many workloads leave one."""
    with Store.open(file) as store:
        calibrated(store)
        for n in range(workloads):
            searched(store, region(64 + n % 100, 64 + n // 100), candidates=candidates, seed=n)


def measure(workloads: int, candidates: int) -> dict[str, Any]:
    """Seconds, megabytes and pages of one report."""
    with tempfile.TemporaryDirectory(prefix="autotune-report-") as folder:
        file, out = Path(folder) / "large.db", Path(folder) / "report"
        fill(file, workloads, candidates)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "autotune", "report", "--db", str(file), "-o", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        took = time.perf_counter() - begin
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        made = [f for f in out.rglob("*") if f.is_file()]
        begin = time.perf_counter()
        with Store.open(file, readonly=True) as store:
            count = len(list(pages(store)))
        return {
            "name": f"{workloads} workloads of {candidates} candidates",
            "pages": count,
            "report_s": round(took, 2),
            "cpu_s": round(spent.ru_utime + spent.ru_stime, 2),
            "memory_mib": round(spent.ru_maxrss / 1024),
            "pages_s": round(time.perf_counter() - begin, 2),
            "site_mb": round(sum(f.stat().st_size for f in made) / 1e6, 1),
            "index_mb": round((out / "index.html").stat().st_size / 1e6, 2),
            "files": len(made),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=40, help="of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    case = measure(args.workloads, args.candidates)
    print(case)
    if args.out:
        from autotune.device import identify
        from benchmarks import form

        form.write(
            args.out, identify("cpu").label, [case], {}, extra={"suite": "report", "load_before": round(load, 1)}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
