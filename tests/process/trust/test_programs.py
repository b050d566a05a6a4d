"""A stored workload's program is run as a baseline only where it is what the workload was made of."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.cli.app import main
from autotune.compiler.lower.rules.table import RULES
from autotune.compiler.regions import aten
from autotune.compiler.regions.aten import MOST_TENSORS
from autotune.compiler.regions.find import workload_of as region_workload
from autotune.compiler.regions.symbols import traced
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.inspection import check_graph, check_source
from autotune.errors import BuildError
from autotune.store import Store
from autotune.workload import Workload
from tests.support.hostile import execute, missed, normalised, overwriting, softmax, workload_of

MODULE = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x * 3, -1)

def inputs():
    return torch.ones(8, 96)
"""


def test_a_missed_program_that_writes_to_files_is_left_out(
    db: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = victim.read_bytes()
    missed(db, overwriting(workload_of(softmax, torch.ones(8, 64)), victim))
    assert main(["search", "--missed", "--device", "cpu", "--db", str(db), "--trials", "1", "--timeout", "20"]) == 2
    assert victim.read_bytes() == before
    told = capsys.readouterr().err
    assert "may not call 'aten.from_file.default'" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_beside_it_honest_ones_are_searched_with_baselines(
    db: Path, victim: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = victim.read_bytes()
    evil = overwriting(workload_of(softmax, torch.ones(8, 64)), victim)
    honest = workload_of(normalised, torch.ones(8, 48))
    missed(db, evil, honest)
    words = ["--missed", "--device", "cpu", "--db", str(db), "--trials", "1", "--timeout", "60", "--json"]
    assert main(["search", *words]) == 0
    told = capfd.readouterr()
    answer: dict[str, Any] = json.loads(told.out)
    assert victim.read_bytes() == before
    assert [w["workload"] for w in answer["workloads"]] == [honest.fingerprint]
    assert answer["baselines"]["eager"]["latency_us"] > 0, "the honest program is a baseline"
    assert f"{evil.fingerprint[:12]} is skipped: the stored program is not what" in told.err
    with Store.open(db) as store:
        assert [m.workload for m in store.misses()] == [evil.fingerprint]


def test_beside_one_that_no_device_could_hold_the_others_are_searched(
    db: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shape = {"shape": [2**40, 2**20], "strides": [2**20, 1], "dtype": "float32", "device": "cpu"}
    program = {"format": 1, "inputs": [shape], "calls": [{"op": "aten.exp.default", "args": [{"node": 0}]}],
               "result": [{"node": 1}]}  # fmt: skip
    huge, _ = region_workload(traced(program, "cpu"), "", program)
    honest = workload_of(softmax, torch.ones(8, 64))
    missed(db, huge, honest)
    words = ["--missed", "--device", "cpu", "--db", str(db), "--trials", "1", "--timeout", "60", "--json"]
    assert main(["search", *words]) == 0
    told = capfd.readouterr()
    assert [w["best"] is not None for w in json.loads(told.out)["workloads"]] in ([True, False], [False, True])
    (line,) = [line for line in told.err.splitlines() if "NOTHING COULD BE MEASURED" in line]
    assert "it takes 8589934592 GiB of memory, and the device has" in line
    assert "STOPPED" not in told.err
    with Store.open(db) as store:
        assert store.schedules(workload=honest.fingerprint)


def test_a_module_whose_stored_program_was_changed_is_captured_again(
    db: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.domains.fusion.cli import captured_target

    (tmp_path / "own_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = Namespace(
        target="own_model:Net", inputs="own_model:inputs", train=False, precision=None, matmul_precision=None
    )
    with Store.open(db) as store:
        found = captured_target(args, "cpu", store)
        assert found.signature is not None
        for workload, _ in found.workloads:
            store.put_workload(workload)
        run = store.start_run("search")
        store.finish_run(run.id, "done", {"capture": found.to_json()})
        assert captured_target(args, "cpu", store).known
        ((workload, _),) = found.workloads
        store.put_workload(overwriting(workload, victim))
        again = captured_target(args, "cpu", store)
        assert not again.known
        assert again.workloads[0][0].source == workload.source
    sys.modules.pop("own_model", None)


def test_the_measuring_worker_does_not_run_it_either(victim: Path) -> None:
    before = victim.read_bytes()
    workload = workload_of(softmax, torch.ones(8, 64))
    bench = FusionBench(overwriting(workload, victim), "cpu")
    assert bench.given.views == []
    for make in bench.baselines().values():
        with pytest.raises(BuildError, match="not what the workload was made of"):
            make()
    assert victim.read_bytes() == before
    honest = FusionBench(workload, "cpu")
    assert honest.baselines()["eager"]() is not None
    assert len(honest.given.views) == 1


def test_a_program_of_harmless_operators_that_computes_something_else_is_refused() -> None:
    one, other = workload_of(softmax, torch.ones(8, 64)), workload_of(normalised, torch.ones(8, 64))
    assert check_source(one) == check_source(other) == ""
    assert "computes something else" in check_source(replace(one, source=other.source))
    turned = {**one.source, "slots": [0, 0]}
    assert "computes something else" in check_source(replace(one, source=turned))


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.fill_.Scalar",
        "aten.set_.source_Tensor",
        "aten.copy_.default",
        "aten.add.out",
        "aten.add.str",
        "aten.resize_.default",
        "aten._native_batch_norm_legit.default",
        "aten.record_stream.default",
        "aten.mul.__class__",
        "prims.copy_to.default",
        "os.system.default",
        "aten.exp",
        "profiler._record_function_enter.default",
    ],
)
def test_operators_that_regions_do_not_hold_are_not_let_in(name: str) -> None:
    data = {"format": 1, "inputs": [{}], "calls": [{"op": name, "args": [{"node": 0}]}], "result": [{"node": 1}]}
    with pytest.raises(ValueError, match=r"may not call|no operator"):
        aten.from_json(data)


def test_nothing_that_is_let_in_writes_or_takes_a_file_a_generator_or_a_storage() -> None:
    let_in = 0
    for name in RULES:
        for space in aten.NAMESPACES:
            packet = getattr(getattr(torch.ops, space), name, None)
            for overload in packet.overloads() if packet else ():
                op = getattr(packet, overload)
                if not aten.is_functional(op):
                    continue
                let_in += 1
                text = str(op._schema)
                assert "!" not in text, text
                assert not any(word in text for word in ("Generator", "Storage", "Stream", "filename")), text
    assert let_in > 200


def _mutated(rng: random.Random, value: Any) -> Any:
    """``value`` with one thing in it replaced."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: _mutated(rng, value[key])}
    if isinstance(value, list) and value:
        k = rng.randrange(len(value))
        return [*value[:k], _mutated(rng, value[k]), *value[k + 1 :]]
    odd = [-1, 0, 1, 7, 2**31, 2**63, -(2**63), 1.5, True, None, "aten.exp.default", "x", [], {}, {"node": 99}]
    return rng.choice(odd)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_programs_are_refused_or_mean_the_same(seed: int) -> None:
    rng, workload = random.Random(seed), workload_of(normalised, torch.ones(8, 48))
    plain = json.loads(json.dumps(workload.source))
    refused = 0
    for _ in range(40):
        changed = _mutated(rng, plain)
        why = check_source(replace(workload, source=changed))  # never an exception
        refused += bool(why)
    assert refused > 10


def test_a_workload_under_another_s_fingerprint_is_not_taken(db: Path) -> None:
    one, other = workload_of(softmax, torch.ones(8, 64)), workload_of(normalised, torch.ones(8, 64))
    missed(db, one)
    execute(db, "UPDATE autotune_workloads SET spec = ?", (json.dumps(other.spec),))
    with Store.open(db) as store:
        assert store.get_workload(one.fingerprint) is None
        assert "does not match its SHA-256" in store.problems[-1]


def test_a_label_is_text_and_no_command_of_a_terminal(db: Path) -> None:
    missed(db, replace(workload_of(softmax, torch.ones(8, 64)), label="\x1b[2Jsoftmax"))
    with Store.open(db) as store:
        assert [w.label for w in store.find_workloads()] == [r"\x1b[2Jsoftmax"]


def test_a_workload_whose_graph_is_damaged_is_left_out(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = workload_of(softmax, torch.ones(8, 64))
    spec = json.loads(json.dumps(honest.spec))
    next(v for v in spec["values"] if v["op"] == "load")["offset"] = -(2**40)
    bad = Workload("fusion", spec, label="far away")
    missed(db, bad)
    assert main(["search", "--missed", "--device", "cpu", "--db", str(db)]) == 2
    told = capsys.readouterr().err
    assert "its graph is damaged" in told
    assert "Traceback" not in told


def test_operators_of_inductors_own_are_known_in_a_process_that_has_compiled_nothing() -> None:
    """As a measuring worker is, whose first workload is a loss."""
    code = "from autotune.compiler.regions import aten; print(aten._target('prims.prepare_softmax_online.default'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "prims.prepare_softmax_online.default", done.stderr


_FULL = {"op": "aten.full.default", "args": [[1 << 20], 1.0], "kwargs": {"dtype": {"dtype": "float32"}}}
_X = {"shape": [4], "strides": [1], "dtype": "float32", "device": "cpu"}
LONG: dict[str, tuple[list[object], list[object]]] = {
    "unbind": ([_X], [_FULL, {"op": "aten.unbind.int", "args": [{"node": 1}]}]),
    "unbind by name": ([_X], [_FULL, {"op": "aten.unbind.int", "args": [], "kwargs": {"self": {"node": 1}}}]),
    "split": ([_X], [_FULL, {"op": "aten.split.Tensor", "args": [{"node": 1}, 1]}]),
    "split by sizes": ([_X], [_FULL, {"op": "aten.split_with_sizes.default", "args": [{"node": 1}, [1] * (1 << 14)]}]),
    "many calls": ([_X], [{"op": "aten.exp.default", "args": [{"node": k}]} for k in range(200_000)]),
    "many inputs": ([_X] * 200_000, []),
    "many arguments": ([_X], [{"op": "aten.cat.default", "args": [[{"node": 0}] * 200_000]}]),
    "many dimensions": ([_X], [{**_FULL, "args": [[1] * 200_000, 1.0]}]),
}


@pytest.mark.parametrize("name", LONG)
def test_a_program_that_would_take_for_ever_is_refused_soon(name: str) -> None:
    inputs, calls = LONG[name]
    result = [{"node": len(inputs) + len(calls) - 1}]
    if "args" in str(calls[-1:]) and name.partition(" ")[0] in ("unbind", "split"):
        calls, result = [*calls, {"op": "getitem", "args": [result[0], 0]}], [{"node": len(inputs) + len(calls)}]
    program = {"format": 1, "inputs": inputs, "calls": calls, "result": result}
    why = check_source(Workload("fusion", {}, source=program))
    assert re.search(rf"more than ({MOST_TENSORS}|{1 << 15}) ", why), why


def test_a_graph_without_end_is_refused_soon() -> None:
    graph = {"extents": [1] * 200_000, "values": [], "inputs": [], "outputs": []}
    assert "more than 20000 extents" in check_graph(Workload("fusion", graph))
