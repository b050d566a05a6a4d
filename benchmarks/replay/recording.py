"""A search space of which every candidate was measured once, in a file.

A recording has all inputs of a search from a task and a device, so that the search runs without either, and
without the code of the candidates. These are the space, the points of equal candidates, the default,
the heuristics' suggestions, the cost model's predictions, and the outcome of every candidate.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.files import whole_file
from autotune.space import Config, Parameter, Space
from autotune.task import Status, config_key
from autotune.workload import Workload

VERSION = 1
SUFFIX = ".recording.json.gz"
_LARGEST = 64 << 20  # bytes of JSON; one of the largest space that is recorded has a tenth
_DIGITS = 4


@dataclass(frozen=True)
class Row:
    """The outcome of one candidate.

    Attributes:
        latency_us: None unless ``status`` is ok.
        expected_us: by the domain's cost model; None where it has none.
        compile_s: what building it took, on one processor.
        measure_s: what verifying and timing it took.
    """

    config: Config
    status: Status
    latency_us: float | None = None
    expected_us: float | None = None
    compile_s: float = 0.0
    measure_s: float = 0.0


@dataclass(frozen=True)
class Recording:
    """One workload's space on one device.

    Attributes:
        device: "cpu" or "cuda:0"; on a GPU, compilation and measurement overlap.
        processes: that compiled on the recording machine.
        default: the configuration that the domain takes without a search.
        seeds: what its heuristics suggest.
        rows: the candidates, each once.
        points: for each point of the space, in its order, the number of the row that it means; -1 where it cannot work.
        about: device, environment, version and date, for people.
    """

    workload: Workload
    device: str
    processes: int
    space: Space
    default: Config
    seeds: tuple[Config, ...]
    rows: tuple[Row, ...]
    points: tuple[int, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def by_key(self) -> dict[str, Row]:
        """Rows by the key of their configuration."""
        return {config_key(row.config): row for row in self.rows}

    @cached_property
    def optimum_us(self) -> float:
        """Latency of the best candidate of the space in microseconds."""
        inside = {k for k in self.points if k >= 0}
        return min(r.latency_us for k, r in enumerate(self.rows) if r.latency_us is not None and k in inside)

    def row(self, config: Mapping[str, Any]) -> Row | None:
        """The row that a configuration means; None where it cannot work, or was not recorded."""
        if (index := self._index(config)) is not None:
            return self.rows[self.points[index]] if self.points[index] >= 0 else None
        return self.by_key.get(config_key(config))

    def _index(self, config: Mapping[str, Any]) -> int | None:
        """Number of a point of the space."""
        if not self.space.contains(config):
            return None
        index = 0
        for p in self.space:
            position = p.index(config[p.name])
            assert position is not None
            index = index * len(p.choices) + position
        return index

    def save(self, path: Path) -> None:
        """Write the file; an older one of this name is replaced.

        Raises:
            OSError: it cannot be written.
        """
        names = [p.name for p in self.space]
        data = {
            "recording": VERSION,
            "workload": self.workload.to_json(),
            "device": self.device,
            "processes": self.processes,
            "space": [[p.name, list(p.choices)] for p in self.space],
            "default": self.default,
            "seeds": list(self.seeds),
            "configs": [[row.config[name] for name in names] for row in self.rows],
            **{name: [_short(getattr(row, name)) for row in self.rows] for name in _COLUMNS},
            "points": list(self.points),
            "about": dict(self.about),
        }
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        with whole_file(path) as out, gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as packed:
            packed.write(text.encode())

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file.

        Raises:
            UserError: an unreadable file, no recording, or another version; one line with the reason.
        """
        try:
            with gzip.open(path, "rb") as packed:
                data = json.loads(packed.read(_LARGEST))
            if not isinstance(data, dict) or "recording" not in data:
                raise UserError(f"{path} is no recording: `python -m benchmarks.replay record` makes one")
            if data["recording"] != VERSION:
                raise UserError(f"{path}: recording of version {data['recording']!r}; this autotune reads {VERSION}")
            return cls._from_json(data)
        except gzip.BadGzipFile:
            raise UserError(f"{path} is no recording: `python -m benchmarks.replay record` makes one") from None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError, IndexError, EOFError, zlib.error, RecursionError) as error:
            raise UserError(f"{path} is damaged, or no recording: {type(error).__name__}: {error}") from None

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> Recording:
        space = Space(tuple(Parameter(str(name), tuple(choices)) for name, choices in data["space"]))
        names = [p.name for p in space]
        configs = [dict(zip(names, values, strict=True)) for values in data["configs"]]
        rows = tuple(_row(config, data, k) for k, config in enumerate(configs))
        points = tuple(int(k) for k in data["points"])
        if len(points) != space.size or not all(-1 <= k < len(rows) for k in points):
            raise ValueError("its points are not those of its space")
        found = cls(
            workload=Workload.from_json(data["workload"]),
            device=str(data["device"]),
            processes=max(1, int(data["processes"])),
            space=space,
            default=dict(data["default"]),
            seeds=tuple(dict(seed) for seed in data["seeds"]),
            rows=rows,
            points=points,
            about=dict(data["about"]),
        )
        if not any(rows[k].latency_us for k in points if k >= 0):
            raise ValueError("no candidate in it works")
        return found


_COLUMNS = ("status", "latency_us", "expected_us", "compile_s", "measure_s")


def _row(config: Config, data: Mapping[str, Any], k: int) -> Row:
    values = {name: data[name][k] for name in _COLUMNS}
    status = Status(values.pop("status"))
    numbers = {name: None if value is None else float(value) for name, value in values.items()}
    if not all(v is None or (math.isfinite(v) and v >= 0) for v in numbers.values()):
        raise ValueError(f"candidate {k} has a number that is none")
    if (status is Status.OK) != (numbers["latency_us"] is not None):
        raise ValueError(f"candidate {k} is {status} and has the latency {numbers['latency_us']}")
    return Row(config, status, **numbers)  # type: ignore[arg-type]


def _short(value: object) -> object:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def load_all(paths: Sequence[Path]) -> list[Recording]:
    """The recordings of files, and of every file in folders, in the order of their names.

    Raises:
        UserError: one cannot be read, or a folder has none.
    """
    found: list[Recording] = []
    for path in paths:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} has no recording (*{SUFFIX}): `python -m benchmarks.replay record` makes one")
        found += [Recording.load(file) for file in files]
    return found
