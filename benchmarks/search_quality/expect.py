"""Let the cost model of today say what it expects of recorded candidates.

    python -m benchmarks.search_quality.expect benchmarks/recordings/h200 --target sm_90 --sms 132

A recording keeps what the model expected when it was made. After a change of the model this command writes the new
expectations into a folder's recordings of fusion on a GPU. What was measured stays, and no device is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.domains.fusion.task import FusionTask
from benchmarks.replay.recording import SUFFIX, Recording, load_all


def expected(recording: Recording, target: str, sms: int) -> Recording:
    """The recording with the expectations of today's model for a GPU of ``sms`` multiprocessors."""
    task = FusionTask(recording.workload, recording.device, target=target, sms=sms)
    rows = tuple(replace(row, expected_us=task.predict(row.config)) for row in recording.rows)
    return replace(recording, rows=rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm_90", help="the recorded device's architecture (%(default)s)")
    parser.add_argument("--sms", type=int, default=132, help="its multiprocessors (%(default)s)")
    options = parser.parse_args(argv)
    paths = sorted(options.folder.glob(f"*{SUFFIX}"))
    if not paths:
        parser.error(f"there is no recording in {options.folder}")
    for path in paths:
        recording = load_all([path])[0]
        if recording.workload.kind == "fusion" and recording.device != "cpu":
            expected(recording, options.target, options.sms).save(path)
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
