"""Compiling, caching and launching CPU kernels: vectorised code, threads, concurrency, the disk cache."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core import caching

from autotune.compiler.program.passes import build_program
from autotune.compiler.targets.cpu import kernel as cpu_kernel
from autotune.compiler.targets.cpu import launcher as cpu_load
from autotune.compiler.targets.cpu.kernel import batch, emit_source, generator, load
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.errors import UserError
from autotune.files import code_digest
from autotune.ir.graph import Graph
from tests.support import ROOT
from tests.support.cpu_graphs import Build, layer_norm, random_inputs, run, softmax


def assembly(graph: Graph, schedule: CpuSchedule) -> str:
    return str(load(build_program(graph), schedule).compiled._library.get_asm_str())


def packed_arithmetic(asm: str) -> int:
    """Vector fp32 instructions over registers of at least 256 bits (x86) or 128 bits (AArch64)."""
    x86 = re.findall(r"\bv(?:add|sub|mul|fmadd\w*|fnmadd\w*|max)ps\b.*%[yz]mm", asm)
    arm = re.findall(r"\bf(?:add|sub|mul|mla|maxnm)\s+v\d+\.4s", asm)
    return len(x86) + len(arm)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache, and nothing compiled in this process."""
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_load, "_compiled", {})
    return tmp_path / "cpu"


def test_layer_norm_loops_are_vectorised(fresh_cache: Path) -> None:
    """All three passes: sum, sum of squares, scale and shift."""
    assert packed_arithmetic(assembly(layer_norm(64, 1024), CpuSchedule())) >= 12


@pytest.mark.parametrize("op", ["exp", "exp2", "log", "log1p", "expm1", "tanh", "sigmoid", "erf", "rsqrt"])
def test_functions_are_vectorised_and_call_nothing(fresh_cache: Path, op: str) -> None:
    b = Build(4096)
    b.out(b.point(op, b.load("bfloat16", 0)), "float16")
    asm = assembly(b.graph(), CpuSchedule())
    assert packed_arithmetic(asm) >= 1 or "sqrtps" in asm
    assert not re.search(rf"\b{op}f?\b@", asm)


def test_many_tensors_need_no_alias_checks(fresh_cache: Path) -> None:
    """Twelve inputs and four outputs: LLVM gives up on checking pointers long before."""
    b = Build(8, 512)
    xs = [b.load("float32", 0, 1) for _ in range(12)]
    for k in range(4):
        b.out(b.mul(b.add_(xs[3 * k], xs[3 * k + 1]), xs[3 * k + 2]), "float32")
    assert packed_arithmetic(assembly(b.graph(), CpuSchedule())) >= 8


def test_source_is_the_same_every_time_and_differs_by_schedule() -> None:
    p = build_program(softmax(8, 100))
    assert emit_source(p, CpuSchedule()) == emit_source(build_program(softmax(8, 100)), CpuSchedule())
    assert emit_source(p, CpuSchedule()) != emit_source(p, CpuSchedule(row_block=16))
    # The number of threads is given at the launch: one compilation serves all.
    assert emit_source(p, CpuSchedule(threads=1)) == emit_source(p, CpuSchedule(threads=2))


@pytest.mark.parametrize("changed", ["kernel/lower.py", "cpu/rows.py", "cpu/intrinsics/math.py"])
def test_changed_code_changes_the_digest_in_cached_kernels(monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    before, read = generator(), Path.read_bytes
    monkeypatch.setattr(cpu_kernel, "code_digest", code_digest.__wrapped__)
    assert generator() == before
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * p.as_posix().endswith(changed))
    assert generator() != before


def test_launches_from_several_python_threads() -> None:
    graph = softmax(4000, 64)
    program = build_program(graph)
    kernel = load(program, CpuSchedule(row_block=4, threads=2))
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        (x,) = random_inputs(graph, seed)
        want = torch.softmax(x.view(4000, 64) * 0.7, 1)
        y = torch.empty(4000, 64)
        start.wait()
        for _ in range(20):
            y.fill_(7.0)
            kernel([x.data_ptr(), y.data_ptr()], 4000)
            torch.testing.assert_close(y, want)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("fallback", [False, True])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    """With OpenMP and without it: every row once, whatever the number of threads."""
    if fallback:
        monkeypatch.setattr(cpu_load, "_gomp_parallel", lambda: None)
    monkeypatch.setattr(cpu_load, "_most_threads", lambda: 3)
    monkeypatch.setattr(cpu_load, "_torch_threads", lambda: lambda: 3)
    graph = layer_norm(3000, 128)
    inputs = random_inputs(graph)
    want = run(graph, inputs, CpuSchedule(threads=1))
    for n in (2, 3, 64):
        for g, w in zip(run(graph, inputs, CpuSchedule(row_block=7, threads=n)), want, strict=True):
            assert torch.equal(g, w)


