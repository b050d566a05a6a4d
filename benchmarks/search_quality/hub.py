"""Kernel Tuner's cache files as recordings.

The FAIR benchmark hub (https://github.com/AutoTuningAssociation/benchmark_hub, MIT) keeps spaces of other people's
kernels that were measured whole on several GPUs: convolution, dedispersion, GEMM, point-in-polygon. Only numbers are
read. Kernel Tuner measures no default and has no cost model: searches in these begin at a random candidate.

    python -m benchmarks.search_quality.hub benchmarks/recordings pnpoly-RTX_3090.json.gz convolution-A100.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from autotune.space import Parameter, Space
from autotune.task import Status
from autotune.tuner.replay.recording import SUFFIX, Recording, Row
from autotune.workload import Workload


def load_cache(path: Path) -> Any:
    """A cache file, packed or not."""
    packed = path.read_bytes()
    return json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed)


def recording(path: Path, processes: int = 1) -> Recording:
    """The recording of a cache file; milliseconds become microseconds, whatever failed is a launch error."""
    data = load_cache(path)
    names = [name for name, choices in data["tune_params"].items() if len(choices) > 1]
    space = Space(tuple(Parameter(name, tuple(_sorted(data["tune_params"][name]))) for name in names))
    rows, numbers = [], {}
    for entry in data["cache"].values():
        config = {name: entry[name] for name in names}
        time = entry.get("time")
        ok = isinstance(time, (int, float)) and time > 0
        numbers[tuple(config.values())] = len(rows)
        rows.append(
            Row(
                config,
                Status.OK if ok else Status.LAUNCH_ERROR,
                1e3 * time if ok else None,
                compile_s=entry.get("compile_time", 0.0) / 1e3,
                measure_s=(entry.get("benchmark_time", 0.0) + entry.get("verification_time", 0.0)) / 1e3,
            )
        )
    points = tuple(numbers.get(tuple(space.at(i).values()), -1) for i in range(space.size))
    label = path.name.partition(".")[0]
    return Recording(
        workload=Workload("kernel_tuner", {"cache": label}, label=label),
        device="cuda:0",
        processes=processes,
        space=space,
        default=rows[0].config,
        seeds=(),
        rows=tuple(rows),
        points=points,
        about={"device": data["device_name"], "from": "AutoTuningAssociation/benchmark_hub", "licence": "MIT"},
    )


def _sorted(choices: list[Any]) -> list[Any]:
    """Numbers in order: steps from one to the next are what neighbours are made of."""
    return sorted(choices) if all(isinstance(c, (int, float)) for c in choices) else choices


def main() -> None:
    """Write the recordings of cache files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    for file in args.files:
        recording(file).save(args.out / f"{file.name.partition('.')[0]}{SUFFIX}")


if __name__ == "__main__":
    main()
