"""The ladder of a region's look-up, rung by rung: ``autotune lookup --explain``."""

from __future__ import annotations

from autotune.device import DeviceIdentity, Environment
from autotune.runtime.deployment import deployment
from autotune.runtime.matching.ladder import Level, Match, Outcome, Step, on_other_devices, on_this_device
from autotune.runtime.matching.match import exact_match, other_rows
from autotune.runtime.matching.packaged import from_package
from autotune.store.reading import Match as How
from autotune.store.reading import Reader
from autotune.workload import Workload


def explain(
    workload: Workload,
    found: Match,
    store: Reader | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
) -> tuple[Step, ...]:
    """Each rung of the ladder, from the top: what it has, and why that is or is not taken.

    Args:
        found: what ``match.match`` and ``packaged.from_package`` came to with the other arguments.

    Raises:
        UserError: the database failed.
    """
    last = Step("none", Outcome.TAKEN, "Inductor compiles a region without a schedule")
    packaged = Step("packaged", Outcome.NOT_ASKED)
    if found.level in (Level.PACKAGED, Level.NONE):
        _, packaged = from_package(workload, found, store, device, env, strict=strict)
    if found.level is not Level.NONE:
        last = Step("none", Outcome.NOT_ASKED)
    if store is None:
        return (Step("exact", Outcome.EMPTY, "there is no database"), packaged, last)
    rules = deployment().settings
    how: How = "strict" if strict else rules.environment
    if found.level is Level.EXACT:
        steps = [Step("exact", Outcome.TAKEN, "tuned for it on this device", found.differences)]
    else:
        _, why = exact_match(workload, store, device, env, how)
        steps = [on_this_device(workload, store, device, env, why)]
    if found.level is Level.EXACT:
        steps.append(Step("other_rows", Outcome.NOT_ASKED))
    elif found.level is Level.OTHER_ROWS and found.tuned is not None:
        why = f"tuned for {found.tuned.extent} rows, the nearest to {workload.extent} that fit"
        steps.append(Step("other_rows", Outcome.TAKEN, why, found.differences))
    else:
        _, refused = other_rows(workload, store, device, env, how, rules.rows)
        why = "".join(refused).removeprefix("; ")
        nothing = Step("other_rows", Outcome.EMPTY, "no other number of rows is tuned on this device")
        steps.append(Step("other_rows", Outcome.REFUSED, why) if refused else nothing)
    if found.level in (Level.EXACT, Level.OTHER_ROWS):
        steps.append(Step("other_device", Outcome.NOT_ASKED))
    else:
        taken = found.level is Level.OTHER_DEVICE
        steps.append(on_other_devices(workload, store, device, taken, rules.other_device))
    return (*steps, packaged, last)
