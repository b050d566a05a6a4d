"""Limits of the devices: collectives alone by each engine, GEMMs during copies, GEMMs on fewer SMs.

    python -m benchmarks.c3_device --device cuda:0 --out benchmarks/results/h200x4/c3_device.json

Three parts (``--parts``), each a few cases of the file:

- ``bandwidth``: every collective by NCCL, by copy engines and, those that add, by Numba kernels, alone,
  64 KiB to 1 GiB: microseconds, bus bandwidth, and the size from which on copies are as fast as NCCL;
- ``power``: long GEMMs alone, copies alone and both, back to back until clocks have settled, with random operands and
    with zeros: times, SM clock, power, and the reasons of a lower clock. The clock is only read, never set;
- ``partition``: GEMMs with SMs kept from them.

On a CPU there is the first part alone, at small sizes, by gloo and by copies in shared memory. The tables go to stdout.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from autotune.domains.c3.scenario import COLLECTIVES, ITEMSIZE, REDUCING, Gemm, Scenario, format_bytes
from autotune.domains.c3.strategy import KINDS, Strategy, normalize, reject
from autotune.errors import BuildError, Unsupported, UserError
from autotune.measure.worker import WorkerFault
from benchmarks import c3_device_table, form
from benchmarks.c3_device_cases import Case, of_bandwidth, of_partition, of_power, summary
from benchmarks.c3_probe import Probe, Run

SUITE = "c3_device"
PARTS = ("bandwidth", "power", "partition")
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"cuda": tuple(64 * KIB * 4**k for k in range(8)), "cpu": tuple(64 * KIB * 4**k for k in range(4))}
BESIDE = (
    (Gemm(8192, 28672, 8192), 448 * MIB),
    (Gemm(8192, 8192, 8192), 512 * MIB),
    (Gemm(2048, 8192, 8192), 128 * MIB),
)
PARTED = (Gemm(8192, 8192, 8192), Gemm(2048, 8192, 8192), Gemm(256, 8192, 8192))
RESERVES = (0, 4, 8, 16, 24, 32)
SECONDS = 1.2
ROUNDS = 9
_CALL_S = 120.0
_FAULTS = 3  # after so many that took the ranks with them the rest is left out


class Caller(Protocol):
    """The used part of :class:`autotune.domains.c3.measuring.ranks.Ranks`."""

    @property
    def ranks(self) -> int: ...
    def call(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> list[Any]: ...


class Measure:
    """The ranks, and the list of failed measurements.

    Attributes:
        notes: a line for each thing that is missing from the cases.
    """

    def __init__(self, ranks: Caller, device: str) -> None:
        from autotune.domains.c3.task import policy

        self.ranks, self.device = ranks, device
        self.side = device.partition(":")[0]
        self.policy = policy(device).to_json()
        self.notes: list[str] = []
        self.faults = 0

    def ask(self, what: str, function: str, arguments: Mapping[str, Any]) -> list[Any] | None:
        """The answers of all ranks; None where they failed, which is noted."""
        if self.faults >= _FAULTS:
            self.note(f"{what}: left out, too many faults")
            return None
        print(what, file=sys.stderr, flush=True)
        try:
            return self.ranks.call(function, arguments, _CALL_S)
        except WorkerFault as fault:
            self.faults += 1
            self.note(f"{what}: {fault}")
            return None

    def times(self, probe: Probe) -> dict[str, float]:
        """Microseconds of a probe's runs, those that could be run, timed in turn."""
        arguments = {"probe": asdict(probe), "policy": self.policy, "rounds": ROUNDS}
        answers = self.ask(probe.name, "benchmarks.c3_probe:measure", arguments)
        if answers is None:
            return {}
        for name, why in answers[0]["skipped"].items():
            self.note(f"{probe.name}, {name}: {why}")
        return {str(name): round(us, 2) for name, us in answers[0]["us"].items()}

    def note(self, line: str) -> None:
        self.notes.append(line)
        print(line, file=sys.stderr, flush=True)


# Bandwidth


def ways(side: str, op: str) -> dict[str, dict[str, Any]]:
    """Strategies by name; the name's first word is the engine's."""
    if side == "cpu":
        return {"gloo": {"engine": "gloo"}, "copy": {"engine": "copy"}, "copy x2": {"engine": "copy", "copies": 2}}
    copy: dict[str, Any] = {"engine": "copy", "ctas": 128}  # blocks of the kernel that adds: alone it has all SMs
    found: dict[str, dict[str, Any]] = {"nccl": {"engine": "nccl"}, "copy": copy}
    if op in REDUCING:
        found |= {f"copy, {n} chunks": {**copy, "chunks": n} for n in (2, 4)}
        found |= {f"sm {n}": {"engine": "sm", "ctas": n} for n in (16, 32, 64, 128)}
    return found


def bandwidth(m: Measure) -> Iterator[Case]:
    """Collectives alone, over sizes."""
    dtype = "f32" if m.side == "cpu" else "bf16"
    unit = ITEMSIZE[dtype] * m.ranks.ranks * 64
    for op in COLLECTIVES:
        for size in SIZES[m.side]:
            scenario = Scenario(Gemm(64, 64, 64), op, max(1, round(size / unit)) * unit, m.ranks.ranks, dtype)
            runs = []
            for name, part in ways(m.side, op).items():
                config = normalize(KINDS[m.side].of(part).config(), scenario, m.side)
                if reject(config, scenario, m.side) is None:
                    runs.append(Run(name, "comm", config, kernels(scenario, part["engine"], m.device)))
            spec = {"op": op, "numel": scenario.numel, "dtype": dtype}
            us = m.times(Probe(f"{op} {format_bytes(size)}", None, spec, runs))
            if us:
                yield of_bandwidth(size, scenario, us)


