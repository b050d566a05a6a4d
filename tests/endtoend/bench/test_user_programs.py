"""The benchmark of users' programs, on a CPU: small versions of the programs, its processes, its table and its file."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import form
from benchmarks import table as documents
from benchmarks.user_programs import __main__ as command
from benchmarks.user_programs import contender, rounds, step_table
from benchmarks.user_programs.host import Host
from benchmarks.user_programs.known import ALL, PROGRAMS
from benchmarks.user_programs.program import CONTENDERS, Compiler, Known, Program, Setup, lengths, right_padded
from benchmarks.user_programs.rounds import Failed, Measured, Plan, Process

HOUR_S = 3600.0
"""A limit that ends no process: the host may be busy."""


def made_here(name: str) -> Any:
    """A parameter of a test, skipped where the program's library is missing."""
    lacks = ALL[name].lacks()
    return pytest.param(name, marks=pytest.mark.skipif(bool(lacks), reason=lacks))


# Programs


def test_there_are_programs_of_all_kinds() -> None:
    assert len(PROGRAMS) >= 16
    assert {known.library for known in PROGRAMS.values()} == {"", "transformers", "timm", "diffusers"}
    assert all(name == known.name and known.about for name, known in ALL.items())


@pytest.mark.parametrize("name", [made_here(name) for name in ALL])
def test_a_small_program_takes_steps(name: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        results = []
        for _ in range(2):
            torch.manual_seed(0)
            program = ALL[name].make(Setup("cpu", tiny=True))
            results.append([float(program.step().detach().float().mean()) for _ in range(3)])
        assert all(map(math.isfinite, results[0]))
        assert results[0] == results[1], "random numbers begin at the seed"
        assert len(set(results[0])) > 1, "weights or batches change"
        assert program.train is not name.endswith(("_infer", "_generate"))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_program_of_a_missing_library_has_the_reason() -> None:
    assert Known("x", "about", lambda setup: Program(True, torch.ones), "no_such_library").lacks() == (
        "no_such_library is not installed"
    )
    assert Known("x", "about", lambda setup: Program(True, torch.ones)).lacks() == ""


def test_padding_is_on_the_right_and_one_text_fills_the_batch() -> None:
    assert right_padded([3, 1], 4, "cpu").tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    found = lengths(8, 2, 5)
    assert found[0] == 5
    assert all(2 <= n <= 5 for n in found)


# Ways to compile


def test_predicted_schedules_are_asked_for_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_UNSEARCHED", "leave")
    assert set(Compiler("unsearched", "max-autotune").arguments()) == {"backend", "mode"}
    assert os.environ["AUTOTUNE_UNSEARCHED"] == "default"


def test_contenders_compile_as_their_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_SEARCH", raising=False)
    assert Compiler("compile").arguments() == {}
    assert Compiler("compile again", "max-autotune").arguments(fullgraph=True) == {
        "mode": "max-autotune", "fullgraph": True,
    }  # fmt: skip
    assert Compiler("compile").arguments(mode="reduce-overhead") == {"mode": "reduce-overhead"}
    attention = Compiler("attention").arguments()
    assert set(attention) == {"backend"}
    found = Compiler("search", seconds=7.0).arguments()
    assert found["options"] == {"search": 7.0}
    assert found["backend"] is attention["backend"]
    assert "mode" not in found, "torch.compile takes a mode or options"
    import os

    assert "AUTOTUNE_SEARCH" not in os.environ
    monkeypatch.setenv("AUTOTUNE_SEARCH", "")  # which is put back after the test
    again = Compiler("again", "max-autotune", 7.0).arguments()
    assert set(again) == {"backend", "mode"}
    assert os.environ["AUTOTUNE_SEARCH"] == "7"


def test_the_compiled_part_gets_its_users_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def compiled(target: Any, **arguments: Any) -> Any:
        asked.update(arguments)
        return target

    monkeypatch.setattr(torch, "compile", compiled)
    PROGRAMS["unet_infer"].make(Setup("cpu", True, Compiler("compile", "max-autotune"))).step()
    assert asked == {"fullgraph": True, "mode": "max-autotune"}
    asked.clear()
    PROGRAMS["unet_infer"].make(Setup("cpu", True)).step()
    assert not asked, "eager"


# Processes


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders whose torch.compile compiles nothing, which takes no time."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, wait_s: float = 60.0) -> Process:
    """A contender's process with other code."""
    module = tmp_path / "other.py"
    module.write_text(code)
    start = subprocess.Popen

    def instead(words: list[str], **how: Any) -> Any:
        return start([sys.executable, str(module), words[-1]], **how)

    monkeypatch.setattr(rounds.subprocess, "Popen", instead)
    return Process(contender.Spec("mesh_train", "compile", "cpu"), tmp_path / "place", time.monotonic() + wait_s)


def test_a_process_answers_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, sys\nprint('autotune: first\\nother', file=sys.stderr)\n"
        "print('x.py:1: UserWarning: autotune: second', file=sys.stderr)\n"
        "for line in sys.stdin: print(json.dumps({'ms': [float(line)]}), flush=True)"
    )
    process = answering(tmp_path, monkeypatch, code)
    assert process.ask("3") == {"ms": [3.0]}
    process.send("4")
    process.send("5")
    assert [process.answer(), process.answer()] == [{"ms": [4.0]}, {"ms": [5.0]}]
    process.end()
    assert process.told() == ["first", "second"]
    assert re.fullmatch(r"\[ +\d+\.\d\] autotune: first", process.log().splitlines()[0])
    with pytest.raises(Failed):
        process.ask("6")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('why it ended', file=sys.stderr); sys.exit(3)", "ended with 3: why it ended"),
        ("import os; os.abort()", "ended with -6"),
        ('print(\'{"failed": "OutOfMemoryError: none"}\')', "OutOfMemoryError: none"),
        ("print('noise')", "it answered b'noise'"),
    ],
)
def test_a_process_that_fails_has_a_reason(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = answering(tmp_path, monkeypatch, code)
    with pytest.raises(Failed, match=said):
        process.answer()
    process.end()


def test_a_process_that_hangs_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = answering(tmp_path, monkeypatch, "import time; time.sleep(600)", wait_s=0.5)
    begin = time.monotonic()
    with pytest.raises(Failed, match="the time was up"):
        process.answer()
    process.end()
    assert time.monotonic() - begin < 550


def test_contenders_of_a_program_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncompiled: None) -> None:
    asked: list[tuple[str, str]] = []
    send = Process.send

    def noted(process: Process, line: str) -> None:
        asked.append((process.spec.contender, line))
        send(process, line)

    monkeypatch.setattr(Process, "send", noted)
    monkeypatch.setattr(rounds, "Spec", functools.partial(contender.Spec, warm_s=HOUR_S))
    plan = Plan(["compile", "search", "again"], "cpu", search_s=9.0, steps=2, rounds=2, tiny=True)
    told: list[str] = []
    with Measured(plan, "mesh_train", tmp_path, time.monotonic() + HOUR_S, told.append) as measured:
        for case in measured.run():
            json.dumps(case, allow_nan=False)
    assert case["missing"] == {}
    assert [who for who, line in asked if line == "2"] == ["compile", "search", "search", "compile", "again"]
    assert case["train"] is True
    assert len(case["ratios"]["search"]) == 2
    assert case["attention_ms"] is case["compile_again_ms"] is None
    assert min(case["compile_ms"], case["search_ms"], case["again_ms"]) > 0
    found = case["contenders"]
    assert asked[0] == ("compile", "rest"), "its memory is free while another searches"
    assert found["compile"]["steps"] == contender.WARM_STEPS + 3 + 2 * (2 + 1)
    assert found["search"]["steps"] >= contender.CONTEST_STEPS
    assert found["compile"]["first_loss"] == found["search"]["first_loss"], "the same seed and weights"
    assert found["compile"]["counters"] == {}
    assert found["compile"]["versions"]["torch"] == metadata.version("torch")
    assert (tmp_path / "search" / "again.log").exists(), "a second process has the first one's database and caches"


