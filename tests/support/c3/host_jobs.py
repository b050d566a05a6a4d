"""Jobs of the ranks of tests: called on every rank by ``Ranks.call``, answers in JSON."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from typing import Any

import torch

from autotune.domains.c3.collectives.host import HostCopy
from autotune.domains.c3.collectives.nccl import Collective, Spec, open_collective
from autotune.domains.c3.group import Group
from autotune.domains.c3.measuring.bench import Call, open_bench, poison
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.domains.c3.strategy import HostStrategy
from autotune.task import Artifact

NOTHING = Artifact("cpu", ())


def calls(group: Group, cases: list[dict[str, Any]], repeats: int) -> list[str]:
    """Each case as a collective, called ``repeats`` times back to back by ranks that dawdle; what was wrong."""
    wrong = []
    for case in cases:
        spec = Spec(case["op"], case["numel"], case["dtype"])
        strategy = HostStrategy(engine=case["engine"], copies=case["copies"])
        collective = open_collective(spec, group, strategy.config())
        wrong += _calls(group, spec, collective, repeats, random.Random(group.rank))
        collective.close()
    return wrong


def _calls(group: Group, spec: Spec, collective: Collective, repeats: int, rng: random.Random) -> list[str]:
    """Back to back: what a call made is checked only after the next one, so that nothing holds the ranks together."""
    wrong: list[str] = []
    before: tuple[Call, torch.Tensor] | None = None
    for number in range(repeats):
        call = Call(spec, group.ranks, 7, number)
        poison(collective.output)
        call.fill(collective.input, group.rank)
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        collective.enqueue()
        after = (call, collective.output.clone())
        for seen, output in filter(None, (before, after if number == repeats - 1 else None)):
            verdict = seen.check(output, group.rank)
            if not verdict.ok:
                wrong.append(f"{spec} {collective.engine}: {verdict.detail}")
        before = after
    return wrong


def in_flight(group: Group, engine: str) -> list[str]:
    """Two different collectives in two threads, which do not begin in the same order on all ranks."""
    specs = [Spec("all_gather", 3000 * group.ranks, "f32"), Spec("all_reduce", 4001, "bf16")]
    opened = [(spec, open_collective(spec, group, HostStrategy(engine=engine).config())) for spec in specs]
    wrong: list[str] = []

    def work(spec: Spec, collective: Collective, seed: int) -> None:
        wrong.extend(_calls(group, spec, collective, 30, random.Random(seed)))

    threads = [threading.Thread(target=work, args=(*o, group.rank * 2 + k)) for k, o in enumerate(opened)]
    for thread in threads if group.rank % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    for _, collective in opened:
        collective.close()
    return wrong


def absent(group: Group) -> str:
    """Rank 0 does not come: what the others say."""
    collective = HostCopy(Spec("all_gather", group.ranks * 100, "f32"), group, HostStrategy(engine="copy"))
    collective.timeout_s = 0.1
    said = ""
    if group.rank:
        try:
            collective.enqueue()
        except TimeoutError as error:
            said = str(error)
    group.barrier()
    collective.close()
    return said


def traces(group: Group) -> list[str]:
    """Files that shared memory has left while it is in use."""
    collective = HostCopy(Spec("all_reduce", 1000, "f32"), group, HostStrategy(engine="copy"))
    places = [p for p in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(p)]
    # A search's folder, where its ranks exchange addresses, has another name.
    found = [name for place in places for name in os.listdir(place) if name.startswith("autotune-c3-")]
    group.barrier()
    collective.close()
    return found


def sound(group: Group, data: dict[str, Any], configs: list[dict[str, Any]]) -> list[list[Any]]:
    """The verdict on each configuration as it is, and the engine that ran."""
    bench = open_bench(Scenario.from_json(data), group)
    out: list[list[Any]] = []
    for config in configs:
        run = bench.load(config, NOTHING)
        verdict = bench.verify(run, 3)
        assert run.collective is not None
        out.append([verdict.ok, verdict.detail, run.collective.engine])
        run.close()
    bench.close()
    return out


def caught(group: Group, op: str) -> dict[str, list[Any]]:
    """The verdict on each way to be wrong, of which rank 1 is guilty, or every rank."""
    scenario = Scenario(Gemm(128, 32, 32, "f32"), op, 4 * 960 * group.ranks, group.ranks, "f32")
    bench = open_bench(scenario, group)
    config = HostStrategy(order="comm_first", engine="copy", copies=4).config()
    out = {}
    for fault in (skipped_piece, stale, rotated, missing_rank, skipped_gemm, one_element):
        run = bench.load(config, NOTHING)
        fault(run.collective, run.computation, group)
        verdict = bench.verify(run, 5)
        out[fault.__name__] = [verdict.ok, verdict.detail]
        vars(run.computation).pop("run", None)  # the bench's, which the next fault has to find whole
        run.close()
    bench.close()
    return out


def skipped_piece(collective: Any, computation: Any, group: Group) -> None:
    """Rank 1's piece 2 never arrives, though every rank reports it."""
    if group.rank == 1:
        collective._pieces[2] = (0, 0)


def stale(collective: Any, computation: Any, group: Group) -> None:
    """From the second call on, the result of the first."""
    enqueue, kept = collective.enqueue, []

    def wrapped(stream: Any = None) -> None:
        enqueue(stream)
        group.barrier()
        kept.append(collective.output.clone())
        collective.output.copy_(kept[min(1, len(kept) - 1)])  # the first was run to prepare

    collective.enqueue = wrapped


def rotated(collective: Any, computation: Any, group: Group) -> None:
    """Shares in the wrong order; of a reduce_scatter the wrong share."""
    enqueue = collective.enqueue

    def wrapped(stream: Any = None) -> None:
        enqueue(stream)
        group.barrier()
        collective.output.copy_(collective.output.roll(-(-collective.output.numel() // group.ranks)))

    collective.enqueue = wrapped


def missing_rank(collective: Any, computation: Any, group: Group) -> None:
    """The last rank's input counts for nothing."""
    enqueue = collective.enqueue

    def wrapped(stream: Any = None) -> None:
        if group.rank == group.ranks - 1:
            collective.input.zero_()
        enqueue(stream)

    collective.enqueue = wrapped


def skipped_gemm(collective: Any, computation: Any, group: Group) -> None:
    computation.run = lambda: None


def one_element(collective: Any, computation: Any, group: Group) -> None:
    """The last element is off by one."""
    enqueue = collective.enqueue

    def wrapped(stream: Any = None) -> None:
        enqueue(stream)
        group.barrier()
        collective.output[-1] += 1

    collective.enqueue = wrapped


def alone(group: Group, data: dict[str, Any]) -> dict[str, Any]:
    """Baselines and references, each run twice, and the bytes."""
    bench = open_bench(Scenario.from_json(data), group)
    ran = []
    for name, make in {**bench.baselines(), **bench.references()}.items():
        run = make()
        run()
        run()
        ran.append([name, run.collective is not None, run.computation is not None])
    bench.close()
    closed = not bench._open
    return {"ran": ran, "bytes": bench.bytes_moved(), "closed": closed}
