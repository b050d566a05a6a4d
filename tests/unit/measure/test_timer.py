"""Timing on the CPU: right magnitudes, cold caches, budgets, rotation; mostly by a clock of our own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch

from autotune.measure import timer
from autotune.measure.outcome import Outcome, one_line, spread
from autotune.measure.policy import _OPERATIONAL, Policy, default_policy
from autotune.measure.timer import ColdCache, balanced, interleave, time_cpu
from autotune.task import Status
from autotune.workload import digest
from tests.support.clock import Clock


def busy(us: float) -> None:
    end = time.perf_counter_ns() + us * 1e3
    while time.perf_counter_ns() < end:
        pass


def test_latency_is_that_of_the_work(policy: Policy) -> None:
    samples = time_cpu(lambda: busy(300), policy, repeats=9)
    assert len(samples) == 9
    assert min(samples) >= 300  # other processes make them longer, by an unknown time


def test_latency_is_that_of_the_work_alone(policy: Policy, clock: Clock) -> None:
    assert time_cpu(lambda: clock.busy(300), policy, repeats=9) == [300.0] * 9


def test_tiny_work_is_called_several_times_a_sample(policy: Policy, clock: Clock) -> None:
    calls = 0

    def tiny() -> None:
        nonlocal calls
        calls += 1
        clock.busy(0.4)

    samples = time_cpu(tiny, replace(policy, warmup=2, min_sample_us=50.0), repeats=5)
    assert calls == 2 + 5 * 125
    assert samples == pytest.approx([0.4] * 5)


def test_budget_and_hopeless_candidates_end_early(policy: Policy, clock: Clock) -> None:
    def took(us: float) -> Callable[[], None]:
        return lambda: clock.busy(us)

    assert len(time_cpu(took(20_000), policy, repeats=1000, budget_s=0.09)) == 5
    assert len(time_cpu(took(20_000), policy, repeats=1000, budget_s=0.01)) == 3
    assert len(time_cpu(took(500), policy, repeats=1000, limit_us=100)) == 3


def test_cold_cache_is_rewritten_as_a_whole() -> None:
    cold = ColdCache(1 << 22, "cpu")
    cold.flush()
    cold.flush()
    assert cold._buffer is not None
    assert cold._buffer.numel() * 4 == 1 << 22
    assert bool((cold._buffer == 2).all())
    ColdCache(0, "cpu").flush()


def test_interleave_changes_the_order_and_pairs(policy: Policy, clock: Clock) -> None:
    order: list[str] = []
    told: list[str] = []

    def contender(name: str, us: float) -> object:
        return lambda: (order.append(name), clock.busy(us))

    fns = {"a": contender("a", 100), "b": contender("b", 900), "c": contender("c", 300)}
    samples = interleave(fns, replace(policy, warmup=1, final_rounds=6), "cpu", told.append)  # type: ignore[arg-type]
    assert told == ["a", "b", "c"]
    assert order[3:] == list("acbbaccbabcacababc")
    assert samples == {"a": [100.0] * 6, "b": [900.0] * 6, "c": [300.0] * 6}


def test_interleave_ends_with_its_time_but_has_five_rounds(policy: Policy, clock: Clock) -> None:
    for final_s, count in ((0.001, 5), (0.015, 8)):
        hurried = replace(policy, warmup=1, final_rounds=500, final_s=final_s)
        assert len(interleave({"a": lambda: clock.busy(2000)}, hurried, "cpu")["a"]) == count


def test_graphs_may_share_one_memory(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = iter(["first", "second", "third"])
    used: list[tuple[str, object]] = []

    def refused() -> float:
        used.append(("refused, called", None))
        return 5.0

    fns = {"a": lambda: 1.0, "plain": lambda: 2.0, "b": lambda: 3.0, "refused": refused, "c": lambda: 4.0}
    names = {id(fn): name for name, fn in fns.items()}

    def capture(fn: Callable[[], object], pool: object = None) -> Callable[[], object]:
        used.append((names[id(fn)], pool))
        return fn if fn is refused else lambda: 6.0

    monkeypatch.setattr(timer, "capture", capture)
    monkeypatch.setattr(timer, "_graph_pool", lambda: next(pools))
    monkeypatch.setattr(timer, "_wake", lambda cold, seconds: None)
    monkeypatch.setattr(timer, "_cold_cache", lambda policy, device: None)
    monkeypatch.setattr(timer, "_batch_cuda", lambda run, cold, repeats: [run()])
    hurried = replace(policy, warmup=0, final_rounds=1)
    samples = interleave(fns, hurried, "cuda:0", one_memory=True, plain={"plain"})  # type: ignore[arg-type]
    captured = [(name, pool) for name, pool in used if pool]
    assert captured == [("a", "first"), ("b", "first"), ("refused", "first"), ("c", "second")]
    assert samples["plain"] == [2.0]
    assert samples["a"] == samples["c"] == [6.0]
    used.clear()
    interleave({"a": fns["a"]}, hurried, "cuda:0")
    assert used == [("a", None)]


def test_a_contender_runs_before_its_own_sample(policy: Policy, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    ran: list[str] = []
    taken: list[int] = []

    def step(name: str, us: int) -> Callable[[], None]:
        def run() -> None:
            clock.busy(us)
            ran.append(name)

        return run

    def batch(run: Callable[[], None], cold: object, repeats: int) -> list[float]:
        taken.append(repeats)
        assert len(set(ran[-4:])) == 1, "the clock is what another contender left"
        return [float(k) for k in range(1, repeats + 1)]

    monkeypatch.setattr(timer, "capture", lambda fn, pool=None: fn)
    monkeypatch.setattr(timer, "_wake", lambda cold, seconds: None)
    monkeypatch.setattr(timer, "_cold_cache", lambda policy, device: None)
    monkeypatch.setattr(timer, "_batch_cuda", batch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    once = replace(policy, warmup=1, final_rounds=1)
    steps = {"a": step("a", 10_000), "b": step("b", 60_000)}
    assert interleave(steps, once, "cuda:0", lead_s=0.2) == {"a": [3.0], "b": [1.0]}
    assert (taken, len(ran)) == ([5, 1], 1 + 20 + 1 + 4)


def test_pinning_keeps_to_the_processors_allowed() -> None:
    code = (
        "import os, torch; before = os.sched_getaffinity(0)\n"
        "from autotune.measure.timer import pin_cpu\n"
        "n = pin_cpu(); after = os.sched_getaffinity(0)\n"
        "print(n == len(after) == torch.get_num_threads(), after <= before, len(after) > 1 or len(before) == 1)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True"] * 3


def test_pinning_obeys_the_number_of_threads() -> None:
    code = (
        "import torch; from autotune.measure.timer import pin_cpu\n"
        "cores = pin_cpu(1); one = torch.get_num_threads(); pin_cpu(999); most = torch.get_num_threads()\n"
        "print(one, most == cores == pin_cpu() == torch.get_num_threads())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["1", "True"]


def test_a_policy_of_fewer_threads_has_its_own_key() -> None:
    cpu, cuda = default_policy("cpu"), default_policy("cuda:0")
    one = cpu.under({"num_threads": 1})
    assert (one.threads, one.key != cpu.key, one.key != cpu.under({"num_threads": 2}).key) == (1, True, True)
    assert Policy.from_json(one.to_json()) == one
    assert cpu.under({}) == cpu
    assert cuda.under({"num_threads": 1}) == cuda
    older = {k: v for k, v in cpu.to_json().items() if k not in (*_OPERATIONAL, "threads")}
    assert cpu.key == digest(older), "keys that databases have stay"


def test_policy_key_covers_the_fields_that_change_measurements() -> None:
    cpu, cuda = default_policy("cpu"), default_policy("cuda:1")
    assert [cpu.within(seconds).quiet_s for seconds in (None, 1000.0, 30.0)] == [5.0, 5.0, 1.5]
    assert cpu.within(30.0).key == cpu.key
    assert cpu.key != cuda.key
    assert cuda.key == default_policy("cuda:0").key
    assert cpu.key != replace(cpu, screen_repeats=99).key
    assert cpu.key != replace(cpu, timeout_s=99).key
    assert cpu.key == replace(cpu, startup_s=99).key
    assert Policy.from_json({**cpu.to_json(), "unheard_of": 1}) == cpu


def test_outcome_statistics_and_round_trip() -> None:
    outcome = Outcome(Status.OK, (10.0, 12.0, 11.0, 30.0), 0.5)
    assert outcome.latency_us == 11.5
    assert outcome.noise == pytest.approx((16.5 - 10.75) / 11.5)
    assert Outcome.from_json(outcome.to_json()) == outcome
    assert spread([1.0]) == 0
    assert one_line("a\n  b" + "c" * 400, 20) == "a b" + "c" * 14 + "..."


def test_caches_are_swept_before_each_sample_and_not_timed(
    policy: Policy, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def flush(self: ColdCache) -> None:
        clock.busy(5_000)
        did.append("flush")

    monkeypatch.setattr(ColdCache, "flush", flush)
    policy = replace(policy, warmup=2, min_sample_us=0.0)
    samples = time_cpu(lambda: did.append("run"), policy, repeats=3)
    assert did == ["run"] * 2 + ["flush", "run"] * 3
    assert samples == [0.0] * 3


def test_where_a_gpus_caches_are_left_warm_it_is_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is enqueued next would begin while it is still being enqueued, and its time would say so."""
    spun: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append, raising=False)
    ColdCache(0, "cuda").flush()
    assert len(spun) == 1
    assert spun[0] > 0
    ColdCache(0, "cpu").flush()
    assert len(spun) == 1