def test_a_contender_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncompiled: None
) -> None:
    first = Measured._first

    def dies(measured: Measured, name: str) -> None:
        if name == "search":
            measured._open[name]._process.kill()
        first(measured, name)

    monkeypatch.setattr(Measured, "_first", dies)
    plan = Plan(["compile", "search", "again"], "cpu", steps=2, rounds=1, tiny=True)
    with Measured(plan, "mesh_train", tmp_path, time.monotonic() + HOUR_S, lambda line: None) as measured:
        cases = list(measured.run())
    assert cases[-1]["compile_ms"] > 0
    assert cases[-1]["missing"]["search"].startswith("the process ended with -9")
    assert cases[-1]["missing"]["again"] == "there is no process 'search' before it"


def test_the_kernels_that_take_most_are_kept() -> None:
    made = {"memory_intensive": 3, "memory_intensive_us": 9.0, "library": 1, "library_us": 5.0, "names": {"a": 1}}
    made |= {
        "names_us": {"a": 1.0, "b": 6.0, "c": 2.0},
        "library_names": {"d": 1},
        "library_names_us": {"d" * 200: 5.0},
    }
    assert contender.largest(made, 2) == {
        "memory_intensive": 3, "memory_intensive_us": 9.0, "library": 1, "library_us": 5.0,
        "names_us": {"b": 6.0, "c": 2.0}, "library_names_us": {"d" * 120: 5.0},
    }  # fmt: skip