@lru_cache(maxsize=64)
def _built(op: str, engine: str, dtype: str, ranks: int, device: str) -> dict[str, Any] | None:
    from autotune.domains.c3.task import build
    from autotune.measure.child import artifact_to_wire

    scenario = Scenario(Gemm(64, 64, 64), op, 4096 * ranks, ranks, dtype)
    try:
        head, code = artifact_to_wire(build(scenario, {"engine": engine}, device))
    except (BuildError, Unsupported):
        return None  # the collective reports what is missing
    return {"head": head, "code": base64.b64encode(code).decode()}


def kernels(scenario: Scenario, engine: str, device: str) -> dict[str, Any] | None:
    """An engine's source to compile, serialized; None if it needs none."""
    adds = engine == "copy" and scenario.collective in REDUCING
    if device == "cpu" or not (engine == "sm" or adds):
        return None
    return _built(scenario.collective, engine, scenario.dtype, scenario.ranks, device)


# Power


def power(m: Measure) -> Iterator[Case]:
    """GEMMs during copies, until the clocks have settled."""
    for gemm, nbytes in BESIDE:
        unit = ITEMSIZE["bf16"] * m.ranks.ranks * 64
        scenario = Scenario(gemm, "all_gather", max(1, round(nbytes / unit)) * unit, m.ranks.ranks)
        config = normalize(Strategy(order="gemm_first", engine="copy").config(), scenario, "cuda")
        runs = [Run("gemm", "compute", config), Run("copies", "comm", config), Run("both", "both", config)]
        spec = {"op": "all_gather", "numel": scenario.numel, "dtype": "bf16"}
        for zeros in (False, True):
            operands = "zeros" if zeros else "random"
            name = f"{gemm.label} beside all_gather {format_bytes(nbytes)}, {operands}"
            arguments = {"probe": asdict(Probe(name, asdict(gemm), spec, runs)), "policy": m.policy, "zeros": zeros,
                         "seconds": SECONDS}  # fmt: skip
            answers = m.ask(name, "benchmarks.c3_figures:back_to_back", arguments)
            if answers is None:
                continue
            if answers[0]["skipped"]:
                m.note(f"{name}: {answers[0]['skipped']}")
                continue
            for note in dict.fromkeys(a["note"] for a in answers if a["note"]):
                m.note(f"{name}: no clocks and no power: {note}")
            yield of_power(name, operands, answers)


# Partition


def partition(m: Measure) -> Iterator[Case]:
    """GEMMs with SMs kept from them."""
    answers = m.ask("SMs left", "benchmarks.c3_figures:sms_left", {"reserves": list(RESERVES)})
    if answers is None:
        return
    for gemm in PARTED:
        runs = [Run(str(r), "compute", Strategy("comm_first", reserve=r).config()) for r in RESERVES]
        us = m.times(Probe(f"{gemm.label} on fewer SMs", asdict(gemm), None, runs))
        if us:
            yield of_partition(gemm, us, dict(zip(map(str, RESERVES), answers[0], strict=True)))


# The file


def run(m: Measure, parts: Sequence[str], out: Path) -> dict[str, Any] | None:
    """Measure; the file is written after each part. None where nothing could be measured."""
    from autotune.device import environment
    from autotune.domain import identity_of

    workload = Scenario(Gemm(64, 64, 64), "all_gather", 4096 * m.ranks.ranks, m.ranks.ranks).workload()
    where, env = identity_of(workload, m.device).label, environment(m.device)
    versions = {k: str(v) for k, v in (("cuda", env.cuda), ("driver", env.driver), ("nccl", _nccl(m.side))) if v}
    measured = {"bandwidth": bandwidth, "power": power, "partition": partition}
    cases: list[Case] = []
    data = None
    for part in parts:
        cases += measured[part](m)
        if cases:
            extra = {"suite": SUITE, "ranks": m.ranks.ranks, "summary": summary(cases), "notes": m.notes}
            data = form.write(out, where, cases, versions, extra=extra)
    return data


def _nccl(side: str) -> str:
    if side == "cpu":
        return ""
    import torch

    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def parts_of(text: str | None, side: str) -> list[str]:
    """The parts to measure, in their order; all that there are on this side where none is named.

    Raises:
        UserError: unknown ones, or ones that need GPUs.
    """
    there = PARTS if side == "cuda" else PARTS[:1]
    names = list(there) if text is None else text.split(",")
    if unknown := [n for n in names if n not in PARTS]:
        raise UserError(f"--parts {','.join(unknown)}: there are {', '.join(PARTS)}")
    if missing := [n for n in names if n not in there]:
        raise UserError(f"--parts {','.join(missing)}: needs GPUs")
    return [p for p in PARTS if p in names]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="processes, one GPU each (default: all GPUs; CPU: 2)")
    parser.add_argument("--device", default="cuda:0", help="of rank 0 (default: %(default)s)")
    parser.add_argument("--parts", help=f"by comma, of {', '.join(PARTS)} (default: all; CPU: bandwidth)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file to write")
    args = parser.parse_args(argv)
    from autotune.device import resolve_device
    from autotune.domains.c3.cli import ranks_of, serves
    from autotune.domains.c3.measuring.ranks import Ranks
    from autotune.domains.c3.task import check_devices, policy

    try:
        form.check_commit()
        device = resolve_device(args.device)
        parts = parts_of(args.parts, device.partition(":")[0])
        ranks = ranks_of(args, device)
        check_devices(ranks, device)
        if serves():
            return 0
        with Ranks(None, device, policy(device), ranks=ranks) as group:
            data = run(Measure(group, device), parts, args.out)
    except UserError as mistake:
        print(f"c3_device: {mistake}", file=sys.stderr)
        return 2
    if data is None:
        return 1
    print(c3_device_table.render(data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
