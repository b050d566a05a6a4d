"""Verdicts: which regions of a graph are left to Inductor, found by timing its whole step."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from autotune.device import Environment
from autotune.store.connection.engine import Database
from autotune.store.health.damage import Damaged, moment
from autotune.store.health.step_record import left_of, step_record
from autotune.store.models import EnvironmentRow, VerdictRow
from autotune.store.reading import Match
from autotune.store.records import Verdict

KEY = ("graph", "device", "environment", "mode")
_V = VerdictRow


class Verdicts(Database):
    """The store's verdicts."""

    def put_verdicts(self, verdicts: list[Verdict]) -> None:
        """Store the verdicts of a step's graphs, all or none; each replaces an earlier one of its key.

        Raises:
            ValueError: a device or an environment was not put before; a record could not be read back.
        """
        for v in verdicts:
            try:
                left_of(list(v.left)), step_record(dict(v.record))
            except Damaged as e:
                raise ValueError(f"the verdict on graph {v.graph[:12]} cannot be stored: {e}") from e
        try:
            with self.writing() as c:
                for v in verdicts:
                    key = {name: getattr(v, name) for name in KEY}
                    news = {"left": list(v.left), "record": dict(v.record), "created": v.when or time.time()}
                    insert = self.insert(_V).values(**key, **news)
                    c.execute(insert.on_conflict_do_update(index_elements=list(KEY), set_=news))
        except IntegrityError as e:
            raise ValueError("put the device and the environment of a verdict before it") from e

    def get_verdict(
        self, graph: str, device: str, environment: Environment, mode: str, *, match: Match = "loose"
    ) -> Verdict | None:
        """The verdict to obey, or None.

        Equal software is preferred, then equal minor versions of torch and CUDA, then what was decided last. A damaged
        one is passed over with a warning.

        Args:
            graph, device: fingerprints.
            match: how the software must match, as in ``get_schedule``.
        """
        near = EnvironmentRow.loose == environment.loose
        equal = sa.case((_V.environment == environment.strict, 0), (near, 1), else_=2)
        query = sa.select(*_V.__table__.c).join(EnvironmentRow, EnvironmentRow.fingerprint == _V.environment)
        query = query.where(_V.graph == graph, _V.device == device, _V.mode == mode)
        if match != "ignore":
            query = query.where(near if match == "loose" else _V.environment == environment.strict)
        query = query.order_by(equal, _V.created.desc())
        with self.reading() as c:
            rows = c.execute(query).all()
        return next(self.sound(rows, verdict_from, _name), None)

    def verdicts(self) -> list[Verdict]:
        """All that is stored, newest first; those of one step after each other."""
        with self.reading() as c:
            rows = c.execute(sa.select(*_V.__table__.c).order_by(_V.created.desc(), _V.mode, _V.graph)).all()
        return list(self.sound(rows, verdict_from, _name))


def _name(row: Any) -> str:
    return f"verdict on graph {str(row.graph)[:12]} (search its program again)"


def verdict_from(row: Any) -> Verdict:
    """A verdict from its row; raises Damaged."""
    return Verdict(
        str(row.graph), str(row.device), str(row.environment), str(row.mode), left_of(row.left),
        step_record(row.record), moment(row.created),
    )  # fmt: skip