def test_cold_contenders_start_together_and_then_warm_ones(tmp_path: Path) -> None:
    def waves(**how: Any) -> list[list[str]]:
        measured = Measured(Plan(CONTENDERS, "cpu", **how), "x", tmp_path, 0.0, lambda line: None)
        return [*measured._waves(("compile", "attention", "search")), *measured._waves(("again", "compile again"))]

    assert waves(together=True) == [["compile", "attention"], ["search"], ["again", "compile again"]]
    together = [["compile", "attention", "search"], ["again", "compile again"]]
    assert waves(together=True, beside=True) == together, "what others compile meanwhile disturbs their first steps"
    assert waves() == [["compile"], ["attention"], ["search"], ["again"], ["compile again"]]


def test_programs_compile_side_by_side_and_are_timed_alone() -> None:
    host, seen = Host(), list[str]()
    inside, go_on = threading.Barrier(2), threading.Event()

    def compiles() -> None:
        with host.beside():
            inside.wait(250)  # both are inside at a time
            go_on.wait(250)
            seen.append("compiled")

    def is_timed() -> None:
        with host.alone():
            seen.append("timed")

    def compiles_later() -> None:
        with host.beside():
            seen.append("later")

    first = [threading.Thread(target=compiles) for _ in range(2)]
    for thread in first:
        thread.start()
    timed = threading.Thread(target=is_timed)
    timed.start()
    while not host._waiting:
        time.sleep(0.001)
    later = threading.Thread(target=compiles_later)
    later.start()
    go_on.set()
    for thread in (*first, timed, later):
        thread.join(250)
    assert seen == ["compiled", "compiled", "timed", "later"]


def test_several_programs_end_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, both = tmp_path / "x.json", threading.Barrier(2)

    def cases(name: str) -> Any:
        both.wait(250)  # neither is measured before the other has begun
        yield case(name)

    found = {name: cases(name) for name in ("gpt_train", "mesh_train")}
    assert run(monkeypatch, out, found, "--programs", "gpt_train,mesh", "--beside", "2") == 0
    assert {c["name"] for c in form.read(out)["cases"]} == {"gpt_train", "mesh_train"}


# The command


