"""Kernel Tuner's cache files as recordings, and recordings as cache files for its simulation mode.

The FAIR benchmark hub (https://github.com/AutoTuningAssociation/benchmark_hub, MIT) keeps spaces of other people's
kernels that were measured whole on several GPUs: convolution, dedispersion, GEMM, point-in-polygon. Only numbers are
read. Kernel Tuner measures no default and has no cost model: searches in these begin at a random candidate.

    python -m benchmarks.search_quality.hub benchmarks/recordings pnpoly-RTX_3090.json.gz convolution-A100.json.gz
    python -m benchmarks.search_quality.hub FOLDER benchmarks/recordings/h200/*.recording.json.gz --back
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from autotune.space import Parameter, Space
from autotune.task import Status
from autotune.workload import Workload
from benchmarks.replay.recording import SUFFIX, Recording, Row


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


def cache(recording: Recording) -> dict[str, Any]:
    """A recording as Kernel Tuner's cache, each candidate once; a choice that is no number becomes its position."""
    names = [p.name for p in recording.space]
    numbers = {p.name: _numbers(list(p.choices)) for p in recording.space}
    entries: dict[str, dict[str, Any]] = {}
    for k, point in {k: point for point, k in reversed([*enumerate(recording.points)]) if k >= 0}.items():
        row, config = recording.rows[k], recording.space.at(point)
        values = [numbers[p.name][p.choices.index(config[p.name])] for p in recording.space]
        entries[",".join(map(str, values))] = {
            **dict(zip(names, values, strict=True)),
            "time": "RuntimeFailedConfig" if row.latency_us is None else row.latency_us / 1e3,
            "compile_time": 1e3 * row.compile_s,
            "verification_time": 0.0,
            "benchmark_time": 1e3 * row.measure_s,
        }
    return {
        "device_name": str(recording.about.get("device", recording.device)),
        "kernel_name": recording.workload.label,
        "problem_size": [1, 1],
        "tune_params_keys": names,
        "tune_params": numbers,
        "objective": "time",
        "cache": entries,
    }


def _numbers(choices: list[Any]) -> list[Any]:
    """The choices, or their positions where one is no number."""
    real = all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in choices)
    return choices if real else list(range(len(choices)))


def main() -> None:
    """Write the recordings of cache files."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--back", action="store_true", help="cache files of recordings")
    args = parser.parse_args()
    for file in args.files:
        if args.back:
            text = json.dumps(cache(Recording.load(file)))
            (args.out / f"{file.name.partition('.')[0]}.json").write_text(text)
            continue
        recording(file).save(args.out / f"{file.name.partition('.')[0]}{SUFFIX}")


if __name__ == "__main__":
    main()
