"""A search during and between two compilations of one Dynamo graph.

The first compilation uses the database as it is; its code can run even if the search fails. The search
covers the regions that lack a schedule for this device. It begins with the first post-grad graph, in another process
(:mod:`autotune.in_program.searching`). The second compilation uses the new schedules. The program's
first steps select one of both codes (:mod:`autotune.in_program.contest`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autotune.device import identify
from autotune.errors import UserError, first_line
from autotune.in_program import searcher
from autotune.in_program.contest import Contest, DeviceTimer, Frame
from autotune.in_program.options import SHARE, is_enough, left_s, share_of, spending
from autotune.in_program.ranks import RankTurn, has_ranks, rank_turn
from autotune.in_program.searcher import ProgressLine, Searcher, notify, to_search
from autotune.in_program.searching import COMMAND
from autotune.in_program.traced import Traced, copied
from autotune.in_program.verdicts import Decided, First, explained, note_code, note_verdicts
from autotune.runtime.deployment import Counted, deployment
from autotune.runtime.inductor.code import device_of, is_forgotten, name_of, new_name, stored_code
from autotune.runtime.inductor.verdict import Lacking, Surveyed, stored_verdict, surveying
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.tuner.result import Result
    from autotune.workload import Workload

log = logging.getLogger("autotune")

LEAST_S = 5.0
"""Minimum seconds for a search after the first compilation."""
_LEAST = 5 / 9
"""Part of its share that a search gets even if the second compilation then ends after the budget: half of the budget,
if no other graph follows. Its time during the first compilation counts."""
_AGAIN = 0.45
"""The second compilation's share of the first one's time without tracing: it finds most kernels in caches."""
_ONCE = 0.6
"""Share of a CPU's first time for loading code that no second compilation needs. Loading took 87 of 150 s for a GPT of
six layers, and 17 of 32 s in the second compilation."""
_UNREACHED = "not searched within the budget"
_NONE_WORKS = "none of its candidates works"
_SMALL = "too small to matter for the step"
_MISSES = _UNREACHED, _NONE_WORKS
_LEFT = (*_MISSES, _SMALL)
"""Reasons that hold for the second code too."""
_TOO_LATE = "its kernel was found after this code was compiled"
LARGE = 64
"""Nodes of a Dynamo graph whose search starts before the graph is traced; a smaller one may lack nothing."""

Compile = Callable[..., Any]
"""Compiles a graph for inputs; ``bare`` and ``code`` as of :func:`autotune.runtime.backend.compile_graph`."""

_contest: Contest | None = None


def compiled(
    gm: fx.GraphModule, inputs: Sequence[Any], seconds: float, mode: str, compile_once: Compile, *, more: bool = False
) -> Any:
    """Compile a graph, search the regions that lack a schedule, and compile it again.

    A failure warns once and leaves the code of the first compilation. A graph that a search with such a budget has
    finished is compiled once. A graph that was compiled and not searched comes from torch's caches.

    Args:
        seconds: the budget of the process; of its rest, this graph's search takes what :func:`granted_s` returns.
        mode: of :func:`autotune.runtime.inductor.verdict.base_mode`.
        more: further graphs of the same function follow.

    Raises:
        KeyboardInterrupt: the user interrupted the search. Its results are stored.
    """
    device, share = device_of(inputs), share_of(more, inputs)
    if device is None or not can_store():
        return compile_once(gm, inputs)
    name = name_of(gm, device)
    if is_enough(_searched_s(name, device, mode), seconds):
        return compile_decided(gm, inputs, compile_once, name, device, mode)
    with Searcher(device, share * left_s(seconds), more=more) as searcher, rank_turn(name) as turn:
        if not turn.searches:
            turn.wait()
            return compile_once(gm, inputs)
        spent = left_s(seconds) < LEAST_S
        if not spent and len(gm.graph.nodes) >= LARGE:
            _free_memory()
            searcher.start()
        traced = Traced()
        take = _ignore if spent else searcher.add
        one = compile_surveyed(gm, inputs, compile_once, take, traced, name, device, mode, alone=turn.alone)
        again_s = _AGAIN * max(0.0, one.compile_s - traced.seconds)
        granted = 0.0 if spent else granted_s(left_s(seconds), again_s, searcher.searched_s, share)
        with spending():
            try:
                found = _searched(one, granted, again_s, seconds, turn, searcher)
                turn.end()  # compiling graphs with collectives needs the other ranks
                if found and turn.alone and again_s > seconds:
                    notify(
                        f"compiling again would take about {again_s:.0f} s, more than the budget of {seconds:.0f} s:"
                        " this process runs without the new kernels, the next one with them"
                    )
                    found = False
                if not found and turn.alone:
                    deployment().count_again(one.apart)
                    return one.before
                with deployment().counting_apart() as second:
                    after = compile_again(gm, inputs, compile_once, traced, one.after_name)
                second.rows = explained(second.rows, {what: why for what, why in one.reasons.items() if why in _LEFT})
                deployment().count_again(second)
                note_code([one], seconds, after=True)
            except Exception as error:
                why = str(error) if isinstance(error, UserError) else first_line(error)
                deployment().warn_once("search in the program", f"autotune: the search in the program failed: {why}")
                log.debug("the search that failed", exc_info=True)
                deployment().count_again(one.apart)
                return one.before
    if not turn.alone:
        return after
    return Frame(one.before, after, join_contest(one, second, {"budget_s": seconds, "command": COMMAND}))


def compile_surveyed(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    compile_once: Compile,
    take: Callable[[Surveyed], object],
    traced: Traced,
    name: str,
    device: str,
    mode: str,
    *,
    alone: bool,
) -> First:
    """Compile a copy of a graph, and hand each graph of it to ``take`` before Inductor lowers it.

    Its misses are not recorded, since other code may replace it. Code that an earlier process stored is not compiled.

    Args:
        traced: keeps the graphs for :func:`compile_again`.
        name, device, mode: as of :class:`First`.
        alone: no other rank compiles this graph. Otherwise every region is left to Inductor.
    """
    begin = time.monotonic()
    code = stored_code(name, mode) if alone else None
    surveyed: list[Surveyed] = []

    def both(graph: Surveyed) -> None:
        surveyed.append(graph)
        if code is None:
            take(graph)

    if code is not None:
        code.load()
        for graph in code.graphs:
            take(graph)
    before_name = code.name if code is not None else new_name()
    counting = deployment().counting_apart()
    with surveying(both), deployment().unrecorded(), counting as apart, traced.recording():
        before = compile_once(copied(gm), inputs, bare=not alone, code=before_name)
    compile_s = time.monotonic() - begin - (_ONCE * traced.loading_s if device == "cpu" else 0.0)
    if code is not None and not surveyed:
        surveyed, compile_s = [*code.graphs], code.compile_s
    return First(before, before_name, new_name(), name, device, mode, surveyed, apart, compile_s)


def compile_decided(
    gm: fx.GraphModule, inputs: Sequence[Any], compile_once: Compile, name: str, device: str, mode: str
) -> Any:
    """Compile a graph with a verdict, whose code is not in torch's caches or has other schedules than the database.

    Later processes find the code by its name. The key of code without a name depends on the whole database, so every
    schedule of another graph would have it compiled again.

    Args:
        name, device, mode: as of :class:`First`.
    """
    if is_forgotten(name, mode) or has_ranks():
        return compile_once(gm, inputs)
    surveyed: list[Surveyed] = []
    code, begin = new_name(), time.monotonic()
    with surveying(surveyed.append):
        made = compile_once(gm, inputs, code=code)
    if surveyed:
        counted, seconds = Counted({}, []), time.monotonic() - begin
        one = First(made, code, "", name, device, mode, surveyed, counted, seconds)
        note_code([one], _searched_s(name, device, mode), after=False)
    return made


def compile_again(gm: fx.GraphModule, inputs: Sequence[Any], compile_once: Compile, traced: Traced, code: str) -> Any:
    """Compile a graph with the new schedules, from the graphs that the first compilation traced.

    Args:
        code: its name in torch's caches.
    """
    with traced.replaying():
        return compile_once(gm, inputs, code=code)


def _ignore(graph: Surveyed) -> None:
    """Take a graph that is not searched."""


def granted_s(left: float, again_s: float, searched_s: float = 0.0, share: float = SHARE) -> float:
    """The seconds of a graph's search after its first compilation.

    Args:
        left: seconds of the budget.
        again_s: estimate for the second compilation, which is a part of the budget.
        searched_s: seconds of the search during the first compilation.
        share: of :func:`share_of`.
    """
    return max(share * left - again_s, _LEAST * share * left - searched_s, LEAST_S)


def _searched_s(name: str, device: str, mode: str) -> float:
    """The budget of a search of the graph that has ended; 0 without one."""
    try:
        found = stored_verdict(name, device, mode)
    except Exception as error:
        deployment().warn_once("verdict", f"autotune: verdicts on steps are not looked up: {first_line(error)}")
        return 0.0
    budget = 0.0 if found is None else found.record.get("budget_s", 0.0)
    return budget if isinstance(budget, (int, float)) else 0.0


def _searched(one: First, granted: float, again_s: float, budget_s: float, turn: RankTurn, searcher: Searcher) -> bool:
    """Search the graphs' regions without schedules for ``granted`` seconds; True if it found kernels.

    Args:
        granted: 0 if other graphs have spent the budget. Later processes with such a budget do not search this graph.
        again_s: estimate for the second compilation.
        budget_s: of the process.

    Raises:
        KeyboardInterrupt: the user interrupted the search.
    """
    missed, small = to_search(one.graphs, last=True)
    found: list[Result] = []
    if missed and granted:
        if granted + again_s > left_s(budget_s) and again_s <= budget_s:
            notify(f"compiling again takes about {again_s:.0f} s after the search, more than the budget leaves")
        found = _search(missed, granted, turn, searcher, len(small))
    failed = {result.workload for result in found if is_decided(result) and not result.winner}
    for device, regions in missed.items():
        whys = [(workload, _why_inductor(workload, device, failed)) for workload, _ in regions]
        deployment().record_misses([(w, why) for w, why in whys if why in _MISSES], device)
        for workload, why in whys:
            if one.reasons.get(workload.label) != _UNREACHED:  # of several regions with one label
                one.reasons[workload.label] = why
    for graph in one.graphs:
        for _, w in graph.regions:
            if w is not None and w.fingerprint in small:
                one.reasons.setdefault(w.label, _SMALL)
    one.apart.rows = explained(one.apart.rows, one.reasons)
    won = any(result.winner == "autotune" for result in found)
    complete = bool(one.graphs) and not missed  # ranks that do not agree look at no graph
    spent = bool(missed) and not granted
    if spent:
        deployment().warn_once(
            "spent budget",
            f"autotune: {plural(sum(map(len, missed.values())), 'region')} of a later graph not reached, since its"
            f" budget of {budget_s:.0f} s is spent: give more seconds, or run `autotune search --missed`",
        )
    searched_s = budget_s if complete or spent or any(map(is_decided, found)) else 0.0  # else the next process searches
    record = {"budget_s": searched_s, "tries": 0, "cut": True, "command": COMMAND}
    note_verdicts([one], record, after=won or not turn.alone)
    return won


def _why_inductor(workload: Workload, device: str, failed: Container[str]) -> str:
    """The reason why the code of the first compilation runs no stored kernel for a region, after the search.

    Args:
        failed: workloads of which no candidate works.
    """
    from autotune.runtime.inductor.region_pass import NO_FASTER  # a warm start imports this module alone
    from autotune.runtime.match import look_up

    found = look_up(workload, device, packaged=False)
    if found.schedule is not None and found.level.own:
        return NO_FASTER if found.schedule.config is None else _TOO_LATE
    return _NONE_WORKS if workload.fingerprint in failed else _UNREACHED


def is_decided(result: Result) -> bool:
    """True if a search would not find more in another process: it has a winner, or none of its candidates works."""
    return bool(result.winner) or (result.measured > 0 and result.best is None)


def can_store() -> bool:
    """True if results can be stored in the database that deployment reads."""
    store = deployment().store()
    if store is not None and store.readonly:
        deployment().warn_once(
            "search needs a database",
            f"autotune: no search: {store.name} cannot be written: it is a snapshot or a replica, or a file without"
            " permission or space",
        )
        return False
    return store is not None or not deployment().is_shut()  # the look-up has warned of a database that is unusable


def _search(missed: Lacking, seconds: float, turn: RankTurn, searcher: Searcher, small: int) -> list[Result]:
    """Search for ``seconds`` more; ``small`` regions are left out."""
    from autotune.store.connection.urls import parse_url, show_url

    turn.begin(seconds)
    where = show_url(parse_url(None))
    results: list[Result] = []
    begin, count = time.monotonic(), sum(map(len, missed.values()))
    _free_memory()
    for device, counted in missed.items():
        left = seconds * len(counted) / count
        of = f"{plural(len(counted), 'region')} on {identify(device).label}"
        notify(f"searching {of} for at most {left:.0f} s, stored in {where}")
        own = searcher if device == searcher.device else Searcher(device, left)
        with own, ProgressLine([(workload.label, n) for workload, n in counted], left) as report:
            results += own.end(counted, left, report)
    won = len({result.workload for result in results if result.winner == "autotune"})
    unreached = count - len({result.workload for result in results})
    more = f"; {unreached} not reached: give more seconds, or run `autotune search --missed`" if unreached > 0 else ""
    more += f"; {small} more left to Inductor: {_SMALL}" if small else ""
    have = "has" if count == 1 else "have"
    notify(f"{won} of {plural(count, 'region')} {have} a kernel now, after {time.monotonic() - begin:.0f} s{more}")
    return results


def _free_memory() -> None:
    """Free the GPU memory that torch keeps unused, for the measuring process."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def join_contest(one: First, second: Counted, record: Mapping[str, Any]) -> Contest:
    """The running contest of this process, or a new one; its outcome is the verdict on the graphs of ``one``.

    Args:
        second: counts of its second compilation. If that loses, they become those of the first one.
        record: fields of these verdicts, in addition to the times.
    """
    global _contest
    if _contest is None or not _contest.running:
        _contest = Contest(DeviceTimer(one.device), Decided(record))
    ended = _contest.ended
    assert isinstance(ended, Decided)
    ended.compiled.append((one, second))
    return _contest


def reset() -> None:
    """Cancel the running contest, whose code ``torch._dynamo.reset()`` has dropped."""
    global _contest
    searcher.reset()
    contest, _contest = _contest, None
    if contest is not None:
        contest.cancel()