def case(name: str = "gpt_train", **other: Any) -> dict[str, Any]:
    """A case as it is recorded."""

    def process(first_s: float, gib: float, memory_us: float) -> dict[str, Any]:
        kernels = {"memory_intensive_us": memory_us, "library_us": 9000.0}
        kernels |= {"compiled_us": memory_us - 2000.0, "copy_bytes_us": 2.5e6}
        more = {"moved_bytes": 10_000_000_000, "block_ms": [30.0]}
        return {"first_s": first_s, "peak_bytes": int(gib * 2**30), "kernels": kernels, **more}

    return {
        "name": name,
        "mode": "default",
        "compile_ms": 30.0,
        "attention_ms": 27.0,
        "search_ms": 24.0,
        "again_ms": 24.1,
        "compile_again_ms": 30.1,
        "train": True,
        "ratios": {"attention": [1.1, 1.1, 1.2], "search": [1.2, 1.32, 1.4]},
        "contenders": {
            "compile": process(40.0, 8.0, 10_000.0),
            "attention": process(41.0, 8.0, 10_000.0),
            "search": process(130.5, 7.5, 6000.0),
            "again": process(11.0, 7.5, 6000.0),
            "compile again": process(10.0, 8.0, 10_000.0),
        },
        "missing": {},
        **other,
    }


def test_the_table_has_gains_and_seconds() -> None:
    lost = case(
        "swin_train", search_ms=None, again_ms=None, ratios={}, missing={"search": "the time was up"}, contenders={}
    )
    other = case("t5_train", ratios={"search": [1.0, 1.0]})
    data = {"cases": [case(), lost, other], "failed": {"a": "why"}, "skipped": {"b": "timm is not installed"}}
    lines = step_table.text(data).splitlines()
    assert lines[1].split() == [
        "gpt_train", "30.00", "27.00", "24.00", "24.10", "1.320x", "(1.200-1.400)", "1.200x", "–", "40.0", "90.5",
        "10.0", "->", "11.0", "8.0", "->", "7.5",
    ]  # fmt: skip
    assert lines[2].split() == ["swin_train", "30.00", "27.00", *"–" * 9]
    kernels = lines[next(k for k, line in enumerate(lines) if "floor" in line.split()) + 1 :]
    # 10 GB at 2.5 TB/s are 4 ms, and 2 ms are of eager mode: of 4 ms above the floor, all are won.
    assert kernels[0].split() == [
        "gpt_train", "10.00", "->", "6.00", "6.00", "100%", "9.00", "->", "9.00",
    ]  # fmt: skip
    assert kernels[1].split() == ["swin_train", *"–" * 4]
    assert "won of the time above the floor: 100% in the mean of 2" in lines
    assert "over torch.compile: 1.149x in the geometric mean of 2 programs; worst t5_train 1.000x" in "\n".join(lines)
    assert "beyond attention: 1.200x in the geometric mean of 1 program" in lines
    without, *_ = step_table.means([case(ratios={"unsearched": [1.1, 1.2, 1.3]})])
    assert without == "without a search, over torch.compile: 1.200x in the geometric mean of 1 program"
    # A step of 30 ms less the 4 above the floor, and less the time that library kernels save; or as measured.
    assert step_table.limit(other) == pytest.approx(30 / 26)
    other["contenders"]["search"]["kernels"]["library_us"] = 8000.0
    assert step_table.limit(other) == pytest.approx(30 / 25)
    assert (step_table.limit(case()), step_table.limit(lost)) == (pytest.approx(1.32), None)
    assert lines[-3:] == [
        "swin_train: search: the time was up", "a failed: why", "b skipped: timm is not installed",
    ]  # fmt: skip


def test_the_file_is_of_the_form_and_a_document_can_have_it(tmp_path: Path) -> None:
    out = tmp_path / "user_programs.json"
    form.write(out, "a GPU", [case()], extra={"suite": command.SUITE, "failed": {}, "skipped": {"b": "no timm"}})
    data = form.read(out)
    made = documents.render(data)
    assert "| gpt_train | 30.00 | 27.00 | 24.00 | 24.10 | 1.320x (1.200-1.400) | 1.200x |" in made
    assert "- b skipped: no timm" in made
    assert made.rstrip().endswith(f"by `{data['command']}`.")