@pytest.mark.parametrize("refused", [False, True])
def test_a_capture_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """With torch's names for it replaced by what they do to the current stream: a capture that is refused keeps its,
    and the device's generator."""
    now = ["the user's"]
    replays: list[str] = []
    states: list[str] = []

    class Generator:
        def clone_state(self) -> str:
            return "in no capture"

        def graphsafe_set_state(self, state: str) -> None:
            states.append(state)

    class Graph:
        def replay(self) -> None:
            replays.append(now[0])

    @contextmanager
    def stream(chosen: str) -> Iterator[None]:
        before, now[0] = now[0], chosen
        try:
            yield
        finally:
            now[0] = before

    @contextmanager
    def graph(_: Graph, pool: object, stream: str, capture_error_mode: str) -> Iterator[None]:
        before, now[0] = now[0], stream
        assert pool is None, "memory of its own, unless one is given"
        assert capture_error_mode == "thread_local", "other threads may go on"
        yield
        if refused:
            raise RuntimeError("operation failed due to a previous error during capture")
        now[0] = before

    for name, other in {
        "synchronize": lambda: None, "CUDAGraph": Graph, "current_device": lambda: 1, "stream": stream, "graph": graph,
        "current_stream": lambda: now[0], "Stream": lambda device: f"of {device}",
        "default_generators": (None, Generator()),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, other)
    timer._capture_stream.cache_clear()
    seen: list[str] = []
    run = timer.capture(lambda: seen.append(now[0]))
    timer._capture_stream.cache_clear()
    assert seen == (["of 1", "the user's"] if refused else ["of 1"])
    run()
    assert now == ["the user's"]
    assert replays == ([] if refused else ["the user's"] * 2)
    assert states == (["in no capture"] if refused else [])


@pytest.mark.parametrize("count", range(1, 10))
def test_each_has_every_place_and_follows_every_other_equally_often(count: int) -> None:
    rounds = list(islice(balanced(range(count)), count if count % 2 == 0 else 2 * count))
    assert all(sorted(order) == list(range(count)) for order in rounds)
    places = Counter((place, who) for order in rounds for place, who in enumerate(order))
    assert len(places) == count**2
    assert len(set(places.values())) == 1
    followed = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) <= 1


def test_orders_go_on_for_as_long_as_asked() -> None:
    orders = list(islice(balanced("abc"), 13))
    assert orders[12] == orders[6] == orders[0]
    assert list(islice(balanced([]), 2)) == [[], []]
