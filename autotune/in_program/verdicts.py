"""The outcome of a search in a program: verdicts on steps, the names of code for later processes, and counts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.device import environment, identify
from autotune.errors import first_line
from autotune.in_program.contest import Outcome
from autotune.in_program.searcher import notify
from autotune.runtime.deployment import Counted, deployment
from autotune.runtime.inductor.code import Code, scope_of
from autotune.runtime.inductor.verdict import Surveyed
from autotune.store.records import Verdict
from autotune.words import microseconds

if TYPE_CHECKING:
    from autotune.runtime.coverage import Row
    from autotune.store import Store
    from autotune.store.reading import Scope

log = logging.getLogger("autotune")


@dataclass(frozen=True)
class First:
    """The first compilation of a Dynamo graph.

    Attributes:
        before: its code; ``before_name`` is its name in torch's caches, ``after_name`` that of a second compilation.
        name: of :func:`autotune.runtime.inductor.code.name_of`.
        graphs: the post-grad graphs.
        apart: its separate counts.
        compile_s: seconds that it took, or takes without caches, less those that a CPU's code takes only once.
        reasons: why it runs no stored kernel, by the label of a region that was searched or not reached.
    """

    before: Any
    before_name: str
    after_name: str
    name: str
    device: str
    mode: str
    graphs: list[Surveyed]
    apart: Counted
    compile_s: float
    reasons: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def scope(self) -> Scope | None:
        """The part of the database that its look-ups depend on, from the first use on, which follows the search."""
        return scope_of(self.graphs)


class Decided:
    """Stores the outcome of a contest, for the graphs of all its frames.

    Attributes:
        compiled: the first compilation of each graph, and the counts of its second one.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.compiled: list[tuple[First, Counted]] = []
        self._record = record

    def __call__(self, outcome: Outcome) -> None:
        before, after = microseconds(outcome.before_us), microseconds(outcome.after_us)
        what = "they are used" if outcome.kept else "they are not used"
        if outcome.kept and outcome.ratio < 1.0:
            what = "they are used, since the difference is within the noise"
        notify(
            f"the step takes {after} with the new kernels, {before} without (median ratio {outcome.ratio:.3f}x): {what}"
        )
        record = {
            **self._record,
            "compile_us": round(outcome.before_us, 3),
            "all_us": round(outcome.after_us, 3),
            "autotune_us": round(outcome.after_us if outcome.kept else outcome.before_us, 3),
            "ratio": round(outcome.ratio, 4),
            "noise": round(outcome.noise, 4),
            "tries": 1,
            "cut": False,
        }
        compiled, self.compiled = self.compiled, []  # the code that lost is released
        if not outcome.kept:
            for one, second in compiled:
                _count_as_left(one.apart, second)
        try:
            note_verdicts([one for one, _ in compiled], record, after=outcome.kept, left=not outcome.kept)
        except Exception as error:
            deployment().warn_once(
                "verdict in the program", f"autotune: the step's verdict is not stored: {first_line(error)}"
            )


def _count_as_left(before: Counted, after: Counted) -> None:
    """Replace the counts of the code that lost by those of the code that runs."""
    from autotune.runtime.inductor.region_pass import LEFT  # a warm start imports this module alone

    won = before.counts["misses"] - after.counts["misses"]
    lost = {row.what: LEFT for row in after.rows if row.stored}
    after.counts = {**before.counts, "misses": before.counts["misses"] - won, "left": before.counts["left"] + won}
    after.rows = explained(before.rows, lost)


def note_verdicts(compiled: Sequence[First], record: Mapping[str, Any], *, after: bool, left: bool = False) -> None:
    """Store the verdicts on graphs, and the names of their code for the next process.

    Args:
        after: the code of the second compilation is kept.
        left: every workload is left to Inductor.
    """
    from autotune.store import Store

    count = sum(len(one.graphs) for one in compiled)
    with Store.open(None) as store:
        verdicts = []
        for one in compiled:
            for graph in (*one.graphs, Surveyed(one.name, one.mode, ((one.device, None),), frozenset())):
                for device in sorted({device for device, _ in graph.regions}):
                    own = {**record, "mode": graph.mode, "graphs": count, "numerics": numerics.read([device])}
                    every = {w.fingerprint for where, w in graph.regions if where == device and w is not None}
                    out = tuple(sorted(graph.left | every if left else graph.left))
                    where, here = _stored(store, device)
                    verdicts.append(Verdict(graph.fingerprint, where, here, graph.mode, out, own))
        store.put_verdicts(verdicts)
    note_code(compiled, float(record["budget_s"]), after=after)


def note_code(compiled: Sequence[First], budget_s: float, *, after: bool) -> None:
    """Store the names of code for the next process, if that is possible; arguments as of :func:`note_verdicts`."""
    try:
        for one in compiled:
            name = one.after_name if after else one.before_name
            code = Code.of(name, one.graphs, one.scope, compile_s=one.compile_s, budget_s=budget_s)
            code.write(one.name, one.mode)
    except Exception:
        log.debug("code that the next process compiles again", exc_info=True)


def _stored(store: Store, device: str) -> tuple[str, str]:
    return store.put_device(identify(device)), store.put_environment(environment(device))


def explained(rows: Sequence[Row], reasons: Mapping[str, str]) -> list[Row]:
    """Rows of the coverage, with other reasons for the rows that Inductor compiles, by label."""
    return [row if row.stored else replace(row, why=reasons.get(row.what, row.why)) for row in rows]