class Recorded:
    """Replaces :class:`Measured`: yields the cases that a test records."""

    cases: dict[str, list[dict[str, Any]]]

    def __init__(self, plan: Plan, name: str, place: Path, until: float, tell: object, host: Host) -> None:
        self.name, self.case, self.until = name, {"missing": {"compile": "no memory"}}, until

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def end(self) -> None:
        pass

    def run(self) -> Any:
        yield from self.cases.get(self.name, [])


def run(monkeypatch: pytest.MonkeyPatch, out: Path, cases: dict[str, Any], *words: str) -> int:
    monkeypatch.setattr(command, "Measured", type("Recorded", (Recorded,), {"cases": cases}))
    return command.main(["--device", "cpu", "--tiny", "--out", str(out), *words])


def test_the_file_is_written_after_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, seen = tmp_path / "made" / "x.json", list[Any]()

    def cases() -> Any:
        yield case(search_ms=None)
        seen.append(form.read(out)["cases"][0]["search_ms"])
        yield case()
        raise KeyboardInterrupt

    assert run(monkeypatch, out, {"gpt_train": cases()}, "--programs", "gpt_train") == 130
    assert seen == [None]
    found = form.read(out)["cases"]
    assert [c["search_ms"] for c in found] == [24.0], "an interrupt loses nothing"
    assert found[0]["about"] == PROGRAMS["gpt_train"].about
    capsys.readouterr()
    assert run(monkeypatch, out, {"mesh_train": [case("mesh_train")]}, "--programs", "gpt_train,mesh,encoder") == 1
    shown = capsys.readouterr()
    assert "gpt_train: is there already" in shown.err
    assert [c["name"] for c in form.read(out)["cases"]] == ["gpt_train", "mesh_train"]
    assert "encoder_train failed: compile: no memory" in shown.out


def test_user_programs_list_programs_beyond_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Known, "lacks", lambda known: "timm is not installed" if known.library == "timm" else "")
    words = ["--programs", "gpt_train,swin_train,mesh_train", "--budget", "1"]
    monkeypatch.setattr(command, "Measured", type("Recorded", (Recorded,), {"cases": {}}))
    assert command.main(["--device", "cpu", "--search", "60", *words]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "swin_train skipped: timm is not installed" in shown
    assert sum("of the budget were left" in line for line in shown) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--programs", "nothing"], "unknown program 'nothing'"),
        (["--contenders", "eager"], "unknown contender eager"),
        (["--search", "-1"], "--search"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command.main(["--device", "cpu", *words])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_list_has_the_missing_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Known, "lacks", lambda known: "it is missing" if known.library == "diffusers" else "")
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*ALL]
    missing = {line.split()[0] for line in lines if line.endswith("(it is missing)")}
    assert missing == {"unet_diffusers_infer", "flux_diffusers_infer", "decoder_infer"}


def test_contenders_end_with_a_command_that_is_terminated(tmp_path: Path, uncompiled: None) -> None:
    words = ["--tiny", "--device", "cpu", "--programs", "mesh", "--contenders", "compile", "--steps", "100000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.user_programs", *words], cwd=form.ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "first step" in process.stderr.readline()
    children = [child for child in psutil.Process(process.pid).children() if os.getsid(child.pid) == child.pid]
    assert children, "contenders, each of which leads its own session"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert "interrupted" in process.stderr.read()
    assert not any(child.is_running() for child in children)


def test_a_signal_that_another_thread_receives_ends_the_wait() -> None:
    code = """
import signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from benchmarks.user_programs.host import as_they_end
signal.signal(signal.SIGTERM, signal.default_int_handler)
ended = threading.Event()
def receive():
    time.sleep(0.2)  # the main thread waits by then
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    ended.wait()
try:
    list(as_they_end([ThreadPoolExecutor(1).submit(receive)]))
except KeyboardInterrupt:
    print("interrupted")
ended.set()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=form.ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr
