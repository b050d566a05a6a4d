"""On a busy CPU torch's operators use the processors that are left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autotune.domains.fusion import bench as benches
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.program_spec import workloads_of
from autotune.measure import quiet


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def set_others(monkeypatch: pytest.MonkeyPatch, processors: float) -> None:
    monkeypatch.setattr(quiet, "_WINDOW_S", 0.0)
    monkeypatch.setattr(quiet.Meter, "others", lambda self: processors)


@pytest.mark.parametrize(("others", "threads"), [(0.0, 4), (0.4, 4), (0.9, 3), (2.0, 2), (4.0, 1), (30.0, 1)])
def test_threads_are_those_that_others_leave(monkeypatch: pytest.MonkeyPatch, others: float, threads: int) -> None:
    set_others(monkeypatch, others)
    with quiet.share_processors():
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 4
    with pytest.raises(ZeroDivisionError), quiet.share_processors():
        _ = 1 / 0
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("rows", "threads"), [(1024, 2), (4, 4)])
def test_a_large_oracle_shares_the_processors(monkeypatch: pytest.MonkeyPatch, rows: int, threads: int) -> None:
    set_others(monkeypatch, 2.0)
    seen: list[int] = []
    interpret = benches.interpret
    monkeypatch.setattr(benches, "interpret", lambda *a: seen.append(torch.get_num_threads()) or interpret(*a))
    ((work, _),) = workloads_of(torch.tanh, (torch.ones(rows, 1024),))
    bench = FusionBench(work, "cpu")
    for special in (False, True):
        bench._expectation(0, special).slack(bench.graph, 0)
    assert seen == [threads, threads]
    assert torch.get_num_threads() == 4
