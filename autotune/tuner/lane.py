"""Process of one device in a search on several: ``python -m autotune.tuner.lane``.

:mod:`autotune.tuner.dealing` drives the process. The first frame contains the run's shared state, and every
other frame a turn. The answers are the owner of the lane's claims (once), progress, the result of each turn, and user
errors as one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any, Protocol

from autotune import numerics
from autotune import task as tasks
from autotune.errors import UserError
from autotune.measure.child import serve
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool
from autotune.store.store import Store
from autotune.tuner.context import Context
from autotune.tuner.options import Budget, SearchOptions
from autotune.tuner.prefetch import Prefetcher
from autotune.tuner.study import tune
from autotune.tuner.threads import Lease
from autotune.workload import Workload


class Sender(Protocol):
    """Connection to the parent, such as :class:`autotune.measure.child.Link`."""

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None: ...


class Lane:
    """The lane's side of the protocol; its resources end with the parent's kill, as in every measuring process."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def handle(self, link: Sender, message: dict[str, Any], blob: bytes) -> None:
        """Answer a frame."""
        try:
            if "turn" in message:
                link.send({"result": self._turn(**message)})
            else:
                link.send(self.begin(link, message))
        except UserError as mistake:
            link.send({"mistake": str(mistake)})

    def begin(self, link: Sender, message: dict[str, Any]) -> dict[str, Any]:
        """Answer the first frame."""
        return {"owner": self._begin(link, **message)}

    def _begin(
        self,
        link: Sender,
        domains: dict[str, str],
        url: str,
        device: str,
        policy: dict[str, Any],
        processes: int,
        workloads: list[dict[str, Any]],
        granted: list[float | None],
        options: dict[str, Any],
        run: str,
    ) -> str:
        """Open the turns' shared state; return the owner of the claims.

        Args:
            processes: of the compile pool.
            granted: seconds of each workload.
            options: result of :meth:`SearchOptions.to_json`.
        """
        tasks.DOMAINS.update(domains)
        how, chosen = Policy.from_json(policy), SearchOptions(**options)
        numerics.restore(chosen.numerics or {})
        self._workloads, self._granted = [Workload.from_json(w) for w in workloads], granted
        self._context = context = Context(
            store=self._open.enter_context(Store.open(url, awaited=True)),
            device=device,
            policy=how,
            options=chosen,
            report=lambda state: link.send({"progress": asdict(state)}),
            run=run,
            _pool=self._pool(device, processes, how.build_s),
        )
        self._open.enter_context(closing(context))
        self._open.enter_context(context.interrupt)  # SIGINT was ignored until here
        self._open.enter_context(Lease(context.store, context.owner))
        prefetcher = Prefetcher(context, self._workloads, lambda i: chosen.budget(granted[i]))
        self._prefetcher = self._open.enter_context(prefetcher)
        return context.owner

    def _pool(self, device: str, processes: int, timeout_s: float) -> CompilePool:
        return CompilePool(processes, timeout_s=timeout_s)

    def _turn(self, turn: int, then: list[int], budget: dict[str, Any]) -> dict[str, Any]:
        """Search a workload, by its number.

        Args:
            then: numbers of the workloads that probably follow.
        """
        self._prefetcher.advance(turn, then)
        own, granted = Budget(**budget), self._granted[turn]
        if granted is not None and own.timeout is not None:
            granted = min(granted, 2 * own.timeout)  # a late turn has less time, and its effort records that
        return asdict(tune(self._context, self._workloads[turn], own, granted))


if __name__ == "__main__":
    serve(Lane().handle)
