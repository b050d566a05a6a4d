"""In the place of the process that searches: stores the default kernel of every workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from autotune.store import Store
from autotune.store.records import Schedule
from autotune.tuner.result import Result
from autotune.workload import Workload
from tests.support.deployment import store_default


class Searches:
    """Replaces :class:`autotune.in_program.searcher.Searcher`, class and object.

    Attributes:
        labels: of the workloads of each search; ``fingerprints`` of all of them; ``seconds`` of each search.
        most: workloads that there is time for.
        during: called in each search.
        searched_s: seconds of the search during the first compilation.
        winner: of each workload; "" if none of its candidates works.
    """

    def __init__(self, most: int = 1000) -> None:
        self.labels: list[list[str]] = []
        self.fingerprints: list[str] = []
        self.seconds: list[float] = []
        self.most = most
        self.during: Callable[[], object] = lambda: None
        self.interrupted = False
        self.searched_s = 0.0
        self.winner = "autotune"
        self.device = ""

    def __call__(self, device: str, seconds: float, *, more: bool = False) -> Self:
        self.device = device
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def start(self) -> None:
        return None

    def add(self, graph: Any) -> None:
        return None

    def _edited(self, found: Schedule) -> Schedule:
        found = replace(found, key=replace(found.key, policy="stub"))
        return found if self.winner == "autotune" else replace(found, config=None, artifact=None)

    def end(self, counted: Sequence[tuple[Workload, int]], seconds: float, told: object) -> list[Result]:
        searched = [w for w, _ in counted]
        self.fingerprints += [w.fingerprint for w in searched]
        self.seconds.append(seconds)
        self.labels.append([w.label for w in searched[: self.most]])
        self.during()
        results = []
        with Store.open(None) as store:
            for w in searched[: self.most]:
                if self.winner:
                    store_default(store, w, self.device, edit=self._edited)
                measured = 0 if self.winner else 1
                results.append(
                    Result(w.fingerprint, w.label, w.kind, self.device, "stub", winner=self.winner, measured=measured)
                )
        if self.interrupted:
            raise KeyboardInterrupt
        return results
