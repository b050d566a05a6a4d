"""Ranks on which something is wrong, for tests of the checks: called on every rank by ``Ranks.call``."""

from __future__ import annotations

import os
import signal
from typing import Any

from autotune.domains.c3 import ready as c3_ready
from autotune.domains.c3.group import Group
from autotune.domains.c3.measuring import bench
from autotune.errors import Unsupported
from tests.gpu.c3.check import strategies
from tests.gpu.c3.check_deploy import deployed
from tests.support.c3.host_jobs import one_element


def faulty(group: Group, **arguments: Any) -> list[str]:
    """Strategies of engine "copy" by several threads do not work, or kill rank 1, or are off by one."""
    real: Any = bench.open_collective  # type: ignore[attr-defined]

    def opened(spec: Any, group: Group, config: Any, artifact: Any = None) -> Any:
        made = real(spec, group, config, artifact)
        if config["engine"] == "copy" and config["copies"] > 1:
            if config["order"] == "sequential":
                raise Unsupported("no such threads")
            if config["order"] == "gemm_first" and group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            one_element(made, None, group)
        return made

    bench.open_collective = opened  # type: ignore[attr-defined]
    try:
        return strategies(group, **arguments)
    finally:
        bench.open_collective = real  # type: ignore[attr-defined]


def deployed_faulty(group: Group, **arguments: Any) -> list[str]:
    """Engine "copy" is off by one at deploy time."""
    real: Any = c3_ready.open_collective  # type: ignore[attr-defined]

    def opened(spec: Any, group: Group, config: Any, artifact: Any = None) -> Any:
        made = real(spec, group, config, artifact)
        if config["engine"] == "copy":
            one_element(made, None, group)
        return made

    c3_ready.open_collective = opened  # type: ignore[attr-defined]
    try:
        return deployed(group, **arguments)
    finally:
        c3_ready.open_collective = real  # type: ignore[attr-defined]
