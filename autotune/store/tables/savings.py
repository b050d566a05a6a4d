"""Counts of steps that ran stored kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from autotune.errors import printable
from autotune.store.connection.engine import Database
from autotune.store.damage import Damaged, integer, moment, number
from autotune.store.models import SavingRow
from autotune.store.records import Saving

_KEY = ("process", "graph", "device", "environment", "mode", "week")


class Savings(Database):
    """The store's counts of steps."""

    def put_savings(self, counted: Sequence[Saving]) -> None:
        """Store the counts of a process so far, all or none.

        A count replaces a smaller one of its key. So a repeated write counts no step twice, and concurrent processes
        lose no counts, since they share no rows.

        Raises:
            ValueError: a device or an environment was not stored before.
        """
        with self.referring("the device and the environment of a count", "it") as c:
            for one in counted:
                values = {**vars(one), "created": time.time()}
                upsert = self.upsert(SavingRow, values, _KEY, lambda new: new.steps > SavingRow.steps)
                c.execute(upsert.values(**values))

    def savings(self) -> list[Saving]:
        """All counts, by week."""
        query = sa.select(SavingRow.__table__).order_by(SavingRow.week, SavingRow.program, SavingRow.graph)
        return self.made(query, saving_from, lambda row: f"count of steps of graph {str(row.graph)[:12]}")


def saving_from(row: Any) -> Saving:
    """A count from its row; raises Damaged."""
    moment(row.created)
    try:
        time.strptime(row.week, "%Y-%m-%d")
    except (TypeError, ValueError):
        raise Damaged(f"its week is {ascii(row.week)[:40]}") from None
    return Saving(
        **{name: str(getattr(row, name)) for name in _KEY},
        program=printable(str(row.program)),
        steps=integer(row.steps, "number of steps", 0),
        alone_us=number(row.alone_us, "time saved"),
    )