def test_one_thread_never_enters_a_parallel_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a serial schedule, or little work, must not start a team")

    monkeypatch.setattr(cpu_load, "_gomp_parallel", lambda: refuse)
    monkeypatch.setattr(cpu_load, "_torch_threads", lambda: lambda: 2)
    big, small = softmax(4000, 64), softmax(4, 64)
    run(big, random_inputs(big), CpuSchedule(threads=1))
    run(small, random_inputs(small), CpuSchedule(threads=2))
    if cpu_load._most_threads() > 1:
        with pytest.raises(AssertionError):
            run(big, random_inputs(big), CpuSchedule(threads=2))


@pytest.mark.parametrize("how", ["call", "bound", "batch"])
def test_a_team_has_no_more_threads_than_torch(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """``torch.set_num_threads``, also after the kernel was loaded."""
    teams: list[int] = []
    real: Any = cpu_load._gomp_parallel()

    def start(function: int, data: Any, n: int, flags: int) -> None:
        teams.append(n)
        real(function, data, n, flags)

    monkeypatch.setattr(cpu_load, "_most_threads", lambda: 4)
    monkeypatch.setattr(cpu_load, "_gomp_parallel", lambda: start)
    graph = softmax(4000, 64)
    (x,) = random_inputs(graph)
    kernel: Any = load(build_program(graph), CpuSchedule(threads=3))
    bound, together = kernel.bind(4000, 2), batch([(kernel, 2, 4000)])
    launches: dict[str, Callable[[list[int]], None]] = {
        "call": lambda at: kernel(at, 4000),
        "bound": lambda at: bound(0, at),
        "batch": together,
    }
    before = torch.get_num_threads()
    try:
        for allowed, want in ((1, []), (2, [2]), (4, [3])):
            teams.clear()
            torch.set_num_threads(allowed)
            y = torch.zeros(4000, 64)
            launches[how]([x.data_ptr(), y.data_ptr()])
            torch.testing.assert_close(y, torch.softmax(x.view(4000, 64) * 0.7, 1))
            assert teams == want
    finally:
        torch.set_num_threads(before)


_CHILD = """
import json, sys, time
import torch
from autotune.compiler.targets.cpu.kernel import load
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.compiler.program.passes import build_program
from autotune.ir.graph import Graph
graph = Graph.from_json(json.loads(sys.argv[1]))
x = torch.randn(32 * 80); y = torch.empty(32, 80)
kernel = load(build_program(graph), CpuSchedule())
kernel([x.data_ptr(), y.data_ptr()], 32)
torch.testing.assert_close(y, torch.softmax(x.view(32, 80) * 0.7, 1))
print(kernel.compiled.cache_hits)
"""


def _child(cache: Path) -> subprocess.Popen[str]:
    env = os.environ | {"AUTOTUNE_CACHE_DIR": str(cache.parent), "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-c", _CHILD, json.dumps(softmax(32, 80).to_json())]
    return subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_share_the_disk_cache(fresh_cache: Path) -> None:
    """Two at once on an empty cache both come out right; a third compiles nothing."""
    for p in [_child(fresh_cache), _child(fresh_cache)]:
        _, err = p.communicate(timeout=550)
        assert p.returncode == 0, err
    (source,) = fresh_cache.glob("k*.py")
    before = source.stat().st_mtime_ns
    assert cache_hits(softmax(32, 80)) == 1
    assert source.stat().st_mtime_ns == before
    assert not list(fresh_cache.glob("*.tmp"))


def cache_hits(graph: Graph) -> int:
    """The number of disk hits for the graph's kernel, in a process without it; the kernel is right."""
    cpu_load._compiled.clear()
    inputs = random_inputs(graph)
    (got,) = run(graph, inputs, CpuSchedule())
    torch.testing.assert_close(got, torch.softmax(inputs[0].view(32, 80) * 0.7, 1))
    return int(load(build_program(graph), CpuSchedule()).compiled.cache_hits)


def test_a_damaged_source_is_written_again(fresh_cache: Path) -> None:
    graph = softmax(6, 50)
    inputs = random_inputs(graph)
    (want,) = run(graph, inputs, CpuSchedule())
    (source,) = fresh_cache.glob("k*.py")
    whole = source.read_text()
    source.write_text("raise SystemExit('not what we wrote')")
    cpu_load._compiled.clear()
    (got,) = run(graph, inputs, CpuSchedule())
    assert torch.equal(got, want)
    assert source.read_text() == whole


@pytest.mark.parametrize(("what", "left"), [("*.nbi", 20), ("*.nbc", 0)])
def test_a_damaged_compiled_kernel_is_compiled_again(fresh_cache: Path, what: str, left: int) -> None:
    """Cut short, as a machine leaves it that went down: else every process would fail on it for ever."""
    graph = softmax(32, 80)
    assert [cache_hits(graph), cache_hits(graph)] == [0, 1]
    (file,) = (fresh_cache / "__pycache__").glob(f"k{what}")
    file.write_bytes(file.read_bytes()[:left])
    assert [cache_hits(graph), cache_hits(graph)] == [0, 1]  # mended once, and good for the next


def test_a_full_disk_is_reported_or_gone_around(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    graph = softmax(7, 40)
    inputs = random_inputs(graph)
    (want,) = run(graph, inputs, CpuSchedule())
    cpu_load._compiled.clear()
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(fresh_cache / "other"))
    save = caching.IndexDataCacheFile.save
    with monkeypatch.context() as patched:
        patched.setattr(caching.IndexDataCacheFile, "save", full)
        with pytest.raises(UserError, match=r"AUTOTUNE_CACHE_DIR: cannot write .* \(No space left on device\)"):
            run(graph, inputs, CpuSchedule())
    failed: list[str] = []

    def full_there(self: Any, key: Any, data: Any) -> None:
        if not failed:
            failed.append(self._index_path)
            full(self)
        save(self, key, data)

    monkeypatch.delenv("AUTOTUNE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh_cache / "default"))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full_there)
    (got,) = run(graph, inputs, CpuSchedule())
    assert failed[0].startswith(str(fresh_cache / "default"))
    assert torch.equal(got, want)


def test_the_cache_is_its_owners_alone(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code runs with the rights of the user who loads it."""
    graph = softmax(5, 48)
    inputs = random_inputs(graph)
    (want,) = run(graph, inputs, CpuSchedule())
    assert stat.S_IMODE(fresh_cache.stat().st_mode) == 0o700
    fresh_cache.chmod(0o777)
    cpu_load._compiled.clear()
    run(graph, inputs, CpuSchedule())
    assert stat.S_IMODE(fresh_cache.stat().st_mode) == 0o755
    cpu_load._compiled.clear()
    monkeypatch.setattr(os, "geteuid", lambda: fresh_cache.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"AUTOTUNE_CACHE_DIR: .* belongs to another user \(uid \d+\)"):
        run(graph, inputs, CpuSchedule())
    monkeypatch.delenv("AUTOTUNE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh_cache))
    with pytest.warns(UserWarning, match="belongs to another user"):
        (got,) = run(graph, inputs, CpuSchedule())
    assert torch.equal(got, want)


def test_kernels_of_another_version_are_not_taken_from_the_cache(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same source calls other intrinsics there."""
    program, schedule = build_program(softmax(4, 20)), CpuSchedule()
    load(program, schedule)
    before = {p.name for p in fresh_cache.rglob("k*.py")}
    load(program, schedule)
    assert {p.name for p in fresh_cache.rglob("k*.py")} == before
    monkeypatch.setattr(cpu_load, "code_digest", lambda *places: "of another version")
    load(program, schedule)
    assert len({p.name for p in fresh_cache.rglob("k*.py")} - before) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that the user named is their mistake; the default one is replaced by a private one."""
    (tmp_path / "file").write_text("")
    graph = softmax(5, 40)
    inputs = random_inputs(graph)
    (want,) = run(graph, inputs, CpuSchedule())
    monkeypatch.setattr(cpu_load, "_compiled", {})
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="AUTOTUNE_CACHE_DIR"):
        run(graph, inputs, CpuSchedule())
    monkeypatch.delenv("AUTOTUNE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (got,) = run(graph, inputs, CpuSchedule())
    assert torch.equal(got, want)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_kernel_bound_to_its_rows_does_the_same(
    monkeypatch: pytest.MonkeyPatch, fallback: bool, threads: int
) -> None:
    if fallback:
        monkeypatch.setattr(cpu_load, "_gomp_parallel", lambda: None)
    monkeypatch.setattr(cpu_load, "_most_threads", lambda: 3)
    monkeypatch.setattr(cpu_load, "_torch_threads", lambda: lambda: 3)
    graph = softmax(4000, 64)
    (x,) = random_inputs(graph)
    kernel: Any = load(build_program(graph), CpuSchedule(threads=threads))
    for rows in (4000, 17, 1):  # with so few rows one thread does them, with any schedule
        bound = kernel.bind(rows, 2)
        y, want = torch.full((2, 4000, 64), 7.0)
        kernel([x.data_ptr(), want.data_ptr()], rows)
        for _ in range(2):
            y.fill_(7.0)
            bound(0, (x.data_ptr(), y.data_ptr()))
            assert torch.equal(y, want)


@pytest.mark.parametrize("bound", [False, True])
def test_a_forked_process_runs_serially(bound: bool) -> None:
    graph = softmax(4000, 64)
    (x,) = random_inputs(graph)
    kernel: Any = load(build_program(graph), CpuSchedule(threads=2))
    if bound:
        run = kernel.bind(4000, 2)
        kernel = lambda addresses, n0: run(0, addresses)  # noqa: E731
    y = torch.zeros(4000, 64).share_memory_()
    kernel([x.data_ptr(), y.data_ptr()], 4000)
    want = y.clone()
    y.zero_()
    pid = os.fork()
    if pid == 0:
        kernel([x.data_ptr(), y.data_ptr()], 4000)
        os._exit(0)
    deadline = threading.Timer(250, os.kill, (pid, 9))
    deadline.start()
    _, status = os.waitpid(pid, 0)
    deadline.cancel()
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(y, want)


def test_schedule_from_config() -> None:
    config = {"row_block": 4, "column_tile": 256, "threads": 2}
    assert CpuSchedule.from_config(config) == CpuSchedule(4, 256, 2)
    earlier = config | {"keep": "reload", "online": True}
    assert CpuSchedule.from_config(earlier) == CpuSchedule(4, 256, 2), "a choice that is no more changes nothing"


def test_shipped_space_matches_the_schedule() -> None:
    """Every choice of [cpu.*] makes a schedule, and every field of a schedule is searched."""
    import dataclasses
    import tomllib

    space = tomllib.loads((ROOT / "search_spaces" / "fusion.toml").read_text())["cpu"]
    assert set(space) == {f.name for f in dataclasses.fields(CpuSchedule)}
    for name, entry in space.items():
        for choice in entry["choices"]:
            CpuSchedule.from_config({name: choice})


def test_calls_in_turn_share_an_argument_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make one for each call takes longer than to call the kernel. Calls in two threads need two."""
    made: list[cpu_load.Blocks] = []
    real = cpu_load.Blocks
    monkeypatch.setattr(cpu_load, "Blocks", lambda words: made.append(real(words)) or made[-1])  # type: ignore[func-returns-value]
    graph = softmax(8, 64)
    (x,) = random_inputs(graph)
    kernel: Any = load(build_program(graph), CpuSchedule(threads=1))
    bound, y = kernel.bind(8, 2), torch.zeros(8, 64)
    for _ in range(3):
        bound(0, [x.data_ptr(), y.data_ptr()])
        torch.testing.assert_close(y, torch.softmax(x.view(8, 64) * 0.7, 1))
        y.zero_()
    (own,) = made
    assert own.take()[0][-3:] == [8, 1, 2]  # the extent, the threads, and the counter of the last of one unit
    assert own._free == []
    blocks = real(2)
    first, second = blocks.take(), blocks.take()
    assert first[1] != second[1]
    blocks.give(first)
    assert blocks.take() is first
