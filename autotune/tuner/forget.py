"""Forgetting failures: in the measurements, and in the studies that were told of them."""

from __future__ import annotations

from collections.abc import Collection

import optuna

from autotune.store.health.forget import FAILURES, forget_failures
from autotune.store.store import Store
from autotune.task import Status
from autotune.tuner.context import key_words
from autotune.tuner.proposals.history import open_storage


def forget(
    store: Store, statuses: Collection[Status] = FAILURES, *, workload: str = "", reason: str = ""
) -> tuple[int, int]:
    """Forget failures, so that the next search tries their candidates again; see
    :func:`autotune.store.health.forget.forget_failures`.

    A study that knows of one is deleted, since its sampler would keep away from it: the next search teaches a new one
    all that is stored.

    Returns:
        How many measurements were forgotten, and of how many workloads.
    """
    found = forget_failures(store, statuses, workload=workload, reason=reason)
    if found:
        words = {key_words(key) for key in found}
        storage = open_storage(store.optuna_url)
        try:
            for name in optuna.get_all_study_names(storage):
                if any(word in name for word in words):
                    optuna.delete_study(study_name=name, storage=storage)
        finally:
            storage.engine.dispose()
    return sum(found.values()), len({key.workload for key in found})
